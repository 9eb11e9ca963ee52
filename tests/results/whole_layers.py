"""Whole-layer loaders as published (PIPELOAD, PipeSwitch): what pipeload's rows stand beside.

m threads read different layers at once, each a whole one into new memory; a thread begins a layer
when fewer than m + 1 are held. Computing takes layers in order, and gives each back. With `keep`
nothing is given back: one such loader is PipeSwitch's way. With no loader each layer is read when
it is needed, computed and given back. What is no layer stays in memory. Each pass begins anew.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from pathlib import Path  # noqa: TC003 - a NamedTuple's
from typing import Any, NamedTuple

import accelerate  # type: ignore[import-untyped]
import torch
import transformers

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Stored(NamedTuple):
    """Where a tensor lies. `start` and `nbytes` in bytes."""

    file: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def stored_in(folder: Path) -> dict[str, _Stored]:
    """All tensors of a folder's safetensors files, by name."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, stop = entry["data_offsets"]
            at, dtype = 8 + length + start, _DTYPES[entry["dtype"]]
            found[name] = _Stored(file, at, stop - start, dtype, tuple(entry["shape"]))
    return found


class WholeLayers:
    """Loads the layers of a model that has no weights yet, pass by pass."""

    def __init__(self, model: Any, folder: Path, *, loaders: int, keep: bool = False) -> None:
        self._stored = stored_in(folder)
        self._files = {
            file: os.open(file, os.O_RDONLY)
            for file in {stored.file for stored in self._stored.values()}
        }
        lists = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)]
        stem, layers = max(lists, key=lambda item: sum(p.numel() for p in item[1].parameters()))
        self._layers = list(layers)
        self._names = [f"{stem}.{number}." for number in range(len(layers))]
        self._held: dict[int, dict[str, torch.Tensor]] = {}
        self._loaders, self._keep = loaders, keep
        self._lock = threading.Condition()
        self._next = self._out = 0
        self._threads: list[threading.Thread] = []
        rest = [name for name in self._stored if not name.startswith(f"{stem}.")]
        self._bind(model, self._read(rest), "")
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda _m, _a, at=number: self._enter(at))
            layer.register_forward_hook(lambda _m, _a, _o, at=number: self._leave(at))

    def _read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """All of them, in one piece of memory that goes back to the system with the last."""
        places, total = [], 0
        for name in names:
            places.append(total)
            total += -(-self._stored[name].nbytes // 64) * 64
        memory = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        view, bound = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
        tensors = {}
        for name, place in zip(names, places, strict=True):
            file, start, nbytes, dtype, shape = self._stored[name]
            done = 0
            while done < nbytes:
                part = view[place + done : place + nbytes]
                got = os.preadv(self._files[file], [part], start + done)
                if not got:
                    raise EOFError(f"{file} ends within {name}, at byte {start + done}")
                done += got
            tensors[name] = bound[place : place + nbytes].view(dtype).view(shape)
        return tensors

    def _bind(self, module: Any, tensors: dict[str, torch.Tensor], stem: str) -> None:
        for name, tensor in tensors.items():
            path, _, last = name.removeprefix(stem).rpartition(".")
            owner = module.get_submodule(path)
            owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))

    def _of(self, number: int) -> list[str]:
        return [name for name in self._stored if name.startswith(self._names[number])]

    def _load(self) -> None:
        room = len(self._layers) if self._keep else self._loaders + 1
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._next - self._out < room)
                number = self._next
                if number == len(self._layers):
                    return
                self._next += 1
            tensors = self._read(self._of(number))
            with self._lock:
                self._held[number] = tensors
                del tensors  # or it would live until the next one has been read
                self._lock.notify_all()

    def _enter(self, number: int) -> None:
        if number == 0 and self._loaders and not (self._keep and self._held):
            for thread in self._threads:  # of the pass before, which have nothing left to do
                thread.join()
            self._next = self._out = 0
            self._threads = [
                threading.Thread(target=self._load, daemon=True) for _ in range(self._loaders)
            ]
            for thread in self._threads:
                thread.start()
        if not self._loaders:
            self._held[number] = self._read(self._of(number))
        with self._lock:
            self._lock.wait_for(lambda: number in self._held)
        self._bind(self._layers[number], self._held[number], self._names[number])

    def _leave(self, number: int) -> None:
        if self._keep:
            return
        empty = {name: tensor.to("meta") for name, tensor in self._held[number].items()}
        self._bind(self._layers[number], empty, self._names[number])
        with self._lock:
            del self._held[number]
            self._out += 1
            self._lock.notify_all()


def load(kind: Any, folder: Path, *, loaders: int, keep: bool = False) -> Any:
    """A model of that class whose layers are loaded so as it runs."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with accelerate.init_empty_weights(include_buffers=False):
        model = kind.from_config(config, dtype=config.dtype)
    WholeLayers(model, folder, loaders=loaders, keep=keep)
    model.tie_weights()
    return model.eval()
