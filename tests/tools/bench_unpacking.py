#!/usr/bin/env python3
"""Times the unpacking of stored weights: ours, and what a plain load calls.

    python tests/tools/bench_unpacking.py

One expert's largest matrix of gpt-oss-20b in MXFP4, by the library; then GGUF's blocks of 4096 x
4096 weights, by the package gguf. They take turns in one process, on one thread. Medians of
processor time, and nanoseconds a weight.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipeload.checkpoint.gguf import BLOCKS
from pipeload.formats.gguf.kernel import COMPILED, unpack_by_package
from pipeload.formats.gguf.kernel import unpack as unpack_blocks
from pipeload.formats.mxfp4.unpack import unpack

ROWS, GROUPS = 5760, 90
SIDE = 4096
ROUNDS = 7


def main() -> None:
    """Print a line for each dtype, or type of blocks."""
    torch.set_num_threads(1)
    time_mxfp4()
    time_gguf()


def time_gguf() -> None:
    """In bf16, of bytes that are all nothing: unpacking takes as long for any."""
    out = torch.empty((SIDE, SIDE), dtype=torch.bfloat16)
    for kind in COMPILED:
        block = BLOCKS[kind]
        stored = torch.zeros((SIDE, SIDE // block.values * block.nbytes), dtype=torch.uint8)
        ours, theirs = [], []
        for _ in range(ROUNDS):
            start = time.process_time()
            unpack_blocks(stored, kind, out)
            middle = time.process_time()
            unpack_by_package(stored, kind, out)
            theirs.append(time.process_time() - middle)
            ours.append(middle - start)
        mine, package = statistics.median(ours), statistics.median(theirs)
        each = 1e9 * mine / out.numel()
        print(f"GGUF {kind}: {each:.2f} ns a weight; package gguf {package / mine:.0f} times that")


def time_mxfp4() -> None:
    """In both dtypes that gpt-oss is loaded in."""
    blocks = torch.randint(0, 256, (1, ROWS, GROUPS, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (1, ROWS, GROUPS), dtype=torch.uint8)
    for dtype in (torch.bfloat16, torch.float32):
        ours, theirs = [], []
        out = torch.empty((1, 32 * GROUPS, ROWS), dtype=dtype)
        for _ in range(ROUNDS):
            start = time.process_time()
            assert unpack({"blocks": blocks, "scales": scales}, out)
            middle = time.process_time()
            wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
            theirs.append(time.process_time() - middle)
            ours.append(middle - start)
            assert torch.equal(out, wanted)
        mine, library = statistics.median(ours), statistics.median(theirs)
        each = 1e9 * mine / out.numel()
        print(
            f"{dtype}: {mine * 1e3:.0f} ms, {each:.1f} ns a weight; library {library * 1e3:.0f} ms"
        )


if __name__ == "__main__":
    main()
