"""Streaming for a whole process, whatever imports transformers, and whenever. Loads nothing itself.

The library is patched when it is imported, not before: a script may still set its environment.

[Note: at the first load] What answers is imported when the first model is loaded, or when one of
pipeload's own functions is asked for. Not with the library: pipeload's modules import that
themselves, and one that is not through yet cannot be imported once more.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from pipeload.entry.options import OPTIONS
from pipeload.errors import OptionError
from pipeload.hf.patched_name import Patch
from pipeload.system.on_import import when_imported

_OTHERS = {"memory_limit", "read_timeout", "disk_rate", "draft"}
_VARIABLES = [name for name in OPTIONS if name not in _OTHERS]
"""What PIPELOAD_TOKENS and its like in the environment say, where nothing else does.

Of the others two have variables that count everywhere, one is of `plan` alone, one of
`from_pretrained`.
"""
_API = "pipeload.entry.api"
_MODELS = "transformers.modeling_utils"


def stream_when_imported(memory_limit: int | str, **options: Any) -> None:
    """Have every `from_pretrained` of the process streamed, as `pipeload.streaming` would.

    Args:
        memory_limit: as for `pipeload.from_pretrained`.
        **options: as for `pipeload.streaming`; what is not there is the environment's to say.

    Raises:
        OptionError: an option means nothing; raised at each load until one does.
    """
    first, there = _FirstLoad(), _API in sys.modules

    def start() -> None:
        from pipeload.entry.api import stream_everywhere

        named = _from_environment()
        first.end()
        try:
            stream_everywhere(memory_limit, **(named | options))
        except BaseException as error:
            if not there:  # else the caller is told, and nothing has changed
                first.wait()
            # Messages begin with what is wrong.
            for name in named.keys() - options.keys():
                if isinstance(error, OptionError) and str(error).startswith(f"{name}="):
                    variable = _variable(name)
                    raise OptionError(f"the environment variable {variable}: {error}") from None
            raise

    when_imported(_MODELS, first.wait)
    when_imported(_API, start)


def _from_environment() -> dict[str, int | str]:
    said = {name: os.environ.get(_variable(name), "").strip() for name in _VARIABLES}
    return {name: int(text) if text.isdecimal() else text for name, text in said.items() if text}


def _variable(option: str) -> str:
    return f"PIPELOAD_{option.upper()}"


class _FirstLoad:
    """Stands in for the library's `from_pretrained` until pipeload's own answers."""

    def __init__(self) -> None:
        self._patch: Patch | None = None
        self._waits = False

    def wait(self) -> None:
        """Import what answers when the first model is loaded. May be called again after `end`."""
        models = sys.modules[_MODELS].PreTrainedModel
        library = vars(models)["from_pretrained"]

        @functools.wraps(library.__func__)
        def from_pretrained(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
            if not self._waits:  # somebody has kept this one
                return library.__func__(cls, *args, **kwargs)
            importlib.import_module(_API)
            return vars(models)["from_pretrained"].__func__(cls, *args, **kwargs)

        self._patch = Patch(models, "from_pretrained", classmethod(from_pretrained))
        self._patch.install()
        self._waits = True

    def end(self) -> None:
        """Leave it to others."""
        if self._patch is not None:
            self._patch.uninstall()
        self._waits = False
