"""What asks a command to end: Ctrl-C, and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def end_signals(act: Any) -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM call `act`, between two steps of the main thread."""

    def note(_number: int, _frame: object) -> None:
        act()

    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, note) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
