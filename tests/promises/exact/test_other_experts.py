"""Experts that models keep in ways of their own: read as they are routed to, exact all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig

from pipeload.budget import cut
from tests.support.models import load_plain, save_random
from tests.support.streaming import assert_nothing_held, generated, load_streamed, logits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "vocab_size": 512}
EXPERTS, ROUTED, LAYERS = 16, 2, 3
CACHES = (1_000, 1_000_000, 100_000_000)
"""Bytes over the smallest limit: no expert stays, some, all."""
_KINDS: dict[str, dict[str, Any]] = {
    # One below the other in a child of the module that is sent rows.
    "dbrx": {
        "d_model": 128,
        "n_heads": 4,
        "n_layers": LAYERS,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "ffn_hidden_size": 96,
            "moe_num_experts": EXPERTS,
            "moe_top_k": ROUTED,
            "hidden_size": 128,
        },
    },
    # Two modules of a matrix each for each mixture, told how many rows each expert gets.
    "jetmoe": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 2,
        "kv_channels": 32,
        "max_position_embeddings": 256,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": ROUTED,
    },
}
WORDS = torch.tensor([[5, 9, 301, 7, 44, 200, 17, 350, 6]])


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder(kind, dtype)`: of a small random model."""

    def make(kind: str, dtype: str = "fp32") -> Path:
        config = AutoConfig.for_model(kind, **(_TOKENS | _KINDS[kind]))
        return save_random(config, tmp_path / f"{kind}-{dtype}", dtype, seed=4)

    return make


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_experts_below_each_other(folder: Callable[..., Path], dtype: str) -> None:
    """DBRX: prompts, decoding, whatever stays; only what is routed to is read, all else is NaN."""
    made = folder("dbrx", dtype)
    plain = load_plain(made)
    expected = [logits(plain, ids) for ids in (WORDS, WORDS[:, :1], WORDS.view(9, 1))]
    tokens = generated(plain, WORDS)
    for spare in CACHES:
        model = load_streamed(made, spare=spare)
        share = model.pipeload.plan.experts
        assert share is not None
        assert share.experts == LAYERS * EXPERTS
        assert share.routed_bytes == share.total_bytes * ROUTED // EXPERTS
        logits(model, WORDS[:, :1])
        stats = model.pipeload.stats()
        assert (stats.expert_hits, stats.expert_misses) == (0, LAYERS * ROUTED)
        assert stats.expert_bytes_read < share.total_bytes / 4
        for _ in range(2):
            for ids, wanted in zip((WORDS, WORDS[:, :1], WORDS.view(9, 1)), expected, strict=True):
                assert torch.equal(logits(model, ids), wanted), spare
        assert generated(model, WORDS) == tokens
        assert_nothing_held(model)
    model.pipeload.remove()
    assert torch.equal(logits(model, WORDS), expected[0])
    state = plain.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_told_how_many_rows_each_gets(
    folder: Callable[..., Path], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetMoE, in attention as well: it takes the slices of all, and those without rows stay NaN."""
    monkeypatch.setattr(cut, "_BANK_BYTES", 1)
    made = folder("jetmoe", dtype)
    plain = load_plain(made)
    expected = [logits(plain, ids) for ids in (WORDS, WORDS[:, :1], WORDS.view(9, 1))]
    tokens = generated(plain, WORDS)
    for spare in CACHES:
        model = load_streamed(made, spare=spare)
        share = model.pipeload.plan.experts
        assert share is not None
        assert share.layers == 4 * LAYERS
        logits(model, WORDS[:, :1])
        stats = model.pipeload.stats()
        assert (stats.expert_hits, stats.expert_misses) == (0, 4 * LAYERS * ROUTED)
        assert stats.expert_bytes_read < share.total_bytes / 4
        for _ in range(2):
            for ids, wanted in zip((WORDS, WORDS[:, :1], WORDS.view(9, 1)), expected, strict=True):
                assert torch.equal(logits(model, ids), wanted), spare
        assert generated(model, WORDS) == tokens
        assert_nothing_held(model)
    model.pipeload.remove()
    assert torch.equal(logits(model, WORDS), expected[0])


@pytest.mark.parametrize("kind", ["dbrx", "jetmoe"])
def test_cast_while_they_are_read(
    folder: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut, "_BANK_BYTES", 1)
    made = folder(kind)
    plain = load_plain(made, dtype=torch.float16)
    model = load_streamed(made, spare=1_000, dtype=torch.float16)
    assert model.pipeload.plan.experts is not None
    assert torch.equal(logits(model, WORDS), logits(plain, WORDS))


def test_code_that_uses_them_otherwise(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module whose own code cannot be seen to take slices alone has them read with its block."""
    from transformers.models.dbrx import modeling_dbrx

    def forward(self: Any, hidden: Any, top_k_index: Any, weights: Any) -> Any:
        return original(self, hidden, top_k_index, weights) + self.mlp.w1.sum() * 0

    made = folder("dbrx")
    original = modeling_dbrx.DbrxExperts.forward
    monkeypatch.setattr(modeling_dbrx.DbrxExperts, "forward", forward)
    model = load_streamed(made)
    assert model.pipeload.plan.experts is None
    assert torch.equal(logits(model, WORDS), logits(load_plain(made), WORDS))
