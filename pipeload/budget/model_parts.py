"""What a model is cut into: sites and their units, tables, and what is always there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pipeload.system.pages import ceil_page
from pipeload.weights.expert_bank import (
    READERS,
    block_bytes,
    held_bytes,
    making_bytes,
    scratch_bytes,
    slice_bytes,
)
from pipeload_hooks import IDS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import nn

    from pipeload.budget.residency import UnitSpec
    from pipeload.weights.layout import Weight
    from pipeload.weights.row_cuts import RowRange


# Enough for the disk to be busy while one is computed with; matrices of 100 MB are by themselves.
_MOST_AHEAD = 3
_AHEAD_BYTES = 24 << 20


class Site(NamedTuple):
    """A module, and the units that it needs while it runs."""

    name: str
    """Dotted path from the model."""
    module: nn.Module
    units: range
    """One unit, or one for each range of rows."""
    whole: Weight | None
    """The weight whose ranges of rows the units are, None for a site with a unit of its own."""
    ranges: tuple[RowRange, ...] = ()
    """The rows of each of its units, if they are ranges of rows."""

    @property
    def rows_here(self) -> int:
        """How many rows all of these are: fewer than the weight has where ranks share them."""
        return sum(stop - start for start, stop in self.ranges)


class Elsewhere(NamedTuple):
    """What of a model other ranks run. Its weights are not read here."""

    modules: Collection[str] = ()
    """Dotted paths from the model."""
    head_rows: RowRange | None = None
    """The rows of the head that this rank computes; None: no head is shared by rows."""


ALL_HERE = Elsewhere()


class Table(NamedTuple):
    """A weight of which embeddings read rows when they are asked for."""

    weight: Weight
    modules: tuple[nn.Module, ...]
    """The embeddings that share it; a tied head is a site of its own."""
    names: tuple[str, ...]
    """What it is called in each of them."""
    in_block: bool = False
    """Whether it lies in a block, as the experts of Doge do: its rows go at once then, and a call
    may ask for any of them."""


class ExpertsModule(NamedTuple):
    """A module that holds a matrix of each expert: in parameters of three dimensions, mostly."""

    name: str
    """Dotted path from the model."""
    module: nn.Module
    parameters: tuple[str, ...]
    """Their names in the module."""
    sweeps: bool
    """Whether all experts multiply with one parameter before any does with the next."""
    routed: int | None
    """Experts that one row of input is sent to; None if nobody says."""
    number: int = 0
    """How many experts lie one below the other in parameters of two dimensions; 0: in three."""
    told_by: str = IDS
    """What tells it which experts a call is sent to: see `attach_experts`."""
    own: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters of each expert, where each has its own; () where they share them."""


class Bank(NamedTuple):
    """Experts that are read one by one, as a router chooses them."""

    held_by: ExpertsModule
    weights: tuple[Weight, ...]

    @property
    def experts(self) -> int:
        """How many there are; some that compute nothing may have a part in one parameter alone."""
        return len(self.held_by.own) or min(weight.slice_count for weight in self.weights)

    @property
    def of_each(self) -> Sequence[Sequence[Weight]]:
        """What each expert has a slice of, or all of; once, where that is the same of all."""
        found = {weight.name: weight for weight in self.weights}
        start = self.held_by.name
        own = [[found[f"{start}.{name}"] for name in names] for names in self.held_by.own]
        return own or [self.weights]

    @property
    def expert_bytes(self) -> int:
        """The most that one expert takes in memory."""
        return max(sum(map(held_bytes, weights)) for weights in self.of_each)

    @property
    def slice_bytes(self) -> int:
        """The most that one expert's values are."""
        return max(sum(map(slice_bytes, weights)) for weights in self.of_each)


@dataclass(frozen=True, slots=True)
class Parts:
    """Which weights are streamed and where, which are read by rows, which are always there."""

    sites: list[Site]
    specs: list[UnitSpec]
    tables: list[Table]
    pinned: list[Weight]
    others_bytes: int
    """Bytes of the parameters that the library loads or initialises itself, and beside them."""
    uncut: frozenset[str] = frozenset()
    """Weights that are whole because ranges of their rows would not give the same bits."""
    banks: tuple[Bank, ...] = ()
    """Experts that are read as they are routed to, in the order of the model."""
    away: tuple[Weight, ...] = ()
    """Those of modules that another rank runs: never read here."""
    whole_experts: tuple[str, ...] = ()
    """Why some experts are read whole, with their block; none if all are read one by one."""

    @property
    def experts_bytes(self) -> int:
        """What all experts of all banks take in memory."""
        return sum(bank.experts * bank.expert_bytes for bank in self.banks)

    @property
    def passing_bytes(self) -> int:
        """What is read and goes in the midst of a pass: experts, and rows of tables in blocks."""
        rows = (table.weight.nbytes for table in self.tables if table.in_block)
        return self.expert_window_bytes + max(rows, default=0)

    @property
    def expert_window_bytes(self) -> int:
        """What experts that do not stay pass through, and the threads that read them."""
        if not self.banks:
            return 0
        weights = [weight for bank in self.banks for weight in bank.weights]
        working = READERS * ceil_page(scratch_bytes(weights)) + making_bytes(weights)
        working += block_bytes(sum(weight.nbytes for weight in weights))
        return window_matrices(self.banks) * _largest_matrix(self.banks) + working

    @property
    def conversion_bytes(self) -> int:
        """The most that one run of the library's operations takes beside sources and results."""
        groups: dict[str, list[Weight]] = {}
        for spec in self.specs:
            for weight in spec.weights:
                if weight.group is not None:
                    groups.setdefault(weight.group, []).append(weight)
        return max((transient_bytes(group) for group in groups.values()), default=0)

    @property
    def needs_scratch(self) -> bool:
        """Whether any weight is cast while it is read."""
        streamed = (weight for spec in self.specs for weight in spec.weights)
        return any(w.group is None and not w.raw for w in (*self.pinned, *streamed))

    @property
    def streamed(self) -> dict[str, Weight]:
        """Weights that may be streamed, whole ones, by name."""
        found: dict[str, Weight] = {}
        for site in self.sites:
            if site.whole is not None:
                found[site.whole.name] = site.whole
            else:
                for unit in site.units:
                    found.update((weight.name, weight) for weight in self.specs[unit].weights)
        return found

    @property
    def weights(self) -> list[Weight]:
        """All that are not left to the library, each once."""
        tables = (table.weight for table in self.tables)
        experts = (weight for bank in self.banks for weight in bank.weights)
        every = [*self.pinned, *tables, *self.streamed.values(), *experts, *self.away]
        return list({weight.name: weight for weight in every}.values())


def window_matrices(banks: Sequence[Bank]) -> int:
    """How many matrices of experts may be on their way at once: one in use, others being read."""
    # A loop may hold all of one expert.
    together = max(len(weights) for bank in banks for weights in bank.of_each)
    return max(together, 1 + min(_MOST_AHEAD, max(1, _AHEAD_BYTES // _largest_matrix(banks))))


def _largest_matrix(banks: Sequence[Bank]) -> int:
    return max(held_bytes(weight) for bank in banks for weight in bank.weights)


def transient_bytes(group: Sequence[Weight]) -> int:
    """Experts are stacked, then concatenated: two copies, and a third when they are cast first."""
    made = sum(weight.nbytes for weight in group)
    if group[0].unpacking_bytes:
        return group[0].unpacking_bytes
    cast = any(source.dtype != group[0].dtype for source in group[0].sources)
    return made * (3 if cast else 2)
