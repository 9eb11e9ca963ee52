"""The one stack of steps that takes a streaming model down.

[Note: why not contextlib.ExitStack] That one takes a step off before it calls it. A Ctrl-C that
strikes in between, or within the step, would leave a hook or a thread behind for good. Here a step
stays until it has run, so that whoever was struck takes it once more; steps may be taken twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Step = Callable[[], object]
"""Takes something back. Does nothing where that has been done. It holds no model: see `Undo`."""


class Undo:
    """Steps back, the last one first.

    A finalizer holds it from the moment a model streams, so what a step holds, lives on: neither
    the model nor what its hooks call may be among that.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def push(self, step: Step) -> None:
        """Have `step` taken before all that are there already."""
        self._steps.append(step)

    def push_all(self, steps: Iterable[Step]) -> None:
        """Push each before the next is asked for: whatever makes them puts things on meanwhile."""
        for step in steps:
            self.push(step)

    @property
    def is_done(self) -> bool:
        """Whether no step is left."""
        return not self._steps

    def __call__(self) -> None:
        """Take all steps, whatever some of them raise. May be called again.

        Raises:
            BaseException: what the first step that failed has raised, or an interrupt.
        """
        failed: BaseException | None = None
        struck: Step | None = None
        while self._steps:
            step = self._steps[-1]
            try:
                step()
                self._forget(step)
            except Exception as error:
                failed = failed or error
                self._forget(step)
            except BaseException as error:  # an interrupt: it may have left the step half done
                failed = error
                if struck is step:
                    self._forget(step)
                struck = step
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # in a cycle with its traceback it would keep what these frames hold

    def _forget(self, step: Step) -> None:
        """Take it off, unless that has been done: what it let go may have had all steps taken."""
        if self._steps and self._steps[-1] is step:
            del self._steps[-1]
