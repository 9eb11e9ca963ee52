"""All experts of a model: has those that are routed to there while their module runs.

[Note: two ways through a layer] Experts that are there are computed with at once; the others are
read meanwhile, as far as the products allow it: see [Note: one expert at a time] in the lower
layer's _experts.py. Those that stay have room in the cache. Those that do not, which in a prompt
are most, pass through a window of a few matrices: each is read ahead of its product, and given back
behind it.

[Note: what is there] An interrupt may come anywhere, also between the cache's choice and the reads
that follow. So what is there is written down in one step, once all of a layer's reads are done, and
after an interrupt the cache is told that.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter, deque
from typing import TYPE_CHECKING, NoReturn

import torch

from pipeload.budget.expert_cache import ExpertCache
from pipeload.budget.parts import window_matrices
from pipeload.engine.expert_reads import ExpertReads, Slice
from pipeload.errors import UnsupportedOperationError
from pipeload.weights.expert_bank import slice_bytes
from pipeload_hooks import ServeExperts, discard_ended

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from pipeload.budget.counters import Counters
    from pipeload.budget.parts import Bank
    from pipeload.checkpoint.stalls import Stalls
    from pipeload.engine.expert_seats import ExpertSeat

_INTEGERS = frozenset({torch.int32, torch.int64})


class Experts:
    """The cache of a model's experts, and the reads for it. Used by the thread of the pass."""

    def __init__(
        self,
        seats: Sequence[ExpertSeat],
        banks: Sequence[Bank],
        counters: Counters,
        stalls: Stalls,
    ) -> None:
        """`seats` are those of `banks`, in the same order."""
        self.seats = seats
        self._cache = ExpertCache([bank.expert_bytes for bank in banks])
        self._sizes = [sum(map(slice_bytes, bank.weights)) for bank in banks]
        self._window = window_matrices(banks) if banks else 0
        self._counters = counters
        self.reads = ExpertReads(counters, stalls)
        self._there: list[set[int]] = [set() for _ in banks]
        """By layer: see [Note: what is there]."""
        self._running: _Layer | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.seats)

    def route(self, layer: int, ids: torch.Tensor) -> None:
        """Have the experts `ids` of a layer there, or come while its module runs.

        Ids that name no expert are left to the module.
        """
        self.unroute(layer)
        seat, there = self.seats[layer], self._there[layer]
        chosen = self._cache.choose(layer, _shares(ids, seat.experts))
        # An interrupt may have left some that were to be read.
        hits = [expert for expert in chosen.hits if expert in there]
        kept = sorted({*chosen.kept, *chosen.hits}.difference(hits))
        self._counters.expert_hits += len(hits)
        self._counters.expert_misses += len(kept) + len(chosen.passing)
        self._drop(chosen.evicted)
        seat.bind()
        if kept or chosen.passing:
            self._running = _Layer(
                seat, hits, kept, chosen.passing, window=self._window, reads=self.reads
            )
            self._running.begin()

    def unroute(self, layer: int) -> None:
        """The layer has run. Does nothing for one that was not routed."""
        seat, running = self.seats[layer], self._running
        seat.unbind()
        if running is not None and running.seat is seat:
            self._there[layer].update(running.finish())
            self._running = None
            self._reconcile(layer)

    def hold(self, budget: int) -> None:
        """Keep no more than `budget` bytes of experts from now on; the others go at once."""
        self._drop(self._cache.shrink(budget))

    def recover(self) -> None:
        """Give back what a pass that died was using, wherever it died."""
        for seat in self.seats:
            seat.unbind()
        running, self._running = self._running, None
        if running is not None:
            running.give_up()
        self._cache.be(self._there)
        self._count()

    def have_all(self, layer: int) -> None:
        """Read all experts of a layer that are not there, for good: the model gets them back.

        Raises:
            ReadError: the disk failed.
        """
        seat, there = self.seats[layer], self._there[layer]
        missing = [expert for expert in range(seat.experts) if expert not in there]
        parts = [Slice(layer, name, expert) for name in seat.names for expert in missing]
        for part in parts:
            self.reads.submit(part, seat.memory.read_jobs(part.name, part.expert))
        for part in parts:
            self.reads.wait(part, seat.name)

    def missing_bytes(self, layer: int) -> int:
        """How much `have_all` would take, in bytes."""
        return (self.seats[layer].experts - len(self._there[layer])) * self._sizes[layer]

    def abandon(self) -> None:
        """In a forked child: give all memory back, for good."""
        for seat in self.seats:
            seat.unbind()
            seat.memory.drop_all()

    def _reconcile(self, layer: int) -> None:
        """What was to be read of a layer and is not there is not held."""
        if len(self._cache.held(layer)) != len(self._there[layer]):
            self._cache.be(self._there)
        self._count()

    def _drop(self, evicted: Sequence[tuple[int, int]]) -> None:
        for layer, expert in evicted:
            self._there[layer].discard(expert)
            self.seats[layer].drop(expert)
        self._count()

    def _count(self) -> None:
        held = map(len, map(self._cache.held, range(len(self._sizes))))
        self._counters.expert_bytes = sum(map(operator.mul, held, self._sizes))


def _shares(ids: torch.Tensor, experts: int) -> dict[int, float]:
    """Which experts are routed to, and by which share of the rows."""
    if ids.dtype not in _INTEGERS or not ids.numel():
        return {}
    rows = ids.shape[0] if ids.dim() > 1 else ids.numel()
    counts = Counter(ids.reshape(-1).tolist())
    return {e: count / rows for e, count in counts.items() if 0 <= e < experts}


class _Layer:
    """One run of an experts module of which not all experts are there: a `Service`."""

    def __init__(
        self,
        seat: ExpertSeat,
        hits: Collection[int],
        kept: Sequence[int],
        passing: Sequence[int],
        *,
        window: int,
        reads: ExpertReads,
    ) -> None:
        """`hits` are there, `kept` are to be read and stay, `passing` go behind their products.

        `window`: how many slices of those that go may be there at once.
        """
        self.seat, self._window, self._reads = seat, window, reads
        self._hits, self._kept = frozenset(hits), frozenset(kept)
        self._serving = ServeExperts(seat.parameters, self)
        names, misses = seat.names, [*kept, *passing]
        each = itertools.product(names, misses)
        loop = ((name, expert) for expert in sorted(misses) for name in names)
        self._order: deque[Slice] = deque(
            Slice(seat.layer, *pair) for pair in (each if seat.sweeps else loop)
        )
        """What is still to be read, in the order in which it is likely to be used."""
        self._coming: set[Slice] = set()
        """What was asked for and stays."""
        self._passing: dict[Slice, None] = {}
        """What is in the window."""
        self._latest: Slice | None = None

    def begin(self) -> None:
        """Have the first reads begin, and be asked while the module runs."""
        self._fill()
        self._serving.begin()

    def order(self, _name: str, experts: Sequence[int]) -> Sequence[int]:
        """What is there first, then what stays, as it was asked for in this order."""
        return sorted(experts, key=lambda e: (e not in self._hits, e not in self._kept, e))

    def need(self, name: str, expert: int) -> None:
        """Return once a slice is there; in the window, the one that was needed before goes.

        Raises:
            ReadError: the disk failed.
        """
        if expert in self._hits or not 0 <= expert < self.seat.experts:
            return
        wanted, latest = Slice(self.seat.layer, name, expert), self._latest
        if wanted == latest:
            return
        if latest is not None:
            self._give_back(latest)
        if wanted not in self._coming and wanted not in self._passing:
            if self._order and self._order[0] != wanted:  # the module does not go by the order
                self._order = deque(part for part in self._order if part != wanted)
            while expert not in self._kept and len(self._passing) >= self._window:
                self._give_back(next(iter(self._passing)))
            self._ask(wanted)
            if self._order and self._order[0] == wanted:
                self._order.popleft()
        self._fill()
        self._reads.wait(wanted, self.seat.name)
        self._latest = wanted

    def finish(self) -> list[int]:
        """The module has run: give back what does not stay; experts that are there from now on."""
        parts = {e: [Slice(self.seat.layer, n, e) for n in self.seat.names] for e in self._kept}
        there = [
            expert
            for expert, slices in parts.items()
            if all(part in self._coming and self._reads.came(part) for part in slices)
        ]
        self._end(self._kept.difference(there))
        return there

    def give_up(self) -> None:
        """The module has died: nothing of what was read is there."""
        self._end(self._kept)

    def _end(self, lost: Iterable[int]) -> None:
        self._serving.end()
        self._reads.cancel()
        for part in [*self._passing]:
            self._give_back(part)
        for expert in lost:
            self.seat.drop(expert)
        discard_ended()

    def refuse(self, function: str, name: str) -> NoReturn:
        """Say which function cannot be served.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            f"the experts of {self.seat.name!r} are read as they are routed to, and "
            f"{function}() takes all of {name!r} at once. Choose one of the library's own ways "
            '(model.set_experts_implementation("grouped_mm"), "batched_mm" or "eager"), or load '
            "the model without pipeload."
        )

    def _fill(self) -> None:
        """Ask for as much as there is room for, in order."""
        while self._order:
            if self._order[0].expert not in self._kept and len(self._passing) >= self._window:
                return
            self._ask(self._order.popleft())

    def _ask(self, part: Slice) -> None:
        if part.expert in self._kept:
            self._coming.add(part)
        else:
            self._passing[part] = None
        self._reads.submit(part, self.seat.memory.read_jobs(part.name, part.expert))

    def _give_back(self, part: Slice) -> None:
        if part in self._passing:
            del self._passing[part]
            self._reads.came(part)  # else it would come back after it went
            self.seat.memory.drop(part.name, part.expert)
