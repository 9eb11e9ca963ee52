"""Tries passes out without weights: what they take where no formula describes them.

Encoders, towers of pictures and sound, and whatever else is no stack of decoders alone. A trial
takes tens of milliseconds, so it is made once for each size of input, and never for the next token.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipeload.budget.kv_cache import is_cache, private_parts, self_and_cross
from pipeload.budget.twin_blocks import bare_memo, short_copy
from pipeload.budget.usage_trial import like_lists, with_float_products
from pipeload_hooks import (
    MOST_COMPUTED,
    Repeated,
    TooLongError,
    Trial,
    UnknownValueError,
    try_out,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from pipeload.budget.attention_memory import AttentionInUse
    from pipeload.budget.twin_blocks import TwinList

__all__ = ["PassTrace", "Trial", "trace_of"]

_REMEMBERED = 64
"""Sizes of input whose trials are kept."""
_FEW = 64
"""Numbers of a tensor that are taken to say how large something is: a grid, a length."""
_MOST_MISSING = 4.0
"""So many times what was counted is taken, at most, where a trial ended early."""

_WORDS = "input_ids"
_DURATIONS = "duration_predictor"
_FRAMES_OF_A_WORD = 8
"""What models that predict how long they speak make of each word, mostly a letter or a sound: 8 of
12 ms for FastSpeech 2, fewer for VITS. An untrained one makes one or two."""

_log = logging.getLogger("pipeload")


class _Skeleton(NamedTuple):
    """A copy of the model without weights, and the blocks that stand for others."""

    model: nn.Module
    repeated: tuple[Repeated, ...]


class PassTrace:
    """Trials of one model's passes. Holds a copy without weights, and the model's configurations.

    These are the very ones: what a user sets in them later holds for the next trial.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, attention: AttentionInUse | None = None
    ) -> None:
        """Raises whatever a copy of `model` does."""
        self._attention = attention
        self._whole = _bare(model, dtype)
        self._lists = [longer for one in like_lists(self._whole) if (longer := _longer(one))]
        self._short: _Skeleton | None = None
        self._paths = weakref.WeakKeyDictionary[nn.Module, str](
            {module: name for name, module in model.named_modules() if hasattr(module, "config")}
        )
        self._configs = list({id(c): c for c in map(_config, self._whole.modules()) if c}.values())
        self._frames = _FRAMES_OF_A_WORD if any(map(_says_how_long, self._configs)) else 0
        self._known: dict[Hashable, Trial] = {}
        self._filled: set[str] = set()

    @property
    def model(self) -> Any:
        """The copy. Its parameters have no values."""
        return self._whole

    def encoder_path(self) -> str:
        """The name of what `generate` calls before the decoder; "" where there is no such part."""
        encoder = self.model.get_encoder()
        names = (name for name, module in self._whole.named_modules() if module is encoder)
        return next(names, "")

    def path(self, module: nn.Module | None) -> str:
        """The name of a part that is called by itself; "" for the model, and for what is none."""
        return "" if module is None else self._paths.get(module, "")

    def of(
        self,
        path: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        live: nn.Module | None = None,
    ) -> Trial | None:
        """What a call of the part at `path` takes; None where it cannot even be begun.

        The arguments are only looked at. `live`: the part itself, whose buffers may have values by
        now that it looks at.
        """
        try:
            if live is not None and live in self._paths and path not in self._filled:
                self._fill(path, live)
            key = (path, self._settings(), _key(args), _key(kwargs))
            if key not in self._known:
                if len(self._known) >= _REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[key] = self._try(path, args, kwargs)
            return self._known[key]
        except Exception as error:  # arguments may be anything
            _log.debug("A pass cannot be tried: %r", error)
            return None

    def _fill(self, path: str, live: nn.Module) -> None:
        """Put in small buffers that had no values when the copy was made."""
        self._filled.add(path)
        part = self._whole.get_submodule(path)
        for name, value in live.named_buffers():
            owner, _, leaf = name.rpartition(".")
            holder = part.get_submodule(owner)
            known = getattr(holder, leaf, value)
            if known.is_meta and not value.is_meta and value.numel() <= MOST_COMPUTED:
                setattr(holder, leaf, value.detach().to("cpu", copy=True))
                self._short = None
                self._known.clear()

    def _try(self, path: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Trial:
        """Of few blocks; of all where the model does not run with few."""
        trials: list[Trial] = []
        for skeleton in self._skeletons():
            part = skeleton.model.get_submodule(path)
            call = partial(
                part,
                *_without_values(args),
                **_without_values(kwargs),
            )
            attention = self._attention
            with nullcontext() if attention is None else attention.tried(skeleton.model):
                trial = try_out(call, skeleton.repeated, frames=self._frames)
            if trial.error is None:
                return trial
            _log.debug("%s cannot be tried: %r", type(self._whole).__name__, trial.error)
            trials.append(_ended_early(trial, part))
            if isinstance(trial.error, TooLongError):
                break
        return max(trials, key=lambda trial: trial.peak)

    def _skeletons(self) -> list[_Skeleton]:
        whole = _Skeleton(self._whole, ())
        if not self._lists:
            return [whole]
        if self._short is None:
            short = short_copy(self._whole, self._lists, _shared(self._whole))
            self._short = _Skeleton(short, tuple(_repeated(short, twins) for twins in self._lists))
        return [self._short, whole]

    def _settings(self) -> Hashable:
        """What may be set in the configurations at any time, and how attention computes."""
        kept = None if self._attention is None else self._attention.kept()
        return kept, *map(private_parts.settings_of, self._configs)


def trace_of(model: nn.Module, attention: AttentionInUse | None = None) -> PassTrace | None:
    """For trials of a model's passes; None where it cannot be copied."""
    dtypes = (p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        return PassTrace(model, next(dtypes, torch.float32), attention)
    except Exception as error:  # attributes may be anything
        _log.debug("%s cannot be copied: %r", type(model).__name__, error)
        return None


def _ended_early(trial: Trial, part: nn.Module) -> Trial:
    """What it may have come to: the more, the more of the weights had yet to be used.

    Where the model itself refuses its arguments, a pass ends there, too.
    """
    if not isinstance(trial.error, (UnknownValueError, RuntimeError)):
        return trial
    weights = sum(1 for _ in part.parameters())
    missing = min(_MOST_MISSING, max(1.0, weights / max(1, trial.weights)))
    return trial._replace(peak=int(trial.peak * missing))


def _config(module: nn.Module) -> Any:
    return vars(module).get("config")


def _says_how_long(config: Any) -> bool:
    """Whether its model predicts how long each word is spoken."""
    return any(name.startswith(_DURATIONS) for name in getattr(config, "__dict__", ()))


def _shared(model: nn.Module) -> dict[int, Any]:
    """A memo for a copy that has the same configurations, not copies of them."""
    return {id(config): config for config in map(_config, model.modules()) if config is not None}


def _bare(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    memo = bare_memo(model, kept=MOST_COMPUTED) | _shared(model)
    copied = with_float_products(copy.deepcopy(model, memo), dtype).eval()
    for module in copied.modules():  # the library's own hooks are not copied: it puts new ones on
        private_parts.forget_hooks(module)
    return copied


def _longer(twins: TwinList) -> TwinList | None:
    """With a block more: only from the second to the third is what each leaves behind to be seen.

    And with one like the first that is not the first, if there is one. None where no block is left
    out then.
    """
    like_first = [place for place in twins.twins(0) if place > 0]
    kept = max(twins.kept + 1, *(place + 1 for place in like_first[:1]), 0)
    return replace(twins, kept=kept) if kept < len(twins.groups) else None


def _repeated(model: nn.Module, twins: TwinList) -> Repeated:
    """The last of each kind stands for those of its kind that are not there."""
    blocks = list(model.get_submodule(twins.path).children())
    last = {group: place for place, group in enumerate(twins.groups[: twins.kept])}
    missing = [0] * len(blocks)
    for group in twins.groups[twins.kept :]:
        missing[last[group]] += 1
    return Repeated(blocks, missing)


def _without_values(value: Any) -> Any:
    """The same with floats on the meta device, and copies of all that a model may write to."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )
        if value.is_meta:
            return torch.ones(value.shape, dtype=value.dtype)
        return value.detach().to("cpu", copy=True)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_without_values, value))
    if isinstance(value, Mapping):
        copied: Any = copy.copy(value)
        for name, inner in value.items():
            copied[name] = _without_values(inner)
        return copied
    return _bare_cache(value) if is_cache(value) else value


def _bare_cache(cache: Any) -> Any:
    with _BareCopies():  # one of a fixed size has all its memory from the start
        return copy.deepcopy(cache)


class _BareCopies(TorchFunctionMode):
    """What is copied has no values."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return _without_values(args[0])
        return func(*args, **(kwargs or {}))


def _key(value: Any, *, words: bool = False) -> Hashable:
    """What two calls have in common that take the same: sizes, and numbers that may say sizes.

    `words`: these are numbers of words, of which none says more than another.
    """
    if isinstance(value, Tensor):
        numbers: Hashable = None
        if not (words or value.is_floating_point() or value.is_complex() or value.is_meta):
            few = value.numel() <= _FEW
            numbers = tuple(value.flatten().tolist()) if few else bool(value.all())
        return value.shape, value.stride(), value.dtype, numbers
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, Mapping):
        return tuple((n, _key(v, words=str(n).endswith(_WORDS))) for n, v in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    caches = [getattr(part, "layers", ()) for part in self_and_cross(value)]
    layers = [
        (private_parts.room_of(layer), _size(getattr(layer, "keys", None)))
        for part in caches
        for layer in part
    ]
    return str(type(value)), tuple(layers)


def _size(keys: object) -> Hashable:
    return keys.shape if isinstance(keys, Tensor) else None
