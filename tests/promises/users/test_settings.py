"""What users set around a model, hang on it and read from it: the same as on a plain one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import set_seed

from tests.support.exact import assert_same, prompt
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.sweeps import few
from tests.support.users import CACHE, Pair, load_by, scores

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


# -- modes of torch -------------------------------------------------------------------------------


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast in fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "device": lambda: torch.device("cpu"),
    "one attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("name", MODES)
def test_modes(pair: Pair, name: str) -> None:
    """From the first pass on, and nothing of it is left when it has ended."""

    def inside(model: Any) -> list[Any]:
        with MODES[name]():
            found = scores(model)
        return [*found, *scores(model)]

    first, *_ = pair.check(inside)
    assert (first.dtype == torch.float32) == ("autocast" not in name)


def test_generation_under_autocast(pair: Pair) -> None:
    """As scripts for training do it between two epochs."""

    def use(model: Any) -> list[Any]:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = model.generate(prompt(2), **GREEDY)
        return [found, model.generate(prompt(2), **GREEDY)]

    pair.check(use)


def test_deterministic_algorithms(pair: Pair) -> None:
    """Also fills memory that was not written with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        pair.check(scores)
    finally:
        torch.use_deterministic_algorithms(False)
    pair.check(scores)


@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float64], [torch.bfloat16]))
def test_default_dtype(way: str, tiny: TinyCheckpoint, dtype: torch.dtype) -> None:
    """Another one while the model is loaded, while it runs, or both."""
    folder = tiny("llama", "bf16")
    before = torch.get_default_dtype()

    def with_default(work: Callable[[], Any]) -> Any:
        torch.set_default_dtype(dtype)
        try:
            return work()
        finally:
            torch.set_default_dtype(before)

    outside = Pair(load_plain(folder), load_by(way, folder))
    inside = with_default(lambda: Pair(load_plain(folder), load_by(way, folder)))
    with_default(lambda: outside.check(scores))
    with_default(lambda: inside.check(scores))
    inside.check(scores)


def test_inference_tensors(pair: Pair) -> None:
    """A cache and embeddings made in inference mode go on outside it; decorated functions."""

    @torch.inference_mode()
    def begin(model: Any) -> Any:
        embedded = model.get_input_embeddings()(prompt(2))
        return model(inputs_embeds=embedded, use_cache=True, output_hidden_states=True)

    def mixed(model: Any) -> list[torch.Tensor]:
        first = begin(model)
        with torch.no_grad():
            states = model.model(inputs_embeds=first.hidden_states[0].clone()).last_hidden_state
        with torch.inference_mode():
            second = model(prompt(2, 2, seed=1), **{CACHE: first[CACHE]}).logits.clone()
        return [*(state.clone() for state in first.hidden_states), states, second]

    pair.check(mixed)


def test_flops(pair: Pair) -> None:
    """A mode that counts what is computed counts the same."""

    def counted(model: Any) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(prompt(2))
        return int(counter.get_total_flops())

    assert pair.check(counted) > 0


def test_random_numbers_are_the_users(way: str, tiny: TinyCheckpoint) -> None:
    """A script that sets the seed first and then loads: nothing draws from its generator."""
    folder = tiny("llama")

    def script(load: Callable[[], Any]) -> list[torch.Tensor]:
        set_seed(5)
        model = load()
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True}
        return [model.generate(prompt(2), **options), torch.rand(3)]

    # wrap's model has run before.
    wanted = script(lambda: load_plain(folder))
    assert_same(script(lambda: load_by(way, folder)), wanted)


# -- the model's own settings ---------------------------------------------------------------------


def test_dropout(way: str, tmp_path: Path) -> None:
    """`train()` with dropout, without recording: equal from the same seed; eval() ends it."""
    folder = save_random(tiny_config("llama", attention_dropout=0.3), tmp_path, "fp32", seed=4)
    pair = Pair(load_plain(folder), load_by(way, folder))
    evaluated = pair.check(scores)
    for model in (pair.plain, pair.model):
        model.train()
    trained = [pair.check(scores, seed=seed)[0] for seed in (1, 2)]
    for model in (pair.plain, pair.model):
        model.eval()
    assert not torch.equal(*trained)
    assert_same(pair.check(scores), evaluated)


CONFIGS: dict[str, dict[str, Any]] = {
    "no cache": {"use_cache": False},
    "hidden states": {"output_hidden_states": True},
    "attentions": {"output_attentions": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_edited_config(way: str, tiny: TinyCheckpoint, name: str) -> None:
    """Written into `model.config` between two passes."""
    folder = tiny("llama")
    options: dict[str, Any] = {"attn_implementation": "eager"}
    pair = Pair(load_plain(folder, **options), load_by(way, folder, **options))

    def edited(model: Any) -> list[Any]:
        before = copy.deepcopy(model.config)
        with torch.no_grad():
            model(prompt())
            for key, value in CONFIGS[name].items():
                setattr(model.config, key, value)
            output = model(prompt(2))
        for key in CONFIGS[name]:
            setattr(model.config, key, getattr(before, key))
        return [value for value in output.values() if isinstance(value, (torch.Tensor, tuple))]

    pair.check(edited)


def test_another_attention(pair: Pair) -> None:
    """Chosen after loading."""

    def both(model: Any) -> list[torch.Tensor]:
        found = []
        for name in ("eager", "sdpa", "eager"):
            model.set_attn_implementation(name)
            found += scores(model)
        return found

    pair.check(both)
