"""Methods that the library knows and that are not streamed, with the reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


def _needs_gpu(package: str) -> str:
    return f"transformers runs it on a GPU alone, with the package {package}"


UNKNOWN: Final = "this version has never been tried with it"
REFUSED: Final[Mapping[str, str]] = {
    "eetq": _needs_gpu("kernels"),
    "fbgemm_fp8": _needs_gpu("fbgemm-gpu"),
    "fouroversix": "the package fouroversix computes it in modules of its own, untried so far",
    "fp_quant": _needs_gpu("fp_quant"),
    "higgs": _needs_gpu("flute-kernel"),
    "nvfp4": "transformers does not load what is quantised so already",
    "quanto": "transformers saves no such checkpoint: floats are quantised while they are loaded",
    "sinq": "what the package sinq has saved fails on a CPU, in a product of two dtypes",
    "spqr": _needs_gpu("spqr_quant"),
    "vptq": _needs_gpu("vptq"),
}
"""The reason by `quant_method`."""
