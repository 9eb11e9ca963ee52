"""How ranks find each other, and what they say where they do not."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from torch._C._distributed_c10d import HashStore

from pipeload.errors import GroupError
from pipeload.ring import meeting
from pipeload.ring.environment import Place
from pipeload.ring.heartbeat import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable

RANK_0 = Place(0, 2, "127.0.0.1", 29500, served=False)


def _wait_for(done: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_port_in_use() -> None:
    """It is said at once, and not after minutes of trying."""
    with contextlib.closing(socket.create_server(("0.0.0.0", 0))) as other:
        place = RANK_0._replace(port=other.getsockname()[1])
        with pytest.raises(GroupError, match=r"port \d+: another program does.*Set MASTER_PORT"):
            meeting.connect(place, time.monotonic() + 600, hosts=True)


def test_nobody_listens() -> None:
    """Rank 0 is not up, or elsewhere: it is said who was looked for, and where."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    place = RANK_0._replace(rank=1, port=port)
    with pytest.raises(GroupError, match=rf"rank 1 of 2 cannot reach rank 0 at 127.0.0.1:{port}"):
        meeting.connect(place, time.monotonic(), hosts=False)


def test_a_store_that_is_gone_while_they_meet() -> None:
    """Rank 0 has ended: the same is said."""

    class Gone:
        def add(self, _key: str, _count: int) -> int:
            return 1

        def set(self, _key: str, _value: str) -> None:
            raise RuntimeError("Connection reset by peer")

        def delete_key(self, _key: str) -> bool:
            return False

    store: Any = Gone()
    with pytest.raises(GroupError, match=r"cannot reach rank 0 at .*Connection reset by peer"):
        meeting.meet(store, RANK_0, time.monotonic() + 60)


def test_connections_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and names the variable that mostly helps; here the other one is not there."""
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 0.3)
    with pytest.raises(GroupError, match=r"has met the others.*Set GLOO_SOCKET_IFNAME to"):
        meeting.connect_all(HashStore(), RANK_0)


def test_a_rank_is_lost_while_connections_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks meanwhile says so at once: gloo would wait for a minute."""
    ended = threading.Event()
    monkeypatch.setattr(meeting, "_build", lambda *_: ended.wait(30))

    def look() -> None:
        raise GroupError("rank 1 is lost")

    with pytest.raises(GroupError, match="rank 1 is lost"):
        meeting.connect_all(HashStore(), RANK_0, None, look)
    ended.set()


def test_ctrl_c_while_connections_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard while gloo goes on waiting, which itself would not hear it."""
    monkeypatch.setattr(meeting, "CONNECT_SECONDS", 3.0)
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        meeting.connect_all(HashStore(), RANK_0)
    (waiting,) = (t for t in threading.enumerate() if t.name == "pipeload-connect")
    waiting.join()


def test_whoever_did_not_meet_the_others_has_not_come() -> None:
    """Else they would find it there the next time, and wait for its connections."""
    store: Any = HashStore()
    for _ in range(2):
        with pytest.raises(GroupError, match="has waited for rank 1 in vain"):
            meeting.meet(store, RANK_0, time.monotonic())
    assert not store.check(["pipeload/1of2/host/0"])
    assert int(store.get("pipeload/came/0")) == 0


def test_whoever_leaves_is_missed_by_the_next_transfer() -> None:
    """And not by the last one, which may still be on its way."""
    store: Any = HashStore()
    store.multi_set(["beat/0", "beat/1"], ["0 ", "0 "])
    mine, other = (Heartbeat(lambda: store, rank, 2, 60.0, hosts=False) for rank in (0, 1))
    try:
        mine.done, other.done = 6, 7
        other.stop()
        _wait_for(lambda: mine._words[1])
        assert mine.lost() is None
        mine.done = 7
        loss = mine.lost()
        assert loss is not None
        assert loss.rank == 1
        assert loss.why.startswith("has left")
    finally:
        mine.stop()
