"""Runs a model once without weights, to see how it uses them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pipeload.budget.twin_blocks import TwinList, short_copy, twin_lists, widen_usage
from pipeload_hooks import Usage, observe_usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Told = TypeVar("_Told")

_TOKENS = 2
CACHES = ("cache", "past_key_values", "cache_params")
"""What a model may call the cache that one forward gives and the next one takes, newest first."""

_log = logging.getLogger("pipeload")


def meta_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """The smallest inputs for a forward of `model`, on the meta device.

    One row of what the library itself tries its models with (`model.dummy_inputs`), at most two
    tokens long. Masks are left out: a model asks for their values, which meta tensors do not have.
    Empty where the library has no such inputs.
    """
    found: object = getattr(model, "dummy_inputs", None)
    if not isinstance(found, Mapping):
        return {}
    return {
        name: _smallest(value)
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and "mask" not in name
    }


def probe_usage(model: nn.Module) -> Usage | None:
    """How a forward of `model`, whose parameters are on the meta device, uses them.

    Two forwards: one of a prompt, whose modules are listed, and one that continues it. A copy runs,
    so nothing about `model` changes; it has few blocks, which stand for all that are like them
    (every operation costs time, even where there is no data), or all if it cannot run with few.
    None when it cannot run without values.
    """
    lists = like_lists(model)
    return try_without_values(model, _observe, (lists, []) if lists else ([],))


def try_without_values(
    model: nn.Module,
    observe: Callable[[Any, Mapping[str, torch.Tensor], Sequence[TwinList]], _Told],
    shorter: Sequence[Sequence[TwinList]] = ([],),
) -> _Told | None:
    """What `observe` tells of a copy of `model`, given inputs for it and the lists that are short.

    None when it cannot run without values: where it looks at them, where an operation knows no
    meta device, where the library has no inputs, or where parameters are not on the meta device.
    """
    inputs = meta_inputs(model)
    if not inputs or any(not parameter.is_meta for parameter in model.parameters()):
        return None
    # Some operations (fused experts) know the meta device in bf16 alone; use is the same in any.
    dtypes = (None, torch.bfloat16)
    for padded, shortened, dtype in itertools.product((False, True), shorter, dtypes):
        try:
            # Buffers are real where the library has made them so; one device is needed.
            copied = with_float_products(short_copy(model, shortened))
            probed = copied.to("meta", dtype).eval()
            with torch.no_grad():
                # Some need the number of the token, which most only warn of.
                ready = probed if padded else _without_padding(probed)
                return observe(ready, inputs, shortened)
        # Whatever a model that was never meant to run like this may raise.
        except Exception as error:  # noqa: PERF203
            short = "A short " if shortened else ""
            name = type(model).__name__
            _log.debug("%s%s cannot run on the meta device: %r", short, name, error)
    return None


def like_lists(model: nn.Module) -> list[TwinList]:
    """The lists of blocks that are alike; none where they cannot be compared."""
    try:
        return twin_lists(model)
    except Exception as error:  # Attributes may be anything; all blocks run then.
        _log.debug("The blocks of %s cannot be compared: %r", type(model).__name__, error)
        return []


def _observe(
    model: Any, inputs: Mapping[str, torch.Tensor], shortened: Sequence[TwinList]
) -> Usage:
    return widen_usage(_observe_copy(model, inputs, shortened), shortened)


def _observe_copy(
    model: Any, inputs: Mapping[str, torch.Tensor], shortened: Sequence[TwinList]
) -> Usage:
    caches: dict[str, object] = {}
    first = observe_usage(model, lambda: caches.update(read_prompt(model, inputs)))
    for cache in caches.values():
        _shorten(cache, {len(twins.groups): twins.kept for twins in shortened})
    try:
        then = observe_usage(model, lambda: continue_it(model, inputs, caches))
    except Exception:
        if caches:
            raise
        return first  # one token alone is nothing that every model takes
    return replace(
        first,
        touched_outside=first.touched_outside | then.touched_outside,
        touched_past_block=first.touched_past_block | then.touched_past_block,
    )


def read_prompt(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """The cache that a forward of a prompt gives, by the name that the model has for it."""
    output = model(**inputs)
    # Only the first: an output knows its cache by the old name, too.
    found = next((name for name in CACHES if name in output), None)
    return {} if found is None else {found: output[found]}


def continue_it(
    model: Any, inputs: Mapping[str, torch.Tensor], caches: Mapping[str, object]
) -> None:
    """A forward of one token more."""
    model(**{name: value[:, -1:] for name, value in inputs.items()}, **caches)


def _shorten(cache: object, kept: Mapping[int, int]) -> None:
    """Take from a cache the layers of blocks that are not there.

    They are empty, and a cache that asks its last layer would take itself for a new one.
    """
    fields = getattr(cache, "__dict__", {})
    for part in (cache, *fields.values()):  # one for each half of an encoder with a decoder
        layers: object = getattr(part, "layers", None)
        if isinstance(layers, list) and len(layers) in kept:
            del layers[kept[len(layers)] :]


def _smallest(value: torch.Tensor) -> torch.Tensor:
    if value.ndim == 2 and not value.is_floating_point():
        value = value[:, :_TOKENS]  # token ids
    return value[:1].to("meta")


def with_float_products(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Put plain Linears where a copied model has quantised ones, which compute with values only."""
    for module in model.modules():
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or "weight" not in child._parameters:  # noqa: SLF001
                continue  # one that is put together of others has none of its own
            if not child.weight.is_floating_point():
                bias = child.bias is not None
                sizes = child.in_features, child.out_features
                setattr(module, name, nn.Linear(*sizes, bias=bias, device="meta", dtype=dtype))
    return model


def _without_padding(model: nn.Module) -> nn.Module:
    """Have a copied model not look for padding tokens in its input, only to warn of them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "pad_token_id", None) is not None:
            config.pad_token_id = None
    return model
