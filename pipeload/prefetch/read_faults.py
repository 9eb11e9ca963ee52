"""What is said of a block that could not be read, and of a dispatcher that has ended."""

from __future__ import annotations

from pipeload.errors import PipeloadError, ReadError, UnsupportedOperationError


def name_fault(error: BaseException) -> UnsupportedOperationError:
    """Why no block will be read any more."""
    # A new one in any case: its frames would hold the dispatcher.
    if isinstance(error, PipeloadError):
        return UnsupportedOperationError(str(error))
    return UnsupportedOperationError(
        f"the thread that dispatches reads has ended: {type(error).__name__}: {error}. Load the "
        "model again."
    )


def name_block(error: BaseException, block: str) -> BaseException:
    """The error of a unit's load, with the unit's name in it."""
    if isinstance(error, PipeloadError):
        return type(error)(f"block {block!r}: {error}") if type(error) is ReadError else error
    return ReadError(
        f"block {block!r}: its weights could not be made: {type(error).__name__}: {error}. "
        "Download the checkpoint again, or load it without pipeload."
    )
