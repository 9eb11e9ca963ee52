"""Decides, before every pass and inside it, how much of one model may stay in memory.

[Note: who yields] A pass needs what it needs, and so does the user's code; weights are the only
thing that can be had again from the disk. So residents yield to both, before the need and not after
it, down to nothing; only then is a pass refused. They come back as they stream by, which costs no
read of its own.

[Note: no swinging] Budgets move in steps, at once downwards and only after some passes upwards, to
the least that any of those passes allowed. What the estimate of a pass fell short of what was then
measured raises the next estimates.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size
from pipeload.budget.accounts import ACCOUNTANT, host_limit_alone
from pipeload.budget.out_of_memory import PassMemoryLimitError
from pipeload.budget.reserve import (
    KERNEL_BYTES,
    WARM_UP_BYTES,
    PassHint,
    limit_for,
    page_table_bytes,
)
from pipeload.errors import MemoryLimitError
from pipeload.system.memory import PeakSince, parse_limit
from pipeload.system.pressure import PressureGauge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from pipeload.budget.counters import Counters
    from pipeload.budget.make_plan import Build
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.plan import Plan

STEPS = 128
MIN_STEP_BYTES = 2 << 20
# Passes that must agree before residents come back.
PATIENCE = 4
# Passes after which a process is not fresh any more.
_WARM_PASSES = 3
_MOST_ERROR = 4.0
_FORGET = 0.98
# What a process keeps of chunks that have run: kernels for their shapes, holes in the heap.
_KEPT_OF_CHUNKS_BYTES = 8_000_000
_SMALLEST_CHUNK = 16  # tokens: each chunk reads the whole model


class Governor:
    """One model's budget for residents and buffers, in bytes."""

    name = "a model"

    def __init__(
        self,
        build: Build,
        needs: PassNeeds,
        hint: PassHint,
        counters: Counters,
        *,
        pressure: bool,
    ) -> None:
        plan, residency = build.plan, build.residency
        self._gauge = PressureGauge(plan.memory_limit) if pressure else None
        self.plan = plan
        """What is to be kept and streamed: in force once no pass is in the way."""
        self.adopt: Callable[[Plan], bool] | None = None
        """Puts a plan into force if no pass runs; set once somebody can."""
        self.peak = PeakSince()
        self._counters = counters
        self._residency = residency
        # A model that fitted may have been mapped; what streams later is read.
        self._whole_mode, self._streaming_mode = plan.io_mode, build.stream_mode
        self._needs = needs
        self._hint, self._hint_need = hint, hint.pass_bytes(needs)
        self._fixed = plan.pinned_bytes + plan.scratch_bytes + build.parts.conversion_bytes
        self._spent = plan.floor_bytes + plan.reserve_bytes + plan.pinned_bytes + plan.scratch_bytes
        self._floor = plan.floor_bytes - ACCOUNTANT.promised_to_others(None)
        self._spent -= page_table_bytes(plan.memory_limit) + ACCOUNTANT.promised_to_others(None)
        self._budget = self._cap(plan.memory_limit)
        self._recent: deque[int] = deque(maxlen=PATIENCE)
        self._passes = 0
        self._error = 1.0
        self._need = 0
        self._other_at_begin = 0
        self._held_at_begin = 0
        self._other_peak = 0
        self._running = False

    def _cap(self, limit: int, others: int | None = None) -> int:
        """More than was planned for the hint is never taken: the hint's memory stays free."""
        others = ACCOUNTANT.promised_to_others(self) if others is None else others
        return min(
            self._residency.everything, limit - page_table_bytes(limit) - self._spent - others
        )

    def join(self) -> None:
        """Have the accountant count it from now on."""
        ACCOUNTANT.join(self, self.plan.memory_limit)

    def leave(self) -> None:
        """Have it counted no more. May be called again."""
        ACCOUNTANT.leave(self)

    def forget(self) -> bool:
        """In a forked child: count it no more. Whether its memory can be given back there."""
        self.leave()
        return True

    def set_limit(self, memory_limit: int | str, host_memory_limit: int | str | None) -> None:
        """Change the limit, for everybody who shares it.

        Raises:
            MemoryLimitError: it is too small; nothing changes.
            OptionError: it is no size.
        """
        if host_memory_limit is not None:
            raise host_limit_alone(host_memory_limit)
        ACCOUNTANT.set_limit(parse_limit(memory_limit))

    def device_figures(self) -> dict[str, Any]:
        """What `Stats` shows of a device: nothing on the CPU."""
        return {}

    # -- Client ----------------------------------------------------------------------------------

    def held_bytes(self) -> int:
        """Weights and buffers of this model in memory now."""
        moving = self._counters.resident_bytes + self._counters.buffer_bytes
        return self.plan.pinned_bytes + self.plan.scratch_bytes + moving

    def promised_bytes(self) -> int:
        """What it may come to hold."""
        return max(self.held_bytes(), self._fixed + min(self._budget, self._residency.everything))

    def least_bytes(self) -> int:
        """What it holds with nothing resident that can be streamed."""
        return self._fixed + self._residency.smallest

    def running_bytes(self) -> int:
        """What its running pass was granted."""
        return self._need if self._running else 0

    @property
    def budget(self) -> int:
        """What residents and buffers may take."""
        return min(self._budget, self._residency.everything)

    @property
    def wants(self) -> tuple[int, int]:
        """The least and the most that residents and buffers can make use of."""
        return self._residency.smallest, self._residency.everything

    def shrink(self, budget: int) -> bool:
        """Give back down to `budget`, now; False when a pass is running."""
        with ACCOUNTANT.lock:
            plan = self._plan_for(max(budget, self._residency.smallest))
            if self.adopt is None or not self.adopt(plan):
                return False
            self.plan, self._budget = plan, max(budget, self._residency.smallest)
            return True

    def look_around(self) -> None:
        """Give back what the control group does not allow any more, if no pass is running.

        One that is running looks by itself.
        """
        room = self._room(self._limit, ACCOUNTANT.other_bytes())
        if room < self._budget > self._residency.smallest:
            self.shrink(room)

    # -- passes ----------------------------------------------------------------------------------

    def before_pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None = None
    ) -> None:
        """Make room for a pass with these arguments: `plan` is to be in force before it runs.

        `module`: what is called, if it is a part of the model.

        Raises:
            MemoryLimitError: it does not fit even with nothing resident.
        """
        with ACCOUNTANT.lock:
            self._before_pass(args, kwargs, module)

    def _before_pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None
    ) -> None:
        need = self._needs.for_pass(args, kwargs, module)
        self._need = int(need * self._error)
        self._other_at_begin = self._other_peak = ACCOUNTANT.other_bytes()
        self.peak.look(ACCOUNTANT.rss_bytes)
        self._held_at_begin = self.held_bytes()
        room = self._room(self._limit, self._other_at_begin) - self._need
        if room < self._residency.smallest:
            room += ACCOUNTANT.reclaim(self, self._residency.smallest - room)
        if room < self._residency.smallest:
            shape = self._needs.shape(args, kwargs)
            # What the process took on during some pass, for whatever reason, revokes no promise as
            # long as the limit holds: what is set aside for that is there to be used.
            promised = need <= self._hint_need and self._hint.covers(shape)
            if not promised or self._least_with(need) > self.plan.memory_limit:
                raise self._too_large(shape, room)
            room = self._residency.smallest
        self._running = True
        room = min(room, self._cap(self._limit), ACCOUNTANT.share(self, room))
        room = max(room, self._residency.smallest)
        self._recent.append(room)
        self._aim(room)

    def _least_with(self, need: int) -> int:
        """What the process will hold in a pass that takes `need`, with nothing resident."""
        held = ACCOUNTANT.other_bytes() + ACCOUNTANT.promised_to_others(self)
        return held + self.least_bytes() + need

    def pass_bytes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """What a pass with these arguments would read from disk now; None where it does not fit."""
        with ACCOUNTANT.lock:
            need = int(self._needs.for_pass(args, kwargs) * self._error)
            room = self._room(self._limit, ACCOUNTANT.other_bytes()) - need
            choice = self._residency.choose(min(room, self._cap(self._limit)))
            plans = () if choice is None else self._residency.plans(choice)
            return None if choice is None else sum(plan.streamed_bytes for plan in plans)

    def inside_pass(self) -> None:
        """Look again before a site runs: somebody else may have taken memory meanwhile."""
        with ACCOUNTANT.lock:
            self._inside_pass()

    def _inside_pass(self) -> None:
        other = ACCOUNTANT.other_bytes()
        self.peak.look(ACCOUNTANT.rss_bytes)
        self._other_peak = max(self._other_peak, other)
        room = self._room(self._limit, other)
        if self._recent:  # this pass allows no more, whatever it began with
            self._recent[-1] = min(self._recent[-1], room)
        if room < self._budget > self._residency.smallest:
            self._aim(max(room, self._residency.smallest))

    def make_room(self, nbytes: int, name: str) -> None:
        """Have `nbytes` be free beside what the running pass still needs, for module `name`.

        Raises:
            MemoryLimitError: they are not even with nothing resident.
        """
        with ACCOUNTANT.lock:
            other = ACCOUNTANT.other_bytes()
            pending = max(0, self._need - max(0, other - self._other_at_begin))
            room = self._room(self._limit, other) - pending - nbytes
            if room < self._residency.smallest:
                limit = self.plan.memory_limit
                wanted = limit_for(
                    limit - page_table_bytes(limit) + self._residency.smallest - room
                )
                raise MemoryLimitError(
                    f"the forward of {name!r} was replaced after loading, so its weight is needed "
                    f"as a whole: {nbytes} bytes ({format_size(nbytes)}) that memory_limit={limit} "
                    f"does not leave. Set a limit of at least {wanted} bytes "
                    f"({format_size(wanted)}), or replace it before pipeload.wrap(model).",
                    limit=limit,
                    smallest_limit=wanted,
                )
            if self._recent:
                self._recent[-1] = min(self._recent[-1], room)
            if room < self._budget:
                self._aim(room)

    def after_pass(self) -> None:
        """The pass is over, whatever became of it."""
        self._running = False
        self._passes += 1
        used = self._other_peak - self._other_at_begin
        # A fresh process takes on more than the pass, and weights on their way count for others.
        # What was given back does not: it was there before.
        steady = self._passes > _WARM_PASSES and self._held_at_begin >= self.held_bytes()
        if steady and used > self._need:
            self._error = min(_MOST_ERROR, used / max(1, self._need))
        else:
            self._error = max(1.0, self._error * _FORGET)

    def let_run(self) -> None:
        """The pass begins, and nobody will say that it is over: nothing is set aside for it."""
        self._running = False

    def check_limit(self, limit: int) -> None:
        """Whether another limit of the process holds this model beside what is there now.

        Raises:
            MemoryLimitError: it is too small; says one that works.
        """
        other, others = ACCOUNTANT.other_bytes(), ACCOUNTANT.least_of_others(self)
        # What a running pass took is gone after it; what it was granted may not be taken yet.
        took = max(0, other - self._other_at_begin)
        other -= min(took, self.running_bytes())
        room = min(self._cap(limit, others), self._room(limit, other, others))
        if room < self._residency.smallest:
            smallest = limit_for(limit - page_table_bytes(limit) + self._residency.smallest - room)
            raise MemoryLimitError(
                f"memory_limit={limit} bytes ({format_size(limit)}) is too small for this model as "
                f"it was loaded; {smallest} bytes ({format_size(smallest)}) work now. "
                "Loaded again, it may be cut more finely and take less.",
                limit=limit,
                smallest_limit=smallest,
            )

    def take_limit(self, limit: int) -> None:
        """Plan for another limit; what is over it goes now, or before the next site of a pass."""
        with ACCOUNTANT.lock:
            self._take_limit(limit)

    def _take_limit(self, limit: int) -> None:
        if self._gauge is not None:
            self._gauge.limit = limit
        room = min(self._cap(limit), self._room(limit, ACCOUNTANT.other_bytes()))
        self._recent.clear()
        self._budget = max(self._residency.smallest, ACCOUNTANT.share(self, room))
        self.plan = dataclasses.replace(self._plan_for(self._budget), memory_limit=limit)
        if self.adopt is not None:
            self.adopt(self.plan)

    # -- arithmetic ------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        limit = self.plan.memory_limit
        return limit if self._gauge is None else min(limit, self._gauge.allowed_bytes())

    def _room(self, limit: int, other: int, others: int | None = None) -> int:
        """Bytes for this model's residents, buffers and pass, if everybody else keeps theirs."""
        overhead = KERNEL_BYTES + page_table_bytes(limit)
        other = max(other, self._floor + WARM_UP_BYTES)  # it will be that much soon
        others = ACCOUNTANT.promised_to_others(self) if others is None else others
        return limit - other - overhead - self._fixed - others

    def _aim(self, room: int) -> None:
        step = max(MIN_STEP_BYTES, self.plan.memory_limit // STEPS)
        if room < self._budget:
            target = room - room % step
        elif len(self._recent) == PATIENCE and min(self._recent) >= min(
            self._cap(self._limit), self._budget + 2 * step
        ):
            target = min(self._recent)
        else:
            return
        target = max(target, self._residency.smallest)
        if target != self._budget:
            self.plan, self._budget = self._plan_for(target), target

    def _plan_for(self, budget: int) -> Plan:
        choice = self._residency.choose(budget)
        assert choice is not None  # noqa: S101 - nobody asks for less than the smallest
        units = self._residency.plans(choice)
        streams = any(unit.streamed.nbytes for unit in units)
        io_mode = self._streaming_mode if streams else self._whole_mode
        return dataclasses.replace(self.plan, units=units, io_mode=io_mode)

    def _largest(self, free: int, shape: PassShape) -> str:
        batch = self._needs.largest_batch(free, shape.tokens + shape.cached)
        if shape.sizes:  # how much of what it is may be left out is for the model to know
            return f"the largest batch that fits of the usual size is {batch}"
        tokens = self._needs.longest_tokens(free, shape.batch)
        return (
            f"the longest prompt that fits at this batch is {tokens} tokens, the largest batch at "
            f"this length {batch}"
        )

    def _too_large(self, shape: PassShape, room: int) -> MemoryLimitError:
        limit = self.plan.memory_limit
        free = int((room + self._need - self._residency.smallest) / self._error)
        wanted = limit_for(limit - page_table_bytes(limit) + self._residency.smallest - room)
        largest = self._largest(free, shape)
        chunk = self._needs.prefill_chunk(free - _KEPT_OF_CHUNKS_BYTES, shape) or 0
        cures = f"A limit of {wanted} bytes ({format_size(wanted)}) makes it fit"
        if chunk >= _SMALLEST_CHUNK:
            cures += (
                f", and so does prefill_chunk_size={chunk} in generate(), which may change the "
                "last bits"
            )
        grown = self._other_at_begin - self._floor - WARM_UP_BYTES
        if grown > 0:
            cures = (
                f"Beside the model the process holds {grown} bytes ({format_size(grown)}) more "
                f"than was planned when it was loaded: free what you can. {cures}"
            )
        return PassMemoryLimitError(
            f"this pass ({shape}) needs "
            f"{self._need} bytes ({format_size(self._need)}) beside the weights, and with nothing "
            f"resident {max(0, free)} ({format_size(max(0, free))}) are free within "
            f"memory_limit={limit}: it would run out of memory. What fits: {largest}. {cures}.",
            limit=limit,
            smallest_limit=wanted,
        )
