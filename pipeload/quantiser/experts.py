"""Experts of a float checkpoint: which become integers, and how, one after the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload._sizes import counted
from pipeload.checkpoint.writer import Tensor
from pipeload.formats.integers.packed_experts import PackedExperts
from pipeload.hf.expert_modules import experts_apart
from pipeload.quantiser.resumable_shards import Step
from pipeload.quantiser.tensor import check_finite, codes_of, read_weight, statistics_of
from pipeload.weights.arena import DTYPES
from pipeload.weights.layout import Conversion
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.integers.expert_matrices import ExpertShape
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.forms import ExpertsForm
    from pipeload.quantiser.tensor import Reading
    from pipeload.weights.layout import Weight
    from pipeload.weights.placement import Convert

FLOATS = frozenset({"F32", "F16", "BF16"})
"""Codes of dtypes that are quantised."""
_COPIES = 3  # of a matrix that is read as a whole: as it is stored, as it is loaded, turned round


class Experts(NamedTuple):
    """A module whose experts become integers."""

    path: str
    """In the model."""
    shape: ExpertShape
    weights: tuple[Weight, Weight]
    """Of its two matrices."""
    transposed: bool
    """Whether the model has their columns first."""

    @property
    def name(self) -> str:
        """Of what is stored."""
        return f"{self.path}.{PackedExperts.stacked}"

    @property
    def sources(self) -> list[TensorEntry]:
        """The stored tensors that they are made of."""
        return [source for weight in self.weights for source in weight.sources]

    @property
    def held_bytes(self) -> int:
        """What making one takes, beside the rows that are being rounded."""
        largest = max(self.weights, key=lambda weight: weight.nbytes)
        matrix = largest.nbytes // largest.shape[0]
        whole = any(self._is_read_whole(weight) for weight in self.weights)
        return matrix * _COPIES if whole else matrix // 4  # statistics in fp32

    def rows(
        self, index: int, expert: int, reading: Reading, convert: Convert
    ) -> Iterator[torch.Tensor]:
        """Rows of one of the two matrices of an expert, as many at once as `reading` says.

        In memory that the next ones may overwrite.
        """
        weight = self.weights[index]
        sources = weight.sources_of(expert)
        if self._is_read_whole(weight):
            yield from self._rows_of_whole(weight, sources, reading, convert)
            return
        for source in sources:
            yield from read_weight(replace(source, shape=source.shape[-2:]), reading)

    def _is_read_whole(self, weight: Weight) -> bool:
        return self.transposed or (weight.slices is not None and weight.slices.made)

    def _rows_of_whole(
        self, weight: Weight, sources: Sequence[TensorEntry], reading: Reading, convert: Convert
    ) -> Iterator[torch.Tensor]:
        stored = {source.name: read_whole(source, reading.files) for source in sources}
        for source in sources:
            check_finite(stored[source.name], source)
        if weight.slices is not None and weight.slices.made:
            dtype = DTYPES[sources[0].dtype]
            made = {weight.name: torch.empty((1, *weight.shape[1:]), dtype=dtype)}
            convert(Conversion((weight,), (), (), alone=True), stored, made)
            matrix = made[weight.name][0]
        else:
            flat = torch.cat([tensor.flatten() for tensor in stored.values()])
            matrix = flat.view(weight.shape[1:])
        del stored
        if self.transposed:
            matrix = matrix.t().contiguous()
        yield from matrix.split(max(1, reading.items // matrix.shape[1]))


def find(pending: PendingLoad, form: ExpertsForm) -> list[Experts]:
    """Find the modules whose experts become what `form` makes, each by itself.

    All are stored in one dtype: that of the first. Where the library makes something else of the
    same stored tensors, or other code names the parameters, they stay.
    """
    weights = pending.weights()
    tied = pending.model.all_tied_weights_keys or {}
    made = Counter(weight.group for weight in weights.values())
    found: list[Experts] = []
    for one in experts_apart(pending.model, None):
        names = sorted(one.parameters, key=lambda name: name == "down_proj")
        own = (weights.get(f"{one.name}.{name}") for name in names)
        mine = [weight for weight in own if weight is not None and weight.name not in tied]
        dtypes = {source.dtype for weight in mine for source in weight.sources}
        alike = len(dtypes) == 1 and (not found or {found[0].shape.dtype} == dtypes)
        if len(mine) < len(names) or not alike or not dtypes <= FLOATS:
            continue
        shape = form.experts_as(one.module, *dtypes)
        alone = all(weight.group is None or made[weight.group] == 1 for weight in mine)
        if shape is not None and alone and all(weight.sliceable for weight in mine):
            transposed = bool(getattr(one.module, "is_transposed", False))
            found.append(Experts(one.name, shape, (mine[0], mine[1]), transposed))
    return found


def left(model: nn.Module, found: Sequence[Experts], form: ExpertsForm) -> list[str]:
    """Paths of modules that look like those that were found, and stay floats."""
    if not found:
        return []
    paths, dtype = {one.path for one in found}, found[0].shape.dtype
    return [
        path
        for path, module in model.named_modules()
        if path not in paths and form.experts_as(module, dtype) is not None
    ]


def described(found: Sequence[Experts], few_rows: int) -> str:
    """For the model card; `few_rows`: how many had seen too little of the text."""
    count = counted(sum(one.shape.experts for one in found), "expert")
    few = f"; {few_rows} by their weights alone, as little of the text reached them"
    return f"{count} in {counted(len(found), 'layer')}, as the Linears" + few * bool(few_rows)


def step(
    experts: Experts,
    form: ExpertsForm,
    reading: Reading,
    mean_squares: Mapping[str, torch.Tensor],
    convert: Convert,
) -> Step:
    """What is stored of a module: the bytes of one expert after the other.

    Args:
        experts: the module.
        form: what they become.
        reading: of what is stored.
        mean_squares: of the inputs that each expert has had, [experts, columns], by the names of
            their matrices; where one is not there, none are known.
        convert: runs the library's operations.
    """
    shape = experts.shape
    nbytes = shape.experts * shape.nbytes
    tensor = Tensor(experts.name, "U8", (shape.experts, shape.nbytes), nbytes)
    return Step((tensor,), partial(_pieces, experts, form, reading, mean_squares, convert))


def _pieces(
    experts: Experts,
    form: ExpertsForm,
    reading: Reading,
    mean_squares: Mapping[str, torch.Tensor],
    convert: Convert,
) -> Iterator[memoryview]:
    for expert in range(experts.shape.experts):
        for index, place in enumerate(experts.shape.places):
            known = mean_squares.get(experts.weights[index].name)
            how = form.integers(None if known is None else known[expert])
            extras: list[torch.Tensor] = []
            codes = codes_of(experts.rows(index, expert, reading, convert), how, extras)
            yield from _padded(codes, place.told - place.start)
            yield from _padded([statistics_of(extras, how)], place.stop - place.told)


def _padded(pieces: Iterable[memoryview], nbytes: int) -> Iterator[memoryview]:
    left = nbytes
    for piece in pieces:
        yield piece
        left -= piece.nbytes
    yield memoryview(bytes(left))
