"""Makes floats of MXFP4 as the library does, in a tenth of the time.

[Note: a table of pairs] A byte holds two floats, so 256 pairs are all there is: one lookup for each
byte and one product for each 32 values take a tenth of the time of the library's operation, and the
values are its own, as products with powers of two are exact. That is tried once for a process, with
every byte and every factor; where it does not hold, or for a dtype in which it would not, the
library's operation is run.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

import torch
from transformers.integrations import mxfp4

if TYPE_CHECKING:
    from collections.abc import Mapping

_GROUP = 16  # bytes that share a factor
_BIAS = 127
_NO_NUMBER = 255  # the factor that stands for NaN
_DTYPES: Final = {torch.bfloat16: torch.int32, torch.float32: torch.int64}
"""In which products are exact, and an integer as large as a pair."""
_CHUNK_BYTES = 1 << 19


def can_unpack(dtype: torch.dtype) -> bool:
    """Whether floats of that dtype are made here as the library makes them."""
    return dtype in _DTYPES and _is_the_librarys()


def unpack(stored: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
    """Fill `out` with the floats of some experts; False, and nothing done, where it cannot.

    Args:
        stored: uint8 `[experts, rows, groups, 16]` and `[experts, rows, groups]`, by names that end
            with "blocks" and "scales".
        out: `[experts, 32 * groups, rows]`, of any strides.
    """
    blocks = next((t for name, t in stored.items() if name.endswith("blocks")), None)
    scales = next((t for name, t in stored.items() if name.endswith("scales")), None)
    if blocks is None or scales is None or not can_unpack(out.dtype):
        return False
    experts, rows, groups = scales.shape
    if blocks.shape != (experts, rows, groups, _GROUP) or int(scales.max()) == _NO_NUMBER:
        return False
    _fill(blocks, scales, out)
    return True


def _fill(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    pairs, factors = _tables(out.dtype)
    experts, rows, groups = scales.shape
    step = max(1, min(rows, _CHUNK_BYTES // (groups * _GROUP)))
    index = torch.empty(step * groups * _GROUP, dtype=torch.int32)
    values = torch.empty((step, groups, 2 * _GROUP), dtype=out.dtype)
    for expert in range(experts):
        for start in range(0, rows, step):
            part = slice(start, min(rows, start + step))
            count = part.stop - start
            some = index[: count * groups * _GROUP]
            some.copy_(blocks[expert, part].reshape(-1))
            made = values[:count]
            torch.index_select(pairs, 0, some, out=made.view(pairs.dtype).view(-1))
            made.mul_(factors[scales[expert, part].to(torch.int32)][..., None])
            out[expert, :, part].copy_(made.view(count, -1).t())


@functools.cache
def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of floats, as integers by the byte, and all factors."""
    with torch.inference_mode(False):
        floats = torch.tensor(mxfp4.FP4_VALUES, dtype=dtype)
        numbers = torch.arange(256)
        pairs = torch.stack([floats[numbers % 16], floats[numbers // 16]], dim=1)
        factors = torch.ldexp(torch.ones(256), numbers - _BIAS).to(dtype)
        return pairs.view(_DTYPES[dtype]).view(-1), factors


@functools.cache
def _is_the_librarys() -> bool:
    """Whether it makes the library's own values of every byte with every factor."""
    with torch.inference_mode(False), torch.no_grad():
        scales = torch.arange(_NO_NUMBER, dtype=torch.uint8)[None, :, None].expand(1, -1, _GROUP)
        blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, _GROUP, _GROUP)
        blocks = blocks.expand(1, _NO_NUMBER, -1, -1)
        for dtype in _DTYPES:
            wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
            found = torch.empty_like(wanted)
            _fill(blocks, scales, found)
            if not torch.equal(found, wanted):
                return False
    return True
