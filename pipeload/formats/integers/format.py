"""The format of pipeload's own int8 and int4 checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeload.formats.format import AS_STORED, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored

METHOD: Final = "pipeload"


class Integers(Format):
    """A `Format`: weights of our own Linears, for torch's own kernels."""

    method = METHOD
    how = AS_STORED

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights of our own quantised Linears."""
        from pipeload.formats.integers.linear import PackedLinear
        from pipeload.formats.integers.packed_weight import IntegerWeight

        return {
            f"{path}.weight": IntegerWeight(path, module, stored)
            for path, module in stored.model.named_modules()
            if isinstance(module, PackedLinear)
        }


INTEGERS: Final = Integers()
