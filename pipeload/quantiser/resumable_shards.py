"""Writes a checkpoint shard by shard, so that a killed run goes on where it was.

Everything is made in a folder beside the wanted one, which gets its name in one step when all is
there. A shard is written under a temporary name and renamed when it is on the disk; one that has
its name is never written again. A small JSON file says what the shards belong to.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload._sizes import format_size
from pipeload.checkpoint.writer import is_odd, make_header
from pipeload.errors import OptionError, PipeloadError
from pipeload.system.folder_lock import LOCK, FolderLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from pipeload.checkpoint.writer import Tensor

MANIFEST = "pipeload-quantise.json"
SUMS_FILE = "pipeload-importance.bin"
"""What calibration has found so far; it goes with the manifest."""
PRODUCTS = "pipeload-products-"
"""What names of files with products of inputs begin with; they go, too."""
HIDDEN_FILE = "pipeload-hidden-states.bin"
"""What blocks were called with; it goes as soon as their gradients are known."""
BITS_FILE = "pipeload-bits.json"
"""Which form each Linear gets, where that was found by a text; it goes with the manifest."""
_SPARE_BYTES = 16 << 20  # for everything beside the shards


class Step(NamedTuple):
    """Tensors that are made together."""

    tensors: tuple[Tensor, ...]
    pieces: Callable[[], Iterator[memoryview]]
    """Their bytes, in order."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors)


def divide(steps: Sequence[Step], shard_bytes: int) -> list[list[Step]]:
    """Put steps in shards of at most `shard_bytes`, or of one step that is larger."""
    shards: list[list[Step]] = []
    room = 0
    for step in steps:
        if not shards or step.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(step)
        room -= step.nbytes
    return [sorted(shard, key=lambda step: is_odd(step.nbytes)) for shard in shards]


class Output:
    """The folder that is being made, by one process at a time. A context manager."""

    def __init__(self, target: Path, request: Mapping[str, Any]) -> None:
        """Begin, or go on with what the same request has left behind.

        Args:
            target: what the folder is to be called.
            request: what is asked for; JSON.

        Raises:
            OptionError: the target is there already, the folder cannot be made, or another process
                is at it.
        """
        if os.path.lexists(target):
            raise OptionError(f"{str(target)!r} is there already. Name another folder.")
        self.target = target
        self.folder = target.with_name(f".{target.name}.partial")
        with _writing(self.folder):
            if self._others() and _read(self.folder / MANIFEST) is None:
                raise OptionError(
                    f"{str(self.folder)!r}, where {target.name!r} is to be made, holds something "
                    "else. Move it away."
                )
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            _shut_others_out(self.folder)
            self._lock = self._take_lock()
        try:
            with _writing(self.folder):
                if _read(self.folder / MANIFEST) != request:
                    for path in self._others():
                        if path.name != MANIFEST:  # last: without it the folder is not ours
                            path.unlink()
                    self.write_text(MANIFEST, json.dumps(request, indent=1))
        except BaseException:
            self._lock.release(self.folder)
            raise

    def __enter__(self) -> Self:
        """The folder, which is locked since this was made."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the next one go on with it, or begin another."""
        if self.folder == self.target:
            products = sorted(self.folder.glob(f"{PRODUCTS}*"))
            left = (HIDDEN_FILE, BITS_FILE, SUMS_FILE, MANIFEST)
            for path in (*products, *(self.folder / name for name in left)):
                with contextlib.suppress(OSError):
                    path.unlink()
        self._lock.release(self.folder)

    def _others(self) -> list[Path]:
        """What is in the folder beside what a run begins with."""
        if not self.folder.exists():
            return []
        begun = {LOCK, f"{MANIFEST}.part"}
        return [path for path in self.folder.iterdir() if path.name not in begun]

    def _take_lock(self) -> FolderLock:
        try:
            return FolderLock(self.folder)
        except BlockingIOError as error:
            raise OptionError(
                f"another process is making {str(self.target)!r} right now. Wait until it has "
                "finished, or name another folder."
            ) from error

    def write_shards(
        self, shards: Sequence[Sequence[Step]], done: Callable[[int], None]
    ) -> Iterator[list[str]]:
        """Write those that are not there; yields the names of each one's tensors.

        Args:
            shards: as `divide` makes them; the same for the same request.
            done: called with the bytes that were written, or found to be there.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        paths = [self.folder / shard_name(i, len(shards)) for i in range(len(shards))]
        sizes = [len(_header(shard)) + sum(step.nbytes for step in shard) for shard in shards]
        there = [
            path.exists() and path.stat().st_size == n for path, n in zip(paths, sizes, strict=True)
        ]
        self.check_room(sum(n for n, found in zip(sizes, there, strict=True) if not found))
        for path, shard, found in zip(paths, shards, there, strict=True):
            if found:
                done(sum(step.nbytes for step in shard))
            else:
                self._write_shard(path, shard, done)
            yield [tensor.name for step in shard for tensor in step.tensors]

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, in one step.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        part = self.folder / f"{name}.part"
        with _writing(self.folder):
            part.write_text(text, encoding="utf-8")
            part.replace(self.folder / name)

    def write_bytes(self, name: str, content: Iterable[bytes | memoryview]) -> None:
        """Write a file that has to outlive a power cut, in one step.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        part = self.folder / f"{name}.part"
        with _writing(self.folder):
            with part.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.folder / name)

    def write_at(self, name: str, place: int, content: memoryview) -> None:
        """Write a part of a file, from that byte on; it may be lost until `sync`.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        with _writing(self.folder):
            path = self.folder / name
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(place)
                file.write(content)

    def read_json(self, name: str) -> Any:
        """What a small file says; None where there is none, or it says nothing."""
        return _read(self.folder / name)

    def delete(self, name: str) -> None:
        """See that there is no such file.

        Raises:
            OptionError: it cannot be deleted.
        """
        with _writing(self.folder):
            (self.folder / name).unlink(missing_ok=True)

    def sync(self, name: str) -> None:
        """Have a file outlive a power cut. Raises what `write_at` does."""
        with _writing(self.folder), (self.folder / name).open("r+b") as file:
            os.fsync(file.fileno())

    def save(self, save: Callable[[Path], object]) -> None:
        """Have something write its files into the folder.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        with _writing(self.folder):
            save(self.folder)

    def copy(self, file: Path) -> None:
        """Copy a file under its own name.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        with _writing(self.folder):
            shutil.copyfile(file, self.folder / file.name)

    def finish(self) -> None:
        """Give the folder its name.

        Raises:
            OptionError: it cannot have it.
        """
        with _writing(self.folder):
            if os.path.lexists(self.target):
                raise OptionError(
                    f"{str(self.target)!r} has appeared meanwhile. Move it away, then run the same "
                    "command again: nothing is computed twice."
                )
            for products in self.folder.glob(f"{PRODUCTS}*"):  # all shards are there
                products.unlink()
            _let_others_read(self.folder)
            # With its manifest, which goes at the end: a run that is killed here has lost nothing.
            self.folder.rename(self.target)
            self.folder = self.target

    def _write_shard(self, path: Path, shard: Sequence[Step], done: Callable[[int], None]) -> None:
        part = path.with_suffix(".part")
        with _writing(self.folder):
            try:
                with part.open("wb") as file:
                    file.write(_header(shard))
                    for piece in (piece for step in shard for piece in step.pieces()):
                        file.write(piece)
                        done(piece.nbytes)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
            part.replace(path)

    def check_room(self, nbytes: int) -> None:
        """See that so much can be written.

        Raises:
            OptionError: the disk has less free.
        """
        with _writing(self.folder):
            free = shutil.disk_usage(self.folder).free
        if nbytes and free < nbytes + _SPARE_BYTES:
            raise OptionError(
                f"{str(self.target.parent)!r} has {format_size(free)} free, and "
                f"{format_size(nbytes + _SPARE_BYTES)} are to be written. Make room, or name "
                "another disk."
            )


def shard_name(index: int, count: int) -> str:
    """The name that the library gives to a shard."""
    if count == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _shut_others_out(folder: Path) -> None:
    """Nobody else may change what is half made: a finished shard is not looked into again.

    Raises:
        OptionError: somebody else has made the folder.
    """
    try:
        folder.chmod(0o700)
    except PermissionError:  # some file systems know no rights at all
        if folder.stat().st_uid != os.geteuid():
            raise OptionError(f"{str(folder)!r} is another user's. Move it away.") from None


def _let_others_read(folder: Path) -> None:
    """The rights that a plain save gives, but never that of everybody to write."""
    probe = folder / ".rights"
    if probe.is_dir():
        probe.rmdir()  # of a run that was killed right here
    probe.mkdir()  # only making something tells what the process's mask is
    usual = stat.S_IMODE(probe.stat().st_mode)
    probe.rmdir()
    with contextlib.suppress(PermissionError):  # as above
        for path in folder.iterdir():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~stat.S_IWOTH)
        folder.chmod(usual & ~stat.S_IWOTH)


def _header(shard: Sequence[Step]) -> bytes:
    return make_header(tensor for step in shard for tensor in step.tensors)


def _read(path: Path) -> object:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one way what a disk refuses. Errors of pipeload's own pass: some are OSErrors too."""
    try:
        yield
    except PipeloadError:
        raise
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise OptionError(
                f"the disk is full: {str(folder.parent)!r} took no more ({error}). Make room and "
                "run the same command again: finished shards are kept. To give up, delete "
                f"{str(folder)!r}."
            ) from error
        raise OptionError(
            f"{str(folder)!r} cannot be written to: {error}. Name a folder that can be."
        ) from error
