"""Private parts of transformers: how a weight is made of stored tensors, by the library's rules.

Seen in 5.24.0, tried on 5.17.0 as well. Used by `key_matching` and `pending_load`.

[Note: unpacking piece by piece] Where a conversion does nothing but unpack one quantised weight,
each row of the result (or each expert) comes of the same rows of the stored tensors. So it runs on
a few rows at a time: the library's intermediate results, in fp32 and in integers, take several
times the weight.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist
from transformers.quantizers.base import HfQuantizer

from pipeload.budget.cut import ADAPTED
from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers.core_model_loading import WeightConverter

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import Unpacking

_PIECE_BYTES = 4 << 20
_STACKED = 3  # dimensions of matrices that were stacked
# Until 5.20 or so, what is stored as a float under the name that it has in the model.
_CASTS_FIRST = not hasattr(HfQuantizer, "get_new_dtype")


@dataclass(slots=True)
class Recipe:
    """How one or more weights are made: the library's converter, or None for a plain rename."""

    converter: WeightConverter | None
    sources: list[tuple[TensorEntry, str]] = field(default_factory=list)
    """Stored tensors with the converter pattern that each matched."""
    dtype: torch.dtype | None = None
    """What it is in, where the operations decide that; else it is cast as the model says."""
    pieces: int = 1
    """See [Note: unpacking piece by piece]."""
    unpacking_bytes: int = 0
    """What one piece takes beside stored tensors and the result; 0 for what nothing is known of."""

    @property
    def unpacks(self) -> bool:
        """Whether an operation is for quantised weights: those get what is stored, uncast."""
        operations = self.converter.operations if self.converter is not None else []
        return any(getattr(op, "hf_quantizer", None) for op in operations)

    @property
    def merges(self) -> bool:
        """Whether there is more than one operation."""
        return self.converter is not None and len(self.converter.operations) > 1

    def slice_sources(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Say which sources are each slice of a weight of that shape: see `Weight.slice_sources`.

        Empty where the operations do anything but stack them, and lay stacks side by side.
        """
        if self.converter is None or self.dtype is not None or len(shape) < _STACKED:
            return ()
        patterns: list[str] = [*dict.fromkeys(self.converter.source_patterns)]
        match self.converter.operations:
            case [MergeModulelist(dim=0)] if len(patterns) == 1:
                pass
            case [MergeModulelist(dim=0), Concatenate(dim=1)]:
                pass
            case _:
                return ()
        if len(self.converter.target_patterns) != 1:
            return ()
        stacks = [[i for i, (_, own) in enumerate(self.sources) if own == p] for p in patterns]
        if any(len(stack) != shape[0] for stack in stacks):
            return ()
        rows = sum(self.sources[stack[0]][0].shape[0] for stack in stacks)
        fits = all(
            self.sources[i][0].shape == (self.sources[stack[0]][0].shape[0], *shape[2:])
            for stack in stacks
            for i in stack
        )
        return tuple(zip(*stacks, strict=True)) if fits and rows == shape[1] else ()

    def settle(self, name: str, model: nn.Module, unpacking: Unpacking) -> None:
        """Find out what a conversion for quantised weights makes; a plain one if it does nothing.

        Args:
            name: of the weight in the model.
            model: on the meta device, or any other: no values are looked at.
            unpacking: how the checkpoint is quantised.
        """
        if not self.unpacks or any(entry.dtype not in DTYPES for entry, _ in self.sources):
            return
        stored = {
            entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            for entry, _ in self.sources
        }
        made = self._run(name, model, stored, None).get(name)
        if made is None:
            return
        self.dtype = made.dtype
        entry = self.sources[0][0]
        if len(self.sources) == 1 and tuple(made.shape) == tuple(entry.shape):
            # It came unquantised, beside others that are.
            self.converter = None
            if _CASTS_FIRST and entry.name == name and made.is_floating_point():
                self.dtype = None
            return
        if not self.merges:
            nbytes = made.numel() * made.element_size()
            if unpacking.by_rows and made.ndim:
                rows = [entry.shape[0] if entry.shape else 1 for entry, _ in self.sources]
                self.pieces = _pieces(math.gcd(made.shape[0], *rows), nbytes)
            self.unpacking_bytes = unpacking.times * (nbytes // self.pieces)

    def fill(
        self,
        name: str,
        model: nn.Module | None,
        stored: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
    ) -> None:
        """Make the weights of stored tensors.

        Args:
            name: of the first one.
            model: whose they are.
            stored: tensors by checkpoint key.
            into: where to, by name.
        """
        if self.pieces == 1:
            dtype = None if self.unpacks else into[name].dtype
            for made, tensor in self._run(name, model, stored, dtype).items():
                into[made].copy_(tensor)
            return
        for index in range(self.pieces):
            piece = {key: _part(tensor, index, self.pieces) for key, tensor in stored.items()}
            made_piece = self._run(name, model, piece, None)[name]
            _part(into[name], index, self.pieces).copy_(made_piece)

    def _run(
        self,
        name: str,
        model: nn.Module | None,
        stored: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None,
    ) -> dict[str, torch.Tensor]:
        assert self.converter is not None  # noqa: S101 - a plain rename has nothing to run
        # A copy, as it collects tensors; not of the quantizer, which is no small thing.
        quantizers = [getattr(op, "hf_quantizer", None) for op in self.converter.operations]
        operation = deepcopy(self.converter, {id(q): q for q in quantizers if q is not None})
        for source, pattern in self.sources:
            tensor = stored[source.name]
            # The same order as the library's: cast what was read, then convert.
            cast: Any = partial(tensor.to, dtype) if dtype is not None else partial(_same, tensor)
            operation.add_tensor(name, source.name, pattern, cast)
        config = getattr(model, "config", None)
        owner: Any = _WithoutAdapters(model) if self.unpacks and model is not None else model
        with torch.no_grad():
            made = operation.convert(name, model=owner, config=config)
        values = {key: v[0] if isinstance(v, list) else v for key, v in made.items()}
        return {key: tensor.detach() for key, tensor in values.items()}


class _WithoutAdapters:
    """A model whose modules are found where they were before an adapter took their place."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def get_submodule(self, path: str) -> Any:
        """Find the library's own module."""
        module: Any = self._model.get_submodule(path)
        while (name := next((a for a in ADAPTED if hasattr(module, a)), None)) is not None:
            module = getattr(module, name)
        return module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _pieces(most: int, nbytes: int) -> int:
    """Choose a divisor of `most` that makes pieces of not much less than `_PIECE_BYTES`."""
    wanted = min(most, max(1, nbytes // _PIECE_BYTES))
    return next(count for count in range(wanted, 0, -1) if most % count == 0)


def _part(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    step = tensor.shape[0] // count
    return tensor[index * step : (index + 1) * step]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
