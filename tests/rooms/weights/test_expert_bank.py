"""Slices of experts: read into their place, and given back without their neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header
from pipeload.system.pages import PAGE
from pipeload.weights.arena import Arena
from pipeload.weights.expert_bank import ExpertBank, block_bytes, held_bytes, scratch_bytes
from pipeload.weights.layout import Slices, Weight
from pipeload.weights.nan_arena import NanBlock
from pipeload.weights.same_weights import no_conversion

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = 6


def _read(bank: ExpertBank, name: str, expert: int) -> int:
    nbytes = scratch_bytes([])
    scratch = Arena(nbytes, device=torch.device("cpu"), huge=False).take(nbytes)
    return sum(job(scratch) for job in bank.read_jobs(name, expert))


def _fused(folder: Path, rows: int) -> tuple[Weight, FileSet, torch.Tensor]:
    values = torch.randn(EXPERTS, rows, 32)
    file = folder / "fused.safetensors"
    save_file({"pad": torch.zeros(5), "w": values}, file)
    entry = read_header(file)["w"]
    weight = Weight("w", "F32", tuple(values.shape), values.numel() * 4, (entry,))
    return weight, FileSet([file], "buffered"), values


def _stacked(folder: Path, rows: int) -> tuple[Weight, FileSet, torch.Tensor]:
    values = torch.randn(EXPERTS, rows, 32)
    half = rows // 2
    file = folder / "stacked.safetensors"
    parts = {f"{e}.gate": values[e, :half].clone() for e in range(EXPERTS)}
    parts |= {f"{e}.up": values[e, half:].clone() for e in range(EXPERTS)}
    save_file(parts, file)
    entries = read_header(file)
    names = [f"{e}.{part}" for e in range(EXPERTS) for part in ("gate", "up")]
    pairs = tuple((2 * e, 2 * e + 1) for e in range(EXPERTS))
    weight = Weight(
        "w",
        "F32",
        tuple(values.shape),
        values.numel() * 4,
        tuple(entries[name] for name in names),
        group="w",
        slices=Slices(pairs, made=False),
    )
    return weight, FileSet([file], "buffered"), values


@pytest.mark.parametrize("make", [_fused, _stacked])
@pytest.mark.parametrize("rows", [2, 30, 32, 70])
def test_slices_come_and_go(tmp_path: Path, make: Any, rows: int) -> None:
    """Of less than a page, of whole pages, and of others."""
    weight, files, values = make(tmp_path, rows)
    bank = ExpertBank([weight], files, no_conversion, NanBlock(block_bytes(1)))
    view = bank.views["w"]
    assert view.shape == values.shape
    assert view.isnan().all()
    for expert in (1, 2, 4):
        assert _read(bank, "w", expert) >= values[expert].numel() * 4
        assert torch.equal(view[expert], values[expert])
    bank.drop("w", 2)
    assert torch.equal(view[1], values[1])
    assert torch.equal(view[4], values[4])
    if rows * 32 * 4 > 2 * PAGE:
        assert view[2].isnan().any()
    _read(bank, "w", 2)
    for expert in (1, 2, 4):
        assert torch.equal(view[expert], values[expert])
    bank.drop_all()
    assert view.isnan().all()


def test_cast_as_it_is_read(tmp_path: Path) -> None:
    weight, files, values = _stacked(tmp_path, 30)
    half = Weight(
        "w", "F16", weight.shape, weight.nbytes // 2, weight.sources, "w",
        slices=weight.slices,
    )  # fmt: skip
    bank = ExpertBank([half], files, no_conversion, NanBlock(block_bytes(1)))
    _read(bank, "w", 3)
    assert torch.equal(bank.views["w"][3], values[3].half())


def test_what_a_slice_takes(tmp_path: Path) -> None:
    """No less than the pages that it lies in, wherever they begin."""
    for rows in (2, 30, 32, 70):
        for make in (_fused, _stacked):
            weight, _, _ = make(tmp_path, rows)
            size, lead = rows * 32 * 4, weight.sources[0].start % PAGE if weight.raw else 0
            for expert in range(EXPERTS):
                first = (lead + expert * size) // PAGE
                last = (lead + (expert + 1) * size - 1) // PAGE
                assert held_bytes(weight) >= min(last - first + 1, 1 << 20) * PAGE or size < PAGE


def test_no_more_mappings_than_a_process_may_have() -> None:
    for total in (1, 58_000_000_000, 1_300_000_000_000):
        assert total / block_bytes(total) <= 4096
        assert not block_bytes(total) % (2 << 20)
    assert np.log2(block_bytes(1)) == 21
