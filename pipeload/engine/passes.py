"""Where a pass begins and ends, whoever called it, and what is done then.

A pass begins at the library's models, at a part of one that is called by itself, or at whatever a
method of a model calls first, past its hooks. Passes of a model that streams take turns; those of
one that is all resident run beside each other, see `begin_settled`.
"""

from __future__ import annotations

import enum
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

from pipeload.engine.direct_calls import DirectCalls
from pipeload.engine.pass_log import PassLog
from pipeload.engine.pass_modes import PassModes
from pipeload.engine.pass_refusals import (
    FirstCalls,
    arguments_alone,
    refuse_compiled,
    refuse_recording,
)
from pipeload_hooks import PassGate, arguments_of, discard_ended, inside_compiled_call

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from pipeload.budget.plan import Plan
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.engine.adapter_watch import Adapters
    from pipeload.engine.replan import Replan
    from pipeload.engine.streamer import Streamer

_IDLE_SECONDS = 0.01


class Running(enum.Enum):
    """Who says that the running pass is over."""

    NOTHING = enum.auto()  # none runs
    MODEL = enum.auto()  # hooks of one of the library's models
    PART = enum.auto()  # the site or table that was called by itself, and is a pass of its own
    CALL = enum.auto()  # nobody: it lasts as long as a call past the model's hooks


_MODEL = Running.MODEL


class Passes:
    """What the hooks on a model call, and hold: all that runs goes with the last hook.

    It holds parameters and weak references to modules, never the model: a forgotten model goes, and
    takes this, the prefetcher and its threads along.
    """

    def __init__(
        self,
        *,
        streamer: Streamer,
        replan: Replan,
        files: FileSet,
        adapters: Adapters,
        pass_modules: Sequence[nn.Module],
    ) -> None:
        """`pass_modules` are those at which a pass may begin, the outermost first."""
        self.log = PassLog()
        self._streamer, self._replan, self._files = streamer, replan, files
        self.chunks, self.by_whole = streamer.chunks, streamer.by_whole
        self.refuse_recording, self.abandon = streamer.refuse_recording, streamer.abandon
        self._prefetcher, self._governor = replan.prefetcher, replan.governor
        self._experts = replan.experts
        self._hooks, self._adapters, self._edits = replan.hooks, adapters, replan.edits
        self._direct_calls = DirectCalls(replan.hooks, pass_modules)
        self._gate = PassGate()
        seats = [*streamer.seats, *self._experts.seats]
        self.modes = PassModes(
            FirstCalls(seats, streamer.tables, adapters, self._gate),
            (parameter.dtype for seat in seats for parameter in seat.parameters.values()),
        )
        self._running = Running.NOTHING
        self._waiting: set[int] = set()
        """Threads that wait at the start of a pass until others have ended theirs."""

    @property
    def busy(self) -> bool:
        """Whether a pass is running in any thread."""
        return self._gate.busy

    # -- what the hooks of a site or a table call ------------------------------------------------

    def acquire(self, site: int) -> bool:
        """Have a pass run, and the site's weights there: see `Streamer.acquire`."""
        streamer = self._streamer
        # All but a block of the model's running pass, inside no other, is looked at closely.
        if (
            self._running is not _MODEL
            or site in streamer.inside
            or self._prefetcher.held
            or not self._gate.owned()
            or inside_compiled_call()
        ):
            self.enter(streamer.seats[site].module(), site=site)
            if self._replan.settled:  # by the pass that this one waited for: all hooks are off
                return True
        return streamer.acquire(site)

    def release(self, site: int) -> None:
        """Let the site's weights go. Does nothing for a site that is not running."""
        if self._streamer.release(site) and self._running is not _MODEL:
            if self._running is Running.CALL:
                self.log.lap()
            self.leave(self._streamer.seats[site].module())

    def route(self, layer: int, ids: torch.Tensor) -> None:
        """Have a pass run, and the experts `ids` of a layer there, or on their way."""
        if self._running is not _MODEL or not self._gate.owned() or inside_compiled_call():
            self.enter(self._experts.seats[layer].module())
        if not self._prefetcher.held:  # else the block around it has just looked
            self._replan.look_again()
        self._experts.route(layer, ids)

    def refuse_recording_of(self, layer: int) -> NoReturn:
        """Training is not possible: experts go before backward could use them."""
        refuse_recording(self._experts.seats[layer].name)

    def unroute(self, layer: int) -> None:
        """Let the experts of a layer go. Does nothing for one that was not routed."""
        self._experts.unroute(layer)
        if self._running is not _MODEL:
            self.leave(self._experts.seats[layer].module())

    def enter(self, module: nn.Module | None, *, site: int | None = None) -> None:
        """A site or an embedding is called: a pass begins with it if none runs in this thread.

        A site that is on record as running, only a new pass, or the gate's look at the stack, can
        tell from a pass of this thread that died. So it is where another site holds something, and
        where nobody says when a pass is over.
        """
        refuse_compiled()
        if module is None:
            return
        if self._replan.settled:
            self._arrive(module, (), {})
            return
        lent = self._running is Running.CALL
        again = site in self._streamer.inside
        if not again and (self._prefetcher.held or lent):
            again = self._gate.died()
        if not again and (self._gate.step_in(module) if lent else self._gate.owned()):
            return
        # Ids for an embedding say nothing of blocks.
        given = ((), {}) if site is None else arguments_alone(module, *arguments_of(module))
        try:
            self.begin(module, *given)
        except BaseException:  # nobody comes to say that it is over
            self._gate.abandon()
            raise
        if self._gate.is_outermost(module):
            self._running = Running.PART
        elif self._running is not Running.CALL:
            self._gate.leave(module)

    def leave(self, module: nn.Module | None) -> None:
        """The site or embedding that `enter` was called for has run."""
        if module is None:
            return
        if self._running is Running.CALL:
            self._gate.leave(module)
        elif self._running is Running.PART:
            self.end(module, (), None)

    # -- the life of a pass ----------------------------------------------------------------------

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call at which a pass may begin: one does, unless it is inside another.

        Raises:
            MemoryLimitError: it does not fit even with nothing resident.
            CheckpointChangedError: a file was changed.
            UnsupportedOperationError: weights were changed in a way that cannot be kept.
        """
        refuse_compiled()
        if self._running is Running.CALL:
            self._gate.part(module, first=module is self._hooks.outermost())
        if not self._gate.enter(module):
            return
        if self._running is Running.CALL:  # nobody said that it was over
            self._close(done=not self._prefetcher.held and not self._streamer.inside)
        if self._replan.settled:  # by the pass that this one waited for; others may run beside it
            self._gate.leave(module)
            self._arrive(module, args, kwargs)
            return
        if self._running is not Running.NOTHING or self._prefetcher.held:
            self.recover()
        self._adapters.check()
        self._replan.hand_over_edits()
        discard_ended()  # another thread may have ended a pass that died in this one
        self._running = _MODEL
        self._files.check_unchanged()
        if self._experts.seats:
            self._experts.check()
        self.modes.renew()
        if module is not self._hooks.outermost():
            module, args, kwargs, mark = self._direct_calls.call_at(module, args, kwargs)
            if mark is not None:
                self._gate.lend(mark)
                self._running = Running.CALL
        self._governor.before_pass(args, kwargs, module)
        self._replan.catch_up()
        self.log.begin(args, kwargs)
        if self._running is Running.CALL:
            self._governor.let_run()
            self.log.count()
        self.modes.begin(module, args, kwargs)

    def end(self, module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """A call that `begin` was called for is over: so is the pass, if it began there.

        `output` is None after an error.
        """
        if self._gate.is_outermost(module):
            self._close(done=output is not None or self._running is Running.PART)
        self._gate.leave(module)

    def _close(self, *, done: bool) -> None:
        """`done`: it gave its output, as far as anybody can tell."""
        self.modes.stop()
        if self._prefetcher.held or self._streamer.inside:
            self.recover()  # an exception that somebody caught inside the pass
        lent, self._running = self._running is Running.CALL, Running.NOTHING
        self._overlook_edits()
        self._replan.pass_ended()
        self._governor.after_pass()
        if done:
            self.modes.done()
            if not lent:
                self.log.end()
            self._replan.drop_settled()

    def recover(self) -> None:
        """Give back what a pass that died was holding; the next pass starts clean."""
        self.modes.discard()
        self._streamer.recover()
        self._overlook_edits()
        if self._running is Running.PART:
            self._running = _MODEL  # its own hooks have nothing to say any more

    def come_to_rest(self) -> None:
        """Be done with all weights, before somebody puts others in their place."""
        self._edits.hand_over(self._prefetcher.units, last=True)
        self.recover()

    def _overlook_edits(self) -> None:
        """What added modules do to weights while they run, they undo."""
        if self._adapters.present:
            self._edits.overlook()

    # -- passes of a model that is all resident --------------------------------------------------

    def begin_settled(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A pass begins that needs no hook inside: what it takes may make the model stream again.

        Raises:
            MemoryLimitError: it does not fit even with nothing resident.
        """
        self._adapters.check()
        self._governor.before_pass(args, kwargs, module)
        me = threading.get_ident()
        try:
            while self._replan.settled and self._replan.is_behind:
                # Other threads may be computing with what is to be given back, and carry no hook.
                self._waiting.add(me)
                if not self.adopt(self._governor.plan):
                    time.sleep(_IDLE_SECONDS)
        finally:
            self._waiting.discard(me)
        self._gate.wait_while_idle()
        if self._replan.settled:
            self._governor.let_run()
            self.log.begin(args, kwargs)
            self.log.count()
        else:
            self.begin(module, args, kwargs)

    def arrive_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A part of a model that is all resident is called: perhaps past the model's hooks."""
        self._arrive(module, args, kwargs)
        if not self._replan.settled:
            site = self._hooks.site_of(module)
            if site is not None:  # hooks that are put on during a call of it do not run in that
                self.acquire(site)

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = self._direct_calls.settled_call_at(module, args, kwargs)
        if call is not None:
            self.begin_settled(call.module, call.args, call.kwargs)

    def adopt(self, plan: Plan) -> bool:
        """Put `plan` into force if no pass is running; returns whether none was."""
        model = self._hooks.outermost()
        modules = [] if model is None else list(model.modules())
        with self._gate.idle(modules, self._waiting) as idle:
            if idle:
                if self._running is not Running.NOTHING or self._prefetcher.held:
                    self.recover()  # a pass that died holds what is to be given back
                self._replan.put_into_force(plan)
            return idle

    def forget(self) -> bool:
        """In a forked child: count it no more, unless it needs no thread; see forks.py.

        Returns whether memory is left to give back.
        """
        if self._replan.settled:
            return False
        # So a pass recovers first, which is refused here: before anything is computed, since the
        # first product would wait for ever for threads of torch's, which are not there either.
        self._gate, self._running = PassGate(), _MODEL
        return self._governor.forget()
