"""Private parts of transformers: what a checkpoint holds for a model, by the library's own rules.

Seen in 5.24.0, tried on 5.17.0 as well. Others that touch private parts: `recipes`, `takeover`.
Key names, dtypes, buffers, ties, initialisation of missing weights and the loading report stay the
library's.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils import logging as library_logging

from pipeload.checkpoint.files import FileSet
from pipeload.checkpoint.headers import stamps_of
from pipeload.errors import CheckpointError
from pipeload.formats.integers.linear import INT8_ALIGNMENT, Int4Linear, Int8Linear, PackedLinear
from pipeload.formats.integers.order import kernel_order
from pipeload.formats.integers.wide_product import temporary_bytes
from pipeload.formats.repack import AS_IT_IS, Repack
from pipeload.formats.support import FORMATS, Streamed
from pipeload.hf.marks import is_initialised, mark_initialised
from pipeload.hf.patch import Patch
from pipeload.hf.recipes import Recipe
from pipeload.weights.arena import DTYPE_CODES, DTYPES
from pipeload.weights.layout import Conversion, Weight
from pipeload.weights.stored import read_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeload.checkpoint.headers import Checkpoint, TensorEntry
    from pipeload.formats.bitsandbytes.stored import PackedWeight, Prepared
    from pipeload.weights.placement import Convert


class PendingLoad:
    """A model on the meta device, and what its checkpoint holds for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        config: Any,
        read_timeout: float | None,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self._config = config
        self._read_timeout = read_timeout
        self._mapping = deepcopy(config.weight_mapping or [])  # some renamings keep state
        self._recipes = self._match_keys()
        self.packed = self._find_packed()
        """Quantised weights by name."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoint's."""
        return self.checkpoint.files

    @property
    def disable_mmap(self) -> bool:
        """Whether the user asked for files that are read, not mapped."""
        return bool(getattr(self._config, "disable_mmap", None))

    def into(self, model: PreTrainedModel) -> PendingLoad:
        """The same for another model of the same shape."""
        return PendingLoad(model, self.checkpoint, self._config, self._read_timeout)

    def weights(self) -> dict[str, Weight]:
        """Every parameter that is read, cast or converted from the file alone, by name.

        What is not listed (buffers, shapes that do not match, shared parameters) is the library's.
        """
        parameters = dict(self.model.named_parameters())
        found = {name: packed.weight for name, packed in self.packed.items()}
        found.update(self._integers(parameters))
        for first, recipe in self._recipes.items():
            if first in found:
                continue
            names = self._targets(first, recipe)
            if all(self._usable(parameters.get(name), recipe) for name in names):
                found.update(
                    (name, self._weight(name, parameters[name], first, recipe)) for name in names
                )
        return found

    @property
    def own_formats(self) -> bool:
        """Whether it holds weights for the processor's own kernels."""
        return any(isinstance(module, PackedLinear) for module in self.model.modules())

    @property
    def quantised_by(self) -> str | None:
        """What has quantised the checkpoint, None for floats."""
        return quantised_by(self._config.hf_quantizer)

    def plain_linears(self) -> dict[str, tuple[str, nn.Linear]]:
        """Linears whose weight is one stored tensor as it is: path and module by its name there."""
        found: dict[str, tuple[str, nn.Linear]] = {}
        for path, module in self.model.named_modules():
            recipe = self._recipes.get(f"{path}.weight")
            if type(module) is not nn.Linear or recipe is None or recipe.converter is not None:
                continue
            if isinstance(module.weight, nn.Parameter) and self._usable(module.weight, recipe):
                found[recipe.sources[0][0].name] = path, module
        return found

    def misshapen(self) -> list[str]:
        """Names of parameters that the checkpoint has a tensor of another shape for."""
        parameters = dict(self.model.named_parameters())
        return [
            name
            for name, recipe in self._recipes.items()
            if name in parameters
            and recipe.converter is None
            and recipe.sources[0][0].shape != tuple(parameters[name].shape)
        ]

    def missing(self) -> list[str]:
        """Names of parameters that nothing in the checkpoint is for: the library makes them up."""
        made = {
            name for first, recipe in self._recipes.items() for name in self._targets(first, recipe)
        }
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        ignored = self.model._keys_to_ignore_on_load_missing or ()
        return [
            name
            for name, _ in self.model.named_parameters()
            if name not in made
            and name not in tied
            and not any(re.search(pattern, name) for pattern in ignored)
        ]

    def source_of(self, name: str) -> TensorEntry:
        """The first stored tensor that a parameter is made of."""
        return self._recipes[name].sources[0][0]

    def _integers(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Weight]:
        """Weights of our own quantised Linears: they refuse to compute while evicted."""
        found: dict[str, Weight] = {}
        for path, module in self.model.named_modules():
            if not isinstance(module, PackedLinear):
                continue
            for leaf in ("weight", module.statistics):
                name = f"{path}.{leaf}"
                recipe = self._recipes.get(name)
                if recipe is None or not self._usable(parameters.get(name), recipe):
                    raise self._unusable(name, parameters[name], recipe)
            name = f"{path}.weight"
            weight = self._weight(name, parameters[name], name, self._recipes[name])
            (stored,) = weight.sources
            if stored.dtype != weight.dtype:
                raise self._unusable(name, parameters[name], self._recipes[name])
            repacked = None
            if isinstance(module, Int4Linear) and module.order != kernel_order():
                repacked = Repack(module.order, kernel_order())
            elif isinstance(module, Int8Linear) and stored.start % INT8_ALIGNMENT:
                repacked = AS_IT_IS
            found[name] = replace(weight, guarded=True, repacked=repacked)
        return found

    def _unusable(
        self, name: str, parameter: nn.Parameter, recipe: Recipe | None
    ) -> CheckpointError:
        if recipe is None:
            what = f"is not in {str(self.files[0].parent)!r}"
        else:
            stored = recipe.sources[0][0]
            what = f"is {list(stored.shape)} of {stored.dtype} in {str(stored.file)!r}"
        wanted = f"{list(parameter.shape)} of {DTYPE_CODES[parameter.dtype]}"
        return CheckpointError(
            f"{name!r} of a quantised module {what}, wanted {wanted}. Quantise the model again."
        )

    def _find_packed(self) -> dict[str, PackedWeight]:
        if self.quantised_by != "bitsandbytes":
            return {}
        from pipeload.formats.bitsandbytes.stored import PackedWeight, is_packed

        where = (self._config.device_map or {}).get("", "cpu")
        entries = self.checkpoint.entries.values()
        files = FileSet(self.files, "buffered", self._read_timeout, stamps_of(entries))
        read = partial(read_whole, files=files)
        found: dict[str, PackedWeight] = {}
        for path, module in self.model.named_modules():
            if is_packed(module):
                name = f"{path}.weight"
                recipe = self._recipes.get(name, Recipe(None))
                parts = {pattern: entry for entry, pattern in recipe.sources}
                if recipe.dtype is not None:  # it came alone
                    parts = {"weight": recipe.sources[0][0]}
                found[name] = PackedWeight(name, module, parts, read, where)
        return found

    def weight_count(self) -> int:
        """Numbers that the model has: shared ones once, quantised ones as if they were not."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        counts = {n: p.numel() for n, p in self.model.named_parameters() if n not in tied}
        for path, module in self.model.named_modules():
            if isinstance(module, PackedLinear):
                counts[f"{path}.weight"] = module.out_features * module.in_features
                del counts[f"{path}.{module.statistics}"]
        return sum(counts.values())

    def couples_rows(self) -> bool:
        """Whether sequences of one batch change each other's results, beyond the last bits."""
        return any(packed.couples_rows for packed in self.packed.values())

    def statistics_bytes(self, takes: Callable[[int], int]) -> int:
        """Of quantised weights: what stays in memory for each, and is no parameter.

        `takes` says how many bytes a tensor of so many does.
        """
        return sum(packed.statistics_bytes(takes) for packed in self.packed.values())

    def products(self) -> Callable[[int], int]:
        """The most bytes that computing with a quantised weight takes beside its tensors.

        A function of the rows of input that holds numbers alone.
        """
        dtypes = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        held = {h for packed in self.packed.values() for h in packed.held_by_products(dtype)}
        ours = {m.sizes for m in self.model.modules() if isinstance(m, PackedLinear)}

        def needed(rows: int) -> int:
            theirs = (one.of(rows) for one in held)
            return max([0, *theirs, *(temporary_bytes(rows, sizes) for sizes in ours)])

        return needed

    def prepared(self, name: str) -> Prepared | None:
        """What shows a quantised weight; None for any other."""
        packed = self.packed.get(name)
        return packed.prepare() if packed is not None else None

    def load_rest(self, taken: Sequence[str]) -> Any:
        """Have the library load all keys but those of `taken`; returns its loading report."""
        taken_names = set(taken)
        skip = {
            source.name
            for first, recipe in self._recipes.items()
            if first in taken_names
            for source, _ in recipe.sources
        }
        backend = "pread" if self.disable_mmap else "mmap"
        with contextlib.ExitStack() as stack:
            rest: dict[str, Any] = {}
            for file in self.checkpoint.files:
                opened = stack.enter_context(safe_open(file, framework="pt", backend=backend))
                kept = [key for key in opened.keys() if key not in skip]  # noqa: SIM118 - no dict
                rest.update((key, opened.get_slice(key)) for key in kept)
            with _BAR:
                info, _ = convert_and_load_state_dict_in_model(self.model, rest, self._config, None)
        info.missing_keys.difference_update(taken_names)
        for path, module in self.model.named_modules():
            # What is streamed is put into the processor's order as it is read.
            if isinstance(module, Int4Linear) and f"{path}.weight" in taken_names:
                module.order = kernel_order()
        self._keep_placeholders()
        parameters = {name for name, _ in self.model.named_parameters()}
        owners = tuple(name.removesuffix("weight") for name in taken_names & self.packed.keys())
        # The statistics of a quantised weight, which its module counts as its own.
        info.missing_keys -= {
            key for key in info.missing_keys - parameters if owners and key.startswith(owners)
        }
        # Kept for saving after remove(): a conversion counts as used when any key matched it.
        pairs = zip(self._config.weight_mapping or [], self._mapping, strict=True)
        used = [original for original, copy in pairs if original.was_used() or copy.was_used()]
        object.__setattr__(self.model, "_weight_conversions", used)
        return info

    def _keep_placeholders(self) -> None:
        """Mark modules that have nothing left to initialise.

        The library asks before it overwrites a weight, but not for all that torch's own resets
        write to, and some of those cannot be written to while values are on disk.
        """
        for module in self.model.modules():
            own = list(module.parameters(recurse=False))
            alone = not any(True for _ in module.children()) and not any(
                True for _ in module.buffers()
            )
            if alone and own and all(map(is_initialised, own)):
                mark_initialised(module)

    def finish(self, info: Any) -> None:
        """Have the library initialise what `load_rest` has not loaded, as it does for its own."""
        type(self.model)._finalize_model_loading(self.model, self._config, info)

    def converter(self, *, hold_model: bool = False) -> Convert:
        """The library's operations as a function.

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
            recipes[first].fill(first, owner, stored, into)

        return convert

    def _match_keys(self) -> dict[str, Recipe]:
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = self.model.state_dict()
        prefix = self.model.base_model_prefix
        recipes: dict[str, Recipe] = {}
        # The library's order: experts must arrive in the order of their numbers.
        for key in sorted(self.checkpoint.entries, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target in state:
                recipe = recipes.setdefault(target, Recipe(by_pattern.get(pattern or "")))
                recipe.sources.append((self.checkpoint.entries[key], pattern or key))
        method = self.quantised_by
        stored_as = FORMATS.get(method) if method is not None else None
        if isinstance(stored_as, Streamed) and stored_as.unpacking:
            for name, recipe in recipes.items():
                recipe.settle(name, self.model, stored_as)
            return recipes
        for recipe in recipes.values():
            if len(recipe.sources) == 1 and recipe.unpacks and not recipe.merges:
                recipe.converter, recipe.dtype = None, DTYPES.get(recipe.sources[0][0].dtype)
        return recipes

    def _targets(self, first: str, recipe: Recipe) -> list[str]:
        if recipe.converter is None:
            return [first]
        patterns = recipe.converter.target_patterns
        return [first.replace(patterns[0], pattern) for pattern in patterns]

    def _usable(self, parameter: nn.Parameter | None, recipe: Recipe) -> bool:
        if parameter is None or parameter.dtype not in DTYPE_CODES:
            return False
        if any(source.dtype not in DTYPES for source, _ in recipe.sources):
            return False
        if recipe.converter is not None:
            return parameter.is_floating_point()
        return len(recipe.sources) == 1 and recipe.sources[0][0].shape == tuple(parameter.shape)

    def _weight(self, name: str, parameter: nn.Parameter, first: str, recipe: Recipe) -> Weight:
        dtype = self._target_dtype(name if recipe.converter is None else first, parameter)
        if recipe.dtype is not None:
            dtype = recipe.dtype
        return Weight(
            name=name,
            dtype=DTYPE_CODES[dtype],
            shape=tuple(parameter.shape),
            nbytes=parameter.numel() * dtype.itemsize,
            sources=tuple(source for source, _ in recipe.sources),
            group=None if recipe.converter is None else first,
            unpacking_bytes=recipe.unpacking_bytes,
        )

    def _target_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """The library's rule: modules kept in fp32 are not visible in the meta parameter."""
        plan = self._config.dtype_plan
        if plan:
            matcher, groups, _ = build_glob_alternation(list(plan))
            if (match := matcher.search(name)) and match.lastgroup is not None:
                dtype: torch.dtype = plan[groups[match.lastgroup]]
                return dtype
        return parameter.dtype


def quantised_by(quantizer: Any) -> str | None:
    """The method's name in a checkpoint's configuration; None without one."""
    if quantizer is None:
        return None
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def left_by_the_library(model: PreTrainedModel) -> set[str]:
    """Paths of Linears that its quantisation leaves as floats where nobody says which."""
    fp32 = [*(model._keep_in_fp32_modules or ())]
    keys = HfQuantizer.get_modules_to_not_convert(model, None, fp32)
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not should_convert_module(path, keys)
    }


def _bar(items: Any, *args: Any, **kwargs: Any) -> Any:
    """The loader's progress bar, unless it has nothing to count: what is streamed comes later."""
    return _BAR.original(items, *args, **kwargs) if items else items


_BAR = Patch(core_model_loading, "tqdm", _bar)


def progress_bar(total: int, description: str, unit: str) -> Any:
    """A bar like the library's own: in a notebook a widget; nothing where bars are switched off."""
    return library_logging.tqdm(total=total, desc=description, unit=unit, leave=False, delay=0.5)


def pretrained_modules(model: nn.Module) -> list[PreTrainedModel]:
    """Every library model in the tree, outermost first: a pass may begin at any of them."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


AUTO_COMPILE = "_valid_auto_compile_criteria"


def disable_auto_compile(model: PreTrainedModel) -> None:
    """Keep `generate` from compiling: hooks and graphs do not mix. Set as an attribute."""

    def never(*_args: object, **_kwargs: object) -> bool:
        return False

    object.__setattr__(model, AUTO_COMPILE, never)
