"""Requests as rows of one pass: how many at once, sessions, and what ends them."""

from __future__ import annotations

import logging
import math
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.entry import batched
from pipeload.entry.batched import Batched
from pipeload.errors import MemoryLimitError, OptionError, ReadError, UnsupportedModelError
from pipeload.hf.continuous_batching import Batching, Made, Room, spare_pages
from tests.support.models import load_plain, save_random, tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NEW = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("llama")
    save_random("llama", place, "fp32", seed=4)
    return place


@pytest.fixture
def model(folder: Path) -> Iterator[Any]:
    made = pipeload.from_pretrained(folder, memory_limit="2GB", dtype="auto")
    yield made
    made.pipeload.remove()


def request(length: int = 5, *, samples: bool = False, **more: Any) -> dict[str, Any]:
    ids = torch.arange(length)[None] + 7
    return {"input_ids": ids, "max_new_tokens": NEW, "do_sample": samples, **more}


def test_rows_are_those_of_plain(model: Any, folder: Path) -> None:
    """Prompts of several lengths, more than there are places: in fp32, the same tokens."""
    plain = load_plain(folder)
    asked = [request(length) for length in (3, 40, 17, 5, 90)]
    found = dict(Batched(model, iter(asked), 2).outcomes())
    for number, one in enumerate(asked):
        wanted = plain.generate(**one, pad_token_id=0)
        assert found[number].tolist() == wanted.tolist()


def test_what_is_drawn(model: Any) -> None:
    """Each with settings of its own: of the likeliest token alone, and of all."""
    likeliest = dict(Batched(model, iter([request()]), None).outcomes())[0]
    drawn = [request(samples=True, top_k=1), *[request(samples=True, temperature=50.0)] * 6]
    found = dict(Batched(model, iter(drawn), None).outcomes())
    assert found[0].tolist() == likeliest.tolist()
    assert len({tuple(found[n][0].tolist()) for n in range(1, 7)}) > 1


def test_criteria_end_a_request(model: Any) -> None:
    """As soon as one of them says so; its place is another's then."""
    calls: list[int] = []

    def stop(ids: torch.Tensor, _scores: object) -> torch.Tensor:
        calls.append(ids.shape[1])
        return torch.tensor([ids.shape[1] == 7])

    asked = [request(max_new_tokens=40, stopping_criteria=[stop]), request(4)]
    found = dict(Batched(model, iter(asked), 1).outcomes())
    assert calls == [6, 7]
    assert found[0].shape == (1, 7)
    assert found[1].shape == (1, 4 + NEW)


class Fake:
    """In the place of the library's: each request is done at once, or none is."""

    def __init__(self) -> None:
        self.sessions: list[tuple[Room, bool]] = []
        """Their rooms, and whether they draw."""
        self.most = 99
        """At once, or a pass does not fit."""
        self._names: list[str] = []

    def begin(self, _model: object, room: Room, *, samples: bool) -> Fake:
        self.sessions.append((room, samples))
        return self

    def add(self, name: str, _ids: object, _options: object, *, pieces: bool) -> None:
        assert not pieces
        self._names.append(name)

    def made(self) -> Made:
        if len(self._names) > self.most:
            raise MemoryLimitError("too large", limit=1, smallest_limit=2)
        return Made(self._names.pop(0), [9], ended=True)

    def close(self) -> None:
        self._names.clear()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(batched, "Batching", made.begin)
    return made


def test_sessions_are_of_one_kind(model: Any, fake: Fake) -> None:
    """Those that draw, and those that do not; all in their order."""
    asked = [request(samples=number >= 3) for number in range(5)]
    found = [number for number, _ in Batched(model, iter(asked), 4).outcomes()]
    assert found == [0, 1, 2, 3, 4]
    assert [(room.at_once, samples) for room, samples in fake.sessions] == [(3, False), (2, True)]


def test_a_longer_request_has_another_session(model: Any, fake: Fake) -> None:
    """Whose room holds it."""
    asked = [request(), request(), request(500)]
    assert len(dict(Batched(model, iter(asked), 2).outcomes())) == 3
    assert [room.pages for room, _ in fake.sessions] == [2, 32]


def test_fewer_at_once_where_a_pass_does_not_fit(model: Any, fake: Fake) -> None:
    """Half as many, with the same requests; none is lost."""
    fake.most = 2
    found = dict(Batched(model, iter([request()] * 8), 8).outcomes())
    assert sorted(found) == list(range(8))
    assert [room.at_once for room, _ in fake.sessions] == [8, 4, 2]


def test_more_at_once_again(model: Any, fake: Fake) -> None:
    """Once a session of fewer has ended well."""
    fake.most = 2
    asked = [request(samples=number >= 4) for number in range(8)]
    outcomes = Batched(model, iter(asked), 8).outcomes()
    next(outcomes)
    fake.most = 99
    assert len(list(outcomes)) == 7
    assert [room.at_once for room, _ in fake.sessions] == [4, 2, 4]


def test_one_that_no_memory_holds(model: Any, fake: Fake) -> None:
    """Nothing is made for it, however much it asks for; others are as many at once as before."""
    asked = [request(), request(max_new_tokens=(1 << 53) - 1), *[request()] * 6]
    found = dict(Batched(model, iter(asked), 8).outcomes())
    assert isinstance(found[1], MemoryLimitError)
    assert "are free within memory_limit=2000000000. Give a shorter prompt" in str(found[1])
    assert sum(isinstance(outcome, torch.Tensor) for outcome in found.values()) == 7
    assert [room.pages for room, _ in fake.sessions] == [7, 6]


def test_what_is_free_is_looked_at_once_the_last_room_has_gone(
    model: Any, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a request would be refused for what another has left in a circle."""
    governor, order = model.pipeload.session.governor, []
    real = governor.spare_bytes

    def spare() -> int:
        order.append("look")
        return int(real())

    monkeypatch.setattr(governor, "spare_bytes", spare)
    monkeypatch.setattr(batched, "trim_heap", lambda: order.append("trim"))
    asked = [request(samples=number >= 2) for number in range(4)]
    assert len(dict(Batched(model, iter(asked), 2).outcomes())) == 4
    assert len(fake.sessions) == order.count("trim") == 2
    assert order[0] == "trim"


def test_one_that_does_not_fit_by_itself(model: Any, fake: Fake) -> None:
    """With shorter and shorter pieces of its prompt; then it has the error, and others go on."""
    fake.most = 0
    batch = Batched(model, iter([request()] * 2), 1)
    outcomes = batch.outcomes()
    number, outcome = next(outcomes)
    assert number == 0
    assert isinstance(outcome, MemoryLimitError)
    assert [room.rows for room, _ in fake.sessions] == [256, 128, 64, 32, 16]
    fake.most = 1
    assert [number for number, _ in outcomes] == [1]


def test_whoever_gives_requests_has_no_memory(model: Any, fake: Fake) -> None:
    """That is no request's fault."""

    def given() -> Iterator[dict[str, Any]]:
        yield request()
        raise MemoryError("no next line")

    outcomes = Batched(model, given(), 1).outcomes()
    assert next(outcomes)[0] == 0
    with pytest.raises(MemoryError, match="no next line"):
        next(outcomes)
    assert len(fake.sessions) == 1


def test_as_many_as_memory_holds(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values, and a pass of all of them; one at least."""
    governor = model.pipeload.session.governor
    kept, _ = governor.bytes_alone(0, 16 * 64, 1)
    asked = [request(1000) for _ in range(16)]
    rooms = []
    for spare in (0, 4 * kept, 40 * kept):
        monkeypatch.setattr(governor, "spare_bytes", lambda spare=spare: 20_000_000 + spare)
        batch = Batched(model, iter(asked), 16)
        batch._look_ahead(16)
        rooms.append(batch._room(batch._next))
    assert rooms[0].at_once < rooms[1].at_once < rooms[2].at_once == 16
    assert [room.pages for room in rooms] == [63 * max(1, room.at_once) for room in rooms]
    monkeypatch.setattr(governor, "spare_bytes", lambda: 0)
    assert batch._room(batch._next) == Room(1, 16, 63)


def test_no_other_begins(model: Any, fake: Fake) -> None:
    """Once it is to end: neither what was looked at, in this session or another, nor the rest."""
    ended: list[int] = []
    requests = iter([request()] * 9)
    batch = Batched(model, requests, 3, lambda: bool(ended))
    for number, _ in batch.outcomes():
        ended.append(number)
        assert batch.running == 3 - len(ended)
    assert ended == [0, 1, 2]
    assert len(fake.sessions) == 1
    assert len(list(requests)) == 6


# -- the library's part --------------------------------------------------------------------------


def test_an_error_in_a_pass(model: Any) -> None:
    """Of ours it comes as it is; another says what to leave out; the model runs again."""
    for error, kind in ((ReadError(5, "gone"), ReadError), (KeyError("x"), UnsupportedModelError)):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        hook = model.model.register_forward_pre_hook(fail)
        with pytest.raises(kind) as raised:
            list(Batched(model, iter([request()]), None).outcomes())
        hook.remove()
        if kind is UnsupportedModelError:
            assert str(raised.value).endswith(
                "does not run LlamaForCausalLM: 'x'. Leave --batched out."
            )
    assert len(dict(Batched(model, iter([request()]), None).outcomes())) == 1


def test_an_error_of_one_request(model: Any) -> None:
    """It is told, and not waited for."""
    batching = Batching(model, Room(1, 16, 4), samples=False)
    batching._manager.add_request([5, 6], request_id="x", max_new_tokens=2, nonsense=1)
    with closing(batching), pytest.raises(UnsupportedModelError, match="nonsense"):
        list(iter(batching.made, Made("x", [], ended=True)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 1.3),
        ("min_new_tokens", 2),
        ("num_beams", 3),
        ("stop_strings", ["a"]),
        ("max_time", 1.0),
        ("bad_words_ids", [[5]]),
        ("begin_suppress_tokens", [5]),
        ("forced_bos_token_id", 0),
        ("min_p", 0.1),
    ],
)
def test_settings_that_would_be_left_out(model: Any, name: str, value: object) -> None:
    """Of the model's own: each is named."""
    setattr(model.generation_config, name, value)
    with pytest.raises(OptionError) as raised:
        Batching(model, Room(1, 16, 4), samples=True)
    assert f"ask for {name}={value!r}, which" in str(raised.value)


def test_settings_that_say_nothing(model: Any) -> None:
    """Or only of what is drawn, where nothing is; and what nobody but the model's makers reads."""
    settings = model.generation_config
    settings.num_beams, settings.repetition_penalty, settings.min_new_tokens = 1, 1.0, 0
    settings.suppress_tokens, settings.min_p, settings.chat_format = [], 0.1, "chatml"
    assert len(dict(Batched(model, iter([request()]), None).outcomes())) == 1


def test_what_shows_errors_is_as_before(model: Any) -> None:
    """Once a session has ended."""
    log = logging.getLogger("ContinuousBatchingLogger")
    before = log.level
    with closing(Batching(model, Room(1, 16, 4), samples=False)):
        assert log.level == logging.CRITICAL
    assert log.level == before


def test_memory_that_an_allocator_does_not_have(model: Any) -> None:
    """Fewer at once are tried, down to one: that one has the error, and others go on."""
    of_allocators = [
        MemoryError("none"),
        torch.OutOfMemoryError("none on the device"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] not enough memory: you tried to"),
    ]
    left = [*of_allocators, *of_allocators[2:]]  # of two, then of one with ever shorter pieces

    def fail(*_: object) -> None:
        if left:
            raise left.pop()

    model.model.register_forward_pre_hook(fail)
    found = dict(Batched(model, iter([request()] * 2), 2).outcomes())
    assert isinstance(found[0], MemoryError)
    assert "no memory for a pass: " in str(found[0])
    assert found[1].shape == (1, 5 + NEW)


def test_layers_of_two_kinds(tmp_path: Path) -> None:
    """Which have pages of their own: there are enough for a request by itself, of any length."""
    kinds = ["sliding_attention"] * 5 + ["full_attention"] * 2
    config = tiny_config("gemma3", num_hidden_layers=7, layer_types=kinds, sliding_window=128)
    save_random(config, tmp_path, "fp32", seed=4)
    made: Any = pipeload.from_pretrained(tmp_path, memory_limit="2GB", dtype="auto")
    asked = [request(length) for length in (1, 35, 100)]
    found = dict(Batched(made, iter(asked), 1).outcomes())
    plain = load_plain(tmp_path)
    for number, one in enumerate(asked):
        wanted = plain.generate(**one, pad_token_id=0)
        assert found[number].tolist() == wanted.tolist()
    made.pipeload.remove()


def test_there_are_sectors_enough(model: Any) -> None:
    """As the library counts them, for one request of any length, and for many."""
    for sliding, full in ((11, 2), (5, 2), (3, 3), (1, 6), (0, 4)):
        kinds = ["sliding_attention"] * sliding + ["full_attention"] * full
        model.config.layer_types = kinds
        model.config.num_hidden_layers = sliding + full
        sector = math.lcm(*(count for count in (sliding, full) if count))
        for pages in range(1, 200):
            there = -(-(pages + spare_pages(model)) * (sliding + full) // sector)
            assert there >= sum(-(-pages * count // sector) for count in (sliding, full))
        assert spare_pages(model, unused=True) * (sliding + full) >= 2 * sector


def test_layers_of_an_unknown_kind(model: Any) -> None:
    """The model is refused, before anything is sized."""
    model.config.layer_types = ["linear_attention"] * 4
    with pytest.raises(UnsupportedModelError, match="Invalid layer type: linear_attention"):
        list(Batched(model, iter([request()]), None).outcomes())


def test_attention_that_is_not_served(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library says which."""
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flex_attention")
    with pytest.raises(UnsupportedModelError, match="flex_attention is not supported"):
        Batching(model, Room(1, 16, 4), samples=False)
