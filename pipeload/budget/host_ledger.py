"""The process's memory, for the governor of a model that computes on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pipeload.budget import limit_errors
from pipeload.budget.eviction_policy import Correction
from pipeload.budget.reserve import KERNEL_BYTES, WARM_UP_BYTES, limit_for, page_table_bytes
from pipeload.budget.shared_limit import ACCOUNTANT, host_limit_alone
from pipeload.system.memory import parse_limit, trim_heap
from pipeload.system.pressure import PressureGauge

if TYPE_CHECKING:
    from pipeload.budget.ledger import Owner, TooLarge
    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.plan import Plan
    from pipeload.budget.read_counters import Counters

_KEPT_OF_CHUNKS_BYTES = 8_000_000
"""What a process keeps of chunks that have run: kernels for their shapes, holes in the heap."""
_HOLES_BYTES = 8_000_000
"""What a process has to take on before its heap is looked through for holes once more. Prompts of
300 lengths in bf16, with kernels of AMX compiled between, left 30 MB of holes."""


class HostLedger:
    """A `Ledger`: everything that the process holds is measured. Sizes in bytes."""

    looks_inside = True
    device = None
    account = ACCOUNTANT

    def __init__(self, build: Build, counters: Counters, *, pressure: bool) -> None:
        """`pressure`: whether less is allowed while the process's control groups are full."""
        plan = build.plan
        self._counters = counters
        self._gauge = PressureGauge(plan.memory_limit) if pressure else None
        self._floor = plan.floor_bytes - ACCOUNTANT.promised_to_others(None)
        self.fixed_bytes = plan.pinned_bytes + plan.scratch_bytes + build.parts.conversion_bytes
        self.fixed_bytes += build.parts.passing_bytes
        self.correction = Correction()
        self._other_at_begin = self._other_peak = 0
        self._held_at_begin = 0
        self._trimmed_at = self._floor + WARM_UP_BYTES

    @property
    def process_bytes(self) -> int:
        """All that the process held when it was measured last."""
        return ACCOUNTANT.rss_bytes

    def limit_in_force(self, limit: int) -> int:
        """A limit, or less where control groups have less."""
        return limit if self._gauge is None else min(limit, self._gauge.allowed_bytes())

    def tables_bytes(self, limit: int) -> int:
        """Page tables of a process that holds that much."""
        return page_table_bytes(limit)

    def limit_for(self, nbytes: int) -> int:
        """The smallest limit that leaves so much beside its own page tables."""
        return limit_for(nbytes)

    def taken_bytes(self, limit: int, other: int) -> int:
        """What is measured, or will be soon, and what only the kernel sees."""
        return max(other, self._floor + WARM_UP_BYTES) + KERNEL_BYTES + page_table_bytes(limit)

    def allows(self, nbytes: int, limit: int) -> bool:
        """Whether so much fits a limit beside what is measured now."""
        return ACCOUNTANT.other_bytes() + nbytes <= limit

    def held_bytes(self, plan: Plan) -> int:
        """Weights and buffers of this model in memory now."""
        counters = self._counters
        moving = counters.resident_bytes + counters.buffer_bytes + counters.expert_bytes
        return plan.pinned_bytes + plan.scratch_bytes + moving

    def moved_bytes(self, plan: Plan) -> int:
        """What is read in each pass."""
        return plan.bytes_per_pass

    # -- passes ----------------------------------------------------------------------------------

    def corrected(self, need: int) -> int:
        """An estimate of what a pass needs, raised by what the last ones fell short."""
        return int(need * self.correction.factor)

    def uncorrected(self, nbytes: int) -> int:
        """The estimate that is raised to so much."""
        return int(nbytes / self.correction.factor)

    def begin_pass(self, held: int) -> int:
        """Measure what is there beside weights that stream, and remember it."""
        other = ACCOUNTANT.other_bytes()
        if other - self._trimmed_at > _HOLES_BYTES:  # before residents or the pass have to yield
            trim_heap()
            self._trimmed_at = other = ACCOUNTANT.other_bytes()
        self._other_at_begin = self._other_peak = other
        self._held_at_begin = held
        return other

    def inside_pass(self) -> int:
        """Measure once more what is there beside weights that stream."""
        other = ACCOUNTANT.other_bytes()
        self._other_peak = max(self._other_peak, other)
        return other

    def taken_by_pass(self, other: int) -> int:
        """What of `other` came since the pass began."""
        return max(0, other - self._other_at_begin)

    def end_pass(self, need: int, held: int, _limit: int) -> None:
        """Learn how far the estimate fell short."""
        # Weights on their way count for others. What was given back does not: it was there before.
        steady = self._held_at_begin >= held
        self.correction.learn(self._other_peak - self._other_at_begin, need, steady=steady)

    # -- plans -----------------------------------------------------------------------------------

    def complete(self, plan: Plan, _before: Plan) -> Plan:
        """The plan as it is: it takes nothing of any other memory."""
        return plan

    def follow(self, plan: Plan) -> None:
        """Buffers are address space for the largest unit that there can be: nothing to do."""

    def look_beside(self) -> bool:
        """The plan takes no other memory, so nothing changes."""
        return False

    def take_limit(self, limit: int) -> None:
        """Control groups are looked at from this limit on."""
        if self._gauge is not None:
            self._gauge.limit = limit

    def trim(self) -> bool:
        """Pages of weights that went are the system's already."""
        return False

    # -- membership ------------------------------------------------------------------------------

    def join(self, owner: Owner) -> None:
        """Have the accountant count the model from now on."""
        ACCOUNTANT.join(owner, owner.plan.memory_limit)

    def leave(self, owner: Owner) -> None:
        """Have it counted no more. May be called again."""
        ACCOUNTANT.leave(owner)

    def forget(self, owner: Owner) -> bool:
        """In a forked child: count it no more. Its memory can be given back there."""
        self.leave(owner)
        return True

    def set_limit(self, memory_limit: int | str, host_memory_limit: int | str | None) -> None:
        """Change the limit of the process.

        Raises:
            MemoryLimitError: it is too small; nothing changes.
            OptionError: it is no size, or there are two.
        """
        if host_memory_limit is not None:
            raise host_limit_alone(host_memory_limit)
        ACCOUNTANT.set_limit(parse_limit(memory_limit))

    def figures(self) -> dict[str, Any]:
        """A model on the CPU has no figures of a device."""
        return {}

    # -- refusals --------------------------------------------------------------------------------

    def refuse_pass(self, found: TooLarge, needs: PassNeeds, limit: int) -> NoReturn:
        """Say that a pass is too large, and what would fit.

        Raises:
            PassMemoryLimitError: always.
        """
        chunk = needs.prefill_chunk(found.free - _KEPT_OF_CHUNKS_BYTES, found.shape) or 0
        grown = self._other_at_begin - self._floor - WARM_UP_BYTES
        raise limit_errors.pass_too_large(found, needs, limit, chunk=chunk, grown=grown)
