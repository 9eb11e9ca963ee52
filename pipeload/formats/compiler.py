"""Compiles a C file of pipeload's own with the user's compiler, once for a process."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# Contracted to one operation, a product and a sum round otherwise than torch's two.
_OPTIONS = ("-O3", "-fPIC", "-fopenmp", "-ffp-contract=off")
_SECONDS = 60


def compiler() -> str | None:
    """The compiler that the user has; None without one."""
    return shutil.which(os.environ.get("CC") or "cc")


def compile_library(source: Path) -> ctypes.CDLL | None:
    """Make a library of one file; None without a compiler (`cc`, or $CC), or if that goes wrong.

    It takes half a second, in a folder that is gone when the library is loaded. Threads are torch's
    own. Whether the processor can run it, the file's `int supported(void)` has to tell.
    """
    command = compiler()
    if command is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="pipeload-") as folder:
            part, whole = Path(folder, "kernel.o"), Path(folder, "kernel.so")
            # In two steps: linked without OpenMP, it takes the one that torch has loaded.
            _run(command, *_OPTIONS, "-c", str(source), "-o", str(part))
            _run(command, "-shared", str(part), "-o", str(whole))
            library = ctypes.CDLL(str(whole))
        library.supported.argtypes, library.supported.restype = [], ctypes.c_int
        return library if library.supported() else None
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None


def _run(*command: str) -> None:
    subprocess.run(  # noqa: S603 - the compiler that the user has
        command, check=True, capture_output=True, timeout=_SECONDS
    )
