"""Private parts of transformers: the library loads what is not streamed, as it loads its own.

Buffers, ties, initialisation of missing weights and the loading report stay the library's. Seen in
5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from transformers import core_model_loading
from transformers.core_model_loading import convert_and_load_state_dict_in_model

from pipeload.hf.marks import is_initialised, mark_initialised
from pipeload.hf.patched_name import Patch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from pipeload.formats.format import PackedWeight


def load_tensors(tensors: Mapping[str, Any], model: PreTrainedModel, config: Any) -> Any:
    """Have the library load these tensors, by name; returns its report. See `load_all_but`."""
    with _BAR:
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), config, None)
    return info


def load_all_but(
    skipped: Collection[str],
    model: PreTrainedModel,
    files: Sequence[Path],
    config: Any,
    *,
    disable_mmap: bool,
) -> Any:
    """Have the library load all stored tensors but those of `skipped`; returns its report.

    Args:
        skipped: names of stored tensors.
        model: what they are loaded into.
        files: the checkpoint's.
        config: the library's own record of this load.
        disable_mmap: whether the files are read, not mapped.
    """
    backend = "pread" if disable_mmap else "mmap"
    with contextlib.ExitStack() as stack:
        rest: dict[str, Any] = {}
        for file in files:
            opened = stack.enter_context(safe_open(file, framework="pt", backend=backend))
            kept = [key for key in opened.keys() if key not in skipped]  # noqa: SIM118 - no dict
            rest.update((key, opened.get_slice(key)) for key in kept)
        return load_tensors(rest, model, config)


def not_missing(
    info: Any, model: PreTrainedModel, taken: set[str], packed: Mapping[str, PackedWeight]
) -> None:
    """Take off the loading report's missing keys what is streamed, and what goes with it.

    Args:
        info: the report.
        model: what was loaded.
        taken: names of weights that are streamed.
        packed: quantised ones, whose modules count statistics as their own.
    """
    info.missing_keys.difference_update(taken)
    parameters = {name for name, _ in model.named_parameters()}
    owners = tuple(name.removesuffix("weight") for name in taken & packed.keys())
    info.missing_keys -= {
        key for key in info.missing_keys - parameters if owners and key.startswith(owners)
    }


def keep_placeholders(model: PreTrainedModel) -> None:
    """Mark modules that have nothing left to initialise.

    The library asks before it overwrites a weight, but not for all that torch's own resets
    write to, and some of those cannot be written to while values are on disk.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        alone = not any(True for _ in module.children()) and not any(True for _ in module.buffers())
        if alone and own and all(map(is_initialised, own)):
            mark_initialised(module)


def _bar(items: Any, *args: Any, **kwargs: Any) -> Any:
    """Make the loader's progress bar, unless it would count nothing: streaming comes later."""
    return _BAR.original(items, *args, **kwargs) if items else items


_BAR = Patch(core_model_loading, "tqdm", _bar)
