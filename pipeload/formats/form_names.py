"""Names of the forms that `pipeload quantize` makes, as they are typed and advised."""

from __future__ import annotations

from typing import Final

INT8: Final = "int8"
INT4: Final = "int4"
NF4: Final = "nf4"
FP4: Final = "fp4"
FORMS: Final = (INT8, INT4, NF4, FP4)
CONVERTED: Final = (
    *("gptq", "awq", "auto-round", "compressed-tensors", "mlx", "metal", "hqq", "torchao", "aqlm"),
)
"""Methods of others that are read as they are; integers that fit our kernels by `convert`, too."""
GGUF: Final = "gguf"
"""llama.cpp's files: `convert` takes some of their integers over, and rounds the others."""
