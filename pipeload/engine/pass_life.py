"""The life of a pass: what is done when it begins, and when it is over.

Passes of a model that streams run one after the other, or take turns in a convoy; those of one that
is all resident run beside each other, see `begin_settled`.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from pipeload.budget.pass_shape import cache_of
from pipeload.engine.convoy import Convoy
from pipeload.engine.direct_calls import DirectCalls, PassCall
from pipeload.engine.pass_modes import PassModes
from pipeload.engine.pass_refusals import (
    FirstCalls,
    refuse_compiled,
)
from pipeload.engine.pass_state import PassState, Running
from pipeload.hf.growing_cache import let_grow
from pipeload_hooks import PassGate, discard_ended

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeload.budget.plan import Plan
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.engine.adapter_watch import Adapters
    from pipeload.engine.pass_log import PassLog
    from pipeload.engine.replan import Replan
    from pipeload.engine.streamer import Streamer

_IDLE_SECONDS = 0.01


_MODEL = Running.MODEL


class PassLife:
    """Begins and ends the passes of one model.

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
        self._streamer, self._replan, self._files = streamer, replan, files
        self._governor = replan.governor
        self._experts = replan.experts
        self._hooks, self._adapters, self._edits = replan.hooks, adapters, replan.edits
        self._direct_calls = DirectCalls(replan.hooks, pass_modules)
        gate, seats = PassGate(), [*streamer.seats, *self._experts.seats]
        self.modes = PassModes(
            FirstCalls(seats, streamer.tables, adapters, gate),
            (parameter.dtype for seat in seats for parameter in seat.parameters.values()),
        )
        self._own = streamer.now = PassState(gate, self.modes, replan.prefetcher.held)
        self.log = self._own.log
        self.convoy = Convoy(self._own, streamer, replan)
        """Threads whose passes take turns with each other's."""
        self._waiting: set[int] = set()
        """Threads that wait at the start of a pass until others have ended theirs."""

    @property
    def busy(self) -> bool:
        """Whether a pass is running in any thread."""
        return self._gate.busy

    @property
    def model(self) -> nn.Module:
        """What streams."""
        model = self._hooks.outermost()
        if model is None:
            raise ReferenceError("the model that streamed is gone")
        return model

    @property
    def _gate(self) -> PassGate:
        """Around the passes that take no turns."""
        return self._own.gate

    # -- the life of a pass ----------------------------------------------------------------------

    def begin(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        granted: bool = False,
    ) -> None:
        """A call at which a pass may begin: one does, unless it is inside another.

        `granted`: it has been its turn already.

        Raises:
            MemoryLimitError: it does not fit even with nothing resident.
            CheckpointChangedError: a file was changed.
            UnsupportedOperationError: weights were changed in a way that cannot be kept.
        """
        refuse_compiled()
        now = self.convoy.state_of_thread()
        if now.running is Running.CALL:
            now.gate.part(module, first=module is self._hooks.outermost())
        if not now.gate.enter(module):
            return
        if now.running is Running.CALL:  # nobody said that it was over
            self._close(done=not now.held and not now.inside)
        if self._replan.settled:  # by the pass that this one waited for; others may run beside it
            now.gate.leave(module)
            self._arrive(module, args, kwargs)
            return
        if now.running is not Running.NOTHING or now.held:
            self.recover()
        discard_ended()  # another thread may have ended a pass that died in this one
        now.running = _MODEL
        now.modes.renew()
        call = self._call_at(now, module, args, kwargs)
        if not granted and not self.convoy.arrive(call):
            self.open_round([call])
        _note(now.log, call.args, call.kwargs)
        if self._replan.settled:  # nobody will say that it is over: all is there
            now.running = Running.NOTHING
            now.gate.abandon()
            now.log.count()
            return
        if now.running is Running.CALL:
            self._governor.let_run()
            now.log.count()
        now.modes.begin(call.module, call.args, call.kwargs)

    def _call_at(
        self,
        now: PassState,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> PassCall:
        """The pass that begins with a call: its own, or one by a method past the model's hooks."""
        if module is self._hooks.outermost():
            return PassCall(module, args, kwargs)
        call = self._direct_calls.call_at(module, args, kwargs)
        if call.mark is not None:
            now.gate.lend(call.mark)
            now.running = Running.CALL
        return call

    def open_round(self, calls: Sequence[PassCall]) -> int:
        """Make room for passes that take turns, or for one; returns for how many, the first ones.

        Raises:
            MemoryLimitError: not even the first fits with nothing resident.
            CheckpointChangedError: a file was changed.
            UnsupportedOperationError: weights were changed in a way that cannot be kept.
        """
        self._adapters.check()
        if not self._replan.settled:
            self._replan.hand_over_edits()
            self._files.check_unchanged()
            if self._experts.seats:
                self._experts.check()
        admitted = self._governor.before_passes(calls)
        if self._replan.settled:
            self._catch_up_settled()
        else:
            self._replan.catch_up()
        return admitted

    def end(self, module: nn.Module, _args: tuple[Any, ...], output: object) -> None:
        """A call that `begin` was called for is over: so is the pass, if it began there.

        `output` is None after an error.
        """
        now = self.convoy.state_of_thread()
        if now.gate.is_outermost(module):
            self._close(done=output is not None or now.running is Running.PART)
        now.gate.leave(module)

    def _close(self, *, done: bool) -> None:
        """`done`: it gave its output, as far as anybody can tell."""
        now = self._streamer.now
        now.modes.stop()
        if now.held or now.inside:
            self.recover()  # an exception that somebody caught inside the pass
        lent, now.running = now.running is Running.CALL, Running.NOTHING
        self._overlook_edits()
        if done:
            now.modes.done()
            if not lent:
                now.log.end()
        if self.convoy.active:
            self.convoy.leave_round()
            return
        self._replan.pass_ended()
        self._governor.after_pass()
        if done:
            self._replan.drop_settled()

    def rest(self) -> None:
        """Be done with a pass that died, or of which nobody has said that it was over."""
        if self._own.running is Running.CALL:
            self._close(done=not self._own.held and not self._own.inside)
        elif self._own.running is not Running.NOTHING or self._own.held:
            self.recover()
            self._own.running = Running.NOTHING

    def recover(self) -> None:
        """Give back what a pass that died was holding; the next pass starts clean."""
        now = self._streamer.now
        now.modes.discard()
        self._streamer.recover()
        self._overlook_edits()
        if now.running is Running.PART:
            now.running = _MODEL  # its own hooks have nothing to say any more

    def come_to_rest(self) -> None:
        """Be done with all weights, before somebody puts others in their place."""
        self._edits.hand_over(self._replan.prefetcher.units, last=True)
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
        granted = self.convoy.arrive(PassCall(module, args, kwargs))
        if not granted:
            self._adapters.check()
            self._governor.before_pass(args, kwargs, module)
            self._catch_up_settled()
            self._gate.wait_while_idle()
        if self._replan.settled:
            self._governor.let_run()
            log = self.convoy.state_of_thread().log
            _note(log, args, kwargs)
            log.count()
        else:
            self.begin(module, args, kwargs, granted=granted)

    def _catch_up_settled(self) -> None:
        me, member = threading.get_ident(), self.convoy.has_turn()
        try:
            while self._replan.settled and self._replan.is_behind:
                # Other threads may be computing with what is to be given back, and carry no hook.
                self._waiting.add(me)
                if not self.adopt(self._governor.plan, between_rounds=member):
                    if not member:
                        self.convoy.run_to_the_end()
                    time.sleep(_IDLE_SECONDS)
        finally:
            self._waiting.discard(me)

    def _arrive(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = self._direct_calls.settled_call_at(module, args, kwargs)
        if call is not None:
            self.begin_settled(call.module, call.args, call.kwargs)

    def adopt(self, plan: Plan, *, between_rounds: bool = False) -> bool:
        """Put `plan` into force if no pass is running; returns whether none was.

        `between_rounds`: all members of the convoy wait for a round, the caller among them.
        """
        model = self._hooks.outermost()
        modules = [] if model is None else list(model.modules())
        waiting = self._waiting | (self.convoy.threads if between_rounds else frozenset())
        with self._gate.idle(modules, waiting, held=between_rounds) as idle:
            if idle:
                if self._own.running is not Running.NOTHING or self._own.held:
                    self.recover()  # a pass that died holds what is to be given back
                self._replan.put_into_force(plan)
            return idle

    def forget(self) -> bool:
        """In a forked child: count it no more, unless it needs no thread; see forks.py.

        Returns whether memory is left to give back.
        """
        self.convoy = self.convoy.anew()  # its threads are not there
        if self._replan.settled:
            return False
        # So a pass recovers first, which is refused here: before anything is computed, since the
        # first product would wait for ever for threads of torch's, which are not there either.
        self._own.gate, self._own.running = PassGate(), _MODEL
        return self._governor.forget()


def _note(log: PassLog, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """A pass with these arguments has been granted."""
    log.begin(args, kwargs)
    let_grow(cache_of(args, kwargs))
