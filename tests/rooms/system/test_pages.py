"""Memory goes back to the system, on each system by its own means, and nothing beside it does."""

from __future__ import annotations

import mmap
import os
import sys

import pytest
import torch

from pipeload.system.memory import rss_bytes
from pipeload.system.pages import PAGE
from pipeload.weights import arena as weights_arena
from pipeload.weights.arena import Arena
from pipeload.weights.nan_arena import NanArena
from tests.support.platforms import Windows, become_windows, take_away

NBYTES = 64 << 20
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="plays other systems")


def filled(nbytes: int) -> tuple[Arena, torch.Tensor]:
    arena = Arena(nbytes, device=torch.device("cpu"), huge=False)
    view = arena.tensor(0, "U8", (nbytes,), nbytes)
    view.fill_(7)
    return arena, view


@pytest.mark.parametrize("system", ["this one", "darwin"])
def test_pages_go_at_once(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages inside the part alone; they read as zeros and can be written again."""
    if system != "this one":
        monkeypatch.setattr(sys, "platform", system)
    arena, view = filled(NBYTES)
    before = rss_bytes()
    arena.discard(PAGE + 1, NBYTES - 3 * PAGE)
    assert before - rss_bytes() > NBYTES * 0.9
    first, stop = 2 * PAGE, NBYTES - 2 * PAGE
    assert bool((view[:first] == 7).all())
    assert bool((view[stop:] == 7).all())
    assert not bool(view[first:stop].any())
    view.fill_(9)
    assert bool((view == 9).all())


@linux
def test_pages_leave_the_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows is asked for the same pages, and what they hold is let be."""
    windows = become_windows(monkeypatch)
    assert isinstance(windows, Windows)
    arena, view = filled(10 * PAGE)
    arena.discard(1, 5 * PAGE)
    assert windows.unlocked == [(view.data_ptr() + PAGE, 4 * PAGE)]
    assert bool((view == 7).all())


@pytest.mark.parametrize("missing", ["platform", "memfd_create"])
def test_a_table_without_nan(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros instead, again after it was dropped."""
    if missing == "platform":
        monkeypatch.setattr(sys, "platform", "darwin")
    else:
        take_away(monkeypatch, os, missing)
    arena = NanArena(5 * PAGE)
    view = arena.tensor(0, "U8", (5 * PAGE,), 5 * PAGE)
    assert not bool(view.any())
    view.fill_(3)
    arena.drop()
    assert not bool(view.any())


@linux
@pytest.mark.parametrize(("fits", "wish"), [(True, "MADV_HUGEPAGE"), (False, "MADV_NOHUGEPAGE")])
def test_huge_pages_are_not_larger_than_planned(
    fits: bool,
    wish: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where one page of page tables covers 512 MB, the kernel is asked for small pages."""
    asked: list[int] = []

    class Mmap(mmap.mmap):
        def madvise(self, option: int, *args: int) -> None:
            asked.append(option)
            super().madvise(option, *args)

    monkeypatch.setattr(mmap, "mmap", Mmap)
    monkeypatch.setattr(weights_arena, "_HUGE_PAGES_FIT", fits)
    Arena(PAGE, device=torch.device("cpu"), huge=True)
    assert asked == [getattr(mmap, wish)]


def test_address_space_that_is_refused() -> None:
    """One line that says how much, and what to do."""
    with pytest.raises(MemoryError, match=r"refuses \d+ bytes of address space.*promise more"):
        Arena(1 << 60, device=torch.device("cpu"), huge=False)
