"""A model that is in memory becomes one that is streamed, from its checkpoint or a spilled copy.

Nothing about the model changes before everything that can be refused has been looked at: what its
weights are, whether they are the checkpoint's, whether the limit holds.
"""

from __future__ import annotations

import copy
import itertools
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeload import _takeover, _transformers
from pipeload._accountant import ACCOUNTANT
from pipeload._arena import DTYPE_CODES
from pipeload._assembly import Assembly
from pipeload._compare import differing
from pipeload._handle import Handle
from pipeload._layout import Weight
from pipeload._loading import advise_openmp, check_source, plan_beside_others, plan_model
from pipeload._mappings import let_go, mappings_are_told, mappings_of
from pipeload._pass_needs import PassNeeds
from pipeload._sites import ADAPTED
from pipeload._spill import Spill
from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from pipeload._checkpoint import TensorEntry
    from pipeload._placement import Convert
    from pipeload._request import Request

_log = logging.getLogger("pipeload")


@dataclass(frozen=True, slots=True)
class _Live:
    """A model in memory, and where its weights can be read."""

    model: Any
    weights: dict[str, Weight]
    """By their names in the model."""
    others: dict[str, TensorEntry]
    """Weights that the checkpoint has in another shape, and what it has."""
    files: tuple[Path, ...]
    convert: Convert

    def converter(self) -> Convert:
        """Makes weights that are not in the files as they are."""
        return self.convert

    def prepared(self, _name: str) -> None:
        """Nothing: a quantised model is not wrapped."""


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
    ACCOUNTANT.check_limit(request.options.memory_limit)
    advise_openmp()
    pending = _open(inner, checkpoint, kwargs)
    meta = [name for name, parameter in inner.named_parameters() if parameter.is_meta]
    if meta:
        _fill(inner, meta, pending, request)
        return
    live = _match(inner, pending)
    live, spill = _check_values(live, pending, spill_dir)
    try:
        _stream(live, pending, request, spill, model)
    except BaseException:
        if spill is not None:
            spill.remove()
        raise


def _library_model(model: nn.Module) -> Any:
    """The library's own model: itself, or inside another one, as PEFT's."""
    found = _transformers.pretrained_modules(model)
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
        if hasattr(module, "_hf_hook"):
            raise OptionError(
                f"this {name} was spread over devices by accelerate, which moves its weights "
                "itself. Load it without device_map= or offload_folder=, then wrap it."
            )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            f"this {name} is quantised; this version streams float weights (bf16, fp16, fp32)."
        )
    devices = {parameter.device.type for parameter in model.parameters()}
    if others := devices - {"cpu", "meta"}:
        raise OptionError(
            f"this {name} has weights on {', '.join(sorted(others))}; they are streamed to the "
            "CPU. Load it without device_map= and without .to(), then wrap it."
        )


def _open(
    model: Any, checkpoint: str | os.PathLike[str] | None, kwargs: Mapping[str, Any]
) -> _transformers.PendingLoad | None:
    """The model's checkpoint, None for a model that was made without one."""
    source = checkpoint if checkpoint is not None else getattr(model, "name_or_path", "")
    if not str(source):
        return None
    options = check_source(source, kwargs)
    commit = getattr(model.config, "_commit_hash", None)
    if checkpoint is None and commit and not Path(source).is_dir():
        options.setdefault("revision", commit)
    config = copy.deepcopy(model.config)
    return _takeover.peek(lambda: type(model).from_pretrained(source, config=config, **options))


def _match(model: Any, pending: _transformers.PendingLoad | None) -> _Live:
    """What of the model the checkpoint says it holds."""
    if pending is None:
        return _Live(model, {}, {}, (), _no_conversion)
    stored = pending.weights()
    names = {_plain(name): name for name, _ in model.named_parameters()}
    live: dict[str, Weight] = {}
    for plain, weight in stored.items():
        name = names.get(plain)
        if name is not None:
            live[name] = _as_it_is(weight, name, model.get_parameter(name))
    convert = pending.converter()

    def convert_named(conversion: Any, sources: Mapping[str, torch.Tensor]) -> Any:
        made = convert(conversion, sources)
        return {names.get(plain, plain): value for plain, value in made.items()}

    others = {names[n]: pending.source_of(n) for n in pending.misshapen() if n in names}
    return _Live(model, live, others, pending.files, convert_named)


def _plain(name: str) -> str:
    for adapted in ADAPTED:
        name = name.replace(f".{adapted}.", ".")
    return name


def _as_it_is(weight: Weight, name: str, parameter: nn.Parameter) -> Weight:
    """The model may have been given another dtype since."""
    return replace(
        weight,
        name=name,
        dtype=DTYPE_CODES[parameter.dtype],
        shape=tuple(parameter.shape),
        nbytes=parameter.numel() * parameter.element_size(),
    )


def _no_conversion(*_: object) -> Any:
    raise AssertionError("nothing is converted without a checkpoint")


def _check_values(
    live: _Live,
    pending: _transformers.PendingLoad | None,
    spill_dir: str | os.PathLike[str] | None,
) -> tuple[_Live, Spill | None]:
    """Weights that are not the checkpoint's: refused, or written where they can be read."""
    parameters = dict(live.model.named_parameters())
    found = differing(live.weights, parameters, live.convert, live.files)
    if spill_dir is None:
        first = next(itertools.chain(live.others, found), None)
        _refuse_first(live, pending, first)
        return live, None
    names = set(found)
    groups = {live.weights[name].group for name in names} - {None}
    # A conversion makes all its weights or none.
    names |= {name for name, weight in live.weights.items() if weight.group in groups}
    own = _own_names(live.model, pending)
    names |= {name for name in parameters if name not in live.weights and name in own}
    if not names:
        return live, None
    spill = Spill(Path(spill_dir), {name: parameters[name] for name in sorted(names)})
    spilled = {
        name: _as_it_is(Weight(name, "", (), 0, (spill.entries[name],)), name, parameters[name])
        for name in names
    }
    kept = {name: weight for name, weight in live.weights.items() if name not in names}
    return replace(live, weights=kept | spilled, files=(*live.files, spill.path)), spill


def _refuse_first(live: _Live, pending: _transformers.PendingLoad | None, name: str | None) -> None:
    kind = type(live.model).__name__
    way_out = (
        "Pass spill_dir=FOLDER to have such weights written there and streamed from there, or "
        "checkpoint= if they are another checkpoint's."
    )
    if pending is None:
        raise CheckpointError(
            f"this {kind} was not loaded from a checkpoint, so there is nothing to stream it from. "
            + way_out
        )
    if name is not None:
        source = live.others.get(name) or live.weights[name].sources[0]
        raise CheckpointError(
            f"weight {name!r} of this {kind} is not what its checkpoint holds (tensor "
            f"{source.name!r} of {str(source.file)!r}): it was changed since. {way_out}"
        )


def _own_names(model: Any, pending: _transformers.PendingLoad | None) -> set[str]:
    """Names of the parameters that are the model's, not an adapter's."""
    if pending is None:
        return {name for name, _ in model.named_parameters() if "lora_" not in name}
    plain = {name for name, _ in pending.model.named_parameters()}
    return {name for name, _ in model.named_parameters() if _plain(name) in plain}


def _stream(
    live: _Live,
    pending: _transformers.PendingLoad | None,
    request: Request,
    spill: Spill | None,
    root: nn.Module,
) -> None:
    model = live.model
    let_go(live.files)
    needs = PassNeeds(model, model.config)
    plan = partial(
        plan_model,
        model,
        live.weights,
        _tied(model),
        _on_meta(model),
        live.files,
        needs=needs,
        request=request,
        leaving=_heap_bytes(model, live.files),
    )
    build = plan_beside_others(plan)
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    assembly: Assembly | None = None
    try:
        assembly = Assembly(live, build, needs, request.hint, pressure=request.pressure)
        if spill is not None:
            assembly.at_removal(spill.remove)
        assembly.finish(model, root)
    except BaseException:  # an interrupt as well: the model is what it was
        if assembly is not None:
            assembly.give_up()
        for parameter, data in before:
            parameter.data = data
        raise
    del before
    let_go(live.files)  # now that nothing shows them


def _tied(model: Any) -> dict[str, str]:
    """Names of parameters that really share another one's memory, and that one's."""
    names = {_plain(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    found = ((names.get(alias, alias), names.get(source, source)) for alias, source in pairs)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {a: s for a, s in found if a in parameters and parameters[a] is parameters.get(s)}


def _on_meta(model: nn.Module) -> nn.Module | None:
    """A copy of the model, adapters and all, without weights; None if it cannot be copied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    memo |= {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # attributes may be anything; blocks stay whole then
        _log.debug("%s cannot be copied: %r", type(model).__name__, error)
        return None


def _heap_bytes(model: nn.Module, files: Sequence[Path]) -> int:
    """Memory of the parameters that are not mapped from `files`: it goes, or is counted anew.

    Mapped ones may not be in memory at all. Where the system does not tell them apart, nothing is
    counted as going: the plan then needs more than it will take.
    """
    if not mappings_are_told():
        return 0
    mappings = mappings_of(files)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(
        storage.nbytes()
        for address, storage in storages.items()
        if not any(mapping.start <= address < mapping.stop for mapping in mappings)
    )


def _fill(
    model: Any, meta: list[str], pending: _transformers.PendingLoad | None, request: Request
) -> None:
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
    pending = pending.into(model)
    needs = PassNeeds(model, model.config, products=pending.products_bytes())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    plan = partial(
        plan_model,
        model,
        pending.weights(),
        tied,
        model,
        pending.files,
        needs=needs,
        request=request,
    )
    build = plan_beside_others(plan)
    assembly = Assembly(pending, build, needs, request.hint, pressure=request.pressure)
    pending.finish(pending.load_rest(build.parts.taken))
    model.eval()
    assembly.finish(model)
