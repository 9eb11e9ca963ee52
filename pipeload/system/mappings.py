"""Files that are mapped into this process (Linux): what is unchanged in them, and letting them go.

[Note: what tells that a mapped weight is unchanged] A plain load maps its file privately. The
kernel then keeps a page of the file until somebody writes to it, and counts those that it had to
copy for that as anonymous. So a mapping without anonymous pages is the file, whatever was done to
the tensors that show it: also through `.data`, which leaves no trace in torch's own counter.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import re
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_HEAD = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<flags>\S{4}) (?P<offset>[0-9a-f]+) "
    r"(?P<device>[0-9a-f]+:[0-9a-f]+) (?P<inode>\d+)"
)


_OF_A_FILE = 1 << 61
"""In an entry of /proc/self/pagemap: the page is there, and no copy that was made to be written."""


class Mapping(NamedTuple):
    """A range of addresses that shows a range of a file. Sizes in bytes."""

    start: int
    stop: int
    offset: int
    """Place in the file of the byte at `start`."""
    path: Path
    anonymous: int
    """Bytes that are not the file's any more."""

    def holds(self, address: int, path: Path, position: int) -> bool:
        """Whether the byte at `address` is the one at `position` in the file `path`, unchanged."""
        return (
            not self.anonymous
            and self.path == path
            and self.start <= address < self.stop
            and address - self.start + self.offset == position
        )


def mappings_of(files: Iterable[Path]) -> list[Mapping]:
    """Private mappings of `files` in this process; none where the system does not tell."""
    by_identity: dict[tuple[int, int], Path] = {}
    for path in files:
        status = path.stat()
        by_identity[status.st_dev, status.st_ino] = path
    text = _smaps()
    if text is None:
        return []
    found: list[Mapping] = []
    head: re.Match[str] | None = None
    for line in text.splitlines():
        if match := _HEAD.match(line):
            head = match
        elif head is not None and line.startswith("Anonymous:"):
            major, minor = (int(part, 16) for part in head["device"].split(":"))
            file = by_identity.get((os.makedev(major, minor), int(head["inode"])))
            if file is not None and head["flags"].endswith("p"):
                start, stop, offset = (int(head[name], 16) for name in ("start", "stop", "offset"))
                found.append(Mapping(start, stop, offset, file, int(line.split()[1]) * 1024))
            head = None
    return found


def mappings_are_told() -> bool:
    """Whether this system says what is mapped."""
    return _smaps() is not None


def _smaps() -> str | None:
    try:
        return Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def let_go(files: Iterable[Path]) -> None:
    """Drop the pages of `files` from this process and from the page cache; they come back if used.

    Pages that somebody has written to are left alone: they would lose what was written.
    """
    files = list(files)
    for mapping in mappings_of(files):
        for start, stop in _clean_ranges(mapping):
            # By ctypes: these are mappings of others.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED
            )
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _clean_ranges(mapping: Mapping) -> Iterator[tuple[int, int]]:
    """Addresses of pages that are the file's: all of them, none where that cannot be known."""
    if not mapping.anonymous:
        yield mapping.start, mapping.stop
        return
    page = mmap.PAGESIZE
    entries = array("Q")
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:  # noqa: PTH123 - no path
            file.seek(mapping.start // page * entries.itemsize)
            entries.frombytes(file.read((mapping.stop - mapping.start) // page * entries.itemsize))
    except (OSError, ValueError):
        return
    numbers = itertools.groupby(range(len(entries)), lambda i: bool(entries[i] & _OF_A_FILE))
    for clean, run in numbers:
        if clean:
            pages = list(run)
            yield mapping.start + pages[0] * page, mapping.start + (pages[-1] + 1) * page
