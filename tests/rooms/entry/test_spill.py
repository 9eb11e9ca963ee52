"""Files that wrap() spills weights into: nothing stays of them, whatever ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipeload
from pipeload.entry import spill as entry_spill
from pipeload.entry.spill import Spill
from pipeload.system import mounts, owned_files
from pipeload.system.folder_lock import try_lock
from tests.promises.ways_in.test_scripts import ROOT, environment
from tests.support.children import in_fork
from tests.support.platforms import hide_proc
from tests.support.streaming import generated, logits, smallest_limit, steady_floor
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="open files keep their names there")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="opens files by /proc")
TENSORS = {"weight": torch.arange(6.0)}


@pytest.fixture(autouse=True)
def floor() -> Iterator[None]:
    """Limits bite although the models are tiny."""
    with steady_floor(modules=True):
        yield


def edited(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2] += 1
    return model


_WRAP = """
import sys, torch, pipeload
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    model.model.layers[1].mlp.up_proj.weight[2] += 1
pipeload.wrap(model, "100GB", spill_dir=sys.argv[2])
with torch.no_grad():
    model(torch.arange(3, 9)[None])
print("ready", flush=True)
sys.stdin.read()
"""
_WRITE = """
import sys, torch
from pathlib import Path
from pipeload.entry import spill
def write(file, tensors):
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    sys.stdin.read()
spill._write = write
spill.Spill(Path(sys.argv[1]), {"weight": torch.ones(3)})
"""


def started(python: list[str], code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process that has got to where it waits."""
    child = subprocess.Popen(
        [*python, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str], number: int) -> None:
    child.send_signal(number)
    with child:
        assert child.wait() == -number


@linux
@pytest.mark.slow
def test_a_process_that_is_killed(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """While its model streams from a spill: the file goes with it."""
    end(started(warm_python(), _WRAP, tiny("llama"), tmp_path), signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """What it leaves goes with the next spill there; that of a process that lives stays."""
    child = started([sys.executable], _WRITE, tmp_path)
    (part,) = tmp_path.iterdir()
    Spill(tmp_path, TENSORS).remove()
    assert list(tmp_path.iterdir()) == [part]
    end(child, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == [part]
    spill = Spill(tmp_path, TENSORS)
    assert list(tmp_path.iterdir()) == [spill.path]
    spill.remove()


@linux
def test_a_file_without_a_name(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """It is read, whatever the limit becomes, and mapped again at the end."""
    folder = tiny("llama")
    model = edited(folder)
    expected, tokens = logits(model), generated(model)
    limit = smallest_limit(folder) + 8192
    pipeload.wrap(model, limit, spill_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    for extra in (0, 300_000, 10_000_000, 0):
        model.pipeload.set_memory_limit(limit + extra)
        assert torch.equal(logits(model), expected)
        assert generated(model) == tokens
    assert model.pipeload.plan.bytes_per_pass > 0
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)
    pipeload.wrap(model, limit, spill_dir=tmp_path)  # from that mapping into another file
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("why", ["no /proc", "network"])
def test_a_file_that_keeps_its_name(
    why: str, tiny: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it could not be opened again, or be lost, it is there until the handle is removed."""
    folder = tiny("llama")
    model = edited(folder)
    expected = logits(model)
    limit = smallest_limit(folder) + 10_000_000
    if why == "network":
        mount = mounts.Mount("/", "nfs4", "server:/export")
        monkeypatch.setattr(entry_spill, "network_mount", lambda _path: mount)
    else:
        hide_proc(monkeypatch)
    pipeload.wrap(model, limit, spill_dir=tmp_path)
    (file,) = tmp_path.iterdir()
    assert torch.equal(logits(model), expected)
    assert list(tmp_path.iterdir()) == [file]
    model.pipeload.remove()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(logits(model), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_that_ends(tmp_path: Path) -> None:
    """The file is its parent's."""
    spill = Spill(tmp_path, TENSORS)

    def work() -> None:
        spill.remove()

    in_fork(work)
    assert list(tmp_path.iterdir()) == [spill.path]
    spill.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of others, links, folders; any at all where nobody can tell who lives.

    On a network mount, what seems to be is named.
    """
    name = "pipeload-spill-abcdefgh"
    kept = [tmp_path / "pipeload-spill-of-my-model.safetensors", tmp_path / f"{name}.gguf"]
    for file in kept:
        file.write_text("mine")
    (tmp_path / f"{name}.part").symlink_to(kept[0])
    (tmp_path / "pipeload-spill-12345678.part").mkdir()
    before = set(tmp_path.iterdir())
    owned_files.delete_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == before
    left = tmp_path / f"{name}.safetensors"
    left.write_text("left")
    with monkeypatch.context() as patch:
        patch.setattr(owned_files, "try_lock", lambda _descriptor: None)
        owned_files.delete_abandoned(tmp_path)
        assert left.exists()
    with monkeypatch.context() as patch:
        mount = mounts.Mount("/", "nfs4", "server:/export")
        patch.setattr(owned_files, "network_mount", lambda _path: mount)
        owned_files.delete_abandoned(tmp_path)
        assert left.exists()
    (record,) = caplog.records
    assert str(left) in record.message
    owned_files.delete_abandoned(tmp_path)
    assert set(tmp_path.iterdir()) == before


def test_a_new_file_that_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is locked another process may delete it: then another one is made."""
    asked: list[int] = []

    def late(descriptor: int) -> bool | None:
        asked.append(descriptor)
        if len(asked) == 1:
            owned_files.delete_abandoned(tmp_path)  # asks as well
            assert list(tmp_path.iterdir()) == []
        return try_lock(descriptor)

    monkeypatch.setattr(owned_files, "try_lock", late)
    descriptor, path = owned_files.make_owned(tmp_path)
    assert len(asked) == 3
    assert list(tmp_path.iterdir()) == [path]
    os.close(descriptor)
