"""The steps that take a model down: each to its end, the last one first, whatever strikes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from pipeload.engine.teardown import Undo
from tests.promises.failures.test_interrupts import interrupt, places_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Things:
    """What is put on, and how often each was taken off to its end."""

    def __init__(self, *names: str) -> None:
        self.taken: list[str] = []
        self.undo = Undo()
        for name in names:
            self.undo.push(partial(self.take, name))

    def take(self, name: str) -> None:
        self.taken.append(name)


def test_the_last_one_goes_first() -> None:
    """And all of them once, however often they are asked to."""
    things = Things("files", "threads", "hooks")
    assert not things.undo.is_done
    for _ in range(2):
        things.undo()
        assert things.undo.is_done
        assert things.taken == ["hooks", "threads", "files"]


def test_a_step_that_lets_go_of_what_takes_them_all() -> None:
    """As a handle does, with which the passes go whose end takes the model down."""
    things = Things("files", "threads")
    asked: list[int] = []

    def let_go() -> None:
        asked.append(len(asked))
        if len(asked) == 1:
            things.undo()

    things.undo.push(let_go)
    things.undo()
    assert things.undo.is_done
    assert things.taken == ["threads", "files"]


def test_steps_are_there_before_the_next_thing_is_put_on() -> None:
    """What is interrupted on the way takes off all that is on."""
    things = Things()

    def put_on() -> Iterator[partial[None]]:
        yield partial(things.take, "first")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        things.undo.push_all(put_on())
    things.undo()
    assert things.taken == ["first"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_one_that_fails_keeps_no_other(error: type[BaseException]) -> None:
    """Its error comes out at the end; it is not tried for ever."""
    things = Things("files")
    calls = []

    def fail() -> None:
        calls.append(1)
        raise error("this one")

    things.undo.push(fail)
    things.undo.push(partial(things.take, "hooks"))
    with pytest.raises(error, match="this one"):
        things.undo()
    assert things.taken == ["hooks", "files"]
    assert len(calls) == (1 if error is ValueError else 2)  # an interrupt may have struck half way
    assert things.undo.is_done
    things.undo()


def test_an_interrupt_goes_before_other_errors() -> None:
    """Whoever pressed Ctrl-C is not told of something else, before it or after it."""
    things = Things()
    strikes = iter([KeyboardInterrupt("a key")])

    def fail() -> None:
        raise ValueError("this one")

    def be_struck() -> None:
        if (error := next(strikes, None)) is not None:
            raise error

    things.undo.push(fail)
    things.undo.push(be_struck)
    things.undo.push(fail)
    with pytest.raises(KeyboardInterrupt, match="a key"):
        things.undo()
    assert things.undo.is_done


def test_an_interrupt_anywhere() -> None:
    """Ctrl-C between any two instructions: every step has run to its end, here or the next time."""
    names = ("files", "threads", "hooks")
    struck = 0
    for place, count in places_of(Things(*names).undo).items():
        for time in range(1, count + 1):
            things = Things(*names)
            struck += interrupt(things.undo, place, time)
            things.undo()
            assert things.undo.is_done
            # One that was struck behind its end may run again: steps are made for that.
            assert list(dict.fromkeys(things.taken)) == ["hooks", "threads", "files"], place
    assert struck > 5
