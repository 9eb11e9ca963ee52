"""Ranges of rows on tiny models: every kind of weight, from all streamed to all resident."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

import pipeload
from pipeload.budget import cut as budget_cut
from pipeload.budget.governor import Governor
from pipeload.engine import row_products
from pipeload.weights import row_cuts
from pipeload.weights.whole_shape import WholeShape
from tests.support.models import load_plain
from tests.support.streaming import (
    assert_nothing_held,
    generated,
    load_streamed,
    logits,
    session_of,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

# Stored, and loaded as: read as it is, and cast while it is read.
DTYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "fp32")]
KINDS = [
    *(("llama", *pair) for pair in DTYPES),
    *(("qwen3", "fp32", "fp32"), ("qwen3", "bf16", "fp32")),
    *(("gemma3", "bf16", "bf16"), ("gemma3", "fp32", "bf16")),
    *(("gpt2", "fp32", "fp32"), ("gpt2", "fp16", "fp32")),
]
"""Families, what is stored, and what it is loaded as."""
IDS = torch.arange(3, 24).view(3, 7)
ROOT = Path(__file__).parents[3]
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows at a time: tiny matrices have several ranges, and tiny tables are read by rows."""
    monkeypatch.setattr(budget_cut, "CHUNKS", (1 << 14,))
    monkeypatch.setattr(budget_cut, "_TABLE_BYTES", 1 << 12)


def split_sites(model: Any) -> list[Any]:
    return [seat for seat in session_of(model).streamer.seats if seat.whole is not None]


@pytest.mark.parametrize(("family", "stored", "loaded"), few(KINDS, KINDS[1::4]))
def test_every_kind(tiny: TinyCheckpoint, family: str, stored: str, loaded: str) -> None:
    """Equal with nothing resident, with a part, with everything, and after remove()."""
    folder, dtype = tiny(family, stored), TORCH[loaded]
    plain = load_plain(folder, dtype=dtype)
    wanted, text = logits(plain), generated(plain)
    for spare in (0, 150_000, 10_000_000):
        model = load_streamed(folder, spare=spare, modules=True, dtype=dtype)
        if spare < 1_000_000:
            # A Conv1D is no Linear, and GPT-2's head shares a table, which is not cast row by row.
            assert split_sites(model) or (family == "gpt2" and stored != loaded)
            assert session_of(model).streamer.tables or stored != loaded, "no table is read by rows"
        for _ in range(2):
            assert torch.equal(logits(model), wanted), spare
        assert generated(model) == text
        assert_nothing_held(model)
        model.pipeload.remove()
        assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize(
    ("stored", "loaded", "autocast"),
    [*((*pair, False) for pair in DTYPES), ("fp32", "fp32", True), ("bf16", "fp32", True)],
)
def test_ranges_that_are_not_exact(
    tiny: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    loaded: str,
    *,
    autocast: bool,
) -> None:
    """As with AMX: the smallest limit is no larger for it, and the bits are the whole's."""
    folder, dtype = tiny("llama", stored), TORCH[loaded]
    plain = load_plain(folder, dtype=dtype)
    usual = session_of(load_streamed(folder, modules=True, dtype=dtype)).governor.plan
    monkeypatch.setattr(row_cuts, "ranges_are_exact", lambda *_: False)
    monkeypatch.setattr(row_products, "ranges_are_exact", lambda *_: False)
    multiply, ranges = row_products.by_zeros, []

    def counted(cut: Any, *given: Any) -> Any:
        ranges.append(cut.ranges)
        return multiply(cut, *given)

    monkeypatch.setattr(row_products, "by_zeros", counted)
    model = load_streamed(folder, modules=True, dtype=dtype)
    plan = session_of(model).governor.plan
    assert plan.smallest_limit - plan.floor_bytes <= usual.smallest_limit - usual.floor_bytes
    assert split_sites(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert torch.equal(logits(model), logits(plain))
    assert len(ranges) >= len(split_sites(model))
    assert_nothing_held(model)


def test_a_head_that_is_cut(tmp_path: Path) -> None:
    """Of Gemma 3, in fp32 with two threads: lookup, beams and padded batches are as plain.

    By the kernels for Intel's processors, where they can be had: of a whole of a multiple of 256
    rows, only ranges of such multiples have its bits, and of others only other ranges.
    """
    script = ROOT / "tests/scripts/cut_head.py"
    command = [sys.executable, str(script), str(tmp_path), "16384", "16400", "as-intel"]
    paths = f"{ROOT}:{ROOT / 'hooks'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = re.findall(r"(\d+) ranges of the head, differ: (.*)", done.stdout)
    assert [bad for _, bad in told] == ["[]"] * 4, done.stdout
    assert all(int(units) > 1 for units, _ in told), done.stdout


def test_what_is_known_does_not_grow(tiny: TinyCheckpoint) -> None:
    """A server's prompts have many lengths."""
    model = load_streamed(tiny("llama"), modules=True)
    seat = split_sites(model)[0]
    module = seat.module()
    for length in range(1, 100):
        given = torch.ones(length, module.in_features)
        assert seat.products.by_whole(module, given, given.dtype) is None
    assert len(seat.products._exact) <= 32


def test_a_limit_changed_before_a_replaced_forward(tiny: TinyCheckpoint) -> None:
    """In one pass: room for the whole weight is made within the new limit."""
    model = load_streamed(tiny("llama"), spare=500_000, modules=True)
    wanted = logits(model)
    assert split_sites(model)
    model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)
    governor = session_of(model).governor
    model.model.norm.register_forward_hook(
        lambda *_: governor.take_limit(governor.plan.memory_limit + 1)
    )
    assert torch.equal(logits(model), wanted)


def test_whole_where_it_fits(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of which ranges are not exact are whole as long as the limit holds them."""
    monkeypatch.setattr(row_cuts, "ranges_are_exact", lambda *_: False)
    folder = tiny("llama")
    model = load_streamed(folder, spare=600_000, modules=True)
    assert not split_sites(model)
    assert torch.equal(logits(model), logits(load_plain(folder)))


def test_a_refusal_says_what_is_whole(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where zeros are not free: which weight, why, what would change it, and sizes that add up."""
    monkeypatch.setattr(row_cuts, "ranges_are_exact", lambda *_: False)
    monkeypatch.setattr(WholeShape, "is_free", lambda: False)
    with pytest.raises(pipeload.MemoryLimitError) as error:
        pipeload.from_pretrained(tiny("llama"), memory_limit="50MB")
    text = str(error.value)
    assert "'lm_head.weight'" in text
    assert "torch.float32" in text
    assert "dtype=" in text
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
    made_of = text[text.index("This process holds") : text.index("The smallest limit")]
    sizes = [float(n) * units[u] for n, u in re.findall(r"([\d.]+) (bytes|kB|MB|GB)", made_of)]
    assert len(sizes) == 5
    assert sum(sizes) == pytest.approx(error.value.smallest_limit, rel=0.01)


@pytest.mark.parametrize("where", ["object", "class"])
def test_a_forward_replaced_after_loading(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As one that quantises activations does it: the weight is there as a whole, pass by pass."""

    def forward(self: Any, given: torch.Tensor) -> torch.Tensor:
        return functional.linear((given * 16).round() / 16, self.weight, self.bias)

    folder = tiny("llama")
    plain = load_plain(folder)
    model = load_streamed(folder, spare=0, modules=True)
    first = logits(model)
    assert split_sites(model)
    if where == "class":
        monkeypatch.setattr(nn.Linear, "forward", forward)
    else:
        for one in (plain, model):
            one.lm_head.forward = types.MethodType(forward, one.lm_head)
    monkeypatch.setattr(Governor, "make_room", lambda *_: None)
    wanted = logits(plain)
    assert not torch.equal(wanted, first)
    for _ in range(2):
        assert torch.equal(logits(model), wanted)
        assert_nothing_held(model)
    monkeypatch.undo()
    if where == "object":
        del model.lm_head.forward
    assert torch.equal(logits(model), first)


def test_a_replaced_forward_that_does_not_fit(tiny: TinyCheckpoint) -> None:
    """One error says which weight is needed as a whole, and the limit that holds it."""
    model = load_streamed(tiny("llama"), spare=0, modules=True)
    wanted = logits(model)
    governor = session_of(model).governor
    model.lm_head.forward = lambda x: functional.linear(x, model.lm_head.weight)
    with (
        mock.patch.object(governor, "_room", return_value=1000),
        pytest.raises(
            pipeload.MemoryLimitError, match=r"forward of 'lm_head' was replaced"
        ) as error,
    ):
        logits(model)
    assert error.value.smallest_limit > governor.plan.memory_limit
    del model.lm_head.forward
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("way", ["mapped", "streamed", "part", "cast", "wrapped"])
def test_no_parameter_becomes_an_inference_tensor(tiny: TinyCheckpoint, way: str) -> None:
    """Whatever the first pass runs under: torch multiplies by other kernels with those."""
    folder = tiny("llama")
    dtype = torch.bfloat16 if way == "cast" else torch.float32
    plain = load_plain(folder, dtype=dtype)
    with torch.inference_mode():
        wanted = plain(IDS, logits_to_keep=1).logits
        if way == "mapped":
            model = pipeload.from_pretrained(folder, memory_limit="4GB")
        elif way == "wrapped":
            model = pipeload.wrap(load_plain(folder), memory_limit="4GB")
        else:
            spare = {"streamed": 0, "cast": 0, "part": 150_000}[way]
            model = load_streamed(folder, spare=spare, modules=True, dtype=dtype)
        for _ in range(3):
            assert torch.equal(model(IDS, logits_to_keep=1).logits, wanted)
            assert [n for n, p in model.named_parameters() if p.is_inference()] == []
        model.pipeload.remove()
        assert [n for n, p in model.named_parameters() if p.is_inference()] == []
        assert torch.equal(model(IDS, logits_to_keep=1).logits, wanted)
