"""How weights are made of stored tensors by the library's operations."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from pipeload.checkpoint.headers import TensorEntry
from pipeload.formats.format import Unpacking
from pipeload.hf import recipes
from pipeload.hf.recipes import Recipe, _pieces

if TYPE_CHECKING:
    from collections.abc import Mapping


def entry(name: str, shape: tuple[int, ...], dtype: str = "F32") -> TensorEntry:
    return TensorEntry(name, Path("a"), dtype, shape, 0, 0)


class Doubling:
    """Unpacks in a way of its own: each stored number stands for itself and its double."""

    reverse_op = None
    asked: list[Any]

    def __init__(self) -> None:
        self.hf_quantizer = object()
        self.asked = []

    def __deepcopy__(self, _memo: dict[int, Any]) -> Doubling:
        return self

    def convert(self, tensors: Mapping[str, Any], **more: Any) -> dict[str, torch.Tensor]:
        ((name, stored),) = tensors.items()
        stored = stored[0] if isinstance(stored, list) else stored
        self.asked.append((stored.shape, more.get("model")))
        return {name: torch.cat([stored, 2 * stored], dim=-1).to(torch.bfloat16)}


def unpacked(shape: tuple[int, ...]) -> tuple[Recipe, Any]:
    """Of a weight whose rows are stored at half their length."""
    operation: Any = Doubling()
    converter = WeightConverter("weight", "weight", operations=[operation])
    return Recipe(converter, [(entry("a.weight", shape, "U8"), "weight")]), operation


def experts() -> Recipe:
    """Of two experts' halves, stacked and joined."""
    patterns = ["experts.*.up.weight", "experts.*.gate.weight"]
    converter = WeightConverter(
        patterns, "experts.both", operations=[MergeModulelist(dim=0), Concatenate(dim=1)]
    )
    sources = [
        (entry(pattern.replace("*", str(number)), (2, 3)), pattern)
        for number in range(2)
        for pattern in patterns
    ]
    return Recipe(converter, sources)


def test_several_tensors_make_one_weight() -> None:
    """By the library's operations, in the order of the sources, cast before they are joined."""
    recipe = experts()
    assert recipe.merges
    assert not recipe.unpacks
    stored = {e.name: torch.full((2, 3), float(n)) for n, (e, _) in enumerate(recipe.sources)}
    into = {"experts.both": torch.empty(2, 4, 3, dtype=torch.bfloat16)}
    recipe.fill("experts.both", None, stored, into)
    assert into["experts.both"][:, :, 0].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


def test_a_conversion_is_made_anew_each_time() -> None:
    """The library's converter collects tensors; ours keeps none."""
    recipe = experts()
    for value in (1.0, 2.0):
        stored = {e.name: torch.full((2, 3), value) for e, _ in recipe.sources}
        into = {"experts.both": torch.empty(2, 4, 3)}
        recipe.fill("experts.both", None, stored, into)
        assert into["experts.both"].unique().tolist() == [value]


def test_unpacked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes is found by a run without values."""
    recipe, operation = unpacked((8, 2))
    assert recipe.unpacks
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3))
    assert (recipe.dtype, recipe.pieces) == (torch.bfloat16, 1)
    assert recipe.unpacking_bytes == 3 * 8 * 4 * 2
    monkeypatch.setattr(recipes, "_PIECE_BYTES", 16)
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3))
    assert recipe.pieces == 1, "nobody said that rows can be unpacked by themselves"
    assert [shape for shape, _ in operation.asked] == [(8, 2)] * 2


def test_unpacked_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values, a few rows at a time, and less memory beside them."""
    monkeypatch.setattr(recipes, "_PIECE_BYTES", 16)
    recipe, operation = unpacked((8, 2))
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3, by_rows=True))
    assert recipe.pieces == 4
    assert recipe.unpacking_bytes == 3 * (8 * 4 * 2 // 4)
    del operation.asked[:]
    stored = torch.arange(16, dtype=torch.uint8).view(8, 2)
    into = torch.empty(8, 4, dtype=torch.bfloat16)
    recipe.fill("a.weight", nn.Module(), {"a.weight": stored}, {"a.weight": into})
    assert [shape for shape, _ in operation.asked] == [(2, 2)] * 4
    assert torch.equal(into.float(), torch.cat([stored, 2 * stored], dim=-1).float())


def test_what_came_unquantised_is_read() -> None:
    """A conversion that changes no shape is none."""
    operation: Any = Doubling()
    operation.convert = lambda tensors, **_: {n: t[0] for n, t in tensors.items()}
    converter = WeightConverter("weight", "weight", operations=[operation])
    recipe = Recipe(converter, [(entry("a.weight", (8, 2)), "weight")])
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3))
    assert recipe.converter is None
    assert recipe.unpacking_bytes == 0


def test_what_cannot_be_told_is_left() -> None:
    """A stored type that torch has not; a conversion that makes other weights."""
    recipe, operation = unpacked((8, 2))
    recipe.sources = [(entry("a.weight", (8, 2), "F4"), "weight")]
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3))
    assert operation.asked == []
    recipe, operation = unpacked((8, 2))
    operation.convert = lambda _tensors, **_: {"another": torch.ones(1)}
    recipe.settle("a.weight", nn.Module(), Unpacking(times=3))
    assert (recipe.dtype, recipe.unpacking_bytes) == (None, 0)


def test_an_adapter_does_not_stand_between() -> None:
    """Operations that look at a module find the library's own, whatever has taken its place."""
    linear, model = nn.Linear(1, 1), nn.Module()
    model.a = nn.Module()
    model.a.base_layer = nn.Module()
    model.a.base_layer.base_layer = linear
    model.config = SimpleNamespace(kind="own")  # type: ignore[assignment]
    recipe, operation = unpacked((2, 2))
    into = {"a.weight": torch.empty(2, 4)}
    recipe.fill("a.weight", model, {"a.weight": torch.ones(2, 2)}, into)
    ((_, seen),) = operation.asked
    assert seen.get_submodule("a") is linear
    assert seen.config.kind == "own"


@pytest.mark.parametrize(
    ("most", "nbytes", "count"),
    [(12, 1, 1), (12, 8 << 20, 2), (12, 23 << 20, 4), (7, 1 << 40, 7), (11, 20 << 20, 1)],
)
def test_pieces_are_of_equal_size(most: int, nbytes: int, count: int) -> None:
    """As many as divide the rows, none much smaller than it has to be."""
    assert _pieces(most, nbytes) == count
