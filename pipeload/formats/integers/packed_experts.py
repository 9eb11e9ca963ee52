"""Experts as integers: a module in the place of the library's, in plain models as in streamed ones.

[Note: an expert is one piece] All that an expert has, codes and statistics of its two matrices, is
one row of one parameter: so it is one read, and one place in a cache. What was not read is 0xFF in
every byte, so that its scales are NaN.

[Note: any order] What an expert gives for the rows that are sent to it is what it would give if it
were the only one, and is put where those rows belong; then all that belongs to a row is added up at
once. So no bit depends on which expert comes first, and those that are there need not wait for the
others. The sum is that of the library's grouped products; which of its implementations a
configuration names changes nothing here. Few rows of several experts are multiplied in one call,
which changes no bit, either: see [Note: rows by themselves] in expert_rows.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeload.errors import UnsupportedModelError
from pipeload.formats.integers import byte_product, product
from pipeload.formats.integers.expert_matrices import ExpertMatrix
from pipeload.formats.integers.expert_rows import (
    MOST_TOGETHER,
    activates_rows_alone,
    most_of_one,
    most_together,
    portions,
    rows_of_experts,
)
from pipeload.formats.integers.packed_linear import (
    INPUT_ALIGNMENT,
    INT8_ALIGNMENT,
    Product,
    aligned,
)
from pipeload.weights.arena import DTYPES
from pipeload_hooks import experts_at_hand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeload.formats.integers.expert_matrices import ExpertShape, MatrixPlace


class PackedExperts(nn.Module):
    """packed: uint8 of [experts, bytes of one]; biases as in the library's module."""

    stacked: Final = "packed"
    """The name of the parameter that has a row of each expert."""

    def __init__(
        self, library: nn.Module, shape: ExpertShape, *, exact_inputs: bool = False, path: str = ""
    ) -> None:
        """Without values.

        Args:
            library: the module whose place it takes; it loses its parameters.
            shape: what `shape_of` says of it.
            exact_inputs: whether inputs are never rounded, though there is a kernel that does.
            path: what errors call it.
        """
        super().__init__()
        told: Any = library
        self.shape, self.exact_inputs, self.path = shape, exact_inputs, path
        self.num_experts, self.config = shape.experts, told.config
        self._places = shape.places
        self._first = "gate_up_proj" if told.has_gate else "up_proj"
        for name in (self._first, "down_proj"):
            bias = f"{name}_bias"
            self.register_parameter(bias, library._parameters.get(bias))  # noqa: SLF001 - its own
        library._parameters.clear()  # noqa: SLF001 - as above
        # Not as a module of this one: the library would initialise parameters that it lacks.
        self._library = (library,)
        if isinstance(getattr(library, "act_fn", None), nn.Module):
            self.act_fn = told.act_fn
        empty = torch.empty((shape.experts, shape.nbytes), dtype=torch.uint8)
        self.packed = nn.Parameter(empty, requires_grad=False)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Send each row to its experts, and add up what they give.

        Args:
            hidden_states: [rows, hidden], in the dtype of the model.
            top_k_index: [rows, k], numbers of experts; what names none gives nothing.
            top_k_weights: [rows, k]: by which what each expert gives is multiplied.

        Returns:
            [rows, hidden].

        Raises:
            UnsupportedModelError: the experts are on disk, or one of both on no CPU.
        """
        count = top_k_index.shape[-1]
        hidden = hidden_states.reshape(-1, self.shape.hidden)
        made = hidden.new_zeros((len(hidden) * count, self.shape.hidden))
        if hidden.is_meta or isinstance(hidden, FakeTensor):
            self._run_without_values(hidden, count)
        else:
            self._refuse_placeholder()
            self._refuse_devices(hidden)
            self._run_all(hidden.contiguous(), top_k_index, made)
        weighted = made * top_k_weights.reshape(-1, 1)
        total = weighted.view(len(hidden), count, self.shape.hidden).sum(1)
        return total.to(hidden_states.dtype).view(hidden_states.shape)

    def _run_all(self, hidden: torch.Tensor, ids: torch.Tensor, made: torch.Tensor) -> None:
        """Have experts compute with [rows, hidden], into [rows * k, hidden]."""
        pairs, count = rows_of_experts(ids, self.num_experts), ids.shape[-1]
        # A bias may be trained, or what an activation function has, though the input is not.
        recorded = torch.is_grad_enabled() and (
            hidden.requires_grad or any(p.requires_grad for p in self.parameters())
        )
        alone = recorded or self.exact_inputs or self.shape.bits != 4  # without a kernel of ours
        most = 0 if alone else most_together(self.shape.wide, hidden.dtype)
        packed = self.packed.detach()
        of_one = min(most, most_of_one(self.shape.hidden, hidden.dtype))
        for there in experts_at_hand(self.packed, [*pairs]):
            for experts in portions(there, pairs, most, of_one):
                if len(pairs[experts[0]]) <= of_one:
                    self._run_few(packed, {e: pairs[e] for e in experts}, hidden, made)
                    continue
                mine = torch.tensor(pairs[experts[0]])
                given = hidden.index_select(0, mine // count)
                # A bias may be of another dtype.
                made[mine] = self._run(packed[experts[0]], experts[0], given).to(made.dtype)

    def _run_few(
        self,
        packed: torch.Tensor,
        pairs: Mapping[int, Sequence[int]],
        hidden: torch.Tensor,
        made: torch.Tensor,
    ) -> None:
        """Compute with few rows of several experts at once; `made` as `_run_all` has it."""
        first, second = self._places
        count = len(made) // len(hidden)
        mine = [(pair, expert) for expert, some in pairs.items() for pair in some]
        sent = [pair // count for pair, _ in mine]
        given = hidden
        if len(mine) < len(hidden):  # of a prompt: the others would be rounded for nothing
            given, sent = hidden.index_select(0, torch.tensor(sent)), [*range(len(mine))]
        forth = [(sent[row], expert, row) for row, (_, expert) in enumerate(mine)]
        opened = hidden.new_empty((len(mine), first.rows))
        product.multiply_sent(given, self._sent(packed, first, forth), opened)
        opened = self._biased(opened, self._first, [expert for _, expert in mine])
        library, shape = self._library[0], self.shape
        if len(pairs) > 1 and not activates_rows_alone(library, shape.wide, shape.inner):
            inner = torch.cat([self._gate(p) for p in opened.split([*map(len, pairs.values())])])
        else:
            inner = self._gate(opened)
        inner = inner.to(hidden.dtype).contiguous()
        back = [(row, expert, pair) for row, (pair, expert) in enumerate(mine)]
        product.multiply_sent(inner, self._sent(packed, second, back), made)
        if self._parameters["down_proj_bias"] is not None:
            rows = torch.tensor([pair for pair, _ in mine])
            biased = self._biased(made[rows], "down_proj", [expert for _, expert in mine])
            made[rows] = biased.to(made.dtype)

    def _sent(
        self, packed: torch.Tensor, place: MatrixPlace, pairs: Sequence[tuple[int, int, int]]
    ) -> product.Sent:
        groups = place.columns // self.shape.group
        told_in = DTYPES[self.shape.dtype]
        return product.Sent(packed, place.start, place.told, told_in, groups, pairs)

    def _run(self, whole: torch.Tensor, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """What an expert gives for [n, hidden]; `whole` is what it has."""
        first, second = (
            ExpertMatrix(whole, place, self.shape, exact_inputs=self.exact_inputs)
            for place in self._places
        )
        inner = self._gate(self._biased(_multiply(rows, first), self._first, expert))
        return self._biased(_multiply(inner.to(rows.dtype), second), "down_proj", expert)

    def _gate(self, made: torch.Tensor) -> torch.Tensor:
        library: Any = self._library[0]
        gated: torch.Tensor = (library._apply_gate if library.has_gate else library.act_fn)(made)  # noqa: SLF001 - what the library itself calls
        return gated

    def _biased(self, made: torch.Tensor, name: str, expert: int | Sequence[int]) -> torch.Tensor:
        """`expert`: of all rows, or of each."""
        bias = self._parameters[f"{name}_bias"]
        return made if bias is None else made + bias[expert]

    def _run_without_values(self, hidden: torch.Tensor, count: int) -> None:
        """Take what all rows take if they are sent to one expert: to be counted.

        Or few to `count` each, at once.
        """
        rows = hidden.clone()
        most = max(len(rows), min(len(rows) * count, MOST_TOGETHER))
        inner = self._gate(rows.new_empty((most, self.shape.wide)))
        inner.new_empty((most, self.shape.hidden))

    @property
    def will_round(self) -> bool:
        """Whether few rows of input are rounded, for our own kernels."""
        own = byte_product if self.shape.bits == 8 else product
        return not self.exact_inputs and own.compiled() is not None

    def settle(self) -> None:
        """Copy experts that do not begin where torch's kernel for int8 can read."""
        self.packed.data = aligned(self.packed.data, INT8_ALIGNMENT)

    def extra_repr(self) -> str:
        """Describe it for `print(model)`."""
        shape = self.shape
        group = f", group_size={shape.group}" if shape.group else ""
        return (
            f"experts={shape.experts}, hidden={shape.hidden}, inner={shape.inner}, "
            f"bits={shape.bits}{group}"
        )

    def _refuse_placeholder(self) -> None:
        # An integer that is not there reads as zero, which nobody would notice.
        if not any(self.packed.stride()):
            raise UnsupportedModelError(
                f"the module {self.path!r} was called while its block was not running, so its "
                f"int{self.shape.bits} experts are on disk. Call the model itself, or load it "
                "without pipeload."
            )

    def _refuse_devices(self, hidden: torch.Tensor) -> None:
        # Our own kernels take addresses: one of another device would end the process.
        devices = hidden.device.type, self.packed.device.type
        if devices != ("cpu", "cpu"):
            raise UnsupportedModelError(
                f"the module {self.path!r} computes on the CPU alone; its input is on "
                f"{devices[0]!r}, its int{self.shape.bits} experts on {devices[1]!r}. Leave both "
                "on the CPU."
            )


def _multiply(rows: torch.Tensor, matrix: ExpertMatrix) -> torch.Tensor:
    rows = aligned(rows.contiguous(), INPUT_ALIGNMENT)
    if torch.is_grad_enabled() and rows.requires_grad:
        made: torch.Tensor = Product.apply(rows, matrix)  # type: ignore[no-untyped-call]
        return made
    return matrix.product(rows)
