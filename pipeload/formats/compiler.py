"""Compiles a C file of pipeload's own with the user's compiler, and keeps the library.

[Note: kept libraries] To compile takes up to three seconds, so a library stays in the user's cache,
by a name that says all it was made of: the text, that of the headers beside it, the compiler, its
version and options, and what the processor can. It runs in this process, so one is taken only from
a folder that is this user's, and where nobody else but root can exchange anything on the way to it.
Where there is no such folder, each process compiles for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from pipeload.system.user_cache import user_cache

# Contracted to one operation, a product and a sum round otherwise than torch's two.
_OPTIONS = (
    *("-O3", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    # A compiler that collects its garbage sooner takes 119 MB beside this process, and not 166.
    *("--param", "ggc-min-expand=10", "--param", "ggc-min-heapsize=16384"),
)
_SECONDS = 60
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger("pipeload")
_failed: set[str] = set()
"""Compilers whose failure was told: what else they are given mostly fails for the same reason."""


def compiler() -> str | None:
    """The compiler that the user has; None without one."""
    return shutil.which(os.environ.get("CC") or "cc")


def compile_library(source: Path, *, without: str = "") -> ctypes.CDLL | None:
    """The library of one file; None without a compiler (`cc`, or $CC), or if that goes wrong.

    Why it went wrong is a warning, the first time for each compiler; `without` is an information:
    what is done then. Threads are torch's own. Whether the processor can run it, the file's
    `int supported(void)` has to tell.
    """
    library = _library_of(source)
    if library is None and without:
        _log.info("%s", without)
    return library


def _library_of(source: Path) -> ctypes.CDLL | None:
    command = compiler()
    if command is None:
        return None
    try:
        kept = _place(source, command)
        library = _load_kept(kept) or _compile(source, command, kept)
        library.supported.argtypes, library.supported.restype = [], ctypes.c_int
        return library if library.supported() else None
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        if command not in _failed:
            _failed.add(command)
            _log.warning(
                "the C compiler failed: %s. Models compute without it, more slowly; $CC names "
                "another compiler",
                _reason(error),
            )
        return None


def _reason(error: Exception) -> str:
    """The first line of what a compiler says that tells of an error."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines()]
    said = [line for line in lines if line]
    ended = f"{error.cmd[0]} ended with {error.returncode}"  # less than 0: the signal
    return next((line for line in said if "error" in line), said[0] if said else ended)


def _place(source: Path, command: str) -> Path | None:
    """Where the library of such a file is kept; None where nothing can be."""
    told = Path(command).stat()
    try:
        version = subprocess.run(  # noqa: S603 - the compiler that the user has
            (command, "--version"), check=True, capture_output=True, timeout=_SECONDS
        ).stdout
    except subprocess.SubprocessError:
        return None  # one that does not say which it is may still compile
    made_by = (*_OPTIONS, command, told.st_size, told.st_mtime_ns, version, _processor())
    digest = hashlib.sha256(repr(made_by).encode())
    for file in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(file.read_bytes())
    with contextlib.suppress(RuntimeError):
        name = f"{source.parent.name}-{source.stem}-{digest.hexdigest()[:32]}.so"
        return (user_cache() / "kernels").resolve() / name
    return None


def _processor() -> tuple[str, str]:
    """Which one it is: a compiler may be one that adds options for it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = (line for line in lines if line.startswith(("flags", "Features")))
        return platform.machine(), next(flags, "")
    return platform.machine(), ""


def _load_kept(kept: Path | None) -> ctypes.CDLL | None:
    """One that was made before, if nobody but this user can have made it."""
    with contextlib.suppress(OSError):
        if kept is None or not all(map(_is_safe, kept.parents)):
            return None
        if _is_ours(kept.parent) and _is_ours(kept):
            return ctypes.CDLL(str(kept))
    return None


def _is_ours(path: Path) -> bool:
    told, me = path.lstat(), getattr(os, "geteuid", None)  # Windows has no such owners
    return me is not None and told.st_uid == me() and not told.st_mode & _OTHERS


def _is_safe(folder: Path) -> bool:
    """Whether only this user and root can put something else in the place of what is in it."""
    told, me = folder.stat(), getattr(os, "geteuid", lambda: -1)()
    return told.st_uid in {0, me} and (
        not told.st_mode & _OTHERS or told.st_mode & stat.S_ISVTX > 0
    )


def _compile(source: Path, command: str, kept: Path | None) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory(prefix="pipeload-") as folder:
        part, whole = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        # In two steps: linked without OpenMP, it takes the one that torch has loaded.
        _run(command, *_OPTIONS, "-c", str(source), "-o", str(part))
        _run(command, "-shared", str(part), "-o", str(whole))
        library = ctypes.CDLL(str(whole))
        if kept is not None:
            with contextlib.suppress(OSError):  # a cache that cannot be written to is none
                _keep(whole, kept)
        return library


def _keep(library: Path, kept: Path) -> None:
    """Put a library where the next process finds it, in one step; older ones of its file go."""
    kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=kept.parent, prefix=f".{kept.stem}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(library.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        Path(part).replace(kept)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    stem, _, _ = kept.stem.rpartition("-")
    for other in kept.parent.glob(f"{stem}-*.so"):
        if other != kept:
            other.unlink()


def _run(*command: str) -> None:
    subprocess.run(  # noqa: S603 - the compiler that the user has
        command, check=True, capture_output=True, timeout=_SECONDS
    )
