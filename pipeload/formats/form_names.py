"""Names of the forms that `pipeload quantize` makes, as they are typed and advised."""

from __future__ import annotations

from typing import Final

INT8: Final = "int8"
INT4: Final = "int4"
NF4: Final = "nf4"
FP4: Final = "fp4"
FORMS: Final = (INT8, INT4, NF4, FP4)
CONVERTED: Final = (
    *("gptq", "awq", "auto-round", "compressed-tensors", "mlx", "metal", "hqq", "torchao", "quark"),
)
"""Methods of others whose integers are taken over: as they are read, and by `convert`."""
DECODED: Final = (*CONVERTED, "aqlm")
"""Those, and the ones whose codes no kernel takes: they become floats as they are read."""
GGUF: Final = "gguf"
"""llama.cpp's files: `convert` takes some of their integers over, and rounds the others."""
