"""A checkpoint that others have quantised, and what becomes of each of its weights.

The library's own loader for it wants packages, and packs everything anew. So its names are matched
as if float weights of the shapes that the integers stand for were stored.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import Checkpoint, TensorEntry, stamps_of
from pipeload.errors import UnsupportedModelError
from pipeload.formats.codes.coded_weight import Grid, columns_by_group
from pipeload.formats.codes.registry import codes_format
from pipeload.formats.form_names import CONVERTED
from pipeload.formats.format import named
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS
from pipeload.formats.integers.quantizer import PipeloadConfig
from pipeload.formats.integers.rounding import GROUPS
from pipeload.formats.registry import format_of
from pipeload.weights.arena import DTYPE_CODES
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from pipeload.formats.codes.coded_weight import CodedWeight, CodesFormat
    from pipeload.hf.pending_load import PendingLoad

_log = logging.getLogger("pipeload")
_OLD_SETTINGS = "quantize_config.json"  # of AutoGPTQ, beside a configuration that says nothing


class Chosen(NamedTuple):
    """What becomes of coded weights."""

    bits: int
    group: int
    """Columns that share a scale; 0 of int8."""
    reordered: bool
    """Whether a weight has its columns in another order than the inputs'."""
    names: frozenset[str]
    """Those that stay integers; the others become floats."""
    kept: list[str]
    """Paths of Linears that are floats."""


class CodedCheckpoint:
    """Coded weights of a checkpoint, beside tensors that are none."""

    def __init__(
        self,
        name: str,
        pending: PendingLoad,
        settings: Mapping[str, Any],
        *,
        in_part: bool = False,
    ) -> None:
        """Find them.

        Args:
            name: of the checkpoint, for people.
            pending: the load of the float model, with what is stored.
            settings: its `quantization_config`; empty if it has none.
            in_part: whether weights that the model has no place for are left out, as of floats.

        Raises:
            CheckpointError: it is malformed, or something is missing.
            UnsupportedModelError: nobody knows how it is quantised, or its integers cannot be
                taken over.
        """
        self._name = name
        settings = settings or _read_old(pending.files[0].parent)
        self.format = self._find_format(settings)
        stored = pending.checkpoint.entries
        found = self.format.find(settings, stored)
        self.coded = {weight.name: weight for weight in found}
        """By the names of the weights that they stand for."""
        used = {entry.name for weight in found for entry in weight.parts.values()}
        self.plain = [entry for name, entry in stored.items() if name not in used]
        """Tensors that are no part of those."""
        self.pending = self._as_floats(pending, in_part=in_part)
        """The load of floats of the same shapes, of which coded ones are not really stored."""
        self._refuse_others_parts()
        entries, seconds = pending.checkpoint.entries.values(), pending.read_timeout
        self.files = FileSet(pending.files, "buffered", seconds, stamps_of(entries))
        self.total_bytes = pending.checkpoint.total_bytes

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files of tensors."""
        return self.pending.files

    def missing(self) -> list[str]:
        """List parameters that nothing is stored for."""
        return self.pending.missing()

    def in_order(self) -> list[TensorEntry | CodedWeight]:
        """List plain tensors and coded weights as they lie in the files, by their first tensors."""

        def place(one: TensorEntry | CodedWeight) -> tuple[str, int]:
            entry = one if isinstance(one, TensorEntry) else next(iter(one.parts.values()))
            return str(entry.file), entry.start

        return sorted([*self.plain, *self.coded.values()], key=place)

    @property
    def model(self) -> nn.Module:
        """The float model, on the meta device."""
        return self.pending.model

    @property
    def parameters(self) -> Mapping[str, str]:
        """Parameters of the float model by the names of their stored weights."""
        return self.pending.plain_parameters()

    @property
    def dtype(self) -> torch.dtype:
        """Of floats."""
        dtype: torch.dtype = self.pending.model.dtype
        return dtype

    def choose(self, *, or_none: bool = False) -> Chosen:
        """Say which weights stay integers: all that can be by one kind of kernel.

        Args:
            or_none: whether there may be none, and all become floats; one is told so.

        Raises:
            CheckpointError: what goes with integers cannot be.
            UnsupportedModelError: none can, and that may not be.
            ReadError: the order of columns, or a zero, could not be read.
        """
        linears = self._linears()
        mine = {name: weight for name, weight in self.coded.items() if name in linears}
        uneven = {name for name, weight in mine.items() if not self._is_symmetric(weight)}
        sizes = {4: GROUPS[::-1], 8: (0,)}
        fitting = [
            (bits, group, frozenset(n for n in mine.keys() - uneven if _fits(mine[n], bits, group)))
            for bits, groups in sizes.items()
            for group in groups
        ]
        bits, group, names = max(fitting, key=lambda found: len(found[2]))
        if not names:
            found = sorted(
                f"{w.bits} bits, {w.shape[1] // w.groups} to a scale"
                + ", not symmetric" * (n in uneven)
                if w.bits
                else "codebooks or floats of few bits"
                for n, w in mine.items()
            )
            kinds = "; ".join([*dict.fromkeys(found)][:4]) or "it has none"
            else_load = "" if or_none else ", or load this one as it is"
            if not or_none or not mine:
                raise UnsupportedModelError(
                    f"{self._name!r}: no Linear has integers that a kernel takes ({kinds}): those "
                    "have 4 bits and groups of a multiple of 32, or 8 bits, one scale a row and 0 "
                    f"in the middle. Use the float checkpoint{else_load}."
                )
            _log.warning(
                "%r: no kernel takes its integers (%s): they become floats each time they are read",
                self._name,
                kinds,
            )
        reordered = any(self._is_reordered(self.coded[name]) for name in sorted(names))
        taken = {linears[name] for name in names}
        every = [p for p, m in self.model.named_modules() if type(m) is torch.nn.Linear]
        return Chosen(bits, group, reordered, names, [path for path in every if path not in taken])

    def config(self, chosen: Chosen, part_bytes: int | None = None) -> PipeloadConfig:
        """What config.json says of integers of that choice, in parts of at most so many bytes."""
        four = chosen.bits == 4
        return PipeloadConfig(
            chosen.bits,
            group_size=chosen.group if four else None,
            method=self.format.method,
            order=BY_ROWS if four else None,
            reordered=chosen.reordered,
            part_bytes=part_bytes,
            modules_to_not_convert=chosen.kept,
        )

    def _linears(self) -> dict[str, str]:
        """Paths of Linears that may hold integers, by the names of their stored weights."""
        found = inner_linears(self.pending).items()
        dtype = self.pending.dtype
        # Of another dtype: it is kept in fp32.
        return {n: path for n, (path, _) in found if dtype(f"{path}.weight") == self.dtype}

    def _is_symmetric(self, weight: CodedWeight) -> bool:
        """Whether 0 is in the middle, as it has to be of 8 bits with one scale a row."""
        if weight.bits != 8 or weight.groups > 1:
            return True
        grid = weight.grid(partial(read_whole, files=self.files))
        assert isinstance(grid, Grid)  # noqa: S101 - it has bits
        return not bool(grid.scales_and_zeros(self.dtype)[..., 1].any())

    def _is_reordered(self, weight: CodedWeight) -> bool:
        entry = weight.group_of
        if entry is None:
            return False
        group_of = read_whole(entry, self.files)
        return columns_by_group(weight.name, group_of, weight.groups) is not None

    def _refuse_others_parts(self) -> None:
        """Refuse what goes with a coded weight, or scales a model's own steps, and is unknown.

        AWQ divides what some activations give by scales beside them, which such a model has no
        place for: without them it would compute something else.

        Raises:
            UnsupportedModelError: there is such a tensor; names it.
        """
        used = self.pending.used()
        for entry in self.plain:
            stem, _, last = entry.name.rpartition(".")
            unknown = f"{stem}.weight" in self.coded and last != "bias"
            if unknown or (last == "scales" and entry.name not in used):
                raise UnsupportedModelError(
                    f"{self._name!r}: {entry.name!r} belongs to what {self.format.title} has "
                    "quantised, and nothing is known of it. Use the float checkpoint."
                )

    def _find_format(self, settings: Mapping[str, Any]) -> CodesFormat:
        found = codes_format(settings)
        if found is None:
            known = ", ".join(CONVERTED)
            if not settings:
                raise UnsupportedModelError(
                    f"{self._name!r} is not quantised, and `pipeload convert` takes over integers "
                    "that are there. Use `pipeload quantize`, which makes them."
                )
            raise UnsupportedModelError(
                f"{self._name!r} is quantised by {named(settings)!r}, and `pipeload convert` takes "
                f"over the integers of {known}. Load it as it is, or use the float checkpoint."
            )
        return found

    def _as_floats(self, pending: PendingLoad, *, in_part: bool) -> PendingLoad:
        """The load of floats of the same shapes.

        Raises:
            UnsupportedModelError: one is stacked with others, or the model has no place for it.
        """
        dtype = DTYPE_CODES[pending.model.dtype]
        entries = {entry.name: entry for entry in self.plain}
        for name, weight in self.coded.items():
            first = next(iter(weight.parts.values()))
            entries[name] = replace(first, name=name, dtype=dtype, shape=weight.shape)
        floats = pending.of(Checkpoint(pending.files, entries))
        if in_part:
            used = floats.used()
            self.coded = {name: weight for name, weight in self.coded.items() if name in used}
        plain = floats.plain_parameters()
        for name in self.coded.keys() - plain.keys():
            raise UnsupportedModelError(
                f"{self._name!r}: {name!r} of {list(self.coded[name].shape)} stands for no weight "
                f"of {type(pending.model).__name__} by itself: it is one of several that the "
                "library joins, as experts are, or of another shape. Use the float checkpoint."
            )
        return floats


def inner_linears(pending: PendingLoad) -> dict[str, tuple[str, nn.Linear]]:
    """Find Linears that are no head and share no weight: see `PendingLoad.plain_linears`."""
    model = pending.model
    head, ties = model.get_output_embeddings(), model.all_tied_weights_keys or {}
    tied = {*ties, *ties.values()}
    return {
        name: (path, module)
        for name, (path, module) in pending.plain_linears().items()
        if module is not head and f"{path}.weight" not in tied
    }


def taken_over(settings: Mapping[str, Any], asked: Any, *, on_cpu: bool) -> CodesFormat | None:
    """The format of integers that are put in order as they are read; None for all others.

    Args:
        settings: a checkpoint's `quantization_config`; empty if it has none.
        asked: what a load was given: that they are to be unpacked, or settings of other kernels.
        on_cpu: whether the model computes there.
    """
    form, found = codes_format(settings), format_of(settings)
    if form is None or found is None:
        return form
    # Else a plain load has floats, or was asked for them.
    packs = found.unpacking is not None and found.unpacking.packed_on_cpu
    if asked is not None or not packs or not on_cpu:
        return None
    try:
        form.find(settings, {})
    except UnsupportedModelError:  # of integers that have no kernel here, or of floats
        return None
    return form


def settings_of(config: Any) -> dict[str, Any]:
    """What a configuration says of quantising; empty if it says nothing."""
    for _, settings in _places(config):
        found = dict(settings if isinstance(settings, dict) else vars(settings))
        if not found.get("quant_method") and {"bits", "group_size"} <= found.keys():
            found["quant_method"] = "mlx"  # it gives no name
        return found
    return {}


def take_settings(config: Any) -> dict[str, Any]:
    """Do the same, and leave nothing of it there."""
    found = settings_of(config)
    for (each, name), _ in list(_places(config)):
        delattr(each, name)
    return found


def _places(config: Any) -> Iterator[tuple[tuple[Any, str], Any]]:
    for each in {id(one): one for one in (config, config.get_text_config(decoder=True))}.values():
        for name in ("quantization_config", "quantization"):
            settings = getattr(each, name, None)
            if isinstance(settings, dict) or hasattr(settings, "__dict__"):
                yield (each, name), settings


def _read_old(folder: Path) -> dict[str, Any]:
    """What AutoGPTQ wrote before configurations said it; nothing if there is no such file."""
    try:
        found = json.loads((folder / _OLD_SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {"quant_method": "gptq", **found} if isinstance(found, dict) else {}


def _fits(weight: CodedWeight, bits: int, group: int) -> bool:
    rows, columns = weight.shape
    if weight.bits != bits:
        return False
    if bits == 8:
        return weight.groups == 1 and Int8Linear.fits(rows, columns)
    return columns // weight.groups % group == 0 and Int4Linear.fits(rows, columns, group)
