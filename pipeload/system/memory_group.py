"""Kernel memory groups: processes that the kernel keeps within a limit, page cache included.

Works with both versions of Linux control groups, and needs root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOUNT = Path("/sys/fs/cgroup")

# A shell joins the group and becomes the command under the same process id. It
# takes the place of preexec_fn, which is unsafe in a process that has threads.
JOIN = 'echo $$ > "$1/cgroup.procs" || exit 97; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class MemoryCgroup:
    """A kernel memory cgroup, and what the kernel has counted in it."""

    path: Path
    limit_bytes: int

    @property
    def is_v2(self) -> bool:
        """Whether it is of the second version."""
        return (self.path / "memory.max").exists()

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        """Start a process inside the group; `options` are those of `subprocess.Popen`."""
        joined = ["/bin/sh", "-c", JOIN, "sh", str(self.path), *map(str, command)]
        return subprocess.Popen(joined, text=True, **options)  # noqa: S603 - who calls chose it

    def run(
        self, command: Sequence[str | Path], *, timeout: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a process inside the group to its end, with its output captured.

        A process that the kernel killed for memory has return code -9.
        """
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with self.popen(command, **(pipes | options)) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def fail_count(self) -> int:
        """How often the group ran into its limit, be it only to drop page cache."""
        if self.is_v2:
            return self._keyed("memory.events", "max")
        return self._number("memory.failcnt")

    def oom_kills(self) -> int:
        """How many processes the kernel killed because of the limit."""
        if self.is_v2:
            return self._keyed("memory.events", "oom_kill")
        return self._keyed("memory.oom_control", "oom_kill")

    def usage_bytes(self) -> int:
        """What is charged to the group now: memory, page cache, kernel memory."""
        return self._number("memory.current" if self.is_v2 else "memory.usage_in_bytes")

    def peak_bytes(self) -> int:
        """The most that was ever charged; clean page cache brings it to the limit."""
        return self._number("memory.peak" if self.is_v2 else "memory.max_usage_in_bytes")

    def set_limit(self, limit_bytes: int) -> None:
        """Give it another limit.

        Raises:
            OSError: what it holds is more, and cannot be given up.
        """
        _set_limit(self.path, limit_bytes)

    def pids(self) -> list[int]:
        """Of the processes in it."""
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def _number(self, file: str) -> int:
        return int((self.path / file).read_text())

    def _keyed(self, file: str, key: str) -> int:
        lines = (line.split() for line in (self.path / file).read_text().splitlines())
        return next(int(value) for name, value in lines if name == key)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new group with a limit, removed afterwards with all that runs in it.

    Raises:
        OSError: none can be made here.
    """
    path = _make_group()
    try:
        _set_limit(path, limit_bytes)
    except OSError:
        path.rmdir()
        raise
    group = MemoryCgroup(path, limit_bytes)
    try:
        yield group
    finally:
        _remove(group)


def _make_group() -> Path:
    """An empty child group below the group that this process is in."""
    name = f"pipeload-{os.getpid()}-{time.monotonic_ns()}"
    refusal: OSError | None = None
    for parent in _parents():
        try:
            (parent / name).mkdir()
        except OSError as error:  # noqa: PERF203 - two or three turns
            refusal = error
        else:
            return parent / name
    raise refusal or FileNotFoundError(f"{MOUNT} has no group that shares out memory")


def _parents() -> Iterator[Path]:
    """Groups that can have a child with a memory limit, the nearest first."""
    own = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path.lstrip("/")
    # Inside a container our own path may not be visible; then only the root is.
    if (MOUNT / "memory" / "memory.limit_in_bytes").exists():
        mine = next((own[name] for name in own if "memory" in name.split(",")), "")
        yield from (p for p in (MOUNT / "memory" / mine, MOUNT / "memory") if p.is_dir())
    elif (MOUNT / "cgroup.controllers").exists():
        nearest = MOUNT / own.get("", "")
        for group in (nearest, *nearest.parents):
            # A group that has processes cannot share memory out to children, but
            # one of those above it does so already.
            switch = group / "cgroup.subtree_control"
            if switch.exists() and "memory" in switch.read_text().split():
                yield group


def _set_limit(path: Path, limit_bytes: int) -> None:
    # Swap is kept out of it. In version 1 not by memory.memsw.limit_in_bytes: while
    # both limits are equal, neither fail count moves.
    if (path / "memory.max").exists():
        settings = {"memory.max": limit_bytes, "memory.swap.max": 0}
    else:
        settings = {"memory.limit_in_bytes": limit_bytes, "memory.swappiness": 0}
    for file, value in settings.items():
        if (path / file).exists():  # a kernel without swap lacks some
            (path / file).write_text(str(value))


def _remove(group: MemoryCgroup) -> None:
    deadline = time.monotonic() + 10
    while True:
        for pid in group.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            group.path.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # the kernel tells nobody when a killed process is gone
        else:
            return


def drop_cached(*places: Path) -> None:
    """Forget what the page cache has of these files and folders of files.

    Pages that one group has read are charged to it, and free for others: without this, a limit
    would prove nothing. Does nothing on systems that cannot.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for place in places:
        for file in place.rglob("*") if place.is_dir() else [place]:
            if not file.is_file():
                continue
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # dirty pages would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
