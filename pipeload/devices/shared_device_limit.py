"""One account of each device's memory, shared by all models that stream to it."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from pipeload._sizes import format_size
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from pipeload.errors import OptionError
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    from pipeload.budget.shared_limit import Client
    from pipeload.weights.device_interface import Device


class DeviceAccount(Accountant):
    """Keeps the limit of one device: see `Accountant`, with tensors in the place of pages."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = weakref.ref(device)
        self._name = str(device.where)
        self.lock = ACCOUNTANT.lock  # one order for host and devices
        # Of its own: a model may be collected in a thread that the accounts' lock waits for.
        self._capping = threading.RLock()

    def join(self, client: Client, limit: int) -> None:
        """Count `client`, as long as it lives; the allocator learns the limit."""
        super().join(client, limit)
        weakref.finalize(client, self._uncap_if_alone).atexit = False
        self._cap(limit)

    def leave(self, client: Client) -> None:
        """Forget `client`; after the last one, the allocator has no limit of ours any more."""
        super().leave(client)
        self._uncap_if_alone()

    def set_limit(self, limit: int) -> None:
        """Change the limit of everybody, the allocator's too: see `Accountant`."""
        with self.lock:
            self.check_change(limit)
            if limit > (self.limit or 0):
                self._cap(limit)  # first: what may stay from now on is read at once
            super().set_limit(limit)
            self._cap(limit)

    def _cap(self, limit: int | None) -> None:
        device = self._device()
        with self._capping:
            if device is not None:
                device.cap(limit)

    def _uncap_if_alone(self) -> None:
        with self._capping:
            if not any(one() for one in self._clients.valuerefs()):  # without the accounts' lock
                self._cap(None)

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
    """The account of that device's memory."""
    with ACCOUNTANT.lock:
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
