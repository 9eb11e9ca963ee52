"""Private parts of transformers: its models, bars and names, as others ask for them here.

Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging as library_logging

from pipeload.formats.format import named


def quantised_by(quantizer: Any) -> str | None:
    """Name the method in a checkpoint's configuration; None without one."""
    return None if quantizer is None else named(quantizer.quantization_config)


def left_by_the_library(model: PreTrainedModel) -> set[str]:
    """List paths of Linears that its quantisation leaves as floats where nobody says which."""
    fp32 = [*(model._keep_in_fp32_modules or ())]
    keys = HfQuantizer.get_modules_to_not_convert(model, None, fp32)
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not should_convert_module(path, keys)
    }


def progress_bar(total: int, description: str, unit: str) -> Any:
    """Make a bar like the library's: a widget in a notebook; nothing where bars are off."""
    return library_logging.tqdm(total=total, desc=description, unit=unit, leave=False, delay=0.5)


def pretrained_modules(model: nn.Module) -> list[PreTrainedModel]:
    """List the library's models in the tree, outermost first: a pass may begin at any of them."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


AUTO_COMPILE = "_valid_auto_compile_criteria"


def disable_auto_compile(model: PreTrainedModel) -> None:
    """Keep `generate` from compiling: hooks and graphs do not mix. Set as an attribute."""

    def never(*_args: object, **_kwargs: object) -> bool:
        return False

    object.__setattr__(model, AUTO_COMPILE, never)
