"""A file of requests on Ray Data: each actor holds a streamed model, and answers blocks of lines.

    python ray_batch.py requests.jsonl results.jsonl [--model M] [--actors N] [--shard I/N]

Each line of the first file is a request of OpenAI's batch format, as for `pipeload batch`; each of
the second is a result. An actor answers the requests of a block together, by the same readings of
the weights, each bit for bit as alone. Ray takes about 1 GB on every machine beside the models:
where that is too much, `pipeload batch --shard I/N` needs nothing but itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import pipeload
from pipeload.demo.model import default_model_folder, make_smollm2

LINES = 8  # in a block: so many requests share each reading
DRAWN = ("temperature", "top_p", "seed")  # a line that gives one of them is sampled


class Answering:
    """One actor: a model, streamed within a limit of its own."""

    def __init__(self, model: str, memory_limit: int | str) -> None:
        """`memory_limit` is of this actor's process, all that Ray loads into it included."""
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model = pipeload.from_pretrained(model, dtype="auto", memory_limit=memory_limit)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """A result for each `line` of a block, which Ray gives as columns."""
        lines = [json.loads(line) for line in block["line"]]
        given = [self._arguments(line["body"]) for line in lines]
        results = [{"custom_id": line["custom_id"]} for line in lines]
        good = [place for place, one in enumerate(given) if isinstance(one, dict)]
        outputs = pipeload.generate_many(self._model, [given[place] for place in good])
        made = {good[number]: output for number, output in outputs}
        for place, result in enumerate(results):
            output = made.get(place, given[place])
            if isinstance(output, Exception):
                result["error"] = f"{type(output).__name__}: {output}"
            else:
                new = output[0, given[place]["input_ids"].shape[1] :]
                result["text"] = self._tokenizer.decode(new, skip_special_tokens=True)
        return {"result": [json.dumps(result) for result in results]}

    def _arguments(self, body: dict[str, Any]) -> Any:
        """What `generate` is asked for; an error if the line asks for what is not served here."""
        if unknown := body.keys() - {"messages", "prompt", "max_tokens", *DRAWN}:
            return ValueError(f"{min(unknown)!r} is not served here. Leave it out.")
        if "prompt" in body:
            inputs = self._tokenizer(body["prompt"], return_tensors="pt")
        else:
            inputs = self._tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        drawn = {name: body[name] for name in DRAWN if name in body}
        new = body.get("max_tokens", 32)
        return {**inputs, **drawn, "max_new_tokens": new, "do_sample": bool(drawn)}


def part_of(file: Path, shard: str) -> list[dict[str, str]]:
    """Every N-th line, from the I-th on, of those that are not empty."""
    part, _, parts = shard.partition("/")
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [{"line": line} for line in lines[int(part) - 1 :: int(parts)]]


def main() -> None:
    """Answer a part of the file."""
    import ray

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("requests", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", help="the demo's when left out")
    parser.add_argument("--actors", type=int, default=1, help="each with a model of its own")
    parser.add_argument("--memory-limit", help="of each actor, such as 4GB")
    parser.add_argument("--shard", default="1/1", help="I/N: a part for each of N clusters")
    asked = parser.parse_args()
    model = asked.model or str(make_smollm2(default_model_folder()))
    limit = asked.memory_limit or pipeload.smallest_limit(model, dtype="auto") * 5 // 4

    lines = part_of(asked.requests, asked.shard)
    answered = ray.data.from_items(lines).map_batches(
        Answering,
        fn_constructor_args=(model, limit),
        batch_size=LINES,
        compute=ray.data.ActorPoolStrategy(size=asked.actors),
    )
    with asked.results.open("w", encoding="utf-8") as file:
        file.writelines(row["result"] + "\n" for row in answered.iter_rows())
    print(f"{len(lines)} results; actors: {asked.actors}, each within {limit} bytes")


if __name__ == "__main__":
    main()
