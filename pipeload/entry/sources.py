"""What a model is named by: a folder, a hub id, or a GGUF file; and what is said beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.checkpoint.gguf import SUFFIX
from pipeload.checkpoint.headers import check_folder
from pipeload.hf import arguments
from pipeload.hf.gguf import check_gguf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.weights.device_interface import Device


def is_gguf(model: str) -> bool:
    """Whether it names a GGUF file that is there."""
    return model.endswith(SUFFIX) and Path(model).is_file()


def source_of(model: str) -> tuple[str, dict[str, Any]]:
    """What the library takes for it: a folder or hub id, and the option that names a file in it."""
    if not is_gguf(model):
        return model, {}
    path = Path(model)
    return str(path.parent), {"gguf_file": path.name}


def check_source(
    pretrained: str | os.PathLike[str] | None,
    kwargs: Mapping[str, Any],
    device: Device | None = None,
) -> dict[str, Any]:
    """What is handed to the library. Looks at a local folder; hub ids are the library's to resolve.

    Raises:
        CheckpointError: weights are missing, malformed or pickled.
        OptionError: an argument means nothing here.
        UnsupportedModelError: weights are to be quantised.
    """
    if pretrained is None:
        raise arguments.no_checkpoint()
    passed_on = arguments.adapt(kwargs, None if device is None else device.where)
    folder = Path(pretrained) / (kwargs.get("subfolder") or "")
    if (gguf_file := kwargs.get("gguf_file")) is not None:
        check_gguf(folder, gguf_file)
        return passed_on
    adapter = Path(pretrained) / ((kwargs.get("adapter_kwargs") or {}).get("subfolder") or "")
    if folder.is_dir() or str(pretrained).endswith(("/", os.sep)):  # no hub id ends so
        check_folder(folder, variant=kwargs.get("variant"), adapter=adapter)
    return passed_on
