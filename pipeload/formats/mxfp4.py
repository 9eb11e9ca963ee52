"""Floats of 4 bits, with a power of two for each 32 of them."""

from __future__ import annotations

from typing import Final

from pipeload.formats.format import Unpacking
from pipeload.formats.unpacked import Unpacked

MXFP4: Final = Unpacked("mxfp4", Unpacking(5, by_rows=True, config="Mxfp4Config"))
