"""A tensor that somebody waits for, on a disk that hangs, fails or ends: one error, no damage."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload import ReadError
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import TensorEntry, read_header, stamps_of
from pipeload.weights import placement, read_tensor
from pipeload.weights.read_tensor import read_pieces, read_whole
from pipeload_hooks import is_placeholder
from tests.support.models import save_random
from tests.support.streaming import WAIT_SECONDS, load_streamed, logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 0.4
FAULTS = {
    "hang": r"has not returned for \d+\.\d seconds",
    "fail": r"failed: .*Input/output error",
    "end": r"bytes early: it was cut short",
}
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


class Disk:
    """Well, but for reads of tensors whose name `spoil` was told of: those are as it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._state, self._names = "well", ""
        self._works = threading.Event()
        self._here = threading.local()
        self._preadv, self._read = os.preadv, placement.read_into
        self.found = ""
        monkeypatch.setattr(os, "preadv", self._faulty)
        for module in (read_tensor, placement):
            monkeypatch.setattr(module, "read_into", self._noted)
        self.let_others_take = partial(monkeypatch.setenv, "PIPELOAD_READ_TIMEOUT")
        self.let_others_take("100")

    def spoil(self, state: str, names: str) -> None:
        self._state, self._names = state, names
        self._works.clear()

    def recover(self) -> None:
        self._state = "well"
        self._works.set()

    def _noted(self, scratch: Any, files: Any, entry: Any, start: int, stop: int) -> Any:
        self._here.chosen = self._state != "well" and re.search(self._names, entry.name)
        if self._here.chosen:
            self.found = f"tensor {entry.name!r}: .*{re.escape(str(entry.file))}.* at byte "
        return self._read(scratch, files, entry, start, stop)

    def _faulty(self, descriptor: int, buffers: Any, offset: int) -> int:
        if getattr(self._here, "chosen", None):
            if self._state == "fail":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self._state == "end":
                return 0
            assert self._works.wait(WAIT_SECONDS)
        return self._preadv(descriptor, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.recover()


class Made(NamedTuple):
    """Checkpoints, each of one file."""

    floats: Path
    experts: Path
    nf4: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    floats = save_random(AutoConfig.for_model("llama", **_SIZES), folder / "a", "bf16", seed=3)
    mixture = AutoConfig.for_model("mixtral", num_local_experts=2, **_SIZES)
    experts = save_random(mixture, folder / "b", "bf16", seed=3)
    nf4 = folder / "nf4"
    try:
        pipeload.quantize(floats, nf4, method="nf4", double_quant=True)
    except pipeload.OptionError:  # without bitsandbytes
        nf4 = floats
    return Made(floats, experts, nf4)


def spoilt(disk: Disk, fault: str, names: str, act: Callable[[], Any]) -> Any:
    """What `act` returns once the disk is well; before, it raises an error that says all."""
    for _ in range(2):
        disk.spoil(fault, names)
        with pytest.raises(ReadError, match=FAULTS[fault]) as caught:
            act()
        assert re.search(disk.found, str(caught.value))
        disk.recover()
    return act()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("kind", "names"),
    [("floats", r"down_proj"), ("experts", r"experts\.1\.")],
    ids=["as it is", "converted"],
)
def test_a_comparison(disk: Disk, fault: str, kind: str, names: str, made: Made) -> None:
    """wrap() says that it could not read, not that the weight was changed; the model is as it was.

    Weights that were cast are compared with their file whatever maps it.
    """
    folder: Path = getattr(made, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = logits(model)

    def wrap() -> None:
        assert torch.equal(logits(model), expected)
        pipeload.wrap(model, "100GB", read_timeout=SECONDS)

    spoilt(disk, fault, names, wrap)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("names", ["quant_state", "nested_absmax"])
def test_statistics(disk: Disk, fault: str, names: str, made: Made) -> None:
    """Of bitsandbytes: before anything is planned, and while the model is put together."""
    pytest.importorskip("bitsandbytes")
    expected = logits(AutoModelForCausalLM.from_pretrained(made.nf4))

    def load() -> Any:
        return pipeload.from_pretrained(made.nf4, memory_limit="100GB", read_timeout=SECONDS)

    assert torch.equal(logits(spoilt(disk, fault, names, load)), expected)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("names", ["embed_tokens", "down_proj"], ids=["copied", "quantised"])
def test_quantising(disk: Disk, fault: str, names: str, made: Made, tmp_path: Path) -> None:
    """It goes on where it was; how long a read may take is the environment's to say."""
    disk.let_others_take(str(SECONDS))
    folder = spoilt(
        disk, fault, names, lambda: pipeload.quantize(made.floats, tmp_path / fault, method="int8")
    )
    plain = pipeload.quantize(made.floats, tmp_path / "plain", method="int8")
    for file in plain.glob("*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("io_mode", ["buffered", "direct"])
def test_a_weight_written_to_itself(disk: Disk, fault: str, io_mode: str, made: Made) -> None:
    """Whether it is still the checkpoint's is asked anew, of the files that the model has open."""
    model = load_streamed(made.floats, io_mode=io_mode, read_timeout=SECONDS, spare=2_000_000)
    expected = logits(model)
    weights = (layer.mlp.down_proj.weight for layer in model.model.layers)
    weight = next(weight for weight in weights if not is_placeholder(weight))
    with torch.no_grad():
        weight.copy_(weight.clone())
    assert torch.equal(spoilt(disk, fault, "down_proj", lambda: logits(model)), expected)


def test_a_source_that_goes_meanwhile(made: Made, tmp_path: Path) -> None:
    """Its files are open; one that takes their name is another checkpoint's."""
    folder = Path(shutil.copytree(made.floats, tmp_path / "source"))

    def progress(done: int, _total: int) -> None:
        (folder / "model.safetensors").unlink(missing_ok=True)

    target = pipeload.quantize(folder, tmp_path / "a", method="int8", progress=progress)
    plain = pipeload.quantize(made.floats, tmp_path / "b", method="int8")
    for file in plain.glob("*.safetensors"):
        assert (target / file.name).read_bytes() == file.read_bytes()


def entries_of(folder: Path) -> dict[str, TensorEntry]:
    return read_header(folder / "model.safetensors")


@pytest.mark.parametrize("io_mode", ["buffered", "direct"])
def test_the_bytes(made: Made, io_mode: str) -> None:
    """In pieces of any size, and as a whole; from anywhere in a page."""
    entries = entries_of(made.floats)
    data = (made.floats / "model.safetensors").read_bytes()
    files = FileSet([made.floats / "model.safetensors"], io_mode, None, stamps_of(entries.values()))
    for entry in entries.values():
        stored = data[entry.start : entry.stop]
        for nbytes in (5000, entry.nbytes, entry.nbytes + 1):
            pieces = [bytes(piece) for piece in read_pieces(entry, files, nbytes)]
            assert {len(piece) for piece in pieces[:-1]} <= {nbytes}
            assert b"".join(pieces) == stored
        whole = read_whole(entry, files)
        assert whole.shape == entry.shape
        assert bytes(whole.view(torch.uint8).numpy().data) == stored


def test_nothing(made: Made) -> None:
    """A tensor without items is read without a read."""
    empty = TensorEntry("empty", made.floats / "model.safetensors", "F32", (0, 3), 100, 100)
    files = FileSet([empty.file], "buffered")
    assert list(read_pieces(empty, files)) == []
    assert read_whole(empty, files).shape == (0, 3)
