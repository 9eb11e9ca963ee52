"""AutoRound's checkpoints: the integers lie as GPTQ's or AWQ's do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.formats.codes import awq, gptq
from pipeload.formats.codes.coded_weight import not_taken_over, stems

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.codes.coded_weight import CodedWeight


class AutoRound:
    """A `CodesFormat`."""

    method = "auto-round"
    title = "AutoRound"

    def find(
        self, config: Mapping[str, Any], stored: Mapping[str, TensorEntry]
    ) -> list[CodedWeight]:
        """Find the weights of quantised Linears. Raises what `CodesFormat.find` does."""
        packing = str(config.get("packing_format", "auto_round:auto_gptq"))
        found = stems(stored, "qweight")
        if "awq" in packing:
            gptq.bits_of(self.method, config, awq.BITS)
            return [awq.coded(stem, stored) for stem in found]
        bits = gptq.bits_of(self.method, config, gptq.BITS)
        if not packing.startswith("auto_round"):
            why = f"its packing_format {packing!r} is unknown"
            raise not_taken_over(self.method, why)
        # Names of kernels may follow, as in "auto_round:auto_gptq:exllamav2".
        added = 1 if "auto_gptq" in packing else 0
        how = gptq.packing(config, "extra_config", bits, added, gptq.BITS)
        return [gptq.coded(stem, stored, how) for stem in found]
