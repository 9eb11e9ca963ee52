"""Where the matrices of an expert lie in its bytes, and products with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.formats.integers import byte_product, tile_product, wide_product
from pipeload.formats.integers import product as rounded_product
from pipeload.formats.integers.expert_rows import most_together, temporary_bytes
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import BY_ROWS, unpack
from pipeload.formats.integers.packed_linear import INT8_ALIGNMENT, aligned
from pipeload.formats.integers.rounding import from_int4
from pipeload.formats.integers.unpack import int4_block
from pipeload.formats.integers.wide_product import Sizes, WeightBlock
from pipeload.weights.arena import DTYPES

if TYPE_CHECKING:
    from torch import nn

_ALIGN = 64
_MATRICES = 3  # dimensions of matrices that are stacked


class MatrixPlace(NamedTuple):
    """One matrix in the bytes of an expert."""

    rows: int
    columns: int
    """Those of its input."""
    start: int
    """Of its codes."""
    told: int
    """Of its statistics, behind them."""
    stop: int


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """All that the bytes of one expert depend on: codes and statistics of two matrices.

    Codes lie as in a Linear of the same number of bits, int4 row after row. Each part begins at a
    multiple of 64 bytes from the expert's first.
    """

    experts: int
    hidden: int
    inner: int
    """Columns of the second matrix."""
    wide: int
    """Rows of the first one: those of gates among them, where there are any."""
    bits: int
    group: int
    """Columns that share a scale; 0 of int8."""
    dtype: str
    """Of scales and zeros: a safetensors code."""

    @property
    def fits(self) -> bool:
        """Whether the kernels take both matrices."""
        sizes = ((self.wide, self.hidden), (self.hidden, self.inner))
        if self.bits == 4:
            return all(Int4Linear.fits(*size, self.group) for size in sizes)
        return all(Int8Linear.fits(*size) for size in sizes)

    @property
    def places(self) -> tuple[MatrixPlace, MatrixPlace]:
        """Where the matrix for the gate and what it opens lies, and the one behind."""
        first = self._place(0, self.wide, self.hidden)
        return first, self._place(first.stop, self.hidden, self.inner)

    @property
    def nbytes(self) -> int:
        """Of one expert."""
        return self.places[1].stop

    @property
    def numbers(self) -> int:
        """How many of the model all experts stand for."""
        return self.experts * self.hidden * (self.wide + self.inner)

    def _place(self, start: int, rows: int, columns: int) -> MatrixPlace:
        told = start + _whole(rows * columns * self.bits // 8)
        items = 2 * columns // self.group if self.group else 1
        return MatrixPlace(
            rows, columns, start, told, told + _whole(rows * items * DTYPES[self.dtype].itemsize)
        )


def _whole(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def shape_of(module: nn.Module, bits: int, group: int, dtype: str) -> ExpertShape | None:
    """The shape of the library's experts module as integers; None if it is not of the known kind.

    Known is what its decorator says all about: see `transformers.integrations.moe`. Its biases stay
    floats.
    """
    told: Any = module
    known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    if not known or getattr(module, "has_post_expert_norm", False):
        return None
    first = "gate_up_proj" if told.has_gate else "up_proj"
    own = dict(module.named_parameters(recurse=False))
    biases = {f"{first}_bias", "down_proj_bias"} if told.has_bias else set()
    has_buffers = next(module.buffers(), None) is not None
    below = {name.partition(".")[0] for name, _ in module.named_parameters() if "." in name}
    if own.keys() != {first, "down_proj", *biases} or below - {"act_fn"} or has_buffers:
        return None
    (up, down) = own[first], own["down_proj"]
    if not all(p.dim() == _MATRICES and p.is_floating_point() for p in (up, down)):
        return None
    (experts, *rows), (others, *back) = up.shape, down.shape
    if told.is_transposed:
        rows, back = rows[::-1], back[::-1]
    if experts != others or experts < 2 or rows[1] != back[0]:
        return None
    found = ExpertShape(experts, rows[1], back[1], rows[0], bits, group, dtype)
    return found if found.fits else None


class ExpertMatrix:
    """One matrix of one expert, for as long as a product takes: a `Factor`."""

    def __init__(
        self, expert: torch.Tensor, place: MatrixPlace, shape: ExpertShape, *, exact_inputs: bool
    ) -> None:
        """`expert`: uint8 of [bytes]. With `exact_inputs`, inputs are never rounded."""
        self._place, self._bits = place, shape.bits
        self._rounds = rounds_inputs(shape.bits, exact=exact_inputs)
        codes = expert[place.start :][: place.rows * place.columns * shape.bits // 8]
        groups = place.columns // shape.group if shape.group else 1
        dtype = DTYPES[shape.dtype]
        items = place.rows * (2 * groups if shape.group else 1)
        told = expert[place.told :][: items * dtype.itemsize]
        if told.storage_offset() % dtype.itemsize:  # as others' writers may have laid it
            told = told.clone()
        told = told.view(dtype)
        if shape.group:
            self._codes = codes.view(place.rows, -1)
            self._told = told.view(groups, place.rows, 2)
        else:
            where = codes if self._rounds else aligned(codes, INT8_ALIGNMENT)
            self._codes = where.view(torch.int8).view(place.rows, -1)
            self._told = told

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous and aligned [n, in] to [n, out], without a bias."""
        tiled = tile_product.takes(rows.dtype, self._place.columns)
        if len(rows) > most_by_kernel(self._bits, rows.dtype, rounded=self._rounds, tiled=tiled):
            if tiled:
                return tile_product.multiply(rows, self._codes, self._told)
            return wide_product.multiply(rows, self._place.rows, self._block)
        if self._rounds:
            given = rows, self._codes, self._told
            eight = self._bits == 8
            return byte_product.multiply(*given) if eight else rounded_product.multiply(*given)
        multiply = torch._weight_int8pack_mm  # noqa: SLF001 - has no other name
        return multiply(rows, self._codes, self._told.to(rows.dtype))

    def _block(self, start: int, stop: int, values: torch.Tensor) -> WeightBlock:
        if self._bits == 4:
            told = self._told[:, start:stop]
            return WeightBlock(int4_block(self._codes[start:stop], told, BY_ROWS, values), None)
        made = values.view(stop - start, -1).copy_(self._codes[start:stop])
        return WeightBlock(made.t(), self._told[start:stop].to(values.dtype))

    def dequantised(self) -> torch.Tensor:
        """The matrix as fp32 of [out, in]."""
        if self._bits == 4:
            return from_int4(unpack(self._codes, BY_ROWS), self._told)
        return self._codes.float() * self._told.float()[:, None]

    def refuse_placeholder(self) -> None:
        """Do nothing: it shows bytes that are there."""


def rounds_inputs(bits: int, *, exact: bool) -> bool:
    """Whether few rows of input are rounded, for our own kernels; `exact`: they are never to be."""
    return not exact and (bits == 4 or byte_product.compiled() is not None)


def most_by_kernel(bits: int, dtype: torch.dtype, *, rounded: bool, tiled: bool) -> int:
    """Rows of input up to which a kernel multiplies as it is; more by tiles, or as floats.

    int4 lies in the order of our own kernel, so where that does not run, or inputs are to be exact,
    it is always made into floats, `tiled` or not.
    """
    if bits == 4 and not rounded:
        return 0
    return wide_product.most_by_kernel(bits, dtype, rounded=rounded, tiled=tiled)


class ExpertProducts(NamedTuple):
    """What products with the experts of a module hold beside their tensors: a `Held`."""

    shape: ExpertShape
    input: torch.dtype
    rounded: bool
    """Whether few rows of input are rounded."""
    copies: bool = False
    """Whether codes of int8 begin where torch's kernel cannot read: each product makes a copy."""

    def of(self, rows: int) -> int:
        """Bytes, with so many rows of input, which may all be sent to one expert."""
        copied = max(p.rows * p.columns for p in self.shape.places) if self.copies else 0
        most = max(self._of(place, rows) for place in self.shape.places)
        rounded = self.rounded and self.shape.bits == 4
        if rounded and most_together(self.shape.wide, self.input):
            most = max(most, temporary_bytes(rows, self.shape.hidden, self.shape.inner))
        return copied + most

    def _of(self, place: MatrixPlace, rows: int) -> int:
        bits, rounded = self.shape.bits, self.rounded
        tiled = tile_product.takes(self.input, place.columns)
        sizes = Sizes(place.rows, place.columns, bits, self.input, rounded=rounded, tiled=tiled)
        if rows > most_by_kernel(bits, self.input, rounded=rounded, tiled=tiled):
            return wide_product.wide_bytes(rows, sizes)
        return wide_product.temporary_bytes(rows, sizes)
