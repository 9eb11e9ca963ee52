"""What ranks tell each other of an error, and what is made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload import errors
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


def _is_of_request(text: str) -> bool:
    """Whether only one request has failed there, by the error's name: none of ours, or no room."""
    kind = getattr(errors, text.partition(":")[0].rstrip("."), None)
    return kind is None or issubclass(kind, MemoryError)


def failed_there(group: Group, rank: int, part: str, why: str) -> GroupError:
    """Another rank has computed nothing."""
    return GroupError(
        f"{group.name(rank)} failed in {part!r}: {why} Check that rank, then do the same again: "
        "the group goes on.",
        rank=rank,
        host=group.hosts[rank],
        of_request=_is_of_request(why),
    )


def could_not_begin(group: Group, rank: int, text: str) -> GroupError:
    """Another rank has not gone as far as to the first block."""
    return GroupError(
        f"{group.name(rank)} could not begin the pass: {text} Check that rank, then do the same "
        "again: the group goes on.",
        rank=rank,
        host=group.hosts[rank],
        of_request=_is_of_request(text),
    )


def ended_alone(group: Group, rank: int) -> GroupError:
    """Another rank has not got a request any more that this one has."""
    return GroupError(
        f"the request has ended on {group.name(rank)} alone. Check what is called there while it "
        "runs, as a streamer; the group goes on.",
        rank=rank,
        host=group.hosts[rank],
        of_request=True,
    )


def runs_others_at_once(group: Group, rank: int) -> GroupError:
    """Another rank has as many requests run as this one does not."""
    return GroupError(
        f"{group.name(rank)} has another number of requests run at once. Give the same at_once on "
        "all ranks.",
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
