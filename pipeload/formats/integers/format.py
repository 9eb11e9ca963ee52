"""The format of pipeload's own int8 and int4 checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeload.formats.format import AS_STORED, Format

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from pipeload.formats.format import PackedWeight, Stored
    from pipeload.formats.integers.linear import Int4Linear

METHOD: Final = "pipeload"
OURS: Final = "pipeload's int4 kernel, inputs rounded to int16"
TORCHS: Final = "torch's int4 kernel, exact inputs"


class Integers(Format):
    """A `Format`: weights of our own Linears and experts, for torch's own kernels and ours."""

    method = METHOD
    how = AS_STORED

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        """Find the weights of our own quantised Linears and experts."""
        from pipeload.formats.integers.packed_experts import PackedExperts
        from pipeload.formats.integers.packed_linear import PackedLinear
        from pipeload.formats.integers.packed_weight import ExpertsWeight, IntegerWeight

        found: dict[str, PackedWeight] = {}
        for path, module in stored.model.named_modules():
            if isinstance(module, PackedLinear):
                found[f"{path}.weight"] = IntegerWeight(path, module, stored)
            elif isinstance(module, PackedExperts):
                found[f"{path}.{module.stacked}"] = ExpertsWeight(path, module, stored)
        return found

    def keep_inputs_exact(self, model: nn.Module, /) -> bool:
        """Have torch's kernel multiply int4 weights, which rounds no inputs."""
        from pipeload.formats.integers.order import BY_ROWS
        from pipeload.formats.integers.packed_experts import PackedExperts

        linears = [module for module in _int4_linears(model) if module.order == BY_ROWS]
        experts = [m for m in model.modules() if isinstance(m, PackedExperts) and m.shape.group]
        for linear in linears:
            linear.exact_inputs = True
        for module in experts:
            module.exact_inputs = True
        return bool(linears or experts)

    def kernel(self, model: nn.Module, /) -> str | None:
        """Say what multiplies int4 weights by few rows of input."""
        from pipeload.formats.integers.order import BY_ROWS

        found = next(_int4_linears(model), None)
        if found is None:
            return None
        return OURS if found.computed_order == BY_ROWS else TORCHS


def _int4_linears(model: nn.Module) -> Iterator[Int4Linear]:
    from pipeload.formats.integers.linear import Int4Linear

    return (module for module in model.modules() if isinstance(module, Int4Linear))


INTEGERS: Final = Integers()
