"""from_pretrained, plan and handle: where the checkpoint's tower and the model's tower meet."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers

from pipeload import _transformers
from pipeload._accountant import ACCOUNTANT
from pipeload._assembly import Assembly
from pipeload._build import Build, Options, make_plan
from pipeload._checkpoint import check_folder
from pipeload._handle import Handle
from pipeload._memory import keep_few_kernels, parse_limit, return_freed_memory
from pipeload._pass_needs import PassNeeds
from pipeload._probe import probe_usage
from pipeload._reader import IO_MODES
from pipeload._reserve import PassHint, reserve_bytes
from pipeload._sites import Divider
from pipeload.errors import MemoryLimitError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from pipeload._plan import Plan

_MAX_READERS = 64
_FEW_CORES = 4
_PRESSURES = ("off", "auto")


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
    pressure: str = "off",
    auto_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model whose decoder layers are streamed from disk while it runs.

    Args:
        pretrained: a folder or a hub id, as for transformers.
        *args: passed on to the library's `from_pretrained`.
        memory_limit: what the whole process may hold while the model runs: bytes, "4GB" (10^9),
            "4GiB", or "50%" of the least of control group, available and physical memory. "auto"
            takes nine tenths of that, or the limit of a model that streams in this process already:
            all share one.
        tokens: longest sequence (prompt and answer, in tokens) to keep memory free for. Longer ones
            run as well, with fewer weights resident, as long as they fit at all.
        batch: sequences at once to keep memory free for.
        io_mode: "direct" reads past the page cache, "buffered" through it, "uncached" through it
            and drops what was read; "auto" takes the page cache when everything streamed fits in
            it.
        readers: threads that read at once; four when None, two when weights are cast.
        pressure: with "auto", weights are given back when the process's control groups have no more
            room or it waits for memory, before the kernel has to act; "off" looks at `memory_limit`
            alone.
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
    if pressure not in _PRESSURES:
        raise OptionError(f"pressure={pressure!r} is unknown. Choose one of 'off', 'auto'.")
    ACCOUNTANT.check_limit(options.memory_limit)
    _check_folder(pretrained, kwargs)
    _advise_openmp()
    built: list[Assembly] = []

    def stream(pending: _transformers.PendingLoad) -> Any:
        needs = PassNeeds(pending.model, pending.model.config)
        hint = PassHint(tokens, batch)
        build = _plan_beside_others(partial(_plan, pending, needs, hint, options))
        built.append(Assembly(pending, build, needs, hint, pressure=pressure == "auto"))
        return pending.load_rest(build.parts.taken)

    with _transformers.take_over_loading(stream):
        result = (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
            pretrained, *args, **kwargs
        )
    if not built:
        raise _nothing_loaded(pretrained, auto_class)
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
        needs = PassNeeds(pending.model, pending.model.config)
        raise _Planned(_plan(pending, needs, PassHint(tokens, batch), options).plan)

    try:
        with _transformers.take_over_loading(stop):
            (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
                pretrained, *args, **kwargs
            )
    except _Planned as planned:
        return planned.plan
    raise _nothing_loaded(pretrained, auto_class)


def smallest_limit(
    pretrained: str | os.PathLike[str],
    *args: Any,
    tokens: int = 256,
    batch: int = 1,
    **kwargs: Any,
) -> int:
    """The smallest `memory_limit`, in bytes, with which `from_pretrained` works in this process.

    Args:
        pretrained: a folder or a hub id.
        *args: as for `from_pretrained`.
        tokens: longest sequence, prompt and answer, in tokens.
        batch: sequences at once.
        **kwargs: as for `from_pretrained`.

    Raises:
        CheckpointError: as for `from_pretrained`.
        UnsupportedModelError: as for `from_pretrained`.
        OptionError: as for `from_pretrained`.
    """
    try:
        made = plan(pretrained, *args, memory_limit=1, tokens=tokens, batch=batch, **kwargs)
    except MemoryLimitError as error:
        return error.smallest_limit
    return made.smallest_limit


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


def _nothing_loaded(pretrained: object, auto_class: type[Any] | None) -> OptionError:
    name = (auto_class or transformers.AutoModelForCausalLM).__name__
    return OptionError(
        f"{name}.from_pretrained loaded no checkpoint from {str(pretrained)!r}, so there is "
        "nothing to stream. Pass a model class as auto_class=."
    )


def _plan_beside_others(make: Callable[[], Build]) -> Build:
    """A plan for a model that is really to be loaded: others give back what is over their share."""
    for _ in range(2):  # first what it cannot do without, then its share of the rest
        if not ACCOUNTANT.clients:
            break
        try:
            build = make()
            wants = build.residency.smallest, build.residency.everything
            given = ACCOUNTANT.make_room(wants, build.plan.resident - build.plan.pinned_bytes)
        except MemoryLimitError as error:
            short = error.smallest_limit - error.limit
            given = ACCOUNTANT.make_room((short, short), 0)
        if not given:
            break
    return make()


def _plan(
    pending: _transformers.PendingLoad, needs: PassNeeds, hint: PassHint, options: Options
) -> Build:
    return_freed_memory()
    keep_few_kernels()
    model = pending.model
    divider = Divider(model, pending.weights(), model.all_tied_weights_keys or {})
    reserve = reserve_bytes(needs, hint, options.memory_limit)

    def touched() -> frozenset[str] | None:
        usage = probe_usage(model)
        if usage is None:
            return None
        ran = frozenset(usage.executed)
        # Nothing was learnt about modules that did not run.
        idle = (n for n, _ in model.named_parameters() if n.rpartition(".")[0] not in ran)
        return usage.touched_outside.union(idle)

    return make_plan(divider, touched, pending.checkpoint.files, reserve, options)


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
        if not _is_whole(value) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1.")
    if readers is not None and not (_is_whole(readers) and 1 <= readers <= _MAX_READERS):
        raise OptionError(
            f"readers={readers!r} must be a whole number from 1 to {_MAX_READERS}, or None."
        )
    if io_mode not in IO_MODES:
        raise OptionError(f"io_mode={io_mode!r} is unknown. Choose one of {', '.join(IO_MODES)}.")
    shared = ACCOUNTANT.limit if memory_limit == "auto" and ACCOUNTANT.clients else None
    return Options(shared or parse_limit(memory_limit), io_mode, readers, disk_rate)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_folder(pretrained: str | os.PathLike[str], kwargs: Mapping[str, Any]) -> None:
    """Look at a local folder first; hub ids are the library's to resolve."""
    if pretrained is None or kwargs.get("state_dict") is not None:
        raise OptionError(
            "state_dict= cannot be streamed: its weights are in memory already. Pass a checkpoint."
        )
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
            "several times faster: idle compute threads then leave the cores to the readers. "
            "Set it before Python starts.",
            stacklevel=3,
        )
