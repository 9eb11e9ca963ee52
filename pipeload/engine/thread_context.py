"""What the library keeps outside of a call, and belongs to it all the same.

[Note: what calls leave behind] Calls of `generate` that take turns in one process would mix up what
they believe to be theirs alone: torch's random numbers, and what models write on themselves, such
as a static cache or the positions of a picture. So whoever has its turn finds its own, and leaves
what it found there.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MISSING = object()
_METHODS = {"prepare_inputs_for_generation"}
"""What adapters that add tokens put in a model's place as long as a call of `generate` lasts."""


class RandomNumbers:
    """States of torch's generators: of the CPU, and of the device that a model is on."""

    def __init__(self, device: torch.device | None, seed: int | None = None) -> None:
        """Those that `torch.manual_seed(seed)` gives; without a seed, those that are there now.

        `device`: where the model is, None: on the CPU.
        """
        self.device = torch.device("cpu") if device is None else device
        if seed is None:
            self.note()
            return
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._on_device = self._of_device()
        if self._on_device is not None:
            self._on_device = torch.Generator(self.device).manual_seed(seed).get_state()

    def note(self) -> None:
        """Remember what is there."""
        self._cpu, self._on_device = torch.get_rng_state(), self._of_device()

    def restore(self) -> None:
        """Have that be there again."""
        torch.set_rng_state(self._cpu)
        if self._on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self._on_device)

    def _of_device(self) -> torch.Tensor | None:
        if self.device.type == "cpu":
            return None
        state: torch.Tensor = torch.get_device_module(self.device).get_rng_state()
        return state


class OwnAttributes:
    """Attributes and buffers of some modules, as one caller has left them.

    Only tensors, caches, numbers and `_METHODS` that it has set itself: all else is everybody's.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._spaces: list[dict[str, Any]] = [
            space
            for module in modules
            for space in (vars(module), module._buffers)  # noqa: SLF001
        ]
        self._mine: list[dict[str, Any]] = [{} for _ in self._spaces]
        self._others: list[dict[str, Any]] = [{} for _ in self._spaces]
        self._names: list[tuple[str, ...]] = []
        self._found: list[tuple[Any, ...]] = []

    def put_on(self) -> None:
        """Set what is its own."""
        for space, mine, others in zip(self._spaces, self._mine, self._others, strict=True):
            if mine:
                others.update({name: space.get(name, _MISSING) for name in mine})
                _set(space, mine)
        self._names = [tuple(space) for space in self._spaces]
        self._found = [tuple(space.values()) for space in self._spaces]

    def take_off(self) -> None:
        """See what was set since `put_on`, and leave what others have."""
        for number, space in enumerate(self._spaces if self._found else ()):
            mine, found = self._mine[number], self._found[number]
            changed = len(space) != len(found) or not all(map(operator.is_, space.values(), found))
            if not changed and not mine:
                continue
            before, others = (
                dict(zip(self._names[number], found, strict=True)),
                self._others[number],
            )
            for name in {**before, **space}:
                value, then = space.get(name, _MISSING), before.get(name, _MISSING)
                if name in mine:
                    mine[name] = value
                elif value is not then and (
                    name in _METHODS or _is_state(value) or _is_state(then)
                ):
                    mine[name], others[name] = value, then
            _set(space, others)
            others.clear()


def _is_state(value: object) -> bool:
    """Whether it may belong to one call: a flag tells what was done to the model, for all calls."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number or isinstance(value, torch.Tensor) or hasattr(value, "get_seq_length")


def _set(space: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is _MISSING:
            space.pop(name, None)
        else:
            space[name] = value


def modules_outside(model: nn.Module) -> Iterator[nn.Module]:
    """`model` and its parts, but for repeated blocks: these keep nothing from call to call."""
    yield model
    for child in model.children():
        if not isinstance(child, nn.ModuleList):
            yield from modules_outside(child)


class ThreadContext:
    """See [Note: what calls leave behind]."""

    def __init__(self, random_numbers: RandomNumbers, modules: Iterable[nn.Module]) -> None:
        self._random, self._attributes = random_numbers, OwnAttributes(modules)
        self.device = random_numbers.device

    def put_on(self) -> None:
        """The caller's turn begins."""
        self._random.restore()
        self._attributes.put_on()

    def take_off(self) -> None:
        """It ends."""
        self._attributes.take_off()
        self._random.note()
