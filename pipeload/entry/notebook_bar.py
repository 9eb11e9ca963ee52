"""The first pass of a model in a notebook is shown, as the library there shows its loading."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pipeload.engine.first_pass_progress import FirstPass
from pipeload.hf import library

if TYPE_CHECKING:
    from pipeload.engine.assembly import Assembly


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def show_first_pass(assembly: Assembly, model: Any) -> None:
    """In a notebook, show how far the first pass of a model is that streams now."""
    if in_notebook():
        assembly.at_removal(FirstPass(model, NotebookBar()).stop)


class NotebookBar:
    """A bar that comes with the first block: in the cell that runs the model."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown = 0

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` blocks have run."""
        if self._bar is None:
            self._bar = library.progress_bar(total, "First pass", "layer")
        self._bar.update(done - self._shown)
        self._shown = done

    def close(self) -> None:
        """Wipe the bar away. May be called again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
