"""What this process holds, and what it may hold. All figures in bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path

import psutil

# glibc keeps freed blocks below this for later. Left at its dynamic default it grows to 32 MB, and
# a prompt's freed activations stay in the process; above 256 KB they go back at once. (With 1 MB,
# small models' activations and caches leave holes in the heap: up to 50 MB more at the same pass.)
_MMAP_THRESHOLD_BYTES = 1 << 18
_M_MMAP_THRESHOLD = -3
_UNLIMITED = 1 << 60
# oneDNN compiles a kernel for each new shape of a half-precision product (0.6 MB on AVX2), and it
# and torch keep 1024 of them each: prompts of many lengths would take 600 MB. A decoding step uses
# about six; with 32 kept, 18 MB are the most.
_KERNELS_KEPT = "32"
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def rss_bytes() -> int:
    """Resident memory now: anonymous, file-backed and shared pages."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - the hot path: 2 us against 10
            return int(file.read().split()[1]) * _page_size()
    except OSError:
        return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most resident memory the process ever had."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    info = psutil.Process().memory_info()
    return int(getattr(info, "peak_wset", info.rss))


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups, None without one."""
    limits = [_read_int(path) for path in _cgroup_files()]
    found = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    return min(found, default=None)


def auto_limit_bytes() -> int:
    """What the process may use: the least of control group, available and physical memory.

    A tenth of it, at least 256 MB, stays free for everything else on the machine.
    """
    memory = psutil.virtual_memory()
    choices = [int(memory.total), int(memory.available) + rss_bytes()]
    if (group := cgroup_limit_bytes()) is not None:
        choices.append(group)
    least = min(choices)
    return least - max(least // 10, min(256_000_000, least // 4))


def free_page_cache_bytes() -> int:
    """How much of a file the system could keep in its page cache beside this process."""
    available = int(psutil.virtual_memory().available)
    if (group := cgroup_limit_bytes()) is not None:
        # Pages read by a group are charged to it: the cache must fit under its limit as well.
        available = min(available, group - rss_bytes())
    return max(0, available)


def return_freed_memory() -> None:
    """Have freed blocks of 256 KB and more go back to the system at once (glibc only)."""
    if not sys.platform.startswith("linux"):
        return
    # another C library: it has no such threshold
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def keep_few_kernels() -> None:
    """Have torch keep few of the kernels it compiles, unless the environment says how many.

    Both caches read their limit at the first product; a process that has computed in half precision
    before keeps its larger ones.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS_KEPT)


@lru_cache(maxsize=1)
def _page_size() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # not there, or "max"


def _cgroup_files() -> list[Path]:
    """The limit files of this process's groups and their parents (version 1 and 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files: list[Path] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = Path("/sys/fs/cgroup"), "memory.max"
        elif "memory" in controllers.split(","):
            root, name = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
        else:
            continue
        folder = root / group.lstrip("/")
        # In a container the path is the host's, and the group is mounted at the root.
        files += [
            parent / name for parent in (folder, *folder.parents) if parent.is_relative_to(root)
        ]
    return files
