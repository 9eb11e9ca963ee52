"""The library's models run once without weights, and tell how they use them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn

from pipeload.budget import usage_trial
from pipeload.budget.twin_blocks import twin_lists
from pipeload.budget.usage_trial import meta_inputs, probe_usage
from pipeload.hf.takeover import take_over_loading
from tests.support.models import FAMILIES, tiny_config

if TYPE_CHECKING:
    from pipeload.hf.pending_load import PendingLoad
    from tests.conftest import TinyCheckpoint

_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _SMALL,
    # Experts in one tensor, whose product knows the meta device in bf16 alone.
    "mixtral": _SMALL | {"num_local_experts": 4},
    "t5": {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "mamba": {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRIDS: dict[str, dict[str, Any]] = {
    "gemma3_text": _SMALL | {"head_dim": 8},
    "jamba": _SMALL | {"num_experts": 4, "mamba_dt_rank": 4},
    "qwen3_next": _SMALL
    | _EXPERTS
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "deepseek_v3": _SMALL
    | _EXPERTS
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt_oss": _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}
LAYERS = 8
# How many of them it takes to see every kind of layer; two if all are alike.
KINDS_WITHIN = {"gemma3_text": 6, "jamba": 5, "qwen3_next": 4, "gpt_oss": 2, "deepseek_v3": 2}


class Seen(Exception):  # noqa: N818
    """Ends a load once its model has been looked at."""


def on_meta(model_type: str, config: Any = None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = config or AutoConfig.for_model(model_type, **(MORE | HYBRIDS)[model_type])
    auto: Any = AutoModelForSeq2SeqLM if model_type == "t5" else AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = auto.from_config(made)
    return model


def linears(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}


@pytest.mark.parametrize("name", [*FAMILIES, *(name for name in MORE if name != "mamba")])
def test_families_use_weights_where_they_are(name: str) -> None:
    """Every Linear runs, and nothing but itself uses its weight."""
    model = on_meta(name, tiny_config(name) if name in FAMILIES else None)
    usage = probe_usage(model)
    assert usage is not None
    assert usage.touched_outside == set()
    assert linears(model) <= set(usage.executed)


def test_a_family_that_uses_weights_elsewhere() -> None:
    """Mamba reads the weight of a Linear that it never calls."""
    usage = probe_usage(on_meta("mamba"))
    assert usage is not None
    assert "backbone.layers.1.mixer.dt_proj.weight" in usage.touched_outside
    assert "backbone.layers.1.mixer.in_proj.weight" not in usage.touched_outside
    assert "backbone.layers.1.mixer.dt_proj" not in usage.executed


def test_a_model_that_is_being_loaded(tiny: TinyCheckpoint) -> None:
    """At that moment everything is on meta and in training mode, and stays so."""
    from transformers import AutoModelForCausalLM

    def look(pending: PendingLoad) -> None:
        model = pending.model
        before = {name: sorted(vars(module)) for name, module in model.named_modules()}
        usage = probe_usage(model)
        assert usage is not None
        assert usage.executed[0] == ""
        assert all(module.training for module in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert before == {name: sorted(vars(module)) for name, module in model.named_modules()}
        assert model.config.pad_token_id == 0
        raise Seen

    with take_over_loading(look), pytest.raises(Seen):
        AutoModelForCausalLM.from_pretrained(tiny("llama"))


def test_inputs_are_small() -> None:
    """One row of two tokens for each input, without masks."""
    inputs = meta_inputs(on_meta("t5"))
    assert {name: tuple(value.shape) for name, value in inputs.items()} == {
        "input_ids": (1, 2),
        "decoder_input_ids": (1, 2),
    }
    assert all(value.is_meta for value in inputs.values())


@pytest.mark.parametrize("name", [*FAMILIES, *MORE, *HYBRIDS])
def test_few_layers_tell_of_all(name: str) -> None:
    """The same usage, to the order of the calls, as if every layer had run."""
    from transformers import AutoConfig

    options = (MORE | HYBRIDS).get(name)
    layers = {"t5": "num_layers", "bloom": "n_layer", "gpt2": "n_layer"}
    longer = {layers.get(name, "num_hidden_layers"): LAYERS}
    model = on_meta(
        name,
        tiny_config(name, **longer)
        if options is None
        else AutoConfig.for_model(name, **(options | longer)),
    )
    lists = twin_lists(model)
    assert {(len(t.groups), t.kept) for t in lists} == {(LAYERS, KINDS_WITHIN.get(name, 2))}
    with mock.patch.object(usage_trial, "_observe", wraps=usage_trial._observe) as observe:
        few = probe_usage(model)
    assert all(call.args[2] for call in observe.call_args_list), "it ran whole"
    with mock.patch.object(usage_trial, "twin_lists", return_value=[]):
        assert few == probe_usage(model)


class Layer(nn.Module):
    """Once there is something in its cache, it reads the weight of what it called before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, device="meta")

    def forward(self, x: torch.Tensor, *, goes_on: bool) -> torch.Tensor:
        result: torch.Tensor = x @ self.inner.weight if goes_on else self.inner(x)
        return result


class Indexed(nn.Module):
    """Counts its layers by itself; asks the last layer of its cache whether it is in use."""

    dummy_inputs = {"input_ids": torch.ones(3, 5, dtype=torch.long)}  # noqa: RUF012

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, device="meta")
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.count = count

    def forward(self, input_ids: torch.Tensor, cache: Any = None) -> Any:
        cache = cache or SimpleNamespace(layers=[[] for _ in range(6)])
        goes_on = bool(cache.layers[-1])
        x = self.embed(input_ids)
        for index in range(self.count or len(self.layers)):
            x = self.layers[index](x, goes_on=goes_on)
            cache.layers[index].append(x)
        return {"x": x, "cache": cache}


@pytest.mark.parametrize("count", [None, 6])
def test_few_layers_fit_their_cache_or_all_run(count: int | None) -> None:
    """Layers that are not there leave no holes; a model that misses them runs as a whole."""
    model = Indexed(count)
    names = set(model.state_dict())
    usage = probe_usage(model)
    assert usage is not None
    assert usage.touched_outside == {f"layers.{i}.inner.weight" for i in range(6)}
    assert usage.executed[2:] == tuple(f"layers.{i}{m}" for i in range(6) for m in ("", ".inner"))
    assert set(model.state_dict()) == names


def test_blocks_that_cannot_be_compared() -> None:
    """Then all of them run."""
    model, plain = Indexed(None), Indexed(None)
    loop: list[object] = []
    loop.append(loop)
    model.layers[0].__dict__["loop"] = loop
    model.layers[1].__dict__["config"] = {"layers": 6}
    assert probe_usage(model) == probe_usage(plain) is not None


class Choosy(nn.Module):
    """Looks at values, which there are none of."""

    dummy_inputs = {"input_ids": torch.ones(3, 5, dtype=torch.long)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3, device="meta")

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.embed(input_ids) if input_ids.sum() > 3 else None


def test_what_cannot_be_run() -> None:
    """A model that looks at values, one without inputs, one whose weights are there already."""
    assert probe_usage(Choosy()) is None
    assert probe_usage(nn.Linear(3, 2, device="meta")) is None
    real = Choosy()
    real.embed = nn.Embedding(5, 3)
    assert probe_usage(real) is None
