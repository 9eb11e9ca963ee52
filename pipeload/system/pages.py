"""Pages: their size, and how those of our own go back to the system.

[Note: the page is the system's] Memory is taken and given back in the system's pages: 4 kB mostly,
16 kB on Macs with ARM, up to 64 kB on Linux with ARM. A smaller unit would give back bytes of a
neighbour, and would count less memory than a byte really takes.

[Note: three ways to give pages back] On Linux, madvise(MADV_DONTNEED) takes them at once. Other
POSIX systems treat that as a hint, so there fresh memory is mapped over the old, in one step. On
Windows the pages leave the working set, which is what is counted there; they keep their contents,
and nothing of pipeload looks at those any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

PAGE = max(4096, mmap.PAGESIZE)
"""Bytes: see [Note: the page is the system's]. Also what direct reads are multiples of."""
# Not in the mmap module before Python 3.13. The number holds for Linux on x86 and ARM.
MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_MAP_FIXED = 0x10  # on every system; not in Python's mmap module
_READ_WRITE = 0x3


def floor_page(value: int) -> int:
    """The page border at or below `value`."""
    return value - value % PAGE


def ceil_page(value: int) -> int:
    """The page border at or above `value`."""
    return value + -value % PAGE


def drops_at_once() -> bool:
    """Whether madvise gives pages back now, and shows what is mapped behind them."""
    return sys.platform.startswith("linux") and hasattr(mmap, "MADV_DONTNEED")


def give_back(memory: mmap.mmap, address: int, start: int, nbytes: int) -> None:
    """Give back `nbytes` at `start` in private anonymous memory whose first byte is at `address`.

    All on page borders. See [Note: three ways to give pages back].

    Raises:
        MemoryError: the system refuses.
    """
    if drops_at_once():
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)
    elif hasattr(mmap, "MAP_ANONYMOUS"):
        map_over(address + start, nbytes, None)
    elif (windows := getattr(ctypes, "windll", None)) is not None:
        # Of pages that are not locked it says so, and takes them out of the working set.
        windows.kernel32.VirtualUnlock(ctypes.c_void_p(address + start), ctypes.c_size_t(nbytes))


def map_over(address: int, nbytes: int, descriptor: int | None) -> None:
    """Put a private mapping in the place of what is mapped at `address`.

    Of the start of an open file, or of memory that reads as zeros if there is none.

    Raises:
        MemoryError: the system refuses.
    """
    system_mmap = ctypes.CDLL(None, use_errno=True).mmap
    system_mmap.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | MAP_NORESERVE
    mapped = system_mmap(
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(_READ_WRITE),
        ctypes.c_int(flags if descriptor is not None else flags | mmap.MAP_ANONYMOUS),
        ctypes.c_int(descriptor if descriptor is not None else -1),
        ctypes.c_long(0),
    )
    if mapped != address:
        reason = os.strerror(ctypes.get_errno())
        raise MemoryError(f"cannot map {nbytes} bytes of address space: {reason}")
