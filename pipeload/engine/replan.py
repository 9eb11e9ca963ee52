"""Where a plan changes: what units keep and stream from now on, and which sites need hooks for it.

A governor says which plan is to be in force. It comes into force before a pass runs, before a site
runs inside one, or between passes; never while a weight is in use that it takes away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pipeload.budget.governor import Governor
    from pipeload.budget.plan import Plan
    from pipeload.engine.edited_weights import Edits
    from pipeload.engine.expert_routing import Experts
    from pipeload.engine.hooking import Hooks
    from pipeload.engine.site_parameters import Seat
    from pipeload.prefetch.prefetcher import Prefetcher
    from pipeload.weights.layout import Weight


class Replan:
    """Puts plans into force, and lets go of the sites for which nothing is left to do."""

    def __init__(
        self,
        *,
        seats: Sequence[Seat],
        hooks: Hooks,
        edits: Edits,
        prefetcher: Prefetcher,
        governor: Governor,
        experts: Experts,
        whole: Callable[[Weight], torch.Tensor],
    ) -> None:
        """`whole` shows a weight whose ranges of rows are all resident."""
        self._seats, self.hooks, self.edits = seats, hooks, edits
        self.prefetcher, self.governor, self.experts = prefetcher, governor, experts
        self.whole = whole
        self.settled = False
        """Whether all is resident and bound: no site carries a hook, and no thread runs."""
        self._in_force: Plan | None = governor.plan
        """The plan that was put into force last, None after an interrupt in the middle of that."""
        self._kept_old = False
        """Units that were in use then keep and stream what they did before."""
        self._streaming: frozenset[int] | None = None
        """Sites that need hooks as long as this plan is in force; None: not looked up yet."""

    @property
    def is_behind(self) -> bool:
        """Whether the governor wants another plan than the one that is in force."""
        return self.governor.plan is not self._in_force

    def look_again(self) -> None:
        """Before a site runs: somebody else may have taken memory since the pass began."""
        self.governor.inside_pass()
        if self.governor.plan is not self._in_force:
            self.put_into_force(self.governor.plan)

    def catch_up(self) -> None:
        """Put into force what the governor wants, if that is another plan."""
        if self.governor.plan is not self._in_force:
            self.put_into_force(self.governor.plan)

    def put_into_force(self, plan: Plan) -> None:
        """Keep and stream what `plan` says; what is over it has been given back on return.

        Units in use keep what they have until `pass_ended`.
        """
        # No weight is touched before the sites' hooks are back: an interrupt may come anywhere.
        torn, self._in_force, self._streaming = self._in_force is None, None, None
        self.hooks.attach_sites()
        if self.settled or torn:
            self.prefetcher.start()
            self.settled = False
            self.hooks.attach_passes()
        held = self.prefetcher.held
        if not held:
            self.hand_over_edits()  # else the pass has looked for them when it began
        units = self.prefetcher.units
        changed = {i for i, unit in enumerate(units) if unit.plan is not plan.units[i]}
        for seat in self._seats:
            if not changed.isdisjoint(seat.units) and held.isdisjoint(seat.units):
                seat.evict()
        if plan.experts is not None:
            self.experts.hold(plan.experts.cache_bytes)
        self.prefetcher.resplit(plan.units, plan.slot_bytes)
        self._in_force, self._kept_old = plan, bool(held)

    def pass_ended(self) -> None:
        """No unit is in use any more: those that kept what they had follow before the next pass."""
        if self._kept_old:
            self._in_force = None

    def hand_over_edits(self) -> None:
        """Leave weights to the user that were changed meanwhile; to be called while none is in use.

        Raises:
            UnsupportedOperationError: what was written to a weight is gone, or cannot be left.
        """
        if self.edits.hand_over(self.prefetcher.units):
            for index in self.hooks.sites():
                if not self._seats[index].parameters:
                    self.hooks.detach_site(index)

    def drop_settled(self) -> None:
        """Take the hooks off sites that are all resident and bound, after a pass."""
        units, seats, sites = self.prefetcher.units, self._seats, self.hooks.sites()
        if self._streaming is None:
            self._streaming = frozenset(
                site for site in sites if any(units[index].streams for index in seats[site].units)
            )
        if sites and self._streaming.issuperset(sites):
            return
        left = [site for site in sites if not seats[site].settled(units)]
        streams = bool(left or self.experts.seats)  # these are always asked what is routed to
        for site in sites:
            if site not in left and not (streams and seats[site].shared):
                self.hooks.detach_site(site)
        if not streams:
            self._settle()

    def _settle(self) -> None:
        """Everything is resident and bound: hooks that see where passes begin are left."""
        self.settled = True
        for seat in self._seats:
            if seat.shared:
                seat.bind_whole(self.whole)
        self.hooks.detach_shared_tables()
        self.hooks.attach_settled()
        self.prefetcher.close()
