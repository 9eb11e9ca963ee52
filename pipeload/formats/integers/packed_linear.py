"""What Linears with int8 and int4 weights have in common."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeload.errors import UnsupportedModelError
from pipeload.formats.integers import tile_product, wide_product
from pipeload.formats.integers.unpack import KINDS
from pipeload.formats.integers.wide_product import Sizes, WeightBlock

INT8_ALIGNMENT = 16
"""[Note: addresses] The int8 kernel for bf16 on AVX512 ends the process when its weight does not
begin at a multiple of 16 bytes, or its input at one of 32 (torch 2.13). Fresh tensors begin at one
of 64; mapped files and slices may not. Bits do not depend on it.
"""
INPUT_ALIGNMENT = 64
"""That inputs are given to the kernels at."""


class PackedLinear(nn.Linear, abc.ABC):
    """A quantised Linear. It is a Linear, so that whoever looks for those finds it."""

    bits: ClassVar[int]
    statistics: ClassVar[str]
    """Name of the parameter that goes with the weight."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, path: str = "") -> None:
        """Without its weight. `path` is what errors call it."""
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.path = in_features, out_features, path
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features))
        else:
            self.register_parameter("bias", None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: [..., in] in the dtype of the statistics; returns [..., out].

        Raises:
            UnsupportedModelError: the weight is on disk, or one of both on no CPU.
        """
        self.refuse_placeholder()
        self._refuse_devices(input)
        rows = aligned(input.reshape(-1, self.in_features).contiguous(), INPUT_ALIGNMENT)
        if torch.is_grad_enabled() and input.requires_grad:
            made: torch.Tensor = Product.apply(rows, self)  # type: ignore[no-untyped-call]
        else:
            made = self.product(rows)
        made = made.view(*input.shape[:-1], self.out_features)
        return made if self.bias is None else made + self.bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without the bias."""
        if not len(rows):
            return rows.new_empty((0, self.out_features))
        rounded, statistics = self.rounds_inputs, self.get_parameter(self.statistics)
        tiled = self._tiled(rows.dtype, rounded=rounded)
        most = wide_product.most_by_kernel(self.bits, rows.dtype, rounded=rounded, tiled=tiled)
        # No kernel takes those of a model that was made fp64.
        known = statistics.dtype in KINDS
        if known and len(rows) <= most:
            return self.by_kernel(rows)
        if known and tiled:
            return tile_product.multiply(rows, self.weight, statistics)
        return wide_product.multiply(rows, self.out_features, self.block)

    def _tiled(self, dtype: torch.dtype, *, rounded: bool) -> bool:
        """Whether many rows are multiplied by tiles, which int4 in torch's order is not."""
        by_rows = self.bits == 8 or rounded
        return by_rows and tile_product.takes(dtype, self.in_features)

    @property
    def rounds_inputs(self) -> bool:
        """Whether few rows of input are rounded, for our own kernel."""
        return False

    @property
    def will_round(self) -> bool:
        """The same, once its weight is as it is computed here."""
        return self.rounds_inputs

    @property
    def sizes(self) -> Sizes:
        """What the memory that its products take depends on."""
        dtype = self.get_parameter(self.statistics).dtype
        sizes = self.out_features, self.in_features
        rounded, tiled = self.will_round, self._tiled(dtype, rounded=self.will_round)
        return Sizes(*sizes, self.bits, dtype, rounded=rounded, tiled=tiled)

    @abc.abstractmethod
    def by_kernel(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without the bias."""

    @abc.abstractmethod
    def block(self, start: int, stop: int, values: torch.Tensor) -> WeightBlock:
        """Make rows `start:stop` of the weight floats, in `values`; `start % 64 == 0`."""

    @abc.abstractmethod
    def dequantised(self) -> torch.Tensor:
        """The weight as fp32 of [out, in]."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Make a weight that was just loaded one that the kernel here can read."""

    def extra_repr(self) -> str:
        """Describe it for `print(model)`."""
        return f"{super().extra_repr()}, bits={self.bits}"

    def refuse_placeholder(self) -> None:
        """Raise UnsupportedModelError where the weight is on disk."""
        # An integer that is not there reads as zero, which nobody would notice.
        if not any(self.weight.stride()):
            raise UnsupportedModelError(
                f"the module {self.path!r} was called while its block was not running, so its "
                f"int{self.bits} weight is on disk. Call the model itself, or load it without "
                "pipeload."
            )

    def _refuse_devices(self, input: torch.Tensor) -> None:
        # Our own kernels take addresses: one of another device would end the process.
        devices = input.device.type, self.weight.device.type
        if devices not in {("cpu", "cpu"), ("meta", "meta")}:
            raise UnsupportedModelError(
                f"the module {self.path!r} computes on the CPU alone; its input is on "
                f"{devices[0]!r}, its int{self.bits} weight on {devices[1]!r}. Leave both on the "
                "CPU."
            )


def aligned(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """Give the tensor, or a copy that begins where the kernels can read: [Note: addresses]."""
    if isinstance(tensor, FakeTensor) or tensor.data_ptr() % alignment == 0:
        return tensor
    return tensor.clone()


class Factor(Protocol):
    """A quantised weight, as a product needs it."""

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without the bias."""

    def dequantised(self) -> torch.Tensor:
        """The weight as fp32 of [out, in]."""

    def refuse_placeholder(self) -> None:
        """Raise UnsupportedModelError where the weight is on disk."""


class Product(torch.autograd.Function):
    """The kernels have no derivative of their own. The weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: Factor) -> torch.Tensor:
        """Multiply `rows` as `factor` does."""
        ctx.factor = factor
        return factor.product(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Multiply with the weight as floats."""
        factor: Factor = ctx.factor
        factor.refuse_placeholder()
        return grad @ factor.dequantised().to(grad.dtype), None
