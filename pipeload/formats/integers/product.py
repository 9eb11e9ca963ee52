"""Products with int4 weights whose rows lie one after the other, of inputs rounded to int16.

Compiled (`product.c`) where there is a `cc`, for processors with AVX2. Inputs of a group share a
scale, so integers are multiplied by integers: a weight takes about as long as reading it. torch's
kernel, whose inputs are exact, takes two and a half times as long where AVX2 is all.

A row of the result has the same bits in whichever company it is computed.

[Note: how exact rounded inputs are] int16 leaves 2e-5 of the products' size as an error, a
hundredth of what bf16 rounds them by. int8 by 32 would leave 5e-3, and cost SmolLM2 0.7 % of
perplexity, for a tenth of the time in decoding.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pipeload.formats.compiler import compile_library
from pipeload.formats.integers.unpack import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

_SOURCE = Path(__file__).with_name("product.c")
AT_ONCE: Final = 512
"""Rows of input that are rounded at once: a prompt takes no more memory than these."""
_PAIR = 128  # columns that are taken at once; the last ones may be fewer
_WITHOUT = (
    "int4 weights are put into the order of torch's kernel as they are read: there is no C "
    "compiler that works, or the processor lacks AVX2"
)


def multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    scales_and_zeros: torch.Tensor,
    *,
    vnni: bool = True,
) -> torch.Tensor:
    """[n, out] of `rows`, [n, in], and uint8 of [out, in / 2]; there must be a kernel.

    Args:
        rows: contiguous, in bf16, fp16 or fp32; what is returned is in the same.
        weight: contiguous; four rows at least.
        scales_and_zeros: [groups, out, 2], contiguous, in any of those dtypes.
        vnni: whether to use what AVX512-VNNI adds, where it is; bits are the same.
    """
    library = compiled()
    assert library is not None  # noqa: S101 - whoever puts weights into this order has asked
    (count, columns), (groups, out, _) = rows.shape, scales_and_zeros.shape
    memory = torch.empty(temporary_bytes(count, columns), dtype=torch.uint8)
    made = torch.empty((count, out), dtype=rows.dtype)
    torch.get_num_threads()  # a new thread of Python has no number yet, and would take all
    for start in range(0, count, AT_ONCE):
        some = rows[start : start + AT_ONCE]
        library.product(
            *(some.data_ptr(), weight.data_ptr(), scales_and_zeros.data_ptr()),
            *(
                memory.data_ptr(),
                made[start:].data_ptr(),
                len(some),
                out,
                columns,
                columns // groups,
            ),
            *(KINDS[scales_and_zeros.dtype], KINDS[rows.dtype], vnni),
        )
    return made


class Sent(NamedTuple):
    """One matrix of each expert, and which rows are multiplied by whose."""

    packed: torch.Tensor
    """uint8 of [experts, bytes of one]: what lies in one is contiguous."""
    codes: int
    """Where weights begin in an expert: [out, in / 2], row after row."""
    told: int
    """Where scales and zeros begin: [groups, out, 2]."""
    told_in: torch.dtype
    groups: int
    pairs: Sequence[tuple[int, int, int]]
    """Rows of input, experts, and rows of the result; those of one expert side by side."""


def multiply_sent(
    rows: torch.Tensor, sent: Sent, into: torch.Tensor, *, vnni: bool = True
) -> torch.Tensor:
    """Multiply each row by those experts that it was sent to, all in one call.

    Bits are those of `multiply`.

    Args:
        rows: [n, in], contiguous, in bf16, fp16 or fp32.
        sent: what is multiplied by what.
        into: [rows of the result, out], contiguous, in the dtype of `rows`; what no pair names
            stays as it is. It is returned.
        vnni: as `multiply` has it.
    """
    library = compiled()
    assert library is not None  # noqa: S101 - as above
    (count, columns), out = rows.shape, into.shape[1]
    assert count <= AT_ONCE  # noqa: S101 - callers have few, and memory is for no more
    memory = torch.empty(temporary_bytes(count, columns), dtype=torch.uint8)
    numbers = (ctypes.c_int64 * (3 * len(sent.pairs)))(*itertools.chain.from_iterable(sent.pairs))
    start = sent.packed.data_ptr()
    torch.get_num_threads()  # as above
    library.product_of_experts(
        *(rows.data_ptr(), start + sent.codes, start + sent.told, ctypes.addressof(numbers)),
        *(memory.data_ptr(), into.data_ptr(), sent.packed.stride(0), len(sent.pairs)),
        *(count, out, columns, columns // sent.groups, KINDS[sent.told_in], KINDS[rows.dtype]),
        vnni,
    )
    return into


def temporary_bytes(rows: int, columns: int) -> int:
    """The most that so many rows of input are held in, rounded."""
    pairs = -(-columns // _PAIR)
    return (
        min(rows, AT_ONCE) * pairs * (2 * _PAIR + 4 * 8)
    )  # scales and sums of four groups a pair at most


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """Compile the kernel; None without a compiler, on other processors, or if that goes wrong."""
    library = compile_library(_SOURCE, without=_WITHOUT)
    if library is not None:
        addresses, sizes, kinds = [ctypes.c_void_p] * 5, [ctypes.c_int64] * 4, [ctypes.c_int] * 3
        library.product.argtypes, library.product.restype = [*addresses, *sizes, *kinds], None
        of_experts = library.product_of_experts
        of_experts.argtypes = [ctypes.c_void_p, *addresses, *[ctypes.c_int64] * 6, *kinds]
        of_experts.restype = None
    return library
