"""Gemma's own quantised checkpoints: 2, 4 or 8 bits, and one scale a row.

Modules of the library hold the integers and make floats of them in each product, in torch's own
operations, on any device. They are streamed as they are stored; seen in 5.24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeload.formats.format import AS_STORED, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored


class Gemma(Format):
    """A `Format`. Quantised embeddings are parameters like any other."""

    method = "gemma"
    how = AS_STORED

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights of the library's quantised Linears."""
        from transformers.integrations.gemma_quant import QuantizedLinear

        from pipeload.formats.gemma.packed_weight import GemmaWeight

        return {
            f"{path}.weight": GemmaWeight(f"{path}.weight", module, stored)
            for path, module in stored.model.named_modules()
            if isinstance(module, QuantizedLinear)
        }


GEMMA: Final = Gemma()
