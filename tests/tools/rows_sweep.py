#!/usr/bin/env python3
"""Every number of rows of input: a Linear in ranges of rows against the whole one, bit for bit.

    python tests/tools/rows_sweep.py --log F              # all; F has what is not to be run again
    python tests/tools/rows_sweep.py --short              # 1 to 49 rows, small weights
    python tests/tools/rows_sweep.py --list               # the jobs of this, by number
    python tests/tools/rows_sweep.py --jobs 0,3 --log F   # some of them

With the kernels that this processor has and those of lesser ones, and, where MKL takes it for
another maker's, as if it were Intel's: MKL's own kernels are for those. A setting with which all
products of a sample have the bits that they had with another one has the same kernels, which are
not tried twice: under an hour of the processor for all, with AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in (".", "hooks")]

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeload.engine.row_products import by_zeros
from pipeload.weights.row_cuts import Cut, Given, RowRange, best_cut, ranges_are_exact

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (
    (576, 1536, 384),
    (576, 1536, 192),
    (576, 1536, 128),
    (640, 1024, 128),
    (320, 1411, 512),
    (500, 1000, 256),
)
"""Columns and rows of the weight, and about how many rows a range has."""
HALVES = ((160, 768, 192), (100, 1411, 512))
"""For all numbers of rows in half precision, where the processor may have no products of it."""
LARGE = ((576, 49152, 3520), (640, 262144, 6336), (4096, 11008, 512))
"""For few numbers of rows. MKL takes large weights otherwise than small ones."""
FEW = (1, 2, 3, 4, 5, 8, 12, 15, 16, 17, 24, 32, 48, 49, 56, 57, 64, 65, 130)
"""Numbers of rows on both sides of all that kernels were seen to look at."""
CAPS: tuple[dict[str, str], ...] = (
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ATEN_CPU_CAPABILITY": "avx512"},
)
_CODE = {  # "return 1" and "return 0" for x86-64
    "mkl_serv_intel_cpu_true": b"\xb8\x01\x00\x00\x00\xc3",
    "mkl_serv_intel_cpu": b"\xb8\x01\x00\x00\x00\xc3",
    "mkl_serv_cpuiszen": b"\x31\xc0\xc3",
}


def sweep(
    counts: Iterable[int],
    shapes: tuple[tuple[int, int, int], ...] = SHAPES,
    dtypes: Iterable[torch.dtype] = DTYPES,
) -> Iterator[tuple[str, int, int, int]]:
    """For each weight: what it is, products in ranges, in the whole's shape, and those that differ.

    Cut as a plan would cut it, but where it would not, too. Every second product has a bias; with
    the next weight the others have one.
    """
    counts = tuple(counts)
    for dtype in dtypes:
        for place, (columns, total, rows) in enumerate(shapes):
            whole = Cut(dtype, columns, (RowRange(0, total),))
            cut = best_cut(whole, rows, rows, anyhow=True)
            if cut is None:
                raise RuntimeError(f"{total} rows make no ranges of {rows}")
            yield f"{columns} x {total}", *_compare(cut, counts, place)


def _compare(cut: Cut, counts: Sequence[int], first: int) -> tuple[int, int, int]:
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(cut.total, cut.inputs, generator=random).to(cut.dtype)
    values = torch.randn(cut.total, generator=random).to(cut.dtype)
    ranged = slow = wrong = 0
    for place, count in enumerate(counts, first):
        bias = values if place % 2 else None
        mine = cut._replace(bias=bias is not None)
        given = torch.randn(count, cut.inputs, generator=random).to(cut.dtype)
        with torch.no_grad():
            wanted = functional.linear(given, nn.Parameter(weight), bias)
            exact = ranges_are_exact(mine, Given.of(given))
            ranged, slow = ranged + exact, slow + (not exact)
            if exact:
                parts = _in_ranges(mine, given, weight, bias)
            else:
                parts = _by_zeros(mine, given, weight, bias)
            wrong += not all(
                torch.equal(part, wanted[:, start : start + part.shape[-1]])
                for start, part in parts
            )
    return ranged, slow, wrong


def _in_ranges(
    cut: Cut, given: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    for start, stop in cut.ranges:
        some = None if bias is None else bias[start:stop]
        yield start, functional.linear(given, nn.Parameter(weight[start:stop]), some)


def _by_zeros(
    cut: Cut, given: Tensor, weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[int, Tensor]]:
    """The first range, the last one, and one that is another for every number of rows."""
    multiply = by_zeros(cut, given, bias)
    some = (0, len(cut.ranges) - 1, len(given) % len(cut.ranges))
    for number in sorted(set(some)):
        start, stop = cut.ranges[number]
        yield start, multiply(start, weight[start:stop])


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
    """One set of kernels: a process of its own."""

    caps: dict[str, str]
    intel: bool

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.caps.items()] or ["all kernels"]
        return " ".join([*words, *(["as Intel's"] if self.intel else [])])


JOBS = tuple(Job(caps, intel) for intel in (False, True) for caps in (CAPS[:4] if intel else CAPS))


class Line(NamedTuple):
    """What came out for one dtype and number of threads."""

    job: str
    dtype: str
    threads: str
    kernels: str
    """What `fingerprint` says."""
    weights: str
    """Which weights, and how many numbers of rows."""
    differ: str
    seconds: str
    """Of the processor."""


def fingerprint(dtype: torch.dtype) -> str:
    """Of what the kernels in use make of products whose terms cancel: rounding errors alone.

    Kernels with the same, in every one of many sizes, are the same ones, or as good as that.
    """
    told = hashlib.sha256()
    random = torch.Generator().manual_seed(2)
    for columns, total in ((576, 1536), (640, 1024), (100, 1411)):
        half = torch.randn(total, columns // 2, generator=random).to(dtype)
        weight = torch.cat([half, half], 1)[:, torch.randperm(columns, generator=random)]
        for count in FEW:
            half = torch.randn(count, columns // 2, generator=random).to(dtype)
            given = torch.cat([half, -half], 1)
            for rows in (total, 192, 128):
                with torch.no_grad():
                    made = functional.linear(given, nn.Parameter(weight[:rows]))
                told.update(made.view(torch.uint8).numpy().tobytes())
    return told.hexdigest()[:16]


def main() -> int:
    """Run all, each job in a process of its own; 1 if any product differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", default="", help="numbers, separated by commas; all when empty")
    parser.add_argument("--log", type=Path, help="a file, for what came out of each part")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return run_job(JOBS[options.child], options.log, short=options.short)
    if options.list:
        print(*(f"{number:3} {job}" for number, job in enumerate(JOBS)), sep="\n")
        return 0
    wanted = [int(n) for n in options.jobs.split(",") if n] or range(len(JOBS))
    with tempfile.TemporaryDirectory() as folder:
        log = options.log or Path(folder) / "log.tsv"
        bad = sum(_in_child(number, log, short=options.short) for number in wanted)
        seconds = sum(float(line.seconds) for line in read_log(log))
    print("0 differ" if not bad else "NOT ALL ARE EQUAL", f"({seconds:.0f} s of the processor)")
    return int(bad > 0)


def read_log(log: Path) -> list[Line]:
    """All its lines; none where there is no such file."""
    rows = log.read_text().splitlines() if log.exists() else []
    cells = (row.split("\t") for row in rows)
    return [Line(*row) for row in cells if len(row) == len(Line._fields)]


def _in_child(number: int, log: Path, *, short: bool) -> bool:
    """Whether any product of a job differs, or not all were made."""
    job = JOBS[number]
    print(f"{job}:", flush=True)
    command = [sys.executable, __file__, "--child", str(number), "--log", str(log)]
    command += ["--short"] if short else []
    env = {**os.environ, "OMP_WAIT_POLICY": "passive", **job.caps}
    status = subprocess.run(command, env=env, check=False).returncode
    if status > 1:
        print(f"  ended with {status}")
    return status != 0


def run_job(job: Job, log: Path, *, short: bool) -> int:
    """Try every dtype and number of threads; 1 if any product differs.

    Not what another job, or an earlier run, has tried with the same kernels.
    """
    if job.intel and not as_intel():
        print("  MKL cannot be told", flush=True)
        return 0
    wrong = 0
    for dtype in DTYPES:
        for threads in (2,) if short else (2, 1):
            torch.set_num_threads(threads)
            kernels, weights = fingerprint(dtype), "short" if short else "all"
            key = (str(dtype), str(threads), kernels, weights, "0")
            same = [line for line in read_log(log) if line[1:6] == key]
            about = f"  {dtype}, {threads} threads, kernels {kernels}:"
            if same:
                print(f"{about} 0 differ with the same kernels of {same[0].job}", flush=True)
                continue
            started, differ = time.process_time(), 0
            for what, ranged, slow, bad in _all(dtype, short=short):
                print(f"{about} {what}: {ranged} in ranges, {slow} as the whole, {bad} differ")
                sys.stdout.flush()
                differ += bad
            seconds = f"{time.process_time() - started:.0f}"
            line = Line(str(job), *key[:4], str(differ), seconds)
            with log.open("a") as file:
                file.write("\t".join(line) + "\n")
            wrong += differ
    return int(wrong > 0)


def _all(dtype: torch.dtype, *, short: bool) -> Iterator[tuple[str, int, int, int]]:
    if short:
        yield from sweep(range(1, 50), HALVES, (dtype,))
        return
    single = dtype is torch.float32
    yield from sweep(range(1, 301), SHAPES if single else HALVES, (dtype,))
    yield from sweep(FEW, LARGE if single else SHAPES, (dtype,))


if __name__ == "__main__":
    sys.exit(main())
