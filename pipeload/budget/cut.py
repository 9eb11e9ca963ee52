"""Where a model's weights are needed: the modules around whose forward they must be there.

A site is a module that gets its weights before it runs. Mostly that is a whole block, read as one
unit. Finer sites cost a hook per module, and ranges of rows a product per range, so they are taken
only where whole blocks are too large; the head, which is mostly larger than any block, is always
read in ranges of rows, and an embedding table by the rows that are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from pipeload.budget.expert_banks import find_banks
from pipeload.budget.model_parts import ALL_HERE, Parts, Site, Table
from pipeload.budget.output_head import head_in_parts, output_head
from pipeload.budget.residency import UnitSpec, is_tiny
from pipeload.errors import UnsupportedModelError
from pipeload.weights.arena import DTYPES
from pipeload.weights.row_cuts import ROW_STEP, Cut, RowRange, best_cut, whole_cut
from pipeload_hooks import can_split, find_blocks, takes_ids

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pipeload.budget.model_parts import Elsewhere, ExpertsModule
    from pipeload.weights.layout import Weight

_TABLE_BYTES = 1 << 20
CHUNKS = (64 << 20, 32 << 20, 16 << 20, 8 << 20)
"""Sizes of row ranges worth trying, in bytes."""


class NothingToStreamError(UnsupportedModelError):
    """A model has no repeated blocks with weights that lie in its checkpoint."""


class Grain(NamedTuple):
    """How finely blocks and head are cut."""

    modules: bool
    """Whether the modules of a block are units of their own."""
    chunk_bytes: int
    """The most that a range of rows takes."""
    anyhow: bool = False
    """Whether weights are cut even where products of ranges are often to be computed slowly."""


class Touched(NamedTuple):
    """What is known of weights that are used otherwise than by their module's run. By name."""

    outside: frozenset[str] = frozenset()
    """Used while the module that owns them does not run."""
    idle: frozenset[str] = frozenset()
    """Of modules that did not run when it was tried."""
    past_block: frozenset[str] = frozenset()
    """Used while not even the block around them runs: these are always there."""


class Divider:
    """Groups a model's weights by the sites that need them, as finely as asked."""

    def __init__(
        self,
        model: nn.Module,
        weights: Mapping[str, Weight],
        tied: Mapping[str, str],
        *,
        experts: Iterable[ExpertsModule] = (),
        blocks_alone: bool = False,
        beside_bytes: int = 0,
        away: Elsewhere = ALL_HERE,
    ) -> None:
        """`tied` maps names of parameters that share another one's memory to that one's.

        With `blocks_alone` neither a head nor tables are streamed, nor `experts` one by one, which
        are modules of which that is known to do. `beside_bytes` are always there, and in no
        parameter. `away` is what other ranks run.

        Raises:
            NothingToStreamError: the model has no repeated blocks with weights to stream.
        """
        self._model = model
        self._weights = weights
        self._tied_to = tied
        self._beside_bytes = beside_bytes
        self._tied = frozenset(tied) | frozenset(tied.values())
        elsewhere, self._head_rows = away
        self._head = head if (head := output_head(model)) and head[0] not in elsewhere else None
        self._away = {n: w for n, w in weights.items() if _is_inside(n, elsewhere)}
        read = {n: w for n, w in weights.items() if n not in self._away}
        here = [found for found in experts if not _is_inside(found.name, elsewhere)]
        self._banks, self._whole_experts = find_banks(
            model, read, self._tied, here, blocks_alone=blocks_alone
        )
        banked = {weight.name for bank in self._banks for weight in bank.weights}
        self._blocks = []
        for block in find_blocks(model):
            if block.name in elsewhere:
                continue
            if streamed := self._streamed(block.name, block.module, banked):
                self._blocks.append((block, streamed))
        if not self._blocks:
            raise NothingToStreamError(
                f"{type(model).__name__} has no repeated blocks whose weights lie in the "
                "checkpoint, so there is nothing to stream. Load it without pipeload."
            )
        inside = {w.name for _, streamed in self._blocks for w in streamed}
        self._tables = [] if blocks_alone else [*self._find_tables(inside)]
        self._head_weight = None if blocks_alone else self._find_head_weight(inside)
        self._parted = None if blocks_alone else head_in_parts(model)
        if self._parted is not None and self._parted[0] in elsewhere:
            self._parted = None

    def divide(self, grain: Grain, touched: Touched) -> Parts:
        """Cut at `grain`; a block with a touched weight stays whole, and so do head and tables.

        Args:
            grain: how finely.
            touched: weights that are used while the module that owns them does not run.
        """
        cutter = _Cutter(grain)
        together = touched.outside | touched.idle
        whole = self._whole_tables(touched)
        tables = [table for table in self._tables if table.weight.name not in whole]
        not_theirs = touched.past_block.union(table.weight.name for table in tables)
        for block, all_streamed in self._blocks:
            streamed = [w for w in all_streamed if w.name not in not_theirs]
            if len(streamed) < len(all_streamed):
                streamed = _whole_groups(streamed, self._weights)
            if not streamed:
                continue
            if grain.modules and together.isdisjoint(weight.name for weight in streamed):
                mine = {weight.name: weight for weight in streamed}
                cutter.modules(block.name, block.module, mine)
            else:
                cutter.whole(block.name, block.module, streamed)
        if (head := self.head_in_rows(touched)) is not None:
            # No range of the head is to be the reason for the size of the buffers.
            largest = max(sum(w.nbytes for w in spec.weights) for spec in cutter.specs)
            cutter.chunk_bytes = min(grain.chunk_bytes, max(largest, CHUNKS[-1]))
            cutter.rows(*head, self._head_rows)
        if self._parted is not None:
            mine = {weight.name: weight for weight in self._streamed(*self._parted, ())}
            if mine and together.isdisjoint(mine):
                cutter.modules(*self._parted, mine)
        sites, specs = cutter.sites, cutter.specs
        parts = Parts(sites, specs, tables, [], 0)
        away = [w for w in self._away.values() if w.name not in self._tied | touched.past_block]
        away = _whole_groups(away, self._weights)
        chosen = {
            *parts.streamed,
            *(weight.name for weight in (*away, *(t.weight for t in tables))),
        }
        chosen.update(weight.name for bank in self._banks for weight in bank.weights)
        pinned = [w for name, w in self._weights.items() if name not in chosen and w.group is None]
        taken = chosen | {weight.name for weight in pinned}
        others = self._beside_bytes + sum(
            parameter.numel() * parameter.element_size()
            for name, parameter in self._model.named_parameters()
            # a tied one shares the other's memory
            if name not in taken and name not in self._tied
        )
        uncut = frozenset(cutter.uncut)
        found = self._banks, tuple(away), self._whole_experts
        return Parts(sites, specs, tables, pinned, others, uncut, *found)

    def unknown(self) -> Touched:
        """What to take for touched where nothing could be tried: tables but those of token ids."""
        inputs = {id(module) for module in _input_embeddings(self._model)}
        others = (t for t in self._tables if not any(id(m) in inputs for m in t.modules))
        return Touched(idle=frozenset(name for table in others for name in table.names))

    def head_in_rows(self, touched: Touched) -> tuple[str, nn.Linear, Weight] | None:
        """The head and its weight, where ranges of its rows may be read one by one."""
        weight = self._head_weight
        if self._head is None or weight is None:
            return None
        together = weight.name in touched.outside | self._whole_tables(touched)
        return None if together else (*self._head, weight)

    def _whole_tables(self, touched: Touched) -> set[str]:
        """Tables that are in memory: an adapter reads all of one beside what it gives.

        One of a tower that was not tried may be used whole, as positions of a picture are.
        """
        return {
            table.weight.name
            for table in self._tables
            if table.weight.name in touched.outside or touched.idle.issuperset(table.names)
        }

    @property
    def largest_block(self) -> int:
        """Bytes of the weights of the largest block."""
        return max(sum(w.nbytes for w in streamed) for _, streamed in self._blocks)

    def _streamed(self, path: str, module: nn.Module, banked: Collection[str]) -> list[Weight]:
        """Weights of a module that come and go, but for those that are `banked`."""
        names = (f"{path}.{name}" for name, _ in module.named_parameters())
        found = (self._weights.get(name) for name in names if name not in banked)
        streamed = [weight for weight in found if weight and self._streamable(weight)]
        return _whole_groups(streamed, self._weights)

    def _streamable(self, weight: Weight) -> bool:
        # An evicted float is NaN and shows when it is read too early; an integer has no such value.
        # What comes with one is read with it, however small.
        made = weight.guarded and weight.group is not None
        safe = made or (not is_tiny(weight) if weight.guarded else _is_large_float(weight))
        return weight.name not in self._tied and safe

    def _find_tables(self, inside: Collection[str]) -> Iterator[Table]:
        """Weights that embeddings take rows of, and nobody else uses but a head that is split."""
        for weight in self._weights.values():
            if not weight.rows_alone or weight.nbytes < _TABLE_BYTES or not _is_large_float(weight):
                continue
            aliases = [name for name, source in self._tied_to.items() if source == weight.name]
            if weight.name in self._tied_to or not self._weights.keys().isdisjoint(aliases):
                continue
            head = self._head[1] if self._head is not None else None
            owners = {name: self._owner(name) for name in (weight.name, *aliases)}
            users = {name: module for name, module in owners.items() if module is not head}
            modules = tuple(users.values())
            in_block = weight.name in inside
            if weight.name in self._away or (in_block and len(owners) > 1):
                continue
            if modules and all(isinstance(m, nn.Embedding) and takes_ids(m) for m in modules):
                yield Table(weight, modules, tuple(users), in_block)

    def _owner(self, parameter: str) -> nn.Module:
        return self._model.get_submodule(parameter.rpartition(".")[0])

    def _find_head_weight(self, inside: set[str]) -> Weight | None:
        """What the head streams: a weight of its own or that of a table."""
        if self._head is None:
            return None
        name = f"{self._head[0]}.weight"
        weight = self._weights.get(name)
        if name in self._tied:
            tables = {table.weight.name: table.weight for table in self._tables}
            weight = tables.get(self._tied_to.get(name, name))
        if weight is None or weight.group is not None or weight.name in inside:
            return None
        return weight if _is_large_float(weight) else None


def _input_embeddings(model: nn.Module) -> Iterator[object]:
    """Of every model in the tree that says which they are."""
    for module in model.modules():
        get = getattr(module, "get_input_embeddings", None)
        try:
            yield get() if get is not None else None
        except NotImplementedError:  # the library's word for "none"
            continue


class _Cutter:
    """Collects sites and units in the order of the module tree."""

    def __init__(self, grain: Grain) -> None:
        self.sites: list[Site] = []
        self.specs: list[UnitSpec] = []
        self.uncut: set[str] = set()
        """Weights that could not be cut as they should."""
        self.chunk_bytes = grain.chunk_bytes
        """The most that a range of rows takes."""
        self._anyhow = grain.anyhow

    def whole(self, path: str, module: nn.Module, weights: Sequence[Weight]) -> None:
        """A site with one unit."""
        first = len(self.specs)
        self.sites.append(Site(path, module, range(first, first + 1), None))
        self.specs.append(UnitSpec(path, tuple(weights)))

    def modules(self, path: str, module: nn.Module, mine: Mapping[str, Weight]) -> None:
        """Sites for the modules inside a block, for those of its weights that are in `mine`."""
        named = ((f"{path}.{name}", name) for name, _ in module.named_parameters())
        inside = [(mine[full], "." in name) for full, name in named if full in mine]
        weights = [weight for weight, _ in inside]
        if not weights:
            return
        if all(deeper for _, deeper in inside) and _separable(path, weights):
            for name, child in module.named_children():
                self.modules(f"{path}.{name}", child, mine)
        elif len(weights) == 1 and isinstance(module, nn.Linear) and can_split(module):
            self.rows(path, module, weights[0])
        else:
            self.whole(path, module, weights)

    def rows(
        self, path: str, module: nn.Linear, weight: Weight, within: RowRange | None = None
    ) -> None:
        """A site whose units are ranges of rows of about the same size, where that is exact.

        `within`: the rows that are computed here, which are exact; None: all.
        """
        rows = _rows_in(weight, self.chunk_bytes)
        made = weight.group is not None  # by the library, as a whole
        start, stop = within or (0, weight.shape[0])
        uncut = whole_cut(weight, module)._replace(ranges=(RowRange(start, stop),))
        cut: Cut | None = None
        if not made and stop - start > rows:
            least = _rows_in(weight, CHUNKS[-1])
            cut = best_cut(uncut, rows, least, anyhow=self._anyhow)
            if cut is None:
                self.uncut.add(weight.name)
        cut = cut or (None if within is None else uncut)
        if cut is None:
            self.whole(path, module, [weight])
            return
        first = len(self.specs)
        for start, stop in cut.ranges:
            self.specs.append(UnitSpec(f"{path}[{start}:{stop}]", (weight.rows(start, stop),)))
        self.sites.append(Site(path, module, range(first, len(self.specs)), weight, cut.ranges))


def _separable(path: str, weights: Iterable[Weight]) -> bool:
    """Whether no conversion makes weights of two children at once."""
    homes: dict[str, set[str]] = {}
    for weight in weights:
        if weight.group is not None:
            child = weight.name.removeprefix(f"{path}.").split(".")[0]
            homes.setdefault(weight.group, set()).add(child)
    return all(len(children) == 1 for children in homes.values())


def _rows_in(weight: Weight, nbytes: int) -> int:
    rows = nbytes // (weight.nbytes // weight.shape[0])
    return max(2 * ROW_STEP, rows - rows % ROW_STEP)


def _is_inside(name: str, paths: Iterable[str]) -> bool:
    """Whether a module or weight is, or lies in, one of these modules."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def _is_large_float(weight: Weight) -> bool:
    return not is_tiny(weight) and DTYPES[weight.dtype].is_floating_point


def _whole_groups(streamed: Sequence[Weight], everything: Mapping[str, Weight]) -> list[Weight]:
    """Drop conversions that do not stay within the block; the library loads those."""
    names = {weight.name for weight in streamed}
    broken = {w.group for w in everything.values() if w.group is not None and w.name not in names}
    return [weight for weight in streamed if weight.group is None or weight.group not in broken]
