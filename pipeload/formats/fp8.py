"""Floats of 8 bits, with a scale for each block of a weight (fp8) or for 32 of them (mxfp8)."""

from __future__ import annotations

from typing import Final

from pipeload.formats.format import Unpacking
from pipeload.formats.unpacked import Unpacked

_UNPACKING: Final = Unpacking(6, by_rows=True, config="FineGrainedFP8Config")
FP8: Final = Unpacked("fp8", _UNPACKING)
MXFP8: Final = Unpacked("mxfp8", _UNPACKING)
