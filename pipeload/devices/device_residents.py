"""Weights that stay on a device, read straight to their place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeload.devices.weights_on_device import device_bytes, fail, flat, show
from pipeload.weights.arena import DTYPES, Arena
from pipeload.weights.cast_rows import CastRows
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import CAST_CHUNK_BYTES, Placement, read_into, scratch_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.checkpoint.file_reads import FileSet
    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.weights.arena import Region, Work
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Cast, Layout, Weight
    from pipeload.weights.placement import Convert

_CPU = torch.device("cpu")


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
            return self._prepare(chunk_bytes)
        except Exception as error:  # no memory; whoever waits for the unit is told
            return [fail(self._device, error)]

    def _prepare(self, chunk_bytes: int) -> list[Work]:
        if not self._places:
            memory = self._device.allocate(device_bytes(self._layout))
            self.views, self._places = show(self._layout.weights, memory)
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
        # Any of its rows by themselves, or, as here, any of its values. Orders are the processor's.
        repacked = cast.weight.repacked
        assert repacked is None or isinstance(repacked, CastRows)  # noqa: S101 - see above
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
