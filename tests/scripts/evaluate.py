"""Score the sentences of a file, in batches that are padded on the left."""

import argparse
import os
import sys

HERE = os.path.dirname(__file__)
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from scoring import score
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=1, help="sentences at once")
    parser.add_argument("--memory-limit", default="none", help="only printed")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    with open(os.path.join(HERE, "sentences.txt"), encoding="utf-8") as file:
        lines = file.read().splitlines()
    total = 0.0
    for start in range(0, len(lines), args.batch):
        scores, counts = score(model, tokenizer, lines[start : start + args.batch])
        for value, count in zip(scores, counts):
            print(f"{value!r} {count}")
            total += value
    print(f"total {total!r}, limit {args.memory_limit}")
    sys.exit(3)


if __name__ == "__main__":
    main()
