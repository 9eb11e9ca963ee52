"""Apple's GPUs, by `torch.mps`. No Mac has run this file: tests see it with a stand-in alone.

[Note: copies without the queue] Processor and GPU share their memory, and torch's allocator takes
it where both may write. So a copy is made by the processor, in the reader's thread, and has ended
when `copy` returns: nothing is locked, and no stream waits. What orders it:

    before it  the reader waits for the event "computed", which the GPU signals behind all that was
               enqueued before; and memory is handed out only behind what its last owner enqueued
    after it   Metal shows what the processor has written to all that is committed later, and what
               computes with a buffer is enqueued only once its copy has ended

torch's own copy would go through the one queue of commands, in order as well. But it waits there
for all the computing, while the model's thread cannot enqueue more. And torch 2.13 does not guard
that queue against two threads everywhere (`arange` is one place): Metal then ends the process. So
other threads than the model's touch it only to record an event, when memory is taken or given back.

[Note: nobody sleeps for an event] `torch.mps.Event.synchronize` keeps the interpreter's lock, and
of two threads that wait for one event it wakes one. So these, too, are looked at now and then.

[Note: heaps] The allocator cuts tensors out of heaps of 8 MiB, 32 MiB and 1 GiB, and the limit that
it keeps counts these as a whole, with what Metal's libraries hold. So a limit has to hold one begun
heap of each size beside everything else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from pipeload.devices.torch_accelerator import Recorded, TorchDevice, share_of
from pipeload.system.memory import room_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.weights.device_interface import Event

_PAGE = 16 << 10
_HEAPS = ((1 << 20, 8 << 20), (10 << 20, 32 << 20), (512 << 20, 1 << 30))
"""Tensors up to a size, in bytes, and the heaps that they are cut from."""
_OWN_STEP = 2 << 20
_LIBRARY_BYTES = 64_000_000
_HOST_SLACK_BYTES = 64_000_000
_LARGEST_SHARE = 2.0
_SHARE_VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
_DEFAULT_SHARE = 1.7
_LACKING = frozenset({"F64", "F8_E4M3", "F8_E5M2", "F8_E8M0"})


class _Copied:
    """The end of a copy, which nobody has to wait for."""

    def synchronize(self) -> None:
        """The copy has ended: nobody waits."""


class MpsDevice(TorchDevice):
    """A `Device`: the GPU of a Mac with memory for both."""

    def _open(self) -> None:
        self._peak = 0

    @property
    def unified(self) -> bool:
        """See [Note: copies without the queue]."""
        return True

    @property
    def lacks(self) -> frozenset[str]:
        """Metal has no doubles, and torch no 8-bit floats there."""
        return _LACKING

    @property
    def caps(self) -> bool:
        """Whether the allocator can be given a limit."""
        return True

    @property
    def slack_bytes(self) -> int:
        """See [Note: heaps]; and a guess of what graphs and kernels take."""
        return sum(heap for _, heap in _HEAPS) + _LIBRARY_BYTES

    @property
    def host_slack_bytes(self) -> int:
        """A guess: code of Metal's libraries, and of its compiler."""
        return _HOST_SLACK_BYTES

    def takes(self, nbytes: int) -> int:
        """See [Note: heaps]."""
        return share_of(nbytes + -nbytes % _PAGE, _HEAPS, _OWN_STEP)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory that nothing computes with any more: the processor will write to it."""
        try:
            memory = super().allocate(nbytes)
        except RuntimeError as error:  # of no class of its own
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        self.synchronize()
        return memory

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event | None
    ) -> Event:
        """See [Note: copies without the queue]."""
        if after is not None:
            after.synchronize()
        for to, values in pairs:
            self.copy_now(to, values)
        return _Copied()

    def copy_now(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """By the processor, at the address that it knows the memory by."""
        if not values.is_cpu:  # from one place on the device to another
            to.copy_(values)
            return self.synchronize()
        storage = torch.mps._host_alias_storage(to.untyped_storage())  # noqa: SLF001
        seen = torch.empty(0, dtype=to.dtype).set_(storage, to.storage_offset(), to.shape, (1,))
        seen.copy_(values)
        return None

    def computed(self) -> Event:
        """Of all that any thread has enqueued."""
        self._look()
        event = torch.mps.Event()
        event.record()
        return Recorded(event)

    def wait(self, event: Event) -> None:
        """Copies have ended when their event is there: nobody waits."""

    def synchronize(self) -> None:
        """In a way that any thread may: `torch.mps.synchronize` is not guarded."""
        self.computed().synchronize()

    def allocated_bytes(self) -> int:
        """The allocator counts what its tensors take."""
        return torch.mps.current_allocated_memory()

    def reserved_bytes(self) -> int:
        """By the driver's count for this process: heaps, and what Metal's libraries hold."""
        return torch.mps.driver_allocated_memory()

    def peak_bytes(self) -> int:
        """The most of it when memory was taken or a block had run: torch.mps keeps none."""
        self._look()
        return self._peak

    def forget_peak(self) -> None:
        """The most that was looked at is counted anew, from nothing."""
        self._peak = 0

    def free_bytes(self) -> int:
        """What Metal recommends at most, if the machine has that much left."""
        room = torch.mps.recommended_max_memory() - self.reserved_bytes()
        return max(0, min(room, room_bytes()))

    def trim(self) -> None:
        """Only where memory was given back: it waits for the device."""
        torch.mps.empty_cache()

    def cap(self, nbytes: int | None) -> None:
        """A share of what Metal recommends, which may be over 1; 0 would mean no limit."""
        share = float(os.environ.get(_SHARE_VARIABLE) or _DEFAULT_SHARE)
        if nbytes is not None:
            self.trim()
            asked = max(nbytes, 1) / torch.mps.recommended_max_memory()
            share = min(share or _LARGEST_SHARE, asked)
        torch.mps.set_per_process_memory_fraction(share)

    def _look(self) -> None:
        self._peak = max(self._peak, self.reserved_bytes())
