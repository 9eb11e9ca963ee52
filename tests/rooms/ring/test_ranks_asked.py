"""What the environment and `ranks=` may say of a group, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pipeload.entry import ranks_ahead
from pipeload.entry.ranks import check_ranks
from pipeload.entry.ranks_ahead import Machine, deals_ahead
from pipeload.errors import GroupError, OptionError, UnsupportedModelError
from pipeload.ring import dealt_parts
from pipeload.ring.agreement import check, statement
from pipeload.ring.environment import patience_here, place_here

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import TinyCheckpoint

GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No group but what a test says."""
    for name in (*GROUP, "TORCHELASTIC_USE_AGENT_STORE", "PIPELOAD_RANK_PATIENCE"):
        monkeypatch.delenv(name, raising=False)


def test_no_group() -> None:
    """By itself, "auto" and one rank are what there was before."""
    assert place_here() is None
    assert [check_ranks(ranks, None) for ranks in (None, "auto", "mixed", 1)] == [None] * 4


def test_a_group_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no more of the environment, which jobs of one machine often leave out."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert [check_ranks(ranks, None) for ranks in ("auto", 1)] == [None] * 2


def test_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun sets it."""
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    assert place_here() == (1, 2, "10.0.0.1", 29500, False)
    assert check_ranks(2, None) == 2
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    place = place_here()
    assert place is not None
    assert place.served


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'. Set it to a whole number from 1 on"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"RANK": ""}, "RANK is ''. Set it to a whole number from 0 on"),
        ({"RANK": "2"}, "RANK=2 and WORLD_SIZE=2: ranks count from 0"),
        ({"MASTER_ADDR": ""}, "WORLD_SIZE=2 without MASTER_ADDR"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"WORLD_SIZE": "3"}, "ranks=2, and the environment says WORLD_SIZE=3"),
    ],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, str], words: str) -> None:
    """One that means nothing is named."""
    for name, value in {**GROUP, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match=words):
        check_ranks(2, None)


@pytest.mark.parametrize("ranks", [0, -1, True, 1.5, "all"])
def test_ranks(ranks: object) -> None:
    """Others mean nothing."""
    with pytest.raises(OptionError, match=r"means nothing. Give \"auto\""):
        check_ranks(ranks, None)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines compute on their processors."""
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    device: Any = SimpleNamespace(where=torch.device("cuda:0"))
    with pytest.raises(OptionError, match="on cuda:0: several machines compute on their proc"):
        check_ranks("auto", device)


@pytest.mark.parametrize("text", ["soon", "0", "inf", "-3"])
def test_patience(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Seconds, and not for ever."""
    assert patience_here() == 10
    monkeypatch.setenv("PIPELOAD_RANK_PATIENCE", text)
    with pytest.raises(OptionError, match="PIPELOAD_RANK_PATIENCE is"):
        patience_here()
    monkeypatch.setenv("PIPELOAD_RANK_PATIENCE", "2.5")
    assert patience_here() == 2.5


def _statement(**changed: Any) -> dict[str, Any]:
    return {
        "versions": {"torch": "2"},
        "config": {"hidden_size": "8"},
        "tensors": {"a": ["F32", [2], 7]},
        "processor": {"flags": "avx2"},
        "attention": "sdpa",
    } | changed


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"versions": {"torch": "3"}}, "the version of 'torch' is 3 there, and 2 on rank 0"),
        ({"config": {"hidden_size": "9"}}, "the setting 'hidden_size' is 9 there"),
        ({"tensors": {}}, "the tensor 'a' is missing there"),
        ({"tensors": {"a": ["F32", [2], 8]}}, r"F32 \[2\] with the checksum 8 there"),
        ({"attention": "eager"}, "the attention is eager there"),
        ({"processor": {"flags": ""}}, "flags is '', there 'avx2'"),
    ],
)
def test_agreement(changed: dict[str, Any], words: str) -> None:
    """What differs is named, with the rank."""
    statements = [_statement(), _statement(**changed)]
    with pytest.raises(GroupError, match=words) as caught:
        check(statements, "rank {}".format, mixed=False)
    assert str(caught.value).startswith("rank 1 ")
    if "processor" in changed:
        assert not check(statements, "rank {}".format, mixed=True)
    assert check([_statement()] * 2, "rank {}".format, mixed=False)


def test_what_computes_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of processor, of which the others may be of another maker, and the kernels."""
    text = "model name: a\nvendor_id\t: AuthenticAMD\nmodel\t: 2\nflags\t: avx2 sse\n\nmodel: 3\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    said = statement({}, {}, "sdpa", {"C compiler": "none"})["processor"]
    wanted = {"vendor_id": "AuthenticAMD", "model": "2", "flags": "avx2", "C compiler": "none"}
    assert {name: said.get(name) for name in wanted} == wanted


class _Keeps(nn.Module):
    """A model whose second block uses what the first one has kept."""

    def __init__(self, kept: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.dummy_inputs = {"x": torch.ones(1, 4)}
        self.kept = kept

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for block in self.blocks:
            x = block(x, self.blocks[0].state if self.kept else None)
        return {"x": x}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        self.state = self.linear(x)
        return x + self.state if other is None else x + self.state + other


def test_models_that_cannot_be_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without blocks, with more in common than outputs, or of which nobody can tell."""
    with pytest.raises(UnsupportedModelError, match="Linear has no blocks that could be dealt out"):
        dealt_parts.parts_to_deal(nn.Linear(2, 2), {}, None)
    with torch.device("meta"):
        keeps, plain = _Keeps(), _Keeps(kept=False)
    with pytest.raises(UnsupportedModelError, match=r"what 'blocks.0' makes is used in 'blocks.1'"):
        dealt_parts.parts_to_deal(keeps, {}, None)
    assert [part.name for part in dealt_parts.parts_to_deal(plain, {}, None)] == [
        "blocks.0",
        "blocks.1",
    ]
    monkeypatch.setattr(dealt_parts, "try_crossing", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="cannot be tried out without weights"):
        dealt_parts.parts_to_deal(plain, {}, None)


def test_deals_ahead(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each further machine brings, with its limit and its disk."""
    folder = tiny("llama")
    machines = [Machine(4_000_000_000, 1e9), Machine(4_000_000_000, 1e6)]
    (one, none), (two, rows) = deals_ahead(folder, machines)
    assert none == ()
    assert len(rows) in (0, 2)
    assert set(one.owners) == {0}
    assert set(two.owners) == {0, 1}
    assert one.disk_seconds == two.disk_seconds == 0
    with pytest.raises(OptionError, match=r"6 blocks for 7 machines. Name 6 at most"):
        deals_ahead(folder, machines[:1] * 7)
    monkeypatch.setattr(ranks_ahead, "peek", lambda *_: None)
    with pytest.raises(OptionError, match=r"is no model. Name the folder of a checkpoint"):
        deals_ahead(folder, machines)
