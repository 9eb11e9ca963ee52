"""Reading at a place in a file, by each of the ways that a system may have."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeload.checkpoint import open_file as checkpoint_open_file
from pipeload.checkpoint.open_file import OpenFile, open_file
from tests.support.platforms import take_away

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS: dict[str, tuple[str, ...]] = {
    "preadv": (),
    "pread": ("preadv",),
    "handles": ("preadv", "pread"),
}
CONTENT = bytes(range(256)) * 500


@pytest.fixture(params=WAYS)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[OpenFile]:
    take_away(monkeypatch, os, *WAYS[request.param])
    monkeypatch.setattr(checkpoint_open_file, "_PREAD_BYTES", 4096)
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    before = open_descriptors()
    file = open_file(path, direct=False)
    yield file
    file.close()
    assert open_descriptors() == before


def open_descriptors() -> set[str]:
    return {path.name for path in Path("/dev/fd").iterdir()} if Path("/dev/fd").exists() else set()


def read_all(file: OpenFile, place: int, nbytes: int) -> bytes:
    """As far as the file goes."""
    data = bytearray(nbytes)
    got = 0
    while count := file.read(memoryview(data)[got:], place + got):
        got += count
    return bytes(data[:got])


@pytest.mark.parametrize(
    ("place", "nbytes"),
    [(0, 1), (4095, 2), (100, 20_000), (127_999, 50), (128_000, 9), (1 << 40, 1)],
)
def test_any_place(opened: OpenFile, place: int, nbytes: int) -> None:
    """The bytes of the file, and none behind its end."""
    assert opened.nbytes == len(CONTENT)
    assert read_all(opened, place, nbytes) == CONTENT[place : place + nbytes]


def test_threads_at_once(opened: OpenFile) -> None:
    """No read moves another one's place."""
    with ThreadPoolExecutor(8) as pool:
        places = [index * 7919 % len(CONTENT) for index in range(400)]
        for place, data in zip(
            places, pool.map(lambda p: read_all(opened, p, 300), places), strict=True
        ):
            assert data == CONTENT[place : place + 300]


def test_a_file_that_is_closed_during_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handle is closed when the read ends."""
    take_away(monkeypatch, os, "preadv", "pread")
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    handles = checkpoint_open_file._Handles(path)
    handles.read(memoryview(bytearray(1)), 0)
    handle = handles._free[0]
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        """A handle that is in the middle of a read."""

        closed = False

        def seek(self, place: int) -> None:
            entered.set()
            assert go_on.wait(30)
            handle.seek(place)

        def readinto(self, into: memoryview) -> int:
            return handle.readinto(into)

        def close(self) -> None:
            handle.close()

    handles._free[:] = [Slow()]  # type: ignore[list-item]
    data = bytearray(4)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(handles.read, memoryview(data), 10)
        assert entered.wait(30)
        handles.close()
        assert not handle.closed
        go_on.set()
        assert read.result(30) == 4
    assert bytes(data) == CONTENT[10:14]
    assert handle.closed
