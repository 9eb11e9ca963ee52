"""Quantised Linears of bitsandbytes: what a checkpoint holds of them, and the objects that show it.

Touches private parts of bitsandbytes, seen in 0.50.2. The packed weight is streamed; statistics are
small and stay. The objects that the library computes with are built once, and while the model runs
only what they show is exchanged: building them anew takes 64 to 114 us a weight, this 1 us.

[Note: machines that repack] With AVX512-BF16, bitsandbytes puts a weight into another order before
it first computes with it, and changes its statistics with it. Both then belong together: fresh
bytes under old statistics would be garbage. So there weights are repacked while they are read, each
time, and statistics once.
"""

from __future__ import annotations

import functools
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.checkpoint.untrusted_json import show
from pipeload.errors import CheckpointError, UnsupportedModelError
from pipeload.formats.bitsandbytes.needs import Held, held_by_4bit, held_by_8bit
from pipeload.formats.bitsandbytes.product import QuickProduct, quick_product, with_product
from pipeload.formats.repack import BITSANDBYTES, TILE_ROWS, repack
from pipeload.weights.arena import DTYPES
from pipeload.weights.layout import Weight
from pipeload_hooks import Companion, placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from pipeload.checkpoint.headers import TensorEntry

_CPU = torch.device("cpu")
_BLOBS = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_MAX_BLOB_BYTES = 4096
_ROWS_FORMAT = 0  # int8 weights row by row, the only order the library still knows


def _nothing() -> Callable[[], None]:
    return lambda: None


class Prepared(NamedTuple):
    """What a quantised module computes with, and shows nothing yet."""

    parameter: nn.Parameter
    companions: list[Companion]
    activate: Callable[[], Callable[[], None]]
    """To be called when the library has finished the model: its state dict would undo it.

    Returns what is to be called at removal.
    """


class PackedWeight:
    """The stored tensors of one quantised weight."""

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
        if self._bits4:
            self._check_4bit()
            # Kernels of ours are the processor's.
            ours = self._where.type == "cpu"
            if ours and not module.support_avx512bf16_for_cpu:  # else it may yet convert the weight
                kind, blocksize = self._state["quant_type"], self._state["blocksize"]
                self._quick = quick_product(module, kind, blocksize)
        else:
            self._check_8bit()

    @property
    def weight(self) -> Weight:
        """What is streamed of it."""
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
            repacked=BITSANDBYTES if repacked else None,
        )

    @property
    def couples_rows(self) -> bool:
        """Whether inputs that are multiplied at once change each other's products.

        LLM.int8 takes a column in higher precision if any row of the input has an outlier there.
        """
        return not self._bits4

    def statistics_bytes(self, takes: Callable[[int], int]) -> int:
        """What stays in memory beside the packed weight; `takes` says it of a tensor."""
        gone = ("weight", *(_NESTED if self._repacked else ()))
        kept = {name: entry.nbytes for name, entry in self._parts.items() if name not in gone}
        if self._repacked:  # see `_repacked_absmax`
            kept["weight.absmax"] = 2 * (self._rows * self._columns // self._state["blocksize"])
        return sum(map(takes, kept.values()))

    def held_by_products(self, dtype: torch.dtype) -> list[Held]:
        """What a product takes beside its tensors, at several moments; `dtype`: its input's."""
        if not self._bits4:
            return held_by_8bit(self._rows, self._columns, self._where)
        computed: torch.dtype = self._module.compute_dtype or dtype
        unpacked = 0 if self._repacked else self._unpacked_bytes(computed.itemsize)
        return [held_by_4bit(self._rows, self._columns, unpacked, computed, dtype)]

    def _unpacked_bytes(self, item: int) -> int:
        """The weight in the dtype that is computed in, and its factors while they are expanded."""
        items = self._rows * self._columns
        factors: int = -(-items // self._state["blocksize"])
        nested = _NESTED[0] in self._parts
        kept = 0 if self._quick is None else self._quick.kept_bytes
        return items * item + (8 * factors if nested else 0) + kept

    def prepare(self) -> Prepared:
        """Read the statistics, and build what the module computes with.

        Raises:
            ReadError: they could not be read.
        """
        entry = self._parts["weight"]
        empty = placeholder(entry.shape, DTYPES[entry.dtype], self._where)
        others = {name: self._read(e) for name, e in self._parts.items() if name != "weight"}
        if not self._bits4:
            return self._prepare_8bit(empty, others["SCB"].to(self._where))
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
            _check_repacking(state.nested, state.blocksize)
            absmax = _repacked_absmax(state)
            activate = functools.partial(_mark_repacked, state, empty)
            parameter.data = placeholder(self.weight.shape, torch.uint8, self._where)
        state.absmax = None
        return Prepared(parameter, [Companion(state, "absmax", absmax)], activate)

    def _prepare_8bit(self, empty: torch.Tensor, scale: torch.Tensor) -> Prepared:
        from bitsandbytes.nn.modules import Int8Params

        parameter = Int8Params(empty, requires_grad=False, has_fp16_weights=False)
        state = self._module.state
        state.CB = state.SCB = None
        companions = [Companion(state, "CB", None), Companion(state, "SCB", scale)]
        return Prepared(parameter, companions, _nothing)

    @property
    def _repacked(self) -> bool:
        """Whether the library would put it into another order here: see [Note: machines...]."""
        return (
            self._bits4
            and self._where.type == "cpu"
            and bool(self._module.support_avx512bf16_for_cpu)
            and self._rows % TILE_ROWS == 0
            and self._columns % 2 == 0
            and self._columns % self._state["blocksize"] == 0
        )

    # -- what is stored --------------------------------------------------------------------------

    def _check_4bit(self) -> None:
        blobs = [name for name in _BLOBS if name in self._parts]
        nested = [name for name in _NESTED if name in self._parts]
        wanted = ["weight", "weight.absmax", "weight.quant_map", *(_NESTED if nested else ())]
        self._require(wanted)
        if len(blobs) != 1:
            raise self._malformed(f"it has {len(blobs)} quantisation states, wanted one")
        self._state = state = self._read_state(self._parts[blobs[0]])
        items = self._rows * self._columns
        if state.get("shape") != [self._rows, self._columns]:
            raise self._malformed(
                f"its quantisation state is for shape {show(state.get('shape'))}, and the module "
                f"has {[self._rows, self._columns]}"
            )
        for name in ("blocksize", *(["nested_blocksize"] if nested else [])):
            if not isinstance(state.get(name), int) or state[name] < 1:
                raise self._malformed(f"its quantisation state has {name}={show(state.get(name))}")
        if not hasattr(torch, str(state.get("dtype"))):
            raise self._malformed(f"its quantisation state has dtype={show(state.get('dtype'))}")
        blocks = -(-items // state["blocksize"])
        self._require_bytes("weight", math.ceil(items / 2))
        self._require_items("weight.quant_map", 16, "F32")
        self._require_items("weight.absmax", blocks, "U8" if nested else "F32")
        if nested:
            self._require_items(_NESTED[0], -(-blocks // state["nested_blocksize"]), "F32")
            self._require_items(_NESTED[1], 256, "F32")
            if not isinstance(state.get("nested_offset"), float):
                raise self._malformed("its quantisation state has no nested_offset")

    def _check_8bit(self) -> None:
        self._require(["weight", "SCB"])
        if self._parts["weight"].shape != (self._rows, self._columns):
            raise self._malformed(
                f"its shape is {list(self._parts['weight'].shape)}, and the module has "
                f"{[self._rows, self._columns]}"
            )
        self._require_bytes("weight", self._rows * self._columns)
        self._require_items("SCB", self._rows, "F32")
        stored = self._parts.get("weight_format")
        if stored is not None and int(self._read(stored).sum()) != _ROWS_FORMAT:
            raise self._malformed("its values are not stored row by row")

    def _read_state(self, entry: TensorEntry) -> dict[str, Any]:
        if entry.dtype != "U8" or entry.nbytes > _MAX_BLOB_BYTES:
            raise self._malformed(
                f"its quantisation state is {entry.nbytes} bytes of {entry.dtype}"
            )
        try:
            state = json.loads(bytes(self._read(entry).numpy()))
        except (ValueError, RecursionError) as error:
            raise self._malformed(f"its quantisation state cannot be read ({error})") from error
        if not isinstance(state, dict) or state.get("quant_type") not in {"nf4", "fp4"}:
            raise self._malformed(f"its quantisation state is {show(state)}")
        if not entry.name.endswith(state["quant_type"]):
            raise self._malformed(f"its quantisation state says {show(state['quant_type'])}")
        return state

    def _require(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in self._parts]
        if missing:
            raise self._malformed(f"its {', '.join(missing)} is missing")

    def _require_items(self, name: str, count: int, dtype: str) -> None:
        entry = self._parts[name]
        if math.prod(entry.shape) != count or entry.dtype != dtype:
            raise self._malformed(
                f"tensor {show(entry.name)} is {list(entry.shape)} of {entry.dtype}, wanted "
                f"{count} of {dtype}"
            )

    def _require_bytes(self, name: str, count: int) -> None:
        entry = self._parts[name]
        if entry.nbytes != count:
            raise self._malformed(
                f"tensor {show(entry.name)} has {entry.nbytes} bytes, wanted {count}"
            )

    def _malformed(self, what: str) -> CheckpointError:
        file = next((str(entry.file) for entry in self._parts.values()), "the checkpoint")
        return CheckpointError(
            f"Quantised weight {show(self.name)} in {file!r} is unusable: {what}. Download the "
            "checkpoint again, or quantise the model again."
        )


def is_4bit(module: object) -> bool:
    """Whether `module` is a Linear4bit."""
    from bitsandbytes.nn.modules import Linear4bit

    return isinstance(module, Linear4bit)


def is_packed(module: object) -> bool:
    """Whether `module` is a quantised Linear of bitsandbytes."""
    from bitsandbytes.nn.modules import Linear8bitLt

    return is_4bit(module) or isinstance(module, Linear8bitLt)


def _plain_again(state: Any, absmax: torch.Tensor) -> Callable[[], None]:
    """What gives a quantisation state back its own factors, if there are any at the time."""

    def undo() -> None:
        if state.absmax is not None:
            state.absmax = absmax

    return undo


# -- machines that repack ------------------------------------------------------------------------


def _repacked_absmax(state: Any) -> torch.Tensor:
    """The statistics as they go with a repacked weight. `state` is only read."""
    from bitsandbytes.functional import dequantize_blockwise

    absmax: torch.Tensor = state.absmax
    if state.nested:
        absmax = (dequantize_blockwise(absmax, state.state2) + state.offset).float()
    rows, columns = state.shape
    return absmax.reshape(rows, columns // state.blocksize).T.to(torch.bfloat16).contiguous()


def _mark_repacked(state: Any, stored: torch.Tensor) -> Callable[[], None]:
    """What else the library changes in a quantisation state when it repacks its weight.

    Nothing takes it back: the weight stays repacked.
    """
    if stored.dtype != torch.uint8:
        state.original_storage_type = stored.dtype
    state.original_dtype, state.original_nested = state.dtype, state.nested
    state.original_qshape = torch.Size((stored.numel() * stored.element_size(), 1))
    if state.nested:
        state.nested = False
        del state.state2
    state.dtype = torch.bfloat16
    state.packing_format_for_cpu = True
    return _nothing()


@functools.cache
def _check_repacking(nested: bool, blocksize: int) -> None:
    """Compare with the library's own conversion, on a small weight.

    Raises:
        UnsupportedModelError: this version of the library does it in another way.
    """
    from bitsandbytes import functional

    generator = torch.Generator().manual_seed(5)
    plain = torch.randn((2 * TILE_ROWS, 2 * blocksize), generator=generator)
    quantise = functools.partial(
        functional.quantize_4bit, blocksize=blocksize, compress_statistics=nested, quant_type="nf4"
    )
    packed, ours = quantise(plain)
    _, theirs = quantise(plain)
    convert = functional._convert_weight_packed_for_cpu  # noqa: SLF001 - what is to be matched
    wanted, theirs = convert(packed.clone(), theirs)
    made = torch.empty((2 * TILE_ROWS, blocksize), dtype=torch.uint8)
    repack(packed.view(2 * TILE_ROWS, blocksize), made)
    ours.absmax = _repacked_absmax(ours)
    _mark_repacked(ours, packed)
    known = vars(ours).keys() == vars(theirs).keys() and all(
        torch.equal(one, vars(theirs)[name])
        if isinstance(one, torch.Tensor)
        else one == vars(theirs)[name]
        for name, one in vars(ours).items()
    )
    if not known or not torch.equal(made, wanted):
        raise UnsupportedModelError(
            "this version of bitsandbytes keeps 4-bit weights on this processor in an order that "
            "pipeload does not know. Install bitsandbytes 0.50."
        )
