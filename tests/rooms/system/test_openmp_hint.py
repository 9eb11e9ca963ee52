"""What is said once of how a process was started, where the user can see what asked for it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

import pipeload
from pipeload.system import openmp_hint
from tests.support.streaming import steady_floor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


def in_a_context(folder: Path) -> Any:
    with pipeload.streaming("100GB"):
        return AutoModelForCausalLM.from_pretrained(folder)


WAYS: dict[str, Callable[[Path], Any]] = {
    "from_pretrained": lambda folder: pipeload.from_pretrained(folder, memory_limit="100GB"),
    "streaming": in_a_context,
    "wrap": lambda folder: pipeload.wrap(AutoModelForCausalLM.from_pretrained(folder), "100GB"),
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small machine, on which nobody has said anything yet."""
    monkeypatch.setattr(openmp_hint, "_advised", False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_spin(way: str, tiny: TinyCheckpoint) -> None:
    """Once, at the line of the user's."""
    folder = tiny("llama")
    with steady_floor():
        with pytest.warns(UserWarning, match="OMP_WAIT_POLICY=passive") as said:
            WAYS[way](folder).pipeload.remove()
        assert [warning.filename for warning in said] == [__file__]
        WAYS[way](folder).pipeload.remove()  # a second warning would be an error


@pytest.mark.parametrize("why", ["told", "many cores"])
def test_nothing_to_say(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where threads do not spin, or leave cores."""
    if why == "told":
        monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    else:
        monkeypatch.setattr("os.cpu_count", lambda: 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        openmp_hint.advise_openmp()
