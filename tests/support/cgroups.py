"""Child processes under a kernel memory limit, to prove that pipeload keeps its own.

Where a group cannot be made, tests skip with the reason; PIPELOAD_REQUIRE_CGROUP=1 makes
that a failure.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeload.system.memory_group import JOIN, MOUNT, MemoryCgroup, drop_cached, memory_group

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["JOIN", "MOUNT", "MemoryCgroup", "drop_caches", "memory_cgroup", "peak_rss_bytes"]


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """A new memory cgroup with a limit, removed afterwards with all that runs in it."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(memory_group(limit_bytes))
        except OSError as error:
            skip_or_fail(f"no memory cgroup can be made here: {error}")
        yield group


def drop_caches(*files: Path) -> None:
    """Forget cached file pages: those of `files` and folders of files, or of everything.

    Dropping everything needs root, and slows down whatever else runs here. The
    pages that another group has read are charged to that group: without this, a
    limit would prove nothing.
    """
    if files:
        drop_cached(*files)
        return
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        skip_or_fail(f"cannot drop the page cache: {error}")


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
