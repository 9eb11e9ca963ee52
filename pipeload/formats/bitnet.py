"""BitNet's weights of three values, four in a byte."""

from __future__ import annotations

from typing import Final

from pipeload.formats.format import Unpacking
from pipeload.formats.unpacked import Unpacked

BITNET: Final = Unpacked("bitnet", Unpacking(3), only=("linear_class", "autobitlinear"))
