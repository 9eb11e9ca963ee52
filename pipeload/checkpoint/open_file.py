"""One open file, and how this system reads at a place in it: chosen once, when it is opened.

[Note: three ways to read at a place] Threads share a file, so a place goes with each read. preadv
does that, straight into memory of ours. Where it is missing, pread does (it hands over bytes of
its own, so it is asked for little at a time). Where that is missing, too (Windows), there is only
one position per handle, so every thread that reads takes a handle of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO
    from pathlib import Path

    Read = Callable[[memoryview, int], int]
    """Fill memory from a place in the file; returns how many bytes came, 0 behind its end."""

# Of each of these a copy exists for a moment in every reader.
_PREAD_BYTES = 1 << 20


class OpenFile(NamedTuple):
    """A file that is being read, as it was when it was opened."""

    descriptor: int
    nbytes: int
    modified_ns: int
    read: Read
    close: Callable[[], None]
    """To be called once."""


def open_file(path: Path, *, direct: bool) -> OpenFile:
    """Open a file for reads at any place by several threads, past the page cache if `direct`.

    Raises:
        OSError: it cannot be opened, or refuses direct reads.
    """
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    # O_BINARY: Windows would turn line ends over and stop at a Ctrl-Z.
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        status = os.fstat(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    read, close = _reading(path, descriptor)
    return OpenFile(descriptor, status.st_size, status.st_mtime_ns, read, close)


def _reading(path: Path, descriptor: int) -> tuple[Read, Callable[[], None]]:
    """Choose what this system has: see [Note: three ways to read at a place]."""
    if hasattr(os, "preadv"):
        preadv = os.preadv
        return lambda into, place: preadv(descriptor, [into], place), lambda: os.close(descriptor)
    if hasattr(os, "pread"):
        return lambda into, place: _pread(descriptor, into, place), lambda: os.close(descriptor)
    handles = _Handles(path)

    def close() -> None:
        handles.close()
        os.close(descriptor)

    return handles.read, close


def _pread(descriptor: int, into: memoryview, place: int) -> int:
    data = os.pread(descriptor, min(len(into), _PREAD_BYTES), place)
    into[: len(data)] = data
    return len(data)


class _Handles:
    """As many handles of one file as threads read it at once.

    The file must be kept open elsewhere by a system that lets nobody replace an open file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._free: list[FileIO] = []
        self._closed = False

    def read(self, into: memoryview, place: int) -> int:
        """Read at a place: see `Read`."""
        try:
            handle = self._free.pop()
        except IndexError:
            handle = self._path.open("rb", buffering=0)
        try:
            handle.seek(place)
            return handle.readinto(into)
        finally:
            self._free.append(handle)
            if self._closed:  # meanwhile
                self.close()

    def close(self) -> None:
        """Close what nobody is reading from; the rest when its read ends."""
        self._closed = True
        while True:
            try:
                handle = self._free.pop()
            except IndexError:
                return
            handle.close()
