"""The forms that `pipeload.quantize` makes: who loads them, what fits them, how they are made."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from pipeload.formats.bitsandbytes.format import BITSANDBYTES
from pipeload.formats.bitsandbytes.tiles import TILE_ROWS
from pipeload.formats.integers.compensation import BLOCK, factor
from pipeload.formats.integers.expert_matrices import shape_of
from pipeload.formats.integers.format import INTEGERS
from pipeload.formats.integers.order import BY_ROWS
from pipeload.formats.integers.quantizer import PipeloadConfig
from pipeload.formats.integers.rounding import (
    GPTQ,
    IMPORTANCE,
    Rounding,
    to_int4,
    to_int8,
    weigh_columns,
)
from pipeload.hf.library import left_by_the_library
from pipeload.quantiser import four_bits
from pipeload.quantiser.tensor import Integers, made, quantised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.formats.integers.expert_matrices import ExpertShape
    from pipeload.formats.integers.rounding import Int4, Int8
    from pipeload.quantiser.resumable_shards import Step
    from pipeload.quantiser.tensor import Reading


HEAD_BITS = 8
"""Of an output head that is to be integers."""
PART_BYTES = 16 << 20
"""The most that an integer weight takes in one piece: two pieces have to fit beside each other when
it is streamed. More than what one thread at a time is busy with, less than a laptop would miss."""


_HOW = {
    "rtn": "rounded to nearest",
    "hqq": "zero points optimised without data (half-quadratic)",
    "search": "the least squared error of weights",
    IMPORTANCE: "the least squared error, weighed by the mean squares of inputs",
    GPTQ: "the least squared error, weighed by the mean squares of inputs, then GPTQ in blocks of "
    f"{BLOCK} columns",
}


class ExpertsForm(Protocol):
    """What experts are to become."""

    def experts_as(self, module: nn.Module, dtype: str) -> ExpertShape | None:
        """What a module of experts becomes, stored in that dtype; None if it stays as it is."""

    def integers(self, mean_squares: torch.Tensor | None) -> Integers:
        """How a matrix is quantised whose inputs have these mean squares; None: if unknown."""


class Inputs(NamedTuple):
    """What is known of the inputs of a Linear."""

    mean_squares: torch.Tensor
    """Of [columns]."""
    products: Callable[[], list[torch.Tensor]] | None
    """Sums of products of each two, by blocks of columns, where those are known."""


class Form(Protocol):
    """What a checkpoint is to become."""

    name: str
    """"int8" and the like."""
    loaded_by: str
    """The library's name of what loads it."""
    wants: str
    """What fits, in words."""
    description: str
    """For people."""
    order: str | None
    """That int4 rows are stored in."""

    @property
    def for_experts(self) -> ExpertsForm | None:
        """What experts become; None: they stay floats."""

    def fits(self, module: nn.Linear) -> bool:
        """Whether a weight of its shape can be quantised."""

    def step(
        self,
        entry: TensorEntry,
        module: nn.Linear,
        reading: Reading,
        inputs: Inputs | None,
    ) -> Step:
        """A weight's tensors, as they come from the source; `inputs` that it has had, if known."""

    def parts(self, module: nn.Linear) -> int:
        """In how many its weight is stored."""

    def config(
        self, model: Any, kept: Sequence[str], head: str | None, experts: str | None
    ) -> dict[str, Any]:
        """`quantization_config` of config.json.

        Args:
            model: the float model.
            kept: paths of Linears and experts that are left.
            head: of one that is int8.
            experts: the dtype that experts are stored in; None where all are left.
        """


class IntegerForm:
    """int8 or int4 for torch's own kernels."""

    loaded_by = INTEGERS.method

    def __init__(
        self,
        bits: int,
        *,
        group: int,
        zero_points: str,
        calibrated: bool,
        gptq: bool = False,
        mixed: bool = False,
    ) -> None:
        """`group` and `zero_points` are int4's; `calibrated` says that inputs will be known.

        `gptq`: that products of each two of them will. `mixed`: that Linears get forms of their
        own, of which this has the smallest groups.
        """
        int4 = bits == 4
        self.name = f"int{bits}"
        self.short = f"int4 by {group}" if int4 else self.name
        """For a list of several."""
        self.order = BY_ROWS if int4 else None
        self._zero_points = zero_points
        known = GPTQ if gptq else IMPORTANCE
        how = known if calibrated else zero_points if int4 else "rtn"
        self._config = PipeloadConfig(
            bits=bits,
            group_size=group if int4 else None,
            method=how,
            order=self.order,
            part_bytes=PART_BYTES,
        )
        if int4:
            self.wants = f"rows that are a multiple of 16, and columns of {group}"
            groups = "of 32 to 128, or int8, by Linear" if mixed else f"of {group}"
            self.description = f"int4, asymmetric, groups {groups}, {_HOW[how]}"
        else:
            self.wants = "columns that are a multiple of 16"
            self.description = f"int8, symmetric, one scale for each row, {_HOW[how]}"

    @property
    def for_experts(self) -> IntegerForm:
        """The same."""
        return self

    def fits(self, module: nn.Linear) -> bool:
        """Whether the kernel takes a weight of its shape."""
        return self._config.fits(module)

    def step(
        self,
        entry: TensorEntry,
        module: nn.Linear,
        reading: Reading,
        inputs: Inputs | None,
    ) -> Step:
        """Quantise the weight from the dtype that it is stored in."""
        how = self.integers(None if inputs is None else inputs.mean_squares)
        if inputs is not None and inputs.products is not None and how.bits == 4:
            how = how._replace(prepare=partial(_with_factors, how.rounding, inputs.products))
        return quantised(entry, how, self._config.parts(*entry.shape), reading)

    def experts_as(self, module: nn.Module, dtype: str) -> ExpertShape | None:
        """Take those that the library multiplies in a way that is known, and the kernels take."""
        return shape_of(module, self._config.bits, self._config.group_size or 0, dtype)

    def told(self) -> dict[str, int]:
        """What a checkpoint says of a single Linear of this form."""
        c = self._config
        return {"bits": c.bits} | ({"group_size": c.group_size} if c.group_size else {})

    def stored_bytes(self, rows: int, columns: int, dtype: str) -> int:
        """What a weight of that shape takes, with scales in that dtype (its code)."""
        shape, c = (rows, columns), self._config
        return sum(one.nbytes for one in made("", shape, c.bits, c.group_size or 0, dtype))

    def integers(self, mean_squares: torch.Tensor | None) -> Integers:
        """Weigh columns by the mean squares of their inputs."""
        c = self._config
        weights = None if mean_squares is None else weigh_columns(mean_squares)
        rounding: Rounding = partial(to_int8, column_weights=weights)
        if c.bits == 4:
            rounding = partial(
                to_int4,
                group=c.group_size or 0,
                zero_points=self._zero_points,
                column_weights=weights,
            )
        return Integers(rounding, c.bits, c.group_size or 0, c.order or "")

    def parts(self, module: nn.Linear) -> int:
        """More than one for large weights, which are cut."""
        return len(self._config.parts(module.out_features, module.in_features))

    def config(
        self, model: Any, kept: Sequence[str], head: str | None, experts: str | None
    ) -> dict[str, Any]:
        """Names everything that is kept, and a head of other bits."""
        self._config.modules_to_not_convert, self._config.experts = list(kept), experts
        if head is not None and self._config.bits != HEAD_BITS:
            self._config.modules[head] = {"bits": HEAD_BITS}
        return self._config.to_dict()


def _with_factors(
    rounding: Callable[..., Int8 | Int4], products: Callable[[], list[torch.Tensor]]
) -> Rounding:
    return partial(rounding, factors=[factor(one) for one in products()])


class FourBitForm:
    """NF4 or FP4 of bitsandbytes, as the library saves what it quantises."""

    loaded_by = BITSANDBYTES.method
    wants = "rows that are a multiple of 32, and columns of 64"
    order: str | None = None
    for_experts = None  # bitsandbytes knows Linears alone

    def __init__(self, kind: str, *, double: bool) -> None:
        """Raises OptionError without bitsandbytes."""
        four_bits.require()
        self.name, self._double = kind, double
        twice = ", statistics quantised as well" if double else ""
        self.description = f"{kind.upper()} of bitsandbytes, blocks of 64{twice}"

    def fits(self, module: nn.Linear) -> bool:
        """Others can be packed, but not computed with where bitsandbytes has its own kernels.

        With AVX512-BF16 its modules fail at whatever is no whole tile, in plain models as well.
        """
        rows, columns = module.weight.shape
        return min(rows, columns) > 0 and rows % TILE_ROWS == 0 and columns % four_bits.BLOCK == 0

    def step(
        self,
        entry: TensorEntry,
        module: nn.Linear,
        reading: Reading,
        inputs: Inputs | None,
    ) -> Step:
        """Quantise the weight from the dtype that the library would load it in."""
        how = four_bits.FourBits(self.name, self._double, module.weight.dtype)
        return four_bits.quantised(entry, how, reading)

    def parts(self, module: nn.Linear) -> int:
        """One: it is never cut."""
        return 1

    def config(
        self, model: Any, kept: Sequence[str], head: str | None, experts: str | None
    ) -> dict[str, Any]:
        """Names what is kept only where the library would not keep the same by itself."""
        others = [path for path, module in model.named_modules() if isinstance(module, Conv1D)]
        kept = [*kept, *others]
        alike = {*kept} == left_by_the_library(model)
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.name,
            bnb_4bit_use_double_quant=self._double,
            bnb_4bit_compute_dtype=model.dtype,
            llm_int8_skip_modules=None if alike else kept,
        )
        written: dict[str, Any] = config.to_dict()
        return written | {"quant_method": self.loaded_by}
