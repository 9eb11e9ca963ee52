"""The library's models run once without weights, and tell how they use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from pipeload._probe import meta_inputs, probe_usage
from pipeload._transformers import PendingLoad, take_over_loading
from tests.models import FAMILIES, tiny_config

if TYPE_CHECKING:
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


class Seen(Exception):  # noqa: N818
    """Ends a load once its model has been looked at."""


def on_meta(model_type: str, config: Any = None) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    made = config or AutoConfig.for_model(model_type, **MORE[model_type])
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
