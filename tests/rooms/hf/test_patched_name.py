"""A name that means something else for a while."""

from __future__ import annotations

from pipeload.hf.patched_name import Patch

NAME = "name"


class Owner:
    def name(self) -> str:
        return "own"


def other(_self: object) -> str:
    return "other"


def test_the_last_one_takes_it_off() -> None:
    """However many need it at once."""
    patch = Patch(Owner, "name", other)
    own = Owner.name
    with patch:
        with patch:
            assert Owner().name() == "other"
        assert Owner().name() == "other"
    assert Owner.name is own
    assert patch.original is own


def test_what_others_put_there_since_stays() -> None:
    """Ours is not put above it, nor theirs taken off."""
    patch, own = Patch(Owner, "name", other), Owner.name
    try:
        with patch:
            setattr(Owner, NAME, lambda _self: "theirs")
        assert Owner().name() == "theirs"
        with patch:  # and is what ours may call from now on
            assert patch.original(Owner()) == "theirs"
        assert Owner().name() == "theirs"
    finally:
        setattr(Owner, NAME, own)
