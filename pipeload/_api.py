"""from_pretrained, plan and handle: where the checkpoint's tower and the model's tower meet."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from pipeload import _guards, _transformers
from pipeload._arena import DTYPES, Arena, Region
from pipeload._build import READER_CHOICES, Options, Parts, divide, make_plan
from pipeload._checkpoint import check_folder
from pipeload._handle import Handle
from pipeload._layout import Layout, Weight, lay_out
from pipeload._memory import auto_limit_bytes, return_freed_memory
from pipeload._placement import SCRATCH_BYTES, Placement
from pipeload._prefetcher import Prefetcher, Unit
from pipeload._reader import IO_MODES, FileSet, PinnedRead, Work, run_jobs
from pipeload._reserve import PassHint, reserve_bytes
from pipeload._restore import Restorer
from pipeload._sizes import parse_size
from pipeload._streamer import Streamer
from pipeload.errors import OptionError
from pipeload_hooks import placeholder, set_parameter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload._plan import Plan

CHUNK_BYTES = 16 << 20
"""The most one read call asks for."""
_PROBE_BYTES = 96 << 20
# The fewest readers within a tenth of the best rate are taken.
_GOOD_ENOUGH = 0.9
_MAX_READERS = 64
_FEW_CORES = 4


class _Planned(Exception):  # noqa: N818 - carries a result out of the library's loader
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan


def from_pretrained(
    pretrained: str | os.PathLike[str],
    *args: Any,
    memory_limit: int | str = "auto",
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    auto_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model whose decoder layers are streamed from disk while it runs.

    Args:
        pretrained: a folder or a hub id, as for transformers.
        *args: passed on to the library's `from_pretrained`.
        memory_limit: what the whole process may hold while the model runs: bytes, or "4GB" (10^9),
        "4GiB".
            "auto" takes the least of control group, available and physical memory, less a tenth.
        tokens: longest sequence (prompt and answer, in tokens) to keep memory free for.
        batch: sequences at once to keep memory free for.
        io_mode: "direct" reads past the page cache, "buffered" through it, "uncached" through it
        and drops
            what was read; "auto" takes the page cache when everything streamed fits in it.
        readers: threads that read at once; measured when None.
        auto_class: the class whose `from_pretrained` is called. AutoModelForCausalLM when None.
        **kwargs: passed on to the library's `from_pretrained`.

    Returns:
        The library's own model (with `output_loading_info=True`, the library's pair).
        `model.pipeload` is its handle.

    Raises:
        MemoryLimitError: before any weight is read; says the smallest limit that works.
        CheckpointError: a file is missing, malformed or pickled.
        UnsupportedModelError: the model cannot be streamed exactly.
        OptionError: an option means nothing.
        ReadError: the disk failed.
    """
    options = _options(memory_limit, tokens, batch, io_mode, readers, disk_rate=None)
    _check_folder(pretrained, kwargs)
    _advise_openmp()
    built: list[_Built] = []

    def stream(pending: _transformers.PendingLoad) -> Any:
        parts, plan = _plan(pending, PassHint(tokens, batch), options)
        return_freed_memory()
        built.append(_Built(pending, parts, plan, options))
        return pending.load_rest(parts.taken)

    with _transformers.take_over_loading(stream):
        result = (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
            pretrained, *args, **kwargs
        )
    built[0].finish(result[0] if isinstance(result, tuple) else result)
    return result


def plan(
    pretrained: str | os.PathLike[str],
    *args: Any,
    memory_limit: int | str = "auto",
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    disk_rate: float | None = None,
    auto_class: type[Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """What `from_pretrained` with the same arguments would do. Reads headers only, no weights.

    Args:
        pretrained: a folder or a hub id.
        *args: as for `from_pretrained`.
        memory_limit: as for `from_pretrained`.
        tokens: as for `from_pretrained`.
        batch: as for `from_pretrained`.
        io_mode: as for `from_pretrained`.
        readers: as for `from_pretrained`.
        disk_rate: bytes per second to predict `seconds_per_pass` with.
        auto_class: as for `from_pretrained`.
        **kwargs: as for `from_pretrained`.

    Raises:
        MemoryLimitError: the limit is too small; its `smallest_limit` is the least that works.
        CheckpointError: as for `from_pretrained`.
        UnsupportedModelError: as for `from_pretrained`.
        OptionError: as for `from_pretrained`.
    """
    options = _options(memory_limit, tokens, batch, io_mode, readers, disk_rate=disk_rate)
    _check_folder(pretrained, kwargs)

    def stop(pending: _transformers.PendingLoad) -> Any:
        raise _Planned(_plan(pending, PassHint(tokens, batch), options)[1])

    try:
        with _transformers.take_over_loading(stop):
            (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
                pretrained, *args, **kwargs
            )
    except _Planned as planned:
        return planned.plan
    raise OptionError(
        f"{pretrained!r} was loaded without a checkpoint, so there is nothing to plan."
    )


def handle(model: nn.Module) -> Handle:
    """The handle of a streamed model, also when it is wrapped in another module (PEFT).

    Raises:
        OptionError: nothing in `model` is streamed.
    """
    for module in model.modules():
        found = module.__dict__.get("pipeload")
        if isinstance(found, Handle):
            return found
    raise OptionError(
        f"{type(model).__name__} is not streamed: load it with pipeload.from_pretrained."
    )


def _plan(
    pending: _transformers.PendingLoad, hint: PassHint, options: Options
) -> tuple[Parts, Plan]:
    model = pending.model
    tied = model.all_tied_weights_keys or {}
    parts = divide(model, pending.weights(), frozenset(tied) | frozenset(tied.values()))
    reserve = reserve_bytes(model, model.config, hint, options.memory_limit)
    return parts, make_plan(parts, pending.checkpoint.files, reserve, options)


class _Built:
    """A model between the library's loader and its first pass: weights there, hooks to come."""

    def __init__(
        self, pending: _transformers.PendingLoad, parts: Parts, plan: Plan, options: Options
    ) -> None:
        """Allocate the arena, read what is always resident, and start reading the first blocks.

        Raises:
            ReadError: the disk failed.
        """
        model = pending.model
        self._parts = parts
        pinned = lay_out(parts.pinned)
        files = FileSet(pending.checkpoint.files, plan.io_mode)
        arena = Arena(plan.resident + plan.buffers + plan.scratch_bytes, device=torch.device("cpu"))
        scratch = _scratch(arena, plan)
        convert = pending.converter()
        pinned_place = Placement(pinned, arena.take(pinned.nbytes).offset, arena, files, convert)
        count, read = _read_pinned(
            pinned_place.read_jobs(CHUNK_BYTES), pinned.read_bytes, scratch, fixed=options.readers
        )
        if not plan.scratch_bytes:
            scratch = [None] * count
        rate = read.rate if read.nbytes >= _PROBE_BYTES // 4 else options.disk_rate
        self.plan = replace(plan, readers=len(scratch), disk_rate=rate)
        self._filled = _set_parameters(model, parts, pinned_place)
        units = [_unit(unit, arena, files, convert) for unit in plan.units]
        slots = [arena.take(plan.slot_bytes) for _ in range(plan.slots)]
        prefetcher = Prefetcher(
            units,
            slots=slots,
            arena=arena,
            files=files,
            convert=convert,
            scratch=scratch,
            chunk_bytes=CHUNK_BYTES,
        )
        parameters = [(self._of(unit.resident), self._of(unit.streamed)) for unit in plan.units]
        self._streamer = Streamer(parts.blocks, parameters, prefetcher, files, read)

    def _of(self, layout: Layout) -> dict[str, nn.Parameter]:
        return {weight.name: self._filled[weight.name][0] for weight in layout.weights}

    def finish(self, model: Any) -> None:
        """Put hooks and guards on the loaded model and give it its handle."""
        blocks = self._parts.blocks
        modules = _transformers.pretrained_modules(model)
        self._streamer.attach(blocks, modules)
        undo = _guards.install(model, modules, [block.module for block in blocks])
        undo.append(_transformers.disable_auto_compile(model))
        undo.append(lambda: model.__dict__.pop("pipeload", None) and None)
        handle = Handle(
            model,
            self.plan,
            self._streamer,
            undo,
            Restorer(self.plan, self._streamer, self._filled),
        )
        object.__setattr__(model, "pipeload", handle)


def _set_parameters(
    model: nn.Module, parts: Parts, pinned: Placement
) -> Mapping[str, tuple[nn.Parameter, Weight]]:
    """Replace every meta parameter that is ours: pinned ones by values, others by placeholders."""
    originals = dict(model.named_parameters())
    filled: dict[str, tuple[nn.Parameter, Weight]] = {}
    streamed = [weight for spec in parts.specs for weight in spec.weights]
    for weight in (*parts.pinned, *streamed):
        data = pinned.views.get(weight.name)
        if data is None:
            data = placeholder(weight.shape, DTYPES[weight.dtype], torch.device("cpu"))
        parameter = set_parameter(
            model, weight.name, data, requires_grad=originals[weight.name].requires_grad
        )
        # The library initialises what lacks this mark.
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
        filled[weight.name] = (parameter, weight)
    return filled


def _unit(plan: Any, arena: Arena, files: FileSet, convert: Any) -> Unit:
    if not plan.resident.nbytes:
        return Unit(plan, None, loaded=True)
    place = arena.take(plan.resident.nbytes)
    return Unit(plan, Placement(plan.resident, place.offset, arena, files, convert), loaded=False)


def _scratch(arena: Arena, plan: Plan) -> list[Region | None]:
    if not plan.scratch_bytes:
        return [None] * plan.readers
    return [arena.take(SCRATCH_BYTES) for _ in range(plan.readers)]


def _read_pinned(
    jobs: list[Work], total: int, scratch: list[Region | None], fixed: int | None
) -> tuple[int, PinnedRead]:
    """Read what is always resident, and find out meanwhile how many readers this disk wants."""
    if fixed is not None or scratch[0] is not None or total < _PROBE_BYTES:
        return len(scratch), run_jobs(jobs, scratch)
    share = -(-len(jobs) // len(READER_CHOICES))
    trials = [
        (count, run_jobs(jobs[start * share : (start + 1) * share], [None] * count))
        for start, count in enumerate(READER_CHOICES)
    ]
    best = max(read.rate for _, read in trials)
    count, chosen = next(
        (count, read) for count, read in trials if read.rate >= _GOOD_ENOUGH * best
    )
    nbytes, reads = sum(read.nbytes for _, read in trials), sum(read.reads for _, read in trials)
    return count, PinnedRead(nbytes, reads, nbytes / chosen.rate)


def _options(
    memory_limit: int | str,
    tokens: int,
    batch: int,
    io_mode: str,
    readers: int | None,
    *,
    disk_rate: float | None,
) -> Options:
    for name, value in (("tokens", tokens), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1.")
    if readers is not None and (isinstance(readers, bool) or not 1 <= readers <= _MAX_READERS):
        raise OptionError(
            f"readers={readers!r} must be a whole number from 1 to {_MAX_READERS}, or None."
        )
    if io_mode not in IO_MODES:
        raise OptionError(f"io_mode={io_mode!r} is unknown. Choose one of {', '.join(IO_MODES)}.")
    limit = auto_limit_bytes() if memory_limit == "auto" else parse_size(memory_limit)
    return Options(limit, io_mode, readers, disk_rate)


def _check_folder(pretrained: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> None:
    """Look at a local folder first; hub ids are the library's to resolve."""
    folder = Path(pretrained) / (kwargs.get("subfolder") or "")
    if kwargs.get("gguf_file") is not None:
        raise OptionError(
            "gguf_file= cannot be streamed: its weights are unpacked in memory. Convert it to "
            "safetensors."
        )
    if folder.is_dir():
        check_folder(folder, variant=kwargs.get("variant"))


_advised = False


def _advise_openmp() -> None:
    """Say once that OpenMP's busy waiting takes the cores that reading needs."""
    global _advised  # noqa: PLW0603 - said once in a process
    cores = os.cpu_count() or 1
    if (
        not _advised
        and cores <= _FEW_CORES
        and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
    ):
        _advised = True
        warnings.warn(
            f"on {cores} cores, OMP_WAIT_POLICY=passive in the environment makes streaming "
            "several times faster: "
            "idle compute threads then leave the cores to the readers. Set it before Python "
            "starts.",
            stacklevel=3,
        )
