"""Which quantised checkpoints are streamed, by the `quant_method` in their config.json; why not.

A new release of the library may know more methods than stand here: those are refused, too, as
nobody has compared them with a plain load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipeload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

FROM_FLOATS: Final = (
    "Use the float checkpoint (bf16, fp16 or fp32) that it was made of, or a smaller copy of that: "
    "`pipeload quantize SRC DST --method int4` (or int8)."
)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A method that is streamed, to the last bit as a plain load on the CPU."""

    how: str
    """What becomes of what is read."""
    config: str | None = None
    """The library's configuration whose `dequantize` makes float weights of the stored ones, where
    it may also keep them packed for a kernel: that is not streamed."""
    packed_on_cpu: bool = False
    """Whether the library computes with packed ones on the CPU as well, to other last bits."""
    unpacking: int = 0
    """Memory that the library takes to unpack a weight, in multiples of the weight; measured."""
    by_rows: bool = False
    """Whether rows of a weight can be unpacked by themselves, from the same rows of what is stored.
    """
    only: tuple[str, str] | None = None
    """A setting of config.json and the one value with which it is streamed."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A method that is not."""

    why: str
    instead: str = FROM_FLOATS


def _needs_gpu(package: str) -> Refused:
    return Refused(f"transformers runs it on a GPU alone, with the package {package}")


def _repacks(package: str) -> Refused:
    return Refused(f"the package {package} packs its weights anew once all of them are loaded")


def _own_tensors(package: str) -> Refused:
    return Refused(f"the package {package} keeps its weights in tensors of a kind of its own")


def _own_modules(package: str) -> Refused:
    return Refused(f"the package {package} computes it in modules of its own, untried so far")


_AS_STORED: Final = "read as it is stored; same kernels as plain"
_AS_FLOATS: Final = "unpacked to floats by transformers' own operation each time it is read"

FORMATS: Final[Mapping[str, Streamed | Refused]] = {
    "bitsandbytes": Streamed(_AS_STORED),
    "pipeload": Streamed(_AS_STORED),
    "fp8": Streamed(_AS_FLOATS, "FineGrainedFP8Config", unpacking=6, by_rows=True),
    "mxfp8": Streamed(_AS_FLOATS, "FineGrainedFP8Config", unpacking=6, by_rows=True),
    "mxfp4": Streamed(_AS_FLOATS, "Mxfp4Config", unpacking=5, by_rows=True),
    "metal": Streamed(_AS_FLOATS, "MetalConfig", unpacking=9, by_rows=True),
    "compressed-tensors": Streamed(
        _AS_FLOATS, "CompressedTensorsConfig", packed_on_cpu=True, unpacking=6
    ),
    "bitnet": Streamed(_AS_FLOATS, unpacking=3, only=("linear_class", "autobitlinear")),
    "aqlm": _own_modules("aqlm"),
    "auto-round": _repacks("auto-round"),
    "awq": _repacks("gptqmodel"),
    "eetq": _needs_gpu("kernels"),
    "fbgemm_fp8": _needs_gpu("fbgemm-gpu"),
    "fouroversix": _own_modules("fouroversix"),
    "fp_quant": _needs_gpu("fp_quant"),
    "gemma": Refused("its Linears hold packed integers, for which there is no streaming yet"),
    "gguf": Refused("a .gguf file is unpacked in memory as a whole"),
    "gptq": _repacks("gptqmodel"),
    "higgs": _needs_gpu("flute-kernel"),
    "hqq": Refused("transformers does not load what the package hqq has saved"),
    "nvfp4": Refused("transformers does not load what is quantised so already"),
    "quanto": _own_tensors("optimum-quanto"),
    "quark": _own_modules("amd-quark"),
    "sinq": _own_modules("sinq"),
    "spqr": _needs_gpu("spqr_quant"),
    "torchao": _own_tensors("torchao"),
    "vptq": _needs_gpu("vptq"),
}
"""By `quant_method`."""


def method_of(config: Any) -> str:
    """The method that a `quantization_config` names: of a checkpoint (a table), or an object.

    Early checkpoints of bitsandbytes do not name it.
    """
    if _setting(config, "load_in_8bit") or _setting(config, "load_in_4bit"):
        return "bitsandbytes"
    method = _setting(config, "quant_method")
    return str(getattr(method, "value", method))


def check_method(config: Any) -> str:
    """Refuse a checkpoint that is not streamed, by its `quantization_config`. Returns the method.

    Raises:
        UnsupportedModelError: says why, and what to use instead.
    """
    method = method_of(config)
    found = FORMATS.get(method, Refused("this version has never been tried with it"))
    if isinstance(found, Refused):
        raise _refusal(method, found.why, found.instead)
    if found.only is not None:
        name, wanted = found.only
        value = _setting(config, name)
        if value != wanted:
            why = f"its {name} is {value!r}, and only {wanted!r} is streamed"
            raise _refusal(method, why, FROM_FLOATS)
    return method


def check_unpacked(method: str, config: Any) -> None:
    """Refuse weights that are kept packed where only unpacked ones are streamed.

    Args:
        method: as in config.json.
        config: the library's configuration, with what it has decided for this machine.

    Raises:
        UnsupportedModelError: names the argument that has them unpacked.
    """
    found = FORMATS.get(method)
    if not isinstance(found, Streamed) or found.config is None:
        return
    if not getattr(config, "dequantize", False):
        raise _refusal(
            method,
            "transformers would keep its weights packed",
            f"Pass quantization_config=transformers.{found.config}(dequantize=True): they are "
            "unpacked as they are read, then.",
        )


def is_unpacked(method: str) -> bool:
    """Whether its weights are streamed as floats, though the library may keep them packed."""
    found = FORMATS.get(method)
    return isinstance(found, Streamed) and found.config is not None


def packed_for_accelerator(method: str) -> bool:
    """Whether it is for an accelerator alone that the library keeps its weights packed."""
    found = FORMATS.get(method)
    return isinstance(found, Streamed) and found.config is not None and not found.packed_on_cpu


def not_loadable(method: str, error: Exception) -> UnsupportedModelError:
    """The error for a method that is streamed, but that the library does not load here."""
    why = f"transformers says: {str(error).strip() or type(error).__name__}"
    instead = f"Give it what it asks for. {FROM_FLOATS.replace('Use', 'Or use')}"
    return _refusal(method, why.rstrip("."), instead, "here")


def _setting(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def _refusal(method: str, why: str, instead: str, where: str = "") -> UnsupportedModelError:
    place = f" {where}" if where else ""
    return UnsupportedModelError(
        f"checkpoints quantised by {method!r} cannot be streamed{place}: {why}. {instead}"
    )
