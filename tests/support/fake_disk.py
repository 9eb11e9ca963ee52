"""A disk made of numbers, for driving a `Prefetcher` without files or a model."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from pipeload.budget.plan import UnitPlan
from pipeload.budget.residency import Residency, UnitSpec
from pipeload.checkpoint.headers import TensorEntry
from pipeload.checkpoint.hung_reads import Stalls
from pipeload.errors import ReadError
from pipeload.prefetch.prefetcher import Prefetcher
from pipeload.prefetch.unit import Unit, UnitState
from pipeload.weights.arena import Arena, Region
from pipeload.weights.kept_pieces import KeptPieces
from pipeload.weights.layout import Conversion, Layout, Weight, lay_out
from pipeload.weights.placement import Placement, make_scratch
from tests.support.examples import examples
from tests.support.streaming import WAIT_SECONDS, finish_messages

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hypothesis.stateful import RuleBasedStateMachine

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.prefetch.read_order import Order

STREAMED, RESIDENT = Path("streamed"), Path("resident")
UNIT_BYTES = 8192


class FakeFiles:
    """Every byte of unit `n` is `n + 1`. It records reads, can hold them up, and can fail."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        """Units whose streamed part was read, in the order in which the reads began."""
        self.resident_reads: list[int] = []
        self.failing: set[int] = set()
        self.stalls = Stalls(None)
        self.opened = threading.Event()
        self.opened.set()
        self._began = threading.Condition()

    def read_pages(self, path: Path, first: int, stop: int, into: memoryview) -> int:
        unit = first // UNIT_BYTES
        with self._began:
            (self.reads if path == STREAMED else self.resident_reads).append(unit)
            self._began.notify_all()
        assert self.opened.wait(WAIT_SECONDS)
        if unit in self.failing:
            raise ReadError(f"reading {str(path)!r} failed")
        into[:] = bytes([unit + 1]) * len(into)
        return stop - first

    def wait_for_read(self, unit: int, times: int = 1) -> None:
        """Return once the streamed part of `unit` has begun to be read that often."""
        with self._began:
            assert self._began.wait_for(lambda: self.reads.count(unit) >= times, WAIT_SECONDS)

    def close(self) -> None:
        """Nothing is open."""


def weight(unit: int, path: Path, *, group: str | None = None) -> Weight:
    name = f"{path}.{unit}"
    entry = TensorEntry(name, path, "U8", (UNIT_BYTES,), unit * UNIT_BYTES, (unit + 1) * UNIT_BYTES)
    return Weight(name, "U8", (UNIT_BYTES,), UNIT_BYTES, (entry,), group)


def convert(
    conversion: Conversion, stored: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]
) -> None:
    """The same values; a unit whose number is 13 cannot be converted."""
    (source,) = stored.values()
    if source[0] == 14:
        raise ValueError("thirteen")
    into[conversion.weights[0].name].copy_(source)


class AnyRig:
    """A prefetcher over fake files, and what every test asks of one."""

    prefetcher: Prefetcher

    @property
    def dispatcher(self) -> Any:
        return self.prefetcher._dispatcher

    def rest(self) -> None:
        """Return once every read has ended and nothing more is begun."""
        while True:
            finish_messages(self.prefetcher)
            if not self.dispatcher._loading:
                return


class Rig(AnyRig):
    """A prefetcher over fake files. `kinds`: Streamed, Resident, Both or Converted, each unit."""

    def __init__(
        self, kinds: str, *, slots: int = 2, readers: int = 2, order: Order | None = None
    ) -> None:
        self.kinds = kinds
        self.files = FakeFiles()
        files = cast("FileSet", self.files)
        slot_bytes = 2 * UNIT_BYTES
        arena = Arena((len(kinds) + 2 * slots) * UNIT_BYTES, device=torch.device("cpu"), huge=False)
        units = []
        for index, kind in enumerate(kinds):
            kept = [weight(index, RESIDENT)] if kind in "RB" else []
            passing = [weight(index, STREAMED)] if kind in "SB" else []
            if kind == "C":
                passing = [weight(index, STREAMED, group="g")]
            resident = (lay_out(kept),) if kept else ()
            plan = UnitPlan(f"block.{index}", resident, lay_out(passing))

            def make(layout: Layout) -> Placement:
                return Placement(layout, arena.take(layout.nbytes), files, convert)

            units.append(Unit(plan, KeptPieces(make, resident)))
        regions = [arena.take(slot_bytes) for _ in range(slots)]
        scratch: list[Region | None] = [None] * readers
        self.prefetcher = Prefetcher(
            units,
            slots=regions,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=1 << 20,
            order=order,
        )

    def check_values(self, index: int) -> None:
        """What a block would compute with is its own, all of it."""
        unit = self.prefetcher.units[index]
        if unit.plan.resident:
            assert set(unit.kept.views[f"resident.{index}"].tolist()) == {index + 1}
        if unit.streams:
            assert unit.slot is not None
            view = unit.slots[unit.slot].views[f"streamed.{index}"]
            assert set(view.tolist()) == {index + 1}

    def run(self, *order: int) -> None:
        """Blocks that run one after the other."""
        for index in order:
            self.prefetcher.acquire(index)
            self.check_values(index)
            self.prefetcher.release(index)


ROW_BYTES = 512
PIECES = (1, 2, 3)
"""Blocks of `UNIT_BYTES` that the pieces of a `PieceRig` unit take."""


class PieceFiles(FakeFiles):
    """Every piece of every unit has a byte of its own; `failing` are units."""

    def read_pages(self, path: Path, first: int, stop: int, into: memoryview) -> int:
        blocks = range(first // UNIT_BYTES, -(-stop // UNIT_BYTES))
        with self._began:
            self.reads.append(blocks[0] // sum(PIECES))
            self._began.notify_all()
        assert self.opened.wait(WAIT_SECONDS)
        for block in blocks:
            start = max(block * UNIT_BYTES, first)
            end = min((block + 1) * UNIT_BYTES, stop)
            into[start - first : end - first] = bytes([_value(block)]) * (end - start)
            if block // sum(PIECES) in self.failing:  # after some of it has come
                raise ReadError(f"reading {str(path)!r} failed")
        return stop - first


def _value(block: int) -> int:
    unit, within = divmod(block, sum(PIECES))
    return unit * len(PIECES) + (within > 0) + (within > 2) + 1


class Doubled:
    """Makes two bytes of each that is stored, some rows at a time. A `Repacking`."""

    unpacks: ClassVar[bool] = True
    quick: ClassVar[bool] = True

    def steps(self, rows: int, _row_bytes: int) -> Iterator[tuple[int, int]]:
        return ((start, min(start + 3, rows)) for start in range(0, rows, 3))

    def part(self, start: int, stop: int) -> tuple[range, Doubled]:
        return range(start, stop), self

    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        out.view(*stored.shape, 2).copy_(stored[..., None])


class PieceRig(AnyRig):
    """A prefetcher over units of several pieces, split by a budget that may change.

    If `packed`, they are unpacked, and may stay as they are stored.
    """

    def __init__(self, units: int, *, readers: int = 2, packed: bool = False) -> None:
        self.files = PieceFiles()
        files = cast("FileSet", self.files)
        specs = []
        for unit in range(units):
            weights, block = [], unit * sum(PIECES)
            for piece, blocks in enumerate(PIECES):
                start, nbytes = block * UNIT_BYTES, blocks * UNIT_BYTES
                name = f"{unit}.{piece}"
                shape, ways = (nbytes // ROW_BYTES, ROW_BYTES), 1 + packed
                entry = TensorEntry(name, STREAMED, "U8", shape, start, start + nbytes)
                made = Weight(name, "U8", (shape[0], ways * shape[1]), ways * nbytes, (entry,))
                weights.append(replace(made, repacked=Doubled()) if packed else made)
                block += blocks
            specs.append(UnitSpec(f"block.{unit}", tuple(weights)))
        self.residency = Residency(specs, slots=2, keeps_stored=packed)
        self.budget = self.residency.smallest
        plans, _ = self._split()
        cpu = torch.device("cpu")

        def make(layout: Layout) -> Placement:
            region = Arena(layout.nbytes, device=cpu, huge=False).take(layout.nbytes)
            return Placement(layout, region, files, convert)

        largest = max(lay_out(spec.weights).nbytes for spec in specs)
        arena = Arena(2 * largest, device=cpu, huge=False)
        self.regions = [arena.take(largest) for _ in range(2)]
        self.prefetcher = Prefetcher(
            [Unit(plan, KeptPieces(make, plan.resident, plan.stored)) for plan in plans],
            slots=self.regions,
            files=files,
            convert=convert,
            scratch=[*make_scratch(readers)],
            chunk_bytes=1 << 20,
        )
        self.plans = plans

    def _split(self) -> tuple[tuple[UnitPlan, ...], int]:
        choice = self.residency.choose(self.budget)
        assert choice is not None
        plans = self.residency.plans(choice)
        return plans, max(plan.streamed.nbytes for plan in plans)

    def resplit(self, budget: int) -> None:
        """Keep and stream what `budget` buys."""
        self.budget = budget
        self.plans, slot_bytes = self._split()
        self.prefetcher.resplit(self.plans, slot_bytes)

    def check_values(self, index: int) -> None:
        """Each piece is there once, with its own bytes."""
        unit = self.prefetcher.units[index]
        passing: Mapping[str, torch.Tensor] = {}
        if unit.streams:
            assert unit.slot is not None
            passing = unit.slots[unit.slot].views
        assert not set(passing) & set(unit.kept.views)
        views = {**unit.kept.views, **passing}
        assert set(views) == {f"{index}.{piece}" for piece in range(len(PIECES))}
        for name, view in views.items():
            piece = int(name.split(".")[1])
            assert view.unique().tolist() == [index * len(PIECES) + piece + 1]

    def run(self, *order: int) -> None:
        """Blocks that run one after the other."""
        for index in order:
            self.prefetcher.acquire(index)
            self.check_values(index)
            self.prefetcher.release(index)


def in_use(prefetcher: Prefetcher, index: int) -> bool:
    """Whether the model's thread has taken that unit, or the dispatcher knows it to be in use."""
    unit = prefetcher.units[index]
    return unit.state is UnitState.IN_USE or (prefetcher._taken == index and unit.ready)


def run_machine(machine: type[RuleBasedStateMachine], count: int) -> None:
    """Have hypothesis try that many orders of a machine's events."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(count),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
