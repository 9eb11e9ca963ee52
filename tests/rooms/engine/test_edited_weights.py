"""Weights that users change on a streamed model: as on a plain one, or refused by name."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
from typing import TYPE_CHECKING, Any
from unittest import mock

import accelerate  # type: ignore[import-untyped]
import pytest
import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from safetensors.torch import save_model
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM

import pipeload
from pipeload import UnsupportedOperationError
from tests.support.models import load_plain, tiny_config
from tests.support.streaming import (
    IDS,
    load_streamed,
    logits,
    session_of,
    smallest_limit,
    steady_floor,
)
from tests.support.sweeps import few
from tests.support.users import small_ranges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

ENOUGH = 10_000_000


def values(weight: torch.Tensor) -> torch.Tensor:
    """Others of the same kind."""
    made = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)) * 0.1
    return made.to(weight.dtype)


def without_grad(change: Callable[[nn.Parameter], object]) -> Callable[[Any], object]:
    def edit(module: Any) -> object:
        with torch.no_grad():
            return change(module.weight)

    return edit


def set_row(weight: nn.Parameter) -> None:
    weight[IDS[0, 3]] = 0.1


def give(module: Any) -> None:
    module.weight.data = values(module.weight)


def cast(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.float64).mul(0.5).to(parameter.dtype)


def apply(module: Any) -> None:
    def start(inner: Any) -> None:
        nn.init.zeros_(inner.weight)

    module.apply(start)


def vector(module: Any) -> None:
    made = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(made * 0.5, module.parameters())


def load(module: Any) -> None:
    module.load_state_dict({"weight": values(module.weight)})


def replace(module: Any) -> None:
    module.weight = nn.Parameter(values(module.weight))


EDITS: dict[str, Callable[[Any], object]] = {
    "copy_": without_grad(lambda weight: weight.copy_(values(weight))),
    "mul_": without_grad(lambda weight: weight.mul_(0.5)),
    "row": without_grad(set_row),
    "view": without_grad(lambda weight: weight.view(-1)[5:100].zero_()),
    "foreach": without_grad(lambda weight: torch._foreach_mul_([weight], 0.5)),
    "data in place": lambda module: module.weight.data.mul_(0.5),
    "detached in place": lambda module: module.weight.detach().add_(0.1),
    "data": give,
    "cast": cast,
    "init": lambda module: nn.init.zeros_(module.weight),
    "apply": apply,
    "vector": vector,
    "load_state_dict": load,
    "new parameter": replace,
    "prune": lambda module: prune.l1_unstructured(module, "weight", 0.5),
    "weight_norm": parametrizations.weight_norm,
}
TARGETS: dict[str, Callable[[Any], Any]] = {
    "block": lambda model: model.model.layers[2].mlp.down_proj,
    "table": lambda model: model.get_input_embeddings(),
    "head": lambda model: model.lm_head,
}
# How many passes there were, bytes to spare, and whether matrices are cut in ranges of rows.
STATES = {
    "fresh": (0, 0, False),
    "cut": (2, 0, True),
    "partly resident": (3, 600_000, False),
    "partly resident, cut": (3, 300_000, True),
    "resident": (3, ENOUGH, False),
}


@functools.cache
def edited(folder: Path, target: str, name: str) -> torch.Tensor:
    """What a plain model gives then; as it is with an empty name."""
    plain = load_plain(folder)
    if name:
        EDITS[name](TARGETS[target](plain))
    return logits(plain)


def refusal(edit: Callable[[Any], object], module: Any) -> str | None:
    """What it says."""
    try:
        edit(module)
    except UnsupportedOperationError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "target"),
    few(
        itertools.product(STATES, TARGETS),
        [
            ("fresh", "head"),
            ("cut", "block"),
            ("cut", "head"),
            ("partly resident", "block"),
            ("partly resident", "table"),
            ("partly resident, cut", "head"),
            ("resident", "block"),
            ("resident", "table"),
        ],
    ),
)
def test_edited(state: str, target: str, tiny: TinyCheckpoint) -> None:
    """What is not refused stays, also when memory is short, and after it, and when it is removed.

    The head is tied to the table.
    """
    folder = tiny("qwen3")
    passes, spare, cut = STATES[state]
    model: Any = None
    kept = set()
    for name, edit in EDITS.items():
        wanted = edited(folder, target, name)
        if model is None:
            with small_ranges() if cut else contextlib.nullcontext():
                model = load_streamed(folder, spare=spare, modules=cut)
            for _ in range(passes):
                logits(model)
        refused = refusal(edit, TARGETS[target](model))
        if refused is not None:
            assert re.search(r"weight '\S+\.weight'.*handle\.remove\(\)", refused), name
            assert torch.equal(logits(model), edited(folder, target, "")), name
            continue
        kept.add(name)
        assert torch.equal(logits(model), wanted), name
        for _ in range(2 if len(kept) % 3 else 0):
            session_of(model).governor.shrink(0)
            assert torch.equal(logits(model), wanted), name
        if name not in {"prune", "weight_norm"}:
            model.pipeload.remove()
            assert torch.equal(logits(model), wanted), name
            assert type(TARGETS[target](model).weight) is nn.Parameter
        model = None
    if state.startswith("resident") and target != "table":
        assert kept >= EDITS.keys() - {"load_state_dict"}


@pytest.mark.parametrize("method", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("spare", [0, ENOUGH])
def test_quantised(method: str, spare: int, tmp_path: Path) -> None:
    """As on a plain one, or refused by name: at once, or before it would be lost."""
    config: Any = tiny_config("llama", hidden_size=192, intermediate_size=256)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    folder = pipeload.quantize(tmp_path / "source", tmp_path / "made", method=method)
    plain = load_plain(folder)
    unedited = logits(plain)
    with torch.no_grad():
        plain.model.layers[2].mlp.down_proj.weight.zero_()
    wanted = logits(plain)
    model = load_streamed(folder, spare=spare)
    logits(model)
    target = model.model.layers[2].mlp.down_proj
    refused = refusal(without_grad(lambda weight: weight.zero_()), target)
    assert torch.equal(logits(model), wanted if refused is None else unedited)
    if refused is None:
        governor = session_of(model).governor
        governor.plan = governor._plan_for(governor.wants[0])
        refused = refusal(logits, model)
        assert refused is not None or torch.equal(logits(model), wanted)
    assert refused is None or "'model.layers.2.mlp.down_proj.weight'" in refused


def test_changed_inside_a_pass(tiny: TinyCheckpoint) -> None:
    """What a hook writes to a weight that streams by is gone after it: the next pass says so."""
    model = load_streamed(tiny("llama"))
    logits(model)

    def change(module: Any, _args: object) -> None:
        module.weight.mul_(0.5)

    hook = model.model.layers[1].mlp.up_proj.register_forward_pre_hook(change)
    logits(model)
    hook.remove()
    for _ in range(2):
        with pytest.raises(UnsupportedOperationError, match=r"layers\.1\.mlp\.up_proj.*not kept"):
            logits(model)
        # As where remove() finds the files to be others.
        changed = mock.patch.object(
            session_of(model).files, "check_unchanged", side_effect=KeyError
        )
        with changed, pytest.raises(KeyError):
            model.pipeload.remove()
    model.pipeload.remove()
    assert torch.equal(logits(model), logits(load_plain(tiny("llama"))))


def test_a_saved_parameter_is_a_plain_one(tiny: TinyCheckpoint) -> None:
    """It is read where pipeload is not."""
    model = load_streamed(tiny("llama"), spare=ENOUGH)
    logits(model)
    weight, file = model.model.layers[2].mlp.up_proj.weight, io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, weight)
    assert vars(loaded).keys() == vars(load_plain(tiny("llama")).lm_head.weight).keys()


def test_copied_onto_itself(tiny: TinyCheckpoint) -> None:
    """Nothing is changed by that, and the weight goes on being evicted."""
    model = load_streamed(tiny("llama"), spare=ENOUGH)
    logits(model)
    weight = model.model.layers[2].mlp.up_proj.weight
    with torch.no_grad():
        weight.copy_(weight.clone())
    session_of(model).governor.shrink(0)
    with pytest.raises(UnsupportedOperationError, match=r"sum\(\) needs"):
        weight.sum()


def test_what_changes_nothing(tiny: TinyCheckpoint) -> None:
    """Casts to what it is, and itself as its data; what is asked of it is answered."""
    model = load_streamed(tiny("llama"))
    wanted = logits(load_plain(tiny("llama")))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32).cpu()
        assert parameter.float() is parameter.to("cpu") is parameter or not parameter.is_leaf
        assert torch.zeros(2).to(parameter).dtype == torch.zeros_like(parameter).dtype
    assert "on disk" in f"{model.lm_head.weight}"
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(512) is model.get_input_embeddings()
    assert model.resize_token_embeddings(510, pad_to_multiple_of=64) is model.model.embed_tokens
    assert torch.equal(logits(model), wanted)


CALLS: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "dispatch_model": (
        r"accelerate's dispatch_model\(\)",
        lambda model, path: accelerate.dispatch_model(
            model, {"model": "cpu", "lm_head": "disk"}, offload_dir=path
        ),
    ),
    "cpu_offload": (r"accelerate's cpu_offload\(\)", lambda m, _: accelerate.cpu_offload(m, "cpu")),
    "disk_offload": (
        r"accelerate's disk_offload\(\)",
        lambda model, path: accelerate.disk_offload(model, path, "cpu"),
    ),
    "torch.save": (
        r"torch's save\(\)",
        lambda model, _: torch.save(model.state_dict(), io.BytesIO()),
    ),
    "save_model": (
        r"safetensors's save_model\(\)",
        lambda model, path: save_model(model, str(path / "file")),
    ),
    "assigned": (r"assigning \.data", lambda model, _: give(model.lm_head)),
    "item": (r"__getitem__\(\)", lambda model, _: model.lm_head.weight[0]),
    "by name": (
        r"linear\(\)",
        lambda model, _: functional.linear(input=torch.ones(64), weight=model.lm_head.weight),
    ),
    "shown, by name": (
        r"linear\(\)",
        lambda model, _: functional.linear(
            input=torch.ones(64), weight=model.state_dict()["lm_head.weight"]
        ),
    ),
    "gradient": (r"\.T", lambda model, _: model.lm_head.weight.T),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_call_is_named(name: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """That of the library which was called, not what it came down to."""
    model = load_streamed(tiny("llama"))
    logits(model)
    wanted, call = CALLS[name]
    with pytest.raises(UnsupportedOperationError, match=wanted + r" needs the weight '\S*weight'"):
        call(model, tmp_path)


def test_aligned(tiny: TinyCheckpoint) -> None:
    """Nobody gets NaN for a weight."""
    model = load_streamed(tiny("llama"))
    layer = model.model.layers[3].mlp.down_proj
    for device in (None, "cpu"):
        with (
            align_module_device(layer, device),
            pytest.raises(UnsupportedOperationError, match=r"layers\.3\.mlp\.down_proj\.weight"),
        ):
            layer.weight.clone()
    assert torch.equal(logits(model), logits(load_plain(tiny("llama"))))


def test_a_part_of_another(tiny: TinyCheckpoint) -> None:
    """Its weights that are on disk are no adapter's that came out as NaN."""
    model, part = (load_streamed(tiny("llama"), spare=spare) for spare in (0, 10))
    model.helper = part.model
    assert torch.equal(logits(model), logits(load_plain(tiny("llama"))))


def test_loaded_again(tiny: TinyCheckpoint) -> None:
    """A cell that is run again, with a limit for one model: the error says what holds it."""
    folder = tiny("llama")
    with steady_floor():
        limit = smallest_limit(folder, dtype="auto")
        first = pipeload.from_pretrained(folder, dtype="auto", memory_limit=limit)
        with pytest.raises(
            pipeload.MemoryLimitError, match=r"LlamaForCausalLM of '.*' \(.*B\)\. .*del model"
        ):
            pipeload.from_pretrained(folder, dtype="auto", memory_limit=limit)
    assert not first.pipeload.removed
