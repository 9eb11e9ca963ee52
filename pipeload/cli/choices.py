"""What an option may be, where it is one of a few words."""

from __future__ import annotations

import enum


class IoMode(str, enum.Enum):
    """How the checkpoint is read."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"
    UNCACHED = "uncached"


class Dtype(str, enum.Enum):
    """The dtype that weights have in memory."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Method(str, enum.Enum):
    """What weights become."""

    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    FP4 = "fp4"


class Head(str, enum.Enum):
    """What the output head becomes."""

    FLOAT = "float"
    INT8 = "int8"


class ZeroPoints(str, enum.Enum):
    """How scales and zeros of int4 groups are found."""

    SEARCH = "search"
    RTN = "rtn"
    HQQ = "hqq"
