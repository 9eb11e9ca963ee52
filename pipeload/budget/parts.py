"""What a model is cut into: sites and their units, tables, and what is always there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from pipeload.budget.residency import UnitSpec
    from pipeload.weights.layout import Weight
    from pipeload.weights.row_cuts import RowRange


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


class Table(NamedTuple):
    """A weight of which embeddings read rows when they are asked for."""

    weight: Weight
    modules: tuple[nn.Module, ...]
    """The embeddings that share it; a tied head is a site of its own."""
    names: tuple[str, ...]
    """What it is called in each of them."""


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

    @property
    def conversion_bytes(self) -> int:
        """The most that one run of the library's operations takes beside sources and results."""
        groups: dict[str, list[Weight]] = {}
        for spec in self.specs:
            for weight in spec.weights:
                if weight.group is not None:
                    groups.setdefault(weight.group, []).append(weight)
        return max((_transient_bytes(group) for group in groups.values()), default=0)

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
        every = [*self.pinned, *tables, *self.streamed.values()]
        return list({weight.name: weight for weight in every}.values())


def _transient_bytes(group: Sequence[Weight]) -> int:
    """Experts are stacked, then concatenated: two copies, and a third when they are cast first."""
    made = sum(weight.nbytes for weight in group)
    if group[0].unpacking_bytes:
        return group[0].unpacking_bytes
    cast = any(source.dtype != group[0].dtype for source in group[0].sources)
    return made * (3 if cast else 2)
