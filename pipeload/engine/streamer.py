"""Joins the two towers: hooks ask for a site, the prefetcher fetches it, its views are bound."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pipeload.engine.hooking import Hooks
from pipeload.engine.pass_log import PassLog
from pipeload.engine.refusals import (
    Call,
    arguments_alone,
    call_of,
    make_watch,
    refuse_compiled,
    refuse_recording,
)
from pipeload.weights.residents import whole_tensor
from pipeload_hooks import (
    Caller,
    Callers,
    EvictedWeightWatch,
    PassGate,
    arguments_of,
    computes_linear,
    discard_ended,
    restore_split,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from torch import nn

    from pipeload.budget.governor import Governor
    from pipeload.budget.plan import Plan
    from pipeload.checkpoint.files import FileSet
    from pipeload.checkpoint.readers import PinnedRead
    from pipeload.engine.adapters import Adapters
    from pipeload.engine.edits import Edits
    from pipeload.engine.seats import Seat
    from pipeload.engine.table_seats import TableSeat
    from pipeload.prefetch.prefetcher import Prefetcher
    from pipeload.weights.layout import Weight


_IDLE_SECONDS = 0.01


class Streamer:
    """A `WeightSource` for the sites of one model, and the life of its passes.

    It holds parameters and weak references to modules, never the model: a forgotten model goes, and
    takes this, the prefetcher and its threads along.
    """

    def __init__(
        self,
        *,
        seats: Sequence[Seat],
        tables: Sequence[TableSeat],
        prefetcher: Prefetcher,
        governor: Governor,
        files: FileSet,
        pinned_read: PinnedRead,
        whole: Callable[[Weight], torch.Tensor],
    ) -> None:
        """`whole` shows a weight whose ranges of rows are all resident."""
        self.pinned_read = pinned_read
        self.prefetcher = prefetcher
        self.governor = governor
        self.log = PassLog()
        self.files = files
        self._seats = seats
        self.tables = tables
        self._adapters: Adapters | None = None
        self._whole = whole
        self._gate = PassGate()
        self._held: set[int] = set()
        """Units in use."""
        self._inside: set[int] = set()
        """Sites that are running."""
        self._open = False
        self._alone: int | None = None
        """The `id` of the module that was called by itself and is a pass of its own."""
        self._lent = False
        """Whether the pass that is open is that of a call past the model's hooks."""
        self._callers = Callers([])
        self._watch: EvictedWeightWatch | None = None
        self._call: Call | None = None
        """How the pass that is running was called."""
        self._known: set[Call] = set()
        """Calls that have been watched to their end."""
        self._hooks = Hooks(seats, tables, [])
        self._edits: Edits | None = None
        self._settled = False
        self._waiting: set[int] = set()
        """Threads that wait at the start of a pass until others have ended theirs."""
        self._in_force: Plan | None = governor.plan
        """The plan that was adopted last, None after an interrupt in the middle of that."""
        self._kept_old = False
        """Units that were in use then keep and stream what they did before."""

    def attach(self, pass_modules: Sequence[nn.Module], adapters: Adapters, edits: Edits) -> None:
        """Put the hooks on: around every site, and around every module a pass may begin at."""
        self._adapters, self._edits = adapters, edits
        self._look_out()
        self._hooks = Hooks(self._seats, self.tables, pass_modules)
        self._callers = Callers(pass_modules)
        self._hooks.attach_sites(self)
        self._hooks.attach_passes(self._begin, self._end)

    def detach(self) -> None:
        """Take all hooks off. The weights stay as they are."""
        self._hooks.detach()

    @property
    def hooked_sites(self) -> int:
        """Sites that still carry hooks."""
        return len(self._hooks.sites())

    @property
    def busy(self) -> bool:
        """Whether a pass is running in any thread."""
        return self._gate.busy

    # -- what the hooks call ---------------------------------------------------------------------

    def acquire(self, site: int) -> bool:
        """Bind the site's weights, waiting for the disk if they are not there yet.

        Returns False for a site whose ranges of rows come one by one, through `chunks`.
        """
        seat = self._seats[site]
        self.enter(seat.module(), site=site)
        if self._settled:  # by the pass that this one waited for, and all hooks are off
            return True
        self._inside.add(site)
        self.governor.inside_pass()
        self._catch_up()
        units = self.prefetcher.units
        if seat.whole is None:
            (index,) = seat.units
            self._take(index)
            seat.bind(units[index])
            return True
        if any(units[index].streams for index in seat.units):
            if seat.replaced():
                return True  # the weight is another's, and all there
            module = seat.module()
            if module is None or computes_linear(module):
                return False
            self._gather(site)
            return True
        for index in () if seat.settled(units) else seat.units:
            self._take(index)
            self._give(index)
        seat.bind_whole(self._whole)
        return True

    def chunks(self, site: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        """The ranges of rows of a split weight: (first row, last row + 1, their values)."""
        # No `finally`: a generator that an interrupt left behind would run it much later. Whoever
        # stops halfway calls `release`, or the next pass recovers.
        for index in self._seats[site].units:
            self._take(index)
            unit = self.prefetcher.units[index]
            views = unit.home.views if unit.slot is None else unit.slots[unit.slot].views
            ((_, rows),) = views.items()
            yield (*unit.rows, rows)
            self._give(index)

    def by_whole(
        self, site: int, module: nn.Module, given: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """What multiplies where ranges by themselves would give other bits, None where not."""
        products = self._seats[site].products
        return None if products is None else products.by_whole(module, given, dtype)

    def _gather(self, site: int) -> None:
        """Show all rows at once, for this run: somebody has replaced what the Linear computes."""
        seat = self._seats[site]
        if (weight := seat.whole) is None:
            return
        self.governor.make_room(weight.nbytes, seat.name)
        self._catch_up()
        values = whole_tensor(weight)
        for start, stop, rows in self.chunks(site):
            values[start:stop].copy_(rows)
        seat.bind_once(values)

    def release(self, site: int) -> None:
        """Unbind what is streamed. Does nothing for a site that is not running."""
        if site not in self._inside:
            return
        seat = self._seats[site]
        seat.unbind()
        for index in seat.units:
            if index in self._held:
                self._give(index)
        self._inside.discard(site)
        if self._lent:
            self.log.lap()
        self.leave(seat.module())

    def enter(self, module: nn.Module | None, *, site: int | None = None) -> None:
        """A site or an embedding is called: a pass begins with it if none runs in this thread.

        A site that is on record as running, only a new pass, or the gate's look at the stack, can
        tell from a pass of this thread that died. So it is where another site holds something, and
        where nobody says when a pass is over.
        """
        refuse_compiled()
        if module is None:
            return
        args: tuple[Any, ...] = ()
        kwargs: Mapping[str, Any] = {}
        if self._settled:
            self._arrive(module, args, kwargs)
            return
        again = site in self._inside
        if not again and (self._held or self._lent):
            again = self._gate.died()
        if not again and (self._gate.step_in(module) if self._lent else self._gate.owned()):
            return
        if site is not None:  # ids for an embedding say nothing of blocks
            args, kwargs = arguments_alone(module, *arguments_of(module))
        try:
            self._begin(module, args, kwargs)
        except BaseException:  # nobody comes to say that it is over
            self._gate.abandon()
            raise
        if self._gate.is_outermost(module):
            self._alone = id(module)
        elif not self._lent:
            self._gate.leave(module)

    def leave(self, module: nn.Module | None) -> None:
        """The site that `enter` was called for has run."""
        if module is None:
            return
        if self._lent:
            self._gate.leave(module)
        elif self._alone == id(module):
            self._end(module, (), None)

    def refuse_recording(self, site: int) -> NoReturn:
        """Training is not possible: weights are overwritten before backward could use them."""
        refuse_recording(self._seats[site].name)

    def _take(self, index: int) -> None:
        self._held.add(index)
        self.log.stall_seconds += self.prefetcher.acquire(index)

    def _give(self, index: int) -> None:
        self.prefetcher.release(index)
        self._held.discard(index)

    @contextlib.contextmanager
    def borrowed(self, index: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """All views of a unit's weights, filled; streamed ones are valid inside only."""
        self.prefetcher.acquire(index)
        try:
            unit = self.prefetcher.units[index]
            streamed = unit.slots[unit.slot].views if unit.slot is not None else {}
            yield {**unit.home.views, **streamed}
        finally:
            self.prefetcher.release(index)

    # -- passes ----------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        refuse_compiled()
        if self._lent:
            self._gate.part(module, first=module is self._hooks.outermost())
        if not self._gate.enter(module):
            return
        if self._lent:  # nobody said that it was over
            self._close(done=not self._held and not self._inside)
        if self._settled:  # by the pass that this one waited for; others may run beside it
            self._gate.leave(module)
            self._arrive(module, args, kwargs)
            return
        if self._open or self._held:
            self.recover()
        if self._adapters is not None:
            self._adapters.check()
        self._settle_edits()
        discard_ended()  # another thread may have ended a pass that died in this one
        self._open = True
        self.files.check_unchanged()
        self._call = None
        if module is not self._hooks.outermost():
            module, args, kwargs = self._lend(module, args, kwargs)
        self.governor.before_pass(args, kwargs, module)
        self._catch_up()
        self.log.begin(args, kwargs)
        if self._lent:
            self.governor.let_run()
            self.log.count()
        self._call = call_of(module, args, kwargs)
        watch = self._watch
        if watch is not None and (
            self._adapted or watch.has_served or self._call not in self._known
        ):
            watch.begin()

    def _lend(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any]]:
        """Whose pass it is that begins at `module`, and with which arguments."""
        caller = self._callers.find(module)
        if not isinstance(caller, Caller):
            return module, args, kwargs
        caller.mark.begins(module, again=True)
        self._gate.lend(caller.mark)
        self._lent = True
        return caller.module, (), caller.arguments

    @property
    def _adapted(self) -> bool:
        return self._adapters is not None and self._adapters.present

    def _look_out(self) -> None:
        """Watch for whatever reads a weight while it is on disk."""
        me = weakref.ref(self)

        def adapted() -> bool:
            streamer = me()
            return streamer is not None and streamer._adapted  # noqa: SLF001 - its own

        def ended() -> bool:
            streamer = me()
            return streamer is None or streamer._gate.died()  # noqa: SLF001 - its own

        self._watch = make_watch(self._seats, self.tables, adapted=adapted, ended=ended)
        # A pass that died leaves its watch on its thread's stack of modes.
        weakref.finalize(self, self._watch.end).atexit = False

    def _end(self, module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        if self._gate.is_outermost(module):
            self._close(done=output is not None or self._alone is not None)
        self._gate.leave(module)

    def _close(self, *, done: bool) -> None:
        if self._watch is not None and self._watch.active:
            self._watch.discard()
        if self._held or self._inside:
            self.recover()  # an exception that somebody caught inside the pass
        self._alone = None
        self._open = False
        self._overlook()
        lent, self._lent = self._lent, False
        if self._kept_old:
            self._in_force = None  # units that were in use then have not followed
        self.governor.after_pass()
        if done:
            if not self._adapted and self._call is not None:
                self._known.add(self._call)  # else it depends on which adapters are active
            if not lent:
                self.log.end()
            self._drop_settled()

    def rest(self) -> None:
        """Be done with all weights, before somebody puts others in their place."""
        if self._edits is not None:
            self._edits.settle(self.prefetcher.units, last=True)
        self.recover()

    def recover(self) -> None:
        """Give back what a pass that died was holding; the next pass starts clean."""
        if self._watch is not None:
            self._watch.discard()
        for seat in self._seats:
            seat.unbind()
            if seat.whole is not None and (module := seat.module()) is not None:
                restore_split(module)
        for table in self.tables:
            table.unbind()
        self._overlook()
        self._held.clear()
        self._inside.clear()
        self._alone = None
        if not self._settled:
            self.prefetcher.reset()

    # -- forks: see [Note: what a child has of them] in forks.py -----------------------------------

    def forget(self) -> bool:
        """Count it no more, unless it needs no thread; whether memory is left to give back."""
        if self._settled:
            return False
        # So a pass recovers first, which is refused here: before anything is computed, since the
        # first product would wait for ever for threads of torch's, which are not there either.
        self._gate, self._lent, self._open = PassGate(), False, True
        return self.governor.forget()

    def abandon(self) -> None:
        """Give the memory of the weights back: all are evicted, for good."""
        for seat in self._seats:
            seat.evict()
        for table in self.tables:
            table.table.drop()
        self.prefetcher.abandon()

    # -- other limits ----------------------------------------------------------------------------

    def adopt(self, plan: Plan) -> bool:
        """Keep and stream what `plan` says, if no pass is running; returns whether none was."""
        model = self._hooks.outermost()
        modules = [] if model is None else list(model.modules())
        with self._gate.idle(modules, self._waiting) as idle:
            if idle:
                if self._open or self._held:
                    self.recover()  # a pass that died holds what is to be given back
                self._adopt(plan)
            return idle

    def _catch_up(self) -> None:
        if self.governor.plan is not self._in_force:
            self._adopt(self.governor.plan)

    def _adopt(self, plan: Plan) -> None:
        # No weight is touched before the sites' hooks are back: an interrupt may come anywhere.
        torn, self._in_force = self._in_force is None, None
        self._hooks.attach_sites(self)
        if self._settled or torn:
            self.prefetcher.start()
            self._settled = False
            self._hooks.attach_passes(self._begin, self._end)
        if not self._held:
            self._settle_edits()  # else the pass has looked for them when it began
        units = self.prefetcher.units
        changed = {i for i, unit in enumerate(units) if unit.plan is not plan.units[i]}
        for seat in self._seats:
            if not changed.isdisjoint(seat.units) and self._held.isdisjoint(seat.units):
                seat.evict()
        self.prefetcher.resplit(plan.units, plan.slot_bytes)
        self._in_force, self._kept_old = plan, bool(self._held)

    def _settle_edits(self) -> None:
        """Weights that were changed meanwhile are nobody's but the user's."""
        if self._edits is not None and self._edits.settle(self.prefetcher.units):
            for index in self._hooks.sites():
                if not self._seats[index].parameters:
                    self._hooks.detach_site(index)

    def _overlook(self) -> None:
        """What added modules do to weights while they run, they undo."""
        if self._edits is not None and self._adapted:
            self._edits.overlook()

    def _drop_settled(self) -> None:
        """A site that is all resident and bound needs no hook any more."""
        units = self.prefetcher.units
        waiting = [i for i in self._hooks.sites() if not self._seats[i].settled(units)]
        for index in self._hooks.sites():
            if index not in waiting and not (waiting and self._seats[index].shared):
                self._hooks.detach_site(index)
        if not waiting:
            self._settle()

    def _settle(self) -> None:
        """Everything is resident and bound: hooks that watch passes begin are left."""
        self._settled = True
        for seat in self._seats:
            if seat.shared:
                seat.bind_whole(self._whole)
        self._hooks.detach_shared_tables()
        self._hooks.attach_settled(self._begin_settled, self._arrive_at)
        self.prefetcher.close()

    def _arrive_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        self._arrive(module, args, kwargs)
        site = None if self._settled else self._hooks.site_of(module)
        if site is not None:  # hooks that are put on during a call of it do not run in that
            self.acquire(site)

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A part of a model that is all resident is called: perhaps past the model's hooks."""
        found = None
        if module is not self._hooks.outermost():
            if torch.compiler.is_compiling():
                return  # the stack is not the model's then
            found = self._callers.find(module)
        if isinstance(found, Caller):
            if not found.mark.begins(module, again=self._hooks.begins_at(module)):
                return
            args, kwargs = (), found.arguments
        elif found is not None:
            return  # its hooks have told
        self._begin_settled(module, args, kwargs)

    def _begin_settled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._adapters is not None:
            self._adapters.check()
        self.governor.before_pass(args, kwargs, module)
        me = threading.get_ident()
        try:
            while self._settled and self.governor.plan is not self._in_force:
                # Other threads may be computing with what is to be given back, and carry no hook.
                self._waiting.add(me)
                if not self.adopt(self.governor.plan):
                    time.sleep(_IDLE_SECONDS)
        finally:
            self._waiting.discard(me)
        self._gate.wait_while_idle()
        if self._settled:
            self.governor.let_run()
            self.log.begin(args, kwargs)
            self.log.count()
        else:
            self._begin(module, args, kwargs)
