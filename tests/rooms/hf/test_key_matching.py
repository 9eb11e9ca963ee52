"""Which stored tensors make which weight."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from pipeload.checkpoint.headers import Checkpoint, TensorEntry
from pipeload.formats.format import Unpacking
from pipeload.hf.key_matching import match_keys, weights_made
from pipeload.hf.recipes import Recipe

FILE = Path("a.safetensors")
JOINED = WeightConverter(
    ["e.*.up", "e.*.gate"], "both", operations=[MergeModulelist(dim=0), Concatenate(dim=1)]
)


class Model:
    """As the library asks: a state dictionary and the prefix of what is inside."""

    base_model_prefix = "model"

    def __init__(self, *names: str) -> None:
        self.names = names

    def state_dict(self) -> dict[str, Any]:
        return dict.fromkeys(self.names, torch.empty(0))


def matched(
    model: Model, stored: list[str], *mapping: WeightRenaming | WeightConverter, **more: Any
) -> dict[str, Recipe]:
    dtype = more.pop("dtype", "F32")
    entries = {name: TensorEntry(name, FILE, dtype, (2, 2), 0, 16) for name in stored}
    checkpoint = Checkpoint((FILE,), entries)
    return match_keys(model, checkpoint, mapping, more.get("unpacking"))  # type: ignore[arg-type]


def names(recipes: dict[str, Recipe]) -> dict[str, list[str]]:
    return {name: [entry.name for entry, _ in r.sources] for name, r in recipes.items()}


def test_the_same_name() -> None:
    """And nothing for what the model has not."""
    found = matched(Model("model.a", "head"), ["model.a", "head", "rotary.inv_freq"])
    assert names(found) == {"head": ["head"], "model.a": ["model.a"]}
    assert all(recipe.converter is None for recipe in found.values())


def test_renamed() -> None:
    """By the library's patterns; a prefix that the checkpoint lacks, or has too much, is its."""
    found = matched(
        Model("model.layer.weight", "model.b"),
        ["layer.gamma", "model.b"],
        WeightRenaming("gamma", "weight"),
    )
    assert names(found) == {"model.b": ["model.b"], "model.layer.weight": ["layer.gamma"]}
    assert names(matched(Model("a"), ["model.a"])) == {"a": ["model.a"]}


def test_a_name_that_is_there_already() -> None:
    """A renaming for another version's checkpoints does not lead away from the model's own."""
    found = matched(Model("x.gamma"), ["x.gamma"], WeightRenaming("gamma", "weight"))
    assert names(found) == {"x.gamma": ["x.gamma"]}


def test_many_make_one() -> None:
    """In the order of their numbers, with the pattern that each has matched."""
    stored = [f"l.e.{number}.{part}" for number in range(11) for part in ("gate", "up")]
    (recipe,) = matched(Model("l.both"), sorted(stored), JOINED).values()
    assert recipe.converter is JOINED
    assert [int(entry.name.split(".")[2]) for entry, _ in recipe.sources][::2] == [*range(11)]
    assert {pattern for _, pattern in recipe.sources} == {"e.*.up", "e.*.gate"}


def test_one_that_only_unpacks() -> None:
    """What came unquantised needs none, where the library knows how: its type is the stored one."""
    operation: Any = SimpleNamespace(hf_quantizer=object(), reverse_op=None)
    converter = WeightConverter("weight", "weight", operations=[operation])
    (recipe,) = matched(Model("a.weight"), ["a.weight"], converter, dtype="BF16").values()
    assert (recipe.converter, recipe.dtype) == (None, torch.bfloat16)


def test_unpacking_is_settled() -> None:
    """For each weight, where the library makes floats of them."""
    asked = []

    class Operation:
        hf_quantizer = object()
        reverse_op = None

        def __deepcopy__(self, _memo: object) -> Operation:
            return self

        def convert(self, tensors: dict[str, Any], **_more: Any) -> dict[str, torch.Tensor]:
            asked.append(list(tensors))
            return {"a.weight": torch.empty(2, 4, device="meta", dtype=torch.float16)}

    operation: Any = Operation()
    converter = WeightConverter("weight", "weight", operations=[operation])
    unpacking = Unpacking(times=5)
    (recipe,) = matched(Model("a.weight"), ["a.weight"], converter, unpacking=unpacking).values()
    assert len(asked) == 1
    assert (recipe.dtype, recipe.unpacking_bytes) == (torch.float16, 5 * 16)


def test_weights_made() -> None:
    """One, or all that the converter names."""
    assert weights_made("a.weight", Recipe(None)) == ["a.weight"]
    operation: Any = SimpleNamespace(reverse_op=None)
    split = WeightConverter("qkv", ["q", "k", "v"], operations=[operation])
    assert weights_made("l.0.q.weight", Recipe(split)) == [
        "l.0.q.weight",
        "l.0.k.weight",
        "l.0.v.weight",
    ]
