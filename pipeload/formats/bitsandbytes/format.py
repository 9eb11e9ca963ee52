"""The format of bitsandbytes: LLM.int8 and weights of 4 bits (NF4, FP4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeload.formats.form_names import FP4, INT8
from pipeload.formats.format import AS_STORED, Format, named, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.format import PackedWeight, Stored

METHOD: Final = "bitsandbytes"


class BitsAndBytes(Format):
    """A `Format`. Early checkpoints do not name their method, but how many bits they have."""

    method = METHOD
    how = AS_STORED
    on_devices = True
    package = METHOD

    def matches(self, config: Any) -> bool:
        """Tell whether a configuration names it, or says that it loads in 8 or 4 bits."""
        bits = setting(config, "load_in_8bit") or setting(config, "load_in_4bit")
        return bool(bits) or named(config) == METHOD

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights of the library's quantised Linears."""
        from pipeload.formats.bitsandbytes.packed_weight import BitsAndBytesWeight, is_packed

        read = stored.reader()
        return {
            (name := f"{path}.weight"): BitsAndBytesWeight(
                name, module, stored.parts(name), read, stored.where
            )
            for path, module in stored.model.named_modules()
            if is_packed(module)
        }

    def nearest_form(self, config: Any, /) -> str:
        """Name the same form of 4 bits; for 8 bits ours, which is as small."""
        if not setting(config, "load_in_4bit", otherwise=False):
            return INT8
        double = setting(config, "bnb_4bit_use_double_quant", otherwise=False)
        kind = setting(config, "bnb_4bit_quant_type", FP4)
        return f"{kind} --double-quant" if double else str(kind)


BITSANDBYTES: Final = BitsAndBytes()
