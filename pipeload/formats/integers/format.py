"""The format of pipeload's own int8 and int4 checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pipeload.formats.format import AS_STORED, Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from pipeload.formats.format import PackedWeight, Stored

METHOD: Final = "pipeload"
OURS: Final = "pipeload's {} kernel, inputs rounded to int16"
TORCHS: Final = "torch's {} kernel, exact inputs"
FLOATS: Final = "{} experts as floats, exact inputs"


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
        """Have torch's kernels multiply, which round no inputs."""
        from pipeload.formats.integers.linear import Int4Linear, Int8Linear
        from pipeload.formats.integers.order import BY_ROWS
        from pipeload.formats.integers.packed_experts import PackedExperts

        found = False
        for module in model.modules():
            if isinstance(module, Int4Linear) and module.order != BY_ROWS:
                continue  # for torch's kernel as it is
            if isinstance(module, (Int4Linear, Int8Linear, PackedExperts)):
                module.exact_inputs = found = True
        return found

    def kernel(self, model: nn.Module, /) -> str | None:
        """Say what multiplies weights by few rows of input: those of 4 bits first."""
        from pipeload.formats.integers.packed_experts import PackedExperts
        from pipeload.formats.integers.packed_linear import PackedLinear

        found: dict[tuple[int, bool], str] = {}  # of Linears and of experts
        for module in model.modules():
            if isinstance(module, PackedLinear):
                exact = TORCHS
                key = module.bits, False
            elif isinstance(module, PackedExperts):
                exact = FLOATS if module.shape.bits == 4 else TORCHS
                key = module.shape.bits, True
            else:
                continue
            words = OURS if module.will_round else exact
            found.setdefault(key, words.format(f"int{key[0]}"))
        return "; ".join(dict.fromkeys(found[key] for key in sorted(found))) or None


INTEGERS: Final = Integers()
