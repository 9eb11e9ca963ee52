"""`pipeload batch`: what it answers, what it refuses of a line, and how it goes on after a kill."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.cli.batch_file import Line, Results, Shard, read_lines
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import (
    GroupError,
    MemoryLimitError,
    OptionError,
    PipeloadError,
    ReadError,
    UnsupportedOperationError,
)
from pipeload.serving.reply import Ends
from pipeload.serving.reply import answer as made_of
from pipeload.serving.request import Asked, Settings
from pipeload.serving.request import parse as parse_body
from pipeload.serving.request_error import RequestError
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.commands import answer, invoke
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.tools.batch_kills import check_results, kill_once

if TYPE_CHECKING:
    from pathlib import Path

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALL = Shard(1, 1)
NEW = 6


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "requests.jsonl", tmp_path / "results.jsonl"


def chat(text: str = "Hello", **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": NEW} | body


def request(number: int, body: dict[str, Any], url: str = CHAT) -> dict[str, Any]:
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": body}


def write(file: Path, requests: list[Any]) -> None:
    lines = [each if isinstance(each, str) else json.dumps(each) for each in requests]
    file.write_text("".join(f"{line}\n" for line in lines))


def results_of(file: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in file.read_text().splitlines()]
    by_id = {result["id"]: result for result in found}
    assert len(by_id) == len(found)
    return by_id


def parse(line: Line, settings: Settings) -> Asked:
    """What the line asks for, if it is a request."""
    if line.wrong is not None:
        raise line.wrong
    return parse_body(line.url, line.body, settings)


def batch(talker: Path, files: tuple[Path, Path], *options: object) -> Any:
    return invoke("batch", talker, *files, "--memory-limit", "2GB", *options)


def body_of(result: dict[str, Any]) -> dict[str, Any]:
    assert result["error"] is None
    assert result["response"]["status_code"] == 200
    assert result["response"]["request_id"]
    body: dict[str, Any] = result["response"]["body"]
    return body


def text_of(result: dict[str, Any]) -> str:
    choice = body_of(result)["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_answers_are_those_of_run(talker: Path, files: tuple[Path, Path]) -> None:
    """Chats and texts, greedy and sampled, with stops; by the form that requests expect."""
    sampled = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 5}
    stop = answer(talker, "abc", "--max-new-tokens", 12, "--no-chat-template")["text"][2:4]
    asked = [
        (request(0, chat()), ["Hello"]),
        (request(1, chat("Well?", **sampled)), ["Well?"]),
        (
            request(2, {"prompt": "abc", "max_tokens": 12, "stop": [stop]}, TEXT),
            ["abc", "--no-chat-template", "--stop", stop],
        ),
        (request(3, {"prompt": "abc", "repetition_penalty": 1.5}, TEXT), ["abc"]),
    ]
    drawn = ["--temperature", 0.7, "--top-p", 0.9, "--top-k", 30, "--seed", 5]
    options = [
        ["--max-new-tokens", NEW],
        ["--max-new-tokens", NEW, *drawn],
        ["--max-new-tokens", 12],
        ["--max-new-tokens", 7, "--repetition-penalty", 1.5, "--no-chat-template"],
    ]
    write(files[0], [each for each, _ in asked])
    done = batch(talker, files, "--max-new-tokens", 7, "--at-once", 3)
    assert done.exit_code == 0, done.output
    found = results_of(files[1])
    for number, ((line, typed), more) in enumerate(zip(asked, options, strict=True)):
        result = found[f"batch_req_{number + 1}"]
        wanted = answer(talker, *typed, *more)
        assert result["custom_id"] == line["custom_id"]
        assert text_of(result) == wanted["text"]
        body = body_of(result)
        assert body["object"] == ("chat.completion" if line["url"] == CHAT else "text_completion")
        assert body["model"] == talker.name
        assert body["usage"]["prompt_tokens"] == wanted["prompt_tokens"]
        assert body["usage"]["completion_tokens"] == wanted["new_tokens"]
    reasons = [body_of(found[f"batch_req_{n}"])["choices"][0]["finish_reason"] for n in (1, 3)]
    assert reasons == ["length", "stop"]
    assert body_of(found["batch_req_2"])["seed"] == 5


def test_several_answers_to_one_request(talker: Path, files: tuple[Path, Path]) -> None:
    """`n` of them, each a choice."""
    write(files[0], [request(0, chat(n=3, seed=1)), request(1, chat(seed=1))])
    assert batch(talker, files).exit_code == 0
    body = body_of(results_of(files[1])["batch_req_1"])
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in body["choices"]}) > 1


WRONG: list[tuple[Any, str | None, str]] = [
    ("{", None, "line 1 is no JSON"),
    ("[1]", None, "line 1 is no JSON object"),
    ({"method": "POST", "url": CHAT, "body": chat()}, None, "custom_id is to be a text"),
    (request(0, chat()) | {"method": "GET"}, "method", "method is 'GET'"),
    (request(0, chat(), "/v1/embeddings"), "url", "url is '/v1/embeddings'"),
    (request(0, chat()) | {"body": 3}, "body", "body is to be an object"),
    (request(0, chat()) | {"priority": 1}, "priority", "'priority' means nothing here"),
    (request(0, {}), "messages", "messages is to be a list"),
    (request(0, {"messages": []}), "messages", "messages is to be a list"),
    (request(0, {"messages": [{"role": "dog", "content": "x"}]}), "messages[0]", "has no role"),
    (request(0, {"messages": [{"role": "user", "content": 3}]}), "messages[0]", "is to be text"),
    (
        request(0, {"messages": [{"role": "user", "content": "x", "tool_calls": []}]}),
        "messages[0]",
        "'tool_calls' in messages[0] is not served",
    ),
    (request(0, {"prompt": ["a", "b"]}, TEXT), "prompt", "prompt is to be one text"),
    (request(0, {"prompt": ""}, TEXT), "prompt", "no token of this prompt"),
    (request(0, chat(model="gpt-x")), "model", "model 'gpt-x' is not the one that answers"),
    (request(0, chat(stream=True)), "stream", "stream=True is not served"),
    (request(0, chat(presence_penalty=0.5)), "presence_penalty", "presence_penalty=0.5 is not"),
    (request(0, chat(response_format={"type": "json_object"})), "response_format", "not served"),
    (request(0, chat(flavour="x")), "flavour", "'flavour' is not served. Leave it out."),
    (request(0, chat(max_tokens=0)), "max_tokens", "max_tokens=0 is no whole number from 1"),
    (request(0, chat(seed=True)), "seed", "seed=True is no whole number from 0"),
    (request(0, chat(temperature=-1)), "temperature", "temperature=-1 is out of range"),
    (request(0, chat(top_p="x")), "top_p", "top_p='x' is out of range"),
    (request(0, chat(temperature=0, seed=1)), "temperature", "takes the likeliest token always"),
    (request(0, chat(n=2)), "n", "n=2 answers would all be the same"),
    (request(0, chat(stop=["a"] * 5)), "stop", "stop is to be a text, or up to 4"),
    (request(0, chat(stop={})), "stop", "stop is to be a text, or up to 4"),
    (request(0, chat(n=129, seed=1)), "n", "n=129 is more than 128 answers. Ask for fewer."),
    ("[" * 100_000, None, "line 1 is no JSON (maximum recursion depth"),
    (request(0, chat("\ud83d")), None, "surrogates not allowed"),
    (request(0, chat()) | {"custom_id": "\ud83d"}, None, "surrogates not allowed"),
    (request(0, chat(model=["talker"])), "model", "model ['talker'] is not the one that answers"),
    (request(0, {"messages": [{"role": [], "content": "x"}]}), "messages[0]", "has no role"),
    (request(0, chat(temperature=10**400)), "temperature", "is out of range"),
    (request(0, chat(logprobs=0)), "logprobs", "logprobs=0 is not served. Leave it out."),
    (
        request(0, chat(max_completion_tokens=3)),
        "max_tokens",
        "max_completion_tokens=3 and max_tokens=6 are two lengths. Give one.",
    ),
]


@pytest.fixture(scope="module")
def settings(talker: Path) -> Any:
    tokenizer = load_tokenizer(str(talker))
    return Settings(tokenizer, "talker", frozenset({"talker"}), NEW)


@pytest.mark.parametrize(("line", "parameter", "words"), WRONG)
def test_a_line_that_is_wrong(
    settings: Any, files: tuple[Path, Path], line: Any, parameter: str | None, words: str
) -> None:
    """It says which field it is, and what to do."""
    write(files[0], [line])
    (read,) = read_lines(files[0], ALL)
    with pytest.raises(RequestError) as error:
        parse(read, settings)
    assert words in str(error.value)
    if read.custom_id is not None:
        assert error.value.parameter == parameter
    with Results(files[1]) as results:
        results.refuse(read, error.value)
    (result,) = results_of(files[1]).values()
    if read.custom_id is None:
        assert result["response"] is None
        assert words in result["error"]["message"]
    else:
        assert result["response"]["status_code"] == 400
        assert words in result["response"]["body"]["error"]["message"]
        assert result["response"]["body"]["error"]["param"] == parameter


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template to put messages in. Give a prompt instead."),
        ("{{ raise_exception('no') }}", "does not take this (TemplateError: no). Give others."),
    ],
)
def test_a_model_that_takes_no_messages(
    settings: Any, files: tuple[Path, Path], template: str | None, words: str
) -> None:
    """Its lines say so."""
    tokenizer = copy.deepcopy(settings.tokenizer)
    tokenizer.chat_template = template
    write(files[0], [request(0, chat())])
    (line,) = read_lines(files[0], ALL)
    with pytest.raises(RequestError) as error:
        parse(line, settings._replace(tokenizer=tokenizer))
    assert words in str(error.value)


def test_what_asks_for_nothing_is_taken(settings: Any, files: tuple[Path, Path]) -> None:
    """Labels, and fields at the value that they have anyway."""
    body = chat(
        [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],  # type: ignore[arg-type]
        user="me",
        metadata={"a": "b"},
        stream=False,
        logit_bias={},
        frequency_penalty=0.0,
        tools=None,
        response_format={"type": "text"},
        model="talker",
    )
    write(files[0], [request(0, body), request(1, chat())])
    first, second = (parse(line, settings) for line in read_lines(files[0], ALL))
    assert first.options == second.options
    assert first.inputs["input_ids"].tolist() == second.inputs["input_ids"].tolist()


@pytest.mark.parametrize(("tokens", "reason"), [(NEW - 1, "stop"), (NEW, "length")])
def test_why_an_answer_ended(
    settings: Any, files: tuple[Path, Path], tokens: int, reason: str
) -> None:
    """At its length, or before: then at a stop, though it be a special token's and not shown."""
    write(files[0], [request(0, chat(stop="<end>"))])
    (line,) = read_lines(files[0], ALL)
    asked = parse(line, settings)
    output = torch.full((1, asked.inputs["input_ids"].shape[1] + tokens), 70)
    body = made_of(asked, output, settings, Ends(frozenset(), None)).body
    assert body["choices"][0]["finish_reason"] == reason


def test_a_custom_id_twice(files: tuple[Path, Path]) -> None:
    """The second line is wrong, also where the first is in another part."""
    write(files[0], [request(0, chat()), "", request(1, chat()), request(0, chat())])
    lines = [*read_lines(files[0], ALL)]
    assert [line.number for line in lines] == [1, 3, 4]
    assert [line.wrong is None for line in lines] == [True, True, False]
    assert "stands in a line before" in str(lines[2].wrong)
    parts = [[line.number for line in read_lines(files[0], Shard(part, 3))] for part in (1, 2, 3)]
    assert parts == [[1, 4], [], [3]]


def test_wrong_lines_do_not_end_the_job(talker: Path, files: tuple[Path, Path]) -> None:
    """They are results, and are not answered again; the figures say how many."""
    write(files[0], [request(0, chat()), "nonsense", request(2, chat(stream=True))])
    done = batch(talker, files, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["answered"], figures["failed"]) == (3, 1, 2)
    assert figures["new_tokens"] == NEW
    before = files[1].read_bytes()
    again = json.loads(batch(talker, files, "--json").stdout)
    assert (again["found"], again["answered"], again["failed"]) == (3, 0, 0)
    assert files[1].read_bytes() == before


def test_parts_of_a_file(talker: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    """Together they are the whole; each has a file of its own."""
    write(files[0], [request(number, chat(str(number), max_tokens=2)) for number in range(5)])
    found: list[str] = []
    for part in (1, 2):
        own = tmp_path / f"part{part}"
        assert batch(talker, (files[0], own), "--shard", f"{part}/2").exit_code == 0
        found += results_of(own)
    assert sorted(found) == [f"batch_req_{number}" for number in range(1, 6)]


def outcomes(monkeypatch: pytest.MonkeyPatch, *given: Any) -> None:
    """Have requests come to that, one after the other."""

    def generate_many(_model: Any, requests: Any, at_once: Any) -> Any:
        assert at_once == "auto"
        for number, (_, outcome) in enumerate(zip(requests, given, strict=False)):
            yield number, outcome

    monkeypatch.setattr(pipeload, "generate_many", generate_many)


def test_what_is_a_requests_own_fault(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too much memory, and whatever the library raises."""
    write(files[0], [request(0, chat()), request(1, chat())])
    outcomes(monkeypatch, MemoryLimitError("too large", limit=1, smallest_limit=2), IndexError("x"))
    assert batch(talker, files).exit_code == 0
    responses = [result["response"] for result in results_of(files[1]).values()]
    assert [response["status_code"] for response in responses] == [413, 500]
    assert [r["body"]["error"]["code"] for r in responses] == ["memory_limit", "IndexError"]
    assert responses[1]["body"]["error"]["type"] == "server_error"


@pytest.mark.parametrize("alone", [True, False])
def test_another_rank_that_fails(
    talker: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """A line fails where only its request has failed there; else the job ends."""
    write(files[0], [request(0, chat())])
    outcomes(monkeypatch, GroupError("rank 1 (there) failed", rank=1, of_request=alone))
    assert batch(talker, files).exit_code == (0 if alone else 1)
    codes = [r["response"]["status_code"] for r in results_of(files[1]).values()]
    assert codes == ([500] if alone else [])


@pytest.mark.parametrize("kind", [ReadError, UnsupportedOperationError])
def test_a_disk_that_fails_ends_the_job(
    talker: Path,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[PipeloadError],
) -> None:
    """No request is blamed for it, nor for a reader that has died: the next run answers them."""
    write(files[0], [request(0, chat()), request(1, chat())])
    outcomes(monkeypatch, kind("the disk failed"))
    done = batch(talker, files)
    assert done.exit_code == 1
    assert done.stderr.endswith("error: the disk failed\n")
    assert files[1].read_bytes() == b""
    monkeypatch.undo()
    assert batch(talker, files).exit_code == 0
    assert len(results_of(files[1])) == 2


def test_results_of_something_else(files: tuple[Path, Path]) -> None:
    """They are not written into, nor taken for these requests'."""
    write(files[0], [request(0, chat())])
    (line,) = read_lines(files[0], ALL)
    torn = (
        "hello",
        '{"id": "x"}',
        json.dumps(request(0, chat())),
    )  # the end of their lines is theirs
    for text in ("hello\n", '{"id": "x"}\n', "[]\n", *torn):
        files[1].write_text(text)
        with pytest.raises(OptionError, match="is no result of pipeload batch"):
            Results(files[1])
        assert files[1].read_text() == text
    files[1].write_text('{"id": "batch_req_1", "custom_id": "another"}\n')
    with Results(files[1]) as results, pytest.raises(OptionError, match="of other requests"):
        results.has(line)


def test_files_that_cannot_be_used(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Each is named."""
    with pytest.raises(OptionError, match="cannot read the requests"):
        list(read_lines(files[0], ALL))
    with pytest.raises(OptionError, match="are no file: they are read twice"):
        list(read_lines(type(files[0])(os.devnull), ALL))
    with pytest.raises(OptionError, match="cannot write the results"):
        Results(tmp_path / "nowhere" / "results.jsonl")
    with Results(files[1]), pytest.raises(OptionError, match="another process writes"):
        Results(files[1])
    with Results(files[1]):
        pass


def test_what_a_kill_left_of_a_line_is_cut_off(files: tuple[Path, Path]) -> None:
    """Wherever it struck; also in the middle of a letter."""
    write(files[0], [request(0, chat()), request(1, chat())])
    first, second = read_lines(files[0], ALL)
    with Results(files[1]) as results:
        results.answer(first, {"text": "\N{SNOWMAN}"})
    whole = files[1].read_bytes()
    with Results(files[1]) as results:
        results.answer(second, {"text": "\N{SNOWMAN}"})
    both = files[1].read_bytes()
    for end in range(len(whole) + 1, len(both)):
        files[1].write_bytes(both[:end])
        with Results(files[1]) as results:
            assert results.has(first)
            assert not results.has(second)
        assert files[1].read_bytes() == whole


def test_a_result_is_one_line_for_all_who_read_it(files: tuple[Path, Path]) -> None:
    """Letters that end a line for some are escaped."""
    write(files[0], [request(0, chat())])
    (line,) = read_lines(files[0], ALL)
    body = {"text": "a\u2028b\u2029c\x85d\x0be\N{SNOWMAN}"}
    with Results(files[1]) as results:
        results.answer(line, body)
    assert body_of(results_of(files[1])["batch_req_1"]) == body


def test_letters_before_the_first_line(settings: Any, files: tuple[Path, Path]) -> None:
    """A byte order mark is none of them; what is no UTF-8 is told."""
    text = json.dumps(request(0, chat())).encode()
    files[0].write_bytes(b"\xef\xbb\xbf" + text + b"\r\n" + text.replace(b"Hello", b"\xff"))
    first, second = read_lines(files[0], ALL)
    assert parse(first, settings).url == CHAT
    assert first.custom_id == "r0"
    with pytest.raises(match="line 2 is no JSON"):
        parse(second, settings)


def test_writes_that_take_a_part(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest follows."""
    write(files[0], [request(0, chat())])
    (line,) = read_lines(files[0], ALL)
    real = os.write
    with Results(files[1]) as results:
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
        results.answer(line, {"text": "long enough"})
    assert body_of(results_of(files[1])["batch_req_1"]) == {"text": "long enough"}


def test_a_disk_that_fills_up(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which file it was is told; what was written of the line is cut off by the next run."""
    write(files[0], [request(0, chat())])
    (line,) = read_lines(files[0], ALL)
    real, left, code = os.write, [7], errno.ENOSPC

    def fills_up(file: int, data: memoryview) -> int:
        if not left:
            raise OSError(code, os.strerror(code))
        return real(file, data[: left.pop()])

    with Results(files[1]) as results:
        monkeypatch.setattr(os, "write", fills_up)
        with pytest.raises(OptionError, match=r"write the results .*No space left.* Make room"):
            results.answer(line, {"text": "long enough"})
        code = errno.EIO
        with pytest.raises(OptionError, match=r"write the results .*Check the disk"):
            results.answer(line, {"text": "long enough"})
        monkeypatch.undo()
    with Results(files[1]) as results:
        assert not results.has(line)
    assert files[1].read_bytes() == b""


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_finishes_what_runs(
    talker: Path,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: signal.Signals,
    times: int,
) -> None:
    """Status 0, the rest pending; a second one ends at once."""
    write(files[0], [request(number, chat(max_tokens=2 + number)) for number in range(9)])
    real, handler = Results.answer, signal.getsignal(signal.SIGTERM)

    def answer_and_signal(*args: Any) -> None:
        real(*args)
        if len(results_of(files[1])) == 1:
            for _ in range(times):
                os.kill(os.getpid(), kind)

    monkeypatch.setattr(Results, "answer", answer_and_signal)
    done = batch(talker, files, "--at-once", 3)
    assert done.exit_code == (0 if times == 1 else 130), done.output
    assert "finishing 2 requests; once more ends at once" in done.stderr
    assert len(results_of(files[1])) == (3 if times == 1 else 1)
    assert ("3 requests answered, 0 with an error, 6 left" in done.stderr) == (times == 1)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert batch(talker, files).exit_code == 0
    check_results(files, wanted=9)


@pytest.mark.slow
def test_a_kill(talker: Path, files: tuple[Path, Path]) -> None:
    """At a random moment: no result is lost, doubled or torn."""
    write(files[0], [request(number, chat(max_tokens=9), CHAT) for number in range(40)])
    assert kill_once(talker, files, random.Random(5))
    assert 0 < files[1].read_bytes().count(b"\n") < 40
    assert batch(talker, files).exit_code == 0
    check_results(files, wanted=40)
