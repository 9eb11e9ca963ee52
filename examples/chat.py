"""A chat, as one would write it with transformers; only the line that loads the model differs.

    python chat.py [folder or hub id] [question ...]

Without questions it asks for them on a terminal; without a model it makes the demo's.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer, TextStreamer

import pipeload
from pipeload.demo.model import default_model_folder, make_smollm2

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = ("What is the capital of France?", "And of Italy?")


def questions() -> Iterator[str]:
    """From the command line, from the keyboard, or two to begin with."""
    if len(sys.argv) > 2:
        yield from sys.argv[2:]
    elif sys.stdin.isatty():
        while question := input("> "):
            yield question
    else:
        yield from EXAMPLES


def main() -> None:
    """Keep a conversation until there are no more questions."""
    name = sys.argv[1] if len(sys.argv) > 1 else str(make_smollm2(default_model_folder()))
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    # Was: model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    model = pipeload.from_pretrained(name, dtype="auto", memory_limit="auto")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    messages: list[dict[str, str]] = []
    for question in questions():
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=128, do_sample=False, streamer=streamer)
        answer = tokenizer.decode(
            output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
