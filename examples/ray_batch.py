"""A file of requests on Ray Data: each actor holds a streamed model, and answers blocks of lines.

    python ray_batch.py requests.jsonl results.jsonl [--model M] [--actors N] [--shard I/N]

Each line of the first file is a request of OpenAI's batch format, and each of the second a result,
both as for `pipeload batch`; a line that is wrong has its error there, and the others go on. An
actor answers the requests of a block together, by the same readings of the weights, each bit for
bit as alone. Ray takes about 1 GB on every machine beside the models: where that is too much,
`pipeload batch --shard I/N` needs nothing but itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import pipeload
from pipeload.demo.model import default_model_folder, make_smollm2
from pipeload.serving.outcome import blamed, fitted, settings_of
from pipeload.serving.reply import answer, ends_of
from pipeload.serving.request import Asked, parse
from pipeload.serving.request_error import RequestError, parse_json

LINES = 8  # in a block: so many requests share each reading
NEW_TOKENS = 32  # of an answer whose line gives no length


class Answering:
    """One actor: a model, streamed within a limit of its own."""

    def __init__(self, model: str, memory_limit: int | str) -> None:
        """`memory_limit` is of this actor's process, all that Ray loads into it included."""
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model = pipeload.from_pretrained(model, dtype="auto", memory_limit=memory_limit)
        self._name = model
        self._settings = settings_of(self._model, tokenizer, model, max_new_tokens=NEW_TOKENS)

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """A result for each `line` of a block, which Ray gives as columns."""
        results: list[dict[str, Any]] = [{"custom_id": None} for _ in block["line"]]
        asked = map(self._asked, block["line"], results)
        good = [(one, result) for one, result in zip(asked, results, strict=True) if one]
        requests = [one.arguments for one, _ in good]
        for number, output in pipeload.generate_many(self._model, requests):
            one, result = good[number]
            if isinstance(output, BaseException):
                _refuse(result, output)
            else:
                body, _ = answer(one, output, self._settings, ends_of(self._model))
                result["response"] = {"status_code": 200, "body": body}
        return {"result": [json.dumps(result) for result in results]}

    def _asked(self, line: str, result: dict[str, Any]) -> Asked | None:
        """What a line asks for; None, and its error in `result`, where that is not served."""
        try:
            given = parse_json(line.encode())
            result["custom_id"] = given["custom_id"]
            asked = parse(given["url"], given["body"], self._settings)
            return fitted(asked, self._model, self._name)
        except RequestError as error:
            _refuse(result, error)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            _refuse(result, RequestError(f"the line is no request: {error!r}."))
        return None


def _refuse(result: dict[str, Any], error: BaseException) -> None:
    """Write the error of one line; raise what the next ones would meet as well."""
    told = error if isinstance(error, RequestError) else blamed(error)
    if told is None:
        raise error
    result["response"] = {"status_code": told.status, "body": told.body()}


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
