"""`pipeload batch --batched` and `--prefix-cache`: answers whose last bits are not promised."""

from __future__ import annotations

import json
import os
import random
import signal
import weakref
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.cli.batch_file import Results
from pipeload.entry.batched import Batched
from pipeload.errors import MemoryLimitError
from pipeload.serving.prefixes import Prefixes
from tests.rooms.cli.test_batch import (
    NEW,
    TEXT,
    batch,
    body_of,
    chat,
    request,
    results_of,
    text_of,
    write,
)
from tests.rooms.cli.test_batch import files as files  # noqa: PLC0414 - a fixture
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.commands import answer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.tools.batch_kills import check_results, kill_once

if TYPE_CHECKING:
    from pathlib import Path

LONG = "A text that is long enough to be kept."


def test_rows_of_one_pass(talker: Path, files: tuple[Path, Path]) -> None:
    """Greedy answers are those of run, up to last bits; every one says that it is not promised."""
    stop = answer(talker, "abc", "--max-new-tokens", 12, "--no-chat-template")["text"][2:4]
    stopped = {"prompt": "abc", "max_tokens": 12, "stop": [stop]}
    lines = [chat(), chat("Well?", temperature=0.7, top_p=0.9, top_k=30), chat(temperature=1.5)]
    asked = [request(number, body) for number, body in enumerate(lines)]
    write(files[0], [*asked, request(3, stopped, TEXT), request(4, chat("Longer, " * 20))])
    done = batch(talker, files, "--batched", "--dtype", "fp32")
    assert done.exit_code == 0, done.output
    found = results_of(files[1])
    assert len(found) == 5
    assert all(body_of(result)["pipeload"] == {"exact": False} for result in found.values())
    assert not any("seed" in body_of(result) for result in found.values())
    wanted = answer(talker, "Hello", "--max-new-tokens", NEW, "--dtype", "fp32")
    assert text_of(found["batch_req_1"]) == wanted["text"]
    ended = body_of(found["batch_req_4"])
    assert stop not in text_of(found["batch_req_4"])
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] < 12


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (chat(seed=5), "seed=5"),
        (chat(n=2, temperature=1), "n=2"),
        (chat(repetition_penalty=1.5), "repetition_penalty=1.5"),
    ],
)
def test_what_rows_cannot_have(
    talker: Path, files: tuple[Path, Path], body: dict[str, Any], name: str
) -> None:
    """It is told, and not ignored."""
    write(files[0], [request(0, body), request(1, chat())])
    assert batch(talker, files, "--batched").exit_code == 0
    found = results_of(files[1])
    refused = found["batch_req_1"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["message"].startswith(f"{name} is not served with --batched.")
    assert body_of(found["batch_req_2"])


def test_more_at_once_than_a_pass_has_rows(talker: Path, files: tuple[Path, Path]) -> None:
    """It is told, and not cut short."""
    write(files[0], [request(0, chat())])
    done = batch(talker, files, "--batched", "--at-once", "257")
    assert done.exit_code != 0
    assert "--at-once 257 is more requests than --batched has rows for, 256. Give" in done.stderr


@pytest.mark.parametrize(
    "other", [["--prefix-cache", "1MB"], ["--max-temperature", "80"], ["--device", "cuda"]]
)
def test_options_that_do_not_go_together(
    talker: Path, files: tuple[Path, Path], other: list[str]
) -> None:
    """Nothing is read, and nothing written."""
    write(files[0], [request(0, chat())])
    done = batch(talker, files, "--batched", *other)
    assert done.exit_code != 0
    assert f"--batched goes with no {other[0]}. Leave one of them out." in done.stderr
    assert not files[1].exists()


@pytest.mark.parametrize("other", [["--batched"], ["--prefix-cache", "1MB"]])
def test_options_that_do_not_go_with_ranks(
    talker: Path, files: tuple[Path, Path], other: list[str]
) -> None:
    """What each rank would keep, and how much, is its own."""
    write(files[0], [request(0, chat())])
    done = batch(talker, files, "--ranks", "auto", *other)
    assert done.exit_code != 0
    assert f"--ranks goes with no {other[0]}. Leave one of them out." in done.stderr


@pytest.mark.slow
def test_a_kill(talker: Path, files: tuple[Path, Path]) -> None:
    """At a random moment: no result is lost, doubled or torn."""
    write(files[0], [request(number, chat(max_tokens=9)) for number in range(40)])
    assert kill_once(talker, files, random.Random(5), "--batched", "--at-once", "4")
    assert 0 < files[1].read_bytes().count(b"\n") < 40
    assert batch(talker, files, "--batched").exit_code == 0
    check_results(files, wanted=40)


def test_a_beginning_that_was_computed(talker: Path, files: tuple[Path, Path]) -> None:
    """What one request leaves another begins with; that one says so, and how much it was."""
    asked = [request(number, chat(LONG, max_tokens=2)) for number in range(2)]
    write(files[0], [*asked, request(2, chat(LONG, n=2, seed=1, max_tokens=2))])
    done = batch(talker, files, "--prefix-cache", "1MB", "--at-once", "1")
    assert done.exit_code == 0, done.output
    first, second, several = (body_of(results_of(files[1])[f"batch_req_{n}"]) for n in (1, 2, 3))
    assert "pipeload" not in first
    assert second["pipeload"] == {"exact": False}
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(LONG)
    assert second["choices"][0]["message"] == first["choices"][0]["message"]
    assert "pipeload" not in several


def test_nothing_is_held_of_what_has_ended(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once another is asked for: what is let go of is memory for it."""
    caches: list[Any] = []
    left: list[bool] = []
    keep, lend = Prefixes.keep, Prefixes.lend

    def kept(prefixes: Prefixes, output: Any) -> Any:
        caches.append(weakref.ref(output.past_key_values))
        return keep(prefixes, output)

    def lent(prefixes: Prefixes, arguments: Any) -> Any:
        prefixes.give_back(1 << 30)
        left.extend(cache() is not None for cache in caches)
        return lend(prefixes, arguments)

    monkeypatch.setattr(Prefixes, "keep", kept)
    monkeypatch.setattr(Prefixes, "lend", lent)
    write(files[0], [request(number, chat(LONG, max_tokens=2)) for number in range(3)])
    done = batch(talker, files, "--prefix-cache", "1MB", "--at-once", "1")
    assert done.exit_code == 0, done.output
    assert left == [False] * 3


@pytest.mark.parametrize("signalled", [False, True])
def test_memory_that_holds_no_beginning(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, *, signalled: bool
) -> None:
    """A request that did not fit beside what it was lent runs once more without; not at an end."""
    given: list[dict[str, Any]] = []
    real = pipeload.generate_many

    def generate_many(model: Any, requests: Any, at_once: Any) -> Any:
        def seen() -> Any:
            for each in requests:
                given.append(each)
                yield each

        for number, outcome in real(model, seen(), at_once=at_once):
            lent = "cache" in given[-1]
            short = MemoryLimitError("too large", limit=1, smallest_limit=2)
            if lent and signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            yield number, short if lent else outcome

    monkeypatch.setattr(pipeload, "generate_many", generate_many)
    asked = [request(number, chat(LONG, max_tokens=2)) for number in range(2)]
    write(files[0], [*asked, request(2, chat(max_tokens=2))])
    done = batch(talker, files, "--prefix-cache", "1MB", "--at-once", "1", "--json")
    assert done.exit_code == 0, done.output
    wanted = [False, True] if signalled else [False, True, False, False]
    assert ["cache" in each for each in given] == wanted
    assert json.loads(done.stdout)["answered"] == (1 if signalled else 3)
    assert all("pipeload" not in body_of(result) for result in results_of(files[1]).values())


def test_memory_that_is_short_takes_what_is_kept(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, the limit's account may have it back; afterwards nobody asks."""
    spares: list[Any] = []
    real = Prefixes.lend

    def lend(prefixes: Prefixes, arguments: Any) -> Any:
        spares.append(ACCOUNTANT.spare)
        return real(prefixes, arguments)

    monkeypatch.setattr(Prefixes, "lend", lend)
    write(files[0], [request(0, chat(LONG, max_tokens=2))])
    assert batch(talker, files, "--prefix-cache", "1MB").exit_code == 0
    assert spares[0].__func__ is Prefixes.give_back
    assert ACCOUNTANT.spare is None


def test_a_signal_finishes_what_runs(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 0, and the rest for the next run, also what was looked at."""
    write(files[0], [request(number, chat(max_tokens=2 + number)) for number in range(9)])
    real = Results.answer

    def answer_and_signal(*args: Any) -> None:
        real(*args)
        if len(results_of(files[1])) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Results, "answer", answer_and_signal)
    monkeypatch.setattr(Batched, "_most_that_fit", lambda *_, **__: 3)
    done = batch(talker, files, "--batched", "--at-once", 6)
    assert done.exit_code == 0, done.output
    assert "finishing 2 requests; once more ends at once" in done.stderr
    assert len(results_of(files[1])) == 3
    assert batch(talker, files, "--batched").exit_code == 0
    check_results(files, wanted=9)
