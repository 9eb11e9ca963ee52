"""The two figures of psutil that pipeload asks for, from /proc: for machines that lack it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace


class Error(Exception):
    """Never raised here."""


def virtual_memory() -> SimpleNamespace:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    figures = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return SimpleNamespace(total=figures["MemTotal"], available=figures["MemAvailable"])


class Process:
    def memory_info(self) -> SimpleNamespace:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return SimpleNamespace(rss=pages * os.sysconf("SC_PAGE_SIZE"))
