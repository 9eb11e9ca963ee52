"""What ranks tell each other of an error, and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.errors import GroupError

if TYPE_CHECKING:
    from pipeload.ring.group import Group

_TEXT_CHARACTERS = 600
"""The most that is said of a failure."""


def told(error: BaseException | None) -> str:
    """An error in a line, for another rank."""
    text = "it raised nothing" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
    text = " ".join(text.split())[:_TEXT_CHARACTERS]
    return text if text.endswith(".") else f"{text}."


def failed_there(group: Group, rank: int, part: str, why: str) -> GroupError:
    """Another rank has computed nothing."""
    return GroupError(
        f"{group.name(rank)} failed in {part!r}: {why} Check that rank, then do the same again: "
        "the group goes on.",
        rank=rank,
        host=group.hosts[rank],
    )


def could_not_begin(group: Group, rank: int, text: str) -> GroupError:
    """Another rank has not gone as far as to the first block."""
    return GroupError(
        f"{group.name(rank)} could not begin the pass: {text} Check that rank, then do the same "
        "again: the group goes on.",
        rank=rank,
        host=group.hosts[rank],
    )


def does_something_else(group: Group, rank: int) -> GroupError:
    """Another rank does not ask what this one does."""
    return GroupError(
        f"{group.name(rank)} does something else than answer the same requests. Have all ranks "
        "run the same script, with the same requests in the same order.",
        rank=rank,
        host=group.hosts[rank],
    )
