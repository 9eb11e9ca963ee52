"""Sends and receives what the parts of a model give.

[Note: one transfer a block] What a block gives has the same form in each pass, but for its sizes,
which follow those of its input. So it is described once for each size of input; from then on the
bytes alone are sent, and one more: whether they are that. Large ones (the logits of a prompt) come
behind that byte, from the memory they are in: a copy of them would be counted nowhere.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.ring.block_inputs import first_tensor
from pipeload.ring.trees import (
    TensorSize,
    as_bytes,
    of_bytes,
    put_together,
    read_bytes,
    sizes_in,
    write_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from pipeload.ring.lane import Lane
    from pipeload.weights.row_cuts import RowRange

_LARGE_BYTES = 1 << 20
_MOST_KNOWN = 16
"""Sizes of input for which the output of a part is remembered."""


class Part(NamedTuple):
    """A module that one rank computes: a block, or the head."""

    name: str
    owner: int
    layers: tuple[int, ...] = ()
    """The layers of a cache that it writes to."""


class RowsPart(NamedTuple):
    """A Linear of which each rank computes some rows: the head."""

    name: str
    ranges: tuple[RowRange, ...]
    """Of each rank."""


class Failure(NamedTuple):
    """What came in an output's place."""

    why: str


class _Sent(enum.IntEnum):
    """The byte behind what a block gave."""

    AS_KNOWN = 0
    DESCRIBED = 1
    """What came is void: its description follows, then what it describes."""
    FAILED = 2
    """What came is void: why follows."""


class _Known(NamedTuple):
    """How an output is put together, where that is known."""

    text: str = ""
    sizes: Sequence[TensorSize] = ()

    @property
    def large(self) -> bool:
        """Whether each of its tensors is sent by itself."""
        return sum(size.nbytes for size in self.sizes) > _LARGE_BYTES

    @property
    def room(self) -> torch.Tensor:
        """Memory for what comes first, and for the byte behind it."""
        nbytes = 0 if self.large else sum(size.nbytes for size in self.sizes)
        return torch.empty(nbytes + 1, dtype=torch.uint8)


_UNKNOWN = _Known()


class Outputs:
    """Sends and receives what the parts of one model give. It holds no module.

    Nothing is waited for that is sent: others may come for it only after they have sent what this
    rank needs next.
    """

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._known: dict[str, OrderedDict[Hashable, _Known]] = {}
        """By part and size of input; the same on all ranks, as all of them learn all of it."""

    def send(
        self, part: Part, given: Mapping[str, Any], text: str, tensors: Sequence[torch.Tensor]
    ) -> bool:
        """Give the others what an own part gave, taken apart; `given` is what it was called with.

        Large ones are sent from where they are: see `Lane.settle`. Returns whether these are.

        Raises:
            GroupError: a rank is lost.
        """
        doing = f"block {part.name!r} is sent"
        known = self._look_up(part, given)
        if text != known.text:
            self._say(known, _Sent.DESCRIBED, doing)
            self._send_text(text, doing)
            known = self._learn(part, given, text)
        if known.large:
            self._say(known, _Sent.AS_KNOWN, doing)
            for tensor in tensors:
                if tensor.numel():
                    self._lane.send(as_bytes(tensor), doing)
            return True
        room = known.room
        write_bytes(tensors, room)
        room[-1] = _Sent.AS_KNOWN
        self._lane.send(room, doing)
        return False

    def send_failure(self, part: Part, given: Mapping[str, Any], why: str) -> None:
        """Tell the others that an own part gave nothing.

        Raises:
            GroupError: a rank is lost.
        """
        doing = f"the failure of block {part.name!r} is told"
        self._say(self._look_up(part, given), _Sent.FAILED, doing)
        self._send_text(why, doing)

    def receive(self, part: Part, given: Mapping[str, Any]) -> Any:
        """What a part of another rank gave, or its `Failure`.

        Raises:
            GroupError: a rank is lost.
        """
        lane, doing = self._lane, f"block {part.name!r} of rank {part.owner} is waited for"
        known = self._look_up(part, given)
        room = known.room
        lane.broadcast(room, part.owner, doing)
        sent = _Sent(int(room[-1]))
        if sent is not _Sent.AS_KNOWN:
            text = self._receive_text(part, doing)
            if sent is _Sent.FAILED:
                return Failure(text)
            known = self._learn(part, given, text)
            room = known.room
            lane.broadcast(room, part.owner, doing)
        if not known.large:
            return put_together(known.text, given, read_bytes(known.sizes, room))
        found = []
        for size in known.sizes:
            room = torch.empty(size.nbytes, dtype=torch.uint8)
            if size.nbytes:
                lane.broadcast(room, part.owner, doing)
            found.append(of_bytes(size, room))
        return put_together(known.text, given, found)

    # -- what is known ---------------------------------------------------------------------------

    def _look_up(self, part: Part, given: Mapping[str, Any]) -> _Known:
        known = self._known.get(part.name)
        return _UNKNOWN if known is None else known.get(_key(given), _UNKNOWN)

    def _learn(self, part: Part, given: Mapping[str, Any], text: str) -> _Known:
        """Remember it, and forget what was learnt first: in the same order on all ranks."""
        known = self._known.setdefault(part.name, OrderedDict())
        known[_key(given)] = found = _Known(text, sizes_in(text))
        if len(known) > _MOST_KNOWN:
            known.popitem(last=False)
        return found

    # -- texts -----------------------------------------------------------------------------------

    def _say(self, known: _Known, what: _Sent, doing: str) -> None:
        room = known.room
        room.zero_()
        room[-1] = what
        self._lane.send(room, doing)

    def _send_text(self, text: str, doing: str) -> None:
        data = text.encode()
        self._lane.send(torch.tensor([len(data)]), doing)
        self._lane.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), doing)

    def _receive_text(self, part: Part, doing: str) -> str:
        size = torch.zeros(1, dtype=torch.int64)
        self._lane.broadcast(size, part.owner, doing)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._lane.broadcast(data, part.owner, doing)
        return data.numpy().tobytes().decode()


def _key(given: Mapping[str, Any]) -> Hashable:
    first = first_tensor(given)
    return None if first is None else (first.shape, first.dtype)
