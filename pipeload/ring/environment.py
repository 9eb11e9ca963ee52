"""What the environment says of a group of ranks, as torchrun sets it."""

from __future__ import annotations

import os
from typing import NamedTuple

from pipeload.errors import OptionError

PATIENCE_VARIABLE = "PIPELOAD_RANK_PATIENCE"
PATIENCE_SECONDS = 10.0


class Place(NamedTuple):
    """What the environment says of a group, as torchrun sets it."""

    rank: int
    size: int
    address: str
    port: int
    served: bool
    """Whether torchrun serves the store, and not rank 0."""


def place_here() -> Place | None:
    """This process's place in a group; None where the environment knows of none, or of no other.

    Raises:
        OptionError: a variable is missing, or means nothing.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    size = _number("WORLD_SIZE", 1)
    if size == 1:
        return None
    rank = _number("RANK", 0)
    if rank >= size:
        raise OptionError(
            f"RANK={rank} and WORLD_SIZE={size}: ranks count from 0. Set RANK to one below "
            "WORLD_SIZE, another one on each machine."
        )
    address = os.environ.get("MASTER_ADDR", "")
    if not address:
        raise OptionError(
            f"WORLD_SIZE={size} without MASTER_ADDR. Set it to the address of rank 0's machine, "
            "the same everywhere."
        )
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    return Place(rank, size, address, _number("MASTER_PORT", 1), served)


def _number(variable: str, least: int) -> int:
    text = os.environ.get(variable, "")
    if not text.isascii() or not text.isdecimal() or int(text) < least:
        raise OptionError(
            f"the environment variable {variable} is {text!r}. Set it to a whole number from "
            f"{least} on; torchrun sets it by itself."
        )
    return int(text)


def patience_here() -> float:
    """Seconds of silence after which a rank is taken to be lost.

    Raises:
        OptionError: the environment variable means nothing.
    """
    text = os.environ.get(PATIENCE_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else PATIENCE_SECONDS
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise OptionError(
            f"the environment variable {PATIENCE_VARIABLE} is {text!r}. Set it to seconds, from 1 "
            "on, or leave it out."
        )
    return seconds
