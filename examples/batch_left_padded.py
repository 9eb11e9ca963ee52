"""Several prompts in one batch: each time the weights are read, every answer grows by a token.

    python batch_left_padded.py [folder or hub id]

The prompts differ in length. Answers grow at the right end, so the shorter ones are padded on the
left. Without a model it makes the demo's.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoTokenizer

import pipeload
from pipeload.demo.model import default_model_folder, make_smollm2

QUESTIONS = (
    "What is the capital of France?",
    "Name a river.",
    "Which language do most people in Brazil speak at home, at school and at work?",
    "What is the opposite of hot?",
)
TOKENS = 128  # of the longest prompt and its answer, at most


def main() -> None:
    """Answer all questions at once."""
    name = sys.argv[1] if len(sys.argv) > 1 else str(make_smollm2(default_model_folder()))
    tokenizer: Any = AutoTokenizer.from_pretrained(name, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Little more than the least that works, so that a small model is streamed, too. For a large
    # one say what you can spare: memory_limit="4GB".
    batch = len(QUESTIONS)
    least = pipeload.smallest_limit(name, dtype="auto", tokens=TOKENS, batch=batch)
    model = pipeload.from_pretrained(
        name, dtype="auto", memory_limit=least * 11 // 10, tokens=TOKENS, batch=batch
    )

    inputs = tokenizer.apply_chat_template(
        [[{"role": "user", "content": question}] for question in QUESTIONS],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answers = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}\n    {' '.join(answer.split())}")

    stats = model.pipeload.stats()
    print(
        f"\nThe weights were read {stats.passes} times, for {stats.tokens_per_pass:g} tokens each:"
    )
    print(stats.table())


if __name__ == "__main__":
    main()
