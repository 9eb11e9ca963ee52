"""Quantised Linears of bitsandbytes: what a checkpoint holds of them, and the objects that show it.

Touches private parts of bitsandbytes, seen in 0.50.2. The packed weight is streamed; statistics are
small and stay. The objects that the library computes with are built once, and while the model runs
only what they show is exchanged: building them anew takes 64 to 114 us a weight, this 1 us.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from pipeload.formats.bitsandbytes.needs import HeldBytes, held_by_4bit, held_by_8bit
from pipeload.formats.bitsandbytes.product import QuickProduct, quick_product, with_product
from pipeload.formats.bitsandbytes.stored_parts import NESTED, StoredParts
from pipeload.formats.bitsandbytes.tiles import (
    TILED,
    are_repacked,
    check_repacking,
    mark_repacked,
    repacked_absmax,
)
from pipeload.formats.format import Shown
from pipeload.weights.arena import DTYPES
from pipeload.weights.layout import Weight
from pipeload_hooks import Companion, placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeload.checkpoint.headers import TensorEntry

_CPU = torch.device("cpu")


def _nothing() -> Callable[[], None]:
    return lambda: None


class BitsAndBytesWeight:
    """A `PackedWeight`: the stored tensors of one, and the objects that its module has."""

    def __init__(
        self,
        name: str,
        module: Any,
        parts: Mapping[str, TensorEntry],
        read: Callable[[TensorEntry], torch.Tensor],
        where: torch.device | str = _CPU,
    ) -> None:
        """Check that they belong together.

        Args:
            name: of the parameter in the model.
            module: a Linear4bit or Linear8bitLt that has it.
            parts: stored tensors, by what the library calls them.
            read: gets one.
            where: the device that computes with it.

        Raises:
            CheckpointError: one is missing, malformed or of another weight.
            ReadError: one could not be read.
        """
        self.name, self._module, self._parts, self._read = name, module, parts, read
        self._where = torch.device(where)
        self._rows: int = module.out_features
        self._columns: int = module.in_features
        self._bits4 = is_4bit(module)
        self._quick: QuickProduct | None = None
        self._repacked = False
        stored = StoredParts(name, parts, read, self._rows, self._columns)
        if self._bits4:
            self._state = stored.check_4bit()
            self._repacked = are_repacked(module, self._state, self._where)
            # Kernels of ours are the processor's.
            ours = self._where.type == "cpu"
            if ours and not module.support_avx512bf16_for_cpu:  # else it may yet convert the weight
                kind, blocksize = self._state["quant_type"], self._state["blocksize"]
                self._quick = quick_product(module, kind, blocksize)
        else:
            stored.check_8bit()

    @property
    def weight(self) -> Weight:
        """What is streamed of it: the packed values, in the order that is computed with here."""
        entry = self._parts["weight"]
        repacked = self._repacked
        shape = (self._rows, self._columns // 2) if repacked else entry.shape
        return Weight(
            self.name,
            "U8" if repacked else entry.dtype,
            shape,
            entry.nbytes,
            (entry,),
            guarded=True,
            repacked=TILED if repacked else None,
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """As many numbers as it had before it was quantised."""
        return {self.name: self._rows * self._columns}

    @property
    def couples_rows(self) -> bool:
        """Whether inputs that are multiplied at once change each other's products.

        LLM.int8 takes a column in higher precision if any row of the input has an outlier there.
        """
        return not self._bits4

    def statistics_bytes(self, takes: Callable[[int], int]) -> int:
        """What stays in memory beside the packed weight; `takes` says it of a tensor."""
        gone = ("weight", *(NESTED if self._repacked else ()))
        kept = {name: entry.nbytes for name, entry in self._parts.items() if name not in gone}
        if self._repacked:  # see `repacked_absmax`
            kept["weight.absmax"] = 2 * (self._rows * self._columns // self._state["blocksize"])
        return sum(map(takes, kept.values()))

    def held_by_products(self, dtype: torch.dtype) -> list[HeldBytes]:
        """What a product takes beside its tensors, at several moments; `dtype`: its input's."""
        if not self._bits4:
            return held_by_8bit(self._rows, self._columns, self._where)
        computed: torch.dtype = self._module.compute_dtype or dtype
        unpacked = 0 if self._repacked else self._unpacked_bytes(computed.itemsize)
        return [held_by_4bit(self._rows, self._columns, unpacked, computed, dtype)]

    def _unpacked_bytes(self, item: int) -> int:
        """Bytes of the weight in the dtype that is computed in, and of its expanded factors."""
        items = self._rows * self._columns
        factors: int = -(-items // self._state["blocksize"])
        nested = NESTED[0] in self._parts
        kept = 0 if self._quick is None else self._quick.kept_bytes
        return items * item + (8 * factors if nested else 0) + kept

    def show(self) -> Shown:
        """Read the statistics, and build what the module computes with.

        Raises:
            ReadError: they could not be read.
        """
        entry = self._parts["weight"]
        empty = placeholder(entry.shape, DTYPES[entry.dtype], self._where)
        others = {name: self._read(e) for name, e in self._parts.items() if name != "weight"}
        if not self._bits4:
            return self._show_8bit(empty, others["SCB"].to(self._where))
        from bitsandbytes.nn.modules import Params4bit

        parameter: Any = Params4bit.from_prequantized(
            data=empty, quantized_stats=others, device=self._where, module=self._module
        )
        state = parameter.quant_state
        absmax = state.absmax
        activate: Callable[[], Callable[[], None]] = _nothing
        if self._quick is not None:
            absmax = with_product(absmax, self._quick)
            activate = functools.partial(_plain_again, state, state.absmax)
        elif self._repacked:
            check_repacking(state.nested, state.blocksize)
            absmax = repacked_absmax(state)
            activate = functools.partial(_stay_repacked, state, empty)
            parameter.data = placeholder(self.weight.shape, torch.uint8, self._where)
        state.absmax = None
        return Shown(parameter, [Companion(state, "absmax", absmax)], activate)

    def _show_8bit(self, empty: torch.Tensor, scale: torch.Tensor) -> Shown:
        from bitsandbytes.nn.modules import Int8Params

        parameter = Int8Params(empty, requires_grad=False, has_fp16_weights=False)
        state = self._module.state
        state.CB = state.SCB = None
        companions = [Companion(state, "CB", None), Companion(state, "SCB", scale)]
        return Shown(parameter, companions, _nothing)

    def leave_to_streaming(self) -> None:
        """Do nothing: the library does not ask what its own modules hold."""


def is_4bit(module: object) -> bool:
    """Tell whether `module` is a Linear4bit."""
    from bitsandbytes.nn.modules import Linear4bit

    return isinstance(module, Linear4bit)


def is_packed(module: object) -> bool:
    """Tell whether `module` is a quantised Linear of bitsandbytes."""
    from bitsandbytes.nn.modules import Linear8bitLt

    return is_4bit(module) or isinstance(module, Linear8bitLt)


def _plain_again(state: Any, absmax: torch.Tensor) -> Callable[[], None]:
    """Make what gives a quantisation state its own factors back, if it has any by then."""

    def undo() -> None:
        if state.absmax is not None:
            state.absmax = absmax

    return undo


def _stay_repacked(state: Any, stored: torch.Tensor) -> Callable[[], None]:
    """Mark a state as the library does. Nothing takes that back: the weight stays repacked."""
    mark_repacked(state, stored)
    return _nothing()
