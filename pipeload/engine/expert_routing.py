"""All experts of a model: has those that are routed to there while their module runs.

[Note: what is there] An interrupt may come anywhere, also between the cache's choice and the reads
that follow. So what is there is written down in one step, once all of a layer's reads are done, and
after an interrupt the cache is told that.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING

import torch

from pipeload.budget.expert_cache import ExpertCache
from pipeload.budget.model_parts import window_matrices
from pipeload.engine.expert_computing import ExpertLayer
from pipeload.engine.expert_parameters import ExpertSeat
from pipeload.engine.expert_reads import ExpertReads, Slice
from pipeload.hf.expert_modules import check_implementation
from pipeload.weights.expert_bank import ExpertBank, block_bytes, scratch_bytes
from pipeload.weights.nan_arena import NanBlock

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from pipeload.budget.make_plan import Build
    from pipeload.budget.read_counters import Counters
    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.weights.layout import Weight
    from pipeload.weights.placement import Convert


class Experts:
    """The cache of a model's experts, and the reads for it. Used by the thread of the pass."""

    def __init__(
        self,
        build: Build,
        filled: Mapping[str, tuple[nn.Parameter, Weight]],
        files: FileSet,
        convert: Convert,
        counters: Counters,
    ) -> None:
        """Reserve address space for all experts; nothing is read.

        Args:
            build: which experts there are, and what the plan has for them.
            filled: parameters by name.
            files: the open checkpoint.
            convert: runs the library's operations.
            counters: told what is held and read.

        Raises:
            MemoryError: the system refuses the address space.
        """
        banks, share = build.parts.banks, build.plan.experts
        weights = [weight for bank in banks for weight in bank.weights]
        block = NanBlock(block_bytes(sum(weight.nbytes for weight in weights)))
        self.seats = [
            ExpertSeat(
                layer,
                bank,
                {weight.name: filled[weight.name][0] for weight in bank.weights},
                ExpertBank(bank.weights, files, convert, block),
            )
            for layer, bank in enumerate(banks)
        ]
        block.close()
        self._cache = ExpertCache([bank.expert_bytes for bank in banks])
        self._sizes = [bank.slice_bytes for bank in banks]
        self._window = window_matrices(banks) if banks else 0
        self._counters = counters
        self.reads = ExpertReads(counters, files.stalls, scratch_bytes(weights))
        self._there: list[set[int]] = [set() for _ in banks]
        """By layer: see [Note: what is there]."""
        self._running: ExpertLayer | None = None
        if share is not None:
            self.hold(share.cache_bytes)

    def route(self, layer: int, ids: torch.Tensor) -> None:
        """Have the experts `ids` of a layer there, or come while its module runs.

        Ids that name no expert are left to the module.
        """
        if self._give_up():  # somebody has caught what ended it
            self._reconcile()
        seat, there = self.seats[layer], self._there[layer]
        shares = _shares(ids, seat.experts)
        if len(there) == seat.experts:
            self._counters.expert_hits += len(shares)
            seat.bind()
            return
        chosen = self._cache.choose(layer, shares)
        # An interrupt may have left some that were to be read.
        hits = [expert for expert in chosen.hits if expert in there]
        kept = sorted({*chosen.kept, *chosen.hits}.difference(hits))
        self._counters.expert_hits += len(hits)
        self._counters.expert_misses += len(kept) + len(chosen.passing)
        self._drop(chosen.evicted)
        seat.bind()
        if kept or chosen.passing:
            self._count()
            self._running = ExpertLayer(
                seat, hits, kept, chosen.passing, window=self._window, reads=self.reads
            )
            self._running.begin()

    def unroute(self, layer: int) -> None:
        """The layer has run. Does nothing for one that was not routed."""
        seat, running = self.seats[layer], self._running
        seat.unbind()
        if running is not None and running.seat is seat:
            # Interrupted here, it is still the one that runs, and is given up like any other.
            self._there[layer].update(running.finish())
            self._running = None
            self._reconcile()

    def check(self) -> None:
        """Before a pass: whether its experts can be served.

        Raises:
            UnsupportedOperationError: they multiply in a way that is not known.
        """
        module = self.seats[0].module()
        if module is not None:
            check_implementation(module)

    def hold(self, budget: int) -> None:
        """Keep no more than `budget` bytes of experts from now on; the others go at once."""
        self._drop(self._cache.shrink(budget))

    def recover(self) -> None:
        """Give back what a pass that died was using, wherever it died."""
        for seat in self.seats:
            seat.unbind()
        self._give_up()
        self._cache.hold_only(self._there)
        self._count()

    def close(self) -> None:
        """End what a pass that died has left, then the reads. May be called again."""
        self._give_up()
        self.reads.close()

    def have_all(self, layer: int, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Read all of these parameters of a layer, for good: the model gets them back.

        Raises:
            ReadError: the disk failed.
        """
        seat, there = self.seats[layer], self._there[layer]
        views = {name: seat.memory.views[name] for name in names}
        parts = [
            Slice(layer, name, expert)
            for name in views
            for expert in seat.experts_of(name)
            if expert not in there
        ]
        for part in parts:
            self.reads.submit(part, seat.memory.read_jobs(part.name, part.expert))
        for part in parts:
            self.reads.wait(part, seat.name)
        return views

    def missing_bytes(self, layer: int) -> int:
        """The most that `have_all` would take, in bytes."""
        return (self.seats[layer].experts - len(self._there[layer])) * self._sizes[layer]

    def abandon(self) -> None:
        """In a forked child: give all memory back, for good."""
        for seat in self.seats:
            seat.unbind()
            seat.memory.drop_all()

    def _give_up(self) -> bool:
        """Be done with a layer whose run has died; whether there is one."""
        running = self._running
        if running is None:
            return False
        self._there[running.seat.layer].difference_update(running.kept)
        running.give_up()
        self._running = None
        return True

    def _reconcile(self) -> None:
        """What was to be read and is not there is not held."""
        held = map(len, map(self._cache.held, range(len(self._there))))
        if any(map(operator.ne, held, map(len, self._there))):
            self._cache.hold_only(self._there)
        self._count()

    def _drop(self, evicted: Sequence[tuple[int, int]]) -> None:
        if not evicted:
            return
        for layer, expert in evicted:
            self._there[layer].discard(expert)
            self.seats[layer].drop(expert)
        self._count()

    def _count(self) -> None:
        held = map(len, map(self._cache.held, range(len(self._sizes))))
        self._counters.expert_bytes = sum(map(operator.mul, held, self._sizes))


def _shares(ids: torch.Tensor, experts: int) -> dict[int, float]:
    """Which experts are routed to, and by which share of the rows."""
    if ids.is_floating_point() or ids.dtype is torch.bool or not ids.numel():
        return {}
    rows = ids.shape[0] if ids.dim() > 1 else ids.numel()
    # As an index takes them: from the end, if they are below 0.
    counts = Counter(e + experts if e < 0 else e for e in ids.reshape(-1).tolist())
    return {e: count / rows for e, count in counts.items() if 0 <= e < experts}
