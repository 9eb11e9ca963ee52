"""Which classes of a model type are tried, found in the library's own tables and modules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto import modeling_auto

if TYPE_CHECKING:
    from types import ModuleType

# The first that knows a type decides which of its classes is tried: generative ones first.
_MAPPINGS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "RNNT",
    "TDT",
    "CTC",
    "TEXT_TO_WAVEFORM",
    "TEXT_TO_SPECTROGRAM",
    "MASKED_LM",
)
_MOST_CLASSES = 3


def model_types() -> list[str]:
    """All that the installed library knows."""
    return sorted(CONFIG_MAPPING)


def classes_of(model_type: str) -> list[type[PreTrainedModel]]:
    """The classes that are worth trying for a type, most wanted first; none if it has none.

    Raises:
        ImportError: of the type's module, which is not there or needs a package that is not.
    """
    both = getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False)
    first = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ") if both else ()
    tables = [f"MODEL_FOR_{kind}_MAPPING_NAMES" for kind in (*first, *_MAPPINGS)]
    tables.append("MODEL_MAPPING_NAMES")
    tables += [name for name in dir(modeling_auto) if name.startswith("MODEL_FOR_")]
    module = _module(model_type)
    found: dict[type[PreTrainedModel], None] = {}
    for table in tables:
        if not table.endswith("_MAPPING_NAMES"):
            continue
        names: Any = getattr(modeling_auto, table, {}).get(model_type) or ()
        for name in (names,) if isinstance(names, str) else names:
            value = getattr(module, name, None) or getattr(transformers, name, None)
            if isinstance(value, type) and issubclass(value, PreTrainedModel):
                found[value] = None
    # Those of a part of it come last: that part is a type of its own.
    config_class = CONFIG_MAPPING[model_type]
    first_ones = sorted(
        found, key=lambda cls: not issubclass(config_class, cls.config_class or object)
    )
    return first_ones[:_MOST_CLASSES] or _own_classes(module, config_class)


def _module(model_type: str) -> ModuleType:
    folder, _, name = CONFIG_MAPPING[model_type].__module__.rpartition(".")
    return importlib.import_module(f"{folder}.{name.replace('configuration_', 'modeling_')}")


def _own_classes(module: ModuleType, config_class: Any) -> list[type[PreTrainedModel]]:
    """The outermost class of the module that takes just this configuration."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PreTrainedModel)
        and value.__module__ == module.__name__
        and getattr(value, "config_class", None) is config_class
        and not value.__name__.endswith("PreTrainedModel")
        and value.forward is not torch.nn.Module.forward
    ]
    return found[-1:]
