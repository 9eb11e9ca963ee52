#!/usr/bin/env python3
"""Requests one by one against many at once: the same answers, how fast, and how much is read.

    python tests/tools/many_at_once.py FOLDER --limit 500MB --disk-rate 100MB --at-once 2 4 8

FOLDER is a model. With --disk-rate the disk gives no more than so many bytes per second (needs root
and a blkio cgroup of version 1), so that it binds wherever this runs. Ends with 1 if an answer
differs from that of a run alone, or more than 1.05 times the bytes of one request are read, or the
rate is less than --least-gain of as many times the rate of one by one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipeload
from pipeload._sizes import parse_size

BLKIO = Path("/sys/fs/cgroup/blkio")


@contextlib.contextmanager
def slow_disk(folder: Path, rate: int | None) -> Iterator[None]:
    """Inside, this process reads at most so many bytes per second from the disk of `folder`."""
    if rate is None:
        yield
        return
    group = BLKIO / f"pipeload-{os.getpid()}"
    group.mkdir()
    device = folder.resolve().stat().st_dev
    limit = f"{os.major(device)}:{os.minor(device)} {rate}"
    (group / "blkio.throttle.read_bps_device").write_text(limit)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def requests(count: int, tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, every other one sampled."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        ids = torch.randint(10, vocabulary - 1, (1, 8 + 3 * number), generator=generator)
        request = {"input_ids": ids, "max_new_tokens": tokens, "eos_token_id": None}
        drawn = {"do_sample": True, "seed": number} if number % 2 else {"do_sample": False}
        made.append({**request, **drawn, "pad_token_id": 0})
    return made


def alone(model: Any, request: dict[str, Any]) -> Any:
    """What one gives by itself."""
    arguments = dict(request)
    torch.manual_seed(arguments.pop("seed", 0))
    return model.generate(**arguments)


def main() -> int:
    """Measure. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", default="500MB")
    parser.add_argument("--disk-rate", type=parse_size)
    parser.add_argument("--at-once", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--least-gain", type=float, default=0.0)
    given = parser.parse_args()
    most, failed = max(given.at_once), False
    model = pipeload.from_pretrained(
        given.folder,
        memory_limit=given.limit,
        dtype="auto",
        io_mode="direct",
        tokens=128,
        batch=most,
    )
    handle = pipeload.handle(model)
    many = requests(most, given.new_tokens, model.config.vocab_size)
    alone(model, many[-1])
    with slow_disk(given.folder, given.disk_rate):
        wanted, seconds, read = [], [], []
        for request in many:
            began, before = time.monotonic(), handle.stats().bytes_read
            wanted.append(alone(model, request))
            seconds.append(time.monotonic() - began)
            read.append(handle.stats().bytes_read - before)
        for count in given.at_once:
            began, before = time.monotonic(), handle.stats().bytes_read
            found = dict(pipeload.generate_many(model, many[:count], at_once=count))
            took, nbytes = time.monotonic() - began, handle.stats().bytes_read - before
            equal = sum(torch.equal(found[n], wanted[n]) for n in range(count))
            gain, share = sum(seconds[:count]) / took, nbytes / max(read[:count])
            good = equal == count and share <= 1.05 and gain >= given.least_gain * count
            failed |= not good
            print(
                f"{count} at once: {equal} equal, {gain:.2f} times the rate of one by one "
                f"({count * given.new_tokens / took:.2f} tokens/s), {share:.3f} times the bytes of "
                f"one request, peak {handle.stats().peak_rss_bytes / 1e6:.0f} MB"
                + ("" if good else "  <-- not as it should be")
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
