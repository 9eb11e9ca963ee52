"""Files as older releases of the library wrote them, or other classes: streamed equals plain.

Each case rewrites the file of a tiny random model. The library must take every tensor of it for a
model whose names differ, and the streamed one must read the same bytes under those names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

from tests.support.exact import assert_same, assert_streamed, load_smallest, prompt, steady_floor
from tests.support.models import randomize

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

Tensors = dict[str, torch.Tensor]

LAYERS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
LLAMA: dict[str, Any] = SIZES | {"num_key_value_heads": 3}
EXPERTS = 4


def gamma_and_beta(tensors: Tensors) -> Tensors:
    """The names that came from TensorFlow, and the positions that were once saved, too."""
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        re.sub(r"LayerNorm\.(weight|bias)$", lambda m: old[m[0]], name): tensor
        for name, tensor in tensors.items()
    }
    assert sum(name.endswith("gamma") for name in renamed) > 2 * LAYERS
    return renamed | {"bert.embeddings.position_ids": torch.arange(64)[None]}


def with_masks(tensors: Tensors) -> Tensors:
    """Older GPT-2 files hold each layer's causal mask."""
    mask = torch.ones(64, 64).tril()[None, None]
    masks = {f"h.{layer}.attn.bias": mask.clone() for layer in range(LAYERS)}
    return tensors | masks


def with_frequencies(tensors: Tensors) -> Tensors:
    """Older LLaMA files hold each layer's rotary frequencies; wrong ones here, to be ignored."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(LAYERS)]
    return tensors | {name: torch.full((8,), 0.5) for name in names}


def one_by_one(tensors: Tensors) -> Tensors:
    """One tensor for each matrix of each expert: today's library writes them so, too."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        matrix = re.compile(rf".*\.mlp\.experts\.\d+\.{part}\.weight")
        assert sum(bool(matrix.fullmatch(name)) for name in tensors) == LAYERS * EXPERTS
    return tensors


@dataclass(frozen=True)
class Case:
    """A file of one class, rewritten, and a class that loads it."""

    config: Callable[[], Any]
    saved: Any
    loaded: Any
    rewrite: Callable[[Tensors], Tensors] = dict
    settings: dict[str, Any] = field(default_factory=dict)
    """What the configuration file says instead; None takes the entry out."""
    missing: str = r"(?!)"
    """The parameters that the file has not: random, the same with the same seed."""


def bert() -> Any:
    config = BertConfig(**SIZES)
    config.num_labels = 3
    return config


def llama(**options: Any) -> Any:
    return LlamaConfig(**LLAMA, **options)


def gpt2() -> Any:
    return GPT2Config(vocab_size=512, n_embd=96, n_layer=LAYERS, n_head=6, n_positions=64)


def qwen2_moe() -> Any:
    return Qwen2MoeConfig(
        **LLAMA,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=80,
    )


HEAD = r"classifier\.(weight|bias)"
POOLER = r"pooler\.dense\.(weight|bias)"
OLD_ROPE = {
    "rope_parameters": None,
    "rope_theta": 500.0,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "dtype": None,
    "torch_dtype": "float32",
}

CASES = {
    "gamma and beta": Case(bert, BertForPreTraining, BertForMaskedLM, gamma_and_beta),
    "gamma and beta, base": Case(bert, BertForPreTraining, BertModel, gamma_and_beta),
    "bert base into a head": Case(bert, BertModel, BertForSequenceClassification, missing=HEAD),
    "bert head into the base": Case(bert, BertForSequenceClassification, BertModel),
    "bert head into another": Case(
        bert, BertForMaskedLM, BertForSequenceClassification, missing=f"{HEAD}|bert.{POOLER}"
    ),
    "llama base into a head": Case(llama, LlamaModel, LlamaForCausalLM, missing=r"lm_head\.weight"),
    "llama base into a tied head": Case(
        lambda: llama(tie_word_embeddings=True), LlamaModel, LlamaForCausalLM
    ),
    "llama head into the base": Case(llama, LlamaForCausalLM, LlamaModel),
    "llama with frequencies": Case(llama, LlamaForCausalLM, LlamaForCausalLM, with_frequencies),
    "llama with an old rope": Case(llama, LlamaForCausalLM, LlamaForCausalLM, settings=OLD_ROPE),
    "gpt2 without a prefix": Case(gpt2, GPT2Model, GPT2LMHeadModel, with_masks),
    "gpt2 with a prefix": Case(gpt2, GPT2LMHeadModel, GPT2Model),
    "qwen2_moe one by one": Case(qwen2_moe, Qwen2MoeForCausalLM, Qwen2MoeForCausalLM, one_by_one),
}


def write(case: Case, folder: Path) -> None:
    model = case.saved(case.config())
    randomize(model, seed=7)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(case.rewrite(load_file(file)), file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings |= case.settings
    settings = {name: value for name, value in settings.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings))


def outputs(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=prompt(2))


@pytest.mark.parametrize("name", CASES)
def test_streamed_as_plain(name: str, tmp_path: Path) -> None:
    """At the smallest limit, every pass reading the blocks again."""
    case = CASES[name]
    write(case, tmp_path)
    torch.manual_seed(5)  # what is missing is random
    plain, loading = case.loaded.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert all(re.fullmatch(case.missing, key) for key in loading["missing_keys"])
    assert bool(loading["missing_keys"]) is (case.missing != Case.missing)
    assert not loading["mismatched_keys"]
    torch.manual_seed(5)
    model = load_smallest(tmp_path, auto_class=case.loaded)
    assert type(model) is case.loaded
    wanted = outputs(plain)
    for _ in range(2):
        assert_same(outputs(model), wanted)
    assert_streamed(model)


@pytest.mark.parametrize("name", ["bert head into the base", "llama head into the base"])
def test_the_values_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """Plain and streamed could both be random: the saved model itself says the same."""
    case = CASES[name]
    write(case, tmp_path)
    saved = case.saved(case.config())
    randomize(saved, seed=7)
    saved.eval()
    model = load_smallest(tmp_path, auto_class=case.loaded)
    with torch.no_grad():
        wanted = saved.base_model(input_ids=prompt(2))
    assert_same(outputs(model).last_hidden_state, wanted.last_hidden_state)


def test_the_old_rope_is_obeyed(tmp_path: Path) -> None:
    """What the settings of older releases say is not lost on either side."""
    case = CASES["llama with an old rope"]
    write(case, tmp_path / "old")
    write(CASES["llama with frequencies"], tmp_path / "new")
    old, new = (
        outputs(load_smallest(tmp_path / each, auto_class=LlamaForCausalLM)).logits
        for each in ("old", "new")
    )
    assert not torch.equal(old, new)
