#!/usr/bin/env python3
"""Every number of rows of input: a Linear in ranges of rows against the whole one, bit for bit.

    python tests/tools/rows_sweep.py                      # 1 to 300 rows, every set of kernels
    python tests/tools/rows_sweep.py --short              # 1 to 49 rows, small shapes
    python tests/tools/rows_sweep.py --list               # the jobs of this, by number
    python tests/tools/rows_sweep.py --jobs 0,3 --log F   # some of them, but those that F has

With the kernels that this processor has and those of lesser ones, and, where MKL takes it for
another maker's, as if it were Intel's: MKL's own kernels are for those.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in (".", "hooks")]

import torch
from torch import nn
from torch.nn import functional

from pipeload.engine.row_products import by_zeros
from pipeload.weights.row_cuts import Cut, Given, RowRange, best_cut, ranges_are_exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((576, 1536, 384), (640, 1024, 128), (320, 1411, 512), (500, 1000, 256))
HEAD = (96, 49152, 3520)
"""Columns and rows of the weight, and about how many rows a range has. The last in fp32 alone: in
halves it would take hours where the processor has no products of them."""
CAPS: tuple[dict[str, str], ...] = (
    {},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "default"},
)
_CODE = {  # "return 1" and "return 0" for x86-64
    "mkl_serv_intel_cpu_true": b"\xb8\x01\x00\x00\x00\xc3",
    "mkl_serv_intel_cpu": b"\xb8\x01\x00\x00\x00\xc3",
    "mkl_serv_cpuiszen": b"\x31\xc0\xc3",
}


def sweep(
    counts: range,
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> Iterator[tuple[str, int, int, int]]:
    """For each weight: what it is, products in ranges, in the whole's shape, and those that differ.

    Cut as a plan would cut it, but where it would not, too.
    """
    for dtype in dtypes:
        for columns, total, rows in shapes:
            for bias in (False, True):
                whole = Cut(dtype, columns, (RowRange(0, total),), 0, bias)
                cut = best_cut(whole, rows, rows, anyhow=True)
                if cut is None:
                    raise RuntimeError(f"{total} rows make no ranges of {rows}")
                beside = " and a bias" if bias else ""
                yield f"{dtype} {columns} x {total}{beside}", *_compare(cut, counts)


def _compare(cut: Cut, counts: range) -> tuple[int, int, int]:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(cut.total, cut.inputs, generator=random).to(cut.dtype)
    bias = torch.randn(cut.total, generator=random).to(cut.dtype) if cut.bias else None
    ranged = slow = wrong = 0
    for count in counts:
        given = torch.randn(count, cut.inputs, generator=random).to(cut.dtype)
        with torch.no_grad():
            wanted = functional.linear(given, nn.Parameter(weight), bias)
            if ranges_are_exact(cut, Given.of(given)):
                ranged += 1
                parts = [
                    functional.linear(
                        given,
                        nn.Parameter(weight[start:stop]),
                        None if bias is None else bias[start:stop],
                    )
                    for start, stop in cut.ranges
                ]
            else:
                slow += 1
                multiply = by_zeros(cut, given, bias)
                parts = [multiply(start, weight[start:stop]) for start, stop in cut.ranges]
        wrong += not torch.equal(torch.cat(parts, dim=-1), wanted)
    return ranged, slow, wrong


def as_intel() -> bool:
    """Have MKL take this processor for one of Intel's; returns whether it can be told."""
    folder = Path(torch.__file__).parent / "lib"
    try:
        library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
        addresses = {
            ctypes.cast(library[name], ctypes.c_void_p).value: _CODE[name] for name in _CODE
        }
    except (OSError, AttributeError):
        return False
    protect = ctypes.CDLL(None).mprotect
    for address, code in addresses.items():
        if address is None:
            return False
        page = address // mmap.PAGESIZE * mmap.PAGESIZE
        if protect(ctypes.c_void_p(page), ctypes.c_size_t(2 * mmap.PAGESIZE), 7):
            return False
        ctypes.memmove(address, code, len(code))
    return True


class Job(NamedTuple):
    """One set of kernels and one dtype."""

    caps: dict[str, str]
    intel: bool
    threads: int
    dtype: torch.dtype

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.caps.items()] or ["all kernels"]
        words += ["as Intel's"] if self.intel else []
        return f"{' '.join(words)}, {self.threads} threads, {self.dtype}"


def jobs(*, short: bool) -> list[Job]:
    """All, those that found most first."""
    threads = (2,) if short else (2, 1)
    return [
        Job(caps, intel, count, dtype)
        for dtype in DTYPES
        for count in threads
        for intel in (False, True)
        for caps in (CAPS[:3] if intel else CAPS)
    ]


def main() -> int:
    """Run all, each job in a process of its own; 1 if any product differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", default="", help="numbers, separated by commas; all when empty")
    parser.add_argument("--log", type=Path, help="a file, for what came out of each job")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    every = jobs(short=options.short)
    if options.child is not None:
        return _run(every[options.child], short=options.short)
    if options.list:
        print(*(f"{number:3} {job}" for number, job in enumerate(every)), sep="\n")
        return 0
    wanted = [int(n) for n in options.jobs.split(",") if n] or range(len(every))
    log = options.log.read_text() if options.log and options.log.exists() else ""
    bad = sum(
        _in_child(number, every[number], options.log)
        for number in wanted
        if f"{every[number]}: 0 differ" not in log
    )
    print("0 differ" if not bad else "NOT ALL ARE EQUAL")
    return int(bad > 0)


def _in_child(number: int, job: Job, log: Path | None) -> bool:
    """Whether any product of a job differs, or not all were made."""
    print(f"{job}:", flush=True)
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": str(job.threads)}
    command = [sys.executable, *sys.argv, "--child", str(number)]
    status = subprocess.run(command, env={**env, **job.caps}, check=False).returncode
    told = {0: "0 differ", 1: "SOME differ"}.get(status, f"ended with {status}")
    if log is not None:
        with log.open("a") as file:
            file.write(f"{job}: {told}\n")
    return status != 0


def _run(job: Job, *, short: bool) -> int:
    if job.intel and not as_intel():
        print("  MKL cannot be told", flush=True)
        return 0
    wrong = 0
    counts = range(1, 50) if short else range(1, 301)
    head = (HEAD,) if job.dtype is torch.float32 and not short else ()
    shapes = SHAPES[:3] if short else (*SHAPES, *head)
    for what, ranged, slow, differ in sweep(counts, shapes, (job.dtype,)):
        print(f"  {what}: {ranged} in ranges, {slow} as the whole, {differ} differ", flush=True)
        wrong += differ
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
