#!/usr/bin/env python3
"""Times products of int8 and int4 Linears: torch's kernels for them, and what is done instead.

    python tests/tools/bench_integers.py [--native] [--threads 2] [--rounds 15] [--cpu]

One row of input, as in decoding, eight, and a prompt of 256 tokens, in bf16; int4 by groups of 64.
All
take turns in one process, so that each has the same share of a busy machine. Medians, in ns
for each weight and row. As if AVX2 were all that the processor has, unless `--native` is said.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hooks")]

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Step = Callable[[torch.Tensor], torch.Tensor]

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_WAIT_POLICY": "passive"}
SHAPES = ((4096, 4096), (11008, 4096))
ROWS = (1, 8, 256)


def main() -> None:
    """Print a line for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--native", action="store_true", help="the processor as it is")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--cpu", action="store_true", help="time of all threads, not on the wall")
    options = parser.parse_args()
    settings = {"OMP_WAIT_POLICY": "passive"} if options.native else AVX2
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Under the environment that is set."""
    import torch

    from pipeload.formats.integers import byte_product, product
    from pipeload.system.memory import return_freed_memory

    torch.set_num_threads(options.threads)
    return_freed_memory()
    if product.compiled() is None or byte_product.compiled() is None:
        raise SystemExit("There is no kernel to compare with: no C compiler, or no AVX2.")
    if not options.native:
        product.multiply = partial(product.multiply, vnni=False)
        byte_product.multiply = partial(byte_product.multiply, vnni=False)
    clock = time.process_time if options.cpu else time.perf_counter
    capability = torch.backends.cpu.get_cpu_capability()
    print(
        f"{capability}, {options.threads} threads, torch {torch.__version__}, ns a weight and row"
    )
    with torch.inference_mode():
        for rows, columns in SHAPES:
            for count in ROWS:
                given = torch.randn((count, columns)).bfloat16()
                rounds = options.rounds if count == 1 else max(3, options.rounds // 3)
                took = alternate(contenders(rows, columns), given, rounds, clock)
                shown = ", ".join(
                    f"{name} {1e9 * seconds / (rows * columns * count):.4f}"
                    for name, seconds in took.items()
                )
                print(f"{rows} x {columns}, {count} row(s): {shown}", flush=True)


def alternate(
    steps: dict[str, Step], given: torch.Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step(given)
            if number:  # the first one warms up
                times[name].append(clock() - start)
    return {name: statistics.median(several) for name, several in times.items()}


def contenders(rows: int, columns: int) -> dict[str, Step]:
    """What computes the same Linear, by name; its values do not matter."""
    import torch

    from pipeload.formats.integers.linear import Int4Linear, Int8Linear
    from pipeload.formats.integers.order import BY_ROWS, kernel_order

    int8s = []
    for exact in (True, False):
        int8 = Int8Linear(columns, rows, bias=False, dtype=torch.bfloat16, exact_inputs=exact)
        int8.weight.data = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
        int8.scale.data.fill_(1e-3)
        int8s.append(int8)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    int4s = []
    for order in (kernel_order(), BY_ROWS):
        made = Int4Linear(
            columns, rows, bias=False, group_size=64, order=order, dtype=torch.bfloat16
        )
        made.weight.data = packed.clone()
        made.scales_and_zeros.data.fill_(1e-3)
        int4s.append(made)
    torchs, ours = int4s
    return {
        "int8 torch": int8s[0].by_kernel,
        "int8 now": int8s[1],
        "int4 torch": torchs.by_kernel,
        "int4 in torch's order": torchs,
        "int4 by rows": ours,
    }


if __name__ == "__main__":
    main()
