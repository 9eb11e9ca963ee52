"""Lets single modules of a streamed model be copied: the copy is a plain one, with real weights."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from pipeload.engine.guarded_methods import take_off
from pipeload.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeload.engine.own_weights import OwnWeights
    from pipeload.engine.teardown import Step

_NAME = "__deepcopy__"


def allow_copies(model: nn.Module, weights: OwnWeights) -> Iterator[Step]:
    """Have modules that own streamed weights, and hold no others, be copied with these weights.

    Adapters train copies of a head or an embedding, which begin as the original. Yields what
    undoes each, before it is done.
    """
    for module in model.modules():
        if weights.hidden_of(module) and next(module.children(), None) is None:
            reference = weakref.ref(module)
            yield partial(take_off, reference, _NAME)
            object.__setattr__(module, _NAME, partial(_copy, reference, weights))


def _copy(
    reference: weakref.ref[nn.Module], weights: OwnWeights, memo: dict[int, Any]
) -> nn.Module:
    module = reference()
    if module is None:
        raise ReferenceError("the module is gone")
    mine = weights.hidden_of(module)
    if not all(map(weights.readable, mine)):
        raise UnsupportedOperationError(
            f"{mine[0].name!r} cannot be copied: it is on disk, quantised or made together with "
            "others. Call handle.remove() first to get the plain model back "
            "(pipeload.handle(model).remove())."
        )
    for parameter in module.parameters(recurse=False):
        key = id(parameter)
        if key in weights.hidden and key not in memo:
            values = weights.read(weights.hidden[key])
            memo[key] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    twin = type(module).__new__(type(module))
    memo[id(module)] = twin
    vars(twin).update(copy.deepcopy(_without_ours(vars(module)), memo))
    return twin


def _without_ours(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module without the hooks and guards of streaming."""
    hooks = {name: value for name, value in attributes.items() if name.endswith("hooks")}
    ours = {key for kind in hooks.values() for key, hook in kind.items() if _is_ours(hook)}
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        if "_hooks" in name and isinstance(value, dict):
            kept[name] = type(value)((k, hook) for k, hook in value.items() if k not in ours)
        elif not _is_ours(value):
            kept[name] = value
    return kept


def _is_ours(value: object) -> bool:
    """Whether it is a function of pipeload's, as it is or wrapped by torch or in a partial."""
    value = getattr(value, "hook", value)
    function = value.func if isinstance(value, partial) else value
    home = getattr(function, "__module__", None) if callable(function) else None
    return isinstance(home, str) and home.partition(".")[0] in {"pipeload", "pipeload_hooks"}
