"""Child processes under a kernel memory limit, to prove that pipeload keeps its own.

Works with both versions of Linux memory cgroups, and needs root. Where a group
cannot be made, tests skip with the reason; PIPELOAD_REQUIRE_CGROUP=1 makes
that a failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
        return (self.path / "memory.max").exists()

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        """Start a process inside the group; `options` are those of `subprocess.Popen`."""
        joined = ["/bin/sh", "-c", JOIN, "sh", str(self.path), *map(str, command)]
        return subprocess.Popen(joined, text=True, **options)

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

    def pids(self) -> list[int]:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def _number(self, file: str) -> int:
        return int((self.path / file).read_text())

    def _keyed(self, file: str, key: str) -> int:
        lines = (line.split() for line in (self.path / file).read_text().splitlines())
        return next(int(value) for name, value in lines if name == key)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new memory cgroup with a limit, removed afterwards with all that runs in it."""
    try:
        path = _make_group()
        try:
            _set_limit(path, limit_bytes)
        except OSError:
            path.rmdir()
            raise
    except OSError as error:
        skip_or_fail(f"no memory cgroup can be made here: {error}")
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
        yield from (p for p in (MOUNT / "memory" / own["memory"], MOUNT / "memory") if p.is_dir())
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


def drop_caches(*files: Path) -> None:
    """Forget cached file pages: those of `files` and folders of files, or of everything.

    Dropping everything needs root, and slows down whatever else runs here. The
    pages that another group has read are charged to that group: without this, a
    limit would prove nothing.
    """
    if files:
        for file in files:
            for each in (p for p in file.rglob("*") if p.is_file()) if file.is_dir() else [file]:
                _drop_one(each)
        return
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        skip_or_fail(f"cannot drop the page cache: {error}")


def _drop_one(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # dirty pages would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def peak_rss_bytes() -> int:
    """The most memory that this very process ever had resident (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no line VmHWM")


def skip_or_fail(reason: str) -> NoReturn:
    # Imported here: children import this file for peak_rss_bytes, and are measured.
    import pytest

    if os.environ.get("PIPELOAD_REQUIRE_CGROUP") == "1":
        pytest.fail(f"{reason} (PIPELOAD_REQUIRE_CGROUP=1)")
    pytest.skip(reason)
