"""Every mode of `generate` gives on a streamed model what it gives on a plain one, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload.hf.growing_cache import GrowingLayer
from tests.support.exact import (
    assert_same,
    assert_streamed,
    load,
    load_smallest,
    prompt,
    smallest_limit,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.9, "top_k": 40}

# Mode: (rows of the batch, options of `generate`).
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, GREEDY),
    "greedy batch": (3, GREEDY),
    "sampling": (3, SAMPLED),
    "top-p with penalties": (2, SAMPLED | {"top_p": 0.8, "repetition_penalty": 1.3}),
    "several answers": (2, SAMPLED | {"num_return_sequences": 3}),
    "beam search": (2, GREEDY | {"num_beams": 3, "num_return_sequences": 2}),
    "beam sampling": (2, SAMPLED | {"num_beams": 2}),
    "static cache": (2, GREEDY | {"cache_implementation": "static"}),
    "no cache": (2, GREEDY | {"use_cache": False}),
    "chunked prompt": (2, GREEDY | {"prefill_chunk_size": 5}),
    "prompt lookup": (1, GREEDY | {"prompt_lookup_num_tokens": 3}),
    "hidden states": (2, GREEDY | {"output_hidden_states": True}),
    "min and max length": (2, GREEDY | {"min_new_tokens": 10, "no_repeat_ngram_size": 2}),
}
RECORDED: dict[str, Any] = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
}


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    """All that `generate` gives, from one seed."""
    torch.manual_seed(0)
    return model.generate(ids, **(RECORDED | options))


@pytest.mark.parametrize("mode", MODES)
def test_mode(tiny: TinyCheckpoint, mode: str) -> None:
    """Tokens, scores, logits and hidden states of the mode are equal, twice over."""
    folder = tiny("llama", "fp32")
    rows, options = MODES[mode]
    wanted = generate(load_plain(folder), prompt(rows), **options)
    model = load_smallest(folder)
    for turn in ("first", "second"):
        assert_same(generate(model, prompt(rows), **options), wanted, f"{mode}, {turn}")
    assert_streamed(model)


@pytest.mark.parametrize("mode", ["greedy", "beam search", "sampling", "prompt lookup"])
def test_mode_behind_a_long_prompt(tiny: TinyCheckpoint, mode: str) -> None:
    """Where the cache grows in place, streamed and with all in memory, and after `remove`."""
    folder = tiny("llama", "bf16")
    rows, options = MODES[mode]
    ids = prompt(rows, 130)
    wanted = generate(load_plain(folder), ids, **options)
    model = load_smallest(folder)
    given = generate(model, ids, **options)
    assert any(type(layer) is GrowingLayer for layer in given.past_key_values.layers)
    assert_same(given, wanted, mode)
    assert_streamed(model)
    model = load(folder, 4_000_000_000)
    assert_same(generate(model, ids, **options), wanted, f"{mode}, all in memory")
    model.pipeload.remove()
    assert_same(generate(model, ids, **options), wanted, f"{mode}, plain again")


def test_left_padded_batch(tiny: TinyCheckpoint) -> None:
    """Prompts of different lengths, padded on the left and masked, give equal answers."""
    folder = tiny("llama", "bf16")
    ids = prompt(3, 12)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 9)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    model, plain = load_smallest(folder), load_plain(folder)
    wanted = generate(plain, ids, attention_mask=mask, **GREEDY)
    assert_same(generate(model, ids, attention_mask=mask, **GREEDY), wanted)
    assert_streamed(model)


@pytest.mark.parametrize("asked", [1, 2, 23])
def test_as_many_tokens_as_asked_for(tiny: TinyCheckpoint, asked: int) -> None:
    """No pass is lost and none is made for nothing."""
    model = load_smallest(tiny("llama", "fp32"))
    ids = prompt(2)
    output = model.generate(ids, max_new_tokens=asked, do_sample=False, eos_token_id=None)
    assert output.shape == (2, ids.shape[1] + asked)
    assert model.pipeload.stats().passes == asked


def test_attention_maps(tiny: TinyCheckpoint) -> None:
    """Attention maps of the eager implementation are equal for every layer and step."""
    folder = tiny("llama", "fp32")
    options = GREEDY | {"output_attentions": True, "output_hidden_states": True}
    model = load_smallest(folder, attn_implementation="eager")
    plain = load_plain(folder, attn_implementation="eager")
    wanted = generate(plain, prompt(2), **options)
    assert len(wanted.attentions[0]) == 6
    assert_same(generate(model, prompt(2), **options), wanted)
    assert_streamed(model)


@pytest.mark.parametrize("streamed_draft", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_assisted(tiny: TinyCheckpoint, tmp_path: Path, streamed_draft: bool, alike: bool) -> None:
    """A draft model changes how many passes an answer takes, and no bit of the answer's tokens."""
    folder = tiny("llama", "fp32")
    other = folder if alike else save_random("llama", tmp_path, "fp32", seed=21)
    limit = smallest_limit(folder)
    model, plain = load(folder, limit), load_plain(folder)
    plain_draft = load_plain(other)
    draft = load(other, limit) if streamed_draft else plain_draft
    wanted = generate(plain, prompt(), assistant_model=plain_draft, **GREEDY)
    got = generate(model, prompt(), assistant_model=draft, **GREEDY)  # holds the cache
    assert_same(got, wanted)
    assert_streamed(model)
    # Those of the first pass, which takes the prompt and a draft, are counted as well.
    assert model.pipeload.stats().tokens == wanted.sequences.shape[1] - prompt().shape[1]
    if streamed_draft:
        assert_streamed(draft)
    if alike:  # no draft token is wrong
        assert model.pipeload.stats().passes < GREEDY["max_new_tokens"]


@pytest.mark.parametrize("layers", [1, 3])
def test_early_exit_draft(tiny: TinyCheckpoint, layers: int) -> None:
    """The first layers draft and the whole model checks: equal, though blocks are skipped."""
    folder = tiny("llama", "fp32")
    options = GREEDY | {"assistant_early_exit": layers}
    model, plain = load_smallest(folder), load_plain(folder)
    wanted = generate(plain, prompt(), **options)
    assert_same(generate(model, prompt(), **options), wanted)
    # Passes in the plain order are exact again afterwards.
    assert_same(step_logits(model, prompt(), 3), step_logits(plain, prompt(), 3))
    assert model.pipeload.stats().misses > 0


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("other", [torch.no_grad, torch.inference_mode])
def test_grad_modes(tiny: TinyCheckpoint, scope: Any, other: Any) -> None:
    """no_grad and inference mode give equal logits, also in turns on one model."""
    folder = tiny("llama", "fp32")
    model, plain = load_smallest(folder), load_plain(folder)
    for mode in (scope, other, scope):
        with mode():
            wanted = plain(prompt()).logits
            assert_same(model(prompt()).logits, wanted)
            assert_same(model(prompt(1, 1)).logits, plain(prompt(1, 1)).logits)
    assert_streamed(model)


def test_embeddings_as_input(tiny: TinyCheckpoint) -> None:
    """`inputs_embeds` in place of token ids gives equal logits and tokens."""
    folder = tiny("gpt2", "fp32")
    model, plain = load_smallest(folder), load_plain(folder)
    with torch.no_grad():
        embedded = plain.get_input_embeddings()(prompt(2))
    assert_same(model.get_input_embeddings()(prompt(2)), embedded)
    wanted = plain.generate(inputs_embeds=embedded, **GREEDY)
    assert_same(model.generate(inputs_embeds=embedded, **GREEDY), wanted)
    assert_streamed(model)
