"""Ctrl-C between any two instructions of the product leaves a model that works.

CPython looks for signals when a function starts, after a call and when a loop jumps back. Each of
these places that a pass comes by, in the product and in `threading`, is interrupted once.
"""

from __future__ import annotations

import dis
import sys
import threading
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

import pipeload
import pipeload_hooks
from tests.support.experts import experts_of, save_moe
from tests.support.models import load_plain
from tests.support.streaming import (
    WAIT_SECONDS,
    assert_nothing_held,
    in_thread,
    load_streamed,
    logits,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from tests.conftest import TinyCheckpoint

    Place = tuple[CodeType, int]

EVERY = pytest.mark.parametrize("every", few([19, 1], [19]))
"""How many places are come by for one that is struck; experts take seconds for each."""
_FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (pipeload, pipeload_hooks))


@cache
def checked_offsets(code: CodeType) -> frozenset[int]:
    """Where in `code` a signal's exception can come up."""
    if not code.co_filename.startswith(_FOLDERS) and code.co_filename != threading.__file__:
        return frozenset()
    after_check, found = False, set()
    jumps = {*dis.hasjrel, *dis.hasjabs}
    for instruction in dis.get_instructions(code):
        # Backwards only. Where a loop in a `with` ends, nobody looks, and nothing would clean up.
        if instruction.opcode in jumps and instruction.argval <= instruction.offset:
            found.add(instruction.argval)
        if after_check:
            found.add(instruction.offset)
        after_check = instruction.opname.startswith(("CALL", "RESUME"))
    return frozenset(found)


class Interrupter:
    """Traces this thread; `at(place)` decides where the KeyboardInterrupt comes up."""

    def __init__(self, at: Callable[[Place], bool]) -> None:
        self._at = at

    def __enter__(self) -> None:
        sys.settrace(self._enter)

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _value: object) -> Any:
        if event != "call" or not checked_offsets(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _value: object) -> Any:
        place = (frame.f_code, frame.f_lasti)
        if event == "opcode" and place[1] in checked_offsets(place[0]) and self._at(place):
            sys.settrace(None)
            raise KeyboardInterrupt(str(place))
        return self._step


def places_of(run: Callable[[], object]) -> dict[Place, int]:
    """Every place that `run` comes by, and how often."""
    counts: dict[Place, int] = {}

    def note(place: Place) -> bool:
        counts[place] = counts.get(place, 0) + 1
        return False

    with Interrupter(note):
        run()
    return counts


def interrupt(run: Callable[[], object], place: Place, time: int) -> bool:
    """Run it, with an interrupt when it comes by `place` for the `time`th time; whether it did."""
    left = time

    def now(here: Place) -> bool:
        nonlocal left
        left -= here == place
        return left == 0

    try:
        with Interrupter(now):
            run()
    except KeyboardInterrupt:
        return True
    return False


@pytest.mark.slow
# An interrupt between open() and its `with` leaves a file to be closed by its last reference.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# The first pass may come by other places than later ones; a model that fits lets its threads go.
@pytest.mark.parametrize(
    ("spare", "first"), [(0, False), (0, True), (700_000, False), (10_000_000, True)]
)
@EVERY
def test_an_interrupt_anywhere(tiny: TinyCheckpoint, spare: int, first: bool, every: int) -> None:
    """Whatever instruction it strikes, this thread and another one then get the right numbers."""
    folder = tiny("llama")
    expected = logits(load_plain(folder))
    model = load_streamed(folder, spare=spare)
    if not first:
        logits(model)
    places = places_of(lambda: logits(model))
    assert len(places) > 50
    struck = 0
    if first:  # each takes a model of its own
        every *= 9
    places = dict(list(places.items())[::every])
    for place, count in places.items():
        if first:
            model = load_streamed(folder, spare=spare)
        struck += interrupt(partial(logits, model), place, (count + 1) // 2)
        where = f"{place[0].co_name} at {place[1]}"
        other = in_thread(logits, model).result(WAIT_SECONDS)
        assert torch.equal(other, expected), where
        assert torch.equal(logits(model), expected), where
        assert_nothing_held(model)
    assert struck > len(places) // 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("spare", [1_000, 1_000_000])
@EVERY
def test_an_interrupt_anywhere_among_experts(tmp_path: Path, spare: int, every: int) -> None:
    """Where some stay and some pass: what is counted as there is there, and nothing else is."""
    folder = save_moe(tmp_path)
    ids = torch.arange(3, 12)[None]
    expected = logits(load_plain(folder), ids)
    model = load_streamed(folder, spare=spare)
    run = partial(logits, model, ids)
    run()
    places = {p: n for p, n in places_of(run).items() if "expert" in p[0].co_filename}
    assert len(places) > 50
    places = dict(list(places.items())[::every])
    struck = 0
    for place, count in places.items():
        struck += interrupt(run, place, (count + 1) // 2)
        where = f"{place[0].co_name} at {place[1]}"
        assert torch.equal(run(), expected), where
        assert_nothing_held(model)
        assert _get_current_function_mode_stack() == [], where
        experts = experts_of(model)
        held = [set(experts._cache.held(layer)) for layer in range(len(experts.seats))]
        assert held == experts._there, where
        assert experts._cache.used <= experts._cache.budget, where
    assert struck > len(places) // 2
