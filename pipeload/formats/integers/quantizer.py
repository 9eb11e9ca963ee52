"""Tells transformers how to load checkpoints that `pipeload quantize` has made, and to save them.

By its official ways (`register_quantizer`), so that plain `from_pretrained` loads them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pipeload.errors import OptionError
from pipeload.formats.form_names import DECODED, GGUF
from pipeload.formats.integers.expert_matrices import shape_of
from pipeload.formats.integers.format import METHOD
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BLOCK_ROWS, BY_ROWS, STORED
from pipeload.formats.integers.packed_experts import PackedExperts
from pipeload.formats.integers.packed_linear import PackedLinear
from pipeload.formats.integers.parted_linear import PartedLinear
from pipeload.formats.integers.rounding import GROUPS, IMPORTANCE, ZERO_POINTS
from pipeload.weights.row_cuts import RowRange, row_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from pipeload.formats.integers.expert_matrices import ExpertShape

_STATISTICS = ("BF16", "F16", "F32")
_OF_ONE = ({"bits": 8}, *({"bits": 4, "group_size": group} for group in GROUPS))


class PipeloadConfig(QuantizationConfigMixin):
    """Our `quantization_config` in config.json."""

    def __init__(
        self,
        bits: int = 8,
        *,
        group_size: int | None = None,
        method: str = "rtn",
        order: str | None = None,
        reordered: bool = False,
        exact_inputs: bool = False,
        part_bytes: int | None = None,
        modules_to_not_convert: Sequence[str] = (),
        modules: Mapping[str, Mapping[str, int]] | None = None,
        experts: str | None = None,
        **_: Any,
    ) -> None:
        """Check what a checkpoint says.

        Args:
            bits: 8 or 4.
            group_size: of int4, 32, 64 or 128.
            method: how integers were made; says nothing to whoever loads them.
            order: that int4 weights are stored in: see `order`.
            reordered: whether int4 weights say which input each of their columns takes.
            exact_inputs: whether inputs are never rounded for speed; not the checkpoint's.
            part_bytes: the most that a weight, or one of the parts it is stored in, takes.
            modules_to_not_convert: paths of Linears, or of what holds them, that are floats.
            modules: what holds for single Linears, by their paths: {"bits": 8}, or {"bits": 4,
                "group_size": 32}.
            experts: the dtype, a safetensors code, of what goes with the integers of experts; None
                where all of them are floats.
            **_: what later versions may add.

        Raises:
            OptionError: one of them means nothing.
        """
        self.quant_method: Any = METHOD  # the library has an enum of its own there
        self.bits, self.group_size, self.method, self.order = bits, group_size, method, order
        self.reordered, self.part_bytes = bool(reordered), part_bytes
        self.exact_inputs, self.experts = bool(exact_inputs), experts
        self.modules_to_not_convert = list(modules_to_not_convert)
        self.modules = {path: dict(told) for path, told in (modules or {}).items()}
        for path, told in self.modules.items():
            if told not in _OF_ONE:
                raise OptionError(
                    f"quantization_config has modules[{path!r}]={told!r}, and this version of "
                    "pipeload knows {'bits': 8}, or 4 with a group_size of 32, 64 or 128. Take a "
                    "newer pipeload."
                )
        allowed: dict[str, tuple[object, ...]] = {
            "bits": (8, 4),
            "method": (*ZERO_POINTS, IMPORTANCE, *DECODED, GGUF),
            "experts": (None, *_STATISTICS),
        }
        if bits == 4:
            allowed |= {"group_size": GROUPS, "order": STORED}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise OptionError(
                    f"quantization_config has {name}={getattr(self, name)!r}, which this version "
                    f"of pipeload does not know. Choose one of {', '.join(map(str, values))}; if "
                    "the checkpoint says it, take a newer pipeload."
                )
        if part_bytes is not None and not (isinstance(part_bytes, int) and part_bytes > 0):
            raise OptionError(
                f"quantization_config has part_bytes={part_bytes!r}. Give a number of bytes, or "
                "None."
            )

    def to_dict(self) -> dict[str, Any]:
        """What belongs to a checkpoint."""
        return {name: value for name, value in super().to_dict().items() if name != "exact_inputs"}

    def keeps(self, path: str) -> bool:
        """Tell whether the Linear at `path`, or what holds experts, is left as it is."""
        return any(f"{path}.".startswith(f"{kept}.") for kept in self.modules_to_not_convert)

    def for_module(self, path: str) -> PipeloadConfig:
        """Give what holds for the Linear at `path`."""
        if path not in self.modules:
            return self
        own = {**vars(self), "modules": None, "group_size": None, **self.modules[path]}
        if own["bits"] == 4:  # beside others of 8, which have no order
            own["order"] = self.order or BY_ROWS
        return PipeloadConfig(**own)

    def fits(self, module: nn.Linear) -> bool:
        """Tell whether the kernel takes a weight of its shape."""
        if self.bits == 8:
            return Int8Linear.fits(module.out_features, module.in_features)
        group = self.group_size or 0
        return Int4Linear.fits(module.out_features, module.in_features, group)

    def experts_as(self, module: nn.Module) -> ExpertShape | None:
        """Give the shape of what holds experts as integers; None for any other module."""
        if self.experts is None:
            return None
        return shape_of(module, self.bits, self.group_size or 0, self.experts)

    def parts(self, rows: int, columns: int) -> tuple[RowRange, ...]:
        """List the rows of each part that a weight of that shape is stored in: mostly one."""
        row_bytes = columns * self.bits // 8
        if self.part_bytes is None or rows * row_bytes <= self.part_bytes:
            return (RowRange(0, rows),)
        most = self.part_bytes // row_bytes // BLOCK_ROWS * BLOCK_ROWS
        return row_ranges(rows, max(2 * BLOCK_ROWS, most))

    def make(self, module: nn.Linear, path: str) -> PackedLinear | PartedLinear:
        """Make what takes the place of `module`, on the meta device as well."""
        bias, dtype = module.bias is not None, module.weight.dtype
        columns = module.in_features
        parts = self.parts(module.out_features, columns)
        if len(parts) == 1:
            return self._packed(columns, module.out_features, bias=bias, dtype=dtype, path=path)
        made = [
            self._packed(columns, stop - start, bias=False, dtype=dtype, path=f"{path}.parts.{i}")
            for i, (start, stop) in enumerate(parts)
        ]
        return PartedLinear(made, bias=bias, dtype=dtype)

    def _packed(self, *sizes: int, **options: Any) -> PackedLinear:
        options |= {"exact_inputs": self.exact_inputs}
        if self.bits == 8:
            return Int8Linear(*sizes, **options)
        group, order = self.group_size or 0, self.order or ""
        options |= {"reordered": self.reordered}
        return Int4Linear(*sizes, group_size=group, order=order, **options)


class PipeloadQuantizer(HfQuantizer):
    """Puts `PackedLinear`s and `PackedExperts` where Linears and experts were.

    Weights are loaded as they are stored.
    """

    requires_calibration = True  # it loads what is quantised, and quantises nothing
    quantization_config: PipeloadConfig

    def validate_environment(
        self, *_args: Any, device_map: dict[str, Any] | None = None, **_kwargs: Any
    ) -> None:
        """Refuse devices that the kernels do not run on."""
        places = device_map.values() if isinstance(device_map, dict) else ()
        for place in map(str, places):
            if place not in {"cpu", "meta"}:
                raise OptionError(
                    f"int{self.quantization_config.bits} checkpoints of pipeload are computed on "
                    f"the CPU alone, and device_map has {place!r}. Leave it out."
                )

    def _process_model_before_weight_loading(
        self, model: nn.Module, dtype: torch.dtype | None = None, **_kwargs: Any
    ) -> None:
        import torch

        config = self.quantization_config
        # A checkpoint tells the paths of the whole model, of which this may be the base alone.
        base = str(getattr(model, "base_model_prefix", ""))
        before = f"{base}." if base and not hasattr(model, base) else ""
        with torch.device("meta"):
            for path, module in list(model.named_modules()):
                told = before + path
                kept = config.keeps(path) or config.keeps(told)
                own = config.for_module(path if path in config.modules else told)
                made = None if kept else _packed(own, module, path)
                if made is not None:
                    made.train(module.training)
                    parent, _, name = path.rpartition(".")
                    setattr(model.get_submodule(parent), name, made)

    def _process_model_after_weight_loading(self, model: nn.Module, **_kwargs: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, (PackedLinear, PackedExperts)):
                module.settle()
            if isinstance(module, Int4Linear):
                # It is saved with what its weights are from now on.
                self.quantization_config.order = module.order
        return model

    def is_serializable(self) -> bool:
        """Have it saved as it was loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Have adapters trained on top of it."""
        return True


def _packed(config: PipeloadConfig, module: nn.Module, path: str) -> nn.Module | None:
    """What takes the place of a module, by what holds for it; None if it stays."""
    if type(module) is nn.Linear:
        return config.make(module, path) if config.fits(module) else None
    shape = config.experts_as(module)
    if shape is None:
        return None
    return PackedExperts(module, shape, exact_inputs=config.exact_inputs, path=path)


# Here, not in a function for whoever imports this: the import of the library above may have asked
# for this very module, which it then got half made.
if METHOD not in AUTO_QUANTIZER_MAPPING:
    register_quantization_config(METHOD)(PipeloadConfig)
    register_quantizer(METHOD)(PipeloadQuantizer)
