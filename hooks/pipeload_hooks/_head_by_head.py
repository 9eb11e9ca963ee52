"""Attention that is written out in torch functions, with fewer copies of its scores at once.

[Note: scores head by head] Written out, attention has all scores in memory several times: scaled,
masked, joined with sinks, less their maximum, in fp32, as probabilities. Each of these steps gives
the same bits for one head as for all, as it goes element by element or row by row. So they are
done here for one head after the other, and the result takes the place of its scores. The two
products around them stay those of all heads at once: how a kernel sums may depend on how many
heads there are. Where torch itself multiplies one head after the other (half precision, where
oneDNN has no kernels for it), so can this, and no more than one head has scores at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

_ALIGN = 64
"""Addresses modulo this are those that the whole would have: kernels may look at them."""


def attend_head_by_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    between: Callable[[Tensor, int, int], Tensor],
    *,
    sinks: bool,
    apart: bool,
) -> tuple[Tensor, Tensor | None]:
    """Multiply, have `between` make probabilities of scores, and multiply again.

    Args:
        query: `[batch, heads, rows, width]`.
        key: `[batch, heads, columns, width]`.
        value: `[batch, heads, columns, width]`.
        between: given the scores `[rows, columns]` of one head, the number of its sequence and its
            own; makes as many probabilities of the same dtype, or a column more with `sinks`.
        sinks: whether there is a column more, which is not multiplied.
        apart: whether one head's products are computed at a time: where torch does so itself.

    Returns:
        The output `[batch, rows, heads, width]`, contiguous, and all probabilities; these are None
        where they were never there together.
    """
    batch, heads, rows, _ = query.shape
    columns = key.shape[-2]
    every = range(1 if query.is_meta else batch * heads)  # without values, one takes what all do
    # As torch.matmul makes three dimensions of four.
    left = query.reshape(batch * heads, rows, -1)
    right = key.transpose(2, 3).reshape(batch * heads, -1, columns)
    if apart:
        values = value.reshape(batch * heads, columns, -1)
        joined = query.new_empty(batch * heads, rows, values.shape[-1])
        size, wide = rows * columns, columns + sinks
        room = query.new_empty(rows * (columns + wide) + 2 * _ALIGN)
        for index in every:
            scores = _placed(room, 0, index * size, rows, columns)
            torch.mm(left[index], right[index], out=scores)
            probabilities = _placed(room, size + _ALIGN, index * rows * wide, rows, wide)
            probabilities.copy_(between(scores, index // heads, index % heads))
            torch.mm(probabilities[:, :columns], values[index], out=joined[index])
            del scores, probabilities
        del left, right, room
        output = joined.view(batch, heads, rows, -1)
        return output.transpose(1, 2).contiguous(), None
    wide = columns + sinks
    room = query.new_empty(batch * heads * rows * wide)
    scores = room[: batch * heads * rows * columns].view(batch * heads, rows, columns)
    torch.bmm(left, right, out=scores)
    del left, right
    places = room.view(batch * heads, rows, wide)
    # The last one first: where a head's rows grow by a column, they reach into those behind them.
    for index in reversed(every):
        places[index].copy_(between(scores[index], index // heads, index % heads))
    made = room.view(batch, heads, rows, wide)[..., :columns]
    return torch.matmul(made, value).transpose(1, 2).contiguous(), made


def _placed(room: Tensor, start: int, whole: int, rows: int, columns: int) -> Tensor:
    """A matrix at `start` or behind, where the address is that of element `whole` of a tensor."""
    align = _ALIGN // room.element_size()
    address = 0 if room.is_meta else room.data_ptr() // room.element_size()
    begin = -(address + start) % align + whole % align
    return room[start + begin :][: rows * columns].view(rows, columns)
