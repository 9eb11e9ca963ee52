"""Opens a checkpoint that others have quantised, to be converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from pipeload.checkpoint.headers import lacking
from pipeload.entry.sources import check_source
from pipeload.errors import CheckpointError
from pipeload.hf.coded_checkpoint import CodedCheckpoint, take_settings
from pipeload.hf.takeover import peek

if TYPE_CHECKING:
    import os


def open_coded(
    pretrained: str | os.PathLike[str], dtype: str, kwargs: dict[str, Any]
) -> CodedCheckpoint:
    """Find a checkpoint's coded weights.

    Args:
        pretrained: a folder or a hub id.
        dtype: of floats, for the library: "auto" is what it says itself.
        kwargs: for the library's `from_pretrained`.

    Raises:
        CheckpointError: it is malformed, or something is missing.
        UnsupportedModelError: nobody knows how it is quantised, or its integers cannot be
            taken over.
    """
    passed_on = check_source(pretrained, {"dtype": dtype, **kwargs})
    config = transformers.AutoConfig.from_pretrained(pretrained, **kwargs)
    settings = take_settings(config)
    auto: Any = transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(pretrained, config=config, **passed_on))
    if pending is None:
        raise CheckpointError(f"{str(pretrained)!r} holds no weights. Name a folder that does.")
    found = CodedCheckpoint(str(pretrained), pending, settings)
    if missing := found.missing():
        raise lacking(str(pretrained), sorted(missing))
    return found
