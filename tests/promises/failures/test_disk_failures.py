"""What the disk does wrong becomes one clear error, and no lasting damage."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload import CheckpointChangedError, ReadError
from pipeload.checkpoint.file_reads import FileSet
from pipeload.engine import assembly
from pipeload.prefetch.unit import UnitState
from pipeload.weights import resident_memory
from pipeload.weights.mapped import MappedFiles
from tests.support.models import load_plain, save_random
from tests.support.streaming import (
    WAIT_SECONDS,
    Reference,
    assert_nothing_held,
    check,
    finish_messages,
    generated,
    load_streamed,
    logits,
    prefetcher_of,
    reference,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyCheckpoint


class SickDisk:
    """While sick, every read fails, or comes back short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sick = False
        self.failed = threading.Event()
        self._read = os.preadv
        monkeypatch.setattr(os, "preadv", self._preadv)

    def _preadv(self, descriptor: int, buffers: Any, offset: int) -> int:
        if not self.sick:
            return self._read(descriptor, buffers, offset)
        self.failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SickDisk:
    return SickDisk(monkeypatch)


@pytest.fixture(scope="module")
def expected(tiny: TinyCheckpoint) -> Reference:
    return reference(tiny("llama"))


@pytest.fixture
def folder(tiny: TinyCheckpoint, tmp_path: Path) -> Path:
    """A checkpoint that the test may change."""
    return shutil.copytree(tiny("llama"), tmp_path / "copy")


def at_layer(model: Any, layer: int, action: Callable[[], object]) -> None:
    """Have `action` run once, in the middle of that block's next forward."""

    def act(*_args: object) -> None:
        hook.remove()
        action()

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(act)


def test_a_failing_disk_is_named(tiny: TinyCheckpoint, disk: SickDisk, expected: Reference) -> None:
    """The error says block, file, place and cause; then the disk recovers, and so do we."""
    model = load_streamed(tiny("llama"))
    finish_messages(prefetcher_of(model))
    for _ in range(3):
        disk.sick = True
        words = r"block 'model\.layers\.\d': reading '.*\.safetensors' at byte \d+.*Input/output"
        with pytest.raises(ReadError, match=words):
            generated(model)
        disk.sick = False
        check(model, expected)


def test_a_failing_disk_while_loading(
    tiny: TinyCheckpoint, disk: SickDisk, expected: Reference
) -> None:
    """from_pretrained raises it, and a second try works."""
    disk.sick = True
    with pytest.raises(ReadError, match=r"\.safetensors' at byte \d+ failed"):
        load_streamed(tiny("llama"), io_mode="buffered")
    disk.sick = False
    check(load_streamed(tiny("llama")), expected)


def test_a_failed_read_ahead_is_tried_again(
    tiny: TinyCheckpoint, disk: SickDisk, expected: Reference
) -> None:
    """A read ahead that failed is no error when the disk is well by the time it is needed."""
    model = load_streamed(tiny("llama"))
    finish_messages(prefetcher_of(model))
    prefetcher = prefetcher_of(model)
    while any(unit.state is UnitState.LOADING for unit in prefetcher.units):
        finish_messages(prefetcher)

    def fall_ill() -> None:
        disk.sick = True

    def recover() -> None:
        assert disk.failed.wait(WAIT_SECONDS)
        while not any(unit.failed for unit in prefetcher.units):
            finish_messages(prefetcher)
        disk.sick = False

    at_layer(model, 0, fall_ill)  # unit 2 is read as soon as block 0 is done
    at_layer(model, 1, recover)
    assert torch.equal(logits(model), expected[0])
    check(model, expected)


def test_short_reads_are_continued(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    """The system may give less than was asked for; the rest is asked for again."""
    original = os.preadv

    def one_page(descriptor: int, buffers: Any, offset: int) -> int:
        return original(descriptor, [memoryview(buffers[0])[:4096]], offset)

    monkeypatch.setattr(os, "preadv", one_page)
    check(load_streamed(tiny("llama")), expected)


def test_a_file_cut_short_during_a_pass(folder: Path) -> None:
    """The pass ends with an error that names both; the next says that the file changed."""
    model = load_streamed(folder, io_mode="buffered")
    finish_messages(prefetcher_of(model))

    def cut() -> None:
        for file in folder.glob("*.safetensors"):
            os.truncate(file, 4096)

    at_layer(model, 0, cut)
    words = r"block 'model\.layers\.\d': '.*\.safetensors' ended at byte \d+.*cut short"
    with pytest.raises(ReadError, match=words):
        logits(model)
    assert_nothing_held(model)
    with pytest.raises(CheckpointChangedError, match=r"\.safetensors' was changed in place"):
        logits(model)
    assert_nothing_held(model)


@pytest.mark.parametrize("change", ["shorter", "longer", "same size"])
def test_a_file_changed_in_place(folder: Path, change: str) -> None:
    """Between two passes it is noticed before a single wrong number is computed, every time."""
    model = load_streamed(folder)
    logits(model)
    file = sorted(folder.glob("*.safetensors"))[3]
    status = file.stat()
    with file.open("r+b") as opened:
        end = opened.seek(-1, os.SEEK_END)
        if change == "shorter":
            opened.truncate(end)
        else:
            opened.write(b"xx" if change == "longer" else b"x")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    for _ in range(2):
        with pytest.raises(CheckpointChangedError, match=re.escape(str(file))):
            logits(model)
        assert_nothing_held(model)


def test_a_file_replaced_by_rename(folder: Path, tmp_path: Path, expected: Reference) -> None:
    """The files that were opened are used to the end, whatever has their names by then."""
    model = load_streamed(folder)
    logits(model)
    for file in folder.glob("*.safetensors"):
        other = tmp_path / "other"
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
    check(model, expected)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected[0])


def test_a_folder_deleted(folder: Path, expected: Reference) -> None:
    """A checkpoint that is gone from its folder still streams, and still gives the model back."""
    for spare in (0, 10_000_000):
        copy = shutil.copytree(folder, folder.with_name(f"deleted-{spare}"))
        model = load_streamed(copy, spare=spare)
        logits(model)
        shutil.rmtree(copy)
        check(model, expected)
        model.pipeload.remove()
        assert torch.equal(logits(model), expected[0])


def test_a_file_that_cannot_be_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening is a read, too: the error names the file, and no descriptor stays open."""
    original = os.open
    victim = str(sorted(folder.glob("*.safetensors"))[-1])

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if str(path) == victim:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), victim)
        return original(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ReadError, match=re.escape(victim)):
        load_streamed(folder)
    monkeypatch.undo()
    # By target, not by number: descriptors of other tests' models close when garbage is collected.
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    targets = {str(link.readlink()) for link in links}
    assert not [target for target in targets if target.startswith(str(folder.resolve()))]


def test_a_missing_shard_is_named(folder: Path) -> None:
    """Before anything is loaded."""
    victim = sorted(folder.glob("*.safetensors"))[2]
    victim.unlink()
    with pytest.raises(pipeload.CheckpointError, match=re.escape(victim.name)):
        load_streamed(folder)


@pytest.mark.parametrize("spare", [0, 10_000_000], ids=["streamed", "fits"])
def test_a_folder_that_becomes_another(
    tiny: TinyCheckpoint, tmp_path: Path, expected: Reference, spare: int
) -> None:
    """A link that leads to another model meanwhile, even within a pass, changes nothing."""
    other = save_random("llama", tmp_path / "other", "fp32", seed=8, max_shard_size="200KB")
    (tmp_path / "link").symlink_to(tiny("llama"))
    model = load_streamed(tmp_path / "link", spare=spare)

    def swap() -> None:
        (tmp_path / "next").symlink_to(other)
        (tmp_path / "next").replace(tmp_path / "link")

    at_layer(model, 1, swap)
    check(model, expected)
    assert (tmp_path / "link").resolve() == other.resolve()
    check(model, expected)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected[0])
    assert not torch.equal(logits(load_plain(tmp_path / "link")), expected[0])


def test_a_file_replaced_during_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its header and its weights: nothing is read where another file's header says."""
    victim = sorted(folder.glob("*.safetensors"))[2]

    def open_late(*args: Any) -> FileSet:
        other = folder / "other"
        other.write_bytes(victim.read_bytes())
        other.replace(victim)
        return FileSet(*args)

    monkeypatch.setattr(assembly, "FileSet", open_late)
    words = rf"'{re.escape(str(victim))}' was replaced or changed while the model was being loaded"
    for spare in (0, 10_000_000):
        with pytest.raises(CheckpointChangedError, match=words):
            load_streamed(folder, spare=spare)


def test_a_file_replaced_before_it_is_mapped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, expected: Reference
) -> None:
    """What is mapped is what was opened."""

    def map_late(*args: Any) -> MappedFiles:
        for file in folder.glob("*.safetensors"):
            other = folder / "other"
            content = file.read_bytes()
            header = 8 + int.from_bytes(content[:8], "little")  # the library reads it once more
            other.write_bytes(content[:header] + bytes(len(content) - header))
            other.replace(file)
        return MappedFiles(*args)

    monkeypatch.setattr(resident_memory, "MappedFiles", map_late)
    monkeypatch.setattr(map_late, "supported", MappedFiles.supported, raising=False)
    model = load_streamed(folder, spare=10_000_000)
    assert model.pipeload.plan.io_mode == "mapped"
    check(model, expected)
