"""Private parts of transformers: what a checkpoint holds for a model, by the library's own rules.

Seen in 5.24.0, tried on 5.17.0 as well. Key names and dtypes stay the library's.
"""

from __future__ import annotations

import functools
import re
import weakref
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.formats.registry import format_of
from pipeload.hf import cache_layers  # noqa: F401 - passes of a loaded model have caches
from pipeload.hf.key_matching import match_keys, target_dtype, weights_made
from pipeload.hf.library import quantised_by
from pipeload.hf.recipes import Recipe, own_operation
from pipeload.hf.rest_loading import (
    keep_placeholders,
    load_all_but,
    load_tensors,
    not_missing,
)
from pipeload.weights.arena import DTYPE_CODES, DTYPES
from pipeload.weights.layout import Conversion, Weight
from pipeload.weights.read_tensor import read_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from pipeload.checkpoint.headers import Checkpoint, TensorEntry
    from pipeload.formats.format import Format, PackedWeight, Shown
    from pipeload.weights.placement import Convert


class PendingLoad:
    """A model on the meta device, and what its checkpoint holds for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        config: Any,
        read_timeout: float | None,
        file_format: Format | None = None,
    ) -> None:
        """`file_format` is that of the files, where they are not of safetensors."""
        self.model = model
        self.checkpoint = checkpoint
        self._config = config
        self.read_timeout = read_timeout
        """Seconds until a read is said to hang; None: never."""
        self._mapping = deepcopy(config.weight_mapping or [])  # some renamings keep state
        self._mapping.extend(file_format.mapping if file_format is not None else ())
        self._file_format = file_format
        quantizer = config.hf_quantizer
        said = None if quantizer is None else format_of(quantizer.quantization_config)
        self.format = file_format or said
        """How the checkpoint is quantised, if in a way that is streamed."""
        unpacking = None if self.format is None else self.format.unpacking
        self._recipes = match_keys(model, checkpoint, self._mapping, unpacking)
        self._made_by = {
            name: (first, recipe)
            for first, recipe in self._recipes.items()
            for name in weights_made(first, recipe)
        }

    @functools.cached_property
    def packed(self) -> Mapping[str, PackedWeight]:
        """Quantised weights by name.

        Raises:
            CheckpointError: one is missing, malformed or of another weight.
            ReadError: one could not be read.
        """
        return {} if self.format is None else self.format.find(self)

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoint's files."""
        return self.checkpoint.files

    @property
    def disable_mmap(self) -> bool:
        """Whether the user asked for files that are read, not mapped."""
        return bool(getattr(self._config, "disable_mmap", None))

    def into(self, model: PreTrainedModel) -> PendingLoad:
        """Make the same load for another model of the same shape."""
        return self._again(model, self.checkpoint)

    def of(self, checkpoint: Checkpoint) -> PendingLoad:
        """Make the same load of other tensors."""
        return self._again(self.model, checkpoint)

    def _again(self, model: PreTrainedModel, checkpoint: Checkpoint) -> PendingLoad:
        return PendingLoad(model, checkpoint, self._config, self.read_timeout, self._file_format)

    def weights(self) -> dict[str, Weight]:
        """Find every parameter that is read, cast or converted from the file alone, by name.

        What is not listed (buffers, shapes that do not match, shared parameters) is the library's.
        """
        parameters = dict(self.model.named_parameters())
        found = {name: packed.weight for name, packed in self.packed.items()}
        for first, recipe in self._recipes.items():
            names = [name for name in weights_made(first, recipe) if name not in found]
            if all(self._usable(parameters.get(name), recipe) for name in names):
                found.update(
                    (name, self._weight(name, parameters[name], first, recipe)) for name in names
                )
        return found

    def plain(self, name: str) -> Weight | None:
        """Describe the parameter `name` read as it is stored, and cast; None if that cannot be."""
        first, recipe = self._made_by.get(name, ("", None))
        parameter = self.model.get_parameter(name)
        if recipe is None or not self._usable(parameter, recipe):
            return None
        return self._weight(name, parameter, first, recipe)

    @property
    def quantised_by(self) -> str | None:
        """What has quantised the checkpoint, None for floats."""
        if self._file_format is not None:
            return self._file_format.method
        return quantised_by(self._config.hf_quantizer)

    def plain_linears(self) -> dict[str, tuple[str, nn.Linear]]:
        """Find Linears whose weight is one stored tensor as it is: path and module by its name."""
        found: dict[str, tuple[str, nn.Linear]] = {}
        for stored, name in self.plain_parameters().items():
            path, _, last = name.rpartition(".")
            module = self.model.get_submodule(path)
            if type(module) is nn.Linear and last == "weight":
                found[stored] = path, module
        return found

    def plain_parameters(self) -> dict[str, str]:
        """Find parameters that are one stored tensor as it is: their names by its name."""
        parameters = dict(self.model.named_parameters())
        return {
            recipe.sources[0][0].name: name
            for name, recipe in self._recipes.items()
            if recipe.converter is None and self._usable(parameters.get(name), recipe)
        }

    def used(self) -> set[str]:
        """Names of stored tensors that the model has a place for."""
        return {entry.name for recipe in self._recipes.values() for entry, _ in recipe.sources}

    def misshapen(self) -> list[str]:
        """List parameters that the checkpoint has a tensor of another shape for."""
        parameters = dict(self.model.named_parameters())
        return [
            name
            for name, recipe in self._recipes.items()
            if name in parameters
            and recipe.converter is None
            and recipe.sources[0][0].shape != tuple(parameters[name].shape)
        ]

    def missing(self) -> list[str]:
        """List parameters that nothing in the checkpoint is for: the library makes them up."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        ignored = self.model._keys_to_ignore_on_load_missing or ()
        return [
            name
            for name, _ in self.model.named_parameters()
            if name not in self._made_by
            and name not in tied
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def source_of(self, name: str) -> TensorEntry:
        """Find the first stored tensor that a parameter is made of."""
        return self._recipes[name].sources[0][0]

    def dtype(self, name: str) -> torch.dtype:
        """Find what the parameter `name` is in once it is loaded."""
        return target_dtype(self._config, name, self.model.get_parameter(name))

    def parts(self, name: str) -> dict[str, TensorEntry]:
        """Find the stored tensors of the parameter `name`: see `Stored` in `formats.format`."""
        recipe = self._recipes.get(name, Recipe(None))
        if recipe.converter is None and len(recipe.sources) == 1:
            return {name.rpartition(".")[2]: recipe.sources[0][0]}
        return {pattern: entry for entry, pattern in recipe.sources}

    def reader(self) -> Callable[[TensorEntry], torch.Tensor]:
        """Make what reads single stored tensors, whole."""
        stamps = stamps_of(self.checkpoint.entries.values())
        files = FileSet(self.files, "buffered", self.read_timeout, stamps)
        return functools.partial(read_whole, files=files)

    @property
    def folder(self) -> str:
        """Where the checkpoint is, for people."""
        return str(self.files[0].parent)

    @property
    def where(self) -> torch.device | str:
        """The device that the model will compute on."""
        where: torch.device | str = (self._config.device_map or {}).get("", "cpu")
        return where

    def weight_count(self) -> int:
        """Count the model's numbers: shared ones once, quantised ones as if they were not."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        counts = {n: p.numel() for n, p in self.model.named_parameters() if n not in tied}
        for packed in self.packed.values():
            counts.update((n, count) for n, count in packed.counts.items() if n in counts)
        return sum(counts.values())

    def couples_rows(self) -> bool:
        """Tell whether sequences of one batch change each other's results, beyond last bits."""
        return any(packed.couples_rows for packed in self.packed.values())

    def statistics_bytes(self, takes: Callable[[int], int]) -> int:
        """Bytes that stay in memory for quantised weights and are no parameters.

        `takes` says how many bytes a tensor of so many does.
        """
        kept: int = sum(packed.statistics_bytes(takes) for packed in self.packed.values())
        # Integers that the library makes floats of when it loads the rest, all at once.
        rest = [r for first, r in self._recipes.items() if r.own and first not in self.packed]
        return kept + sum(int(r.own.beside_bytes) + r.stored_bytes for r in rest)

    def products(self) -> Callable[[int], int]:
        """Say the most bytes that computing with a quantised weight takes beside its tensors.

        A function of the rows of input that holds numbers alone.
        """
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        held = {h for packed in self.packed.values() for h in packed.held_by_products(dtype)}

        def needed(rows: int) -> int:
            return max((one.of(rows) for one in held), default=0)

        return needed

    def keep_inputs_exact(self) -> bool:
        """Have inputs of quantised weights never rounded; whether they might have been."""
        return self.format is not None and self.format.keep_inputs_exact(self.model)

    def kernel(self) -> str | None:
        """Say what multiplies quantised weights, where there is more than one way."""
        return None if self.format is None else self.format.kernel(self.model)

    def shown(self, name: str) -> Shown | None:
        """Build what shows a quantised weight; None for any other."""
        packed = self.packed.get(name)
        return packed.show() if packed is not None else None

    def load_rest(self, taken: Sequence[str]) -> Any:
        """Have the library load all keys but those of `taken`; returns its loading report."""
        taken_names = set(taken)
        skip = {
            source.name
            for first, recipe in self._recipes.items()
            if first in taken_names
            for source, _ in recipe.sources
        }
        left = (e for name, e in self.checkpoint.entries.items() if name not in skip)
        tensors = None if self._file_format is None else self._file_format.tensors(self, left)
        if tensors is not None:
            info = load_tensors(tensors, self.model, self._config)
        else:
            info = load_all_but(
                skip, self.model, self.files, self._config, disable_mmap=self.disable_mmap
            )
        for name in taken_names & self.packed.keys():
            self.packed[name].leave_to_streaming()
        keep_placeholders(self.model)
        not_missing(info, self.model, taken_names, self.packed)
        # Kept for saving after remove(): a conversion counts as used when any key matched it.
        pairs = zip(self._config.weight_mapping or [], self._mapping, strict=False)
        used = [one for one, copy in pairs if one.was_used() or copy.was_used()]
        used = [one for one in used if own_operation(one) is None]
        object.__setattr__(self.model, "_weight_conversions", used)
        return info

    def finish(self, info: Any) -> None:
        """Have the library initialise what `load_rest` has not loaded, as it does for its own."""
        type(self.model)._finalize_model_loading(self.model, self._config, info)

    def converter(self, *, hold_model: bool = False) -> Convert:
        """Make a function of the library's operations.

        Those for quantised weights look at the model's modules. It is held weakly, also while one
        runs: a model that is dropped meanwhile must not end in a thread of its own, which could not
        wait for itself. With `hold_model`, strongly: for one on the meta device that nobody else
        will have.
        """
        recipes, model = self._recipes, weakref.ref(self.model)
        proxy: Any = weakref.proxy(self.model)
        held = self.model if hold_model and self.quantised_by is not None else None

        def convert(
            conversion: Conversion,
            stored: Mapping[str, torch.Tensor],
            into: Mapping[str, torch.Tensor],
        ) -> None:
            first = conversion.weights[0].group or ""
            owner = held if held is not None else None if model() is None else proxy
            recipes[first].fill(first, owner, stored, into, alone=conversion.alone)

        return convert

    def _usable(self, parameter: nn.Parameter | None, recipe: Recipe) -> bool:
        if parameter is None or parameter.dtype not in DTYPE_CODES:
            return False
        if any(source.dtype not in DTYPES for source, _ in recipe.sources):
            return False
        if recipe.converter is not None:
            return parameter.is_floating_point() or recipe.own is not None
        return len(recipe.sources) == 1 and recipe.sources[0][0].shape == tuple(parameter.shape)

    def _weight(self, name: str, parameter: nn.Parameter, first: str, recipe: Recipe) -> Weight:
        key = name if recipe.converter is None else first
        dtype = target_dtype(self._config, key, parameter)
        if recipe.dtype is not None:
            dtype = recipe.dtype
        shape = tuple(parameter.shape)
        return Weight(
            name=name,
            dtype=DTYPE_CODES[dtype],
            shape=shape,
            nbytes=parameter.numel() * dtype.itemsize,
            sources=tuple(source for source, _ in recipe.sources),
            group=None if recipe.converter is None else first,
            unpacking_bytes=recipe.unpacking_bytes,
            guarded=recipe.own is not None and len(weights_made(first, recipe)) > 1,
            slices=recipe.slices(name, shape),
            repacked=recipe.cast_rows(shape, DTYPE_CODES[dtype]),
        )
