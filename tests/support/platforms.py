"""Makes this process look like another system to pipeload: names that are not there are taken away.

Imports neither torch nor pipeload, so that a child can do this before it imports pipeload. It must
have imported everything else by then: other libraries look at `sys.platform`, too.
"""

from __future__ import annotations

import builtins
import ctypes
import io
import mmap
import os
import sys
from errno import EACCES, EINVAL
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

MAC_PAGE = 16384
ARM_PAGE = 65536

_READS = ("preadv", "pread", "O_DIRECT", "posix_fadvise", "memfd_create", "makedev", "sysconf")


def take_away(patch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    for name in names:
        patch.delattr(module, name, raising=False)


def hide_proc(patch: pytest.MonkeyPatch) -> None:
    """Nothing in /proc can be opened or seen, but by psutil, which knows other systems itself."""
    for module in (builtins, io):
        patch.setattr(module, "open", _without_proc(module.open))
    patch.setattr(os.path, "exists", lambda path: _exists(path) and not _in_proc(path))


_exists = os.path.exists


def _in_proc(path: Any) -> bool:
    return str(path).startswith("/proc/")


def _without_proc(original: Callable[..., Any]) -> Callable[..., Any]:
    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if _in_proc(file) and not caller.startswith("psutil"):
            raise PermissionError(EACCES, os.strerror(EACCES), str(file))
        return original(file, *args, **kwargs)

    return opened


def big_pages(patch: pytest.MonkeyPatch, page: int) -> None:
    """The system's page is larger, and it judges addresses by that."""

    class Mmap(mmap.mmap):
        _of_file: bool

        def __new__(cls, fileno: int, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls, fileno, *args, **kwargs)
            made._of_file = fileno >= 0
            return made

        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            if length is None:  # all of it, which begins on such a page there
                return super().madvise(option)
            # A file's mapping cannot be written to, so that its address is not to be had simply.
            first = start if self._of_file else start + _address(self)
            if first % page:
                raise OSError(EINVAL, os.strerror(EINVAL))
            # As the kernel does: to the end of the last page.
            return super().madvise(option, start, min(-(-length // page) * page, len(self) - start))

    patch.setattr(mmap, "PAGESIZE", page)
    patch.setattr(mmap, "mmap", Mmap)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Windows:
    """What of Windows is called by ctypes; remembers which memory left the working set."""

    def __init__(self) -> None:
        self.unlocked: list[tuple[int, int]] = []
        self.kernel32 = SimpleNamespace(VirtualUnlock=self._unlock)

    def _unlock(self, address: ctypes.c_void_p, nbytes: ctypes.c_size_t) -> int:
        assert address.value is not None
        self.unlocked.append((address.value, nbytes.value))
        return 0  # it says that the pages were not locked


def become_mac(patch: pytest.MonkeyPatch) -> None:
    """An ARM Mac whose Python has no preadv."""
    patch.setattr(sys, "platform", "darwin")
    take_away(patch, os, "preadv", *(name for name in _READS if name != "pread"))
    take_away(patch, mmap, "MAP_NORESERVE", "MADV_HUGEPAGE", "MADV_NOHUGEPAGE")
    big_pages(patch, MAC_PAGE)
    hide_proc(patch)


def become_windows(patch: pytest.MonkeyPatch) -> Windows:
    """No way to read at a place, no flags of mappings, no advice on them."""
    windows = Windows()
    patch.setattr(sys, "platform", "win32")
    take_away(patch, os, *_READS, "O_CLOEXEC", "RTLD_LAZY", "RTLD_NOLOAD")
    # A flag that a POSIX system does not know, and that harms nothing there.
    patch.setattr(os, "O_BINARY", 0, raising=False)
    names = [name for name in dir(mmap) if name.startswith(("MAP_", "MADV_", "PROT_"))]
    take_away(patch, mmap, *names)
    patch.setattr(ctypes, "windll", windows, raising=False)
    hide_proc(patch)
    return windows


def become_arm_linux(patch: pytest.MonkeyPatch) -> None:
    """Pages of 64 kB."""
    big_pages(patch, ARM_PAGE)


SYSTEMS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "mac": become_mac,
    "windows": become_windows,
    "arm linux": become_arm_linux,
}
