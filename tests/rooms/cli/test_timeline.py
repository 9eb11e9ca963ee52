"""`pipeload timeline`: which pass of a trace it draws, and what it refuses."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.cli.timeline import bars_of, one_pass, read_events
from pipeload.errors import OptionError
from tests.rooms.cli.test_mistakes import assert_one_line
from tests.support.commands import invoke
from tests.support.streaming import generated, load_streamed

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture(scope="module")
def trace(tiny: TinyCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a few tokens."""
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    model = load_streamed(tiny("llama"))
    with pipeload.handle(model).trace(file):
        generated(model)
    return file


def test_one_pass(trace: Path) -> None:
    """Each block once, in its order, and what was read beside them."""
    bars = one_pass(bars_of(read_events(trace), "trace"), "trace")
    computed = [bar.name for bar in bars if bar.kind == "compute" and ".layers." in bar.name]
    assert computed == [f"model.layers.{number}" for number in range(6)]
    reads = [bar for bar in bars if bar.kind == "read"]
    assert 3 <= len(reads) <= 14
    assert all(bar.began <= bar.ended for bar in bars)


@pytest.mark.parametrize("form", ["png", "svg"])
def test_a_picture(trace: Path, tmp_path: Path, form: str) -> None:
    """Is drawn, also of a trace without an end."""
    data = trace.read_bytes()
    broken = tmp_path / "broken.json"
    broken.write_bytes(data[: len(data) * 3 // 4])
    for file in (trace, broken):
        picture = tmp_path / f"pass.{form}"
        done = invoke("timeline", file, picture)
        assert done.exit_code == 0, done.output
        assert "a pass of " in done.stderr
        assert len(picture.read_bytes()) > 5000
        picture.unlink()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the trace"),
        ("hello", "is no trace"),
        ("[1]", "is no trace"),
        ("{}", "is no trace"),
        ('[{"ph": "M"}]', "nothing was computed"),
        ('[{"name": "x"}]', "is no trace"),
        ('["ph"]', "is no trace"),
        ('[{"ph": "X", "cat": "read", "ts": 1}]', "an event in it is damaged"),
        ('[{"ph": "X", "cat": "read", "name": "x", "ts": "1"}]', "an event in it is damaged"),
        ('[{"ph": "X", "cat": "read", "name": "x", "ts": NaN}]', "nan is no time"),
        ('[{"ph": "X", "cat": "read", "name": "x", "ts": 1, "dur": 2}]', "is damaged"),
        ('[{"ph": "b", "cat": "read", "name": "x", "ts": 1, "id": []}]', "is damaged"),
        (f'[{{"ph": "X", "cat": "read", "name": "x", "ts": 1{"0" * 400}}}]', "is damaged"),
    ],
)
def test_no_trace(tmp_path: Path, text: str | None, words: str) -> None:
    """Is told in a line."""
    file = tmp_path / "trace.json"
    if text is not None:
        file.write_text(text)
    assert_one_line(invoke("timeline", file, tmp_path / "pass.png", "-q"), 1, words)


def test_where_no_picture_can_be(trace: Path, tmp_path: Path) -> None:
    """In a folder that is not there, or a form that nobody knows."""
    nowhere = invoke("timeline", trace, tmp_path / "no" / "pass.png", "-q")
    assert_one_line(nowhere, 1, "No such file or directory. Name another file, as pass.png.")
    form = invoke("timeline", trace, tmp_path / "pass.mp3", "-q")
    assert_one_line(form, 1, "Format 'mp3' is not supported")


def test_without_its_package(trace: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """It says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = invoke("timeline", trace, tmp_path / "pass.png", "-q")
    assert_one_line(done, 1, "pip install 'pipeload[timeline]'")


def test_a_pass_that_is_the_last() -> None:
    """Ends where the trace does; others' computing is no part of it."""

    def bar(name: str, at: float, thread: int = 1) -> dict[str, Any]:
        return {
            "cat": "compute",
            "ph": "X",
            "name": f"compute {name}",
            "ts": at,
            "dur": 5,
            "tid": thread,
        }

    events = [bar("a", 0), bar("b", 10), bar("a", 20), bar("a", 21, 2), bar("b", 30)]
    found = one_pass(bars_of(json.loads(json.dumps(events)), "trace"), "trace")
    assert [(one.name, round(one.began * 1e6)) for one in found] == [("a", 20), ("b", 30)]
    with pytest.raises(OptionError, match="nothing was computed in the trace 'x'"):
        one_pass([], "x")
