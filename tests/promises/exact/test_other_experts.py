"""Experts that models keep in ways of their own: read as they are routed to, exact all the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

import pipeload
from pipeload.budget import expert_banks
from tests.support.experts import experts_of
from tests.support.models import DTYPES, load_plain, save_random
from tests.support.streaming import (
    assert_nothing_held,
    generated,
    load_streamed,
    logits,
    session_of,
)
from tests.support.sweeps import few

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
    # Each a module in a dictionary of them, told by marks.
    "switch_transformers": {
        "d_model": 128,
        "d_kv": 32,
        "d_ff": 96,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_heads": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "num_experts": EXPERTS,
        "decoder_start_token_id": 0,
    },
    # The same, by ids.
    "nllb-moe": {
        "d_model": 128,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
        "num_experts": EXPERTS,
        "max_position_embeddings": 256,
        "decoder_start_token_id": 2,
    },
    # Rows of two tables in each block.
    "doge": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "is_moe": True,
        "num_experts": 4096,
        "num_experts_per_tok": 8,
    },
    # All in one batched product.
    "llama4_text": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": EXPERTS,
        "interleave_moe_layer_step": 1,
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


@pytest.mark.parametrize("dtype", few(["fp32", "bf16"], ["bf16"]))
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
    monkeypatch.setattr(expert_banks, "_BANK_BYTES", 1)
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
    monkeypatch.setattr(expert_banks, "_BANK_BYTES", 1)
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
    assert "DbrxExperts" in model.pipeload.plan.whole_experts[0]
    assert torch.equal(logits(model, WORDS), logits(load_plain(made), WORDS))


@pytest.mark.parametrize(("kind", "dtype"), [("switch_transformers", "fp32"), ("nllb-moe", "bf16")])
def test_modules_of_their_own(
    folder: Callable[..., Path], kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In encoder and decoder, as stored and cast: whichever runs is read, all others are NaN."""
    monkeypatch.setattr(expert_banks, "_BANK_BYTES", 1)
    made = folder(kind)
    options: dict[str, Any] = {"auto_class": AutoModelForSeq2SeqLM, "dtype": DTYPES[dtype]}
    plain = AutoModelForSeq2SeqLM.from_pretrained(made, dtype=DTYPES[dtype]).eval()
    expected, tokens = _translated(plain), generated(plain, WORDS)
    for kept in (0, 400_000, 10_000_000):
        model = load_streamed(made, spare=10_000_000, **options)
        share = model.pipeload.plan.experts
        assert share is not None
        assert (share.layers, share.experts) == (4, 4 * EXPERTS)
        assert not model.pipeload.plan.whole_experts
        experts_of(model).hold(kept)
        for _ in range(2):
            assert torch.equal(_translated(model), expected), kept
        stats = model.pipeload.stats()
        assert 0 < stats.expert_misses < 4 * EXPERTS * (1 if kept > share.total_bytes else 2)
        # A matrix that is stored in fp32, and its first and last page.
        assert stats.expert_bytes_read <= stats.expert_misses * 2 * (128 * 96 * 4 + 2 * 4096)
        assert (stats.expert_hits > 0) == (kept > 0)
        assert generated(model, WORDS) == tokens
        assert_nothing_held(model)
    model.pipeload.remove()
    assert torch.equal(_translated(model), expected)


def _translated(model: Any) -> torch.Tensor:
    with torch.no_grad():
        given: torch.Tensor = model(input_ids=WORDS, decoder_input_ids=WORDS[:, :4]).logits
    return given


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_of_tables_in_blocks(folder: Callable[..., Path], dtype: str) -> None:
    """Doge: a token reads a few rows; those of a prompt are planned, whichever they are."""
    made = folder("doge")
    plain = load_plain(made, dtype=DTYPES[dtype])
    expected = [logits(plain, ids) for ids in (WORDS, WORDS[:, :1])]
    tokens = generated(plain, WORDS)
    for spare in CACHES:
        model = load_streamed(made, spare=spare, modules=True, dtype=DTYPES[dtype])
        logits(model, WORDS[:, :1])
        tables = [t for t in session_of(model).streamer.tables if "mlp" in next(iter(t.parameters))]
        assert len(tables) == 2 * LAYERS
        # A row's one or two pages, and gaps that are read with them; all is 2 MB.
        assert all(0 < table.bytes_read <= 8 * 5 * 4096 for table in tables)
        assert not any(table.table.held_bytes for table in tables)
        for _ in range(2):
            for ids, wanted in zip((WORDS, WORDS[:, :1]), expected, strict=True):
                assert torch.equal(logits(model, ids), wanted), spare
        assert generated(model, WORDS) == tokens
        assert_nothing_held(model)
    model.pipeload.remove()
    assert torch.equal(logits(model, WORDS), expected[0])


@pytest.mark.parametrize(
    ("limit", "value", "reason"),
    [
        ("_BANK_BYTES", 1 << 30, "all of a layer are less than 1.07 GB"),
        ("_MOST_OWN", 2, "a layer has more than 2, each a module of its own"),
    ],
)
def test_why_they_are_read_whole(
    folder: Callable[..., Path],
    limit: str,
    value: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_banks, limit, value)
    made = folder("switch_transformers")
    plan = pipeload.plan(made, memory_limit="2GB", auto_class=AutoModelForSeq2SeqLM)
    assert plan.experts is None
    assert plan.whole_experts == (reason,)


def test_a_plan_says_which_are_read_whole(folder: Callable[..., Path]) -> None:
    """Llama 4 multiplies with all in one product, whose bits are not those of one by one."""
    made = folder("llama4_text")
    model = load_streamed(made, spare=1_000)
    plan = model.pipeload.plan
    assert plan.experts is None
    (reason,) = plan.whole_experts
    assert reason.startswith("the code of Llama4TextExperts")
    assert f"read whole, with their blocks: {reason}." in plan.table()
    assert torch.equal(logits(model, WORDS), logits(load_plain(made), WORDS))
