"""A model in memory beside its checkpoint: which of its weights can be read from there.

Names may differ where adapters have taken the place of modules; values are compared bit by bit.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeload.budget.output_head import ADAPTED
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.entry.spill import Spill
from pipeload.errors import CheckpointError
from pipeload.weights.arena import DTYPE_CODES
from pipeload.weights.layout import Weight
from pipeload.weights.same_weights import differing, no_conversion

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.weights.placement import Convert


_WAY_OUT = (
    "Pass spill_dir=FOLDER to have such weights written there and streamed from there, or say "
    "which checkpoint they are from (checkpoint=, revision=, subfolder=, variant=, key_mapping=)."
)


@dataclass(frozen=True, slots=True)
class Live:
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

    def shown(self, _name: str) -> None:
        """Nothing: a quantised model is not wrapped."""


def match(model: Any, pending: PendingLoad | None) -> Live:
    """What of the model the checkpoint says it holds."""
    if pending is None:
        return Live(model, {}, {}, (), no_conversion)
    stored = pending.weights()
    names = {_plain(name): name for name, _ in model.named_parameters()}
    live: dict[str, Weight] = {}
    for plain, weight in stored.items():
        name = names.get(plain)
        if name is not None:
            live[name] = _as_it_is(weight, name, model.get_parameter(name))
    convert = pending.converter(hold_model=True)

    def convert_named(
        conversion: Any, sources: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]
    ) -> None:
        names = (weight.name for weight in conversion.weights)
        convert(conversion, sources, {_plain(name): into[name] for name in names})

    others = {names[n]: pending.source_of(n) for n in pending.misshapen() if n in names}
    return Live(model, live, others, pending.files, convert_named)


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


def check_values(
    live: Live,
    pending: PendingLoad | None,
    spill_dir: str | os.PathLike[str] | None,
    read_timeout: float | None,
) -> tuple[Live, Spill | None]:
    """Weights that are not the checkpoint's: refused, or written where they can be read.

    Raises:
        CheckpointError: one is not, and there is no `spill_dir`.
        ReadError: what the checkpoint holds could not be read.
    """
    parameters = dict(live.model.named_parameters())
    stamps = stamps_of(entry for weight in live.weights.values() for entry in weight.sources)
    files = FileSet(live.files, "buffered", read_timeout, stamps)
    found = differing(live.weights, parameters, live.convert, files, live.files)
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


def _refuse_first(live: Live, pending: PendingLoad | None, name: str | None) -> None:
    kind = type(live.model).__name__
    if pending is None:
        raise CheckpointError(
            f"this {kind} was not loaded from a checkpoint, so there is nothing to stream it from. "
            f"{_WAY_OUT}"
        )
    if name is not None:
        source = live.others.get(name) or live.weights[name].sources[0]
        raise CheckpointError(
            f"weight {name!r} of this {kind} is not what its checkpoint holds (tensor "
            f"{source.name!r} of {str(source.file)!r}): it was changed since. {_WAY_OUT}"
        )


def refuse_missing(live: Live, pending: PendingLoad | None) -> None:
    """Name the first weight that should be in the checkpoint and is not, if there is one.

    Raises:
        CheckpointError: there is one.
    """
    own = _own_names(live.model, pending)
    for name, _ in live.model.named_parameters():
        if name in own and name not in live.weights:
            raise CheckpointError(
                f"weight {name!r} of this {type(live.model).__name__} is not in its checkpoint "
                f"(first file {str(live.files[0])!r}), and none of the others in its blocks is. "
                f"{_WAY_OUT}"
            )


def _own_names(model: Any, pending: PendingLoad | None) -> set[str]:
    """Names of the parameters that are the model's, not an adapter's."""
    if pending is not None:
        bare: nn.Module = pending.model
    else:
        with torch.device("meta"):
            bare = type(model)(copy.deepcopy(model.config))
    plain = {name for name, _ in bare.named_parameters()}
    return {name for name, _ in model.named_parameters() if _plain(name) in plain}


def tied_names(model: Any) -> dict[str, str]:
    """Names of parameters that really share another one's memory, and that one's."""
    names = {_plain(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    found = ((names.get(alias, alias), names.get(source, source)) for alias, source in pairs)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {a: s for a, s in found if a in parameters and parameters[a] is parameters.get(s)}
