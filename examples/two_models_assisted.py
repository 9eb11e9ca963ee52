"""Assisted generation: a draft proposes tokens, the target checks them all in one pass.

    python two_models_assisted.py [target] [draft]

Both are streamed under one memory limit, and the answer is the target's own. For the draft take a
smaller model with the same tokenizer. Without one it is the target itself, a second time: such a
draft is always right, so this shows how few passes the target can do with, not a gain in time.
Without a target it makes the demo's model.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoTokenizer

import pipeload
from pipeload.demo.model import default_model_folder, make_smollm2

QUESTION = "What is the capital of France, and what is it known for?"


def main() -> None:
    """Answer one question with two models."""
    target_name = sys.argv[1] if len(sys.argv) > 1 else str(make_smollm2(default_model_folder()))
    draft_name = sys.argv[2] if len(sys.argv) > 2 else target_name
    tokenizer: Any = AutoTokenizer.from_pretrained(target_name)

    # Little more than the least that works for both, so that small ones are streamed, too. For
    # large ones say what you can spare: "4GB".
    plans = [pipeload.plan(name, dtype="auto") for name in (target_name, draft_name)]
    floor = plans[0].floor_bytes  # Python and its libraries, once for both
    limit = (floor + sum(plan.smallest_limit - floor for plan in plans)) * 11 // 10
    target = pipeload.from_pretrained(target_name, dtype="auto", memory_limit=limit)
    draft = pipeload.from_pretrained(draft_name, dtype="auto")  # under the same limit

    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = target.generate(**inputs, assistant_model=draft, max_new_tokens=40, do_sample=False)
    new = output[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(new, skip_special_tokens=True))

    stats = {"target": target.pipeload.stats(), "draft": draft.pipeload.stats()}
    print(f"\n{len(new)} tokens in {stats['target'].passes} passes of the target.")
    for name, figures in stats.items():
        read = f"{figures.bytes_read / 1e9:.2f} GB read"
        print(
            f"{name}: {figures.passes} passes, {read}, {figures.resident_bytes / 1e6:.0f} MB held"
        )
    peak = stats["target"].peak_rss_bytes
    print(f"Both under {limit / 1e6:.0f} MB; the most that was held is {peak / 1e6:.0f} MB.")


if __name__ == "__main__":
    main()
