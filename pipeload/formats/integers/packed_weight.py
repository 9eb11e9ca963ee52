"""Weights of our own quantised Linears and experts: what is stored of them, how they are read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pipeload.errors import CheckpointError
from pipeload.formats.integers.expert_matrices import ExpertProducts, rounds_inputs
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import Reordered
from pipeload.formats.integers.packed_linear import INT8_ALIGNMENT
from pipeload.formats.repack import AS_IT_IS, Repack
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch
    from torch import nn

    from pipeload.formats.format import Held, Shown, Stored
    from pipeload.formats.integers.packed_experts import PackedExperts
    from pipeload.formats.integers.packed_linear import PackedLinear
    from pipeload.weights.layout import Weight


class IntegerWeight:
    """A `PackedWeight`. Its module refuses to compute while it is evicted."""

    couples_rows = False

    def __init__(self, path: str, module: PackedLinear, stored: Stored) -> None:
        """Check what the checkpoint has for the module at `path`.

        Raises:
            CheckpointError: weight or statistics are missing, or of another shape or dtype.
        """
        self._module = module
        self._name = f"{path}.weight"
        self._beside = [f"{path}.{module.statistics}"]
        if isinstance(module, Int4Linear) and module.columns is not None:
            self._beside.append(f"{path}.columns")
        plain = stored.plain(self._name)
        for name, found in (
            (self._name, plain),
            *((name, stored.plain(name)) for name in self._beside),
        ):
            if found is None:
                raise unusable(name, module, stored)
        assert plain is not None  # noqa: S101 - see above
        source = plain.sources[0]
        if plain.group is not None:  # made of others' integers, in the right order
            self._weight = replace(plain, guarded=True)
            return
        if source.dtype != plain.dtype:
            raise unusable(self._name, module, stored)
        repack: Repack | None = None
        if isinstance(module, Int4Linear) and module.order != module.computed_order:
            repack = Reordered(module.order, module.computed_order)
        elif isinstance(module, Int8Linear):
            moved = source.start % INT8_ALIGNMENT and not module.rounds_inputs
            repack = AS_IT_IS if moved else None
        self._weight = replace(plain, guarded=True, repacked=repack)

    @property
    def weight(self) -> Weight:
        """What is streamed of it. Statistics are parameters like any other."""
        return self._weight

    @property
    def counts(self) -> Mapping[str, int]:
        """As many numbers as the Linear had; what goes with it stands for none."""
        count = self._module.out_features * self._module.in_features
        return {self._name: count, **dict.fromkeys(self._beside, 0)}

    def statistics_bytes(self, _takes: Callable[[int], int]) -> int:
        """Count nothing: statistics are parameters."""
        return 0

    def held_by_products(self, _dtype: torch.dtype) -> Iterable[Held]:
        """What products take."""
        return [self._module.sizes]

    def show(self) -> Shown | None:
        """Build nothing: its module shows the parameter."""
        return None

    def leave_to_streaming(self) -> None:
        """Note the order in which it is read."""
        if isinstance(self._module, Int4Linear):
            self._module.order = self._module.computed_order


class ExpertsWeight:
    """A `PackedWeight`: all experts of a module, a row each. It refuses to compute without them."""

    couples_rows = False

    def __init__(self, path: str, module: PackedExperts, stored: Stored) -> None:
        """Check what the checkpoint has for the module at `path`.

        Raises:
            CheckpointError: the experts are missing, or of another shape or dtype.
        """
        self._module, self._name = module, f"{path}.{module.stacked}"
        plain = stored.plain(self._name)
        if plain is None or not plain.raw:
            raise unusable(self._name, module, stored)
        self._weight = replace(plain, guarded=True)

    @property
    def weight(self) -> Weight:
        """What is streamed of it."""
        return self._weight

    @property
    def counts(self) -> Mapping[str, int]:
        """As many numbers as the experts had."""
        return {self._name: self._module.shape.numbers}

    def statistics_bytes(self, _takes: Callable[[int], int]) -> int:
        """Count nothing: they lie beside the codes."""
        return 0

    def held_by_products(self, dtype: torch.dtype) -> Iterable[Held]:
        """What products take."""
        shape, begins = self._module.shape, self._weight.sources[0].start
        rounded = rounds_inputs(shape.bits, exact=self._module.exact_inputs)
        copies = shape.bits == 8 and not rounded and bool(begins % INT8_ALIGNMENT)
        return [ExpertProducts(shape, dtype, rounded, copies)]

    def show(self) -> Shown | None:
        """Build nothing: its module shows the parameter."""
        return None

    def leave_to_streaming(self) -> None:
        """Note nothing: there is one order."""


def unusable(name: str, module: nn.Module, stored: Stored) -> CheckpointError:
    """The error for a tensor that is missing, or of another shape or dtype than its module's."""
    parameter = module.get_parameter(name.rpartition(".")[2])
    entry = next(iter(stored.parts(name).values()), None)
    if entry is None:
        what = f"is not in {stored.folder!r}"
    else:
        what = f"is {list(entry.shape)} of {entry.dtype} in {str(entry.file)!r}"
    wanted = f"{list(parameter.shape)} of {DTYPE_CODES[parameter.dtype]}"
    return CheckpointError(
        f"{name!r} of a quantised module {what}, wanted {wanted}. Download the checkpoint, "
        "or quantise the model, again."
    )
