"""What trials told of a model is remembered: tests load the same few models many hundred times.

Of the processor time that a load of a tiny model takes, trials without weights are half. A model is
the same if its modules are of the same classes and run the same functions, its configuration says
the same, and its parameters and buffers are of the same sizes. Rooms' own tests of trials call them
where they are, past this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from pipeload.budget.kv_cache import private_parts
from pipeload.budget.pass_needs import PassNeeds
from pipeload.budget.usage_trial import probe_usage
from pipeload.ring.crossing_trial import try_crossing

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import nn

    from pipeload.budget.pass_trial import PassTrace, Trial
    from pipeload.ring.crossing_trial import Told
    from pipeload_hooks import Usage

_MODULES = ("pipeload.entry.loading", "pipeload.entry.wrap", "pipeload.ring.dealt_parts")
_usages: dict[Hashable, Usage | None] = {}
_crossings: dict[Hashable, Told | None] = {}
_compared: dict[Hashable, tuple[bool, float]] = {}
_trials: dict[Hashable, dict[Hashable, Trial]] = {}


def fingerprint(model: nn.Module) -> Hashable | None:
    """What tells models apart, as far as trials see them; None for one that is not looked at."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    modules = []
    for name, module in model.named_modules():
        if "forward" in vars(module):
            return None
        modules.append((name, type(module), type(module).forward, module.training))
    tensors = (*model.named_parameters(), *model.named_buffers())
    return (
        tuple(modules),
        tuple((name, value.shape, value.dtype, value.device.type) for name, value in tensors),
        config.to_json_string(use_diff=False),
        private_parts.settings_of(config),
        (torch.get_num_threads(), torch.get_default_dtype()),
    )


def known_usage(model: nn.Module) -> Usage | None:
    """A stand-in for `probe_usage`."""
    key = fingerprint(model)
    if key is None:
        return probe_usage(model)
    if key not in _usages:
        _usages[key] = probe_usage(model)
    return _usages[key]


def known_crossing(model: nn.Module, names: Sequence[str]) -> Told | None:
    """A stand-in for `try_crossing`."""
    key = fingerprint(model), tuple(names)
    if key[0] is None:
        return try_crossing(model, names)
    if key not in _crossings:
        _crossings[key] = try_crossing(model, names)
    return _crossings[key]


class KnownNeeds(PassNeeds):
    """Needs whose comparison with trials, and each trial, is made once for each model."""

    def __init__(self, model: nn.Module, config: Any, **settings: Any) -> None:
        super().__init__(model, config, **settings)
        if (trace := self._trace) is not None and (told := fingerprint(trace.model)) is not None:
            trace._known = _trials.setdefault((told, trace.model.dtype), trace._known)

    def _compare(self, trace: PassTrace) -> None:
        key: Any = fingerprint(trace.model), self._fused, self._widths
        if key[0] is None:
            super()._compare(trace)
        elif key in _compared:
            known, self._short_by = _compared[key]
            self._trace = None if known else trace
        else:
            super()._compare(trace)
            _compared[key] = self._trace is None, self._short_by


def remember() -> None:
    """From now on, in this process, where models are loaded."""
    stand_ins = {
        "probe_usage": known_usage,
        "PassNeeds": KnownNeeds,
        "try_crossing": known_crossing,
    }
    for module in map(importlib.import_module, _MODULES):
        for name in stand_ins.keys() & vars(module).keys():
            setattr(module, name, stand_ins[name])
