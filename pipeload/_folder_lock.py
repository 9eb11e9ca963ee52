"""Keeps a folder to one process: a locked file in it, which the system lets go of at any death."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # not on this system: nobody is kept out
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from pathlib import Path

LOCK = "pipeload.lock"
"""The file's name."""
_TAKEN = {errno.EWOULDBLOCK, errno.EACCES}


class FolderLock:
    """Held from when it is made until it is released."""

    def __init__(self, folder: Path) -> None:
        """Take it.

        Raises:
            BlockingIOError: it is taken.
            OSError: the file cannot be made.
        """
        self._file = (folder / LOCK).open("ab")
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network file systems know no locks; there, nobody is kept out.
            if error.errno in _TAKEN:
                self._file.close()
                raise BlockingIOError(*error.args) from error
            return
        if not _is_there(self._file.fileno(), folder / LOCK):  # released while it was opened
            self._file.close()
            raise BlockingIOError(errno.EWOULDBLOCK, "the lock was just released")

    def release(self, folder: Path) -> None:
        """Let go; `folder` is where it is now, and the file is deleted there. May be repeated."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # a leftover that is empty harms nobody
                (folder / LOCK).unlink()
            self._file.close()


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
