"""Which quantised checkpoints are streamed, by the `quantization_config` of their config.json.

A new release of the library may know more methods than stand here: those are refused, too, as
nobody has compared them with a plain load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeload.formats.bitnet import BITNET
from pipeload.formats.bitsandbytes.format import BITSANDBYTES
from pipeload.formats.compressed_tensors import COMPRESSED_TENSORS
from pipeload.formats.form_names import CONVERTED, DECODED, INT8
from pipeload.formats.format import named, refusal, setting
from pipeload.formats.fp8 import FP8, MXFP8
from pipeload.formats.gemma.format import GEMMA
from pipeload.formats.gguf.format import GGUF
from pipeload.formats.integers.format import INTEGERS
from pipeload.formats.metal import METAL
from pipeload.formats.mxfp4.format import MXFP4
from pipeload.formats.refused import REFUSED, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pipeload.errors import UnsupportedModelError
    from pipeload.formats.format import Format

FROM_FLOATS: Final = (
    "Use the float checkpoint (bf16, fp16 or fp32) that it was made of, or a smaller copy of that: "
    "`pipeload quantize SRC DST --method int4` (or int8)."
)
FORMATS: Final[list[Format]] = [
    BITSANDBYTES,
    INTEGERS,
    FP8,
    MXFP8,
    MXFP4,
    METAL,
    COMPRESSED_TENSORS,
    BITNET,
    GEMMA,
    GGUF,
]
"""Those that are streamed. A format is added by its line here."""


def format_of(config: Any) -> Format | None:
    """The format that a `quantization_config` is of; None if it is not streamed."""
    return next((one for one in FORMATS if one.matches(config)), None)


def method_of(config: Any) -> str:
    """The method that a `quantization_config` is of: of a checkpoint (a table), or an object."""
    found = format_of(config)
    return named(config) if found is None else found.method


def is_known(config: Any) -> bool:
    """Whether anything is known of the method that a `quantization_config` is of."""
    return format_of(config) is not None or named(config) in (*REFUSED, *DECODED)


def check_config(config: Any) -> Format:
    """Refuse a checkpoint that is not streamed, by its `quantization_config`; return its format.

    Raises:
        UnsupportedModelError: says why, and what to use instead.
    """
    found = format_of(config)
    if found is None:
        method = named(config)
        raise refusal(method, REFUSED.get(method, UNKNOWN), FROM_FLOATS)
    if found.only is not None:
        name, wanted = found.only
        value = setting(config, name)
        if value != wanted:
            why = f"its {name} is {value!r}, and only {wanted!r} is streamed"
            raise refusal(found.method, why, FROM_FLOATS)
    return found


def check_unpacked(config: Any) -> None:
    """Refuse weights that are kept packed where only unpacked ones are streamed.

    Args:
        config: the library's configuration, with what it has decided for this machine.

    Raises:
        UnsupportedModelError: names the argument that has them unpacked.
    """
    found = format_of(config)
    if found is not None and is_unpacked(found) and not setting(config, "dequantize"):
        assert found.unpacking is not None  # noqa: S101 - it is unpacked
        also = " Or `pipeload convert` takes integers over, which stay packed." * (
            found.method in CONVERTED
        )
        raise refusal(
            found.method,
            "transformers would keep its weights packed",
            f"Pass quantization_config=transformers.{found.unpacking.config}(dequantize=True): "
            f"they are unpacked as they are read, then.{also}",
        )


def is_unpacked(found: Format | None) -> bool:
    """Whether weights are streamed as floats, though the library may keep them packed."""
    return found is not None and found.unpacking is not None and found.unpacking.config is not None


def packed_for_accelerator(found: Format) -> bool:
    """Whether it is for an accelerator alone that the library keeps weights packed."""
    unpacking = found.unpacking
    return unpacking is not None and unpacking.config is not None and not unpacking.packed_on_cpu


def not_loadable(found: Format, error: Exception) -> UnsupportedModelError:
    """The error for a method that is streamed, but that the library does not load here."""
    why = f"transformers says: {str(error).strip() or type(error).__name__}"
    instead = f"Give it what it asks for. {FROM_FLOATS.replace('Use', 'Or use')}"
    return refusal(found.method, why.rstrip("."), instead, "here")


def nearest_form(config: Any) -> str:
    """Name what `pipeload quantize` makes that is nearest to what a configuration would make."""
    found = format_of(config)
    return INT8 if found is None else found.nearest_form(config)


def packages() -> Iterable[str]:
    """Names of the packages that formats are computed by."""
    return [one.package for one in FORMATS if one.package is not None]
