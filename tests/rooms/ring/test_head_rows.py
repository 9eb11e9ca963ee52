"""Which heads are dealt out by rows, in which steps; and what is sent of their logits."""

from __future__ import annotations

import itertools
import typing
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pipeload.budget import cut
from pipeload.budget.cut import Touched
from pipeload.hf.takeover import peek
from pipeload.ring.deal import RankPower
from pipeload.ring.head_rows import HeadRows, deal_with_rows, head_rows
from pipeload.ring.joining import Membership
from pipeload.ring.shared_rows import SharedRows
from pipeload.weights.row_cuts import Cut, RowRange
from pipeload.weights.whole_shape import WholeShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import TinyCheckpoint

MB = 1_000_000
POWER = RankPower(MB, 1e6, 1e9)


def _head(rows: int) -> HeadRows:
    return HeadRows(Cut(torch.float32, 32, (RowRange(0, rows),)), 128)


def _deal(head: HeadRows | None, ranks: int, *, exact: bool) -> tuple[Any, Sequence[RowRange]]:
    sizes = [MB] * 6 + [2 * MB]
    return deal_with_rows(head, sizes, [POWER] * ranks, lambda *_: exact, blocks=6)


def _found(folder: Any, touched: Touched | None = None, **options: Any) -> HeadRows | None:
    auto = transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(folder, **options), None)
    assert pending is not None
    return head_rows(pending.model, pending.weights(), touched or Touched())


def test_which_heads(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are read or cast, and nobody uses whole; one of a table that is read by rows.

    Others are a part for one rank, as a block is.
    """
    folder, tied = tiny("llama"), tiny("gemma3")
    found = _found(folder)
    assert found is not None
    assert found.row_bytes == found.cut.inputs * found.cut.dtype.itemsize
    assert found.is_exact(found.cut.within)
    with monkeypatch.context() as patch:
        patch.setattr(WholeShape, "is_free", lambda: False)
        assert not found.is_exact(found.cut.within)
    cast = _found(folder, dtype=torch.bfloat16)
    assert cast is not None
    assert cast.row_bytes == found.row_bytes // 2
    assert _found(folder, Touched(outside=frozenset({"lm_head.weight"}))) is None
    assert _found(tied) is None
    monkeypatch.setattr(cut, "_TABLE_BYTES", 1 << 12)
    assert _found(tied) is not None
    with torch.device("meta"):
        plain: Any = torch.nn.Linear(2, 2)
    plain.all_tied_weights_keys = {}
    assert head_rows(plain, {}, None) is None


@pytest.mark.parametrize(
    ("rows", "wanted"), [(2048, [256, 64]), (2000, [64, 256]), (512, [64]), (100, [])]
)
def test_steps(rows: int, wanted: list[int]) -> None:
    """Of a multiple of 256 rows, kernels like such ranges best; two for each rank at least."""
    ways = [*_head(rows).steps(3)]
    assert [steps[0].stop for steps in ways] == wanted
    for steps in ways:
        assert steps[0].start == 0
        assert steps[-1].stop == rows
        assert all(one.stop == other.start for one, other in itertools.pairwise(steps))


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_each_rank(ranks: int) -> None:
    """All rows, one rank's behind the other's; the head is no part then."""
    made, rows = _deal(_head(16000), ranks, exact=True)
    assert len(made.owners) == 6
    assert [rows[0].start, rows[-1].stop, len(rows)] == [0, 16000, ranks]
    assert all(one.stop == other.start for one, other in itertools.pairwise(rows))
    assert sum(share.nbytes for share in made.shares) == 6 * MB + 16000 * 128


@pytest.mark.parametrize("why", ["none", "alone", "few", "inexact"])
def test_a_head_that_is_one(why: str) -> None:
    """One rank has it where its rows have other bits, or are too few, or there is nobody else."""
    head = {"none": None, "few": _head(200)}.get(why, _head(16000))
    made, rows = _deal(head, 1 if why == "alone" else 2, exact=why != "inexact")
    assert rows == ()
    assert len(made.owners) == 7
    assert made.steps == ()


class _Group:
    """Rank 1 of two; the other one has ones, and fails if told to."""

    def __init__(self, why: str = "") -> None:
        self.rank, self.why = 1, why
        self.sent: list[int] = []

    def gather(self, tensor: torch.Tensor, _doing: str) -> list[torch.Tensor]:
        return [torch.tensor([int(bool(self.why))]), tensor]

    def gather_json(self, value: str, _doing: str) -> list[str]:
        return [self.why, value]

    def broadcast(self, tensor: torch.Tensor, root: int, _doing: str) -> None:
        self.sent.append(tensor.numel())
        if root == 0:
            tensor.view(torch.float32).fill_(1)


@pytest.mark.parametrize("shape", [(1,), (2, 300), (0,)])
def test_logits_are_put_together(shape: tuple[int, ...]) -> None:
    """In pieces of a megabyte at most, as many lines at once as these hold."""
    group = _Group()
    rows = SharedRows(
        typing.cast("Any", group), 1, "head", [RowRange(0, 4000), RowRange(4000, 6000)]
    )
    assert not rows.settle()
    output = torch.full((*shape, 6000), 2.0)
    assert rows.complete(output) == {}
    assert rows.settle()
    assert not rows.settle()
    assert bool((output[..., :4000] == 1).all())
    assert bool((output[..., 4000:] == 2).all())
    assert sum(group.sent) == 4 * output.numel()
    assert max(group.sent, default=0) <= 1 << 20


def test_rows_that_are_missing() -> None:
    """Why is said, by rank; nothing is sent then."""
    group = _Group("no disk")
    rows = SharedRows(typing.cast("Any", group), 1, "head", [RowRange(0, 64), RowRange(64, 128)])
    assert rows.complete(torch.zeros(1, 128)) == {0: "no disk"}
    rows.tell_failure("nor here")
    assert group.sent == []


@pytest.mark.parametrize(("rows", "why"), [(200, "too few rows"), (16000, "may have other bits")])
def test_why_a_head_is_one(rows: int, why: str) -> None:
    """The log tells it: those of too few rows are not tried."""
    head = _head(rows)
    made, _ = _deal(head, 2, exact=False)
    group = SimpleNamespace(rank=1, size=2)
    member = SimpleNamespace(deal=made, group=group, _shared=None, _parts=())
    told = Membership._described(typing.cast("Any", member), [POWER] * 2, head)
    assert "(the head is one: it" in told
    assert why in told
