"""A format is one file behind a protocol: adding one touches no other room, none knows names."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers.quantizers import auto as quantizers
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import pipeload
from pipeload import UnsupportedModelError
from pipeload.formats import registry
from pipeload.formats.form_names import FORMS
from pipeload.formats.repack import Repack
from tests.support.models import load_plain, save_random
from tests.support.quantised import rewrite
from tests.support.streaming import generated, load_streamed, logits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipeload.formats.format import Held, PackedWeight, Shown, Stored, Unpacking
    from pipeload.weights.layout import Weight

PRODUCT = Path(pipeload.__file__).parent
METHOD = "negated"


# -- what the library would have to load it --------------------------------------------------------


class NegatedLinear(nn.Linear):
    """A Linear whose weight the file has with the other sign."""

    negated = True


class NegatedConfig(QuantizationConfigMixin):
    def __init__(self, **_: Any) -> None:
        self.quant_method: Any = METHOD
        self.modules_to_not_convert: list[str] = []


class NegatedQuantizer(HfQuantizer):
    requires_calibration = True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        for path, module in model.named_modules():
            if type(module) is nn.Linear and path != "lm_head":
                module.__class__ = NegatedLinear

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, NegatedLinear) and module.negated:
                module.weight.data = -module.weight.data
                module.negated = False
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


# -- what a file of `formats/` would hold ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Negate(Repack):
    def fill(self, stored: torch.Tensor, out: torch.Tensor) -> None:
        torch.neg(stored, out=out)


class NegatedWeight:
    couples_rows = False

    def __init__(self, name: str, module: NegatedLinear, stored: Stored) -> None:
        plain = stored.plain(name)
        assert plain is not None
        assert [*stored.parts(name)] == ["weight"]
        self._module = module
        self.weight: Weight = replace(plain, repacked=Negate())
        self.counts: Mapping[str, int] = {name: module.weight.numel()}

    def statistics_bytes(self, _takes: Callable[[int], int]) -> int:
        return 0

    def held_by_products(self, _dtype: torch.dtype) -> Iterable[Held]:
        return []

    def show(self) -> Shown | None:
        return None

    def leave_to_streaming(self) -> None:
        self._module.negated = False


class Negated:
    method = METHOD
    how = "its sign is changed as it is read"
    only: tuple[str, str] | None = None
    unpacking: Unpacking | None = None
    on_devices = False
    package: str | None = None

    def matches(self, config: Any) -> bool:
        named = config.get("quant_method") if isinstance(config, dict) else config.quant_method
        return bool(named == METHOD)

    def find(self, stored: Stored) -> Mapping[str, PackedWeight]:
        return {
            f"{path}.weight": NegatedWeight(f"{path}.weight", module, stored)
            for path, module in stored.model.named_modules()
            if isinstance(module, NegatedLinear)
        }

    def keep_inputs_exact(self, _model: nn.Module) -> bool:
        return False

    def kernel(self, _model: nn.Module) -> str | None:
        return None

    def nearest_form(self, _config: Any) -> str:
        return "int8"


# -- the tests -------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of it, which the library loads."""
    monkeypatch.setitem(quantizers.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD, NegatedConfig)
    monkeypatch.setitem(quantizers.AUTO_QUANTIZER_MAPPING, METHOD, NegatedQuantizer)

    def change(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {name: -tensor if name.endswith("proj.weight") else tensor}

    made = save_random("llama", tmp_path / "floats", "bf16", seed=3)
    return rewrite(made, {"quant_method": METHOD}, change)


def test_a_line_in_the_registry_is_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed to the last bit at every limit, and plain again after."""
    with pytest.raises(UnsupportedModelError, match="'negated' cannot be streamed: this version"):
        pipeload.from_pretrained(folder)
    monkeypatch.setattr(registry, "FORMATS", [*registry.FORMATS, Negated()])
    reference = load_plain(folder)
    wanted, tokens = logits(reference), generated(reference)
    assert not wanted.isnan().any()
    for spare in (0, 300_000, 10_000_000):
        model = load_streamed(folder, spare=spare)
        read = [w for unit in model.pipeload.plan.units for w in unit.streamed.weights]
        assert any(w.repacked == Negate() for w in read) == (spare < 10_000_000)
        assert torch.equal(logits(model), wanted)
        assert generated(model) == tokens
        model.pipeload.remove()
        assert torch.equal(logits(model), wanted)


# Ours is the product's name; the other one is a kind of file, and a package, as well.
WORDS = {*FORMS, *(one.method for one in registry.FORMATS)} - {"pipeload", "gguf"}
MAY_KNOW = {"formats", "quantiser"}
"""Rooms that may name methods: what is streamed, and what is made."""
TYPED = {Path("cli", name) for name in ("options.py", "making_options.py", "choices.py")}


def test_no_other_room_knows_a_method_by_name() -> None:
    """But for what can be typed at the command line; docstrings may speak of anything."""
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, sorted(WORDS)))})(?![\w-])")
    found = {
        file.relative_to(PRODUCT)
        for file in PRODUCT.rglob("*.py")
        if any(map(pattern.search, strings_of(file)))
    }
    assert {file for file in found if file.parts[0] not in MAY_KNOW} == TYPED


def strings_of(file: Path) -> Iterator[str]:
    """What stands in quotes and is computed with."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value
