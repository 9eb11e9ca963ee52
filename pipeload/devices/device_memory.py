"""A device's memory, as weights are planned for it, and what its plan takes of the host's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pipeload.budget import limit_errors
from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.budget.device_in_plan import DeviceShare
from pipeload.budget.make_plan import Costs
from pipeload.budget.reserve import limit_for, page_table_bytes, process_bytes
from pipeload.devices.host_tier import host_within
from pipeload.devices.weights_on_device import device_bytes
from pipeload.weights.device_interface import aligned
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.budget.make_plan import CostedCut
    from pipeload.budget.measured_host import Measured
    from pipeload.budget.model_parts import Parts
    from pipeload.budget.plan import UnitPlan
    from pipeload.budget.plan_options import Options
    from pipeload.devices.measured_device import MeasuredDevice
    from pipeload.weights.layout import Weight


class DeviceMemory:
    """A `Memory`: one device's. Sizes in bytes.

    Blocks stay whole here: ranges of rows are exact by what was tried on the processor alone.
    """

    may_map = False

    def __init__(
        self,
        found: MeasuredDevice,
        measured: Measured,
        options: Options,
        pass_bytes: int,
        buffers_bytes: int,
    ) -> None:
        """Plan for a device.

        Args:
            found: what was measured of the device.
            measured: what was measured of the process.
            options: what the user asked for; with a device.
            pass_bytes: what a pass needs on the device beside weights.
            buffers_bytes: what the model has beside parameters.
        """
        self._found, self._measured, self._options = found, measured, options
        self._buffers_bytes = buffers_bytes
        self.limit = options.device_limit
        self.floor_bytes = found.allocated_bytes + found.promised_bytes
        self.reserve_bytes = pass_bytes + found.slack_bytes

    @property
    def keeps_stored(self) -> bool:
        """What stays in host memory is copied as it is: a device unpacks nothing."""
        return False

    def takes(self, weights: Sequence[Weight]) -> int:
        """What its allocator takes for weights that lie in one piece of its memory."""
        return self._found.takes(sum(aligned(weight.nbytes) for weight in weights))

    def costs(self, parts: Parts, _readers: int) -> Costs:
        """What a model takes of the device whatever is streamed: the rest is in host memory."""
        pinned = device_bytes(lay_out(parts.pinned)) + parts.others_bytes + self._buffers_bytes
        return Costs(pinned, working=0, scratch=0)

    def smallest_limit(self, needed: int) -> int:
        """The smallest limit that holds `needed` bytes: that much."""
        return needed

    def refuse(self, smallest: int, cut: CostedCut) -> NoReturn:
        """Say that the device's limit is too small.

        Raises:
            MemoryLimitError: always.
        """
        raise limit_errors.device_too_small(
            self.limit,
            smallest,
            self._found.name,
            floor=self.floor_bytes,
            reserve=self.reserve_bytes,
            pinned=cut.costs.pinned,
        )

    def share(
        self, cut: CostedCut, units: Sequence[UnitPlan]
    ) -> tuple[Sequence[UnitPlan], DeviceShare]:
        """What is taken of host memory, and the units, some of them to stay there.

        Raises:
            MemoryLimitError: host memory is too small for the staging.
        """
        limit, floor = self._options.memory_limit, self._measured.floor_bytes
        conversions = cut.parts.conversion_bytes + _converted_bytes(units)
        reserve = process_bytes(limit) + self._found.host_slack_bytes + conversions
        slots = BUFFER_COUNT if any(unit.streamed_bytes for unit in units) else 0
        staging = slots * max(unit.streamed.nbytes for unit in units)
        scratch = scratch_bytes(cut.readers)
        needed = floor + reserve + staging + scratch
        smallest = limit_for(needed - page_table_bytes(limit)) + self._measured.growth_bytes
        if needed > limit:
            more = limit_errors.origin(self._options, self._measured)
            raise limit_errors.staging_too_large(
                limit, smallest, floor=floor, staging=staging, more=more
            )
        budget = 0 if self._found.unified else limit - needed
        share = DeviceShare(
            device=self._found.name,
            host_memory_limit=limit,
            host_smallest_limit=smallest,
            host_floor_bytes=floor,
            host_reserve_bytes=reserve,
            staging_scratch_bytes=scratch,
            link_rate=self._found.link_rate,
            compute_rate=self._found.compute_rate,
            host_slack_bytes=self._found.host_slack_bytes,
            host_conversion_bytes=conversions,
            slack_bytes=self._found.slack_bytes,
        )
        return host_within(units, budget), share


def _converted_bytes(units: Sequence[UnitPlan]) -> int:
    """Host memory in which residents are made that the file does not hold as they are."""
    sizes = (sum(layout.nbytes for layout in unit.resident if layout.conversions) for unit in units)
    return 2 * max(sizes, default=0)  # two units are read at once
