#!/usr/bin/env python3
"""Many requests of many lengths, as a server gets them: none is refused, and memory stays flat.

    python tests/tools/many_requests.py --requests 2000 --lengths 300 --dtype bfloat16

Kernels keep memory for shapes that they have seen. A small random LLaMA answers prompts of 1 to
LENGTHS tokens at its smallest limit and 35 MB. Prints the process's anonymous memory along the way;
ends with 1 if more requests than --most-refused were refused, the limit was exceeded, or memory
grew by more than --most-growth MB in the second half.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pipeload

SPARE = 35_000_000


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> int:
    """Send the requests. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--lengths", type=int, default=300)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--most-refused", type=int, default=0)
    parser.add_argument("--most-growth", type=int, default=10, help="MB")
    given = parser.parse_args()
    dtype = getattr(torch, given.dtype)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8192,
        )
        LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
        refused, growth = serve(folder, dtype, given.requests, given.lengths)
    return int(refused > given.most_refused or growth > given.most_growth * 1e6)


def serve(folder: str, dtype: torch.dtype, requests: int, lengths: int) -> tuple[int, int]:
    """Answer `requests` prompts of 1 to `lengths` tokens.

    Returns how many of them were refused, and by how many bytes memory grew in the second half.
    """
    hint = lengths + 2
    limit = pipeload.smallest_limit(folder, dtype=dtype, tokens=hint) + SPARE
    model = pipeload.from_pretrained(folder, dtype=dtype, memory_limit=limit, tokens=hint)
    chosen, refused, seen = random.Random(3), 0, []
    for number in range(1, requests + 1):
        ids = torch.randint(3, 8000, (1, chosen.randint(1, lengths)))
        try:
            model.generate(ids, max_new_tokens=2, do_sample=False)
        except pipeload.MemoryLimitError as error:
            refused += 1
            print(error)
        if number % max(1, requests // 8) == 0:
            seen.append(anonymous_bytes())
            print(f"after {number} requests: anonymous {seen[-1] / 1e6:.0f} MB, refused {refused}")
    peak = model.pipeload.stats().peak_since_load_bytes
    growth = seen[-1] - seen[len(seen) // 2 - 1]
    print(
        f"limit {limit / 1e6:.0f} MB, peak since load {peak / 1e6:.0f} MB, {growth / 1e6:+.1f} MB"
    )
    if peak > limit:
        sys.exit(1)
    return refused, growth


if __name__ == "__main__":
    sys.exit(main())
