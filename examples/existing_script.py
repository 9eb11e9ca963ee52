"""A script that knows transformers alone.

Unchanged, its model is streamed from disk by

    python -m pipeload --memory-limit 2GB existing_script.py [folder or hub id]

It prints the same without `-m pipeload --memory-limit 2GB`, if memory holds the model.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Answer one question."""
    name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    messages = [{"role": "user", "content": "Name three rivers in Europe."}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    main()
