"""Parameters of a streamed model that come from its checkpoint, whatever they are called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import nn

    from pipeload.weights.layout import Weight


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """Parameters by their `id`: adapters move them to modules of other names."""

    own: Mapping[int, Weight]
    """All of them."""
    hidden: Mapping[int, Weight]
    """Those whose values may be on disk, and quantised ones, which may lie in another order."""
    read: Callable[[Weight], torch.Tensor]
    """Makes a tensor with the values of a weight that is `readable`."""

    def hidden_of(self, module: nn.Module) -> list[Weight]:
        """Those of `hidden` that `module` itself has."""
        found = (self.hidden.get(id(p)) for p in module.parameters(recurse=False))
        return [weight for weight in found if weight is not None]

    @staticmethod
    def readable(weight: Weight) -> bool:
        """Whether it can be had alone: not made together with others, and not quantised."""
        return weight.group is None and not weight.guarded
