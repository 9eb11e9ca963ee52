"""The way back from a streaming model to a plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeload.budget import limit_errors
from pipeload.budget.model_parts import transient_bytes
from pipeload.checkpoint.reader_threads import run_jobs
from pipeload.errors import UnsupportedOperationError
from pipeload.system.memory import rss_bytes
from pipeload.weights.arena import DTYPES
from pipeload.weights.layout import lay_out
from pipeload.weights.mapped import MappedFiles
from pipeload.weights.placement import make_scratch, scratch_bytes
from pipeload_hooks import Binding, bind, is_placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from pipeload.engine.session import Session
    from pipeload.weights.layout import Layout, Weight
    from pipeload.weights.placement import Place
    from pipeload_hooks import Companion


_CHUNK_BYTES = 16 << 20
"""The most that one read call asks for."""


class Restorer:
    """Puts real weights back into a model's parameters."""

    def __init__(
        self,
        make: Callable[[Layout], Place],
        session: Session,
        parameters: Mapping[str, tuple[nn.Parameter, Weight]],
        companions: Mapping[str, Sequence[Companion]],
    ) -> None:
        """`parameters` are all that pipeload fills, by name, with where their values come from.

        `make` gives a layout its memory; `companions` are what goes with those that are quantised.
        """
        self._make = make
        self._session = session
        self._parameters = parameters
        self._companions = companions
        self._versions = {name: p._version for name, (p, _) in parameters.items()}  # noqa: SLF001

    def __call__(self, _model: nn.Module) -> None:
        """Nothing changes when this raises.

        Raises:
            MemoryLimitError: what cannot be mapped does not fit the limit.
            CheckpointChangedError: a file was changed; its weights would be others.
            ReadError: the disk failed.
            UnsupportedOperationError: a forward pass is running.
        """
        if self._session.passes.busy:
            raise UnsupportedOperationError(
                "remove() was called while a forward pass is running. Let it end first."
            )
        self._session.passes.come_to_rest()
        self._session.files.check_unchanged()
        with torch.inference_mode(False):  # else parameters would be inference tensors for good
            made = self._make_converted()
            made.update(self._map_raw())
            made.update(self._edited())
        parameters = {name: parameter for name, (parameter, _) in self._parameters.items()}
        bind(Binding(parameters, self._companions).pair(made))

    def _edited(self) -> dict[str, torch.Tensor]:
        """What the model itself has changed in place, as it would have on a plain one."""
        return {
            name: parameter.data
            for name, (parameter, _) in self._parameters.items()
            if parameter._version != self._versions[name]  # noqa: SLF001
            and not is_placeholder(parameter)
        }

    def _make_converted(self) -> dict[str, torch.Tensor]:
        """Copies of the streamed weights that the file does not hold as they are."""
        # What is, not what is planned: a unit that was in use then has kept its parts.
        plans = [unit.plan for unit in self._session.prefetcher.units]
        need = sum(w.nbytes for plan in plans for w in plan.streamed.weights if not w.raw)
        experts = self._session.experts
        # Those that the files do not hold as they are; the others are mapped.
        stacked = {
            seat.layer: [name for name in seat.parameters if not self._parameters[name][1].raw]
            for seat in experts.seats
        }
        need += sum(experts.missing_bytes(layer) for layer, names in stacked.items() if names)
        groups: dict[str, list[Weight]] = {}
        for weight in self._absent():
            groups.setdefault(weight.group or weight.name, []).append(weight)
        absent = [lay_out(weights) for weights in groups.values()]
        need += sum(weight.nbytes for layout in absent for weight in layout.weights)
        need += max(map(_making_bytes, absent), default=0)
        self._check_room(need, others=bool(absent))
        made = self._fill_tables()
        for layout in absent:
            made.update(self._read_absent(layout))
        for layer, names in stacked.items():
            made.update(experts.have_all(layer, names))
        for index, plan in enumerate(plans):
            passing = {weight.name for weight in plan.streamed.weights}
            weights = [w for w in (*plan.resident_weights, *plan.streamed.weights) if not w.raw]
            if not weights:
                continue
            with self._session.streamer.borrowed(index) as views:
                for weight in weights:
                    view = views[weight.name]
                    if weight.whole in groups:
                        continue  # it has been read as a whole
                    if weight.whole is not None:
                        whole = made.setdefault(weight.whole, self._empty(weight.whole))
                        whole[weight.first_row : weight.first_row + view.shape[0]].copy_(view)
                    else:
                        made[weight.name] = view.clone() if weight.name in passing else view
        return made

    def _check_room(self, need: int, *, others: bool) -> None:
        """`others`: whether it is also for what other ranks had, which may be lost.

        Raises:
            MemoryLimitError: there is too little.
        """
        limit, held = self._session.governor.plan.memory_limit, rss_bytes()
        if not need or held + need <= limit:
            return
        if others:
            raise limit_errors.removal_on_ranks_too_large(limit, need, held)
        raise limit_errors.removal_too_large(limit, need, held)

    def _absent(self) -> list[Weight]:
        """What was never here, or some rows of it, and files do not hold as it is."""
        seats = self._session.streamer.seats
        shared = [seat.whole for seat in seats if seat.whole is not None and seat.partly]
        return [weight for weight in (*self._session.away, *shared) if not weight.raw]

    def _read_absent(self, layout: Layout) -> dict[str, torch.Tensor]:
        place = self._make(layout)
        scratch = make_scratch(1) if layout.casts else [None]
        for jobs in (place.read_jobs(_CHUNK_BYTES), place.convert_jobs()):
            run_jobs(jobs, scratch, self._session.files.stalls)
        return {weight.name: place.views[weight.name].clone() for weight in layout.weights}

    def _fill_tables(self) -> dict[str, torch.Tensor]:
        """Tables that files do not hold as they are, whole."""
        made: dict[str, torch.Tensor] = {}
        for table in self._session.streamer.tables:
            (name,) = table.parameters
            if not self._parameters[name][1].raw:
                table.keep()
                made[name] = table.table.view
        return made

    def _empty(self, name: str) -> torch.Tensor:
        parameter, _ = self._parameters[name]
        return torch.empty(parameter.shape, dtype=parameter.dtype)

    def _map_raw(self) -> dict[str, torch.Tensor]:
        """Lazily mapped tensors for everything that is in the file as it is."""
        by_file: dict[Path, list[Weight]] = {}
        for _, weight in self._parameters.values():
            if weight.raw:
                by_file.setdefault(weight.sources[0].file, []).append(weight)
        files = self._session.files
        maps = MappedFiles({file: files.reopen_name(file) for file in by_file}, files.stalls)
        return {
            weight.name: maps.tensor(
                file, weight.sources[0].start, DTYPES[weight.dtype], weight.shape
            )
            for file, weights in by_file.items()
            for weight in weights
        }


def _making_bytes(layout: Layout) -> int:
    """What making these weights takes, beside the copies of them that stay."""
    scratch = scratch_bytes(1) if layout.casts else 0
    made = (transient_bytes(conversion.weights) for conversion in layout.conversions)
    return layout.nbytes + scratch + max(made, default=0)
