"""What the package compressed-tensors has written: integers or floats, packed in several ways."""

from __future__ import annotations

from typing import Final

from pipeload.formats.format import Unpacking
from pipeload.formats.unpacked import Unpacked

COMPRESSED_TENSORS: Final = Unpacked(
    "compressed-tensors", Unpacking(6, config="CompressedTensorsConfig", packed_on_cpu=True)
)
