"""What a model's name says before any library is loaded: whether something is there."""

from __future__ import annotations

import os
from pathlib import Path

from pipeload.checkpoint.gguf import SUFFIX
from pipeload.errors import CheckpointError, OptionError


def check_path(model: str, *, files: bool = False) -> None:
    """Refuse a path at which there is no model, at once: libraries take seconds to load.

    A folder with a configuration, and what may be a hub id, are for `check_model` to judge.

    Args:
        model: as it was typed.
        files: whether it may be a GGUF file.

    Raises:
        OptionError: there is no such folder, or it is a file.
        CheckpointError: the folder holds no model.
    """
    path = Path(model)
    if path.is_dir():
        if any((path / name).exists() for name in ("config.json", "adapter_config.json")):
            return
        found = sorted(path.glob(f"*{SUFFIX}")) if files else []
        cure = f"Name its file {str(found[0])!r}" if found else "Check the path"
        raise CheckpointError(f"folder {model!r} has no config.json, so it holds no model. {cure}.")
    if path.exists():
        if files and model.endswith(SUFFIX):
            return
        raise OptionError(f"{model!r} is a file. Name the folder that holds config.json.")
    if model.startswith((".", "/", "~")) or model.endswith(("/", os.sep)) or model.count("/") > 1:
        raise OptionError(f"there is no folder {model!r}. Check the path.")
