"""What the library and accelerate note on models and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeload.hf import marks


def test_initialised() -> None:
    """A mark that the library's own initialisation goes by."""
    from transformers import initialization

    parameter = nn.Parameter(torch.ones(2))
    assert not marks.is_initialised(parameter)
    marks.mark_initialised(parameter)
    assert marks.is_initialised(parameter)
    initialization.zeros_(parameter)
    assert parameter.tolist() == [1.0, 1.0]


def test_places() -> None:
    """A model says where all of it is, until that is undone; what it says itself stays."""
    model, placed = nn.Linear(1, 1), nn.Linear(1, 1)
    placed.hf_device_map = {"": "elsewhere"}  # type: ignore[assignment]
    (undo,) = marks.place(model, torch.device("cpu"))
    assert model.hf_device_map == {"": torch.device("cpu")}
    assert [*marks.place(placed, torch.device("cpu"))] == []
    undo()
    undo()
    assert not hasattr(model, "hf_device_map")


def test_what_others_noted() -> None:
    """accelerate's hook on a module, the revision in a configuration."""
    module = nn.Linear(1, 1)
    assert not marks.is_dispatched(module)
    module._hf_hook = object()  # type: ignore[assignment]
    assert marks.is_dispatched(module)
    assert marks.commit_of(module) is None
    module._commit_hash = "abc"  # type: ignore[assignment]
    assert marks.commit_of(module) == "abc"


def test_settings_of_a_configuration() -> None:
    """What is set later is seen; what chose nothing computes fused attention."""
    from transformers import LlamaConfig

    config: Any = LlamaConfig()
    config._attn_implementation = "eager"
    assert marks.attention_of(config) == "eager"
    assert marks.attention_of(nn.Linear(1, 1)) == "sdpa"
    seen = {marks.settings_of(config)}
    config.use_cache = False
    seen.add(marks.settings_of(config))
    config.output_attentions = True
    seen.add(marks.settings_of(config))
    assert len(seen) == 3
