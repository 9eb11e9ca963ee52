"""Small mixtures of experts whose experts are read one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.models import save_random
from tests.support.streaming import session_of

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from pipeload.engine.expert_routing import Experts

LAYERS, EXPERTS, ROUTED = 3, 32, 4
_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "num_experts_per_tok": ROUTED,
    "head_dim": 16,
}
# A slice is no whole number of pages.
_KINDS: dict[str, dict[str, Any]] = {
    # Each expert has tensors of its own.
    "qwen3_moe": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 72,
        "intermediate_size": 176,
        "decoder_sparse_step": 1,
    },
    # The same by other names, without norms.
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 72},
    # Stacked in the file as in the model, with biases and the other way round.
    "gpt_oss": {
        "num_local_experts": EXPERTS,
        "intermediate_size": 72,
        "rope_scaling": None,
        "rope_theta": 10000.0,
    },
}


def moe_config(kind: str = "qwen3_moe", **overrides: Any) -> PreTrainedConfig:
    """A configuration with 32 experts in each of three layers, of which a token takes four."""
    from transformers import AutoConfig

    config: PreTrainedConfig = AutoConfig.for_model(
        kind, **(_SIZES | _TOKENS | _KINDS[kind] | overrides)
    )
    return config


def save_moe(folder: Path, kind: str = "qwen3_moe", dtype: str = "fp32", **options: Any) -> Path:
    """A random checkpoint of it, in two files so that experts of a layer lie in both."""
    options = {"max_shard_size": "3MB"} | options
    return save_random(moe_config(kind), folder, dtype, seed=7, **options)


_LARGER: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


def save_for_integers(folder: Path, kind: str = "qwen3_moe", dtype: str = "bf16") -> Path:
    """A random float checkpoint of sizes that kernels for integers take: int4 by 64 as well.

    Its banks are large enough to be read one by one as integers, too.
    """
    inner = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    config = moe_config(kind, **_LARGER, **{inner: 128})
    return save_random(config, folder, dtype, seed=7, max_shard_size="3MB")


def experts_of(model: Any) -> Experts:
    """What reads the experts of a streamed model."""
    return session_of(model).experts
