"""Which rows go to which experts, and how many experts are computed with in one call.

[Note: rows by themselves] A row's products have the same bits in whichever company they are made,
so those of all experts may be made in one call. What is between them is torch's, which computes
whole vectors of numbers otherwise than what is left at an end. An activation function that takes
each number by itself, wherever it lies, therefore gives a row the same bits in any company if rows
are whole vectors, and few enough that torch does not share them among threads, which may cut
through a row. Any other is given the rows of one expert at a time, as if there were no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pipeload.formats.integers import product, tile_product
from pipeload.formats.integers.wide_product import most_by_kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

MOST_TOGETHER = 32
"""Pairs of a row and an expert in one call: what it takes beside is small."""
_SHARED_AMONG_THREADS = 32768
"""Numbers that torch computes in one thread if they are fewer."""
_WHOLE_VECTORS = 64
"""Numbers that torch computes at once at most: two registers of 16 bits each."""
_BY_NUMBER = (nn.SiLU, nn.ReLU, nn.Sigmoid, nn.Tanh)
_BY_NUMBER_OF_LIBRARY = {
    "AccurateGELUActivation",
    "FastGELUActivation",
    "GELUTanh",
    "NewGELUActivation",
    "QuickGELUActivation",
    "ReLUSquaredActivation",
    "SiLUActivation",
}
"""Each was tried. Exact GELU is not among them: contiguous numbers, as the gate of a single row is,
are oneDNN's to compute, others torch's, and bits differ.
"""


def rows_of_experts(ids: torch.Tensor, experts: int) -> dict[int, list[int]]:
    """Of each expert that is chosen, in their order: which of all choices, ascending.

    `ids`: [rows, k], integers; what names no expert is left out.
    """
    found: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.reshape(-1).long().tolist()):
        found.setdefault(expert, []).append(pair)
    return {expert: found[expert] for expert in sorted(found) if 0 <= expert < experts}


def most_together(wide: int, dtype: torch.dtype) -> int:
    """How many rows that were sent to experts one call multiplies; 0 where no kernel does.

    `wide`: rows of the first matrix.
    """
    by_kernel = most_by_kernel(4, dtype, rounded=True)
    return min(MOST_TOGETHER, by_kernel, (_SHARED_AMONG_THREADS - 1) // wide)


def most_of_one(columns: int, dtype: torch.dtype) -> int:
    """How many of them may be one expert's: more are a matter of that expert alone."""
    tiled = tile_product.takes(dtype, columns)
    return most_by_kernel(4, dtype, rounded=True, tiled=tiled)


def portions(
    experts: Sequence[int], rows: Mapping[int, Sequence[int]], most: int, of_one: int
) -> Iterator[list[int]]:
    """Neighbours that have at most `most` rows together; who has more than `of_one` is alone."""
    portion: list[int] = []
    count = 0
    for expert in experts:
        own = len(rows[expert])
        takes = own if own <= of_one else most + 1
        if portion and count + takes > most:
            yield portion
            portion, count = [], 0
        portion.append(expert)
        count += takes
    if portion:
        yield portion


def activates_rows_alone(library: nn.Module, wide: int, inner: int) -> bool:
    """Whether a row's bits behind the activation depend on no other: [Note: rows by themselves].

    It makes `inner` numbers of `wide`.
    """
    whole = not inner % _WHOLE_VECTORS and not wide % _WHOLE_VECTORS
    gate = getattr(type(library), "_apply_gate", None)  # those that have none get the default
    default = getattr(gate, "__module__", "") == "transformers.integrations.moe"
    return whole and default and _by_number(getattr(library, "act_fn", None))


def _by_number(function: object) -> bool:
    kind = type(function)
    if kind.__module__ == "transformers.activations":
        return kind.__name__ in _BY_NUMBER_OF_LIBRARY
    tanh = isinstance(function, nn.GELU) and function.approximate == "tanh"
    return kind in _BY_NUMBER or tanh


def temporary_bytes(rows: int, hidden: int, inner: int) -> int:
    """The most that the inputs of one call are held in, rounded; `rows` are those of the model."""
    given = min(rows, MOST_TOGETHER)
    return max(
        product.temporary_bytes(given, hidden), product.temporary_bytes(MOST_TOGETHER, inner)
    )
