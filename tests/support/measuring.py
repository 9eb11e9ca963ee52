"""What planning is given in tests, in the place of what this process would measure."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from pipeload.budget import measured_host
from pipeload.budget.measured_host import Measured, measure
from pipeload.entry import loading

if TYPE_CHECKING:
    from collections.abc import Iterator


def as_measured(**figures: Any) -> Measured:
    """These figures, and others of a process that has all the room there is."""
    others: dict[str, Any] = {
        "held_bytes": 0,
        "promised_bytes": 0,
        "leaving_bytes": 0,
        "page_cache_bytes": 1 << 40,
        "allowed_bytes": 1 << 40,
        "growth_bytes": 0,
        "threads": 1,
        "direct_refusal": None,
        "maps_files": True,
        "zeros_are_free": True,
    }
    return Measured(**others | figures)


@contextlib.contextmanager
def given(**figures: Any) -> Iterator[None]:
    """Plans made inside are given these figures; all others are measured.

    Nor do loads give back pages of libraries, which takes a while.
    """

    def stand_in(*args: Any, **options: Any) -> Measured:
        with mock.patch.object(measured_host, "droppable_bytes", return_value=0):
            return replace(measure(*args, **options), **figures)

    with (
        mock.patch.object(loading, "measure", stand_in),
        mock.patch.object(loading, "lower_floor", return_value=0),
    ):
        yield


def steady(held_bytes: int) -> contextlib.AbstractContextManager[None]:
    """As if this process held so much, whatever ran before, and never grew.

    One that grows needs room for it, and a tiny model would fit in that.
    """
    return given(held_bytes=held_bytes, growth_bytes=0)
