"""Which modules of the library's hold experts that can be had one by one, and how they come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Llama4TextConfig,
    SwitchTransformersConfig,
)
from transformers.core_model_loading import (
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from pipeload.checkpoint.headers import TensorEntry
from pipeload.hf.expert_modules import experts_in_turn, find_experts, named_past
from pipeload.hf.recipes import Recipe
from pipeload.weights.layout import Slices
from pipeload_hooks import MARKS
from tests.support.experts import EXPERTS, LAYERS, ROUTED, moe_config


def _model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_found(kind: str) -> None:
    model = _model(moe_config(kind))
    found = list(find_experts(model))
    assert [one.name for one in found] == [f"model.layers.{n}.mlp.experts" for n in range(LAYERS)]
    assert all(one.parameters == ("gate_up_proj", "down_proj") for one in found)
    assert all((one.routed, one.sweeps) == (ROUTED, True) for one in found)
    assert not named_past(model, found[0])


def test_one_by_one_in_a_loop() -> None:
    config = moe_config()
    config._experts_implementation = "eager"
    assert not any(one.sweeps for one in find_experts(_model(config)))


def test_not_found() -> None:
    """What multiplies with all experts, is replaced, or has one expert."""
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = Llama4TextConfig(
        **small, num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=64,
        num_local_experts=4, intermediate_size_mlp=32, moe_layers=[0],
    )  # fmt: skip
    assert not list(find_experts(_model(config)))
    model = _model(moe_config())
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda *_: None
    assert len(list(find_experts(model))) == LAYERS - 1
    del experts.forward
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    first = next(find_experts(model))
    assert first.parameters == ("gate_up_proj",)  # the other one is the user's to make


def _switch() -> Any:
    config: Any = SwitchTransformersConfig(
        d_model=32, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=3, vocab_size=64,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    with torch.device("meta"):
        return AutoModelForSeq2SeqLM.from_config(config)


def test_each_a_module_of_its_own() -> None:
    """By the names of their matrices; one with weights beside them is left alone."""
    model = _switch()
    found = list(find_experts(model))
    assert len(found) == 2
    assert found[0].own == tuple(
        (f"expert_{n}.wi.weight", f"expert_{n}.wo.weight") for n in range(3)
    )
    assert (found[0].told_by, found[0].routed, found[0].sweeps) == (MARKS, 1, False)
    found[0].module.add_module("shared", nn.Linear(2, 2))
    assert len(list(find_experts(model))) == 1


def test_all_of_them_run_without_values() -> None:
    """Inside the block alone: which rows are sent to which is nothing that a trial knows."""
    model = _switch()
    ids = torch.ones(1, 2, dtype=torch.int64, device="meta")
    ran: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleDict):
            for expert in module.values():
                expert.register_forward_hook(lambda expert, *_: ran.append(expert))
    with experts_in_turn(model):
        model(input_ids=ids, decoder_input_ids=ids)
    assert len(ran) == len(set(ran)) == 2 * 3
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(input_ids=ids, decoder_input_ids=ids)


def test_what_needs_no_operation() -> None:
    """An operation that looks at the shapes must not see a slice, whose shape is another."""
    recipe = Recipe(WeightConverter(["s"], "w", operations=[Transpose(1, 2, check_dims=True)]))
    recipe.sources.append((_entry("s", EXPERTS, 6, 4), "s"))
    assert recipe.slices("w", (EXPERTS, 6, 4)) == Slices(made=False)


def _entry(name: str, *shape: int) -> TensorEntry:
    return TensorEntry(name, Path("x"), "F32", shape, 0, 4 * int(torch.Size(shape).numel()))


def _stacked(
    operations: list[Any], *parts: tuple[str, tuple[int, ...]], makes: str | list[str] = "w"
) -> Recipe:
    patterns = [f"*.{part}" for part, _ in parts]
    converter = WeightConverter(patterns, makes, operations=operations)
    recipe = Recipe(converter)
    for expert in range(EXPERTS):
        for (part, shape), pattern in zip(parts, patterns, strict=True):
            recipe.sources.append((_entry(f"{expert}.{part}", *shape), pattern))
    return recipe


def test_stacks_side_by_side() -> None:
    operations = [MergeModulelist(dim=0), Concatenate(dim=1)]
    recipe = _stacked(operations, ("gate", (6, 4)), ("up", (6, 4)))
    pairs = tuple((2 * expert, 2 * expert + 1) for expert in range(EXPERTS))
    assert recipe.slices("w", (EXPERTS, 12, 4)) == Slices(pairs, made=False)
    assert recipe.slices("w", (EXPERTS, 4, 12)) is None
    assert recipe.slices("w", (EXPERTS - 1, 12, 4)) is None
    single = _stacked([MergeModulelist(dim=0)], ("down", (6, 4)))
    found = single.slices("w", (EXPERTS, 6, 4))
    assert found is not None
    assert found.sources[3] == (3,)
    beside = _stacked([MergeModulelist(dim=0), Concatenate(dim=2)], ("a", (6, 4)), ("b", (6, 4)))
    assert beside.slices("w", (EXPERTS, 6, 8)) is None


def test_shares_of_several_weights() -> None:
    """The first half of the experts are one weight's, the others the next one's."""
    operation = ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)
    made = ["text.w", "vision.w"]
    recipe = _stacked([operation], ("gate", (6, 4)), ("up", (6, 4)), makes=made)
    half = EXPERTS // 2
    pairs = tuple((2 * expert, 2 * expert + 1) for expert in range(EXPERTS))
    assert recipe.slices("a.text.w", (half, 12, 4)) == Slices(pairs[:half], made=False)
    assert recipe.slices("a.vision.w", (half, 12, 4)) == Slices(pairs[half:], made=False)
    assert recipe.slices("a.sound.w", (half, 12, 4)) is None
    assert recipe.slices("a.text.w", (EXPERTS, 12, 4)) is None
    assert recipe.slices("a.text.w", (half, 4, 12)) is None


@pytest.mark.parametrize(
    ("operation", "stored", "alone"),
    [
        (Transpose(1, 2), (EXPERTS, 4, 6), True),
        (Transpose(1, 2, check_dims=True), (EXPERTS, 4, 6), True),
        (Transpose(0, 1), (EXPERTS, 4, 6), False),
        (Interleave(dim=1), (EXPERTS, 6, 4), True),
        (Interleave(dim=0), (EXPERTS, 6, 4), False),
    ],
)
def test_each_matrix_by_itself(operation: Any, stored: tuple[int, ...], alone: bool) -> None:
    """Where that is so, slices made alone are those of the whole."""
    recipe = Recipe(WeightConverter(["s"], "w", operations=[operation]))
    recipe.sources.append((_entry("s", *stored), "s"))
    found = recipe.slices("w", (EXPERTS, 6, 4))
    assert (found is not None) == alone
    if found is None or operation.__dict__.get("check_dims"):
        return
    assert found.made
    values = torch.randn(stored)
    whole, slices = torch.empty(EXPERTS, 6, 4), torch.empty(EXPERTS, 6, 4)
    recipe.fill("w", None, {"s": values}, {"w": whole})
    for expert in range(EXPERTS):
        part = slices[expert : expert + 1]
        recipe.fill("w", None, {"s": values[expert : expert + 1]}, {"w": part}, alone=True)
    assert torch.equal(whole, slices)
