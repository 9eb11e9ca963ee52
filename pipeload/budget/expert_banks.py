"""Which experts are read one by one, and why others are read whole, with the block around them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeload._sizes import format_size
from pipeload.budget.grouped_products import products_are_grouped
from pipeload.budget.model_parts import Bank
from pipeload.weights.arena import DTYPES
from pipeload.weights.cast_rows import CastRows
from pipeload.weights.layout import Slices

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from torch import nn

    from pipeload.budget.model_parts import ExpertsModule
    from pipeload.weights.layout import Weight

_BANK_BYTES = 1 << 20
_MOST_OWN = 512
"""Experts of one module that have parameters of their own: each is a mapping of its own, of which a
process may have 65530."""
_ALL_AT_ONCE = "the code of {} is not known to take them one by one"
_STORED = "the form in which they are stored is not read one by one"


def find_banks(
    model: nn.Module,
    weights: Mapping[str, Weight],
    tied: Collection[str],
    experts: Sequence[ExpertsModule],
    *,
    blocks_alone: bool,
) -> tuple[tuple[Bank, ...], tuple[str, ...]]:
    """Find the experts that are read one by one, and say why others are not, each reason once.

    Args:
        model: in which modules are looked for that hold experts by their name.
        weights: what is read, by name.
        tied: names of parameters that share another one's memory, or lend theirs.
        experts: modules of which it is known that a call uses only some experts.
        blocks_alone: whether blocks are read whole, as for a device.
    """
    banks: list[Bank] = []
    reasons: dict[str, None] = {}
    for found in experts:
        bank = _bank(found, weights)
        reason = "on a device, a block is copied whole" if blocks_alone else _refusal(bank, tied)
        if reason:
            reasons[reason] = None
        else:
            banks.append(bank)
    whole = _whole_banks(banks, weights)
    if len(whole) < len(banks):
        reasons[_STORED] = None
    known = {found.name for found in experts}
    for module in _called_experts(model, weights, known):
        reasons[_ALL_AT_ONCE.format(type(module).__name__)] = None
    return whole, tuple(reasons)


def _bank(found: ExpertsModule, weights: Mapping[str, Weight]) -> Bank:
    named = (weights.get(f"{found.name}.{name}") for name in found.parameters)
    mine = [weight for weight in named if weight is not None]
    if found.number or found.own:
        slices = Slices(made=False, number=found.number or 1)
        plain = (w for w in mine if w.group is None and _is_float_or_cast(w))
        mine = [replace(weight, slices=slices) for weight in plain]
    return Bank(found, tuple(mine))


def _refusal(bank: Bank, tied: Collection[str]) -> str:
    """Why not every matrix can be read by itself, or used without the others; empty if it can."""
    found, weights = bank.held_by, bank.weights
    whole = len(weights) < len(found.parameters) or not all(w.sliceable for w in weights)
    if whole or any(weight.name in tied for weight in weights):
        return _STORED
    if sum(weight.nbytes for weight in weights) < _BANK_BYTES:
        return f"all of a layer are less than {format_size(_BANK_BYTES)}"
    if len(found.own) > _MOST_OWN:
        return f"a layer has more than {_MOST_OWN}, each a module of its own"
    if found.sweeps and any(map(_is_one_product, weights)):
        return "this processor multiplies with all of them in one product"
    return ""


def _whole_banks(banks: Sequence[Bank], weights: Mapping[str, Weight]) -> tuple[Bank, ...]:
    """Those whose conversions make nothing that is in no bank."""
    banked = {weight.name for bank in banks for weight in bank.weights}
    broken = {w.group for w in weights.values() if w.group and w.name not in banked}
    whole = tuple(b for b in banks if broken.isdisjoint(w.group for w in b.weights))
    return whole if len(whole) == len(banks) else _whole_banks(whole, weights)


def _called_experts(
    model: nn.Module, weights: Mapping[str, Weight], known: Collection[str]
) -> Iterator[nn.Module]:
    """Other modules that hold several experts, by their names."""
    for path, module in model.named_modules():
        named = path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
        names = (f"{path}.{name}" for name, _ in module.named_parameters())
        if named and path not in known and any(name in weights for name in names):
            yield module


def _is_one_product(weight: Weight) -> bool:
    """Whether a grouped product with it is another one than a product for each group."""
    if weight.guarded:  # integers, which their own module multiplies with one by one
        return False
    return not products_are_grouped(DTYPES[weight.dtype], weight.shape[1], weight.shape[2])


def _is_float_or_cast(weight: Weight) -> bool:
    """Whether its values are the stored ones, but for their dtype."""
    return weight.repacked is None or isinstance(weight.repacked, CastRows)
