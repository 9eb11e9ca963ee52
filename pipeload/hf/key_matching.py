"""Private parts of transformers: which stored tensors make which weight, by the library's renaming.

Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

from pipeload.errors import UnsupportedModelError
from pipeload.hf.recipes import Recipe
from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from pipeload.checkpoint.headers import Checkpoint
    from pipeload.formats.format import Unpacking


def match_keys(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    mapping: Sequence[WeightRenaming | WeightConverter],
    unpacking: Unpacking | None,
) -> dict[str, Recipe]:
    """Find the recipes of all weights, by the first one that each makes.

    Args:
        model: on the meta device.
        checkpoint: for it.
        mapping: the library's; renamings note what they have matched.
        unpacking: how the library makes floats of weights that are quantised, if it does.

    Raises:
        UnsupportedModelError: its operations fail.
    """
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    prefix = model.base_model_prefix
    recipes: dict[str, Recipe] = {}
    # The library's order: experts must arrive in the order of their numbers.
    for key in sorted(checkpoint.entries, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target in state:
            recipe = recipes.setdefault(target, Recipe(by_pattern.get(pattern or "")))
            recipe.sources.append((checkpoint.entries[key], pattern or key))
    if unpacking is not None:
        for name, recipe in recipes.items():
            try:
                recipe.settle(name, model, unpacking)
            except Exception as error:  # noqa: PERF203 - whatever the library's operations raise
                raise UnsupportedModelError(
                    f"transformers {transformers.__version__} cannot make {name!r} of the "
                    f"quantised tensors that are stored for it ({error}). Plain from_pretrained "
                    "fails, too. Use a checkpoint that it loads."
                ) from error
        return recipes
    for recipe in recipes.values():
        if recipe.own is not None:
            recipe.unpacking_bytes = recipe.own.beside_bytes
        elif len(recipe.sources) == 1 and recipe.unpacks and not recipe.merges:
            recipe.converter, recipe.dtype = None, DTYPES.get(recipe.sources[0][0].dtype)
    return recipes


def weights_made(first: str, recipe: Recipe) -> list[str]:
    """List all the weights that a recipe makes; `first` is the first one."""
    if recipe.converter is None:
        return [first]
    patterns = recipe.converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def target_dtype(config: Any, name: str, parameter: nn.Parameter) -> torch.dtype:
    """Go by the library's rule: a meta parameter does not show that it is kept in fp32."""
    if config.dtype_plan:
        matcher, groups, _ = build_glob_alternation(list(config.dtype_plan))
        if (match := matcher.search(name)) and match.lastgroup is not None:
            dtype: torch.dtype = config.dtype_plan[groups[match.lastgroup]]
            return dtype
    return parameter.dtype
