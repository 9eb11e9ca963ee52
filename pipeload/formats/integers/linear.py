"""Linears with int8 and int4 weights, computed on the CPU.

Few rows of input by our own kernels, of int4 in their order, or those of torch's core; many as
`wide_product` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeload.formats.integers import byte_product, wide_product
from pipeload.formats.integers import product as rounded_product
from pipeload.formats.integers.order import (
    BY_ROWS,
    KERNEL_ROWS,
    kernel_order,
    reorder,
    unpack,
)
from pipeload.formats.integers.packed_linear import INT8_ALIGNMENT, PackedLinear, aligned
from pipeload.formats.integers.rounding import GROUPS, from_int4
from pipeload.formats.integers.unpack import int4_block
from pipeload.formats.integers.wide_product import Sizes, WeightBlock

if TYPE_CHECKING:
    from collections.abc import Mapping

_COLUMN_STEP = 16  # the int8 kernel leaves out, or reads beyond, what is no whole vector


class Int8Linear(PackedLinear):
    """weight: int8 of [out, in]; scale: [out]."""

    bits = 8
    statistics = "scale"
    exact_inputs = False  # of a pickle that is older than our kernel

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        dtype: torch.dtype = torch.float32,
        exact_inputs: bool = False,
        path: str = "",
    ) -> None:
        """Without values.

        Args:
            in_features: a multiple of 16.
            out_features: any number.
            bias: whether it has one.
            dtype: of scale and bias, bf16, fp16 or fp32.
            exact_inputs: whether inputs are never rounded, though there is a kernel that does.
            path: what errors call it.
        """
        super().__init__(in_features, out_features, bias=bias, path=path)
        self.exact_inputs = exact_inputs
        empty = torch.empty((out_features, in_features), dtype=torch.int8)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.scale = nn.Parameter(torch.empty(out_features, dtype=dtype), requires_grad=False)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(dtype)

    @staticmethod
    def fits(out_features: int, in_features: int) -> bool:
        """Whether the kernels compute such a weight rightly."""
        return out_features > 0 and in_features > 0 and in_features % _COLUMN_STEP == 0

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without the bias."""
        if _has_no_addresses(rows):
            given = rows, self.weight, self.scale, self.exact_inputs
            made: torch.Tensor = _opaque_int8_product(*given)
            return made
        return super().product(rows)

    @property
    def rounds_inputs(self) -> bool:
        """Whether few rows of input are rounded, for our own kernel."""
        return not self.exact_inputs and byte_product.compiled() is not None

    def by_kernel(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [n, in] to [n, out], without the bias."""
        if self.rounds_inputs:
            return byte_product.multiply(rows, self.weight, self.scale)
        multiply = torch._weight_int8pack_mm  # noqa: SLF001 - has no other name
        return multiply(rows, self.weight, self.scale)

    def block(self, start: int, stop: int, values: torch.Tensor) -> WeightBlock:
        """Give integers as they are, which bf16 has as well, and scales for the products."""
        made = values.view(stop - start, self.in_features).copy_(self.weight[start:stop])
        return WeightBlock(made.t(), self.scale[start:stop].to(values.dtype))

    def dequantised(self) -> torch.Tensor:
        """The weight as fp32 of [out, in]."""
        return self.weight.float() * self.scale.float()[:, None]

    def settle(self) -> None:
        """Copy a weight that does not begin where torch's kernel can read."""
        if not self.rounds_inputs:
            self.weight.data = aligned(self.weight.data, INT8_ALIGNMENT)


class Int4Linear(PackedLinear):
    """weight: uint8 of [out, in / 2] in `order`; scales_and_zeros: [in / group, out, 2].

    Where its columns are in another order than the inputs', `columns` says which input each takes:
    int32 of [in].
    """

    bits = 4
    statistics = "scales_and_zeros"
    columns: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        group_size: int,
        order: str,
        reordered: bool = False,
        dtype: torch.dtype = torch.float32,
        exact_inputs: bool = False,
        path: str = "",
    ) -> None:
        """Without values.

        Args:
            in_features: a multiple of the group.
            out_features: a multiple of 16.
            bias: whether it has one.
            group_size: 32, 64 or 128.
            order: that its weight will be loaded in, one of `order.STORED`.
            reordered: whether it has `columns`.
            dtype: of scales, zeros and bias: bf16, fp16 or fp32.
            exact_inputs: whether inputs are never rounded, though there is a kernel that does.
            path: what errors call it.
        """
        super().__init__(in_features, out_features, bias=bias, path=path)
        self.group_size, self.order, self.exact_inputs = group_size, order, exact_inputs
        empty = torch.empty((out_features, in_features // 2), dtype=torch.uint8)
        self.weight = nn.Parameter(empty, requires_grad=False)
        shape = (in_features // group_size, out_features, 2)
        self.scales_and_zeros = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        columns = torch.empty(in_features, dtype=torch.int32) if reordered else None
        made = None if columns is None else nn.Parameter(columns, requires_grad=False)
        self.register_parameter("columns", made)
        if self.bias is not None:
            self.bias.data = self.bias.data.to(dtype)

    @staticmethod
    def fits(out_features: int, in_features: int, group_size: int) -> bool:
        """Whether the kernel takes such a weight."""
        return (
            group_size in GROUPS
            and min(out_features, in_features) > 0
            and out_features % KERNEL_ROWS == 0
            and in_features % group_size == 0
        )

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without the bias."""
        rows = self.in_order(rows)
        if _has_no_addresses(rows):
            made: torch.Tensor = _opaque_product(
                rows, self.weight, self.scales_and_zeros, self.order
            )
            return made
        return super().product(rows)

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, in] with columns as the weight has them."""
        return rows if self.columns is None else rows.index_select(1, self.columns)

    def by_kernel(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [n, in] to [n, out], without the bias."""
        if self.rounds_inputs:
            return rounded_product.multiply(rows, self.weight, self.scales_and_zeros)
        if self.order != kernel_order():  # a pickle from another kind of processor: no garbage
            return wide_product.multiply(rows, self.out_features, self.block)
        multiply: Any = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - the same
        made: torch.Tensor = multiply(rows, self.weight, self.group_size, self.scales_and_zeros)
        return made

    def block(self, start: int, stop: int, values: torch.Tensor) -> WeightBlock:
        """Dequantise in fp32, then round once."""
        statistics = self.scales_and_zeros[:, start:stop]
        return WeightBlock(
            int4_block(self.weight[start:stop], statistics, self.order, values), None
        )

    @property
    def rounds_inputs(self) -> bool:
        """Whether few rows of input are rounded, for our own kernel."""
        return self.order == BY_ROWS

    @property
    def will_round(self) -> bool:
        """The same, once its weight is in the order that it is computed in here."""
        return self.computed_order == BY_ROWS

    @property
    def computed_order(self) -> str:
        """The order that its weight is to be in here."""
        ours = self.order == BY_ROWS and not self.exact_inputs
        return BY_ROWS if ours and rounded_product.compiled() is not None else kernel_order()

    def settle(self) -> None:
        """Put a weight into the order that it is computed in here."""
        wanted = self.computed_order
        if self.order != wanted:
            self.refuse_placeholder()
            made = torch.empty_like(self.weight)
            reorder(self.weight, made, self.order, wanted)
            self.weight.data, self.order = made, wanted

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {})
        metadata.setdefault(prefix[:-1], {})["order"] = self.order

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *others: Any,
    ) -> None:
        # Shapes are alike in all orders, so nobody would notice.
        name, order = f"{prefix}weight", local_metadata.get("order", self.order)
        if order != self.order and name in state_dict:
            made = torch.empty_like(state_dict[name])
            reorder(state_dict[name], made, order, self.order)
            state_dict = {**state_dict, name: made}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    @property
    def sizes(self) -> Sizes:
        """What the memory that its products take depends on."""
        return super().sizes._replace(reordered=self.columns is not None)

    def dequantised(self) -> torch.Tensor:
        """The weight as fp32 of [out, in]."""
        made = from_int4(unpack(self.weight, self.order), self.scales_and_zeros)
        if self.columns is None:
            return made
        return torch.empty_like(made).index_copy_(1, self.columns.long(), made)


def _has_no_addresses(rows: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() or rows.is_meta or isinstance(rows, FakeTensor)


@torch.library.custom_op("pipeload::int8_product", mutates_args=())
def _opaque_int8_product(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, exact_inputs: bool
) -> torch.Tensor:
    """An int8 product, as below."""
    with torch.device("meta"):
        made = Int8Linear(rows.shape[1], len(weight), bias=False, exact_inputs=exact_inputs)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.scale = nn.Parameter(scale, requires_grad=False)
    return made.product(rows)


@_opaque_int8_product.register_fake
def _(
    rows: torch.Tensor, weight: torch.Tensor, _scale: torch.Tensor, _exact_inputs: bool
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[0]))


@torch.library.custom_op(
    "pipeload::int4_product",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor scales_and_zeros, str order) -> Tensor",
)
def _opaque_product(
    rows: torch.Tensor, weight: torch.Tensor, scales_and_zeros: torch.Tensor, order: str
) -> torch.Tensor:
    """An int4 product for torch.compile, which must not trace what hands out addresses.

    Also for tensors that have none, of which the shape is asked.
    """
    (columns, (groups, out, _)) = rows.shape[1], scales_and_zeros.shape
    with torch.device("meta"):
        made = Int4Linear(columns, out, bias=False, group_size=columns // groups, order=order)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.scales_and_zeros = nn.Parameter(scales_and_zeros, requires_grad=False)
    return made.product(rows)


@_opaque_product.register_fake
def _(
    rows: torch.Tensor, _weight: torch.Tensor, scales_and_zeros: torch.Tensor, _order: str
) -> torch.Tensor:
    return rows.new_empty((rows.shape[0], scales_and_zeros.shape[1]))
