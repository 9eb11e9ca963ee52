"""Finds the repeated blocks (decoder layers and their like) of any model, by structure alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

# Containers that never run themselves: their children are called one by one.
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class Block(NamedTuple):
    """A module that runs as a whole and has siblings like it."""

    name: str
    """Dotted path from the model."""
    module: nn.Module


def find_blocks(model: nn.Module) -> list[Block]:
    """The outermost repeated blocks of `model`, in the order of the module tree.

    A block sits in a container, has a forward and parameters of its own, and is marked as a layer
    by the library, named in the model's `_no_split_modules`, or has a sibling of its class. A
    module that appears twice in the tree is found once.
    """
    marked = frozenset(getattr(model, "_no_split_modules", None) or ())
    found: list[Block] = []
    _walk("", model, marked, found, set())
    return found


def find_decoder_blocks(model: nn.Module) -> list[Block]:
    """Those of what generates: the list of blocks in it that has the most weights; [] if none."""
    get = getattr(model, "get_decoder", None)
    decoder = get() if get is not None else None
    inside = {id(module) for module in (decoder or model).modules()}
    blocks = find_blocks(model)
    lists: dict[str, list[Block]] = {}
    # Some call their head a decoder.
    for block in [block for block in blocks if id(block.module) in inside] or blocks:
        lists.setdefault(block.name.rpartition(".")[0], []).append(block)
    return max(lists.values(), key=_count_weights, default=[])


def _count_weights(blocks: Sequence[Block]) -> int:
    return sum(p.numel() for block in blocks for p in block.module.parameters())


def _walk(
    path: str, module: nn.Module, marked: frozenset[str], found: list[Block], seen: set[int]
) -> None:
    # Not a closure: one that calls itself is a cycle, and would keep the whole model alive.
    children = list(module.named_children())
    siblings = [child for _, child in children]
    for name, child in children:
        child_path = f"{path}.{name}" if path else name
        if id(child) in seen:
            continue
        seen.add(id(child))
        if isinstance(module, _CONTAINERS) and _is_block(child, siblings, marked):
            found.append(Block(child_path, child))
        else:
            _walk(child_path, child, marked, found, seen)


def _is_block(child: nn.Module, siblings: Sequence[nn.Module], marked: frozenset[str]) -> bool:
    if type(child).forward is nn.Module.forward or isinstance(child, _CONTAINERS):
        return False  # it cannot be called: what can is inside
    if next(child.parameters(), None) is None:
        return False
    names = {cls.__name__ for cls in type(child).__mro__}
    # By name: this package knows torch alone, and the class lives in transformers.
    if "GradientCheckpointingLayer" in names or type(child).__name__ in marked:
        return True
    twins = sum(type(sibling) is type(child) for sibling in siblings)
    return twins >= 2 and next(child.children(), None) is not None
