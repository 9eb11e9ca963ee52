"""Why experts are read whole."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from pipeload.budget.expert_banks import find_banks
from pipeload.budget.model_parts import ExpertsModule
from pipeload.checkpoint.headers import TensorEntry
from pipeload.weights.layout import Weight

SHAPE = (4, 512, 512)
NBYTES = 4 * 512 * 512 * 4


class Some(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(SHAPE, device="meta"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Some()


MODEL = nn.ModuleList([Block(), Block()])


def _weights(*blocks: int) -> dict[str, Weight]:
    names = [f"{block}.experts.up" for block in blocks]
    entries = (TensorEntry(name, Path("x"), "F32", SHAPE, 0, NBYTES) for name in names)
    made = (Weight(e.name, "F32", SHAPE, NBYTES, (e,)) for e in entries)
    return {weight.name: weight for weight in made}


def _found(*blocks: int) -> list[ExpertsModule]:
    names = ((f"{block}.experts", MODEL.get_submodule(f"{block}.experts")) for block in blocks)
    return [ExpertsModule(*pair, ("up",), sweeps=False, routed=1) for pair in names]


def test_known_ones_are_read_one_by_one() -> None:
    banks, whole = find_banks(MODEL, _weights(0, 1), (), _found(0, 1), blocks_alone=False)
    assert [bank.held_by.name for bank in banks] == ["0.experts", "1.experts"]
    assert whole == ()


def test_others_are_named_by_their_class() -> None:
    banks, whole = find_banks(MODEL, _weights(0, 1), (), _found(0), blocks_alone=False)
    assert len(banks) == 1
    assert whole == ("the code of Some is not known to take them one by one",)


def test_those_that_another_rank_runs_are_none() -> None:
    """Nothing is read of them here."""
    banks, whole = find_banks(MODEL, _weights(0), (), _found(0), blocks_alone=False)
    assert (len(banks), whole) == (1, ())


def test_each_reason_once() -> None:
    banks, whole = find_banks(MODEL, _weights(0, 1), (), _found(0, 1), blocks_alone=True)
    assert (banks, whole) == ((), ("on a device, a block is copied whole",))
    tied = ("0.experts.up", "1.experts.up")
    banks, whole = find_banks(MODEL, _weights(0, 1), tied, _found(0, 1), blocks_alone=False)
    assert (banks, whole) == ((), ("the form in which they are stored is not read one by one",))
