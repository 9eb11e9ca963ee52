"""Products with 4-bit weights of bitsandbytes: the library's bits, in a fraction of its time.

Where it has no fused kernel for them (x86 without AVX512-BF16), it dequantises the whole weight,
value by value, into fresh memory, at every product: nine tenths of a decoding step. Here they are
dequantised by `kernel`. For a few rows of input the weight goes through the cache in ranges of
its rows, and never lies in memory as a whole, if `weights.row_cuts` finds equal bits for that.

[Note: who asks for them] The module's own forward runs, as it is. It ends in one operation of the
library's, to which it hands the factors of the weight's blocks; and those are a tensor that answers
that operation itself, `Factors`. So nothing is put on the module, nor into the library, and a plain
model beside this one computes as ever. That costs a few microseconds a product.

Whatever is not plain inference (autograd, autocast, compilation, another type of input) is left to
the library, and so is everything where the results are not found equal beforehand. Touches private
parts of bitsandbytes, seen in 0.50.2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from pipeload.formats.bitsandbytes.kernel import (
    BLOCK_STEP,
    FILLED_DTYPES,
    Fill,
    ThreadMemory,
    make_fill,
)
from pipeload.weights.row_cuts import (
    ROW_STEP,
    Cut,
    Given,
    can_cut_rows,
    ranges_are_exact,
    row_ranges,
)

_RANGE_BYTES = 2 << 20  # of dequantised values: what stays in the processor's cache
_FEW_INPUTS = 16  # rows of input that are multiplied range by range
_NESTED_BLOCK = 256  # the only one that the library multiplies with
_CHECK_ROWS = 96
_SCRATCH = ThreadMemory()
_NO_OPTIONS: Final[Mapping[str, Any]] = {}

PackedProduct = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], "torch.Tensor | None"
]
"""Of the input, the packed weight, its factors in fp32 and the bias: the product, or None to leave
it to the library."""


class QuickProduct:
    """Computes the products of one Linear4bit's weight."""

    def __init__(self, fill: Fill, module: Any, blocksize: int) -> None:
        """Check how its rows may be cut. `fill` is for its kind of values and its block size."""
        self._fill, self._blocksize = fill, blocksize
        self._dtype: torch.dtype = module.compute_dtype
        self._shape = rows, columns = module.out_features, module.in_features
        size = rows_at_once(columns * self._dtype.itemsize)
        cut = Cut(self._dtype, columns, row_ranges(rows, size), requires_grad=False)
        cut = cut._replace(bias=module.bias is not None)
        self._cut = cut if can_cut_rows(cut) else None
        most = max((stop - start for start, stop in cut.ranges), default=0) if self._cut else 0
        self.kept_bytes = most * columns * self._dtype.itemsize
        """What each thread keeps for a range, from the first product on."""

    def __call__(
        self,
        given: torch.Tensor,
        packed: torch.Tensor,
        factors: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """[..., rows] of [..., columns]; None if this is for the library to compute.

        Args:
            given: in the dtype that is computed in.
            packed: the weight's bytes, in any shape and dtype.
            factors: fp32, of each block.
            bias: as the library adds it.
        """
        if not self._is_plain(given, bias):
            return None
        packed = packed.as_subclass(torch.Tensor).view(torch.uint8).view(-1)
        inputs = given.numel() // self._shape[1]
        few = inputs <= _FEW_INPUTS and self._cut is not None
        if few and ranges_are_exact(self._cut, Given.of(given)):
            return self._by_ranges(given, packed, factors, bias)
        weight = torch.empty(self._shape, dtype=self._dtype)
        self._fill(packed, factors, weight)
        return functional.linear(given, weight, bias)

    def _is_plain(self, given: torch.Tensor, bias: torch.Tensor | None) -> bool:
        # Not in a forward that autograd records, either, in which its own mode is off.
        recorded = given.requires_grad or (
            torch.is_grad_enabled() and bias is not None and bias.requires_grad
        )
        return (
            type(given) is torch.Tensor
            and given.device.type == "cpu"
            and given.shape[-1:] == self._shape[1:]
            and given.numel() > 0
            and given.dtype == self._dtype
            and not recorded
            and (bias is None or bias.dtype == self._dtype)
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )

    def _by_ranges(
        self,
        given: torch.Tensor,
        packed: torch.Tensor,
        absmax: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        rows, columns = self._shape
        out = torch.empty((*given.shape[:-1], rows), dtype=self._dtype)
        weight = _SCRATCH.take(self.kept_bytes).view(self._dtype)
        blocks = columns // self._blocksize
        for start, stop in self._cut.ranges if self._cut else ():
            part = weight[: (stop - start) * columns].view(stop - start, columns)
            some = packed[start * columns // 2 : stop * columns // 2]
            self._fill(some, absmax[start * blocks : stop * blocks], part)
            part_bias = None if bias is None else bias[start:stop]
            # Not computed into the slice: only so is it the very call that a whole one is.
            out[..., start:stop] = functional.linear(given, part, part_bias)
        return out


def rows_at_once(row_bytes: int) -> int:
    """Say how many rows to dequantise at once: each thread's share is then a usual one."""
    share = ROW_STEP * max(2, torch.get_num_threads())
    return max(share, _RANGE_BYTES // row_bytes // ROW_STEP * ROW_STEP)


def quick_product(module: Any, kind: str, blocksize: int) -> QuickProduct | None:
    """Make what computes for `module` here; None if the library does.

    Args:
        module: a Linear4bit that the library will not repack.
        kind: of values, "nf4" or "fp4".
        blocksize: how many of them share a factor.
    """
    dtype, columns = module.compute_dtype, module.in_features
    if dtype not in FILLED_DTYPES or columns % blocksize or blocksize % BLOCK_STEP:
        return None
    fill = _checked_fill(kind, blocksize, dtype)
    return None if fill is None else QuickProduct(fill, module, blocksize)


@functools.cache
def _checked_fill(kind: str, blocksize: int, dtype: torch.dtype) -> Fill | None:
    """Make what dequantises as the library does; None if nothing here does.

    Compared bit by bit: all bytes, factors of all sizes (denormal ones too), then a product.
    """
    dequantise: Any = torch.ops.bitsandbytes.dequantize_4bit.default
    multiply: Any = torch.ops.bitsandbytes.gemm_4bit.default
    with torch.inference_mode():
        every = (torch.arange(16, dtype=torch.uint8) << 4).repeat(4)[:, None]
        codes = dequantise(every, torch.ones(2), 64, kind, (2, 64), torch.float32)
        fill = make_fill(codes.view(-1)[:32:2].contiguous(), blocksize)
        if fill is None:
            return None
        random = torch.Generator().manual_seed(blocksize)
        shape = (_CHECK_ROWS, 2 * blocksize)
        packed = torch.randint(256, (shape[0] * blocksize, 1), dtype=torch.uint8, generator=random)
        packed[:256, 0] = torch.arange(256, dtype=torch.uint8)
        absmax = torch.rand(2 * shape[0], generator=random)
        wild = absmax * 10.0 ** torch.linspace(-45, 38.5, len(absmax))
        for factors in (absmax, wild):
            wanted = dequantise(packed, factors, blocksize, kind, shape, dtype)
            made = torch.empty(shape, dtype=dtype)
            fill(packed.view(-1), factors, made)
            if not torch.equal(made.view(torch.uint8), wanted.view(torch.uint8)):
                return None
        fill(packed.view(-1), absmax, made)
        given = torch.randn((3, shape[1]), generator=random).to(dtype)
        wanted = multiply(given, packed, shape, absmax, blocksize, kind)
        return fill if torch.equal(functional.linear(given, made), wanted) else None


class Factors(torch.Tensor):
    """The factors of a weight's blocks, as the file has them: see [Note: who asks for them]."""

    asks: PackedProduct

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute products; anything else is done as with a plain tensor, and gives one."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no other name
            options = kwargs or _NO_OPTIONS
            if func is _operation():
                made = _product(*args, **options)
                if made is not None:
                    return made
            return func(*args, **options)


def with_product(absmax: torch.Tensor, multiply: PackedProduct) -> Factors:
    """Return the same factors; what is multiplied by their weight goes to `multiply` first."""
    factors = absmax.as_subclass(Factors)
    factors.asks = multiply
    return factors


@functools.cache
def _operation() -> Any:
    """Look up what the library multiplies by."""
    return torch.ops.bitsandbytes.gemm_4bit.default


def _product(
    given: torch.Tensor,
    packed: torch.Tensor,
    _shape: object,
    absmax: torch.Tensor,
    _blocksize: object,
    _kind: object,
    *,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The library's operation, with its arguments; None where it has to compute itself."""
    if absmax_8bit is None:
        if not isinstance(absmax, Factors):
            return None
        plain = absmax.as_subclass(torch.Tensor).float().contiguous()
        return absmax.asks(given, packed, plain, bias)
    if not isinstance(absmax_8bit, Factors):
        return None
    expand: Any = torch.ops.bitsandbytes.dequantize_blockwise.default
    plain = expand(absmax_8bit, absmax, absmax_code, _NESTED_BLOCK, torch.float32)
    plain += absmax_offset
    return absmax_8bit.asks(given, packed, plain.contiguous(), bias)
