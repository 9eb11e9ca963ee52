"""What this process holds, and what it may hold. All figures in bytes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from pipeload._sizes import parse_share, parse_size
from pipeload.errors import UnsupportedOperationError

# glibc keeps freed blocks below this for later. Left at its dynamic default it grows to 32 MB, and
# a prompt's freed activations stay in the process; above 256 KB they go back at once. (With 1 MB,
# small models' activations and caches leave holes in the heap: up to 50 MB more at the same pass.)
_MMAP_THRESHOLD_BYTES = 1 << 18
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
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
        return int(_memory_info().rss)


def peak_rss_bytes() -> int:
    """The most resident memory the process ever had."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    info = _memory_info()
    return int(getattr(info, "peak_wset", 0)) or max(int(info.rss), _peak_of_usage())


class PeakSince:
    """The most resident memory of the process since this was made.

    The kernel keeps one peak for the whole process, which may be one of before. Resetting it would
    take it from everybody else, so where it has not risen since, the most that was seen counts.
    """

    def __init__(self) -> None:
        self._before = peak_rss_bytes()
        self._seen = 0

    def look(self, rss: int) -> None:
        """Take in that the process holds `rss` bytes now."""
        self._seen = max(self._seen, rss)

    @property
    def nbytes(self) -> int:
        """The most that the process has held since this was made, in bytes."""
        self.look(rss_bytes())
        peak = peak_rss_bytes()
        return peak if peak > self._before else self._seen


def cgroup_limit_bytes() -> int | None:
    """The tightest memory limit of this process's control groups, None without one."""
    return min(filter(None, map(_limit_of, _cgroups())), default=None)


def room_bytes() -> int:
    """What this process may still take before the machine or one of its control groups is full.

    Usage of everybody in a group counts, but not page cache that nobody has mapped: it is dropped
    before anybody has to go.
    """
    rooms = [int(psutil.virtual_memory().available)]
    for group in _cgroups():
        limit, usage = _limit_of(group), _read_int(group.folder / group.usage)
        if limit is not None and usage is not None:
            rooms.append(limit - usage + _idle_cache_bytes(group))
    return min(rooms)


def memory_stall() -> float:
    """The share of the last ten seconds in which somebody waited for memory (Linux PSI).

    Of this process's own group where the kernel tells. Of the whole machine only without a limit
    on the group: others that thrash within limits of theirs say nothing about this one's. 0.0 if
    unknown.
    """
    paths = [group.folder / "memory.pressure" for group in _cgroups()[:1]]
    if cgroup_limit_bytes() is None:
        paths.append(Path("/proc/pressure/memory"))
    shares = (_stalled_share(path) for path in paths)
    return next((share for share in shares if share is not None), 0.0)


def auto_limit_bytes(there: int | None = None) -> int:
    """What may be used of so many bytes: a tenth less; of `allowed_bytes` if None.

    At least 256 MB stay free for everything else on the machine.
    """
    least = allowed_bytes() if there is None else there
    return least - max(least // 10, min(256_000_000, least // 4))


def allowed_bytes() -> int:
    """The least of control group, available and physical memory, what is held included."""
    memory = psutil.virtual_memory()
    choices = [int(memory.total), int(memory.available) + rss_bytes()]
    if (group := cgroup_limit_bytes()) is not None:
        choices.append(group)
    return min(choices)


def physical_bytes() -> int:
    """All memory of the machine."""
    return int(psutil.virtual_memory().total)


def parse_limit(memory_limit: int | str, there: int | None = None) -> int:
    """A limit in bytes: a size, "auto", or a share such as "50%" of what "auto" starts from.

    That is `there`, in bytes, or what this process is allowed if None.

    Raises:
        OptionError: it is none of these.
    """
    if memory_limit == "auto":
        return auto_limit_bytes(there)
    if isinstance(memory_limit, str) and memory_limit.strip().endswith("%"):
        least = allowed_bytes() if there is None else there
        return int(least * parse_share(memory_limit))
    return parse_size(memory_limit)


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


def share_one_heap() -> None:
    """Have threads that start from now on allocate from the heap of all (glibc only).

    Each would keep some megabytes of freed blocks in one of its own. For threads that take turns,
    which never wait for each other there.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):  # as above
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Give the system back what the heap has free, between what is in use as well (glibc only).

    Caches that grew side by side leave such holes, and nobody else fills them: some tens of
    megabytes after each dozen of requests, with a small model. Takes milliseconds.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError, OSError):  # as above
            ctypes.CDLL(None).malloc_trim(0)


def keep_few_kernels() -> None:
    """Have torch keep few of the kernels it compiles, unless the environment says how many.

    Both caches read their limit at the first product; a process that has computed in half precision
    before keeps its larger ones.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, _KERNELS_KEPT)


def _memory_info() -> Any:
    try:
        return psutil.Process().memory_info()
    except (psutil.Error, OSError) as error:
        raise UnsupportedOperationError(
            f"this process's memory cannot be measured ({error!r}), so no limit can be held. Make "
            "/proc readable."
        ) from error


def _peak_of_usage() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@lru_cache(maxsize=1)
def _page_size() -> int:
    return os.sysconf("SC_PAGE_SIZE")


def _stalled_share(path: Path) -> float | None:
    try:
        first = path.read_text(encoding="ascii").split("\n", 1)[0]
        return float(first.split("avg10=")[1].split()[0]) / 100
    except (OSError, IndexError, ValueError):
        return None


class _Group(NamedTuple):
    """A memory control group, and what its files are called."""

    folder: Path
    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, str, str]
    """Active and inactive pages of files, and those of both that are mapped."""


def _limit_of(group: _Group) -> int | None:
    found = (_read_int(group.folder / name) for name in group.limits)
    return min((n for n in found if n is not None and n < _UNLIMITED), default=None)


def _idle_cache_bytes(group: _Group) -> int:
    try:
        lines = (group.folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    figures = {name: int(value) for name, value in map(str.split, lines)}
    active, inactive, mapped = (figures.get(name, 0) for name in group.cache)
    return max(0, active + inactive - mapped)


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # not there, or "max"


def _cgroups() -> list[_Group]:
    """This process's groups and their parents (version 1 and 2), its own first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups: list[_Group] = []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            root = Path("/sys/fs/cgroup")
            # Above "high" the kernel slows a group down instead of ending it.
            limits: tuple[str, ...] = ("memory.max", "memory.high")
            usage, cache = "memory.current", ("active_file", "inactive_file", "file_mapped")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            limits = ("memory.limit_in_bytes",)
            usage = "memory.usage_in_bytes"
            cache = ("total_active_file", "total_inactive_file", "total_mapped_file")
        else:
            continue
        folder = root / name.lstrip("/")
        # In a container the path is the host's, and the group is mounted at the root.
        groups += [
            _Group(parent, limits, usage, cache)
            for parent in (folder, *folder.parents)
            if parent.is_relative_to(root)
        ]
    return groups
