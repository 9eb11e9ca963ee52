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
        """Take the lock of `folder`.

        Raises:
            BlockingIOError: another process has it.
            OSError: the file cannot be made.
        """
        self._file = (folder / LOCK).open("ab")
        held = try_lock(self._file.fileno())
        if held is None:
            return
        if not held:
            self._file.close()
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        if not is_there(self._file.fileno(), folder / LOCK):  # released while it was opened
            self._file.close()
            raise BlockingIOError(errno.EWOULDBLOCK, "the lock was just released")

    def release(self, folder: Path) -> None:
        """Let go; `folder` is where it is now, and the file is deleted there. May be repeated."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # a leftover that is empty harms nobody
                (folder / LOCK).unlink()
            self._file.close()


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file, until it is closed by this process and those that it was forked into.

    Returns whether it is locked now, for nobody else; None where there are no locks: some network
    file systems know none, and there nobody is kept out.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in _TAKEN else None
    return True


def is_there(descriptor: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
