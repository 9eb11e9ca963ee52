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

from pipeload._int4_order import ORDERS, kernel_order
from pipeload._packed_linear import Int4Linear, Int8Linear, PackedLinear
from pipeload._rounding import GROUPS, ZERO_POINTS
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

METHOD = "pipeload"


class PipeloadConfig(QuantizationConfigMixin):
    """`quantization_config` in config.json."""

    def __init__(
        self,
        bits: int = 8,
        group_size: int | None = None,
        method: str = "rtn",
        order: str | None = None,
        modules_to_not_convert: Sequence[str] = (),
        **_: Any,
    ) -> None:
        """What a checkpoint says, checked.

        Args:
            bits: 8 or 4.
            group_size: of int4, 32, 64 or 128.
            method: how integers were made; says nothing to whoever loads them.
            order: that int4 weights are stored in: see `_int4_order`.
            modules_to_not_convert: paths of Linears, or of what holds them, that are floats.
            **_: what later versions may add.

        Raises:
            OptionError: one of them means nothing.
        """
        self.quant_method: Any = METHOD  # the library has an enum of its own there
        self.bits, self.group_size, self.method, self.order = bits, group_size, method, order
        self.modules_to_not_convert = list(modules_to_not_convert)
        allowed: dict[str, tuple[object, ...]] = {"bits": (8, 4), "method": ZERO_POINTS}
        if bits == 4:
            allowed |= {"group_size": GROUPS, "order": tuple(ORDERS)}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise OptionError(
                    f"quantization_config has {name}={getattr(self, name)!r}, which this version "
                    f"of pipeload does not know: wanted one of {', '.join(map(str, values))}."
                )

    def keeps(self, path: str) -> bool:
        """Whether the Linear at `path` is left as it is."""
        return any(f"{path}.".startswith(f"{kept}.") for kept in self.modules_to_not_convert)

    def fits(self, module: nn.Linear) -> bool:
        """Whether the kernel takes a weight of its shape."""
        if self.bits == 8:
            return Int8Linear.fits(module.out_features, module.in_features)
        group = self.group_size or 0
        return Int4Linear.fits(module.out_features, module.in_features, group)

    def make(self, module: nn.Linear, path: str) -> PackedLinear:
        """What takes the place of `module`, on the meta device as well."""
        sizes = module.in_features, module.out_features
        bias, dtype = module.bias is not None, module.weight.dtype
        made: PackedLinear
        if self.bits == 8:
            made = Int8Linear(*sizes, bias=bias, dtype=dtype, path=path)
        else:
            group, order = self.group_size or 0, self.order or ""
            made = Int4Linear(
                *sizes, bias=bias, group_size=group, order=order, dtype=dtype, path=path
            )
        return made


class PipeloadQuantizer(HfQuantizer):
    """Puts `PackedLinear`s where Linears were; weights are loaded as they are stored."""

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
        with torch.device("meta"):
            for path, module in list(model.named_modules()):
                if type(module) is nn.Linear and not config.keeps(path) and config.fits(module):
                    made = config.make(module, path)
                    made.train(module.training)
                    parent, _, name = path.rpartition(".")
                    setattr(model.get_submodule(parent), name, made)

    def _process_model_after_weight_loading(self, model: nn.Module, **_kwargs: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, PackedLinear):
                module.settle()
        if self.quantization_config.bits == 4:
            # It is saved with what its weights are from now on.
            self.quantization_config.order = kernel_order()
        return model

    def is_serializable(self) -> bool:
        """Saved as it was loaded."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters may be trained on top of it."""
        return True


def register() -> None:
    """Make the library know all this. May be called again."""
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(PipeloadConfig)
        register_quantizer(METHOD)(PipeloadQuantizer)
