"""Portions in which experts are computed with, without a disk: reads that are told when to come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pipeload.engine.expert_computing import ExpertLayer
from pipeload_hooks import IDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.engine.expert_reads import Slice

NAME = "experts.packed"


class Reads:
    """Each comes when it is waited for, and those of `early` before."""

    def __init__(self, early: Sequence[int]) -> None:
        self.early = early
        self.asked: list[int] = []
        self.waited: list[int] = []

    def submit(self, part: Slice, _jobs: object) -> None:
        self.asked.append(part.expert)

    def wait(self, part: Slice, _module: str) -> None:
        self.waited.append(part.expert)

    def is_over(self, part: Slice) -> bool:
        return part.expert in self.early

    def came(self, part: Slice) -> bool:
        return part.expert in self.waited

    def cancel(self) -> None:
        pass


def layer_of(reads: Reads, dropped: list[int], **chosen: Any) -> ExpertLayer:
    """Of an experts module with eight experts in one parameter."""

    def drop(_name: str, expert: int) -> None:
        dropped.append(expert)

    memory = SimpleNamespace(read_jobs=lambda *_: [], drop=drop)
    seat: Any = SimpleNamespace(
        layer=0,
        name="experts",
        experts=8,
        sweeps=True,
        told_by=IDS,
        owners={},
        parameters={},
        memory=memory,
        names=lambda _expert: (NAME,),
        drop=lambda expert: drop(NAME, expert),
    )
    given: Any = reads
    return ExpertLayer(seat, reads=given, window=1, **chosen)


def test_together_as_they_come() -> None:
    """What is there first; with what stays all that has come; what does not stay alone."""
    reads = Reads(early=[2, 3])
    dropped: list[int] = []
    layer = layer_of(reads, dropped, hits=[0, 7], kept=[1, 2, 5], passing=[3, 4])
    layer.begin()
    try:
        assert reads.asked == [1, 2, 5, 3]  # as much as there is room for
        seen = [
            (list(portion), list(reads.waited), list(dropped))
            for portion in layer.together(NAME, [0, 1, 2, 3, 4, 5, 7])
        ]
    finally:
        there = layer.finish()
    assert seen == [
        ([0, 7], [], []),
        ([1, 2], [1, 2], []),
        ([5], [1, 2, 5], []),
        ([3], [1, 2, 5, 3], []),
        ([4], [1, 2, 5, 3, 4], [3]),
    ]
    assert there == [1, 2, 5]
    assert dropped == [3, 4]


def test_all_are_there() -> None:
    """One portion, and nothing is waited for."""
    reads = Reads(early=[])
    layer = layer_of(reads, [], hits=[1, 4], kept=[], passing=[])
    assert [*layer.together(NAME, [1, 4])] == [[1, 4]]
    assert reads.waited == []
