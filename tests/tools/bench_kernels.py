"""Times one decoding step of the Linears of a 7B model, kernel by kernel.

All contenders take turns in one process, so that each has the same share of a busy machine, and
finds the caches full of the others' weights. Medians, in milliseconds. bitsandbytes runs the loops
that it has for AVX2 (`plain_loops`), and so do torch and oneDNN unless `--native` is said.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hooks")]

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    Step = Callable[[torch.Tensor], torch.Tensor]

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_WAIT_POLICY": "passive"}
# Rows, columns, and how many of them a block of LLaMA 7B has.
SHAPES = ((4096, 4096, 4), (11008, 4096, 2), (4096, 11008, 1))
BLOCKS = 32
DTYPES = ("bfloat16", "float32", "float16")


def main() -> None:
    """Print a table for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1, help="of input; 1: a decoding step")
    parser.add_argument("--cpu", action="store_true", help="time of all threads, not on the wall")
    parser.add_argument("--native", action="store_true", help="torch as it is on this processor")
    options = parser.parse_args()
    settings = {"OMP_WAIT_POLICY": "passive"} if options.native else AVX2
    if any(os.environ.get(name) != value for name, value in settings.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | settings)
    measure(options)


def measure(options: argparse.Namespace) -> None:
    """Under the environment that is set."""
    import torch

    from pipeload.system.memory import return_freed_memory
    from tests.support.plain_loops import use_plain_loops

    torch.set_num_threads(options.threads)
    return_freed_memory()
    use_plain_loops(setattr)
    print(f"{torch.backends.cpu.get_cpu_capability()}, {options.threads} threads, torch", end=" ")
    print(
        f"{torch.__version__}, {options.rows} row(s), medians of {options.rounds} rounds, ms",
        end="",
    )
    print(" of all threads" if options.cpu else "")
    with torch.inference_mode():
        for name in DTYPES:
            table(getattr(torch, name), options)


def table(dtype: torch.dtype, options: argparse.Namespace) -> None:
    """One row for each shape, and what they come to in a token of the whole model."""
    import torch

    total: dict[str, float] = {}
    for rows, columns, count in SHAPES:
        given = torch.randn((options.rows, columns)).to(dtype)
        steps = contenders(rows, columns, dtype)
        assert torch.equal(steps["NF4 ours"](given), steps["NF4 library"](given))
        clock = time.process_time if options.cpu else time.perf_counter
        times = alternate(steps, given, options.rounds, clock)
        if not total:
            print(f"\n{dtype!s:15}" + "".join(f"{name:>14}" for name in times) + "   ratio")
        show(f"{rows} x {columns}", times)
        for name, value in times.items():
            total[name] = total.get(name, 0.0) + BLOCKS * count * value
    show("a token", total)


def show(label: str, times: dict[str, float]) -> None:
    """`ratio`: the library's time over ours."""
    ratio = times["NF4 library"] / times["NF4 ours"]
    print(f"{label:15}" + "".join(f"{t:14.2f}" for t in times.values()) + f"{ratio:8.1f}")


def alternate(
    steps: dict[str, Step], given: torch.Tensor, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step(given)
            if number:  # the first one warms up
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(several) for name, several in times.items()}


def contenders(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Step]:
    """What computes the same Linear, by name."""
    import torch
    from bitsandbytes.nn.modules import Linear4bit

    from pipeload.formats.bitsandbytes import kernel
    from pipeload.formats.bitsandbytes import product as bitsandbytes_product
    from pipeload.formats.integers.linear import Int4Linear, Int8Linear
    from pipeload.formats.integers.order import kernel_order, pack
    from pipeload.formats.integers.rounding import to_int4, to_int8

    plain = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)
    weight = plain.weight.detach()
    int8 = Int8Linear(columns, rows, bias=False, dtype=dtype)
    int8.weight.data, int8.scale.data = to_int8(weight)
    order = kernel_order()
    int4 = Int4Linear(columns, rows, bias=False, group_size=64, order=order, dtype=dtype)
    values, int4.scales_and_zeros.data = to_int4(weight, 64)
    int4.weight.data = pack(values, order)
    make: Any = Linear4bit
    nf4 = make(columns, rows, bias=False, compute_dtype=dtype, quant_type="nf4")
    nf4.weight.data = weight.float()
    nf4 = nf4.to("cpu").eval()
    ours = bitsandbytes_product.quick_product(nf4, "nf4", 64)
    bitsandbytes_product._checked_fill.cache_clear()
    compiled, kernel.compiled = kernel.compiled, lambda: None  # type: ignore[assignment]
    tables = bitsandbytes_product.quick_product(nf4, "nf4", 64)
    kernel.compiled = compiled
    bitsandbytes_product._checked_fill.cache_clear()
    if ours is None or tables is None:
        raise SystemExit("pipeload leaves this to bitsandbytes here.")

    def by(product: bitsandbytes_product.QuickProduct) -> Step:
        module: Any = copy.deepcopy(nf4)
        state = module.weight.quant_state
        state.absmax = bitsandbytes_product.with_product(state.absmax, product)
        step: Step = module
        return step

    return {
        str(dtype).removeprefix("torch."): plain,
        "int8": int8,
        "int4": int4,
        "NF4 library": nf4,
        "NF4 ours": by(ours),
        "NF4 tables": by(tables),
    }


if __name__ == "__main__":
    main()
