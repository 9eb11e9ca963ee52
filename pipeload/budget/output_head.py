"""The head that makes logits of what a model computes, where it can be run piece by piece."""

from __future__ import annotations

from torch import nn

from pipeload_hooks import can_split

ADAPTED = ("base_layer", "original_module")
"""What an adapter that takes a module's place calls that module."""


def output_head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The name and module of a head that can be computed by ranges of rows."""
    found = _head(model)
    return found if found is not None and can_split(found[1]) else None


def head_in_parts(model: nn.Module) -> tuple[str, nn.Linear] | None:
    """The name and module of a head whose weights are all those of modules inside it."""
    found = _head(model)
    if found is None or next(found[1].children(), None) is None:
        return None
    return found


def _head(model: nn.Module) -> tuple[str, nn.Linear] | None:
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    while isinstance(head, nn.Module) and not isinstance(head, nn.Linear):
        # An adapter in its place; it holds the head by one of these names.
        head = next((m for name, m in head.named_children() if name in ADAPTED), None)
    if not isinstance(head, nn.Linear):
        return None
    return next(((name, head) for name, module in model.named_modules() if module is head), None)
