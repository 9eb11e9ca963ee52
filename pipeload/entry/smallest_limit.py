"""The smallest limit that a model can be loaded with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.entry.api import plan
from pipeload.errors import MemoryLimitError

if TYPE_CHECKING:
    import os


def smallest_limit(
    pretrained: str | os.PathLike[str],
    *args: Any,
    tokens: int = 256,
    batch: int = 1,
    **kwargs: Any,
) -> int:
    """The smallest `memory_limit`, in bytes, with which `from_pretrained` works in this process.

    Args:
        pretrained: a folder or a hub id.
        *args: as for `from_pretrained`.
        tokens: longest sequence, prompt and answer, in tokens.
        batch: sequences at once.
        **kwargs: as for `from_pretrained`.

    Raises:
        CheckpointError: as for `from_pretrained`.
        UnsupportedModelError: as for `from_pretrained`.
        OptionError: as for `from_pretrained`.
    """
    try:
        made = plan(pretrained, *args, memory_limit=1, tokens=tokens, batch=batch, **kwargs)
    except MemoryLimitError as error:
        return error.smallest_limit
    return made.smallest_limit
