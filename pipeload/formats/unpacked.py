"""Formats of which the library makes floats as it loads: streamed as those, by its operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.formats.format import AS_FLOATS, named
from pipeload.formats.forms import INT8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored, Unpacking


class Unpacked:
    """A `Format` without packed weights: what it takes to unpack one is all that differs."""

    how = AS_FLOATS
    on_devices = False
    package: str | None = None

    def __init__(
        self, method: str, unpacking: Unpacking, only: tuple[str, str] | None = None
    ) -> None:
        """`only` is a setting and the one value with which it is streamed."""
        self.method, self.only = method, only
        self.unpacking: Unpacking | None = unpacking

    def matches(self, config: Any) -> bool:
        """Tell whether a configuration names it."""
        return named(config) == self.method

    def find(self, _stored: Stored) -> Mapping[str, PackedWeight]:
        """Find nothing: modules show floats."""
        return {}

    def nearest_form(self, _config: Any) -> str:
        """Name the one that is closest to the original."""
        return INT8
