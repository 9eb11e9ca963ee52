"""The process's memory, as weights are planned for it when the model computes on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pipeload.budget import limit_errors
from pipeload.budget.make_plan import Costs
from pipeload.budget.reserve import limit_for, page_table_bytes
from pipeload.weights.arena import HUGE_PAGE
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import scratch_bytes
from pipeload.weights.whole_shape import WINDOW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.device_in_plan import DeviceShare
    from pipeload.budget.make_plan import CostedCut
    from pipeload.budget.measured_host import Measured
    from pipeload.budget.model_parts import Parts, Table
    from pipeload.budget.plan import UnitPlan
    from pipeload.budget.plan_options import Options

TABLE_KEEP_BYTES = 4 << 20
"""How much of an embedding table stays once its rows were read."""


def kept_bytes(table: Table) -> int:
    """How much of a table may stay while no row is in use. In bytes."""
    return 0 if table.in_block else TABLE_KEEP_BYTES


class HostMemory:
    """A `Memory`: all of the process. Sizes in bytes."""

    takes = None
    keeps_stored = True

    def __init__(self, measured: Measured, options: Options, reserve_bytes: int) -> None:
        """`reserve_bytes`: what is kept free for passes, and for what the process takes on."""
        self._measured, self._options = measured, options
        self.limit = options.memory_limit
        self.floor_bytes = measured.floor_bytes
        self.reserve_bytes = reserve_bytes
        self.may_map = options.may_map and measured.maps_files

    def costs(self, parts: Parts, readers: int) -> Costs:
        """What a model that is cut like this takes, whatever is streamed."""
        scratch = scratch_bytes(readers) if parts.needs_scratch else 0
        tables = sum(min(table.weight.nbytes, kept_bytes(table)) for table in parts.tables)
        # What such a table shows where nothing was read: see `NanBlock`.
        shown = (min(HUGE_PAGE, table.weight.nbytes) for table in parts.tables if table.in_block)
        tables += sum(shown)
        pinned = lay_out(parts.pinned).nbytes + tables + parts.others_bytes
        ranges = (parts.specs[i] for site in parts.sites if site.whole for i in site.units)
        window = max((weight.nbytes for spec in ranges for weight in spec.weights), default=0)
        working = parts.conversion_bytes + HUGE_PAGE + min(window, WINDOW_BYTES)
        working += parts.passing_bytes
        return Costs(pinned, working, scratch)

    def smallest_limit(self, needed: int) -> int:
        """The smallest limit that holds `needed` bytes, of which page tables are for this one."""
        # Not `limit`'s page tables, but its own; and the process grows a little by being told.
        return limit_for(needed - page_table_bytes(self.limit)) + self._measured.growth_bytes

    def refuse(self, smallest: int, cut: CostedCut) -> NoReturn:
        """Say that the limit is too small.

        Raises:
            MemoryLimitError: always.
        """
        threads = self._measured.threads
        raise limit_errors.process_too_small(
            self.limit,
            smallest,
            cut,
            floor=self.floor_bytes,
            reserve=self.reserve_bytes,
            more=limit_errors.uncut(cut, threads)
            + limit_errors.origin(self._options, self._measured),
        )

    def share(
        self, _cut: CostedCut, units: Sequence[UnitPlan]
    ) -> tuple[Sequence[UnitPlan], DeviceShare | None]:
        """The units as they are: no other memory has a part in them."""
        return units, None
