"""What is said once of how a process was started, at the user's line that asked for a model."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

_FEW_CORES: Final = 4
_BETWEEN: Final = frozenset({"pipeload", "transformers", "peft", "contextlib"})
"""Packages through which a model is asked for."""
_advised = False


def advise_openmp() -> None:
    """Say once that OpenMP's busy waiting takes the cores that reading needs."""
    global _advised  # noqa: PLW0603 - said once in a process
    cores = os.cpu_count() or 1
    if (
        not _advised
        and cores <= _FEW_CORES
        and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    ):
        _advised = True
        warnings.warn(
            f"on {cores} cores, OMP_WAIT_POLICY=passive in the environment makes streaming "
            "several times faster: idle compute threads then leave the cores to the readers. "
            "Set it before Python starts.",
            stacklevel=_users_level(),
        )


def _users_level() -> int:
    """How far above whoever calls this the user's own code is."""
    level = 1
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - warnings can skip files from 3.12
    while frame is not None and _package(frame) in _BETWEEN:
        level, frame = level + 1, frame.f_back
    return level


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
