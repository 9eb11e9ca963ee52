"""What is said of a block that cannot be read, and of a dispatcher that has ended."""

from __future__ import annotations

from pipeload.errors import (
    PipeloadError,
    ReadError,
    UnsupportedModelError,
    UnsupportedOperationError,
)


def name_fault(error: BaseException) -> UnsupportedOperationError:
    """Why no block will be read any more."""
    # A new one in any case: its frames would hold the dispatcher.
    if isinstance(error, PipeloadError):
        return UnsupportedOperationError(str(error))
    return UnsupportedOperationError(
        f"the thread that dispatches reads has ended: {type(error).__name__}: {error}. Load the "
        "model again."
    )


def no_buffer(block: str, holders: int) -> UnsupportedModelError:
    """The error for a block that runs inside others, which hold all the buffers."""
    return UnsupportedModelError(
        f"block {block!r} runs inside {holders} other streamed blocks, which hold every buffer. "
        "Raise memory_limit until the model fits, or load it without pipeload."
    )


def name_block(error: BaseException, block: str) -> BaseException:
    """The error of a unit's load, with the unit's name in it."""
    if isinstance(error, PipeloadError):
        return type(error)(f"block {block!r}: {error}") if type(error) is ReadError else error
    return ReadError(
        f"block {block!r}: its weights could not be made: {type(error).__name__}: {error}. "
        "Download the checkpoint again, or load it without pipeload."
    )
