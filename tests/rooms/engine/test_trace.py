"""What a trace says of a run, and that nothing is left of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.errors import OptionError, UnsupportedOperationError
from tests.support.streaming import IDS, generated, load_streamed, session_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture
def model(tiny: TinyCheckpoint) -> Any:
    return load_streamed(tiny("llama"))


def watched(model: Any) -> list[object]:
    """Attributes that stand before methods."""
    session = session_of(model)
    parts = (session.prefetcher, session.streamer, session.prefetcher.dispatcher)
    return [value for part in parts for value in vars(part).values() if "Trace" in repr(value)]


def test_what_it_says(model: Any, tmp_path: Path) -> None:
    """Each block computes once in each pass; what is read is there before; nothing changes."""
    file = tmp_path / "trace.json"
    wanted = generated(model)
    with pipeload.handle(model).trace(file):
        assert watched(model)
        assert generated(model) == wanted
    assert watched(model) == []
    before = file.read_bytes()
    assert generated(model) == wanted
    assert file.read_bytes() == before
    events = json.loads(before)
    computed = Counter(event["name"] for event in events if event.get("cat") == "compute")
    assert {name: computed[name] for name in computed if ".layers." in name} == {
        f"compute model.layers.{layer}": 6 for layer in range(6)
    }
    reads = [event for event in events if event.get("cat") == "read"]
    begun: Counter[str] = Counter()
    for event in reads:
        begun[event["name"]] += 1 if event["ph"] == "b" else -1
        assert begun[event["name"]] in {-1, 0, 1}  # one was on its way when it began
    assert len(reads) > 6 * 2
    assert any(event.get("cat") == "evict" for event in events)
    sizes = [event["args"] for event in events if event["ph"] == "C"]
    assert all(size["buffers"] > 0 for size in sizes)
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert "pipeload-dispatcher" in names
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


def test_requests_at_once(model: Any, tmp_path: Path) -> None:
    """Each computes in a thread of its own, by its name."""
    file = tmp_path / "trace.json"
    ids = {"input_ids": IDS, "max_new_tokens": 2, "do_sample": False}
    with pipeload.handle(model).trace(file):
        assert len(list(pipeload.generate_many(model, [ids, ids], at_once=2))) == 2
    events = json.loads(file.read_text())
    threads = {event["tid"] for event in events if event.get("cat") == "compute"}
    assert len(threads) == 2
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"pipeload-request-0", "pipeload-request-1"} <= names


def test_one_at_a_time(model: Any, tmp_path: Path) -> None:
    """And none of a model that streams no more; an error inside ends it."""
    handle = pipeload.handle(model)

    def two() -> None:
        with handle.trace(tmp_path / "one"), handle.trace(tmp_path / "two"):
            raise AssertionError

    with pytest.raises(UnsupportedOperationError, match="Let that one end first"):
        two()
    assert watched(model) == []
    assert json.loads((tmp_path / "one").read_text())
    assert not (tmp_path / "two").exists()
    handle.remove()
    with pytest.raises(UnsupportedOperationError, match="Load it again"):
        handle.trace(tmp_path / "two")


@pytest.mark.parametrize(
    ("file", "words"),
    [("/no/such/folder/trace", "No such file"), ("/dev/full", "No space left on device")],
)
def test_where_it_cannot_be_written(model: Any, file: str, words: str) -> None:
    """Is told, at once or at the end; the model is not disturbed."""
    wanted = generated(model)
    found: list[list[int]] = []

    def trace() -> None:
        with pipeload.handle(model).trace(file):
            found.extend(generated(model) for _ in range(20))

    with pytest.raises(OptionError, match=rf"cannot write the trace .*{words}.*\. Name another"):
        trace()
    assert all(one == wanted for one in found)
    assert watched(model) == []
    assert generated(model) == wanted
