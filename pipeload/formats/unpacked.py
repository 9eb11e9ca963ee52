"""Formats of which the library makes floats as it loads: streamed as those, by its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.formats.format import AS_FLOATS, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored, Unpacking


class Unpacked(Format):
    """A `Format` without packed weights: what it takes to unpack one is all that differs."""

    how = AS_FLOATS

    def __init__(
        self, method: str, unpacking: Unpacking, only: tuple[str, str] | None = None
    ) -> None:
        """`only` is a setting and the one value with which it is streamed."""
        self.method, self.only, self.unpacking = method, only, unpacking

    def find(self, _stored: Stored) -> Mapping[str, PackedWeight]:
        """Find nothing: modules show floats."""
        return {}
