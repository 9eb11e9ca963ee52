#!/usr/bin/env python3
"""What a draft is worth: tokens per second with and without one, prompt by prompt.

    python tests/tools/drafts.py FOLDER --share 0.6 --disk-rate 100MB

FOLDER is a model with a chat template. --draft says what guesses: "auto" is its own copy by
`pipeload quantize` beside it. The limit is --limit, or the smallest with which the model works and
--share of its size more. Two processes, one with the draft and one without, answer each prompt in
turn, so that both meet the same load. With --disk-rate the disk gives each no more than so many
bytes per second (needs root and a blkio cgroup of version 1). Ends with 1 if the middle of the
ratios is less than --least-gain, or one of them less than --least.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import AutoTokenizer

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipeload
from pipeload._sizes import format_size, parse_size
from tests.tools.many_at_once import slow_disk

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a dog.",
    "List three rivers in Europe.",
    "What is a prime number?",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
    "Give me tips for learning a language.",
    "What is photosynthesis?",
    "Describe a sunset at the sea.",
    "Why do cats purr?",
)


class Took(NamedTuple):
    """Of one answer."""

    rate: float
    """Tokens per second, the prompt's pass and all else included."""
    kept: float
    """Tokens for each pass of the model."""
    ids: list[int]
    """Those that came."""


def answer(model: Any, tokenizer: Any, prompt: str, tokens: int) -> Took:
    """One answer, without sampling."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = inputs["input_ids"]
    before, began = pipeload.handle(model).stats().passes, time.monotonic()
    made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    seconds = time.monotonic() - began
    passes = pipeload.handle(model).stats().passes - before
    new = made[0, ids.shape[1] :].tolist()
    return Took(len(new) / seconds, len(new) / passes, new)


def work(given: argparse.Namespace, limit: int, draft: str, asked: Connection) -> None:
    """In a process of its own: answer what comes, until None does; then the peak of memory."""
    logging.basicConfig(format="  [%(processName)s] %(message)s")
    logging.getLogger("pipeload").setLevel(logging.INFO)
    tokenizer: Any = AutoTokenizer.from_pretrained(given.folder)
    model = pipeload.from_pretrained(
        given.folder,
        memory_limit=limit,
        dtype="auto",
        tokens=128,
        io_mode="direct",
        draft=draft,
    )
    with slow_disk(given.folder, given.disk_rate):
        asked.send("ready")
        while (prompt := asked.recv()) is not None:
            asked.send(answer(model, tokenizer, prompt, given.new_tokens))
    asked.send(pipeload.handle(model).stats().peak_rss_bytes)


def main() -> int:
    """Print a line for each prompt, and the ratio in the middle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--limit", type=parse_size)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--disk-rate", type=parse_size)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--least-gain", type=float, default=0.0)
    parser.add_argument("--least", type=float, default=0.0)
    given = parser.parse_args()
    size = sum(file.stat().st_size for file in given.folder.glob("*.safetensors"))
    limit = given.limit
    if limit is None:
        smallest = pipeload.smallest_limit(given.folder, dtype="auto", tokens=128)
        limit = smallest + int(given.share * size)
        print(f"limit {format_size(limit)}: the smallest, {format_size(smallest)}, and")
        print(f"{given.share:g} of the weights' {format_size(size)}")
    context = multiprocessing.get_context("spawn")
    ends = []
    for draft in ("off", given.draft):
        mine, theirs = context.Pipe()
        context.Process(target=work, args=(given, limit, draft, theirs), name=draft).start()
        assert mine.recv() == "ready"
        ends.append(mine)
    ratios = []
    for number, prompt in enumerate(PROMPTS[: given.prompts]):
        took = {}
        for place in (0, 1) if number % 2 else (1, 0):
            ends[place].send(prompt)
            took[place] = ends[place].recv()
        alone, guessed = took[0], took[1]
        ratios.append(guessed.rate / alone.rate)
        same = "the same" if alone.ids == guessed.ids else "OTHER"
        print(
            f"{ratios[-1]:5.2f} times: {alone.rate:.2f} tokens/s alone, {guessed.rate:.2f} with "
            f"drafts ({guessed.kept:.1f} per pass), {same} tokens: {prompt}",
            flush=True,
        )
    peaks = []
    for end in ends:
        end.send(None)
        peaks.append(end.recv())
    print(
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, in the middle {median(ratios):.2f};"
        f" peaks {' and '.join(map(format_size, peaks))} of {format_size(limit)}"
    )
    return int(median(ratios) < given.least_gain or min(ratios) < given.least)


if __name__ == "__main__":
    sys.exit(main())
