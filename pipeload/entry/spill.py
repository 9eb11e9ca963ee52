"""Weights that are in no checkpoint, written to a file so that they can be streamed from there."""

from __future__ import annotations

import logging
import os
import shutil
import weakref
from typing import TYPE_CHECKING

import torch

from pipeload._sizes import format_size
from pipeload.checkpoint.headers import read_header
from pipeload.checkpoint.writer import Tensor, is_odd, make_header
from pipeload.errors import OptionError
from pipeload.system.mounts import network_mount
from pipeload.system.owned_files import WHOLE, delete_abandoned, make_owned
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

    from pipeload.checkpoint.headers import TensorEntry

_log = logging.getLogger("pipeload")
_CHUNK_BYTES = 16 << 20


class Spill:
    """A safetensors file of our own. It goes with `remove`, or with whoever holds this.

    [Note: what is left of a killed process] Once the file is open its name can go (`hide`): the
    system then keeps the file as long as somebody has it open, and no longer, whatever ends the
    process. Before that, and where `hide` is not possible, a process that is killed leaves the file
    behind, and the next spill into the same folder deletes it.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write `tensors` under a temporary name, then give the file its own, in one step.

        Readable by its owner alone. Nothing is left behind when this raises.

        Raises:
            OptionError: the folder is not there, cannot be written to, or is full.
        """
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        delete_abandoned(folder)
        try:
            _check_room(folder, nbytes)
            descriptor, part = make_owned(folder)
            lock = None if os.name == "nt" else os.dup(descriptor)  # open, so not to be renamed
            owner = os.getpid()
            self._remove = weakref.finalize(self, _give_up, part, lock, owner)
            with os.fdopen(descriptor, "wb") as file:
                _write(file, tensors)
            self.path = part.with_suffix(WHOLE)
            os.replace(part, self.path)  # noqa: PTH105 - atomic, and says so
        except OSError as error:
            self._discard()
            raise OptionError(
                f"spill_dir={str(folder)!r} cannot take {format_size(nbytes)} of weights: {error}. "
                "Name a folder that can be written to, with that much room."
            ) from error
        except BaseException:
            self._discard()
            raise
        self._remove.detach()
        self._remove = weakref.finalize(self, _give_up, self.path, lock, owner)
        self.entries: Mapping[str, TensorEntry] = read_header(self.path)

    def hide(self) -> None:
        """Take the name away from the file, which everybody who reads it has open by now.

        Where it could not be opened again without one, or may be lost, it stays until `remove`.
        """
        # By os.path: a magic link is no path.
        if os.path.exists("/proc/self/fd") and network_mount(self.path) is None:  # noqa: PTH110
            self._remove()

    def remove(self) -> None:
        """Take the file away. Who has it open or mapped goes on reading it. May be called again.

        Windows keeps a file that somebody has open; a line in the log then says that it is left.
        """
        self._remove()

    def _discard(self) -> None:
        finalizer = getattr(self, "_remove", None)
        if finalizer is not None:
            finalizer()


def _check_room(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OptionError(
            f"spill_dir={str(folder)!r} has {format_size(free)} free, and the weights that are not "
            f"in the checkpoint take {format_size(nbytes)}. Name another folder."
        )


def _give_up(path: Path, lock: int | None, owner: int) -> None:
    if lock is not None:
        os.close(lock)
    if os.getpid() != owner:  # a fork ends: the file is still its parent's
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot remove %s (%s): delete it when the model has gone", path, error)


def _write(file: BinaryIO, tensors: Mapping[str, torch.Tensor]) -> None:
    made = [
        Tensor(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), _nbytes(tensor))
        for name, tensor in tensors.items()
    ]
    made.sort(key=lambda tensor: (is_odd(tensor.nbytes), tensor.name))
    file.write(make_header(made))
    for name, *_ in made:
        flat = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        for first in range(0, flat.numel(), _CHUNK_BYTES):
            file.write(flat[first : first + _CHUNK_BYTES].numpy().data)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
