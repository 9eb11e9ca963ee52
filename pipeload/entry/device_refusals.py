"""Models that are not streamed to a device: refused by name, before anything is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.errors import UnsupportedModelError
from pipeload.weights.arena import DTYPE_CODES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Weight


def refuse_quantised(pending: PendingLoad, device: Device) -> None:
    """Refuse a checkpoint whose form is not streamed to devices.

    Raises:
        UnsupportedModelError: it is quantised in such a form.
    """
    if pending.format is not None and not pending.format.on_devices:
        raise UnsupportedModelError(
            f"this checkpoint is quantised by {pending.quantised_by!r}, which is streamed to the "
            f"CPU alone so far, not to {device.where}. Leave device out, or stream the float "
            "checkpoint."
        )


def refuse_dtypes(model: nn.Module, weights: Mapping[str, Weight], device: Device) -> None:
    """Refuse a model with tensors of a dtype that the device has none of.

    Raises:
        UnsupportedModelError: it has such.
    """
    codes = {name: weight.dtype for name, weight in weights.items()}
    codes |= {name: DTYPE_CODES.get(b.dtype, "") for name, b in model.named_buffers()}
    lacking = [name for name, code in codes.items() if code in device.lacks]
    if lacking:
        name = lacking[0]
        raise UnsupportedModelError(
            f"{len(lacking)} tensors of this model are of a dtype that {device.where} has none of "
            f"({name!r} first: {DTYPES[codes[name]]}). Pass another one (dtype=torch.float32), or "
            "leave device out to stream to the CPU."
        )
