"""What others ask of the library's models, bars and names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as library_logging

from pipeload.hf import library
from tests.support.models import tiny_config

if TYPE_CHECKING:
    import pytest


def model(family: str = "llama") -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny_config(family))


def test_models_inside() -> None:
    """Outermost first."""
    whole = model()
    outer = nn.Sequential(whole)
    assert library.pretrained_modules(outer) == [whole, whole.model]


def test_what_quantisation_leaves() -> None:
    """The head, however it is called; also of Conv1D, which the library counts as Linears."""
    assert library.left_by_the_library(model()) == {"lm_head"}
    assert library.left_by_the_library(model("gpt2")) == {"lm_head"}


def test_quantised_by() -> None:
    """The method, or nothing."""
    config = SimpleNamespace(quant_method="fp8")
    assert library.quantised_by(SimpleNamespace(quantization_config=config)) == "fp8"
    assert library.quantised_by(None) is None


def test_no_compiling() -> None:
    """Only of the one model."""
    ours, other = model(), model()
    library.disable_auto_compile(ours)
    assert vars(ours)[library.AUTO_COMPILE](1, two=2) is False
    assert library.AUTO_COMPILE not in vars(other)
    assert hasattr(type(ours), library.AUTO_COMPILE), "the library calls it otherwise now"


def test_bars_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its bars are off, so is ours."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(library_logging, "tqdm", lambda **options: made.append(options))
    library.progress_bar(7, "first pass", "layers")
    assert made[0] | {"total": 7, "desc": "first pass", "unit": "layers", "leave": False} == made[0]
