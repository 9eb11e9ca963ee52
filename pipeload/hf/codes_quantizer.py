"""Has transformers load what others have quantised as if `pipeload convert` had made it.

For checkpoints that the library would give to a package (GPTQ, AWQ, AutoRound). The integers stay
what they are; each time that a weight is read, they are put into the order of our kernels. The
library asks a quantizer for modules, before weights come, and for operations that make weights of
stored tensors: these are ours. Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from pipeload.checkpoint.headers import open_checkpoint
from pipeload.formats.codes.coded_weight import statistics
from pipeload.formats.codes.repack import BLOCK_CODES, fill_floats, repack
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BLOCK_ROWS, BY_ROWS
from pipeload.formats.integers.packed_linear import PackedLinear
from pipeload.formats.integers.quantizer import PipeloadConfig, PipeloadQuantizer
from pipeload.formats.integers.rounding import GROUPS
from pipeload.hf.coded_checkpoint import CodedCheckpoint
from pipeload.hf.pending_load import PendingLoad

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from pipeload.formats.codes.coded_weight import CodedWeight, CodesFormat

_STATISTIC_TIMES: Final = 6
"""Scales and zeros in fp32 while they are made, in multiples of one of both."""
_ORDERS: Final = 4
"""Of columns, while they are sorted by groups."""
_BYTES_PER_CODE: Final = 18
"""Of a block of codes on their way to floats: fp32, its scale and zero, and those in order."""


class CodesQuantizer(PipeloadQuantizer):
    """The quantizer of a checkpoint whose integers are taken over as they are read."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        form: CodesFormat,
        seconds: float | None,
        key_mapping: dict[str, str] | None = None,
    ) -> None:
        """Without its files, which the library finds later.

        Args:
            settings: the checkpoint's `quantization_config`.
            form: what that is of.
            seconds: until a read is said to hang.
            key_mapping: names that the load was told to change.
        """
        super().__init__(PipeloadConfig(8, method=form.method), pre_quantized=True)
        self._settings, self._seconds = dict(settings), seconds
        self._key_mapping = key_mapping
        self._converters: list[WeightConverter] = []

    def _process_model_before_weight_loading(
        self,
        model: Any,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        files = [Path(file) for file in checkpoint_files or ()]
        if not files or any(file.suffix != ".safetensors" for file in files):
            return  # for whoever loads weights to refuse
        mapping = get_model_conversion_mapping(model, self._key_mapping)
        plan = model._get_dtype_plan(model.dtype)
        record = SimpleNamespace(weight_mapping=mapping, hf_quantizer=None, dtype_plan=plan)
        pending = PendingLoad(model, open_checkpoint(files, None), record, self._seconds)
        with torch.device("cpu"):  # the library has all that is made here be without values
            folder = str(files[0].parent)
            source = CodedCheckpoint(folder, pending, self._settings, in_part=True)
            chosen = source.choose(or_none=True)
        names = source.parameters  # while Linears are of floats
        self.quantization_config = model.config.quantization_config = source.config(chosen)
        super()._process_model_before_weight_loading(model, dtype, **kwargs)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        for stored, name in names.items():
            weight = source.coded.get(stored)
            if weight is not None:
                module = model.get_submodule(name.rpartition(".")[0])
                operation = TakenOver(self, weight)
                self._converters.append(_converter(operation, name, module, renamings))

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any
    ) -> list[WeightConverter | WeightRenaming]:
        """Put ours before the model's: the first that matches a name is taken."""
        update: Any = super().update_weight_conversions
        others: list[Any] = update(weight_conversions, model)
        return [*self._converters, *others]


class TakenOver(ConversionOps):
    """Makes the parameters of one module of the codes that are stored for its weight."""

    supports_many_to_many = True

    def __init__(self, quantizer: CodesQuantizer, weight: CodedWeight) -> None:
        """`quantizer`: the library's operations for quantised weights are known by it."""
        self.hf_quantizer, self.weight = quantizer, weight

    @property
    def beside_bytes(self) -> int:
        """What `fill` takes beside what it reads and what it makes."""
        rows, columns = self.weight.shape
        stored = 2 * rows * self.weight.groups * torch.float32.itemsize
        shown = 2 * rows * (columns // min(GROUPS)) * torch.float32.itemsize
        orders = _ORDERS * columns * torch.int64.itemsize
        block = max(BLOCK_CODES, BLOCK_ROWS * columns) * _BYTES_PER_CODE
        return block + _STATISTIC_TIMES * stored + shown + orders

    def fill(
        self,
        stored: Mapping[str, torch.Tensor],
        into: Mapping[str, torch.Tensor],
        module: nn.Module | None,
    ) -> None:
        """Make the parameters as the module computes with them.

        Args:
            stored: all parts of the weight, by their names in the checkpoint.
            into: where to, by names in the module.
            module: None where it is gone, and nobody will.

        Raises:
            CheckpointError: what is stored cannot be.
        """
        self._fill(stored, into, getattr(module, "computed_order", BY_ROWS))

    def _fill(
        self, stored: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor], order: str
    ) -> None:
        weight, made = self.weight, into["weight"]
        codes = weight.decode({key: stored[part.name] for key, part in weight.parts.items()})
        if made.is_floating_point():
            fill_floats(codes, made)
            return
        repack(codes, weight.bits, order, made)
        name = Int4Linear.statistics if weight.bits == 4 else Int8Linear.statistics
        beside = into[name]
        groups = beside.shape[0] if weight.bits == 4 else 0
        beside.copy_(statistics(weight, codes.grid, groups, beside.dtype).view(beside.shape))
        if "columns" in into:
            in_order = torch.arange(weight.shape[1], dtype=torch.int32)
            into["columns"].copy_(in_order if codes.columns is None else codes.columns)

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Do the same for the library, which loads what is not streamed."""
        model, name = kwargs["model"], str(kwargs["full_layer_name"])
        by_pattern = dict(zip(self.weight.parts.values(), source_patterns, strict=True))
        stored = {
            part.name: found[0] if isinstance(found := input_dict[pattern], list) else found
            for part, pattern in by_pattern.items()
        }
        module = model.get_submodule(name.rpartition(".")[0])
        names = [target.rpartition(".")[2] for target in target_patterns]
        into = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype)
            for name in names
            for parameter in (module.get_parameter(name),)
        }
        self._fill(stored, into, getattr(module, "order", BY_ROWS))
        return {target: into[name] for target, name in zip(target_patterns, names, strict=True)}


def _converter(
    operation: TakenOver, name: str, module: nn.Module, renamings: Sequence[WeightRenaming]
) -> WeightConverter:
    """What makes a module's parameters, of which `name` is the first, of what is stored."""

    def renamed(name: str) -> str:
        return str(rename_source_key(name, [*renamings], [])[0])

    names = ["weight"]
    if isinstance(module, PackedLinear):
        names += [name for name in (module.statistics, "columns") if _has(module, name)]
    stem = name.removesuffix("weight")
    sources = [f"^{re.escape(renamed(part.name))}$" for part in operation.weight.parts.values()]
    return WeightConverter(sources, [stem + name for name in names], [operation])


def _has(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is not None
