"""Streaming for a whole process, whatever imports transformers, and whenever. Loads nothing itself.

The library is patched when it is imported, not before: a script may still set its environment.
"""

from __future__ import annotations

from typing import Any

from pipeload._on_import import when_imported

_MODELS = "transformers.modeling_utils"


def stream_when_imported(memory_limit: int | str, **options: Any) -> None:
    """Have every `from_pretrained` of the process streamed, as `pipeload.streaming` would.

    Args:
        memory_limit: as for `pipeload.from_pretrained`.
        **options: as for `pipeload.streaming`.

    Raises:
        OptionError: an option means nothing; raised when the library is imported.
    """

    def start() -> None:
        from pipeload._api import stream_everywhere

        stream_everywhere(memory_limit, **options)

    when_imported(_MODELS, start)
