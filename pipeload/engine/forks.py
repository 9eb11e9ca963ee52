"""What a forked child does with the models that stream in its parent: it forgets them.

[Note: what a child has of them] Threads do not survive a fork, so such a model cannot be used in
the child, and counts no more there. Its memory is there still, and goes when the child loads a
model of its own: most children never do, and need not touch it. A model that was all there, without
threads, works in the child as well.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from pipeload.budget import shared_limit  # noqa: F401 - its lock is to be renewed first


class Streaming(Protocol):
    """A model that streams, as a fork sees it."""

    def forget(self) -> bool:
        """In the child: count it no more; whether it holds memory that can be given back."""

    def abandon(self) -> None:
        """In the child: give the memory of its weights back. It never runs again."""


_known: weakref.WeakSet[Streaming] = weakref.WeakSet()
_inherited: list[Streaming] = []
"""Held: the parent's threads, which are not there any more, hold the memory in any case."""


def know(model: Streaming) -> None:
    """Have children forget it, as long as it lives."""
    _known.add(model)


def give_back_inherited() -> None:
    """Make room for a model of this process's own. Does nothing but once after a fork."""
    while _inherited:
        _inherited.pop().abandon()


def _forget() -> None:
    models = list(_known)
    _known.clear()
    for model in models:
        if model.forget():
            _inherited.append(model)
        else:
            _known.add(model)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
