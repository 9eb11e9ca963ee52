#!/usr/bin/env python3
"""One question to `pipeload serve` against several that come together, on a slow disk.

    python tests/tools/serve_together.py FOLDER --limit 1.2GB --disk-rate 200MB --at-once 4

With --disk-rate the disk gives no more than so many bytes per second (needs root and a blkio cgroup
of version 1), so that it binds wherever this runs. One and several are asked in turn. Ends with 1
if an answer differs from the one that was given alone, or several take more than --most times as
long as one. A model without a tokenizer gets one that makes a token of each byte.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipeload
from pipeload._sizes import parse_size
from tests.support.commands import save_tokenizer
from tests.support.served import TEXT, Client, served
from tests.tools.many_at_once import slow_disk

QUESTIONS = ("Why is the sky blue?", "Name a river.", "What is a planet?", "Who was Euler?")


def ask(client: Client, number: int, tokens: int) -> str:
    """The answer to one of the questions."""
    question = f"{QUESTIONS[number % len(QUESTIONS)]} {number}"
    answer = client.ask(TEXT, {"prompt": question, "max_tokens": tokens})
    assert answer.status == 200, answer.text
    return answer.said


def main() -> int:
    """Measure. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", default="500MB")
    parser.add_argument("--disk-rate", type=parse_size)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--most", type=float, default=1.3)
    given = parser.parse_args()
    if not (given.folder / "tokenizer.json").exists():
        save_tokenizer(given.folder)
    model = pipeload.from_pretrained(
        given.folder, memory_limit=given.limit, dtype="auto", io_mode="direct"
    )
    model.generation_config.eos_token_id = None  # all answers have as many tokens
    numbers, tokens, ratios, equal = range(given.at_once), given.new_tokens, [], True
    with (
        served(given.folder, model=model, at_once=None) as server,
        ThreadPoolExecutor(given.at_once) as pool,
    ):
        client, read = server.client._replace(patience=3600), server.model.pipeload.stats
        alone = [ask(client, number, tokens) for number in numbers]
        with slow_disk(given.folder, given.disk_rate):
            for _ in range(given.rounds):
                times, before = [time.monotonic()], [read().bytes_read]
                for asked in (numbers[:1], numbers):
                    together = list(pool.map(lambda n: ask(client, n, tokens), asked))
                    equal &= together == alone[: len(together)]
                    times.append(time.monotonic())
                    before.append(read().bytes_read)
                one, several = times[1] - times[0], times[2] - times[1]
                more = (before[2] - before[1]) / (before[1] - before[0])
                ratios.append(several / one)
                print(
                    f"one {one:.1f} s, {given.at_once} together {ratios[-1]:.2f} times as long, "
                    f"{more:.2f} times the bytes"
                )
    ratio = statistics.median(ratios)
    print(f"{ratio:.2f} times as long, answers {'equal' if equal else 'DIFFER'}")
    return int(not equal or ratio > given.most)


if __name__ == "__main__":
    sys.exit(main())
