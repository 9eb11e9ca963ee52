"""Which modules of a model may be run by one rank each, and whether that would be exact."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.budget.output_head import output_head
from pipeload.budget.usage_trial import CACHES
from pipeload.errors import UnsupportedModelError
from pipeload.ring.crossing_trial import try_crossing
from pipeload_hooks import find_decoder_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeload.budget.cut import Touched
    from pipeload.weights.layout import Weight


class DealtPart(NamedTuple):
    """A module that one rank runs for all."""

    name: str
    nbytes: int
    """Of its weights, as they are in memory."""
    layers: tuple[int, ...]
    """The layers of a cache that it writes to."""


def parts_to_deal(
    model: Any, weights: Mapping[str, Weight], touched: Touched | None
) -> list[DealtPart]:
    """The blocks of what generates, in the order in which they run, and the head.

    All else runs on every rank: embeddings, norms, encoders and towers.

    Raises:
        UnsupportedModelError: it has no such blocks, or they share more than their outputs.
    """
    blocks = find_decoder_blocks(model)
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no blocks that could be dealt out to ranks. Load it "
            "without ranks."
        )
    _check_apart(model, blocks)
    found = []
    for (name, _), layers in zip(blocks, _layers(blocks), strict=True):
        found.append(DealtPart(name, _bytes_in(name, weights), layers))
    head = output_head(model)
    if head is not None and (touched is None or f"{head[0]}.weight" not in touched.outside):
        nbytes = head[1].weight.numel() * head[1].weight.element_size()
        found.append(DealtPart(head[0], nbytes, ()))
    return found


def layers_of_all(model: nn.Module) -> set[int]:
    """Layers of the cache that every rank has, whoever has the blocks of these numbers.

    What runs on every rank may write to it, too, as an encoder does whose keys the decoder reads.
    One with a cache of its own does not.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return set()
    dealt = {part for _, block in find_decoder_blocks(model) for part in block.modules()}
    return _numbers([part for part in model.modules() if part not in dealt and _caches(part)])


def _caches(module: nn.Module) -> bool:
    return any(name in CACHES for name in inspect.signature(module.forward).parameters)


def _layers(blocks: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, ...]]:
    """The layers of a cache that each block writes to, by the numbers that it and its parts have.

    Its own number is no layer of its where it is one of another block's parts: blocks of two
    attentions are numbered apart from these.
    """
    inner = [_numbers(list(module.modules())[1:]) for _, module in blocks]
    found = []
    for place, (_, module) in enumerate(blocks):
        others = set().union(*(numbers for n, numbers in enumerate(inner) if n != place))
        mine = inner[place] | (_numbers([module]) - others)
        found.append(tuple(sorted(mine)) or (place,))
    return found


def _numbers(modules: Sequence[nn.Module]) -> set[int]:
    named = (getattr(module, "layer_idx", None) for module in modules)
    return {number for number in named if isinstance(number, int)}


def _bytes_in(name: str, weights: Mapping[str, Weight]) -> int:
    """At least one, where the library loads them all."""
    return 1 + sum(w.nbytes for other, w in weights.items() if other.startswith(f"{name}."))


def _check_apart(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Whether blocks know of each other by their outputs alone.

    Raises:
        UnsupportedModelError: they do not, or it cannot be tried.
    """
    names, name = [name for name, _ in blocks], type(model).__name__
    told = try_crossing(model, names)
    if told is None:
        raise UnsupportedModelError(
            f"{name} cannot be tried out without weights, so nobody knows whether its blocks can "
            "be run by several ranks. Load it without ranks."
        )
    (crossing,) = told
    if crossing is not None:
        where = "outside of it" if crossing.used_in is None else f"in {names[crossing.used_in]!r}"
        raise UnsupportedModelError(
            f"{name} cannot be run by several ranks: what {names[crossing.made_in]!r} makes is "
            f"used {where} ({crossing.operation}), and is not in its output. Load it without "
            "ranks."
        )
