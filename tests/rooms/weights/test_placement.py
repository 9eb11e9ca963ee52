"""Weights whose bytes are put into another order as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header
from pipeload.formats.bitsandbytes.tiles import TILED, repack
from pipeload.weights.arena import Arena
from pipeload.weights.layout import Weight
from pipeload.weights.placement import SCRATCH_BYTES, read_repacked

if TYPE_CHECKING:
    from pathlib import Path

ROWS, WIDTH = 192, 20


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (ROWS * WIDTH, 1), (1, ROWS * WIDTH)])
def test_rows_of_what_is_stored_in_any_shape(tmp_path: Path, shape: tuple[int, int]) -> None:
    """bitsandbytes stores what it packs as one long column: its rows are the weight's."""
    packed = torch.randint(256, (ROWS, WIDTH), dtype=torch.uint8)
    file = tmp_path / "packed.safetensors"
    save_file({"before": torch.zeros(3, dtype=torch.uint8), "w": packed.view(shape)}, file)
    entry = read_header(file)["w"]
    weight = Weight("w", "U8", (ROWS, WIDTH), ROWS * WIDTH, (entry,), repacked=TILED)
    wanted = torch.empty_like(packed)
    repack(packed, wanted)
    scratch = Arena(SCRATCH_BYTES, device=torch.device("cpu"), huge=False).take(SCRATCH_BYTES)
    for start, stop in ((0, ROWS), (64, 128), (128, ROWS)):
        into = torch.zeros(stop - start, WIDTH, dtype=torch.uint8)
        files = FileSet([file], "buffered")
        assert read_repacked(weight, range(start, stop), into, files, scratch)
        files.close()
        assert torch.equal(into, wanted[start:stop])
