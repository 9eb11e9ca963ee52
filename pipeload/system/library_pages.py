"""Giving back the pages of shared libraries that loading touched and running does not need.

[Note: why dropping library pages is safe]
Importing torch and transformers maps some 80 MB of library code and constants, most of it read
once: relocations, registrations, module initialisers. These pages are clean copies of a file, so
the kernel itself may drop them at any moment; asked to do so, it does no more than that. A page
that is needed again is mapped again from the page cache, a minor fault of microseconds.

madvise would lose what was written, and would reach whatever has come to lie at the address. So:

- Only mappings that are private, not writable, and without one page of their own. What the
  loader relocated, and what a debugger patched, is anonymous memory: such a mapping stays whole.
- Only of libraries that the loader holds, and each is held once more while it is done: no other
  thread can unload it and leave its addresses to other memory.
- Locked pages stay: the kernel refuses those.

Private memory stays as it is: without swap, the kernel has nowhere else to keep it.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_MADV_DONTNEED = 4
_HEADER = re.compile(
    rb"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<mode>\S{4}) \S+ \S+ \d+\s*(?P<path>.*)\n"
)
_DROPPABLE_MODES = (b"r-xp", b"r--p")
_LIBRARY = re.compile(rb"/.*\.so(\.[0-9.]+)?")


class Segment(NamedTuple):
    """A mapping that can be dropped: clean pages of a shared library. Addresses in bytes."""

    path: bytes
    start: int
    stop: int
    resident: int
    """Bytes of it in memory now."""


def lower_floor() -> int:
    """Drop the clean pages of loaded libraries from memory; what is in use comes back by itself.

    Returns:
        The bytes that were dropped: 0 off Linux, and where the kernel does not tell about mappings.
    """
    return _sum_of_held(_drop)


def droppable_bytes() -> int:
    """What `lower_floor` would drop now. Only looks; what it cannot look at is 0."""
    return _sum_of_held(lambda _libc, segment: segment.resident)


def _sum_of_held(count: Callable[[Any, Segment], int]) -> int:
    """The sum over the segments that can be dropped, while none of them can go away."""
    if not sys.platform.startswith("linux"):
        return 0
    try:
        libc = _libc()
        paths = {segment.path for segment in _own_segments()}
        held = [found for path in paths if (found := _hold(libc, path)) is not None]
    except (OSError, AttributeError):
        return 0  # no /proc, or another C library
    try:
        # Read again: only now can none of them go away, and only those that are held count.
        names = {name for name, _ in held}
        return sum(count(libc, segment) for segment in _own_segments() if segment.path in names)
    except OSError:
        return 0
    finally:
        for _, handle in held:
            libc.dlclose(handle)


def droppable(smaps: Iterable[bytes]) -> Iterator[Segment]:
    """The segments in the lines of a `/proc/PID/smaps` that hold nothing but a library's file."""
    header: re.Match[bytes] | None = None
    resident = 0
    for line in smaps:
        if line.startswith(b"Rss:"):
            resident = _kilobytes(line)
        elif line.startswith(b"Anonymous:"):
            if header is not None and resident and not _kilobytes(line):
                start, stop = int(header["start"], 16), int(header["stop"], 16)
                yield Segment(header["path"], start, stop, resident)
        elif (match := _HEADER.fullmatch(line)) is not None:
            clean = match["mode"] in _DROPPABLE_MODES and _LIBRARY.fullmatch(match["path"])
            header, resident = (match if clean else None), 0


def _own_segments() -> list[Segment]:
    with open("/proc/self/smaps", "rb") as file:  # noqa: PTH123 - Path cannot be read by lines
        return list(droppable(file))


def _kilobytes(line: bytes) -> int:
    return int(line.split()[1]) * 1024


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    libc.dlclose.argtypes = (ctypes.c_void_p,)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _hold(libc: Any, path: bytes) -> tuple[bytes, int] | None:
    """Keep a loaded library from being unloaded; None when the loader does not know it."""
    handle = libc.dlopen(path, os.RTLD_LAZY | os.RTLD_NOLOAD)
    return (path, handle) if handle else None


def _drop(libc: Any, segment: Segment) -> int:
    refused = libc.madvise(segment.start, segment.stop - segment.start, _MADV_DONTNEED)
    return 0 if refused else segment.resident
