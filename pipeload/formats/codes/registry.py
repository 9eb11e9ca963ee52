"""Whose integers can be taken over as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeload.formats.codes.aqlm import Aqlm
from pipeload.formats.codes.auto_round import AutoRound
from pipeload.formats.codes.awq import Awq
from pipeload.formats.codes.compressed_tensors import CompressedTensors
from pipeload.formats.codes.gptq import Gptq
from pipeload.formats.codes.hqq import Hqq
from pipeload.formats.codes.mlx import Mlx
from pipeload.formats.codes.quark import Quark
from pipeload.formats.codes.torchao import TorchAo
from pipeload.formats.format import named

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.formats.codes.coded_weight import CodesFormat

CODES: Final[list[CodesFormat]] = [
    Gptq(),
    Awq(),
    AutoRound(),
    CompressedTensors(),
    Mlx("mlx"),
    Mlx("metal"),
    Hqq(),
    TorchAo(),
    Quark(),
    Aqlm(),
]
"""A format is added by its line here, and in `formats.form_names`."""


def codes_format(settings: Mapping[str, Any]) -> CodesFormat | None:
    """The format that a `quantization_config` is of; None if its integers are not taken over."""
    return next((one for one in CODES if one.method == named(settings)), None)
