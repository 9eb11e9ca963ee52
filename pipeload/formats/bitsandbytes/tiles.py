"""4-bit weights of bitsandbytes in the order that its kernels read on some machines.

[Note: machines that repack] With AVX512-BF16, bitsandbytes puts a weight into another order before
it first computes with it, and changes its statistics with it. Both then belong together: fresh
bytes under old statistics would be garbage. So there weights are repacked while they are read, each
time, and statistics once.

The weight goes into tiles of 32 rows. The file keeps the plain order, two values of one row in a
byte. In a tile, a byte holds the same column of rows r (low half) and r + 16 (high half), and the
columns come one after the other. Its own conversion goes over 32-bit integers: 104 ms for 4096 x
4096 with two threads, against 5 ms here with one. Seen in bitsandbytes 0.50.2; `check_repacking`
compares both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from pipeload.errors import UnsupportedModelError
from pipeload.formats.repack import Repack

if TYPE_CHECKING:
    from collections.abc import Mapping

TILE_ROWS = 32
_HALF = TILE_ROWS // 2


@dataclass(frozen=True, slots=True)
class Tiled(Repack):
    """From the plain order to tiles."""

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` with the tiles of `stored`."""
        repack(stored, out)


TILED: Final = Tiled()


def are_repacked(module: Any, state: Mapping[str, Any], where: torch.device) -> bool:
    """Whether the library would repack a weight here: see [Note: machines that repack].

    Args:
        module: its Linear4bit.
        state: its quantisation state, as it is stored.
        where: the device that computes with it.
    """
    rows, columns = module.out_features, module.in_features
    return (
        where.type == "cpu"
        and bool(module.support_avx512bf16_for_cpu)
        and rows % TILE_ROWS == 0
        and columns % 2 == 0
        and columns % state["blocksize"] == 0
    )


def repack(stored: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the tiles of `stored`; both uint8 of [rows, columns / 2], rows % 32 == 0."""
    rows, width = stored.shape
    tiles = stored.view(rows // TILE_ROWS, 2, _HALF, width)
    low, high = tiles[:, 0], tiles[:, 1]
    # The even column is the high half of a stored byte.
    even = high.bitwise_and(0xF0).bitwise_or_(low.bitwise_right_shift(4))
    odd = high.bitwise_left_shift(4).bitwise_or_(low.bitwise_and(0xF))
    made = out.view(rows // TILE_ROWS, width, _HALF, 2)
    made[..., 0].copy_(even.transpose(1, 2))
    made[..., 1].copy_(odd.transpose(1, 2))


def repacked_absmax(state: Any) -> torch.Tensor:
    """The statistics as they go with a repacked weight. `state` is only read."""
    from bitsandbytes.functional import dequantize_blockwise

    absmax: torch.Tensor = state.absmax
    if state.nested:
        absmax = (dequantize_blockwise(absmax, state.state2) + state.offset).float()
    rows, columns = state.shape
    return absmax.reshape(rows, columns // state.blocksize).T.to(torch.bfloat16).contiguous()


def mark_repacked(state: Any, stored: torch.Tensor) -> None:
    """Change a quantisation state as the library does when it repacks its weight."""
    if stored.dtype != torch.uint8:
        state.original_storage_type = stored.dtype
    state.original_dtype, state.original_nested = state.dtype, state.nested
    state.original_qshape = torch.Size((stored.numel() * stored.element_size(), 1))
    if state.nested:
        state.nested = False
        del state.state2
    state.dtype = torch.bfloat16
    state.packing_format_for_cpu = True


@functools.cache
def check_repacking(nested: bool, blocksize: int) -> None:
    """Compare with the library's own conversion, on a small weight.

    Raises:
        UnsupportedModelError: this version of the library does it in another way.
    """
    from bitsandbytes import functional

    generator = torch.Generator().manual_seed(5)
    plain = torch.randn((2 * TILE_ROWS, 2 * blocksize), generator=generator)
    quantise = functools.partial(
        functional.quantize_4bit, blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
    )
    packed, ours = quantise(plain)
    _, theirs = quantise(plain)
    convert = functional._convert_weight_packed_for_cpu  # noqa: SLF001 - what is to be matched
    wanted, theirs = convert(packed.clone(), theirs)
    made = torch.empty((2 * TILE_ROWS, blocksize), dtype=torch.uint8)
    repack(packed.view(2 * TILE_ROWS, blocksize), made)
    ours.absmax = repacked_absmax(ours)
    mark_repacked(ours, packed)
    known = vars(ours).keys() == vars(theirs).keys() and all(
        torch.equal(one, vars(theirs)[name])
        if isinstance(one, torch.Tensor)
        else one == vars(theirs)[name]
        for name, one in vars(ours).items()
    )
    if not known or not torch.equal(made, wanted):
        raise UnsupportedModelError(
            "this version of bitsandbytes keeps 4-bit weights on this processor in an order that "
            "pipeload does not know. Install bitsandbytes 0.50."
        )
