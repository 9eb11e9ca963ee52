"""One machine's share of a model: met, agreed on and dealt out before anything is loaded."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeload._sizes import counted, format_size
from pipeload.budget.model_parts import Elsewhere
from pipeload.errors import GroupError, OptionError
from pipeload.ring import agreement
from pipeload.ring.deal import Deal, RankPower, even
from pipeload.ring.environment import place_here
from pipeload.ring.head_rows import HeadRows, deal_with_rows
from pipeload.ring.outputs import Part, RowsPart
from pipeload.ring.relay import Relay
from pipeload.ring.told import told
from pipeload.ring.turns import Turns
from pipeload.weights.disk_rate import probe

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.ring.dealt_parts import DealtPart
    from pipeload.weights.row_cuts import RowRange

_log = logging.getLogger("pipeload")

AUTO, MIXED = "auto", "mixed"
# For a rate, in little memory: all there is under the limit is needed afterwards.
_PROBE = 16, 2 << 20, 4
"""Pieces, the bytes of each, and readers."""
_PROBE_SECONDS, _MOST_PIECES = 0.8, 192
_PRODUCT_BYTES = 16 << 20
_ROUNDS = 8


def wanted_size(ranks: int | str | None) -> int:
    """How many ranks there are to be; 1 where there is nothing to share.

    Raises:
        OptionError: the environment has others, or a variable means nothing.
    """
    if ranks is None:
        return 1
    place = place_here()
    size = 1 if place is None else place.size
    if isinstance(ranks, int) and ranks != size:
        raise OptionError(
            f"ranks={ranks}, and the environment says WORLD_SIZE={size}. Run the script by "
            f"`torchrun --nnodes {ranks} ...` on {counted(ranks, 'machine')}, or set RANK, "
            "WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each."
        )
    return size


def rank_here(ranks: int | str | None) -> int:
    """This process's place among those that share a model; 0 where it has it for itself.

    Raises:
        OptionError: as for `wanted_size`.
    """
    place = place_here() if wanted_size(ranks) > 1 else None
    return 0 if place is None else place.rank


@dataclass(frozen=True, slots=True)
class Powers:
    """What the deal is made of, as this rank measures it."""

    room_bytes: int
    """For weights."""
    files: Sequence[Path]
    dtype: torch.dtype
    """Of the weights."""
    hidden: int
    """Bytes of what a block gives for one token."""
    head: HeadRows | None
    """The last part, if its rows may be dealt out."""


class Membership:
    """This rank's part in a group that runs one model."""

    def __init__(self, ranks: int | str) -> None:
        """Meet the others.

        Raises:
            GroupError: some do not come.
        """
        from pipeload.ring.group import Group  # not every torch is built with what it needs

        place = place_here()
        assert place is not None  # noqa: S101 - `wanted_size` has said so
        self._mixed = ranks == MIXED
        self.group = Group(place)
        self._alike = True
        self.turns = Turns(self.group)
        self.deal: Deal | None = None
        self._parts: list[Part] = []
        self._shared: RowsPart | None = None

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What all ranks have to get through, or none goes on.

        Raises:
            GroupError: another one failed.
        """
        group = self.group
        try:
            yield
        except Exception as error:
            with contextlib.suppress(GroupError):
                group.gather_json(told(error), doing)
            raise
        except BaseException as error:
            group.break_off(f"{type(error).__name__} while {doing}")
            raise
        texts = group.gather_json("", doing)
        failed = [rank for rank, text in enumerate(texts) if text]
        if failed:
            rank = failed[0]
            raise GroupError(
                f"{group.name(rank)} could not go on while {doing}: {texts[rank]} Put that right "
                "there, then load the model again on all ranks.",
                rank=rank,
                host=group.hosts[rank],
            )

    def agree(
        self,
        config: Mapping[str, Any],
        entries: Mapping[str, TensorEntry],
        attention: str,
        kernels: Mapping[str, Any],
    ) -> None:
        """Compare what the ranks have.

        Raises:
            GroupError: it is not the same.
        """
        with self.together("the model is compared"):
            mine = agreement.statement(config, entries, attention, kernels)
        statements = self.group.gather_json(mine, "the model is compared")
        self._alike = agreement.check(statements, self.group.name, mixed=self._mixed)
        if not self._alike:
            _log.warning(
                "processors, threads or kernels differ between ranks: results are those of no one "
                "machine"
            )

    def deal_out(self, parts: Sequence[DealtPart], mine: Powers) -> None:
        """Decide who runs what: the same on all ranks.

        Raises:
            GroupError: there are fewer blocks than ranks, or a rank could not measure.
        """
        group = self.group
        blocks = sum(bool(part.layers) for part in parts)  # not the head
        if blocks < group.size:
            raise GroupError(
                f"{counted(blocks, 'block')} of the model for {group.size} ranks: some would have "
                f"none. Run {counted(blocks, 'rank')} at most."
            )
        with self.together("disks are measured"):
            measured = [mine.room_bytes, disk_rate(mine.files), compute_rate(mine.dtype)]
        link = self._link_seconds(mine.hidden)
        powers = group.gather_json([*measured, link], "disks are measured")
        disks = even([disk for _, disk, *_ in powers])
        ranks = [
            RankPower(room, disk, compute)
            for (room, _, compute, _), disk in zip(powers, disks, strict=True)
        ]
        sizes = [part.nbytes for part in parts]
        link = max(link for *_, link in powers)
        self.deal, rows = deal_with_rows(
            mine.head,
            sizes,
            ranks,
            self._all_exact,
            blocks=blocks,
            link_seconds=link,
        )
        if rows:
            self._shared = RowsPart(parts[-1].name, rows)
        self._parts = [
            Part(part.name, owner, part.layers)
            for part, owner in zip(parts, self.deal.owners, strict=False)  # without a shared head
        ]
        _log.info("%s", self._described(ranks, mine.head))

    def _all_exact(self, head: HeadRows, rows: Sequence[RowRange]) -> bool:
        """Whether each rank's rows of the head have the whole's bits on it."""
        with self.together("rows of the head are tried"):
            exact = head.is_exact(rows[self.group.rank])
        return all(self.group.gather_json(exact, "rows of the head are tried"))

    def _link_seconds(self, nbytes: int) -> float:
        """How long it takes until all have what one gave for a token: the median of a few."""
        group, times = self.group, []
        room = torch.zeros(nbytes + 1, dtype=torch.uint8)
        for round_ in range(_ROUNDS):
            began = time.perf_counter()
            group.broadcast(room, round_ % group.size, "the network is measured")
            times.append(time.perf_counter() - began)
        return sorted(times)[_ROUNDS // 2]

    def _described(self, ranks: Sequence[RankPower], rows: HeadRows | None) -> str:
        made, group = self.deal, self.group
        assert made is not None  # noqa: S101 - it has just been made
        share, head = made.shares[group.rank], ""
        if self._shared is not None:
            start, stop = self._shared.ranges[group.rank]
            head = f" and rows {start}:{stop} of the head"
        elif rows is not None:
            tried = any(rows.steps(group.size))
            why = "its rows by themselves may have other bits" if tried else "it has too few rows"
            head = f" (the head is one: {why})"
        read = f"{format_size(share.read_bytes)} read per token"
        rate = format_size(round(ranks[group.rank].disk_rate))
        return (
            f"rank {group.rank} of {group.size}: {share.count} of "
            f"{counted(len(self._parts), 'part')}{head}, about {read} at {rate}/s. All: about "
            f"{made.disk_seconds:.2g} s of reading a token, {made.chain_seconds:.2g} s of "
            "computing and sending it"
        )

    @property
    def away(self) -> Elsewhere:
        """What other ranks run."""
        rank = self.group.rank
        names = frozenset(part.name for part in self._parts if part.owner != rank)
        return Elsewhere(names, None if self._shared is None else self._shared.ranges[rank])

    @property
    def layers_away(self) -> Collection[int]:
        """The layers whose cache other ranks have."""
        rank = self.group.rank
        return frozenset(
            layer for part in self._parts if part.owner != rank for layer in part.layers
        )

    def attach(self, model: nn.Module) -> Iterator[Callable[[], object]]:
        """Have the parts of others answered by them, and own ones sent. Gives what undoes each."""
        relay = Relay(self.group, self.turns, compare=self._alike)
        self.turns.own.share_random_state()
        yield from relay.attach(model, self._parts, self._shared)

    def close(self) -> None:
        """Leave the group. May be called again."""
        self.group.close()


def disk_rate(files: Sequence[Path]) -> float:
    """Bytes per second that this rank reads.

    Without what comes first: disks that are throttled, or have a cache, are fast then. And without
    a break in what is measured: a throttled disk makes up for breaks.
    """
    pieces, piece_bytes, readers = _PROBE
    first = probe(files, *_PROBE)
    many = int(first * _PROBE_SECONDS / piece_bytes)
    return probe(files, max(pieces, min(_MOST_PIECES, many)), piece_bytes, readers)


def compute_rate(dtype: torch.dtype) -> float:
    """Bytes of weights per second that one token is multiplied by."""
    side = 2048
    weight = torch.zeros(_PRODUCT_BYTES // dtype.itemsize // side, side, dtype=dtype)
    token = torch.zeros(1, side, dtype=dtype)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        torch.nn.functional.linear(token, weight)
        times.append(time.perf_counter() - began)
    return _PRODUCT_BYTES / sorted(times)[_ROUNDS // 2]
