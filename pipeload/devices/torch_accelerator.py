"""Accelerators with memory of their own, by torch's neutral interface.

It has run on an NVIDIA card (H200, CUDA 13); ROCm and XPU have not seen it.

[Note: locked memory of the exact size] torch's own pinned memory comes in powers of two, up to
twice what was asked for, and is kept for good. So memory of ours is registered with the driver,
page by page, where torch lets us (CUDA and ROCm). Elsewhere, or where the driver refuses (a small
limit on locked memory), staging stays pageable: copies are then made by the reader's thread, which
waits for them; slower, and still right.

[Note: looked at, not slept for] A thread that waits for an event of CUDA's takes a core to look at
it all the time: `blocking` is a flag that `torch.Event` has and, as of 2.13, ignores. On two cores
computing would be enqueued more slowly meanwhile. So events are looked at now and then.

[Note: segments] torch cuts tensors of up to 1 MiB out of segments of 2 MiB, those under 10 MiB out
of 20 MiB, and its limit counts segments as a whole. Two tensors of 8 MiB leave 4 MiB that no third
one gets: with 7 billion weights in NF4 that comes to 0.3 GB.

[Note: an error that stays] A call of the driver's that was refused leaves its error behind, and
the next check of torch's, anywhere, would raise it. So it is fetched at once, and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from pipeload._sizes import format_size
from pipeload.system.library_pages import droppable_bytes, lower_floor
from pipeload.weights.arena import Arena
from pipeload.weights.device_interface import ALIGN, aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.weights.device_interface import Event

_WARM_UP_SIDE = 256
_SEGMENTS = ((1 << 20, 2 << 20), ((10 << 20) - ALIGN, 20 << 20))
_OWN_STEP = 2 << 20
_AMPERE = (8, 0)
_LINK_PIECE_BYTES = 32 << 20
_LINK_PIECES = 4
_FIRST_PAUSE_SECONDS = 0.0001
_LONGEST_PAUSE_SECONDS = 0.001
_PRODUCTS = 16
_PRODUCT_SIDE = 4096
_SLACK_BYTES = 64_000_000
_HOST_SLACK_BYTES = 560_000_000
_LATER_HOST_SLACK_BYTES = 240_000_000
_WARM_BLOCKS = 256
_log = logging.getLogger("pipeload")


class Recorded:
    """A point in the order of a stream, or of a queue of commands."""

    def __init__(self, event: Any) -> None:
        """`event`, of torch, is recorded there."""
        self.event = event

    def synchronize(self) -> None:
        """See [Note: looked at, not slept for]."""
        pause = _FIRST_PAUSE_SECONDS
        while not self.event.query():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class TorchDevice:
    """A `Device`: one of torch's accelerators."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._runtime = _runtime(where)
        self._refused = False
        self._blocks = 0
        """That have computed so far, about."""
        self._rates: dict[Callable[[TorchDevice], float], float] = {}
        self._open()
        self.warm_up()
        self.code_bytes = self._find_code()
        """Library pages that computing needs, in bytes of host memory."""

    def _open(self) -> None:
        self._module: Any = torch.get_device_module(self.where)
        self._copies = torch.Stream(device=self.where)
        self._share_before: float | None = None

    @property
    def unified(self) -> bool:
        """It has memory of its own."""
        return False

    @property
    def lacks(self) -> frozenset[str]:
        """Computing may; holding it may not."""
        return frozenset()

    @property
    def caps(self) -> bool:
        """Whether the allocator can be given a limit."""
        return hasattr(self._module, "get_per_process_memory_fraction")

    @property
    def slack_bytes(self) -> int:
        """A guess: workspaces of further streams, and parts of segments that are begun."""
        return _SLACK_BYTES

    @property
    def host_slack_bytes(self) -> int:
        """Kernels are loaded, and attention is compiled, when they first run.

        Measured on an H200 (CUDA 13, torch 2.11): 320 MB in the first forward of a LLaMA, 160 MB in
        the first steps of decoding, 230 MB when attention was compiled anew for a longer cache; the
        last one comes with plain transformers, too, and only now and then. So that is what a
        process still takes on that has computed for a while.
        """
        return _HOST_SLACK_BYTES if self._blocks < _WARM_BLOCKS else _LATER_HOST_SLACK_BYTES

    def _find_code(self) -> int:
        """What comes back with computing once all library pages were given back, in bytes."""
        lower_floor()
        self.warm_up()
        return droppable_bytes()

    def warm_up(self) -> None:
        """What a block is made of, small: products of several and of one row, attention."""
        side = torch.ones((_WARM_UP_SIDE, _WARM_UP_SIDE), device=self.where, dtype=torch.float16)
        heads = side.view(1, 4, _WARM_UP_SIDE // 4, _WARM_UP_SIDE)[..., :64]
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        ((side @ side).sum() + (side[:1] @ side).sum() + attended.sum()).item()

    def fuses_attention(self, dtype: torch.dtype) -> bool:
        """Of NVIDIA's, those before Ampere (a T4) have no kernel in bf16: torch takes fp32 then."""
        if dtype != torch.bfloat16 or self.where.type != "cuda" or torch.version.hip:
            return True
        return bool(torch.cuda.get_device_capability(self.where) >= _AMPERE)

    def takes(self, nbytes: int) -> int:
        """See [Note: segments]."""
        return share_of(aligned(nbytes), _SEGMENTS, _OWN_STEP)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory on the device: torch's allocators align to at least `ALIGN`."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.where)

    def pin(self, address: int, nbytes: int) -> bool:
        """See [Note: locked memory of the exact size]."""
        if self._runtime is None or not nbytes:
            return False
        try:
            with torch.accelerator.device_index(self.where.index):
                status = int(self._runtime.cudaHostRegister(address, nbytes, 0))
        except (AttributeError, RuntimeError, TypeError) as error:
            status = -1
            _log.debug("the driver cannot lock memory: %r", error)
        if not status:
            return True
        self._drop_error()
        if not self._refused:
            self._refused = True
            _log.warning(
                "the driver refused to lock %s of host memory (error %d): copies to %s are slower. "
                "Raise the limit on locked memory (ulimit -l).",
                format_size(nbytes),
                status,
                self.where,
            )
        return False

    def unpin(self, address: int) -> None:
        """Nothing may be copied out of there any more."""
        with contextlib.suppress(Exception):  # at exit, the driver may be gone
            self.synchronize()
            with torch.accelerator.device_index(self.where.index):
                status = int(self._runtime.cudaHostUnregister(address))
            if status:
                self._drop_error()

    def copy(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event | None
    ) -> Event:
        """All copies are enqueued on one stream of their own."""
        # An object of this call: what entering it saves, for leaving it, lies in the object, and
        # dispatchers and readers of several models copy at once.
        one = self._copies
        stream = torch.Stream(
            stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type
        )
        if isinstance(after, Recorded):
            stream.wait_event(after.event)
        with stream:
            for to, values in pairs:
                to.copy_(values, non_blocking=True)
        return self._record(stream)

    def copy_now(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """On this thread's own stream, and waited for."""
        to.copy_(values)
        torch.accelerator.current_stream(self.where).synchronize()

    def computed(self) -> Event:
        """An event is recorded on this thread's stream."""
        self._blocks += 1
        return self._record(torch.accelerator.current_stream(self.where))

    def _record(self, stream: torch.Stream) -> Recorded:
        event = torch.Event(device=self.where)
        event.record(stream)
        return Recorded(event)

    def wait(self, event: Event) -> None:
        """This thread's stream waits; the thread itself does not."""
        assert isinstance(event, Recorded)  # noqa: S101 - `copy` made it
        torch.accelerator.current_stream(self.where).wait_event(event.event)

    def synchronize(self) -> None:
        """All streams of the device have run when this returns."""
        torch.accelerator.synchronize(self.where)

    def allocated_bytes(self) -> int:
        """The allocator counts what its tensors take."""
        return int(torch.accelerator.memory_allocated(self.where))

    def reserved_bytes(self) -> int:
        """The allocator counts what it holds, for tensors and for later."""
        return int(torch.accelerator.memory_reserved(self.where))

    def peak_bytes(self) -> int:
        """The allocator remembers the most that it held."""
        return int(torch.accelerator.max_memory_reserved(self.where))

    def forget_peak(self) -> None:
        """The allocator counts its most from now on."""
        torch.accelerator.reset_peak_memory_stats(self.where)

    def free_bytes(self) -> int:
        """By the driver's count: other processes have their share."""
        free, _ = torch.accelerator.get_memory_info(self.where)
        return int(free)

    def link_rate(self) -> float | None:
        """By a few copies of one piece."""
        return self._rate(_measure_link)

    def compute_rate(self) -> float | None:
        """By a few products with one weight."""
        return self._rate(_measure_products)

    def _rate(self, measure: Callable[[TorchDevice], float]) -> float | None:
        if measure not in self._rates:
            try:
                self._rates[measure] = measure(self)
            except torch.OutOfMemoryError:
                return None
        return self._rates[measure]

    def trim(self) -> None:
        """Only where memory was given back: it waits for the device."""
        torch.accelerator.empty_cache()

    def cap(self, nbytes: int | None) -> None:
        """By the allocator: it gives back what nobody uses before it refuses."""
        if not self.caps:
            return
        if self._share_before is None:
            self._share_before = float(self._module.get_per_process_memory_fraction(self.where))
        share = self._share_before
        if nbytes is not None:
            self.trim()
            _, total = torch.accelerator.get_memory_info(self.where)
            share = min(share, nbytes / total)
        self._module.set_per_process_memory_fraction(share, self.where)
        if nbytes is None:
            self._share_before = None  # the user may set another one

    def _drop_error(self) -> None:
        """See [Note: an error that stays]."""
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.where).add_(1)
                self.synchronize()


def share_of(nbytes: int, blocks: Sequence[tuple[int, int]], step: int) -> int:
    """What a tensor keeps from others, if all that share its block are of its size.

    Args:
        nbytes: of the tensor, as its allocator rounds it.
        blocks: the largest tensors, and the blocks that they are cut from, in bytes; ascending.
        step: larger ones get a block of their own, a multiple of this.
    """
    for largest, block in blocks:
        if nbytes <= largest:
            return block // (block // nbytes) if nbytes else 0
    return nbytes + -nbytes % step


def _measure_link(device: TorchDevice) -> float:
    arena = Arena(_LINK_PIECE_BYTES, device=torch.device("cpu"), huge=True)
    values = arena.tensor(0, "U8", (arena.nbytes,), arena.nbytes)
    values.zero_()
    memory = device.allocate(arena.nbytes)
    pinned = device.pin(arena.address, arena.nbytes)
    try:
        device.copy([(memory, values)], None)
        device.synchronize()
        started = time.perf_counter()
        for _ in range(_LINK_PIECES):
            device.copy([(memory, values)], None)
        device.synchronize()
        seconds = time.perf_counter() - started
    finally:
        if pinned:
            device.unpin(arena.address)
    return _LINK_PIECES * arena.nbytes / seconds


def _measure_products(device: TorchDevice) -> float:
    side = _PRODUCT_SIDE
    weights = device.allocate(2 * side * side).view(torch.float16).view(side, side).fill_(1)
    for _ in range(2):
        device.synchronize()
        started = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.nn.functional.linear(weights[:1], weights)
        device.synchronize()
    return _PRODUCTS * weights.nbytes / (time.perf_counter() - started)


def _runtime(where: torch.device) -> Any:
    """The driver's calls that torch shows; None where it shows none."""
    if where.type != "cuda":
        return None
    try:
        return torch.cuda.cudart()
    except (RuntimeError, AttributeError) as error:
        _log.debug("no runtime to lock memory with: %r", error)
        return None
