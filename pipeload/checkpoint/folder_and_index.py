"""Whether a local folder has a checkpoint that can be streamed: judged before any loading."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Final

from pipeload.checkpoint.untrusted_json import (
    is_file,
    is_text_map,
    malformed,
    read_json,
    reading,
    show,
)
from pipeload.errors import CheckpointError, PipeloadError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["check_folder"]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAX_LISTED: Final = 10  # names in one message
_PICKLED_SUFFIXES: Final = (".pt", ".pth", ".ckpt")
_TRAINING_STATE: Final = (
    "optimizer",
    "scheduler",
    "scaler",
    "rng_state",
)  # pickled, but no weights


def check_folder(folder: Path, *, variant: str | None = None, adapter: Path | None = None) -> None:
    """Refuse a local folder without a usable safetensors checkpoint, before anything is loaded.

    Files are looked for as transformers does: the file that config.json names, else the single
    file, else the index. A folder that only has a PEFT adapter passes: the base model is elsewhere.

    Args:
        folder: Where the weights are; with a subfolder, the subfolder.
        variant: As in transformers: "fp16" stands for model.fp16.safetensors.
        adapter: Where an adapter may be; in `folder` when None.

    Raises:
        CheckpointError: No safetensors weights, only pickled ones, or an index that cannot be used.
        ReadError: The system could not read the folder or the index.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{str(folder)!r} is not a folder. Check the path.")
    has_adapter = is_file((adapter or folder) / "adapter_config.json")
    if has_adapter and not (folder / "config.json").exists():
        return  # whatever else is here, transformers goes to the adapter's base model
    named = _find_named_weights(folder)
    wanted = [named] if named else [_add_variant(name, variant) for name in (_SINGLE, _INDEX)]
    found = next((name for name in wanted if is_file(folder / name)), None)
    if found is not None:
        if found.endswith(".json"):
            _check_index(folder / found)
        return
    names = _list_files(folder)
    if pickled := [name for name in names if _is_pickled(name)]:
        raise _pickled_only(folder, pickled, variant)
    if not has_adapter:
        raise _nothing_found(folder, wanted, names)


def _add_variant(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _find_named_weights(folder: Path) -> str | None:
    """Return the weights file that config.json names: transformers prefers it to all others."""
    path = folder / "config.json"
    try:
        config = read_json(path)
    except PipeloadError:
        return None  # the configuration is for transformers to judge
    name = config.get("transformers_weights") if isinstance(config, dict) else None
    if not isinstance(name, str):
        return None
    if not name.endswith((".safetensors", ".safetensors.index.json")):
        what = f"transformers_weights is {show(name)}, which is not a safetensors file"
        raise malformed(path, what, "Name a safetensors file there, or remove the entry.")
    _check_inside(path, name)
    return name


def _check_inside(path: Path, name: str) -> None:
    """Check by its letters alone that a file name stays inside the folder, on every system.

    Links are not followed: in the hub's cache every file is one, and leads outside.
    """
    parts = name.split("/")
    climbs = any(part.strip(" .") == "" for part in parts if part not in {"", "."})
    if climbs or parts[0] == "" or not name.isprintable() or not {"\\", ":"}.isdisjoint(name):
        raise malformed(
            path,
            f"it names the file {show(name)}, which may lie outside the folder",
            "Only plain names inside the folder are read; do not trust this checkpoint.",
        )


def _check_index(path: Path) -> None:
    index = read_json(path)
    if not isinstance(index, dict):
        raise malformed(path, f"it is {show(index)}, not a JSON object")
    weight_map = index.get("weight_map")
    if not is_text_map(weight_map) or not weight_map:
        got = f"its weight_map is {show(weight_map)}"
        raise malformed(path, f"{got}, wanted an object of tensor names and file names")
    if not isinstance(index.get("metadata"), dict):  # transformers fails without one
        raise malformed(path, "it has no metadata object", 'Add "metadata": {} to it.')
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        _check_inside(path, shard)
        if not shard.endswith(".safetensors"):
            raise malformed(path, f"it lists {show(shard)}, which is not a safetensors file")
    missing = [shard for shard in shards if not is_file(path.parent / shard)]
    if missing:
        what = f"{len(missing)} of its {len(shards)} shards are missing: {_join(missing)}"
        raise malformed(path, what, "Download them into the same folder.")


def _list_files(folder: Path) -> list[str]:
    with reading(folder):
        return sorted(path.name for path in folder.iterdir() if is_file(path))


def _is_pickled(name: str) -> bool:
    name = name.lower()
    if name.startswith("pytorch_model") and name.endswith(".bin"):
        return True
    return name.endswith(_PICKLED_SUFFIXES) and not name.startswith(_TRAINING_STATE)


def _pickled_only(folder: Path, pickled: Sequence[str], variant: str | None) -> CheckpointError:
    source = str(folder.absolute())
    option = f", variant={_quote(variant)}" if variant is not None else ""
    commands = "\n".join(
        "  python -c "
        + shlex.quote(
            f"from transformers import {name}; {name}.from_pretrained({_quote(source)}{extra})"
            f".save_pretrained({_quote(source + '-safetensors')})"
        )
        for name, extra in (("AutoModelForCausalLM", option), ("AutoTokenizer", ""))
    )
    return CheckpointError(
        f"Folder {str(folder)!r} only has pickled weights ({_join(pickled)}). Loading a pickled "
        "file can run code that is hidden in it, so pipeload refuses them. If you trust their "
        "source, convert them once, on a machine whose memory holds the whole model:\n"
        f"{commands}\nand then load {source + '-safetensors'!r}."
    )


def _quote(text: str) -> str:
    return json.dumps(
        text, ensure_ascii=False
    )  # double quotes: they survive the shell's single ones


def _nothing_found(folder: Path, wanted: Sequence[str], names: Sequence[str]) -> CheckpointError:
    others = [name for name in names if name.endswith(".safetensors")]
    return CheckpointError(
        f"Folder {str(folder)!r} has no safetensors checkpoint. Looked for: {_join(wanted)}; other "
        f"safetensors files there: {_join(others) or 'none'}. Check the path, pass variant= if the "
        "names carry one, or download the model again."
    )


def _join(names: Sequence[str]) -> str:
    shown = ", ".join(show(name) for name in names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
