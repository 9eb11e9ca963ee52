"""Products with 4-bit weights of bitsandbytes: the library's bits, in a fraction of its time.

Where it has no fused kernel for them (x86 without AVX512-BF16), it dequantises the whole weight,
value by value, into fresh memory, at every product: nine tenths of a decoding step. Here they are
dequantised by `kernel`. For a few rows of input the weight goes through the cache in ranges of
its rows, and never lies in memory as a whole, if `weights.row_cuts` finds equal bits for that.

Whatever is not plain inference (autograd, autocast, compilation, another type of input) is left to
the library, and so is everything where the results are not found equal beforehand. Touches private
parts of bitsandbytes, seen in 0.50.2.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from pipeload.formats.bitsandbytes.kernel import BLOCK_STEP, DTYPES, Fill, Scratch, make_fill
from pipeload.weights.row_cuts import (
    ROW_STEP,
    Cut,
    Given,
    can_cut_rows,
    ranges_are_exact,
    row_ranges,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_RANGE_BYTES = 2 << 20  # of dequantised values: what stays in the processor's cache
_FEW_INPUTS = 16  # rows of input that are multiplied range by range
_NESTED_BLOCK = 256  # the only one that the library multiplies with
_CHECK_ROWS = 96
_SCRATCH = Scratch()


class QuickProduct:
    """Computes what the forward of one Linear4bit computes."""

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

    def __call__(self, module: Any, given: torch.Tensor) -> torch.Tensor | None:
        """[..., rows] of [..., columns]; None if this is for the library to compute."""
        state, bias = module.weight.quant_state, module.bias
        if not self._is_plain(module, given) or not _is_known(state):
            return None
        rows, absmax = given.to(self._dtype), _expanded(state)
        packed = module.weight.data.as_subclass(torch.Tensor).view(torch.uint8).view(-1)
        inputs = given.numel() // self._shape[1]
        few = inputs <= _FEW_INPUTS and self._cut is not None
        if few and ranges_are_exact(self._cut, Given.of(rows)):
            made = self._by_ranges(rows, packed, absmax, bias)
        else:
            weight = torch.empty(self._shape, dtype=self._dtype)
            self._fill(packed, absmax, weight)
            made = functional.linear(rows, weight, bias)
        return made.to(given.dtype)

    def _is_plain(self, module: Any, given: torch.Tensor) -> bool:
        bias = module.bias
        recorded = torch.is_grad_enabled() and (
            given.requires_grad or (bias is not None and bias.requires_grad)
        )
        return (
            type(given) is torch.Tensor
            and given.device.type == "cpu"
            and given.shape[-1:] == self._shape[1:]
            and given.numel() > 0
            and not recorded
            and module.compute_type_is_set
            and module.compute_dtype == self._dtype
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
    """How many rows to dequantise at once: so many that each thread's share is a usual one."""
    share = ROW_STEP * max(2, torch.get_num_threads())
    return max(share, _RANGE_BYTES // row_bytes // ROW_STEP * ROW_STEP)


def quick_product(module: Any, kind: str, blocksize: int) -> QuickProduct | None:
    """What computes for `module` here; None if the library does.

    Args:
        module: a Linear4bit that the library will not repack.
        kind: of values, "nf4" or "fp4".
        blocksize: how many of them share a factor.
    """
    dtype, columns = module.compute_dtype, module.in_features
    if dtype not in DTYPES or columns % blocksize or blocksize % BLOCK_STEP:
        return None
    fill = _checked_fill(kind, blocksize, dtype)
    return None if fill is None else QuickProduct(fill, module, blocksize)


@functools.cache
def _checked_fill(kind: str, blocksize: int, dtype: torch.dtype) -> Fill | None:
    """What dequantises as the library does; None if nothing here does.

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


def _is_known(state: Any) -> bool:
    """Whether the weight is there, and its factors are kept in a way that the library takes."""
    if state is None or state.absmax is None or getattr(state, "packing_format_for_cpu", False):
        return False
    return not state.nested or bool(state.state2.blocksize == _NESTED_BLOCK)


def _expanded(state: Any) -> torch.Tensor:
    """The factor of each block, fp32, from a quantisation state."""
    absmax: torch.Tensor = state.absmax
    if state.nested:
        inner = state.state2
        make: Any = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = make(absmax, inner.absmax, inner.code, _NESTED_BLOCK, torch.float32)
        absmax += state.offset
    return absmax.float().contiguous()


def install(module: Any, product: QuickProduct) -> Callable[[], None]:
    """Have `module` compute by `product` what it can. Returns what takes that back."""
    # Weak: an attribute that holds its own module would keep a forgotten model alive.
    reference = weakref.ref(module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        module: Any = reference()
        made = product(module, x)
        return type(module).forward(module, x) if made is None else made

    object.__setattr__(module, "forward", forward)

    def undo() -> None:
        module = reference()
        if module is not None and vars(module).get("forward") is forward:
            object.__delattr__(module, "forward")

    return undo
