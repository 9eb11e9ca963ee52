"""Integers with scales and biases for groups of a row, as Apple's MLX makes them."""

from __future__ import annotations

from typing import Final

from pipeload.formats.format import Unpacking
from pipeload.formats.unpacked import Unpacked

METAL: Final = Unpacked("metal", Unpacking(9, by_rows=True, config="MetalConfig"))
