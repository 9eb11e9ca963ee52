"""A model that is in memory becomes one that is streamed, from its checkpoint or a spilled copy.

Nothing about the model changes before everything that can be refused has been looked at: what its
weights are, whether they are the checkpoint's, whether the limit holds.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.budget.cut import NothingToStreamError
from pipeload.budget.pass_needs import PassNeeds
from pipeload.budget.twin_blocks import bare_memo
from pipeload.devices.device_backend import make_target
from pipeload.engine.assembly import Assembly
from pipeload.engine.handle import Handle
from pipeload.entry.live_model import Live, check_values, match, refuse_missing, tied_names
from pipeload.entry.loading import (
    assemble,
    attends,
    check_limits,
    finish,
    plan_model,
    plan_to_load,
    touched_of,
)
from pipeload.entry.sources import check_source
from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.hf import library, marks, takeover
from pipeload.hf.gguf import gguf_file_of
from pipeload.system.mappings import let_go, mappings_are_told, mappings_of
from pipeload.system.openmp_hint import advise_openmp

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from pipeload.budget.plan_options import Options
    from pipeload.entry.request import Request
    from pipeload.entry.spill import Spill
    from pipeload.hf.pending_load import PendingLoad

_log = logging.getLogger("pipeload")
_TENSORS = ("_parameters", "_buffers")
"""Where a module has its own."""


def wrap(
    model: nn.Module,
    request: Request,
    checkpoint: str | os.PathLike[str] | None,
    spill_dir: str | os.PathLike[str] | None,
    kwargs: Mapping[str, Any],
) -> None:
    """Stream `model` from now on. See `pipeload.wrap`."""
    inner = _library_model(model)
    _refuse(inner)
    check_limits(request)
    advise_openmp()
    pending = _open(inner, checkpoint, kwargs, request.options)
    meta = [name for name, parameter in inner.named_parameters() if parameter.is_meta]
    if meta:
        _fill(inner, meta, pending, request)
        return
    live = match(inner, pending)
    live, spill = check_values(live, pending, spill_dir, request.options.read_timeout)
    try:
        _stream(live, pending, request, spill, model)
    except BaseException as error:
        if spill is not None:
            spill.remove()
        elif isinstance(error, NothingToStreamError):
            refuse_missing(live, pending)
        raise


def _library_model(model: nn.Module) -> Any:
    """The library's own model: itself, or inside another one, as PEFT's."""
    found = library.pretrained_modules(model)
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model and holds none. Pass the model that "
            "from_pretrained returned."
        )
    return found[0]


def _refuse(model: nn.Module) -> None:
    name = type(model).__name__
    for module in model.modules():
        if isinstance(module.__dict__.get("pipeload"), Handle):
            raise OptionError(
                f"this {name} is streamed already. Change its limit with "
                "pipeload.handle(model).set_memory_limit()."
            )
        if marks.is_dispatched(module):
            raise OptionError(
                f"this {name} was spread over devices by accelerate, which moves its weights "
                "itself. Load it without device_map= or offload_folder=, then wrap it."
            )
    # What a GGUF file was made into is floats, if it is of a kind that is streamed.
    floats = bool(gguf_file_of(getattr(model, "config", None)))
    if getattr(model, "hf_quantizer", None) is not None and not floats:
        raise UnsupportedModelError(
            f"this {name} is quantised, and only float weights can be wrapped (bf16, fp16, fp32). "
            "Load it with pipeload.from_pretrained."
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if others := devices - {"cpu", "meta"}:
        raise OptionError(
            f"this {name} has weights on {', '.join(sorted(others))}; they are streamed "
            "from disk. Load it without device_map= and without .to(), then wrap it; device= says "
            "where it is to compute."
        )


def _open(
    model: Any,
    checkpoint: str | os.PathLike[str] | None,
    kwargs: Mapping[str, Any],
    wanted: Options,
) -> PendingLoad | None:
    """The model's checkpoint, None for a model that was made without one."""
    source = checkpoint if checkpoint is not None else getattr(model, "name_or_path", "")
    if not str(source):
        return None
    named = gguf_file_of(model.config) if checkpoint is None else {}
    options = check_source(source, named | dict(kwargs), wanted.device)
    options.pop("config", None)  # the model has it
    commit = marks.commit_of(model.config)
    if checkpoint is None and commit and not Path(source).is_dir():
        options.setdefault("revision", commit)
    config = copy.deepcopy(model.config)
    if "gguf_file" in options and getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the library makes it anew, and stumbles over its own
    if getattr(config, "quantization_config", None) is None:
        quantised = takeover.quantisation_of(source, options)
        if quantised is not None:
            config.quantization_config = quantised
    load = partial(type(model).from_pretrained, source, config=config, **options)
    return takeover.peek(load, wanted.device, wanted.read_timeout)


def _stream(
    live: Live,
    pending: PendingLoad | None,
    request: Request,
    spill: Spill | None,
    root: nn.Module,
) -> None:
    model = live.model
    let_go(live.files)
    needs = PassNeeds(model, model.config, **attends(request.options.device, model))
    plan = partial(
        plan_model,
        model,
        live.weights,
        tied_names(model),
        touched_of(model, _on_meta(model)),
        live.files,
        needs=needs,
        request=request,
        leaving=_leaving_bytes(model, live.files),
    )
    build = plan_to_load(plan, request.options.device)
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.modules()]  # noqa: SLF001
    assembly: Assembly | None = None
    try:
        assembly = Assembly(
            live, build, make_target(build), needs, request.hint, pressure=request.pressure
        )
        if spill is not None:
            assembly.at_removal(spill.remove)
        finish(assembly, model, root)
    except BaseException:  # an interrupt as well: the model is what it was
        if assembly is not None:
            assembly.give_up()
        for parameter, data in before:
            parameter.data = data
        for own, values in buffers:
            own.update(values)
        raise
    del before, buffers
    let_go(live.files)  # now that nothing shows them
    if spill is not None:
        spill.hide()


def _on_meta(model: nn.Module) -> nn.Module | None:
    """A copy of the model, adapters and all, without weights or hooks; None if it cannot be."""
    try:
        return copy.deepcopy(model, bare_memo(model))
    except Exception as error:  # attributes may be anything; blocks stay whole then
        _log.debug("%s cannot be copied: %r", type(model).__name__, error)
        return None


def _leaving_bytes(model: nn.Module, files: Sequence[Path]) -> int:
    """Memory of the parameters that is not the pages of `files`: it goes, or is counted anew.

    Pages that were written to are no longer the file's; the others may not be in memory at all.
    Where the system does not tell them apart, nothing is counted as going: the plan then needs more
    than it will take.
    """
    if not mappings_are_told():
        return 0
    mappings = mappings_of(files)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    heap, shown = 0, set()
    for address, storage in storages.items():
        found = next((m for m in mappings if m.start <= address < m.stop), None)
        if found is None:
            heap += storage.nbytes()
        else:
            shown.add(found)
    return heap + sum(mapping.anonymous for mapping in shown)


def _fill(model: Any, meta: list[str], pending: PendingLoad | None, request: Request) -> None:
    """Stream a model that has no weights at all yet, and have the library make the rest of it."""
    everything = [name for name, _ in model.named_parameters()]
    if pending is None:
        raise CheckpointError(
            f"weight {meta[0]!r} is on the meta device, and this {type(model).__name__} names no "
            "checkpoint. Pass checkpoint=FOLDER."
        )
    if len(meta) < len(everything):
        raise OptionError(
            f"{len(meta)} of {len(everything)} weights are on the meta device ({meta[0]!r} first). "
            "Pass a model with all of them there, or none."
        )
    put_back = _tensors_of(model)
    assembly: Assembly | None = None
    try:
        pending = pending.into(model)
        assembly, report = assemble(pending, request)
        pending.finish(report)
        model.eval()
        finish(assembly, model)
    except BaseException:  # an interrupt as well: the model is what it was
        if assembly is not None:
            assembly.give_up()
        put_back()
        raise


def _tensors_of(model: nn.Module) -> Callable[[], None]:
    """Remember parameters, buffers, and what is marked as initialised; the result puts it back."""
    mark = marks.INITIALISED
    names = (*_TENSORS, mark)
    before = [
        (vars(module), {name: copy.copy(vars(module).get(name)) for name in names})
        for module in model.modules()
    ]

    def put_back() -> None:
        for own, remembered in before:
            for kind in _TENSORS:
                own[kind].update(remembered[kind])
            if not remembered[mark]:  # else the library would not initialise it again
                own.pop(mark, None)

    return put_back
