"""What a site that runs has there of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.models import load_plain
from tests.support.streaming import load_streamed, logits, session_of
from tests.support.users import small_ranges

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


def test_a_site_reads_the_units_that_are_chosen(tiny: TinyCheckpoint) -> None:
    """All of them, unless somebody knows which its next run needs."""
    folder = tiny("llama")
    plain = load_plain(folder)
    with small_ranges():
        model = load_streamed(folder)
    session = session_of(model)
    (site,) = (i for i, seat in enumerate(session.streamer.seats) if seat.whole is not None)
    seat = session.streamer.seats[site]
    assert seat.whole is not None
    weight = plain.get_parameter(seat.whole.name)
    assert list(seat.chosen) == list(seat.units)
    want = logits(plain)
    assert torch.equal(logits(model), want)

    def rows_read() -> int:
        found = 0
        for start, stop, rows in session.streamer.chunks(site):
            assert torch.equal(rows, weight[start:stop])
            found += stop - start
        return found

    assert rows_read() == len(weight)
    seat.chosen = seat.units[1:2]
    assert 0 < rows_read() < len(weight)
    seat.chosen = seat.units
    assert torch.equal(logits(model), want)
