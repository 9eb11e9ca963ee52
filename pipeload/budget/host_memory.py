"""The process's memory, as weights are planned for it when the model computes on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pipeload._sizes import format_size, show_limit
from pipeload.budget.make_plan import Costs
from pipeload.budget.reserve import limit_for, page_table_bytes
from pipeload.errors import MemoryLimitError
from pipeload.weights.arena import DTYPES, HUGE_PAGE
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import scratch_bytes
from pipeload.weights.whole_shape import WINDOW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.device_share import DeviceShare
    from pipeload.budget.make_plan import CostedCut
    from pipeload.budget.measured import Measured
    from pipeload.budget.options import Options
    from pipeload.budget.parts import Parts
    from pipeload.budget.plan import UnitPlan

TABLE_KEEP_BYTES = 4 << 20
"""How much of an embedding table stays once its rows were read."""


class HostMemory:
    """A `Memory`: all of the process. Sizes in bytes."""

    takes = None

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
        tables = sum(min(table.weight.nbytes, TABLE_KEEP_BYTES) for table in parts.tables)
        pinned = lay_out(parts.pinned).nbytes + tables + parts.others_bytes
        ranges = (parts.specs[i] for site in parts.sites if site.whole for i in site.units)
        window = max((weight.nbytes for spec in ranges for weight in spec.weights), default=0)
        working = parts.conversion_bytes + HUGE_PAGE + min(window, WINDOW_BYTES)
        working += parts.expert_window_bytes
        return Costs(pinned, working, scratch)

    def smallest_limit(self, needed: int) -> int:
        """The smallest limit that holds `needed` bytes, of which page tables are for this one."""
        # Not `limit`'s page tables, but its own; and the process grows a little by being told.
        return limit_for(needed - page_table_bytes(self.limit)) + self._measured.growth_bytes

    def refuse(self, smallest: int, cut: CostedCut) -> NoReturn:
        """Say that the limit is too small, and sizes that add up to the smallest one.

        Raises:
            MemoryLimitError: always.
        """
        largest = max(cut.parts.specs, key=lambda spec: sum(w.nbytes for w in spec.weights))
        floor, reserve, buffers = self.floor_bytes, self.reserve_bytes, cut.residency.smallest
        pinned = cut.costs.pinned
        rest = smallest - floor - reserve - pinned - buffers
        raise MemoryLimitError(
            f"memory_limit={show_limit(self.limit)} is too small. This process holds "
            f"{format_size(floor)} already, a pass needs {format_size(reserve)}, weights that are "
            f"always resident take {format_size(pinned)}, two buffers for the largest unit, "
            f"{largest.name!r}, {format_size(buffers)}, and all else "
            f"{format_size(rest)}. The smallest limit that works here is {smallest} bytes "
            f"({format_size(smallest)}); fewer tokens or sequences at once (tokens=, batch=) lower "
            f"it.{_uncut(cut, self._measured.threads)}{origin_of(self._options, self._measured)}",
            limit=self.limit,
            smallest_limit=smallest,
        )

    def share(
        self, _cut: CostedCut, units: Sequence[UnitPlan]
    ) -> tuple[Sequence[UnitPlan], DeviceShare | None]:
        """The units as they are: no other memory has a part in them."""
        return units, None


def origin_of(options: Options, measured: Measured) -> str:
    """For a refusal: what a limit is made of that nobody named."""
    if not options.found_out:
        return ""
    return (
        f' Nobody named it: "auto" leaves a part of the {format_size(measured.allowed_bytes)} that '
        "this process may use to everything else; name one to use more."
    )


def _uncut(cut: CostedCut, threads: int) -> str:
    """What could be smaller on another processor."""
    weights = [w for spec in cut.parts.specs for w in spec.weights if w.name in cut.parts.uncut]
    if not weights:
        return ""
    largest = max(weights, key=lambda weight: weight.nbytes)
    return (
        f" {largest.name!r} ({format_size(largest.nbytes)}) is read as a whole: with the kernels "
        f"that this processor has for {DTYPES[largest.dtype]} and {threads} "
        "threads, ranges of its rows would give other bits. Another dtype= or number of threads "
        "may let it be cut."
    )
