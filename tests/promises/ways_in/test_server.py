"""`pipeload serve`: answers are those of `generate` alone; what is refused, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
import transformers
import uvicorn

import pipeload
from pipeload.budget import passes_in_turns
from pipeload.cli import serve as cli_serve
from pipeload.engine.convoy_members import GaveWayError
from pipeload.entry.convoy_size import Sizes
from pipeload.entry.many import SharedCall
from pipeload.entry.request_room import RequestRoom
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import MemoryLimitError, ReadError, UnsupportedOperationError
from pipeload.serving.desk import Job
from pipeload.serving.gate import Gate
from pipeload.serving.server import Listening, _Server
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.commands import ROOT, invoke, start
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.exact import load_smallest
from tests.support.exact import steady_floor as steady_floor  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain
from tests.support.served import CHAT, TEXT, Answer, Client, Served, served, wait_until
from tests.support.streaming import WAIT_SECONDS, assert_nothing_held, prefetcher_of
from tests.tools.serve_soak import soak

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NEW = 6
DRAWN = {"temperature": 0.7, "top_p": 0.9, "top_k": 30, "seed": 5}


@pytest.fixture(scope="module")
def server(talker: Path) -> Iterator[Served]:
    with served(talker) as running:
        yield running


@pytest.fixture(scope="module")
def plain(talker: Path) -> Callable[..., str]:
    """What plain transformers say to a text."""
    model = load_plain(talker)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)

    def say(text: str, *, chat: bool = True, **options: Any) -> str:
        seed = options.pop("seed", None)
        if chat:
            messages = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        inputs = tokenizer(text, return_tensors="pt")
        if seed is not None:
            torch.manual_seed(seed)
        given = {"max_new_tokens": NEW, "do_sample": seed is not None} | options
        output = model.generate(**inputs, **given)
        new = output[0, inputs["input_ids"].shape[1] :]
        return str(tokenizer.decode(new, skip_special_tokens=True))

    return say


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_plain(
    server: Served, plain: Callable[..., str], *, stream: bool
) -> None:
    """Chats and texts, greedy and drawn, whole and in pieces; in the form that is expected."""
    client = server.client
    asked: list[tuple[Answer, str]] = [
        (client.chat("Hello", max_tokens=NEW, stream=stream), plain("Hello")),
        (
            client.chat("Well?", max_tokens=NEW, stream=stream, **DRAWN),
            plain("Well?", **DRAWN),
        ),
        (
            client.ask(TEXT, {"prompt": "abc", "max_tokens": 9, "stream": stream}),
            plain("abc", chat=False, max_new_tokens=9),
        ),
        (
            client.ask(TEXT, {"prompt": "x", "stream": stream}),
            plain("x", chat=False, max_new_tokens=8),
        ),
    ]
    for answer, wanted in asked:
        assert answer.status == 200, answer.text
        assert answer.said == wanted
    kinds = ["chat.completion", "chat.completion", "text_completion", "text_completion"]
    if not stream:
        assert [answer.body["object"] for answer, _ in asked] == kinds
        assert asked[1][0].body["seed"] == 5
        assert asked[0][0].body["usage"]["completion_tokens"] == NEW
        assert asked[0][0].body["choices"][0]["finish_reason"] == "length"
        return
    assert asked[0][0].events[0]["object"] == "chat.completion.chunk"
    assert asked[2][0].events[0]["object"] == "text_completion"
    for answer, _ in asked:
        choices = [event["choices"][0] for event in answer.events]
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert len({event["id"] for event in answer.events}) == 1
    assert len(asked[0][0].events) > 2
    assert [event["choices"][0]["delta"].get("role") for event in asked[0][0].events].count(
        "assistant"
    ) == 1


def test_stops(server: Served, plain: Callable[..., str]) -> None:
    """An answer ends before them, whole or in pieces, and says so."""
    whole = plain("abc", max_new_tokens=12)
    stop = whole[4:6]
    for stream in (False, True):
        answer = server.client.chat("abc", max_tokens=12, stop=[stop], stream=stream)
        assert answer.said == whole[: whole.index(stop)]
        last = answer.events[-1] if stream else answer.body
        assert last["choices"][0]["finish_reason"] == "stop"


def test_how_long_it_was(server: Served) -> None:
    """Is told with the last piece if that is asked for."""
    whole = server.client.chat("Hello", max_tokens=NEW).body["usage"]
    pieces = server.client.chat(
        "Hello", max_tokens=NEW, stream=True, stream_options={"include_usage": True}
    )
    assert pieces.events[-1]["choices"] == []
    assert pieces.events[-1]["usage"] == whole


def test_several_answers(server: Served) -> None:
    """Each is a choice."""
    body = server.client.chat("Hello", n=3, max_tokens=NEW, **DRAWN).body
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 3 * NEW


def test_many_at_once_share_the_reading(
    talker: Path,
    plain: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    steady_floor: None,
) -> None:
    """Each has what it has alone; all together are read about as often as one."""
    # As if the process never grew: in the room for that, so small a model would fit.
    monkeypatch.setattr(passes_in_turns, "_THREAD_BYTES", 0)
    model = load_smallest(talker, tokens=80, batch=4)
    handle = pipeload.handle(model)
    drawn = [DRAWN | {"seed": number} if number % 2 else {} for number in range(4)]
    with served(talker, model=model) as running, ThreadPoolExecutor(4) as pool:
        held = Held(model, monkeypatch)
        before = handle.stats()
        said = [
            pool.submit(running.client.chat, f"Say {n}.", max_tokens=40, **drawn[n])
            for n in range(4)
        ]
        wait_until(lambda: running.service.desk.running == 4)
        held.go.set()
        texts = [each.result(WAIT_SECONDS).said for each in said]
        after = handle.stats()
    assert texts == [plain(f"Say {n}.", max_new_tokens=40, **drawn[n]) for n in range(4)]
    assert after.passes - before.passes == 4 * 40
    used = after.hits + after.misses - before.hits - before.misses
    assert 0 < used <= 50 * len(handle.plan.units)


def test_the_official_client(server: Served, plain: Callable[..., str]) -> None:
    """Takes what is said, and knows what is wrong."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.client.port}/v1", api_key="x", max_retries=0
    ) as client:
        (model,) = client.models.list().data
        assert client.models.retrieve(model.id) == model
        asked: dict[str, Any] = {
            "model": model.id,
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": NEW,
        }
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == plain("Hello")
        pieces = [*client.chat.completions.create(**asked, stream=True)]
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == plain("Hello")
        text = client.completions.create(model=model.id, prompt="abc", max_tokens=NEW)
        assert text.choices[0].text == plain("abc", chat=False)
        with pytest.raises(openai.BadRequestError, match="presence_penalty=1 is not served"):
            client.chat.completions.create(**asked, presence_penalty=1)
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=model.id, prompt="abc", max_tokens=1 << 40)
        assert error.value.code == "context_length_exceeded"


REFUSED: list[tuple[int, str, Any, dict[str, Any], str]] = [
    (400, CHAT, b"{", {}, "the body is no JSON"),
    (400, CHAT, b"[" * 100_000, {}, "the body is no JSON"),
    (400, CHAT, [1], {}, "the body is no JSON object"),
    (400, CHAT, {}, {}, "messages is to be a list"),
    (400, TEXT, {"prompt": ["a"]}, {}, "prompt is to be one text"),
    (400, TEXT, {"prompt": "a", "tools": []}, {}, "'tools' is not served"),
    (400, TEXT, {"prompt": "a", "model": "other"}, {}, "model 'other' is not the one"),
    (400, TEXT, {"prompt": "a", "stream": 1}, {}, "stream=1 is not served"),
    (400, TEXT, {"prompt": "a", "stream": True, "n": 2, "seed": 1}, {}, "n=2 answers are not"),
    (400, TEXT, {"prompt": "a", "stream_options": {}}, {}, "stream_options={} is not served"),
    (
        400,
        TEXT,
        {"prompt": "a", "stream": True, "stream_options": {"x": 1}},
        {},
        "stream_options={'x': 1} is not served",
    ),
    (400, TEXT, {"prompt": "x" * 200, "max_tokens": 57}, {}, "room for 56 behind this prompt, and"),
    (400, TEXT, {"prompt": "x" * 300}, {}, "there is room for 0 behind this prompt"),
    (404, "/v1/embeddings", {}, {}, "nothing of that name"),
    (404, "/v1/models/other", None, {}, "nothing of that name"),
    (404, "/load_model", {}, {}, "nothing of that name"),
    (405, CHAT, None, {}, "not by this method"),
    (413, CHAT, b" " * 1_000_001, {}, "longer than 1000000 bytes"),
    (415, CHAT, {}, {"Content-Type": "text/plain"}, "Content-Type is 'text/plain'"),
    (403, "/health", None, {"Host": "example.com"}, "not to 'example.com'"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=range(len(REFUSED)))
def test_refused(server: Served, refused: tuple[int, str, Any, dict[str, str], str]) -> None:
    """What it is, and what to do, in the form of the API."""
    status, path, body, headers, words = refused
    answer = server.client.ask(path, body, **headers)
    assert answer.status == status
    assert words in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"


def test_an_answer_without_a_length(server: Served) -> None:
    """Goes as far as the model has positions."""
    body = server.client.ask(TEXT, {"prompt": "x" * 252}).body
    assert body["usage"]["total_tokens"] == 256


def test_as_many_as_help(talker: Path) -> None:
    """May run together, too."""
    with served(talker, at_once=None) as running, ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(running.client.chat, "Hello", max_tokens=9) for _ in range(3)]
        assert len({each.result(WAIT_SECONDS).said for each in asked}) == 1


def test_names_of_this_machine(talker: Path) -> None:
    """What was typed and where it listens, in whatever letters, beside the usual ones."""
    app: Any = None
    gate = Gate(app, key=None, local=True, names=["Box", "127.0.1.1", "::2"])
    for host, known in (
        *(("box:80", True), ("127.0.1.1:80", True), ("[::2]:80", True), ("LOCALHOST", True)),
        *(("box.com", False), ("127.0.1.2:80", False), ("", False)),
    ):
        scope = {"type": "http", "path": "/", "headers": [(b"host", host.encode())]}
        assert (gate._refusal(scope) is None) is known
    with served(talker, names=["example.com"]) as running:
        assert running.client.ask("/health", Host="example.com").status == 200


def opened(server: Served, sent: bytes) -> socket.socket:
    """A connection on which that was sent."""
    connection = socket.create_connection(("127.0.0.1", server.client.port), WAIT_SECONDS)
    connection.sendall(sent)
    return connection


HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n".encode()


def test_bodies_that_do_not_come(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are waited for in vain for a while only, and few of them are in memory at once."""
    half = HEAD + b"Content-Length: 1000\r\n\r\n{"
    app = server.service._app
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(opened(server, half)) for _ in range(10)]
        wait_until(app._bodies.locked)
        monkeypatch.setattr("pipeload.serving.app._BODY_SECONDS", 0.05)
        for connection in many[:8]:
            connection.close()
        for connection in many[8:]:
            told = b""
            while b"seconds" not in told and (more := connection.recv(10_000)):
                told += more
            assert b" 408 " in told
            assert b"the body did not come within 0.05 seconds" in told
    monkeypatch.undo()
    wait_until(lambda: not app._bodies.locked())
    assert server.client.ask(TEXT, {"prompt": "x"}).status == 200


def test_heads_that_do_not_come(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep no connection, nor that of a second request; bodies are another matter."""
    monkeypatch.setattr("pipeload.serving.server._HEAD_SECONDS", 0.1)
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"GET /heal", first + b"GET /heal"):
        with opened(server, sent) as connection:
            while connection.recv(10_000):
                pass
    with opened(server, HEAD + b"Content-Length: 15\r\n\r\n") as connection:
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(WAIT_SECONDS)
        connection.sendall(b'{"prompt": "x"}')
        assert b" 200 " in connection.recv(10_000)


def test_a_key(talker: Path) -> None:
    """Nothing but health is told without it; with it, whatever the server is called."""
    with served(talker, key="secret") as running:
        for key in (None, "secrets", "", "\xff"):
            for path in (CHAT, "/v1/models", "/metrics", "/nowhere"):
                answer = Client(running.client.port, key).ask(path)
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "Authorization: Bearer KEY" in answer.error["message"]
        assert Client(running.client.port).ask("/health").status == 200
        assert running.client.ask("/v1/models", Host="example.com").status == 200


def test_what_memory_does_not_hold(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused before anything begins, with the longest that fits: which is right."""
    assert server.client.chat("Hello", max_tokens=1 << 40, stream=True).status == 400
    room, governor = server.service.desk._room, pipeload.handle(server.model).session.governor
    cache, last = governor.bytes_alone(1, 201, 1)
    monkeypatch.setattr(room, "measure", lambda _kept: None)
    monkeypatch.setattr(room, "_spare", governor.ledger.corrected(last + int(cache * 1.05)))
    longer = server.client.ask(TEXT, {"prompt": "x", "max_tokens": 201, "n": 1})
    assert longer.status == 413
    assert longer.error["code"] == "memory_limit"
    told = longer.error["message"]
    assert told == (
        "memory does not hold a prompt of 1 token and 201 new ones. Give max_tokens of up to 200."
    )
    assert server.client.ask(TEXT, {"prompt": "x", "max_tokens": 200}).status == 200
    shorter = server.client.ask(TEXT, {"prompt": "x" * 190, "max_tokens": 20})
    assert shorter.status == 413
    found = re.search(r"Give a prompt of up to (\d+) tokens\.$", told_by(shorter))
    assert found is not None
    for more, status in ((0, 200), (1, 413)):
        prompt = "x" * (int(found[1]) + more)
        assert server.client.ask(TEXT, {"prompt": prompt, "max_tokens": 20}).status == status
    monkeypatch.setattr(room, "_spare", 0)
    assert told_by(server.client.chat("Hello", n=2, seed=1)).endswith(
        "8 new ones, 2 times. Give less of both."
    )


def test_a_text_that_is_far_too_long(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused before a tokenizer takes memory for all of it."""
    desk = server.service.desk
    lengths: list[int] = []
    tokenizer = type(load_tokenizer(server.model.name_or_path))
    call = tokenizer.__call__

    def seen(self: Any, text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return call(self, text, **options)

    monkeypatch.setattr(tokenizer, "__call__", seen)
    monkeypatch.setattr(desk, "longest_prompt", lambda: 100_000)
    said = [{"role": "user", "content": [{"type": "text", "text": "x" * 900_000}]}]
    refused = server.client.ask(CHAT, {"messages": said})
    assert refused.status == 413
    assert "longer than the 100000 tokens that memory holds" in told_by(refused)
    assert lengths == [1 << 16] * 2
    shorter = server.client.ask(TEXT, {"prompt": "x" * 40_000})  # the model's positions end before
    assert shorter.error["code"] == "context_length_exceeded"


def test_tools_that_are_far_too_long(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count with their keys and numbers, before they are rendered."""
    monkeypatch.setattr(server.service.desk, "longest_prompt", lambda: 1000)
    many = {f"key{number}": number for number in range(40_000)}
    for body in (
        {"messages": [{"role": "user", "content": "x"}], "tools": [many]},
        {"messages": [{"role": "user", "content": ""}] * 10_000},
        {"messages": [{"role": "user", "content": "x"}], "tools": [[*many.values()]]},
    ):
        assert server.client.ask(CHAT, body).status == 413
    monkeypatch.undo()
    tall = server.client.ask(TEXT, {"prompt": "x" * 40_000})
    assert tall.error["code"] == "context_length_exceeded"
    assert "longer than the 256 tokens that the model was made for" in told_by(tall)


def test_trials_are_made_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none beyond the model's positions; what is kept counts as it was then."""
    desk = server.service.desk
    governor = pipeload.handle(server.model).session.governor
    room, alone, tried = RequestRoom(governor), governor.bytes_alone, list[int]()

    def bytes_alone(prompt: int, tokens: int, batch: int) -> tuple[int, int]:
        tried.append(prompt)
        return alone(prompt, tokens, batch)

    monkeypatch.setattr(governor, "bytes_alone", bytes_alone)
    monkeypatch.setattr(desk, "_room", room)
    longest = desk.longest_prompt()
    assert 0 < longest <= max(tried) <= 256
    tried.clear()
    room.measure()
    assert desk.longest_prompt() == longest
    assert set(tried) <= {0}
    room.measure(1 << 60)
    assert desk.longest_prompt() == 256
    assert room.holds(Sizes(1, 1 << 20, 1))


def told_by(answer: Answer) -> str:
    """What is wrong."""
    message: str = answer.error["message"]
    return message


class Held:
    """Has `generate` wait in the place of computing, until it may go on."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Semaphore(0), threading.Event()
        generate = model.generate

        def held(**arguments: Any) -> Any:
            self.entered.release()
            assert self.go.wait(WAIT_SECONDS)
            return generate(**arguments)

        monkeypatch.setattr(model, "generate", held)


def test_too_many(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that find no place to wait in are told when to come again."""
    with served(talker, at_once=1, most_waiting=1) as running, ThreadPoolExecutor(2) as pool:
        held = Held(running.model, monkeypatch)
        taken = [pool.submit(running.client.chat, "Hello", max_tokens=2) for _ in range(2)]
        wait_until(lambda: running.service.desk.waiting)
        refused = running.client.chat("Hello")
        assert refused.status == 429
        assert refused.error["code"] == "rate_limit_exceeded"
        assert "1 requests run and 1 wait" in refused.error["message"]
        assert int(refused.headers["retry-after"]) >= 1
        held.go.set()
        assert [each.result(WAIT_SECONDS).status for each in taken] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away(
    server: Served, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    """Its request ends at its next turn, and nothing of it is left; others go on."""
    sites: list[int] = []
    passes = pipeload.handle(server.model).session.passes
    acquire = type(passes).acquire

    def seen(self: Any, site: int) -> bool:
        sites.append(site)
        return acquire(self, site)

    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 150, "stream": stream}
    held = Held(server.model, monkeypatch)
    connection = server.client.open(CHAT, body)
    assert held.entered.acquire(timeout=WAIT_SECONDS)
    (job,) = server.service.desk._running
    connection.close()
    wait_until(lambda: job.cancelled)
    monkeypatch.setattr(type(passes), "acquire", seen)
    held.go.set()
    wait_until(lambda: not server.service.desk.running)
    assert len(sites) <= 1
    assert_nothing_held(server.model)
    monkeypatch.undo()
    assert server.client.chat("Hello", max_tokens=2).status == 200


def test_a_client_that_goes_away_in_the_middle(server: Served) -> None:
    """Of its answer."""
    body = {"prompt": "x", "max_tokens": 200, "stream": True}
    connection = server.client.open(TEXT, body)
    response = connection.getresponse()
    assert response.read(20)
    (job,) = server.service.desk._running
    response.close()
    connection.close()
    wait_until(lambda: job.cancelled)
    wait_until(lambda: not server.service.desk.running)
    assert len(job._given) < 200
    assert_nothing_held(server.model)


def test_one_that_waits_and_goes_away(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is never begun."""
    with served(talker, at_once=1) as running, ThreadPoolExecutor(1) as pool:
        held = Held(running.model, monkeypatch)
        first = pool.submit(running.client.chat, "Hello", max_tokens=2)
        assert held.entered.acquire(timeout=WAIT_SECONDS)
        connection = running.client.open(TEXT, {"prompt": "x"})
        wait_until(lambda: running.service.desk.waiting)
        (job,) = running.service.desk._waiting
        connection.close()
        wait_until(lambda: job.cancelled)
        held.go.set()
        assert first.result(WAIT_SECONDS).status == 200
        wait_until(lambda: not running.service.desk.waiting)
        assert not held.entered.acquire(blocking=False)


def test_one_that_gave_way_is_begun_again(
    server: Served, plain: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client sees nothing of that: what it has is not sent again."""
    result = SharedCall.result
    tries: list[object] = []

    def gives_way(self: SharedCall) -> Any:
        tries.append(self)
        output = result(self)
        if len(tries) == 1:
            raise GaveWayError(MemoryLimitError("full", limit=1, smallest_limit=2))
        return output

    monkeypatch.setattr(SharedCall, "result", gives_way)
    answer = server.client.chat("Hello", max_tokens=NEW, stream=True)
    assert answer.said == plain("Hello")
    assert len(tries) == 2


def test_one_that_is_begun_again_and_becomes_another(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends with an error: what was sent does not go on with other words."""
    tries: list[object] = []

    def generates(*, streamer: Any, **_arguments: Any) -> Any:
        tries.append(streamer)
        for tokens in ([70, 71], [72], [73 + len(tries)]):
            streamer.put(torch.tensor([tokens]))
        if len(tries) == 1:
            raise GaveWayError(MemoryLimitError("full", limit=1, smallest_limit=2))
        return torch.tensor([[70, 71, 72, 75]])

    monkeypatch.setattr(server.model, "generate", generates)
    answer = server.client.chat("Hello", stream=True)
    assert answer.status == 200
    *_, last = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line)
    assert last["error"]["code"] == "begun_again"
    assert len(tries) == 2
    tries.clear()
    assert server.client.chat("Hello").status == 200, "nothing of it was sent"


def test_one_that_was_lent_too_much(
    server: Served, plain: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is begun again without: what fits by itself is taken."""
    desk, lent = server.service.desk, []
    arguments = Job.arguments

    def lend(self: Job, prefixes: Any) -> dict[str, Any]:
        made = arguments(self, prefixes)
        lent.append(self.borrows)
        self.cached_tokens = 9 * self.borrows
        return made

    def generate(**given: Any) -> Any:
        if lent[-1]:
            raise MemoryLimitError("full", limit=1, smallest_limit=2)
        return real(**given)

    real = server.model.generate
    monkeypatch.setattr(Job, "arguments", lend)
    monkeypatch.setattr(server.model, "generate", generate)
    answer = server.client.chat("Hello", max_tokens=NEW)
    assert answer.said == plain("Hello")
    assert lent == [True, False]
    assert not desk.running


def test_none_may_wait(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is answered all the same, and while it runs no other is taken."""
    with served(talker, at_once=1, most_waiting=0) as running, ThreadPoolExecutor(1) as pool:
        held = Held(running.model, monkeypatch)
        first = pool.submit(running.client.chat, "Hello", max_tokens=2)
        assert held.entered.acquire(timeout=WAIT_SECONDS)
        assert running.client.chat("Hello", max_tokens=2).status == 429
        held.go.set()
        assert first.result(WAIT_SECONDS).status == 200


FAILS: list[tuple[Exception, int, str]] = [
    (MemoryLimitError("too large", limit=1, smallest_limit=2), 413, "memory_limit"),
    (ReadError("the disk failed"), 503, "unavailable"),
    (IndexError("index out of range"), 500, "IndexError"),
    (MemoryError("no memory"), 413, "memory_limit"),
    (torch.OutOfMemoryError("none on the device"), 413, "memory_limit"),
    (torch.AcceleratorError("device-side assert"), 503, "unavailable"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), FAILS)
def test_what_fails(
    server: Served,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
    *,
    stream: bool,
) -> None:
    """Has its own status where no text has come yet; the server lives on."""

    def fails(**_arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(server.model, "generate", fails)
    answer = server.client.chat("Hello", stream=stream)
    assert answer.status == status
    assert answer.error["code"] == code
    monkeypatch.undo()
    assert server.client.chat("Hello", stream=stream).status == 200


def test_what_fails_later(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told where text would come."""

    def fails(*, streamer: Any, **_arguments: Any) -> Any:
        streamer.put(torch.tensor([[70]]))
        streamer.put(torch.tensor([71]))
        raise ReadError("the disk failed")

    monkeypatch.setattr(server.model, "generate", fails)
    answer = server.client.chat("Hello", stream=True)
    assert answer.status == 200
    first, last = (json.loads(line[6:]) for line in answer.text.split("\n\n") if line)
    assert first["choices"][0]["delta"]["content"]
    assert last["error"]["message"] == "the disk failed"
    counted = 'pipeload_requests_total{status="503"} '
    before = figure(server, counted)
    server.client.chat("Hello", stream=True)
    wait_until(lambda: figure(server, counted) == before + 1)


def figure(server: Served, name: str) -> float:
    """One of the metrics; 0 if it is not there yet."""
    lines = server.client.ask("/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_what_nobody_expected(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told and counted."""
    counted = 'pipeload_requests_total{status="500"} '
    before = figure(server, counted)

    def fails(_asked: Any) -> None:
        raise ValueError("made up")

    monkeypatch.setattr(server.service.desk, "check", fails)
    answer = server.client.chat("Hello")
    assert answer.status == 500
    assert answer.error["message"] == "ValueError: made up"
    assert figure(server, counted) == before + 1


def test_health(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is good only while reading works."""
    assert server.client.ask("/health").body == {"status": "ok"}
    dispatcher = prefetcher_of(server.model)._dispatcher
    monkeypatch.setattr(dispatcher, "fault", UnsupportedOperationError("readers have ended"))
    ill = server.client.ask("/health")
    assert ill.status == 503
    assert ill.body == {"status": "failed", "reason": "readers have ended"}


def test_metrics(server: Served) -> None:
    """Count requests, tokens, passes and bytes; no counter falls."""

    def figures() -> dict[str, float]:
        text = server.client.ask("/metrics").text
        lines = [line.rpartition(" ") for line in text.splitlines() if line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    before = figures()
    server.client.chat("Hello", max_tokens=NEW)
    server.client.ask(TEXT, {})
    after = figures()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown['pipeload_requests_total{status="200"}'] == 1
    assert grown['pipeload_requests_total{status="400"}'] == 1
    assert grown['pipeload_tokens_total{kind="new"}'] == NEW
    assert grown["pipeload_passes_total"] == NEW
    assert grown["pipeload_bytes_read_total"] > 0
    assert grown["pipeload_first_token_seconds_count"] == 1
    assert after["pipeload_running"] == after["pipeload_waiting"] == 0
    assert after["pipeload_memory_limit"] == pipeload.handle(server.model).plan.memory_limit


def test_the_dashboard(server: Served) -> None:
    """Shows figures that there are."""
    panels = json.loads((ROOT / "examples" / "grafana.json").read_text())["panels"]
    shown = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    named = set(re.findall(r"(?:pipeload|process)_\w+", shown))
    told = server.client.ask("/metrics").text
    assert len(named) > 10
    assert {name for name in named if f"\n{name}" not in told} == set()


def test_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for no client: it tells them, and closes their connections."""
    monkeypatch.setattr("pipeload.serving.server._TOLD_SECONDS", 0)
    happened: list[object] = []
    desk: Any = SimpleNamespace(running=1, waiting=0, stop=lambda _error: happened.append("stop"))
    listener: Any = None
    config = uvicorn.Config(lambda: None)
    server = _Server(config, desk, Listening(listener, 60, lambda *_: happened.append("said")))
    transport = SimpleNamespace(abort=lambda: happened.append("abort"))
    connection: Any = Mock(transport=transport)
    server.server_state.connections.add(connection)

    async def signals() -> None:
        server.handle_exit(15, None)
        await asyncio.sleep(0.05)
        assert happened == ["said"]
        assert server.should_exit
        assert not server.force_exit
        server.handle_exit(2, None)
        await asyncio.sleep(0.05)

    asyncio.run(signals())
    assert happened == ["said", "stop", "abort"]
    assert server.force_exit


# -- as a command --------------------------------------------------------------------------------


def test_without_its_packages(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what to install."""
    monkeypatch.setattr(cli_serve, "MISSING", "uvicorn")
    result = invoke("serve", talker)
    assert result.exit_code == 1
    assert "needs the package uvicorn" in result.stderr
    assert result.stderr.endswith("pip install 'pipeload[serve]'\n")


def test_where_nobody_can_listen(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told before anything is loaded."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = invoke("serve", talker, "--host", "127.0.0.1", "--port", other.getsockname()[1])
    assert taken.exit_code == 1
    assert "Address already in use. Give another --host or --port." in taken.stderr
    nowhere = invoke("serve", talker, "--host", "no.such.host.invalid")
    assert "cannot listen at 'no.such.host.invalid', port 8000" in nowhere.stderr
    size = invoke("serve", talker, "--prefix-cache", "much")
    assert size.exit_code == 2
    assert "--prefix-cache='much'" in size.stderr.replace(" ", "")
    for grace in ("inf", "nan"):
        endless = invoke("serve", talker, "--grace", grace)
        assert endless.exit_code == 2
        assert "Invalid value for '--grace'" in endless.stderr
    monkeypatch.setenv("PIPELOAD_API_KEY", "")
    for option in (["--api-key", ""], []):
        empty = invoke("serve", talker, *option)
        assert empty.exit_code == 2
        assert "the key is empty" in empty.stderr
    key = invoke("serve", talker, "--api-key", "a\nb")
    assert key.exit_code == 2
    assert "a key is to be of printable ASCII letters" in key.stderr


@pytest.mark.sweep
def test_a_short_soak(talker: Path) -> None:
    """Ten clients; `python -m tests.tools.serve_soak` asks longer, under a kernel cap."""
    limit = 2_000_000_000
    found = soak(talker, limit, 60, longest=20, tokens=60)
    assert found["answered"] > 30
    assert found["left"] + found["wrong"] + found["too long"] > 3
    assert "wrong text" not in found
    assert "wrong status" not in found
    assert found["health"] == 200
    assert found["threads"] <= 0
    assert found["peak"] < limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grace", "signals", "whole"),
    [
        (60, [signal.SIGTERM], True),
        pytest.param(60, [signal.SIGINT, signal.SIGTERM], False, marks=pytest.mark.sweep),
        pytest.param(0, [signal.SIGTERM], False, marks=pytest.mark.sweep),
    ],
)
def test_its_end(
    talker: Path, tmp_path: Path, grace: int, signals: list[int], *, whole: bool
) -> None:
    """On a signal what runs may end, for a while; the rest is told. The status is 0."""
    trace = tmp_path / "trace.json"
    process = start(
        *("serve", talker, "--memory-limit", "2GB", "--port", "0", "--grace", grace, "--debug"),
        *("--trace", trace),
    )
    try:
        assert process.stderr is not None
        lines: list[str] = []
        while "answers at http://" not in (line := process.stderr.readline()):
            assert line, "".join(lines)
            lines.append(line)
        client = Client(int(line.partition("127.0.0.1:")[2].partition("/")[0]))
        asked = {"prompt": "x", "max_tokens": 230, "stream": True}
        with contextlib.closing(client.open(TEXT, asked)) as connection:
            response = connection.getresponse()
            assert response.status == 200
            for number in signals:
                process.send_signal(number)
                if number == signals[0]:
                    assert "finishing 1 request" in process.stderr.readline()
            text = response.read().decode()
        assert text.endswith("data: [DONE]\n\n") is whole
        if not whole:
            assert "the server stops. Send it again" in text
        assert process.wait(WAIT_SECONDS) == 0
        rest = process.stderr.read()
        assert "Traceback" not in rest, rest
        assert json.loads(trace.read_text())
    finally:
        process.kill()
        process.communicate()
