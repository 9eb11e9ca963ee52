"""The seam between streaming and an accelerator: what is asked of one, whatever it is.

[Note: three tiers] Weights go disk -> staging in host memory -> device memory -> view -> layer.
A buffer is a pair: as much staging as device memory, for one unit. Its life:

    reader     waits until the copy out of the staging has ended, then reads the disk into it
    reader     enqueues the copy on the one copy stream, behind the buffer's event "computed"
    model      before the layer: its stream waits for the event "copied"; no thread does
    model      after the layer: records "computed" on its stream, then lets the buffer go

So the threads only order work: the device runs behind, and the next read begins as soon as the
copy before it has left the staging. A buffer's memory is written only behind the event that proves
the computing with it done, and its staging only behind the one that proves the copy done.
What stays on the device goes there in pieces through the readers' scratch, once; a wait for
everything (`synchronize`) comes only where memory is given back, which is rare.

Device memory is first: a byte that stays there is neither read nor copied any more. What the host's
limit leaves after the staging keeps whole units in host memory, which are copied but not read. With
B bytes per second from disk and L over the link, a pass takes no less than
T* = max(disk bytes / B, (disk + host bytes) / L, C). A plan with measured rates says how much host
memory is enough for that; a load, which knows no rates, takes what the host's limit leaves, which
is never slower.

[Note: another alignment] Copies go weight by weight to multiples of `ALIGN`, as the device's own
allocator lays out what a plain load puts there: kernels are chosen by address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ALIGN = 512
"""Bytes: what allocators of devices align to."""


class Event(Protocol):
    """A point in the order of a device's work."""

    def synchronize(self) -> None:
        """Return once the device has passed it."""


class Device(Protocol):
    """An accelerator. Sizes in bytes; tensors that are handed over are uint8 and flat."""

    @property
    def where(self) -> torch.device:
        """What tensors on it say where they are."""

    @property
    def unified(self) -> bool:
        """Whether its memory is the host's, so that keeping units there saves nothing."""

    @property
    def lacks(self) -> frozenset[str]:
        """Codes of safetensors for the dtypes that no tensor can have there."""

    @property
    def caps(self) -> bool:
        """Whether `cap` makes its allocator refuse what is over a limit."""

    @property
    def slack_bytes(self) -> int:
        """What its libraries take on later, and its allocator between tensors."""

    @property
    def host_slack_bytes(self) -> int:
        """What its libraries take on later in host memory: code of kernels that run first then."""

    @property
    def code_bytes(self) -> int:
        """Library pages that come back with the first computing, after they were given back."""

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """Whether a kernel computes attention in that dtype without writing its scores out."""

    def takes(self, nbytes: int) -> int:
        """Say what its allocator takes for that many bytes."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory on the device, at a multiple of `ALIGN`, of exactly that size.

        Raises:
            torch.OutOfMemoryError: there is none left.
        """

    def pin(self, address: int, nbytes: int) -> bool:
        """Lock host memory in its place, so that copies run beside everything; False if refused."""

    def unpin(self, address: int) -> None:
        """Undo `pin`, once nothing is copied out of there any more."""

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event | None
    ) -> Event:
        """Enqueue copies (to, from), behind `after`; the event says that the last has ended."""

    def copy_now(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Copy, and return when it is done."""

    def computed(self) -> Event:
        """Mark the end of all that this thread has had computed so far."""

    def wait(self, event: Event) -> None:
        """Have whatever this thread has computed from now on wait for it."""

    def synchronize(self) -> None:
        """Return once the device has nothing more to do."""

    def allocated_bytes(self) -> int:
        """Memory of tensors on the device."""

    def reserved_bytes(self) -> int:
        """Memory of tensors on the device, and what the allocator keeps for later ones."""

    def peak_bytes(self) -> int:
        """The most bytes that were ever reserved."""

    def forget_peak(self) -> None:
        """Count the most anew, from what is reserved now."""

    def free_bytes(self) -> int:
        """How many bytes the device could still give."""

    def link_rate(self) -> float | None:
        """Bytes per second from locked host memory, measured when first asked for.

        None while there is no room for that.
        """

    def compute_rate(self) -> float | None:
        """Bytes of weights per second in products with one row: as for the link."""

    def trim(self) -> None:
        """Give back what the allocator keeps and nobody uses."""

    def cap(self, nbytes: int | None) -> None:
        """Have the allocator refuse, and first give back, what is over a limit.

        None: over what it refused before anybody called this. That may be asked in any thread, at
        any moment, and so waits for nothing.
        """


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGN`."""
    return nbytes + -nbytes % ALIGN
