"""Rows of tables that are stored in blocks: unpacked when they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.gguf import BLOCKS
from pipeload.checkpoint.headers import TensorEntry
from pipeload.formats.gguf.block_weight import BlockWeight
from pipeload.formats.gguf.format import Gguf
from pipeload.formats.gguf.kernel import unpack
from pipeload.system.pages import PAGE
from pipeload.weights.row_table import RowTable

if TYPE_CHECKING:
    from pathlib import Path

KEEP = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


class Blocks:
    """A file of random rows, and the floats that they stand for."""

    def __init__(self, path: Path, rows: int, columns: int, kind: str, dtype: torch.dtype) -> None:
        block = BLOCKS[kind]
        width = columns // block.values * block.nbytes
        raw = torch.randint(0, 60, (rows, width), dtype=torch.uint8)  # small and finite scales
        path.write_bytes(bytes(96) + raw.numpy().tobytes() + bytes(50))
        entry = TensorEntry("t", path, kind, (rows, columns), 96, 96 + raw.numel())
        self.weight = BlockWeight("t", dtype, [entry], Gguf().blocks_of(entry)).weight
        self.values = torch.empty((rows, columns), dtype=dtype)
        unpack(raw, kind, self.values)
        self.files = FileSet([path], "buffered")
        self.table = RowTable(self.weight, self.files, KEEP)


@settings(max_examples=40)
@given(
    ids=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=60), min_size=1, max_size=3),
    columns=st.sampled_from([32, 256, 1056, 2048]),
    kind=st.sampled_from(["Q4_0", "Q8_0", "F16"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_looked_up_rows(
    folder: Path, ids: list[list[int]], columns: int, kind: str, dtype: torch.dtype
) -> None:
    """Those rows, whatever pages they share with rows that nobody asked for."""
    made = Blocks(folder / "table", 300, columns, kind, dtype)
    for some in ids:
        wanted = torch.tensor(some)
        made.table.fetch(wanted)
        got = functional.embedding(wanted, made.table.view)
        assert torch.equal(got, functional.embedding(wanted, made.values))
        assert made.table.held_bytes <= made.table.most_bytes(len(set(some))) + KEEP
    made.files.close()


def test_all_rows(folder: Path) -> None:
    """One after the other, by several readers: all of the matrix."""
    made = Blocks(folder / "whole", 5000, 512, "Q4_0", torch.float32)
    count = made.table.fetch(torch.arange(5000))
    assert torch.equal(made.table.view, made.values)
    assert made.weight.read_bytes <= count < 2 * made.weight.read_bytes
    made.table.drop()
    assert made.table.held_bytes == 0


def test_only_what_is_missing_is_read(folder: Path) -> None:
    """A row that is there costs nothing; what was dropped is no number."""
    made = Blocks(folder / "few", 3000, 1024, "Q8_0", torch.bfloat16)
    assert made.table.view.data_ptr() % 64 == 0
    first = made.table.fetch(torch.tensor([7, 2000]))
    assert 0 < first <= 8 * PAGE + 2 * 4 * 1088
    assert made.table.fetch(torch.tensor([2000, 7])) == 0
    made.table.drop()
    assert made.table.view[7].isnan().all()
