"""The format of pipeload's own int8 and int4 checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeload.formats.format import AS_STORED, named
from pipeload.formats.forms import INT8

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored, Unpacking

METHOD: Final = "pipeload"


class Integers:
    """A `Format`: weights of our own Linears, for torch's own kernels."""

    method = METHOD
    how = AS_STORED
    only: tuple[str, str] | None = None
    unpacking: Unpacking | None = None
    on_devices = False
    package: str | None = None

    def matches(self, config: Any) -> bool:
        """Tell whether a configuration names it."""
        return named(config) == METHOD

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights of our own quantised Linears."""
        from pipeload.formats.integers.linear import PackedLinear
        from pipeload.formats.integers.packed_weight import IntegerWeight

        return {
            f"{path}.weight": IntegerWeight(path, module, stored)
            for path, module in stored.model.named_modules()
            if isinstance(module, PackedLinear)
        }

    def nearest_form(self, _config: Any) -> str:
        """Name the one that is closest to the original."""
        return INT8


INTEGERS: Final = Integers()
