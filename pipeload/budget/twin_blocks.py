"""Finds blocks that are alike, so that a few of them can stand for all in a trial run."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeload_hooks import Usage, find_blocks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    # Where a value was found: the module in its block (or "config" and its id), and the attribute.
    _Key = tuple[Hashable, str]
    # What is known of one block.
    _Facts = dict[_Key, Hashable]

_FEWEST = 2
"""Blocks that stay of every list: a model may treat its first one in a way of its own."""
_SIMPLE = (bool, int, float, str, bytes, type(None), type, torch.dtype, torch.device)
_TREES = frozenset({"_parameters", "_buffers", "_modules"})
_TORCHS_OWN = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class TwinList:
    """A list of blocks whose first ones are like all others."""

    path: str
    """Dotted name of the list."""
    container: nn.ModuleList
    groups: tuple[int, ...]
    """For each block of the list, which kind it is. Blocks of one kind are twins."""
    kept: int
    """How many blocks, from the first on, hold one of every kind; fewer than the list has."""

    @property
    def prefix(self) -> str:
        """What the names of all blocks begin with."""
        return f"{self.path}." if self.path else ""

    def split(self, name: str) -> tuple[int, str] | None:
        """The block that `name` lies in, and the rest of the name; None if it lies in none."""
        if not name.startswith(self.prefix):
            return None
        position, _, rest = name.removeprefix(self.prefix).partition(".")
        return int(position), rest

    def join(self, position: int, rest: str) -> str:
        """The other way round."""
        return f"{self.prefix}{position}.{rest}" if rest else f"{self.prefix}{position}"

    def twins(self, position: int) -> list[int]:
        """All blocks of the same kind, itself among them."""
        return [other for other, g in enumerate(self.groups) if g == self.groups[position]]


def twin_lists(model: nn.Module) -> list[TwinList]:
    """The lists of repeated blocks in `model` that are longer than they have kinds of block.

    Twins have equal modules, down to the classes, the shapes and types of parameters and buffers,
    and every attribute. Left out of this are layer numbers: whole numbers that grow by one from
    block to block. A list in a configuration that is as long as the blocks are many is taken to
    speak of them. What cannot be compared is as good as different. A list whose modules or
    parameters appear elsewhere in the model, too, is left alone.
    """
    seen: Counter[int] = Counter()
    configs: dict[int, object] = {}
    for module in _all_modules(model):
        seen.update(_identities(module))
        config: object = vars(module).get("config")
        if config is not None:
            configs[id(config)] = config
    found: list[TwinList] = []
    for path in dict.fromkeys(block.name.rpartition(".")[0] for block in find_blocks(model)):
        container = model.get_submodule(path)
        if not isinstance(container, nn.ModuleList) or len(container) <= _FEWEST:
            continue
        if any(seen[one] != 1 for module in _all_modules(container) for one in _identities(module)):
            continue
        groups = _groups(list(container), configs.values())
        kept = max(_FEWEST, 1 + max(groups.index(group) for group in set(groups)))
        if kept < len(groups):
            found.append(TwinList(path, container, groups, kept))
    return found


def bare_memo(model: nn.Module, *, kept: int = 0) -> dict[int, object]:
    """A memo for a deep copy of `model` without weights or hooks.

    A user's hooks are not to see a run that is none of theirs, nor to be copied with what they
    hold. Buffers of up to `kept` elements are copied.
    """
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    large = (b for b in model.buffers() if b.numel() > kept)
    memo |= {id(b): torch.empty_like(b, device="meta") for b in large}
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001
            memo[id(hooks)] = OrderedDict[int, object]()
    return memo


def short_copy(
    model: nn.Module, lists: Iterable[TwinList], memo: Mapping[int, object] | None = None
) -> nn.Module:
    """A deep copy of `model` with the kept blocks of `lists` alone. `model` is only read.

    What `memo` names by its `id` is not copied: its value is taken.
    """
    lists = list(lists)
    # What the memo of a deep copy holds already is not looked into. The new lists are in it before
    # they are filled, as a block may refer back to the model.
    shorts = [nn.ModuleList.__new__(type(twins.container)) for twins in lists]
    known: dict[int, object] = {
        **(memo or {}),
        **{id(twins.container): short for twins, short in zip(lists, shorts, strict=True)},
    }
    for twins, short in zip(lists, shorts, strict=True):
        state = dict(vars(twins.container))
        state["_modules"] = dict(itertools.islice(state["_modules"].items(), twins.kept))
        vars(short).update(copy.deepcopy(state, known))
    return copy.deepcopy(model, known)


def widen_usage(usage: Usage, lists: Iterable[TwinList]) -> Usage:
    """What a run of a short copy tells about the whole model.

    A parameter that one block has touched outside its module is touched so in all its twins; a
    module that ran in one block runs in all its twins. The names of blocks that were not there
    come behind the last one of their list.

    Raises:
        LookupError: Only some of the kept blocks of a list ran, so they cannot stand for others.
    """
    lists = list(lists)
    executed = usage.executed
    for twins in lists:
        executed = _widen_executed(executed, twins)
    outside, past = (
        _widen_names(names, lists) for names in (usage.touched_outside, usage.touched_past_block)
    )
    return Usage(outside, executed, past)


def _widen_names(names: frozenset[str], lists: Iterable[TwinList]) -> frozenset[str]:
    wide = set(names)
    for twins in lists:
        for name in names:
            place = twins.split(name)
            if place is not None:
                wide.update(twins.join(other, place[1]) for other in twins.twins(place[0]))
    return frozenset(wide)


def _widen_executed(executed: tuple[str, ...], twins: TwinList) -> tuple[str, ...]:
    ran: dict[int, list[str]] = {}
    end = 0
    for index, name in enumerate(executed, start=1):
        place = twins.split(name)
        if place is not None:
            ran.setdefault(place[0], []).append(place[1])
            end = index
    if not ran:
        return executed
    if len(ran) < twins.kept:
        raise LookupError(f"Of {twins.path}, only the blocks {sorted(ran)} ran.")
    more: list[str] = []
    for position in range(len(twins.groups)):
        models = [ran[other] for other in twins.twins(position) if other < twins.kept]
        longest: list[str] = max(models, key=len)
        new = [] if position < twins.kept else [*longest]
        had = {*new, *ran.get(position, ())}
        new += [rest for rest in dict.fromkeys(itertools.chain(*models)) if rest not in had]
        more += [twins.join(position, rest) for rest in new]
    return (*executed[:end], *more, *executed[end:])


def _all_modules(module: nn.Module) -> Iterable[nn.Module]:
    return (found for _, found in module.named_modules(remove_duplicate=False))


def _identities(module: nn.Module) -> Iterable[int]:
    yield id(module)
    parameters: dict[str, nn.Parameter | None] = vars(module)["_parameters"]
    yield from (id(parameter) for parameter in parameters.values() if parameter is not None)


def _groups(blocks: Sequence[nn.Module], configs: Iterable[object]) -> tuple[int, ...]:
    facts = [_facts(block) for block in blocks]
    for config in configs:
        for name, value in getattr(config, "__dict__", {}).items():
            if isinstance(value, (list, tuple)) and len(value) == len(blocks):
                for position, entry in enumerate(value):
                    facts[position][("config", id(config)), name] = _comparable(entry)
    numbers = _layer_numbers(facts)
    kinds: dict[frozenset[object], int] = {}
    return tuple(
        kinds.setdefault(
            frozenset(item for item in known.items() if item[0] not in numbers), len(kinds)
        )
        for known in facts
    )


def _layer_numbers(facts: Sequence[_Facts]) -> set[_Key]:
    """The attributes that count the blocks: as far from the position in every block with one."""
    distances: dict[_Key, list[int]] = {}
    for position, known in enumerate(facts):
        for key, value in known.items():
            if type(value) is int:  # not a bool
                distances.setdefault(key, []).append(value - position)
    return {key for key, many in distances.items() if len(many) > 1 and len(set(many)) == 1}


def _facts(block: nn.Module) -> _Facts:
    known: _Facts = {}
    for path, module in block.named_modules(remove_duplicate=False):
        own = vars(module)
        known[path, ""] = (
            type(module),
            tuple((name, _comparable(value)) for name, value in own["_parameters"].items()),
            tuple((name, _comparable(value)) for name, value in own["_buffers"].items()),
        )
        for name, value in own.items():
            # Hooks and the like are seldom there, and many to compare.
            if name not in _TREES and (name not in _TORCHS_OWN or value):
                known[path, name] = _comparable(value)
    return known


def _comparable(value: object) -> Hashable:
    """Something equal for equal values. An object of a kind not known here equals itself alone."""
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(entry) for entry in value)
    if isinstance(value, dict):
        return _comparable(list(value.items()))
    if isinstance(value, functools.partial):
        return functools.partial, _comparable([value.func, value.args, value.keywords])
    return object, id(value)
