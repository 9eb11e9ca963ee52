"""Every exception a user can meet.

PipeloadError
├── CheckpointError (also ValueError)          the files are not what they claim
│   └── CheckpointChangedError                 a file changed under the running model
├── ReadError (also OSError)                   the disk failed or a read came back short
├── GroupError (also ConnectionError)          a rank of several machines is lost, or another one
├── MemoryLimitError (also MemoryError)        the limit is too small; `smallest_limit` works;
│                                              of a pass, also a torch.OutOfMemoryError
├── OptionError (also ValueError)              an argument has no meaning here
├── UnsupportedModelError (also NotImplementedError)  this model cannot be streamed exactly
└── UnsupportedOperationError (also RuntimeError)  not possible while weights are on disk
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

__all__ = [
    "CheckpointChangedError",
    "CheckpointError",
    "GroupError",
    "MemoryLimitError",
    "OptionError",
    "PipeloadError",
    "ReadError",
    "UnsupportedModelError",
    "UnsupportedOperationError",
]


def escape(text: str) -> str:
    """`text` with everything that cannot be printed, but line ends, as Python writes it."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


class PipeloadError(Exception):
    """Root of every error that pipeload raises on purpose.

    Its text can be printed anywhere: what a checkpoint has put into a name, or into what another
    library says of it, neither moves a terminal's cursor nor turns the text around.
    """

    def __str__(self) -> str:
        return escape(super().__str__())


class CheckpointError(PipeloadError, ValueError):
    """A checkpoint file is missing, malformed, or of a kind that cannot be streamed."""


class CheckpointChangedError(CheckpointError):
    """A checkpoint file was changed in place after it was opened."""


class ReadError(PipeloadError, OSError):
    """The disk failed, or gave fewer bytes than the file's header promises."""


class GroupError(PipeloadError, ConnectionError):
    """A rank of a group of machines is lost, runs something else, or could not do its part."""

    def __init__(
        self, message: str, *, rank: int | None = None, host: str = "", of_request: bool = False
    ) -> None:
        super().__init__(message)
        self.rank = rank
        """Whose fault it is; None where nobody can tell."""
        self.host = host
        """The name of its machine, or what it was to be reached by."""
        self.of_request = of_request
        """Whether it is of one call or request alone: the next one may fare better."""

    def __reduce__(self) -> tuple[Any, ...]:
        known: dict[str, Any] = vars(self)
        return functools.partial(type(self), **known), self.args


class MemoryLimitError(PipeloadError, MemoryError):
    """The memory limit cannot hold what is needed."""

    def __init__(
        self, message: str, *, limit: int, smallest_limit: int, device: str | None = None
    ) -> None:
        super().__init__(message)
        self.limit = limit
        """The limit that was asked for, in bytes."""
        self.smallest_limit = smallest_limit
        """The smallest limit that works for the same hint, in bytes."""
        self.device = device
        """The device whose limit it is; None if it is the process's."""

    def __reduce__(self) -> tuple[Any, ...]:
        known: dict[str, Any] = vars(self)
        return functools.partial(type(self), **known), self.args


class OptionError(PipeloadError, ValueError):
    """An option has a value that means nothing, or contradicts another one."""


class UnsupportedModelError(PipeloadError, NotImplementedError):
    """The model does something that streaming cannot reproduce exactly.

    No TypeError: Python takes one from an operator for "try the other operand", and drops it.
    """


class UnsupportedOperationError(PipeloadError, RuntimeError):
    """The operation needs all weights at once, or would change them."""
