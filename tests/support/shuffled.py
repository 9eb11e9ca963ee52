"""The same function with its channels in another order: an honest case for 4 bits.

The real model of the tests comes from a 4-bit file, so neighbours in a row lie on a grid of 16
values already, and groups of 32 lose nothing. Here hidden channels, units of the MLPs and channels
of the values are put in another order, each with all that belongs to it: no group keeps its grid,
and what the model computes stays the same but for the order in which sums are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.models import load_plain

if TYPE_CHECKING:
    from pathlib import Path


@torch.no_grad()
def save_shuffled(source: Path, folder: Path, *, seed: int) -> Path:
    """Save a shuffled copy of a LLaMA without biases whose head is its embedding."""
    model = load_plain(source)
    config, generator = model.config, torch.Generator().manual_seed(seed)
    heads, groups, width = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size // config.num_attention_heads,
    )
    hidden = torch.randperm(config.hidden_size, generator=generator)

    def reorder(parameter: torch.nn.Parameter, rows: torch.Tensor | None, columns: object) -> None:
        kept = parameter.data if rows is None else parameter.data[rows]
        if isinstance(columns, torch.Tensor):
            kept = kept[:, columns]
        parameter.data.copy_(kept.clone())

    reorder(model.model.embed_tokens.weight, None, hidden)
    reorder(model.model.norm.weight, hidden, None)
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            reorder(norm.weight, hidden, None)
        units = torch.randperm(config.intermediate_size, generator=generator)
        # Each key-value head keeps its place; queries of a group read the same values.
        orders = [torch.randperm(width, generator=generator) for _ in range(groups)]
        values = torch.cat([head * width + order for head, order in enumerate(orders)])
        shared = heads // groups
        read = torch.cat([head * width + orders[head // shared] for head in range(heads)])
        attention, mlp = layer.self_attn, layer.mlp
        reorder(attention.q_proj.weight, None, hidden)
        reorder(attention.k_proj.weight, None, hidden)
        reorder(attention.v_proj.weight, values, hidden)
        reorder(attention.o_proj.weight, hidden, read)
        reorder(mlp.gate_proj.weight, units, hidden)
        reorder(mlp.up_proj.weight, units, hidden)
        reorder(mlp.down_proj.weight, hidden, units)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
    return folder
