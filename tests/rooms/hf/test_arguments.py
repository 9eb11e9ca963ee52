"""Which loading arguments are handed on, dropped or refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.distributed.configuration_utils import DistributedConfig

from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.hf.arguments import adapt, check_devices


def test_what_is_not_named_is_handed_on() -> None:
    """As it came, None and False too; the user's own dictionary is left alone."""
    given = {"dtype": "auto", "revision": None, "trust_remote_code": False, "device_map": "auto"}
    before = dict(given)
    assert adapt(given) == {"dtype": "auto", "revision": None, "trust_remote_code": False}
    assert given == before


@pytest.mark.parametrize(
    "dropped",
    [
        {"device_map": {"": "cpu"}},
        {"device_map": {"model.layers.0": "disk", "lm_head": "cpu:0"}},
        {"max_memory": {"cpu": "1GB"}},
        {"offload_folder": "here", "offload_buffers": True, "offload_state_dict": True},
        {"low_cpu_mem_usage": True},
        {"load_in_4bit": False, "load_in_8bit": None},
    ],
)
def test_what_spreads_a_model_is_dropped(dropped: dict[str, Any]) -> None:
    """It is served already: a streamed model is never spread."""
    assert adapt(dropped) == {}


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"state_dict": {}}, OptionError, "state_dict= cannot be streamed"),
        ({"use_safetensors": False}, CheckpointError, "asks for pickled weights"),
        ({"load_in_4bit": True}, UnsupportedModelError, "--method nf4"),
        ({"load_in_8bit": True}, UnsupportedModelError, "--method int8"),
        ({"tp_plan": "auto"}, OptionError, "tp_plan='auto' spreads a model"),
        ({"tp_size": 2}, OptionError, "tp_size=2 spreads"),
        ({"device_mesh": "mesh"}, OptionError, "device_mesh='mesh' spreads"),
        ({"distributed_config": "all"}, OptionError, "distributed_config='all' spreads"),
        ({"distributed_config": DistributedConfig(pp_size=3)}, OptionError, "Pass ranks=3 to"),
        ({"distributed_config": DistributedConfig(tp_size=2)}, OptionError, "spreads a model"),
        ({"device_map": "cuda"}, OptionError, "device_map puts modules on cuda;"),
        ({"device_map": {"a": "cpu", "b": 1, "c": 0}}, OptionError, "modules on 0, 1;"),
    ],
)
def test_what_is_refused(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each in words of its own."""
    with pytest.raises(error, match=message):
        adapt(kwargs)


def test_safetensors_may_be_asked_for() -> None:
    """It is what is streamed."""
    assert adapt({"use_safetensors": True}) == {"use_safetensors": True}


@pytest.mark.parametrize("where", ["cuda", "cuda:0", "cuda:1"])
def test_a_map_may_name_the_device(where: str) -> None:
    """That the model is streamed to: by its kind, its full name or its number."""
    index = int(where.partition(":")[2] or 0)
    for named in ("cuda", where, index, {"": where, "head": index}, "auto", "cpu"):
        check_devices("device_map", named, where)


@pytest.mark.parametrize("named", ["cuda:1", 1, {"": "cuda:0", "head": "xpu"}, {"": "auto"}])
def test_a_map_may_not_name_another(named: object) -> None:
    """Nor is "auto" a place for one module."""
    with pytest.raises(OptionError, match="streams to cuda:0"):
        check_devices("device_map", named, "cuda:0")
