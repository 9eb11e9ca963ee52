"""What `python -m pipeload` says on stderr when the script it ran has ended."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING

from pipeload.system.on_import import when_imported

if TYPE_CHECKING:
    from torch import nn

    from pipeload.engine.handle import Handle

_NOTHING = (
    "pipeload: no model was streamed in this process. One that a process started by it loads is "
    "that one's: start it with python -m pipeload, or with PIPELOAD_MEMORY_LIMIT set and "
    "pipeload imported."
)


class ScriptEnd:
    """Follows which models are streamed, and tells at exit; once, and not in forked children."""

    def __init__(self, *, stats: bool) -> None:
        """`stats`: print each model's statistics."""
        self.failed = False
        """The script has ended with an error, which is all that is to be said."""
        self._stats = stats
        self._streamed = False
        self._process = os.getpid()

    def follow(self) -> None:
        """From now on, to the end of the process."""
        when_imported("pipeload.engine.handle", self._listen)
        # Called after the models' own finalizers: those that come later are called first.
        atexit.register(self._tell)

    def _listen(self) -> None:
        from pipeload.engine.handle import LISTENERS

        LISTENERS.append(self._see)

    def _see(self, model: nn.Module, handle: Handle) -> None:
        self._streamed = True
        if self._stats:
            weakref.finalize(model, self._show, type(model).__name__, handle)

    def _show(self, name: str, handle: Handle) -> None:
        if os.getpid() == self._process:
            _write(f"{name}\n{handle.stats().table()}")

    def _tell(self) -> None:
        if not (self._streamed or self.failed) and os.getpid() == self._process:
            _write(_NOTHING)


def _write(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
