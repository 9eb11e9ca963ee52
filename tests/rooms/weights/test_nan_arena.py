"""Address space that reads as NaN until it is written, and after it was dropped."""

from __future__ import annotations

import sys

import pytest

from pipeload.system.pages import PAGE
from pipeload.weights.arena import DTYPES, HUGE_PAGE
from pipeload.weights.nan_arena import NanArena

FLOATS = [code for code, dtype in DTYPES.items() if dtype.is_floating_point]
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")


@linux
@pytest.mark.parametrize("code", FLOATS)
def test_every_float_reads_as_nan(code: str) -> None:
    """Whatever dtype the table has."""
    arena = NanArena(PAGE)
    items = PAGE // DTYPES[code].itemsize
    assert arena.tensor(0, code, (items,), PAGE).float().isnan().all()


@linux
@pytest.mark.parametrize("nbytes", [1, PAGE, HUGE_PAGE, HUGE_PAGE + PAGE, 5 * HUGE_PAGE - 1])
def test_pages_are_their_own(nbytes: int) -> None:
    """The block stands behind every page, and a page that is written changes no other."""
    arena = NanArena(nbytes)
    view = arena.tensor(0, "U8", (arena.nbytes,), arena.nbytes)
    assert (view == 255).all()
    view[::PAGE] = 1
    assert int((view == 255).sum()) == arena.nbytes - arena.nbytes // PAGE
    arena.drop()
    assert (view == 255).all()


def test_more_than_the_machine_has() -> None:
    """Address space alone counts."""
    arena = NanArena(64 << 30)
    last = arena.buffer(arena.nbytes - PAGE, PAGE)
    last[:] = bytes(PAGE)
    assert bytes(last) == bytes(PAGE)


def test_nothing() -> None:
    """An empty table has no memory."""
    arena = NanArena(0)
    arena.drop()
    assert arena.tensor(0, "F32", (0, 4), 0).shape == (0, 4)
