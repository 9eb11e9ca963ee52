"""The way back to a plain model on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.budget import limit_errors
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.devices.weights_on_device import flat
from pipeload.errors import UnsupportedOperationError
from pipeload.weights.layout import lay_out
from pipeload.weights.placement import CAST_CHUNK_BYTES, make_scratch
from pipeload_hooks import Binding, bind, is_placeholder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from pipeload.engine.backend import PlaceMaker
    from pipeload.engine.session import Session
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Weight
    from pipeload_hooks import Companion


class DeviceRestorer:
    """Puts real weights into a model's parameters, all of them on the device."""

    def __init__(
        self,
        device: Device,
        places: PlaceMaker,
        session: Session,
        parameters: Mapping[str, tuple[nn.Parameter, Weight]],
        companions: Mapping[str, Sequence[Companion]],
    ) -> None:
        """As for `Restorer`; `places` gives weights memory on the device."""
        self._device, self._places, self._session = device, places, session
        self._parameters, self._companions = parameters, companions

    def __call__(self, _model: nn.Module) -> None:
        """Nothing changes when this raises.

        Raises:
            MemoryLimitError: the whole model does not fit the device's limit.
            CheckpointChangedError: a file that is to be read was changed.
            ReadError: the disk failed, or does not answer, or the device has less memory.
            UnsupportedOperationError: a forward pass is running.
        """
        session = self._session
        if session.passes.busy:
            raise UnsupportedOperationError(
                "remove() was called while a forward pass is running. Let it end first."
            )
        session.passes.come_to_rest()
        gone = {
            name: weight
            for name, (parameter, weight) in self._parameters.items()
            if is_placeholder(parameter)
        }
        need = sum(weight.nbytes for weight in gone.values())
        limit, held = session.governor.plan.memory_limit, self._device.allocated_bytes()
        # The buffers go once the model is a plain one.
        if need and held + need > limit:
            raise limit_errors.removal_too_large(limit, need, held, str(self._device.where))
        if gone:
            session.files.check_unchanged()
        made = self._read([weight for weight in gone.values() if weight.group is None])
        made |= self._borrow({name for name, weight in gone.items() if weight.group is not None})
        parameters = {name: parameter for name, (parameter, _) in self._parameters.items()}
        bind(Binding(parameters, self._companions).pair(made))

    def _read(self, weights: Sequence[Weight]) -> dict[str, torch.Tensor]:
        """In pieces: a mapped file would count as host memory until all of it is read."""
        places = [self._places.make(lay_out([weight])) for weight in weights]
        jobs = [job for place in places for job in place.read_jobs(CAST_CHUNK_BYTES)]
        # Not the readers' own: they may be reading ahead.
        scratch = make_scratch(self._session.governor.plan.readers)
        run_jobs(jobs, scratch, self._session.files.stalls)
        return {name: view for place in places for name, view in place.views.items()}

    def _borrow(self, names: set[str]) -> dict[str, torch.Tensor]:
        """What is made together with others while it is read."""
        made: dict[str, torch.Tensor] = {}
        for index, unit in enumerate(self._session.prefetcher.units):
            here = {weight.name for weight in unit.plan.streamed.weights}
            here |= {weight.name for weight in unit.plan.resident_weights}
            if here := here & names:
                with self._session.streamer.borrowed(index) as views:
                    self._device.synchronize()  # the last copies
                    made.update((name, self._put(views[name])) for name in here)
        return made

    def _put(self, values: torch.Tensor) -> torch.Tensor:
        memory = self._device.allocate(values.numel() * values.element_size())
        self._device.copy_now(memory, flat(values))
        return memory.view(values.dtype).view(values.shape)
