"""Answers that build on each other: caches that users hold, recipes of their own, chats."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, StaticCache, pipeline

from tests.support.exact import prompt
from tests.support.models import load_plain
from tests.support.sweeps import few
from tests.support.users import CACHE, WAYS, Pair, load_by

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, tiny: TinyCheckpoint) -> Pair:
    """One pair for all tests of a way: what one leaves behind shows in the next."""
    folder = tiny("llama")
    return Pair(load_plain(folder), load_by(request.param, folder))


# -- recipes of one's own ------------------------------------------------------------------------


def own_decoding(
    model: Any, input_ids: torch.Tensor, generation_config: Any, lookback: int, **model_kwargs: Any
) -> torch.Tensor:
    """A decoding loop as users write it for `custom_generate`."""
    cache = DynamicCache()
    step = input_ids
    while input_ids.shape[1] < generation_config.max_length:
        logits = model(step, use_cache=True, **{CACHE: cache}).logits[:, -1]
        logits.scatter_(1, input_ids[:, -lookback:], -torch.inf)
        step = logits.argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, step], dim=1)
    return input_ids


def test_custom_generate(pair: Pair) -> None:
    """A callable of the user's that loops over forward by itself."""
    answers = pair.check(
        lambda model: model.generate(prompt(2), custom_generate=own_decoding, lookback=5, **GREEDY)
    )
    assert answers.shape == (2, 25)


def test_custom_generate_in_a_folder(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe that is loaded from a folder, as those on the hub are."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    recipe = tmp_path / "recipe" / "custom_generate" / "generate.py"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "def generate(model, inputs, **kwargs):\n"
        "    first = model.generate(inputs, max_new_tokens=4, do_sample=False)\n"
        "    return model.generate(first.flip(1), max_new_tokens=4, do_sample=False)\n"
    )
    pair.check(
        lambda model: model.generate(
            prompt(), custom_generate=str(tmp_path / "recipe"), trust_remote_code=True
        )
    )


# -- caches that users hold ----------------------------------------------------------------------


def test_a_cache_over_turns(pair: Pair) -> None:
    """One cache for a whole talk: each turn computes only what is new."""

    def talk(model: Any) -> list[Any]:
        cache: Any = DynamicCache(config=model.config)
        ids, answers = prompt(1, 7), []
        for turn in range(3):
            ids = model.generate(ids, **(GREEDY | {CACHE: cache}))
            answers.append(ids)
            assert cache.get_seq_length() == ids.shape[1] - 1
            ids = torch.cat([ids, prompt(1, 4, seed=turn)], dim=1)
        return [*answers, *(layer.keys for layer in cache.layers)]

    pair.check(talk)


def test_cropping_a_cache(pair: Pair) -> None:
    """An answer is taken back, and another one begins where the prompt ended."""

    def use(model: Any) -> list[torch.Tensor]:
        cache, ids = DynamicCache(config=model.config), prompt(1, 9)
        first = model.generate(ids, **(GREEDY | {CACHE: cache}))
        cache.crop(8 - cache.get_seq_length())
        again = model.generate(ids, **(GREEDY | {CACHE: cache}))
        cache.crop(8 - cache.get_seq_length())
        with torch.no_grad():
            other = model(prompt(1, 3, seed=5), **{CACHE: cache}).logits
        return [first, again, other]

    first, again, _ = pair.check(use)
    assert torch.equal(first, again)


def test_a_prefix_that_is_copied(pair: Pair) -> None:
    """A system prompt is computed once; its cache is copied for every question."""

    def use(model: Any) -> list[torch.Tensor]:
        prefix = prompt(1, 8)
        with torch.no_grad():
            cache = model(prefix, use_cache=True, **{CACHE: DynamicCache()})[CACHE]
        return [
            model.generate(
                torch.cat([prefix, prompt(1, 5, seed=seed)], dim=1),
                **{CACHE: copy.deepcopy(cache)},
                **GREEDY,
            )
            for seed in range(3)
        ]

    pair.check(use)


def test_a_static_cache_of_ones_own(pair: Pair) -> None:
    """Made once by the user and reset between questions."""

    def use(model: Any) -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=48)
        answers = []
        for seed in range(2):
            answers.append(model.generate(prompt(2, 9, seed=seed), **(GREEDY | {CACHE: cache})))
            cache.reset()
        return answers

    pair.check(use)


def test_a_generation_config_of_ones_own(pair: Pair) -> None:
    """Passed, or written into the model's; put back afterwards."""

    def use(model: Any) -> list[Any]:
        config = GenerationConfig(max_new_tokens=6, do_sample=True, top_k=5, pad_token_id=0)
        passed = model.generate(prompt(2), generation_config=config, eos_token_id=None)
        before = copy.deepcopy(model.generation_config)
        try:
            model.generation_config.max_new_tokens = 4
            model.generation_config.eos_token_id = [2, 40, 41]
            edited = model.generate(prompt(2), do_sample=False)
        finally:
            model.generation_config = before
        return [passed, edited, model.generation_config.to_dict()]

    passed, edited, _ = pair.check(use)
    assert passed.shape == (2, 25)
    assert edited.shape[1] <= 23


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
def test_a_cache_for_accelerators(pair: Pair, name: str) -> None:
    """Without one it is refused by torch or works; the same on both, and harmless."""
    options = GREEDY | {"cache_implementation": name}
    plain = _outcome(lambda: pair.plain.generate(prompt(), **options))
    assert _outcome(lambda: pair.model.generate(prompt(), **options)) == plain
    pair.check(lambda model: model.generate(prompt(), **GREEDY))


def _outcome(work: Callable[[], torch.Tensor]) -> object:
    try:
        return work().tolist()
    except Exception as error:
        return type(error), str(error)


# -- a real model and its chat template ------------------------------------------------------------


@pytest.fixture(scope="module")
def real_plain(smollm2_bf16: Path) -> Any:
    return load_plain(smollm2_bf16)


@pytest.fixture(scope="module", params=few(WAYS, [WAYS[0]]))
def real(request: pytest.FixtureRequest, smollm2_bf16: Path, real_plain: Any) -> Pair:
    return Pair(real_plain, load_by(request.param, smollm2_bf16, ranges=False))


@pytest.fixture(scope="module")
def tokenizer(smollm2_bf16: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_bf16, padding_side="left")


def asked(tokenizer: Any, chat: list[dict[str, str]]) -> Any:
    return tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def test_a_chat_of_three_turns(real: Pair, tokenizer: Any) -> None:
    """The template is applied to the whole talk each time, and one cache serves all of it."""
    questions = ["What is the capital of France?", "And of Italy?", "Thanks!"]

    def talk(model: Any) -> list[dict[str, str]]:
        cache, chat = DynamicCache(config=model.config), []
        for question in questions:
            chat.append({"role": "user", "content": question})
            inputs = asked(tokenizer, chat)
            answer = model.generate(**inputs, **(GREEDY | {CACHE: cache, "max_new_tokens": 3}))
            written = answer[0, inputs["input_ids"].shape[1] :]
            text = tokenizer.decode(written, skip_special_tokens=True)
            chat.append({"role": "assistant", "content": text})
        return chat

    assert all(message["content"] for message in real.check(talk))


@pytest.mark.parametrize("real", ["wrap"], indirect=True)
def test_stop_strings(real: Pair, tokenizer: Any) -> None:
    """Sampling that ends at a word which the user names."""
    inputs = asked(tokenizer, [{"role": "user", "content": "Count from one to ten."}])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "top_k": 3}

    def use(model: Any) -> str:
        answer = model.generate(**inputs, stop_strings=[","], tokenizer=tokenizer, **options)
        return str(tokenizer.decode(answer[0]))

    assert real.check(use).count(",") <= 1 + tokenizer.decode(inputs["input_ids"][0]).count(",")


@pytest.mark.parametrize("real", ["streaming"], indirect=True)
def test_a_pipeline_of_chats(real: Pair, tokenizer: Any) -> None:
    """Chats of different lengths in one batch, padded on the left."""
    chats = [
        [{"role": "user", "content": "Hi!"}],
        [
            {"role": "system", "content": "You answer with one word."},
            {"role": "user", "content": "What is the capital of France?"},
        ],
    ]

    def answers(model: Any) -> list[str]:
        generator: Any = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        written = generator(chats, batch_size=2, **(GREEDY | {"max_new_tokens": 3}))
        return [chat["generated_text"][-1]["content"] for (chat,) in written]

    first, second = real.check(answers)
    assert first != second
