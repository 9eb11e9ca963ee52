"""Where a pass begins and ends, whoever called it.

A pass begins at the library's models, at a part of one that is called by itself, or at whatever a
method of a model calls first, past its hooks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pipeload.engine.pass_life import PassLife
from pipeload.engine.pass_refusals import arguments_alone, refuse_compiled, refuse_recording
from pipeload.engine.pass_state import Running
from pipeload_hooks import arguments_of, inside_compiled_call

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    import torch
    from torch import nn

_MODEL = Running.MODEL


class Passes(PassLife):
    """What the hooks on a model call, and hold: all that runs goes with the last hook."""

    def acquire(self, site: int) -> bool:
        """Have a pass run, and the site's weights there: see `Streamer.acquire`."""
        streamer = self._streamer
        now = streamer.now
        # All but a block of the model's running pass, inside no other, is looked at closely.
        if (
            now.running is not _MODEL
            or site in now.inside
            or now.held
            or not now.gate.owned()
            or inside_compiled_call()
        ):
            self.enter(streamer.seats[site].module(), site=site)
            if self._replan.settled:  # by the pass that this one waited for: all hooks are off
                return True
        return streamer.acquire(site)

    def release(self, site: int) -> None:
        """Let the site's weights go. Does nothing for a site that is not running."""
        streamer = self._streamer
        if not streamer.release(site):
            return
        now = streamer.now
        if now.running is not _MODEL:
            if now.running is Running.CALL:
                now.log.lap()
            self.leave(streamer.seats[site].module())
        if streamer.hand_over is not None and not now.inside:
            streamer.hand_over()

    def route(self, layer: int, ids: torch.Tensor) -> None:
        """Have a pass run, and the experts `ids` of a layer there, or on their way."""
        now = self._streamer.now
        if now.running is not _MODEL or not now.gate.owned() or inside_compiled_call():
            self.enter(self._experts.seats[layer].module())
        if not self._streamer.now.held:  # else the block around it has just looked
            self._replan.look_again()
        self._experts.route(layer, ids)

    def refuse_recording_of(self, layer: int) -> NoReturn:
        """Training is not possible: experts go before backward could use them."""
        refuse_recording(self._experts.seats[layer].name)

    def unroute(self, layer: int) -> None:
        """Let the experts of a layer go. Does nothing for one that was not routed."""
        self._experts.unroute(layer)
        now, hand_over = self._streamer.now, self._streamer.hand_over
        if now.running is not _MODEL:
            self.leave(self._experts.seats[layer].module())
        if hand_over is not None and not now.inside:
            hand_over()

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
        now = self.convoy.state_of_thread()
        lent = now.running is Running.CALL
        again = site in now.inside
        if not again and (now.held or lent):
            again = now.gate.died()
        if not again and (now.gate.step_in(module) if lent else now.gate.owned()):
            return
        # Ids for an embedding say nothing of blocks.
        given = ((), {}) if site is None else arguments_alone(module, *arguments_of(module))
        try:
            self.begin(module, *given)
        except BaseException:  # nobody comes to say that it is over
            now.gate.abandon()
            raise
        if now.gate.is_outermost(module):
            now.running = Running.PART
        elif now.running is not Running.CALL:
            now.gate.leave(module)

    def leave(self, module: nn.Module | None) -> None:
        """The site or embedding that `enter` was called for has run."""
        now = self._streamer.now
        if module is None:
            return
        if now.running is Running.CALL:
            now.gate.leave(module)
        elif now.running is Running.PART:
            self.end(module, (), None)

    def chunks(self, site: int) -> Generator[tuple[int, int, torch.Tensor], None, None]:
        """The ranges of rows of a split weight: see `Streamer.chunks`."""
        return self._streamer.chunks(site)

    def by_whole(
        self, site: int, module: nn.Module, given: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """What multiplies where ranges would give other bits: see `Streamer.by_whole`."""
        return self._streamer.by_whole(site, module, given, dtype)

    def refuse_recording(self, site: int) -> NoReturn:
        """Training is not possible: weights are overwritten before backward could use them."""
        self._streamer.refuse_recording(site)

    def abandon(self) -> None:
        """In a forked child: see `Streamer.abandon`."""
        self._streamer.abandon()

    def arrive_at(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A part of a model that is all resident is called: perhaps past the model's hooks."""
        self._arrive(module, args, kwargs)
        if not self._replan.settled:
            site = self._hooks.site_of(module)
            if site is not None:  # hooks that are put on during a call of it do not run in that
                self.acquire(site)
