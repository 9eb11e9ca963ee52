#!/usr/bin/env python3
"""Times the unpacking of one expert's largest matrix of gpt-oss-20b: ours, and the library's.

    python tests/tools/bench_unpacking.py

They take turns in one process, on one thread. Medians of processor time, and nanoseconds a weight.
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

from pipeload.formats.mxfp4.unpack import unpack

ROWS, GROUPS = 5760, 90
ROUNDS = 7


def main() -> None:
    """Print a line for each dtype."""
    torch.set_num_threads(1)
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
