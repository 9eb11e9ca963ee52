"""A disk made of numbers, for driving a `Prefetcher` without files or a model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeload._arena import Arena, Region
from pipeload._checkpoint import TensorEntry
from pipeload._home import Home
from pipeload._layout import Conversion, Layout, Weight, lay_out
from pipeload._placement import Placement
from pipeload._plan import UnitPlan
from pipeload._prefetcher import Prefetcher
from pipeload._unit import Unit
from pipeload.errors import ReadError
from tests.streaming import WAIT_SECONDS, finish_messages

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload._reader import FileSet

STREAMED, RESIDENT = Path("streamed"), Path("resident")
UNIT_BYTES = 8192


class FakeFiles:
    """Every byte of unit `n` is `n + 1`. It records reads, can hold them up, and can fail."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        """Units whose streamed part was read, in the order in which the reads began."""
        self.resident_reads: list[int] = []
        self.failing: set[int] = set()
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
    conversion: Conversion, stored: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor]:
    """The same values; a unit whose number is 13 cannot be converted."""
    (source,) = stored.values()
    if source[0] == 14:
        raise ValueError("thirteen")
    return {conversion.weights[0].name: source}


class Rig:
    """A prefetcher over fake files. `kinds`: Streamed, Resident, Both or Converted, each unit."""

    def __init__(self, kinds: str, *, slots: int = 2, readers: int = 2) -> None:
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

            units.append(Unit(plan, Home(make, resident)))
        regions = [arena.take(slot_bytes) for _ in range(slots)]
        scratch: list[Region | None] = [None] * readers
        self.prefetcher = Prefetcher(
            units,
            slots=regions,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=1 << 20,
        )

    @property
    def dispatcher(self) -> Any:
        return self.prefetcher._dispatcher

    def rest(self) -> None:
        """Return once every read has ended and nothing more is begun."""
        while True:
            finish_messages(self.prefetcher)
            if not self.dispatcher._loading:
                return

    def check_values(self, index: int) -> None:
        """What a block would compute with is its own, all of it."""
        unit = self.prefetcher.units[index]
        if unit.plan.resident:
            assert set(unit.home.views[f"resident.{index}"].tolist()) == {index + 1}
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
