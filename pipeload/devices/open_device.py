"""The accelerator that a user names."""

from __future__ import annotations

import threading

import torch

from pipeload.devices.mps import MpsDevice
from pipeload.devices.torch_accelerator import TorchDevice
from pipeload.errors import OptionError

KINDS = ("auto", "cpu", "cuda", "mps", "xpu")
"""What a user may ask for, with or without an index."""
_CLASSES = {"cuda": TorchDevice, "mps": MpsDevice, "xpu": TorchDevice}
"""Those that models are streamed to."""
_CHOSEN = ("cuda", "xpu")
"""Those of them that "auto" takes: not what no machine has run yet."""


def open_device(name: str | torch.device) -> TorchDevice | None:
    """The accelerator of that name; None for the CPU, and for "auto" where there is none.

    Raises:
        OptionError: it means nothing, or there is no such device.
    """
    kind, _, index = str(name).partition(":")
    if kind not in KINDS or (index and (not index.isdecimal() or kind == "auto")):
        raise OptionError(
            f"device={str(name)!r} is unknown. Choose one of {', '.join(KINDS)}; "
            "an index may follow, as in 'cuda:1'."
        )
    if kind == "cpu":
        return None
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind == "auto":
        fit = there is not None and there.type in _CHOSEN
        return _open(there.type, _current_index()) if there is not None and fit else None
    if there is None or there.type != kind:
        found = "no accelerator at all" if there is None else f"{there.type!r} alone"
        raise OptionError(
            f"device={str(name)!r} is not there: torch {torch.__version__} finds {found}. Install "
            "a torch that is built for it, and see that its driver works "
            "(torch.accelerator.is_available()), or leave device out to stream to the CPU."
        )
    count = torch.accelerator.device_count()
    number = int(index) if index else _current_index()
    if number >= count:
        raise OptionError(
            f"device={str(name)!r} is not there: torch finds {count} of {kind!r}, numbered from 0. "
            f"Choose {kind}:0 to {kind}:{count - 1}."
        )
    return _open(kind, number)


def _current_index() -> int:
    return int(torch.accelerator.current_device_index())


_opened: dict[tuple[str, int], TorchDevice] = {}
_opening = threading.Lock()


def _open(kind: str, index: int) -> TorchDevice:
    key = (kind, index)
    with _opening:  # it takes seconds, and each has one account
        if key not in _opened:
            _opened[key] = _CLASSES[kind](torch.device(kind, index))
        return _opened[key]
