"""Scratch files with an owner: those of a process that was killed are deleted by the next one.

A file is locked while its owner lives. The system lets go of the lock at any death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
from pathlib import Path

from pipeload.system.folder_lock import is_there, try_lock
from pipeload.system.mounts import network_mount

_log = logging.getLogger("pipeload")
_PREFIX = "pipeload-spill-"
PART, WHOLE = ".part", ".safetensors"
"""How names end while a file is written, and then."""
# Nobody else's files are called so by chance: what Python's tempfile puts between.
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}({PART}|{WHOLE})")


def make_owned(folder: Path) -> tuple[int, Path]:
    """A new file, open and locked, that only its owner may read. Its name ends in `PART`.

    Raises:
        OSError: it cannot be made there.
    """
    while True:
        descriptor, name = tempfile.mkstemp(PART, _PREFIX, folder)
        # Another process may have taken it for abandoned before it was locked.
        if try_lock(descriptor) is not False and is_there(descriptor, Path(name)):
            return descriptor, Path(name)
        os.close(descriptor)


def delete_abandoned(folder: Path) -> None:
    """Delete the files in `folder` whose owners are gone, as far as that can be told.

    On a network mount they are only named: a lock may not be seen by other machines there.
    """
    remote = network_mount(folder) is not None
    for path in folder.glob(f"{_PREFIX}*"):
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(OSError):  # gone by now, or somebody else's
                _delete_if_abandoned(path, name_only=remote)


def _delete_if_abandoned(path: Path, *, name_only: bool) -> None:
    # For writing: network file systems lock no others. A link is none of ours.
    descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    try:
        if not try_lock(descriptor):
            return
        if name_only:
            _log.warning("%s seems to be left of a process that was killed: delete it", path)
            return
        path.unlink()
        _log.info("deleted %s, which a process that was killed had left", path)
    finally:
        os.close(descriptor)
