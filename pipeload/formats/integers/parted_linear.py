"""A Linear that is stored, and comes and goes, in ranges of its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.formats.integers.packed_linear import PackedLinear


class PartedLinear(nn.Linear):
    """A large one: ranges of its rows are modules of their own, which come and go one by one.

    A Linear, so that whoever looks for those finds it.
    """

    def __init__(self, parts: Sequence[PackedLinear], *, bias: bool, dtype: torch.dtype) -> None:
        """`parts`, without biases, in the order of their rows. `dtype`: of the bias."""
        nn.Module.__init__(self)
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self.parts = nn.ModuleList(parts)
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, dtype=dtype))
        else:
            self.register_parameter("bias", None)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]
        """The first part's: for those who ask where, or of which dtype, a Linear is."""
        return self.parts[0].weight  # type: ignore[return-value]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [..., in]; returns [..., out]."""
        made = torch.cat([part(input) for part in self.parts], -1)
        return made if self.bias is None else made + self.bias
