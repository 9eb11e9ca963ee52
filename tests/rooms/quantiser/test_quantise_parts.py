"""Large integer weights are stored in parts, modules of their own, which stream one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

import pipeload
from pipeload.errors import OptionError
from pipeload.formats.integers.order import kernel_order
from pipeload.formats.integers.parted_linear import PartedLinear
from pipeload.formats.integers.quantizer import PipeloadConfig
from tests.rooms.quantiser.test_quantise import FORMS, OTHER_ORDER, SIZES, made_in
from tests.support.exact import (
    assert_same,
    limits,
    load,
    load_smallest,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

SHAPE = SIZES | {"hidden_size": 512, "intermediate_size": 2080, "num_hidden_layers": 2}
PARTS = {"int8": 5, "int4 by 32": 3}
"""Of a weight of 2080 x 512, at 256 kB each."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float checkpoint with biases whose widest weights have a remainder of rows."""
    folder = tmp_path_factory.mktemp("wide")
    save_random(AutoConfig.for_model("qwen2", **SHAPE), folder, torch.bfloat16, seed=6)
    return folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are small enough for a test."""
    monkeypatch.setattr("pipeload.quantiser.forms.PART_BYTES", 256 << 10)


def outputs(model: Any) -> list[torch.Tensor]:
    made = step_logits(model, prompt(), 2) + step_logits(model, prompt(2, 120), 0)
    return [*made, model.generate(prompt(), max_new_tokens=4, do_sample=False)]


@pytest.mark.parametrize("form", PARTS)
def test_streamed_is_plain(form: str, source: Path, tmp_path: Path) -> None:
    """At the smallest limit, in the middle and where all fits; saved and loaded again."""
    folder = pipeload.quantize(source, tmp_path / "made", **FORMS[form])
    model = load_plain(folder)
    up = model.model.layers[1].mlp.up_proj
    assert isinstance(up, PartedLinear)
    assert len(up.parts) == PARTS[form]
    expected = outputs(model)
    model.save_pretrained(tmp_path / "again")
    for each in (folder, tmp_path / "again"):
        assert_same(outputs(load_plain(each)), expected, str(each))
    for limit in limits(folder, 3):
        assert_same(outputs(load(folder, limit)), expected, f"{form} at {limit}")
    units = load_smallest(folder).pipeload.plan.units
    assert sum(".parts." in unit.name for unit in units) >= 2 * 2 * PARTS[form]


@pytest.mark.parametrize("form", PARTS)
def test_parts_are_the_rows_of_the_whole(
    form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same integers; and as close to the floats."""
    parted = pipeload.quantize(source, tmp_path / "parted", **FORMS[form])
    monkeypatch.setattr("pipeload.quantiser.forms.PART_BYTES", 1 << 30)
    whole = pipeload.quantize(source, tmp_path / "whole", **FORMS[form])
    stem, stored = "model.layers.0.mlp.up_proj.", load_file(parted / "model.safetensors")
    parts = [stored[f"{stem}parts.{i}.weight"] for i in range(PARTS[form])]
    assert all(part.shape[0] % 64 == 0 for part in parts[:-1])
    expected = load_file(whole / "model.safetensors")[f"{stem}weight"]
    assert torch.equal(torch.cat(parts), expected)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    made, wanted = (load_plain(f).get_submodule(stem[:-1])(x).float() for f in (parted, whole))
    assert (made - wanted).norm() < 0.01 * wanted.norm()
    assert load_smallest(parted).pipeload.plan.slot_bytes < (
        load_smallest(whole).pipeload.plan.slot_bytes
    )


def test_made_on_another_processor(source: Path, tmp_path: Path) -> None:
    """Every part is put into this one's order."""
    own = made_in(kernel_order(), source, tmp_path / "own")
    other = made_in(OTHER_ORDER, source, tmp_path / "other")
    expected = outputs(load_plain(own))
    assert_same(outputs(load_plain(other)), expected, "plain")
    assert_same(outputs(load_smallest(other)), expected, "streamed")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_an_adapter_on_top(source: Path, tmp_path: Path) -> None:
    """LoRA finds it as it finds any Linear."""
    peft = pytest.importorskip("peft")
    folder = pipeload.quantize(source, tmp_path / "made", **FORMS["int8"])
    made = []
    for load_one in (load_plain, load_smallest):
        torch.manual_seed(3)
        config = peft.LoraConfig(target_modules=["up_proj"], init_lora_weights=False)
        model = peft.get_peft_model(load_one(folder), config)
        with torch.no_grad():
            made.append(model(prompt()).logits)
    assert torch.equal(*made)
    with torch.no_grad():
        assert not torch.equal(made[0], load_plain(folder)(prompt()).logits)


def test_sizes_are_checked() -> None:
    """A checkpoint says how large its parts are; never less than the kernels need."""
    assert len(PipeloadConfig(8).parts(1 << 14, 1 << 14)) == 1
    parts = PipeloadConfig(4, group_size=32, order="pairs-16", part_bytes=1).parts(432, 64)
    assert [tuple(part) for part in parts] == [(0, 128), (128, 256), (256, 320), (320, 432)]
    for wrong in (0, -1, "16MB"):
        with pytest.raises(OptionError, match="part_bytes"):
            PipeloadConfig(8, part_bytes=wrong)  # type: ignore[arg-type]
