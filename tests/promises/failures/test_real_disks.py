"""Devices and mounts that really fail, hang or cannot be written to; each skips where it cannot be.

Needs root: a loop device whose image loses its end, and a file system of our own in /dev/fuse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload import ReadError
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header
from pipeload.system import mounts
from pipeload.weights import placement, read_tensor
from tests.rooms.test_imports import ROOT
from tests.support.models import load_plain
from tests.support.streaming import (
    Reference,
    assert_nothing_held,
    check,
    finish_messages,
    finish_reads,
    generated,
    load_streamed,
    logits,
    our_threads,
    prefetcher_of,
    reference,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import TinyCheckpoint

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mounts as Linux does")
_IMAGE_BYTES = 16 << 20


@pytest.fixture(scope="module")
def expected(tiny: TinyCheckpoint) -> Reference:
    return reference(tiny("llama"))


# -- a block device --------------------------------------------------------------------------------


class BlockDevice:
    """A loop device with a file system, mounted read-only, that holds a checkpoint."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self._image, self.point = folder / "image", folder / "mounted"
        self._device = ""
        self.point.mkdir()
        with self._image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        system("mkfs.ext4", "-q", "-F", self._image)
        self._device = system("losetup", "--find", "--show", self._image).strip()
        system("mount", self._device, self.point)
        shutil.copytree(checkpoint, self.point / "model")
        system("umount", self.point)
        system("mount", "-o", "ro,noload", self._device, self.point)
        self._content = b""

    def fail(self) -> None:
        """Every block that is not in memory already is lost: the kernel says EIO."""
        self._content = self._image.read_bytes()
        os.truncate(self._image, 0)

    def recover(self) -> None:
        with self._image.open("r+b") as file:
            file.write(self._content)

    def close(self) -> None:
        if self._device:
            subprocess.run(["umount", "--lazy", self.point], check=False, capture_output=True)
            subprocess.run(["losetup", "--detach", self._device], check=False)


def system(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def device(tiny: TinyCheckpoint, tmp_path: Path) -> Iterator[BlockDevice]:
    if os.geteuid() != 0:
        pytest.skip("a loop device needs root")
    made = BlockDevice.__new__(BlockDevice)
    try:
        made.__init__(tmp_path, tiny("llama"))  # type: ignore[misc]
    except (OSError, subprocess.CalledProcessError) as error:
        made.close()
        pytest.skip(f"no loop device here: {error} {getattr(error, 'stderr', '')}")
    yield made
    made.close()


@linux
def test_a_block_device_that_fails(device: BlockDevice, expected: Reference) -> None:
    """The kernel's own EIO, in the middle of a run; when the device is back, so is the model."""
    model = load_streamed(device.point / "model", io_mode="direct")
    check(model, expected)
    finish_messages(prefetcher_of(model))
    for _ in range(2):
        device.fail()
        words = r"block 'model\.layers\.\d': reading '.*\.safetensors' at byte \d+ failed.*Errno 5"
        for _ in range(2):
            with pytest.raises(ReadError, match=words):
                generated(model)
        assert_nothing_held(model)
        finish_reads(prefetcher_of(model))  # one that fails late would fail the next pass
        device.recover()
        check(model, expected)
    model.pipeload.remove()


@linux
def test_a_read_only_mount(device: BlockDevice, expected: Reference) -> None:
    """Nothing is written beside the checkpoint, streamed or not."""
    folder = device.point / "model"
    with pytest.raises(OSError, match="Read-only"):
        (folder / "file").touch()
    for spare in (0, 10_000_000):
        model = load_streamed(folder, spare=spare)
        check(model, expected)
        model.pipeload.remove()
        assert torch.equal(logits(model), expected[0])


# -- a file system of our own ----------------------------------------------------------------------


class Fuse:
    """A process that serves a folder as a network file system."""

    def __init__(self, folder: Path, point: Path, kind: str) -> None:
        point.mkdir()
        self.point = point
        self._process = subprocess.Popen(
            [sys.executable, ROOT / "tests/support/fuse_disk.py", folder, point, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            error = self._process.communicate()[1].strip().splitlines()
            pytest.skip(f"no FUSE here: {error[-1] if error else 'no reason given'}")

    def become(self, state: str) -> None:
        """ "hang", "fail" or "well"."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{state}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == f"{state}\n"

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def fuse(tiny: TinyCheckpoint, tmp_path: Path) -> Iterator[Fuse]:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("a file system of our own needs root and /dev/fuse")
    made = Fuse(tiny("llama"), tmp_path / "a mount", "fuse.sshfs")
    yield made
    made.close()


@linux
def test_a_network_mount(fuse: Fuse, expected: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning names it; reads that hang there and reads that fail end in errors, not for good.

    The reads are the kernel's: a request to a file system that is not answered.
    """
    monkeypatch.setattr(mounts, "_warned", set())
    words = r"network file system \(fuse\.sshfs, 'tests' at '.*/a mount'\)"
    with pytest.warns(UserWarning, match=words) as seen:
        model = load_streamed(fuse.point, io_mode="direct", read_timeout=0.4)
    assert len(seen) == 1
    check(model, expected)
    FileSet([fuse.point / "config.json"], "buffered").close()  # known already
    finish_messages(prefetcher_of(model))
    before = our_threads()
    for _ in range(2):
        fuse.become("hang")
        words = r"block 'model\.layers\.\d': reading '.*\.safetensors' at byte \d+ has not returned"
        with pytest.raises(ReadError, match=words):
            generated(model)
        fuse.become("well")
        check(model, expected)
        fuse.become("fail")
        with pytest.raises(ReadError, match=r"failed.*Errno 5"):
            generated(model)
        fuse.become("well")
        check(model, expected)
        # The row reader of a pass that ended comes and goes.
        assert {t for t in our_threads() if t in before} == before
    model.pipeload.remove()


@linux
@pytest.mark.filterwarnings("ignore:the checkpoint is on a network")
def test_wrapping_on_a_network_mount(fuse: Fuse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are compared with their file, and the disk goes away in the middle of that."""
    model = load_plain(fuse.point, dtype=torch.float64)  # cast, so no mapping says what it is
    expected, read = logits(model), placement.read_into
    words = {"hang": "has not returned for", "fail": "failed.*Errno 5"}
    for state, problem in words.items():

        def broken(*args: Any, state: str = state) -> tuple[int, int]:
            fuse.become(state)
            return read(*args)

        monkeypatch.setattr(read_tensor, "read_into", broken)
        with pytest.raises(ReadError, match=rf"tensor '.*': reading '.*' at byte \d+ {problem}"):
            pipeload.wrap(model, "100GB", read_timeout=0.4)
        monkeypatch.setattr(read_tensor, "read_into", read)
        fuse.become("well")
        assert torch.equal(logits(model), expected)
    pipeload.wrap(model, "100GB", read_timeout=0.4)
    assert torch.equal(logits(model), expected)
    model.pipeload.remove()


# -- which mount -----------------------------------------------------------------------------------

TABLE = """\
/dev/vda / ext4 rw 0 0
server:/export /data nfs4 rw 0 0
/dev/vdb /data/local xfs rw 0 0
//host/share /mnt/a\\040b cifs rw 0 0
me@host: /home/me/far fuse.sshfs rw 0 0
/dev/fuse /home/me/near fuse.ntfs rw 0 0
host /over nfs rw 0 0
tmpfs /over tmpfs rw 0 0
shared /vm 9p rw 0 0
"""


@linux
@pytest.mark.parametrize(
    ("path", "point"),
    [
        ("/data/model/a.safetensors", "/data"),
        ("/data", "/data"),
        ("/database/a", None),
        ("/data/local/a", None),
        ("/mnt/a b/model/a", "/mnt/a b"),
        ("/home/me/far/a", "/home/me/far"),
        ("/home/me/near/a", None),
        ("/over/a", None),
        ("/vm/a", "/vm"),
        ("/a", None),
    ],
)
def test_the_mount_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, point: str | None
) -> None:
    """The deepest one counts, and of two at one place the later."""
    (tmp_path / "mounts").write_text(TABLE)
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mounts")
    found = mounts.network_mount(Path(path))
    assert (found.point if found else None) == point


def test_a_system_without_a_table_of_mounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "none")
    assert not mounts.warn_of_network([tmp_path])


def test_a_file_that_may_not_be_read() -> None:
    """Nobody's rights, not a stand-in's: the error says what to look at."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        path = folder / "model.safetensors"
        path.write_bytes(b"\2\0\0\0\0\0\0\0{}")
        path.chmod(0)
        before = os.geteuid()
        if before == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(ReadError, match=r"Permission denied\. Check its permissions"):
                read_header(path)
            with pytest.raises(ReadError, match=r"cannot open .*Permission denied"):
                FileSet([path], "buffered")
        finally:
            os.seteuid(before)
