"""What is not streamed is loaded by the library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, core_model_loading

from pipeload.hf.marks import INITIALISED, is_initialised, mark_initialised
from pipeload.hf.rest_loading import _bar, keep_placeholders, load_all_but, not_missing
from pipeload.hf.takeover import peek
from tests.support.models import load_plain

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint


class Report(SimpleNamespace):
    missing_keys: set[str]


def missing_after(model: nn.Module, missing: set[str], taken: set[str], packed: set[str]) -> Any:
    report = Report(missing_keys=missing)
    not_missing(report, model, taken, dict.fromkeys(packed))  # type: ignore[arg-type]
    return report.missing_keys


@pytest.mark.parametrize("mapped", [True, False])
def test_all_but_some(tiny: TinyCheckpoint, mapped: bool) -> None:
    """Those stay on the meta device; all others are as in a plain load. Nothing stays patched."""
    folder = tiny("llama")
    plain, before = load_plain(folder), vars(core_model_loading)["tqdm"]
    load = peek(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
    assert load is not None
    skipped = {"model.layers.1.mlp.up_proj.weight", "lm_head.weight"}
    info = load_all_but(skipped, load.model, load.files, load._config, disable_mmap=not mapped)
    assert info.missing_keys == skipped
    for name, parameter in load.model.named_parameters():
        assert parameter.is_meta is (name in skipped)
        assert parameter.is_meta or torch.equal(parameter, plain.get_parameter(name))
    assert vars(core_model_loading)["tqdm"] is before


def test_a_bar_for_nothing() -> None:
    """Where the library loads nothing itself, it would show a full bar before anything is read."""
    assert _bar([], "anything") == []
    assert [*_bar([1, 2], disable=True)] == [1, 2]


def test_what_is_streamed_is_not_missing() -> None:
    """Nor are the statistics of quantised weights, which are no parameters."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    missing = {"a.weight", "a.weight.absmax", "b.weight", "b.bias", "b.weight.absmax"}
    left = missing_after(model, set(missing), {"a.weight"}, {"a.weight"})
    assert left == missing - {"a.weight", "a.weight.absmax"}
    left = missing_after(model, set(missing), {"b.weight"}, {"a.weight"})
    assert left == missing - {"b.weight"}
    left = missing_after(model, {"a.weight", "a.bias"}, {"a.weight"}, {"a.weight"})
    assert left == {"a.bias"}, "a parameter of its own that nobody has read"


def test_placeholders_are_kept() -> None:
    """A module is left alone if all it has is there; not for what is missing, or for buffers."""
    model: Any = nn.Module()
    model.whole, model.part, model.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
    for name, parameter in model.named_parameters():
        if name != "part.bias":
            mark_initialised(parameter)
    keep_placeholders(model)
    marked = [name for name, module in model.named_modules() if INITIALISED in vars(module)]
    assert marked == ["whole"]
    assert not is_initialised(model.part.bias)
