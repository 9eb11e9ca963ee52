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
from transformers.core_model_loading import (
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    Transpose,
)
from transformers.quantizers.base import HfQuantizer

from pipeload.budget.output_head import ADAPTED
from pipeload.weights.arena import DTYPES
from pipeload.weights.cast_rows import CastRows
from pipeload.weights.layout import Slices
from pipeload.weights.placement import CAST_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn
    from transformers.core_model_loading import WeightConverter

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.format import Faster, Unpacking

_PIECE_BYTES = 4 << 20
_MATRIX = 2  # dimensions
_STACKED = 3  # of matrices that were stacked
_FLOATS = {"F32", "F16", "BF16"}
_WIDEST = 4  # bytes of a number in what operations make beside
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
    by_rows: bool = False
    """Whether unpacking makes rows of a result of the same rows of what is stored."""
    faster: Faster | None = None
    """What is tried before the operation: see `Unpacking.faster`."""
    beside_times: int = 2
    """Memory that operations take beside stored tensors and a result, in multiples of it."""
    unpacking_bytes: int = 0
    """What one piece takes beside stored tensors and the result; 0 for what nothing is known of."""

    @property
    def unpacks(self) -> bool:
        """Whether an operation is for quantised weights: those get what is stored, uncast."""
        operations = self.converter.operations if self.converter is not None else []
        return any(getattr(op, "hf_quantizer", None) for op in operations)

    @property
    def own(self) -> Any:
        """An operation of ours, which fills parameters in place; None for the library's."""
        return own_operation(self.converter)

    @property
    def stored_bytes(self) -> int:
        """Of all that it is made of."""
        return sum(entry.nbytes for entry, _ in self.sources)

    @property
    def merges(self) -> bool:
        """Whether there is more than one operation."""
        return self.converter is not None and len(self.converter.operations) > 1

    def slices(self, name: str, shape: tuple[int, ...]) -> Slices | None:
        """Say how slices of a weight of that name and shape can be made one by one; None: not so.

        So it is where operations stack matrices of experts, lay stacks side by side, or change the
        matrices of a stack without looking beyond each.
        """
        converter = self.converter
        if converter is None or len(shape) < _STACKED or len(converter.target_patterns) != 1:
            return self._slices_of_share(name, shape)
        own = [op for op in converter.operations if not hasattr(op, "hf_quantizer")]
        unpacked = len(own) < len(converter.operations)
        beside = self.beside_times * math.prod(shape[1:]) * _WIDEST
        match own:
            case [MergeModulelist(dim=0)] | [MergeModulelist(dim=0), Concatenate(dim=1)]:
                groups = self._by_number(shape[0])
                if groups is None or (not unpacked and not self._side_by_side(groups, shape)):
                    return None
                return Slices(groups, made=unpacked, beside_bytes=beside if unpacked else 0)
            case [Transpose(check_dims=True)] if self._is_as_stored(shape):
                return Slices(made=False)
        stacks = all(entry.shape[:1] == shape[:1] for entry, _ in self.sources)
        stacks = stacks and (self.by_rows or not unpacked)
        if stacks and all(self._keeps_matrices(op, shape) for op in own):
            return Slices(beside_bytes=beside)
        return None

    def cast_rows(self, shape: tuple[int, ...], dtype: str) -> CastRows | None:
        """Say how rows of a matrix are cast one by one; None where nothing is, or not floats."""
        if self.converter is not None or len(shape) != _MATRIX or not all(shape):
            return None
        entry = self.sources[0][0]
        if entry.dtype == dtype or not {entry.dtype, dtype} <= _FLOATS:
            return None
        row_bytes = entry.nbytes // shape[0]
        return CastRows(entry.dtype, row_bytes) if row_bytes <= CAST_CHUNK_BYTES else None

    def _slices_of_share(self, name: str, shape: tuple[int, ...]) -> Slices | None:
        """The same of one of several weights, each of which gets an equal share of the experts."""
        if self.converter is None or len(shape) < _STACKED:
            return None
        targets = self.converter.target_patterns
        places = [place for place, target in enumerate(targets) if name.endswith(target)]
        match self.converter.operations:
            case [ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)] if places:
                groups = self._by_number(shape[0] * len(targets))
                mine = (groups or ())[places[0] * shape[0] :][: shape[0]]
                if mine and self._side_by_side(mine, shape):
                    return Slices(mine, made=False)
        return None

    def _is_as_stored(self, shape: tuple[int, ...]) -> bool:
        """Whether an operation that looks at the shapes has nothing to do."""
        return len(self.sources) == 1 and self.sources[0][0].shape == shape

    def _by_number(self, count: int) -> tuple[tuple[int, ...], ...] | None:
        """Sources of each expert, in the order of their patterns; None if one has more."""
        assert self.converter is not None  # noqa: S101 - nobody asks otherwise
        stacks: dict[str, list[int]] = {p: [] for p in self.converter.source_patterns}
        for index, (_, pattern) in enumerate(self.sources):
            stacks.setdefault(pattern, []).append(index)
        used = [stack for stack in stacks.values() if stack]
        if any(len(stack) != count for stack in used):
            return None
        return tuple(zip(*used, strict=True))

    def _side_by_side(self, groups: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
        """Whether each slice is the bytes of its sources, one behind the other."""
        entries = [[self.sources[index][0] for index in group] for group in groups]
        rows = {tuple(entry.shape[0] for entry in group) for group in entries}
        wide = all(entry.shape[1:] == shape[2:] for group in entries for entry in group)
        return wide and len(rows) == 1 and sum(*rows) == shape[1]

    def _keeps_matrices(self, operation: object, shape: tuple[int, ...]) -> bool:
        """Whether an operation does to each matrix of a stack the same, and nothing else."""
        match operation:
            case Transpose(dim0=first, dim1=second, check_dims=checks):
                # One that looks at the shapes must not take a slice for another.
                same = any(entry.shape == shape for entry, _ in self.sources)
                return {first, second} == {1, 2} and not (checks and same)
            case Interleave(dim=dim) | Concatenate(dim=dim):
                return dim > 0
            case _:
                return False

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
        self.dtype, self.beside_times = made.dtype, unpacking.times
        self.by_rows = unpacking.by_rows
        if unpacking.faster and not self.merges and unpacking.faster.can(made.dtype):
            self.faster, self.beside_times = unpacking.faster, 1
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
        *,
        alone: bool = False,
    ) -> None:
        """Make the weights of stored tensors.

        Args:
            name: of the first one.
            model: whose they are.
            stored: tensors by checkpoint key.
            into: where to, by name.
            alone: whether these are for one slice of the weight: see `Slices`.
        """
        if self.own is not None:
            path = name.rpartition(".")[0]
            owner: Any = None if model is None else _WithoutAdapters(model)
            named = {made.removeprefix(f"{path}."): tensor for made, tensor in into.items()}
            self.own.fill(stored, named, None if owner is None else owner.get_submodule(path))
            return
        if self.pieces == 1 or alone:
            if self._is_filled(stored, into[name]):
                return
            dtype = None if self.unpacks else into[name].dtype
            for made, tensor in self._run(name, model, stored, dtype).items():
                into[made].copy_(tensor)
            return
        for index in range(self.pieces):
            piece = {key: _part(tensor, index, self.pieces) for key, tensor in stored.items()}
            part = _part(into[name], index, self.pieces)
            if not self._is_filled(piece, part):
                part.copy_(self._run(name, model, piece, None)[name])

    def _is_filled(self, stored: Mapping[str, torch.Tensor], out: torch.Tensor) -> bool:
        """Fill it in the faster way, if there is one that can."""
        if self.faster is None:
            return False
        named = {p: stored[entry.name] for entry, p in self.sources if entry.name in stored}
        return self.faster.fill(named, out)

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
            tensor = stored.get(source.name)
            if tensor is None:  # of another slice
                continue
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


def own_operation(converter: Any) -> Any:
    """An operation of ours in what the library has for a weight; None if there is none."""
    operations = getattr(converter, "operations", ())
    return next((operation for operation in operations if hasattr(operation, "fill")), None)


def _pieces(most: int, nbytes: int) -> int:
    """Choose a divisor of `most` that makes pieces of not much less than `_PIECE_BYTES`."""
    wanted = min(most, max(1, nbytes // _PIECE_BYTES))
    return next(count for count in range(wanted, 0, -1) if most % count == 0)


def _part(tensor: torch.Tensor, index: int, count: int) -> torch.Tensor:
    step = tensor.shape[0] // count
    return tensor[index * step : (index + 1) * step]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
