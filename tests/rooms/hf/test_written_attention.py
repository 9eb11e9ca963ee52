"""Attention that the library writes out: computed head by head, to the same bits."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import pipeload
from pipeload.budget import attention_memory
from pipeload.budget.attention_memory import Scores
from pipeload.budget.pass_needs import PassNeeds
from pipeload.budget.pass_shape import PassShape
from pipeload.hf import written_attention
from pipeload.hf.written_attention import WrittenAttention, products_are_by_head
from pipeload_hooks import attend_head_by_head
from tests.support.experts import moe_config, save_moe
from tests.support.models import load_plain

if TYPE_CHECKING:
    from pathlib import Path

HALF_BY_HEAD = products_are_by_head(torch.bfloat16)
FILES = {"with sinks": modeling_gpt_oss, "without": modeling_llama}
LIMIT = 4_000_000_000


class Attention(nn.Module):
    """One layer's, as the library calls its function, and as one that is a model streams."""

    def __init__(self, file: Any, dtype: torch.dtype, heads: int, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.sinks = nn.Parameter(torch.randn(heads).to(dtype), requires_grad=False)
        self.eager_attention_forward = file.eager_attention_forward


@pytest.fixture(autouse=True)
def any_number_of_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models have few scores."""
    monkeypatch.setattr(attention_memory, "_FEW_SCORES", 0)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("seen", [False, True], ids=["unseen", "seen"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_output_is_what_the_librarys_function_gives(
    file: Any, dtype: torch.dtype, *, seen: bool
) -> None:
    """Padding, one and several sequences, columns that are no whole vectors; and probabilities."""
    plain = file.eager_attention_forward
    ours = written_attention._replacement(plain)
    torch.manual_seed(0)
    for batch, rows, columns, width, masks in (
        (1, 7, 7, 80, 0),
        (2, 33, 38, 64, 1),
        (1, 130, 131, 96, 1),
    ):
        module = Attention(file, dtype, heads=8, groups=4).eval()
        written_attention._served.add(module)
        if seen:
            module.register_forward_hook(lambda *_: None)
        query = torch.randn(batch, rows, 8, width).to(dtype).transpose(1, 2)
        key, value = (torch.randn(batch, 2, columns, width).to(dtype) for _ in "kv")
        lowest = torch.finfo(dtype).min
        mask = torch.full((batch, 1, rows, columns), lowest, dtype=dtype).triu(columns - rows + 1)
        call = (module, query, key, value, mask if masks else None, width**-0.5)
        with torch.no_grad():
            (output, probabilities), (wanted, every) = ours(*call), plain(*call)
        assert same(output, wanted)
        by_head = products_are_by_head(dtype) and not seen
        assert same(probabilities, None if by_head else every)


def test_a_streamed_model_is_served_and_gives_what_plain_gives(tmp_path: Path) -> None:
    """Prompts of two sequences, one of them padded; with attentions, which are then all there."""
    folder = save_moe(tmp_path / "m", "gpt_oss", "bf16")
    plain = load_plain(folder, dtype="auto", attn_implementation="eager")
    text = torch.randint(5, 500, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(text)
    mask[0, :9] = 0
    calls = []
    attend = attend_head_by_head

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not args[0].is_meta:  # else it is a trial of what the pass takes
            calls.append(kwargs["apart"])
        return attend(*args, **kwargs)

    before = modeling_gpt_oss.eager_attention_forward
    model = pipeload.from_pretrained(folder, memory_limit=LIMIT, dtype="auto")
    assert modeling_gpt_oss.eager_attention_forward is not before
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(written_attention, "attend_head_by_head", noted)
        wanted = plain(text, attention_mask=mask)
        assert not calls  # another model of the same class is not touched
        assert torch.equal(model(text, attention_mask=mask).logits, wanted.logits)
        assert calls == [HALF_BY_HEAD] * 3
        wanted = plain(text, attention_mask=mask, output_attentions=True)
        given = model(text, attention_mask=mask, output_attentions=True)
        assert calls[3:] == [False] * 3
        assert all(map(torch.equal, given.attentions, wanted.attentions))
        assert torch.equal(given.logits, wanted.logits)
    model.pipeload.remove()
    assert modeling_gpt_oss.eager_attention_forward is before


def test_what_somebody_else_put_there_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it takes is not known, so nothing less is planned for."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(moe_config("gpt_oss")).to(torch.bfloat16)
    attention = WrittenAttention(model, torch.bfloat16)
    assert attention.kept() is (Scores.OF_A_HEAD if HALF_BY_HEAD else Scores.ONCE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention.kept() is Scores.COPIED
    handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    assert attention.kept() is Scores.ONCE
    handle.remove()
    plain = modeling_gpt_oss.eager_attention_forward
    theirs = partial(plain)
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", theirs)
    assert WrittenAttention(model, torch.bfloat16).kept() is Scores.COPIED
    steps = list(written_attention.serve(model))
    assert not any(module in written_attention._served for module in model.modules())
    for step in steps:
        step()
    assert modeling_gpt_oss.eager_attention_forward is theirs


def test_calls_that_are_not_known_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd, a mask of another dtype or shape, few scores, a mode of somebody's."""
    plain = modeling_llama.eager_attention_forward
    ours = written_attention._replacement(plain)
    module = Attention(modeling_llama, torch.float32, heads=2, groups=1).eval()
    written_attention._served.add(module)
    monkeypatch.setattr(
        written_attention, "attend_head_by_head", lambda *_, **__: pytest.fail("was served")
    )
    query = torch.randn(1, 2, 4, 8)
    mask = torch.zeros(1, 1, 4, 4)
    for call in (
        (query.requires_grad_(), query, query, mask),
        (query.detach(), query, query, mask.double()),
        (query.detach(), query.detach(), query.detach(), mask[..., :1]),
    ):
        assert same(ours(module, *call, 0.5)[0], plain(module, *call, 0.5)[0])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ours(module, query, query, query, mask, 0.5)
    monkeypatch.setattr(attention_memory, "_FEW_SCORES", 1000)
    with torch.no_grad():
        ours(module, query, query, query, mask, 0.5)


def test_the_code_is_judged_and_not_the_name() -> None:
    """Names of types and comments may differ; a step that differs makes another function."""
    source = inspect.getsource(modeling_llama.eager_attention_forward)
    assert "softmax" in source
    assert written_attention._digest(modeling_llama.eager_attention_forward) in (
        written_attention._SINKS
    )
    assert written_attention._digest(written_attention._probabilities) not in (
        written_attention._SINKS
    )
    assert not written_attention._digest(len)


@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
def test_less_is_planned_for(kind: str) -> None:
    """A prompt of 1024: with all scores once, or of one head, where the library has several."""
    from transformers import AutoModelForCausalLM

    config = moe_config(kind, max_position_embeddings=2048, attn_implementation="eager")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attention = WrittenAttention(model, torch.bfloat16)
    shape = PassShape(1024, 1)
    scores = 6 * 1024 * 1024 * 2
    plain = PassNeeds(model, config).for_shape(shape)
    if HALF_BY_HEAD:
        assert PassNeeds(model, config, attention=attention).for_shape(shape) < plain - 2 * scores
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: None)
    once = PassNeeds(model, config, attention=attention).for_shape(shape)
    assert plain - 3.5 * scores < once < plain - scores
