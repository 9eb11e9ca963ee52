"""Floats of 4 bits, with a power of two for each 32 of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeload.formats.format import Faster, Unpacking
from pipeload.formats.unpacked import Unpacked

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def _can(dtype: torch.dtype) -> bool:
    from pipeload.formats.mxfp4.unpack import can_unpack  # torch, which the registry needs not

    return can_unpack(dtype)


def _fill(stored: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
    from pipeload.formats.mxfp4.unpack import unpack

    return unpack(stored, out)


_UNPACKING: Final = Unpacking(5, by_rows=True, config="Mxfp4Config", faster=Faster(_can, _fill))
MXFP4: Final = Unpacked("mxfp4", _UNPACKING)
