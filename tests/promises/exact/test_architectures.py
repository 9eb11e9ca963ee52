"""Models that are no plain decoders: each breaks a shortcut that would keep the others exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoModelForSeq2SeqLM,
    MambaConfig,
    MixtralConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.support.exact import (
    assert_same,
    assert_streamed,
    fitting_limit,
    load,
    load_smallest,
    prompt,
    smallest_limit,
    steady_floor,
    step_logits,
)
from tests.support.models import DTYPES, load_plain, randomize, save_random, tensor_files

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

SPECIAL: dict[str, Any] = {
    "vocab_size": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_stacked_experts(tmp_path: Path, dtype: str) -> None:
    """Experts that lie one by one in the file are stacked by the library's own operations."""
    config = MixtralConfig(
        hidden_size=96,
        intermediate_size=112,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        **SPECIAL,
    )
    folder = save_random(config, tmp_path, dtype, seed=9, max_shard_size="700KB")
    assert any(".experts.3." in name for name in tensor_files(folder))
    plain = load_plain(folder)
    wanted = [step_logits(plain, prompt(rows), 4) for rows in (1, 3)]
    for limit in (smallest_limit(folder), fitting_limit(folder)):
        model = load(folder, limit)
        got = [step_logits(model, prompt(rows), 4) for rows in (1, 3)]
        assert_same(got, wanted, f"limit {limit}")
        if not model.pipeload.plan.fits:
            assert_streamed(model)
            assert any(unit.streamed.conversions for unit in model.pipeload.plan.units)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_state_space_model(tmp_path: Path, dtype: str) -> None:
    """Parameters require grad as plain ones do: even without recording, matmul looks at that."""
    config = MambaConfig(hidden_size=96, state_size=8, num_hidden_layers=6, **SPECIAL)
    folder = save_random(config, tmp_path, dtype, seed=13)
    model, plain = load_smallest(folder), load_plain(folder)
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in plain.parameters()
    ]
    for rows in (1, 3):
        ids = prompt(rows)
        with torch.no_grad():
            assert_same(model(ids).logits, plain(ids).logits)
        options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
        assert_same(model.generate(ids, **options), plain.generate(ids, **options))
    assert_streamed(model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_encoder_and_decoder(tmp_path: Path, dtype: str) -> None:
    """Two towers that run by turns; in fp16 the library keeps some of their weights in fp32."""
    config = T5Config(
        d_model=96,
        d_kv=16,
        d_ff=176,
        num_layers=5,
        num_heads=6,
        **(SPECIAL | {"decoder_start_token_id": 0}),
    )
    original = T5ForConditionalGeneration(config)
    randomize(original, seed=17)
    original.save_pretrained(tmp_path)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=DTYPES[dtype])
    model = load_smallest(tmp_path, dtype=DTYPES[dtype], auto_class=AutoModelForSeq2SeqLM)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in plain.parameters()]
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    wanted = plain.generate(prompt(2), **options)
    for turn in ("first", "second"):
        assert_same(model.generate(prompt(2), **options), wanted, turn)
    assert model.pipeload.plan.bytes_per_pass > 0


def test_blocks_that_run_twice(tmp_path: Path) -> None:
    """A block that runs again at once has its weights the second time, too."""
    config = AlbertConfig(
        hidden_size=96,
        embedding_size=48,
        num_hidden_layers=8,
        num_hidden_groups=4,
        num_attention_heads=6,
        intermediate_size=176,
        **SPECIAL,
    )
    original = AlbertModel(config)
    randomize(original, seed=19)
    original.save_pretrained(tmp_path)
    model, plain = (
        load_smallest(tmp_path, auto_class=AutoModel),
        AutoModel.from_pretrained(tmp_path),
    )
    with torch.no_grad():
        for length in (1, 7, 30):
            ids = prompt(2, length)
            wanted = plain(ids).last_hidden_state
            assert_same(model(ids).last_hidden_state, wanted, f"{length} tokens")
    assert_streamed(model)
