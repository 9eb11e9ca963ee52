"""Every weight has a place of its own, and raw ones keep theirs within the page."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given

from pipeload.budget.unit_menus import hold_bytes
from pipeload.system.pages import PAGE, ceil_page, floor_page
from pipeload.weights.layout import Layout, Weight, lay_out
from tests.support.weights import FILES, Writer, weight_lists

if TYPE_CHECKING:
    from collections.abc import Iterator


def places(layout: Layout) -> Iterator[tuple[str, int, int]]:
    """(what, first byte, byte after the last) of everything in the region."""
    for extent in layout.extents:
        first, stop, offset = extent.pages
        yield f"{extent.file}:{extent.start}", offset, offset + stop - first
    for cast in layout.casts:
        yield cast.weight.name, cast.offset, cast.offset + cast.weight.nbytes
    for conversion in layout.conversions:
        for weight, offset in zip(conversion.weights, conversion.offsets, strict=True):
            yield weight.name, offset, offset + weight.nbytes


def check(weights: list[Weight], layout: Layout) -> None:
    assert sorted(w.name for w in layout.weights) == sorted(w.name for w in weights)
    assert layout.nbytes % PAGE == 0
    taken = sorted(places(layout), key=lambda place: place[1:])
    for (_, _, stop), (_, start, _) in pairwise(taken):
        assert stop <= start
    if taken:
        assert taken[0][1] >= 0
        assert taken[-1][2] <= layout.nbytes
    stored = [(weight.sources[0], offset) for weight, offset in layout.raw]
    stored += [source for conversion in layout.conversions for source in conversion.sources]
    for source, offset in stored:
        assert offset % PAGE == source.start % PAGE
        (extent,) = [
            e
            for e in layout.extents
            if e.file == source.file and e.start <= source.start and source.stop <= e.stop
        ]
        assert offset - extent.offset == source.start - extent.start
    for extent in layout.extents:
        first, stop, offset = extent.pages
        assert (first % PAGE, stop % PAGE, offset % PAGE) == (0, 0, 0)
    made = [cast.offset for cast in layout.casts]
    made += [offset for conversion in layout.conversions for offset in conversion.offsets]
    assert all(offset % 64 == 0 for offset in made)


@given(weight_lists())
def test_any_layout(weights: list[Weight]) -> None:
    """Nothing is lost, nothing overlaps, everything lies where it must."""
    check(weights, lay_out(weights))


@given(weight_lists())
def test_bounds_of_a_layout(weights: list[Weight]) -> None:
    """It takes no more memory than the plan counts for its weights, however they are spread."""
    groups: dict[str, list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.group or weight.name, []).append(weight)
    assert lay_out(weights).nbytes <= sum(hold_bytes(group) for group in groups.values())


@given(weight_lists())
def test_read_bytes_of_a_layout(weights: list[Weight]) -> None:
    """All pages of all sources, and next to nothing besides."""
    sources = {s.name: s for weight in weights for s in weight.sources}.values()
    least = sum(source.nbytes for source in sources)
    assert least <= lay_out(weights).read_bytes <= least + 3 * PAGE * len(sources)


def test_neighbours_are_read_in_one_go() -> None:
    """Weights that follow each other in the file are one extent, whatever order they come in."""
    writer = Writer()
    weights = [w for name in "abc" for w in writer.weight(name, 5000)]
    layout = lay_out(reversed(weights))
    assert len(layout.extents) == 1
    assert layout.extents[0].stop - layout.extents[0].start == 30_000


@pytest.mark.parametrize("gap", [PAGE + 2, 100_000])
def test_what_lies_between_is_not_read(gap: int) -> None:
    """A hole of more than a page costs neither reading nor memory."""
    writer = Writer()
    weights = [w for name in "ab" for w in writer.weight(name, 5000, gap=gap)]
    layout = lay_out(weights)
    assert len(layout.extents) == 2
    assert layout.nbytes <= 2 * (ceil_page(10_000) + PAGE)


def test_files_are_apart() -> None:
    """An extent is of one file."""
    writer = Writer()
    weights = [w for file in FILES for w in writer.weight(str(file), 10, file=file)]
    assert [extent.file for extent in lay_out(weights).extents] == list(FILES)


def test_nothing_takes_nothing() -> None:
    """A block without streamed weights has an empty layout."""
    assert lay_out([]) == Layout(0, (), (), (), ())
    assert lay_out([]).read_bytes == 0


@pytest.mark.parametrize(
    ("value", "floor", "ceil"),
    [(0, 0, 0), (1, 0, 4096), (4095, 0, 4096), (4096, 4096, 4096), (4097, 4096, 8192)],
)
def test_page_borders(value: int, floor: int, ceil: int) -> None:
    """At, below and above."""
    assert (floor_page(value), ceil_page(value)) == (floor, ceil)
