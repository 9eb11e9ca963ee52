"""What a model is named by, where one word has to do: a folder, a hub id, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeload.checkpoint.gguf import SUFFIX


def is_gguf(model: str) -> bool:
    """Whether it names a GGUF file that is there."""
    return model.endswith(SUFFIX) and Path(model).is_file()


def source_of(model: str) -> tuple[str, dict[str, Any]]:
    """What the library takes for it: a folder or hub id, and the option that names a file in it."""
    if not is_gguf(model):
        return model, {}
    path = Path(model)
    return str(path.parent), {"gguf_file": path.name}
