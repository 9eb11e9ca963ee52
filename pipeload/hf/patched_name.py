"""A name of somebody else's class or module that means something else for a while."""

from __future__ import annotations

import threading
from typing import Any


class Patch:
    """A name of a class or module that means something else while anybody needs it to."""

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name, self._replacement = owner, name, replacement
        self._lock = threading.Lock()
        self._users = 0
        self.original: Any = vars(owner)[name]
        """What it was when it was replaced last: of a class, a classmethod or staticmethod."""

    def install(self) -> None:
        """Note that one more needs it; the first has it put in place."""
        with self._lock:
            self._users += 1
            if self._users == 1 and not self._installed:
                self.original = vars(self._owner)[self._name]
                setattr(self._owner, self._name, self._replacement)

    def uninstall(self) -> None:
        """Note that one less needs it; the last has it taken off."""
        with self._lock:
            self._users -= 1
            # What somebody else has put there since stays; it calls ours, which then does nothing.
            if not self._users and self._installed:
                setattr(self._owner, self._name, self.original)

    @property
    def _installed(self) -> bool:
        return vars(self._owner)[self._name] is self._replacement

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()
