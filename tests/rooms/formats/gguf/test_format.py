"""Which weights of a GGUF file are unpacked here, which read as any other, and which refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.checkpoint.headers import TensorEntry
from pipeload.errors import UnsupportedModelError
from pipeload.formats.gguf.blocks import Blocks
from pipeload.formats.gguf.format import Change, Gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeload.weights.layout import Weight

pytest.importorskip("gguf")
NAME = "up.weight"


def entry(kind: str, shape: tuple[int, ...] = (64, 256), start: int = 4096) -> TensorEntry:
    block, count = BLOCKS[kind], 1
    for length in shape:
        count *= length
    nbytes = count // block.values * block.nbytes
    return TensorEntry(NAME, Path("m.gguf"), kind, shape, start, start + nbytes)


@dataclass
class Held:
    """A `Stored` of one Linear."""

    entries: Mapping[str, TensorEntry]
    kept: torch.dtype = torch.bfloat16
    model: Any = field(default_factory=lambda: nn.ModuleDict({"up": nn.Linear(256, 64)}).bfloat16())
    where = "cpu"
    folder = "here"

    def plain(self, _name: str) -> Weight | None:
        raise AssertionError("not asked")

    def dtype(self, _name: str) -> torch.dtype:
        return self.kept

    def parts(self, name: str) -> Mapping[str, TensorEntry]:
        return self.entries if name == NAME else {}

    def reader(self) -> Callable[[TensorEntry], torch.Tensor]:
        raise AssertionError("not asked")


def found(one: TensorEntry, order: tuple[int, ...] = ()) -> Weight | None:
    packed = Gguf({NAME: Change(order)} if order else {}).find(Held({"weight": one}))
    return packed[NAME].weight if packed else None


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F32", "F16"])
def test_what_is_unpacked(kind: str) -> None:
    """Blocks, and floats of another dtype: rows of a table of those are read alone as well."""
    weight = found(entry(kind))
    assert weight is not None
    assert (weight.dtype, weight.shape, weight.nbytes) == ("BF16", (64, 256), 2 * 64 * 256)
    assert weight.repacked == Blocks(kind, entry(kind).nbytes // 64)
    assert weight.rows_alone
    assert not weight.raw
    assert weight.read_bytes == entry(kind).nbytes


def test_what_is_read_as_it_is() -> None:
    """Floats of the dtype, where a plain load's kernels would find them as well."""
    assert found(entry("BF16")) is None
    assert found(entry("BF16", start=4096 + 8)) is not None  # an alignment of eight bytes
    assert found(entry("BF16"), (1, 0)) is not None  # rows in another order
    assert found(entry("F32", (64,))) is None  # a vector is cast like any other
    assert found(entry("Q8_0", (64,))) is None  # and is the library's in blocks


def test_another_shape_is_the_librarys_to_refuse() -> None:
    """As in a plain load."""
    assert found(entry("Q4_0", (32, 256))) is None


def test_rows_of_it() -> None:
    """A range of rows reads whole groups of stored rows, and skips what is too many."""
    weight = found(entry("Q4_0"), (*range(1, 32), 0))
    assert weight is not None
    rows = weight.rows(40, 64)
    (source,) = rows.sources
    size = 256 // 32 * 18
    assert (source.start, source.stop) == (4096 + 32 * size, 4096 + 64 * size)
    assert rows.shape == (24, 256)
    assert source.shape == (32, 256)
    assert isinstance(rows.repacked, Blocks)
    assert rows.repacked.skipped == 8


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (Held({"a": entry("Q4_0"), "b": entry("Q4_0")}), "is made of several tensors"),
        (Held({"weight": entry("I32")}), "is of type I32, which the installed package gguf does"),
        (Held({"weight": entry("Q4_0")}, torch.float32), "kept in torch.float32 whatever dtype="),
    ],
)
def test_what_is_refused(stored: Held, words: str) -> None:
    """By tensor and file, with what to take instead."""
    with pytest.raises(UnsupportedModelError, match=words) as refusal:
        Gguf().find(stored)
    assert "'up.weight' in 'm.gguf'" in str(refusal.value)
    assert "Take a file of another type" in str(refusal.value)
