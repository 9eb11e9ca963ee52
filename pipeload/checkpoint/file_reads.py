"""The files of a checkpoint, read a piece at a time. Blocking reads only; no policy."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from typing import TYPE_CHECKING

from pipeload.checkpoint.hung_reads import DEFAULT_SECONDS, Stalls
from pipeload.checkpoint.open_file import OpenFile, open_file
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.errors import CheckpointChangedError, ReadError
from pipeload.system.mounts import warn_of_network

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# What a process of torch has open beside a checkpoint, and half of that again.
_OTHER_FILES = 64


class FileSet:
    """The shards of a checkpoint, open until `close` or until nobody can read them any more.

    A shard that is replaced by rename is still read through its descriptor; one that is changed in
    place is noticed by `check_unchanged`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        io_mode: str,
        read_timeout: float | None = DEFAULT_SECONDS,
        stamps: Mapping[Path, tuple[int, int]] | None = None,
    ) -> None:
        """Open every file.

        Args:
            files: paths.
            io_mode: "direct", "buffered" or "uncached".
            read_timeout: seconds after which a read is taken to hang; None: never.
            stamps: size and time of change (ns) that a file had when its header was read.

        Raises:
            ReadError: a file cannot be opened, or refuses the mode.
            CheckpointChangedError: a file is not the one any more whose header was read.
        """
        self.io_mode = io_mode
        self.stalls = Stalls(read_timeout)
        self._remote = warn_of_network(files)
        self._forget = _forget if io_mode == "uncached" else None
        self._files: dict[Path, OpenFile] = {}
        self._closer = weakref.finalize(self, _close_all, self._files)
        self._closer.atexit = (
            False  # readers may still run then, and the system closes files anyway
        )
        try:
            for path in files:
                self._files[path] = open_file(path, direct=io_mode == "direct")
        except OSError as error:
            self.close()
            if error.errno == errno.EMFILE:
                raise ReadError(
                    f"cannot open all {len(files)} files of the checkpoint at once: "
                    f"{error.strerror}. Raise the limit on open files, in the shell by "
                    f"`ulimit -n {len(files) + _OTHER_FILES}`."
                ) from error
            raise ReadError(
                f"cannot open checkpoint file {str(path)!r} for {io_mode} reads: {error}. Check "
                "that it is there and may be read."
            ) from error
        for path, stamp in (stamps or {}).items():
            if (self._files[path].nbytes, self._files[path].modified_ns) != stamp:
                self.close()
                raise CheckpointChangedError(
                    f"checkpoint file {str(path)!r} was replaced or changed while the model was "
                    "being loaded. Load the model again."
                )

    @property
    def paths(self) -> list[Path]:
        """The files that are open."""
        return list(self._files)

    def read_pages(self, path: Path, first: int, stop: int, into: memoryview) -> int:
        """Fill `into` with the bytes `first` to `stop` of a file; both lie on page borders.

        The last page of a file may be cut short by its end. Returns the bytes read.

        Raises:
            ReadError: the disk failed, or the file ends before its size when it was opened.
        """
        file = self._files[path]
        wanted = min(stop, file.nbytes) - first
        got = 0
        while got < wanted:
            try:
                with self.stalls.reading(path, first + got):
                    count = file.read(into[got : stop - first], first + got)
            except OSError as error:
                raise ReadError(
                    f"reading {str(path)!r} at byte {first + got} failed: {error}. Check the disk, "
                    "then do the same again."
                ) from error
            if count == 0:
                raise ReadError(
                    f"{str(path)!r} ended at byte {first + got}, {wanted - got} bytes early: it "
                    "was cut short after it was opened. Restore the file, then begin again."
                )
            got += count
        if self._forget is not None:
            self._forget(file.descriptor, first, stop - first)
        return wanted

    def check_unchanged(self) -> None:
        """Compare every open file with what it was when opened.

        Raises:
            CheckpointChangedError: one has another size or modification time.
            ReadError: they are on a network mount, and it does not answer.
        """
        if self._remote:
            run_jobs([lambda _scratch: self._check_unchanged()], [None], self.stalls)
        else:
            self._check_unchanged()

    def _check_unchanged(self) -> int:
        for path, file in self._files.items():
            with self.stalls.reading(path, 0):
                status = os.fstat(file.descriptor)
            if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.modified_ns):
                raise CheckpointChangedError(
                    f"checkpoint file {str(path)!r} was changed in place while the model was "
                    f"using it ({file.nbytes} bytes when opened, {status.st_size} now). Load the "
                    "model again."
                )
        return 0

    def reopen_name(self, path: Path) -> str:
        """A name that opens the very file that was opened, even if another took its place since.

        Raises:
            CheckpointChangedError: another did, and this system has no name for the one before.
        """
        if path not in self._files:
            return str(path)  # closed
        descriptor = self._files[path].descriptor
        link = f"/proc/self/fd/{descriptor}"
        if os.path.exists(link):  # noqa: PTH110 - a magic link, not a path
            return link
        # Windows lets nobody take an open file's place.
        if sys.platform != "win32" and not _is_open_as(path, descriptor):
            raise CheckpointChangedError(
                f"checkpoint file {str(path)!r} was replaced or removed while the model was using "
                "it, and this system (no /proc) cannot open it again. The model still streams; put "
                "the file back, or load the model again."
            )
        return str(path)

    def close(self) -> None:
        """Close all descriptors. May be called again."""
        self._closer()


def _close_all(files: dict[Path, OpenFile]) -> None:
    while files:
        _, file = files.popitem()
        file.close()


def _forget(descriptor: int, first: int, nbytes: int) -> None:
    os.posix_fadvise(descriptor, first, nbytes, os.POSIX_FADV_DONTNEED)


def _is_open_as(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False
