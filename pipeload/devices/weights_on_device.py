"""Weights on a device: how they lie there, what is copied to them, and what is said if it fails."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from pipeload.checkpoint.reader_threads import forget_frames
from pipeload.errors import ReadError
from pipeload.weights.arena import DTYPES
from pipeload.weights.device_interface import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeload.weights.arena import Arena, Work
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Layout, Weight


def device_bytes(layout: Layout) -> int:
    """What a layout's weights take on a device."""
    return sum(aligned(weight.nbytes) for weight in layout.weights)


def fail(device: Device, error: Exception) -> Work:
    """A job that says that something went wrong on the device."""
    return partial(raise_failure, device, forget_frames(error))


def raise_failure(device: Device, error: Exception, _scratch: object = None) -> NoReturn:
    """Say that something went wrong on the device.

    Raises:
        ReadError: always.
    """
    raise ReadError(
        f"its weights could not be put on {device.where}: {type(error).__name__}: {error}. Pass "
        "a smaller memory_limit, or leave more of the device's memory free; if the device itself "
        "has failed, start the process again."
    ) from error


def show(
    weights: Sequence[Weight], memory: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights one behind the other in memory of a device: as they are, and as bytes; by name."""
    views: dict[str, torch.Tensor] = {}
    places: dict[str, torch.Tensor] = {}
    offset = 0
    # A view made in inference mode would turn the parameter it is bound to into an inference
    # tensor.
    with torch.inference_mode(False):
        for weight in weights:
            place = memory[offset : offset + weight.nbytes]
            places[weight.name] = place
            views[weight.name] = place.view(DTYPES[weight.dtype]).view(weight.shape)
            offset += aligned(weight.nbytes)
    return views, places


def copies(
    places: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor], arena: Arena
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What goes where, as bytes: (to, from). Neighbours on both sides go in one.

    Args:
        places: of the weights on the device, by name, in one memory.
        views: of the same weights in `arena`.
        arena: host memory.
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, place in places.items():
        pair = place, flat(views[name])
        if pairs and all(map(_follows, pairs[-1], pair)):
            to, source = pairs.pop()
            nbytes = to.numel() + place.numel()
            start = source.data_ptr() - arena.address
            pair = to.as_strided((nbytes,), (1,)), arena.tensor(start, "U8", (nbytes,), nbytes)
        pairs.append(pair)
    return pairs


def _follows(before: torch.Tensor, after: torch.Tensor) -> bool:
    return before.data_ptr() + before.numel() == after.data_ptr()


def flat(values: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return values.reshape(-1).view(torch.uint8)
