"""One account of each device's memory, shared by all models that stream to it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pipeload._accountant import ACCOUNTANT, Accountant
from pipeload._memory import parse_limit
from pipeload._sizes import format_size
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from pipeload._device import Device


class DeviceAccount(Accountant):
    """Keeps the limit of one device: see `Accountant`, with tensors in the place of pages."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = weakref.ref(device)
        self._name = str(device.where)
        self.lock = ACCOUNTANT.lock  # one order for host and devices

    def check_limit(self, limit: int) -> None:
        """Whether a model may be loaded with `limit` beside those that are there.

        Raises:
            OptionError: the device has another limit.
        """
        try:
            super().check_limit(limit)
        except OptionError:
            raise OptionError(
                f"memory_limit={limit} bytes ({format_size(limit)}) differs from that of a model "
                f"that streams to {self._name} already, {self.limit} bytes "
                f"({format_size(self.limit or 0)}), and the limit is the whole device's. Pass the "
                "same one, change it with handle.set_memory_limit() first, or remove the other "
                "model."
            ) from None

    def other_bytes(self) -> int:
        """Tensors on the device beside weights that stream: caches, activations, the user's own."""
        device = self._device()
        held = sum(client.held_bytes() for client in self.clients)
        return 0 if device is None else device.allocated_bytes() - held


_accounts: weakref.WeakKeyDictionary[Device, DeviceAccount] = weakref.WeakKeyDictionary()


def account_of(device: Device) -> DeviceAccount:
    """The one of that device."""
    if device not in _accounts:
        _accounts[device] = DeviceAccount(device)
    return _accounts[device]


def device_limit(device: Device, memory_limit: int | str) -> int:
    """A limit of a device in bytes: a size, "auto" (nine tenths of what is free), or a share.

    Raises:
        OptionError: it is none of these.
    """
    there = device.free_bytes() + device.reserved_bytes()
    return parse_limit(memory_limit, there=there)
