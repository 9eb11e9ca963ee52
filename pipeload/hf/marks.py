"""Private parts of transformers and accelerate: what they note on models, modules and parameters.

Seen in transformers 5.24.0 and accelerate 1.15.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn

INITIALISED: Final = "_is_hf_initialized"
"""Set on a parameter or module: the library initialises whatever lacks it."""
_ATTENTION: Final = "_attn_implementation"
"""Set in a configuration: which attention its model computes."""
_DEVICE_MAP: Final = "hf_device_map"
"""Set on a model: where its modules are, as pipelines and PEFT ask."""


def mark_initialised(what: nn.Parameter | nn.Module) -> None:
    """Have the library leave the values alone that are there."""
    vars(what)[INITIALISED] = True


def is_initialised(parameter: nn.Parameter) -> bool:
    """Tell whether the library would leave a parameter alone."""
    return bool(vars(parameter).get(INITIALISED, False))


def is_dispatched(module: nn.Module) -> bool:
    """Tell whether accelerate moves this module's weights while it runs."""
    return hasattr(module, "_hf_hook")


def commit_of(config: Any) -> str | None:
    """Tell the revision that a model is from. 5.24 itself does not remember it any more."""
    return getattr(config, "_commit_hash", None)


def attention_of(config: Any) -> str:
    """Tell the attention that a configuration chose: "sdpa", "eager" or another."""
    return str(getattr(config, _ATTENTION, None) or "sdpa")


def settings_of(config: Any) -> tuple[str, ...]:
    """Tell what may be set in a configuration at any time and changes what a pass takes."""
    names = (_ATTENTION, "use_cache", "output_hidden_states", "output_attentions")
    return tuple(str(getattr(config, name, None)) for name in names)


def forget_hooks(module: nn.Module) -> None:
    """Have the library put its own hooks on a copied module: they are not copied."""
    vars(module).pop("_output_capturing_hooks_installed", None)


def place(model: nn.Module, where: torch.device) -> Iterator[Callable[[], None]]:
    """Have the model say that all of it is there, unless it says something already.

    Yields what undoes that, which holds no model.
    """
    if _DEVICE_MAP not in vars(model):
        yield partial(_forget, weakref.ref(model), _DEVICE_MAP)
        vars(model)[_DEVICE_MAP] = {"": where}


def _forget(reference: weakref.ref[nn.Module], name: str) -> None:
    if (model := reference()) is not None:
        vars(model).pop(name, None)
