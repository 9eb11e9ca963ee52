"""The rows of the output head: in which steps they may be dealt out, and whether that is exact."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.budget.cut import Divider, NothingToStreamError, Touched
from pipeload.ring.deal import deal
from pipeload.weights.row_cuts import ROW_STEP, WIDE_STEP, Cut, RowRange, can_cut_rows, whole_cut
from pipeload.weights.whole_shape import WholeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeload.ring.deal import Deal, RankPower
    from pipeload.weights.layout import Weight


class HeadRows(NamedTuple):
    """A head that ranks may share by rows, where that gives the same bits."""

    cut: Cut
    """Its product, whole."""
    row_bytes: int

    def steps(self, ranks: int) -> Iterator[list[RowRange]]:
        """Ways to divide its rows into what is dealt out, the likeliest to be exact first."""
        total = self.cut.total
        order = (ROW_STEP, WIDE_STEP) if total % WIDE_STEP else (WIDE_STEP, ROW_STEP)
        for step in order:
            starts = [*range(0, total - total % step, step)]
            if len(starts) >= 2 * ranks:
                stops = [*starts[1:], total]  # the last one takes the rest
                yield [RowRange(a, b) for a, b in zip(starts, stops, strict=True)]

    def is_exact(self, rows: RowRange) -> bool:
        """Whether these have the whole product's bits by themselves, on this host.

        Not where zeros take memory: an input for which they have not would be refused, as nothing
        else is computed there. Asked of each rank, whose systems may differ.
        """
        return WholeShape.is_free() and can_cut_rows(self.cut._replace(ranges=(rows,)))


def head_rows(
    model: Any, weights: Mapping[str, Weight], touched: Touched | None
) -> HeadRows | None:
    """The head of a model on the meta device, which is a part to deal, if by rows.

    Not one that the library makes of what is stored.
    """
    try:
        divider = Divider(model, weights, model.all_tied_weights_keys or {})
    except NothingToStreamError:
        return None
    found = divider.head_in_rows(touched or divider.unknown())
    if found is None or found[2].group is not None:
        return None
    _, module, weight = found
    return HeadRows(whole_cut(weight, module), weight.nbytes // weight.shape[0])


def deal_with_rows(
    head: HeadRows | None,
    sizes: Sequence[int],
    ranks: Sequence[RankPower],
    is_exact: Callable[[HeadRows, Sequence[RowRange]], bool],
    *,
    blocks: int,
    link_seconds: float = 0.0,
) -> tuple[Deal, tuple[RowRange, ...]]:
    """Deal blocks out, and the rows of the head; as a whole where its rows have other bits.

    Args:
        head: None where it is never dealt out by rows, or there is none.
        sizes: bytes of each block, and of the head.
        ranks: those that take part.
        is_exact: tells of the rows of each rank whether all have the whole product's bits.
        blocks: how many of the parts are blocks.
        link_seconds: as for `deal`.

    Returns:
        The deal, and the rows of each rank; () where the head is a part as the blocks are.
    """
    if head is None or len(ranks) == 1:
        return deal(sizes, ranks, blocks=blocks, link_seconds=link_seconds), ()
    for steps in head.steps(len(ranks)):
        nbytes = [(stop - start) * head.row_bytes for start, stop in steps]
        made = deal(sizes[:blocks], ranks, link_seconds=link_seconds, steps=nbytes)
        ends = [steps[count - 1].stop for count in accumulate(made.steps)]
        rows = tuple(RowRange(start, stop) for start, stop in zip((0, *ends), ends, strict=False))
        if is_exact(head, rows):
            return made, rows
    return deal(sizes, ranks, blocks=blocks, link_seconds=link_seconds), ()
