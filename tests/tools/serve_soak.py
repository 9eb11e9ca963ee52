#!/usr/bin/env python3
"""Mixed requests to `pipeload serve` under a kernel cap: none is wrong, and the server lives on.

    python -m tests.tools.serve_soak FOLDER --requests 1000 --limit 560MB

FOLDER is a model with a tokenizer. Clients ask for texts, whole and in pieces, greedy and drawn; a
tenth of the requests is too long for the memory, wrong, or left in the middle. With --cap (needs
root) the server is in a memory cgroup of its limit. Ends with 1 if an answer is not the one of
plain transformers, a status is another than it should be, the server holds more than its limit or
ends, or keeps anything of requests that have ended.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers

from pipeload._sizes import parse_size
from tests.support.cgroups import memory_cgroup
from tests.support.models import load_plain
from tests.support.served import TEXT, Client

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("the", "lamp", "of", "a", "ship", "that", "goes", "to", "sea", "when", "nobody", "looks")
CLIENTS = 10
START_SECONDS = 120


class Kind(NamedTuple):
    """What a request is for, and what is to come of it."""

    name: str
    statuses: tuple[int, ...]
    body: dict[str, Any]


class Expected:
    """What plain transformers answer; computed once for each question."""

    def __init__(self, folder: Path) -> None:
        self._model = load_plain(folder)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def text(self, body: dict[str, Any]) -> str:
        """The text that a request is to be answered with."""
        asked = {name: value for name, value in body.items() if name != "stream"}
        with self._lock:
            if (key := repr(asked)) not in self._known:
                self._known[key] = self._generate(**asked)
            return self._known[key]

    def _generate(self, prompt: str, max_tokens: int, seed: int | None = None) -> str:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        if seed is not None:
            torch.manual_seed(seed)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        output = self._model.generate(
            **given, max_new_tokens=max_tokens, do_sample=seed is not None
        )
        new = output[0, inputs["input_ids"].shape[1] :]
        return str(self._tokenizer.decode(new, skip_special_tokens=True))


def made(chance: random.Random, questions: Sequence[dict[str, Any]], tokens: int) -> Kind:
    """A request with everything about it random; those that are left ask for so many tokens."""
    body = chance.choice(questions) | {"stream": chance.random() < 0.5}
    if chance.random() >= 0.1:
        return Kind("answered", (200,), body)
    return chance.choice(
        [
            Kind("too long", (400, 413), body | {"max_tokens": 8000}),
            Kind("wrong", (400,), body | {"logprobs": 5}),
            Kind("left", (), body | {"stream": True, "max_tokens": tokens}),
        ]
    )


def questions_of(chance: random.Random, count: int, longest: int) -> list[dict[str, Any]]:
    """Prompts of many lengths, every other one to be answered by drawing."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        words = chance.randint(longest // 2, longest) if number % 8 == 7 else chance.randint(1, 12)
        prompt = " ".join(chance.choices(WORDS, k=words))
        drawn = {"seed": number} if number % 2 else {}
        found.append({"prompt": prompt, "max_tokens": chance.randint(1, 16), **drawn})
    return found


def ask(client: Client, kind: Kind, expected: Expected, found: Counter[str]) -> None:
    """Ask once more while the server is busy; count what came of it."""
    if kind.name == "left":
        with contextlib.closing(client.open(TEXT, kind.body)) as connection:
            response = connection.getresponse()
            response.read(1)
            response.close()
        found["left"] += 1
        return
    while True:
        answer = client.ask(TEXT, kind.body)
        if answer.status != 429:
            break
        found["sent away"] += 1
        time.sleep(min(0.2, float(answer.headers["retry-after"])))
    if answer.status not in kind.statuses:
        found["wrong status"] += 1
        print(f"{answer.status} for {kind}: {answer.text[:500]}")
        return
    if answer.status == 200 and answer.said != expected.text(kind.body):
        found["wrong text"] += 1
        print(f"{answer.said!r} for {kind}, and not {expected.text(kind.body)!r}")
    found[kind.name] += 1


@contextlib.contextmanager
def running(folder: Path, limit: int, *, cap: bool) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port; it must end well, at the end."""
    command = [sys.executable, "-m", "pipeload", "serve", str(folder), "--port", "0"]
    command += ["--memory-limit", str(limit), "--at-once", "6", "--waiting", "3", "--grace", "5"]
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_cgroup(limit)) if cap else None
        start = subprocess.Popen if group is None else group.popen
        options: dict[str, Any] = {"text": True} if group is None else {}
        process = start(command, stderr=subprocess.PIPE, cwd=ROOT, **options)
        try:
            assert process.stderr is not None
            lines = []
            until = time.monotonic() + START_SECONDS
            while not (
                found := re.search(r"http://127.0.0.1:(\d+)/", line := process.stderr.readline())
            ):
                lines.append(line)
                assert line, "".join(lines)
                assert time.monotonic() < until, "".join(lines)
            yield process, int(found[1])
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_SECONDS) == 0, process.stderr.read()
        finally:
            process.kill()
            process.communicate()


def memory_of(pid: int) -> dict[str, int]:
    """Bytes that a process holds, and held at most; and its threads."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmHWM|RssAnon|Threads):\s+(\d+)", text, re.MULTILINE))
    return {name: int(value) * (1 if name == "Threads" else 1024) for name, value in found.items()}


def soak(
    folder: Path,
    limit: int,
    count: int,
    *,
    longest: int = 200,
    tokens: int = 60,
    cap: bool = False,
) -> dict[str, Any]:
    """Ask `count` times, so many at once; what came of it. Sizes in bytes."""
    chance = random.Random(1)
    expected, found = Expected(folder), Counter[str]()
    questions = questions_of(chance, 24, longest)
    with running(folder, limit, cap=cap) as (process, port), ThreadPoolExecutor(CLIENTS) as pool:
        client = Client(port)
        kinds = [made(chance, questions, tokens) for _ in range(count)]
        half = len(kinds) // 2
        levels = []
        for part in (kinds[:half], kinds[half:]):
            list(pool.map(lambda kind: ask(client, kind, expected, found), part))
            wait_until_idle(client)
            levels.append(memory_of(process.pid))
        health = client.ask("/health").status
    return {
        **found,
        "health": health,
        "peak": levels[-1]["VmHWM"],
        "grown": levels[1]["RssAnon"] - levels[0]["RssAnon"],
        "threads": levels[1]["Threads"] - levels[0]["Threads"],
    }


def wait_until_idle(client: Client) -> None:
    """Return once nothing runs."""
    until = time.monotonic() + START_SECONDS
    while "pipeload_running 0.0" not in client.ask("/metrics").text:
        assert time.monotonic() < until
        time.sleep(0.05)


def main() -> int:
    """Ask. Returns 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--limit", type=parse_size, default=560_000_000)
    parser.add_argument("--cap", action="store_true")
    given = parser.parse_args()
    result = soak(given.folder, given.limit, given.requests, cap=given.cap)
    print(result)
    wrong = result.get("wrong text", 0) + result.get("wrong status", 0)
    return int(wrong > 0 or result["peak"] > given.limit or result["health"] != 200)


if __name__ == "__main__":
    sys.exit(main())
