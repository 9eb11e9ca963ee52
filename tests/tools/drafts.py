#!/usr/bin/env python3
"""What a draft is worth: seconds per token with and without one, prompt by prompt.

    python tests/tools/drafts.py FOLDER DRAFT --limit 564MB --disk-rate 100MB

FOLDER is a model with a chat template, DRAFT a smaller one with the same tokens, such as its own
copy by `pipeload quantize`. Both share the limit. With --disk-rate the disk gives no more than so
many bytes per second (needs root and a blkio cgroup of version 1).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from transformers import AutoTokenizer

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipeload
from pipeload._sizes import parse_size
from tests.tools.many_at_once import slow_disk

PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a dog.",
    "List three rivers in Europe.",
    "What is a prime number?",
    "How do I boil an egg?",
    "Who wrote Hamlet?",
)


class Took(NamedTuple):
    """Of one answer."""

    seconds: float
    """For each token."""
    kept: float
    """Tokens for each pass of the model."""


def answers(model: Any, given: argparse.Namespace, draft: Any = None) -> list[Took]:
    """One answer to each prompt, without sampling."""
    tokenizer: Any = AutoTokenizer.from_pretrained(given.folder)
    took = []
    for prompt in PROMPTS:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        before, began = pipeload.handle(model).stats().passes, time.monotonic()
        more = {} if draft is None else {"assistant_model": draft}
        made = model.generate(ids, max_new_tokens=given.new_tokens, do_sample=False, **more)
        new = made.shape[1] - ids.shape[1]
        seconds = time.monotonic() - began
        passes = pipeload.handle(model).stats().passes - before
        took.append(Took(seconds / new, new / passes))
    return took


def main() -> None:
    """Print a line for each prompt, and the ratio in the middle."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--limit", default="564MB")
    parser.add_argument("--disk-rate", type=parse_size)
    parser.add_argument("--new-tokens", type=int, default=24)
    given = parser.parse_args()
    options: dict[str, Any] = {"memory_limit": given.limit, "dtype": "auto", "tokens": 128}
    options["io_mode"] = "direct"
    model = pipeload.from_pretrained(given.folder, **options)
    with slow_disk(given.folder, given.disk_rate):
        alone = answers(model, given)
        draft = pipeload.from_pretrained(given.draft, **options)
        guessed = answers(model, given, draft)
    for prompt, without, with_it in zip(PROMPTS, alone, guessed, strict=True):
        print(
            f"{without.seconds:.2f} s per token alone, {with_it.seconds:.2f} with a draft "
            f"({with_it.kept:.1f} tokens per pass): {prompt}"
        )
    ratios = [one.seconds / other.seconds for one, other in zip(alone, guessed, strict=True)]
    print(
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast, in the middle {median(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
