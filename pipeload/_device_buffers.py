"""Buffers and places on a device: see [Note: three tiers] in _device.py."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from pipeload._arena import DTYPES, Arena, Region
from pipeload._device import aligned
from pipeload._layout import Cast, Layout, ceil_page, lay_out
from pipeload._placement import CAST_CHUNK_BYTES, Convert, Placement, read_into, scratch_of
from pipeload.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeload._checkpoint import TensorEntry
    from pipeload._device import Device, Event
    from pipeload._layout import Weight
    from pipeload._plan import UnitPlan
    from pipeload._reader import FileSet
    from pipeload._reader_pool import Work

_CPU = torch.device("cpu")


def device_bytes(layout: Layout) -> int:
    """What a layout's weights take on a device."""
    return sum(aligned(weight.nbytes) for weight in layout.weights)


class SlotSize:
    """What a buffer has to hold, in bytes: the governor says, the dispatcher's thread looks."""

    def __init__(self, units: Sequence[UnitPlan]) -> None:
        self.host = self.device = 0
        self.follow(units)

    def follow(self, units: Sequence[UnitPlan]) -> None:
        """Any of these may come."""
        self.host = max((u.streamed.nbytes for u in units if not u.hosted), default=0)
        self.device = max(device_bytes(unit.streamed) for unit in units)


class DeviceSlot:
    """One buffer: staging in host memory, and memory on the device for the same unit.

    [Note: buffers of another size] Memory of a device cannot be given back in part. So when the
    size changes, both are made anew as soon as the next unit comes; every unit must then have
    another plan, so that no prepared view of the old memory is used again.
    """

    def __init__(self, device: Device, size: SlotSize) -> None:
        self.device, self._size = device, size
        self._arena: Arena | None = None
        self._memory: torch.Tensor | None = None
        self.locked = True
        """Whether the staging is locked in its place; it was not where the last one was refused."""
        self.copied_bytes = 0
        """All that was copied into the device memory."""
        # A copy that nobody waited for must not land in memory that is somebody else's by then.
        settle = weakref.finalize(self, _settle, device)
        settle.atexit = False
        self.copied: Event | None = None
        """The last copy out of the staging."""
        self.computed: Event | None = None
        """The last computing with the device memory."""

    @property
    def device_bytes(self) -> int:
        """Bytes that it takes on the device."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def host_bytes(self) -> int:
        """Bytes of the staging."""
        return 0 if self._arena is None else self._arena.nbytes

    def memory(self, layout: Layout) -> torch.Tensor:
        """Memory on the device for a unit. Nobody uses the buffer."""
        wanted = max(device_bytes(layout), self._size.device)
        if self._memory is not None and self.device_bytes != wanted:
            self._release()
        if self._memory is None:
            self._memory = self.device.allocate(wanted)
            # Whoever had that memory before may still be computing with it.
            self.computed = self.device.computed()
        return self._memory

    def staging(self, layout: Layout) -> Region:
        """Host memory for a unit. Nobody uses the buffer."""
        wanted = ceil_page(max(layout.nbytes, self._size.host))
        if self._arena is not None and self._arena.nbytes != wanted:
            self._release_staging()
        if self._arena is None:
            self._arena = Arena(wanted, device=_CPU, huge=True)
            self.locked = lock(self._arena, self.device)
        return Region(self._arena, 0, wanted)

    def discard(self, start: int = 0) -> None:
        """A unit takes no more than `start` bytes from now on."""
        if self.host_bytes > ceil_page(start):
            self._release_staging()
        if self.device_bytes > max(start, self._size.device):
            self._release()

    def wait_until_free(self) -> None:
        """Return once nothing is copied out of the staging any more."""
        if self.copied is not None:
            self.copied.synchronize()

    def _release(self) -> None:
        self.device.synchronize()
        self._memory = None
        self.device.trim()

    def _release_staging(self) -> None:
        self.device.synchronize()
        self._arena = self.copied = None


def lock(arena: Arena, device: Device) -> bool:
    """Lock it in its place for as long as it lives; False if the driver refuses."""
    locked = device.pin(arena.address, arena.nbytes)
    if locked:
        # With the arena: prepared views may keep it for longer than whoever made it.
        unpin = weakref.finalize(arena, device.unpin, arena.address)
        unpin.atexit = False
    return locked


def _settle(device: Device) -> None:
    with contextlib.suppress(Exception):  # the driver may be gone
        device.synchronize()


class DevicePlacement:
    """A unit's streamed part in a buffer: read into the staging, then copied."""

    def __init__(self, layout: Layout, slot: DeviceSlot, files: FileSet, convert: Convert) -> None:
        self.slot = slot
        self.nbytes = layout.nbytes
        self._layout, self._files, self._convert = layout, files, convert
        self._host: Placement | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.views: dict[str, torch.Tensor] = {}
        """Nothing before it was read once."""

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """Reads into the staging, each behind the copy that still comes out of it."""
        try:
            host = self._prepare()
        except Exception as error:  # no memory; whoever waits for the unit is told
            return [fail(self.slot.device, error)]
        return [partial(self._read, job) for job in host.read_jobs(chunk_bytes)]

    def _prepare(self) -> Placement:
        if self._host is None:
            staging = self.slot.staging(self._layout)
            host = Placement(self._layout, staging, self._files, self._convert)
            self._show(host, staging.arena)
            self._host = host
        return self._host

    def _show(self, host: Placement, arena: Arena) -> None:
        # In the host's order: neighbours there are neighbours here, and go in one copy.
        weights = sorted(self._layout.weights, key=lambda w: host.views[w.name].data_ptr())
        self.views, places = show(weights, self.slot.memory(self._layout))
        self._pairs = copies(places, host.views, arena)

    @property
    def quick(self) -> bool:
        """A copy out of locked memory is only enqueued."""
        return self.slot.locked and not self._layout.conversions

    def convert_jobs(self) -> list[Work]:
        """The conversions and, behind them, the copy."""
        return [self._copy]

    def drop(self) -> None:
        """The memory is the buffer's."""

    def _read(self, job: Work, scratch: Region | None) -> int:
        self.slot.wait_until_free()
        return job(scratch)

    def _convert_all(self, scratch: Region | None) -> None:
        for job in self._prepare().convert_jobs():
            job(scratch)

    def _copy(self, scratch: Region | None) -> int:
        self._convert_all(scratch)
        slot = self.slot
        try:
            slot.copied = slot.device.copy(self._pairs, slot.computed)
        except Exception as error:
            _fail(slot.device, error)
        slot.copied_bytes += sum(values.numel() for _, values in self._pairs)
        return 0


class DevicePlace:
    """Weights that stay on the device: they get there in pieces, through the readers' scratch."""

    quick = False

    def __init__(self, layout: Layout, device: Device, files: FileSet, convert: Convert) -> None:
        self.nbytes = layout.nbytes
        self._layout, self._device = layout, device
        self._files, self._convert = files, convert
        self.views: dict[str, torch.Tensor] = {}
        """Nothing before they were read."""
        self._places: dict[str, torch.Tensor] = {}
        self._made: Placement | None = None

    def read_jobs(self, chunk_bytes: int) -> list[Work]:
        """Reads of at most a scratch region's size; what is converted is read as a whole."""
        try:
            if not self._places:
                memory = self._device.allocate(device_bytes(self._layout))
                self.views, self._places = show(self._layout.weights, memory)
        except Exception as error:  # no memory; whoever waits for the unit is told
            return [fail(self._device, error)]
        jobs = [job for weight, _ in self._layout.raw for job in self._raw_jobs(weight)]
        jobs += [job for cast in self._layout.casts for job in self._cast_jobs(cast)]
        converted = [w for made in self._layout.conversions for w in made.weights]
        if converted:
            layout = lay_out(converted)
            region = Arena(layout.nbytes, device=_CPU, huge=False).take(layout.nbytes)
            self._made = Placement(layout, region, self._files, self._convert)
            jobs += self._made.read_jobs(chunk_bytes)
        return jobs

    def convert_jobs(self) -> list[Work]:
        """What is converted is copied after it."""
        return [] if self._made is None else [self._copy_converted]

    def drop(self) -> None:
        """The memory goes when nobody shows it any more; nobody computes with it then."""
        self._made = None
        if self._places:
            self._device.synchronize()
            self.views, self._places = {}, {}

    def _copy_converted(self, scratch: Region | None) -> int:
        made, self._made = self._made, None
        assert made is not None  # noqa: S101 - only then there is such a job
        for job in made.convert_jobs():
            job(scratch)
        for name, view in made.views.items():
            self._device.copy_now(self._places[name], flat(view))
        return 0

    def _raw_jobs(self, weight: Weight) -> Iterator[Work]:
        (source,) = weight.sources
        for start in range(0, weight.nbytes, CAST_CHUNK_BYTES):
            stop = min(start + CAST_CHUNK_BYTES, weight.nbytes)
            into = self._places[weight.name][start:stop]
            yield partial(self._read_raw, source, start, into)

    def _read_raw(
        self, source: TensorEntry, start: int, into: torch.Tensor, scratch: Region | None
    ) -> int:
        count, stored = self._fetch(source, start, into.numel(), scratch)
        self._device.copy_now(into, stored)
        return count

    def _cast_jobs(self, cast: Cast) -> Iterator[Work]:
        assert cast.weight.repacked is None  # noqa: S101 - orders are the processor's
        (source,) = cast.weight.sources
        item, made = DTYPES[source.dtype].itemsize, DTYPES[cast.weight.dtype].itemsize
        elements, step = cast.weight.nbytes // made, CAST_CHUNK_BYTES // item
        for start in range(0, elements, step):
            stop = min(start + step, elements)
            into = self._places[cast.weight.name][start * made : stop * made]
            yield partial(self._read_cast, cast, start * item, (stop - start) * item, into)

    def _read_cast(
        self, cast: Cast, start: int, nbytes: int, into: torch.Tensor, scratch: Region | None
    ) -> int:
        (source,) = cast.weight.sources
        count, stored = self._fetch(source, start, nbytes, scratch)
        # A copy at an address of its own: the stored item may lie anywhere.
        values = stored.clone().view(DTYPES[source.dtype]).to(DTYPES[cast.weight.dtype])
        self._device.copy_now(into, flat(values))
        return count

    def _fetch(
        self, source: TensorEntry, start: int, nbytes: int, scratch: Region | None
    ) -> tuple[int, torch.Tensor]:
        """Bytes read, and so many bytes of a tensor from `start` on, in the scratch."""
        scratch = scratch_of(scratch)
        count, at = read_into(scratch, self._files, source, start, start + nbytes)
        return count, scratch.tensor(at, "U8", (nbytes,), nbytes)


def fail(device: Device, error: Exception) -> Work:
    """A job that says so."""
    return partial(_fail, device, error)


def _fail(device: Device, error: Exception, _scratch: object = None) -> NoReturn:
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
