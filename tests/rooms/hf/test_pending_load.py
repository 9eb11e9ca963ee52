"""What a checkpoint holds for a model, by the library's own rules."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipeload.hf.key_matching import target_dtype
from pipeload.hf.takeover import peek
from pipeload.weights.layout import Conversion
from tests.support.models import load_plain, random_model, save_random, tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from pipeload.hf.pending_load import PendingLoad
    from tests.conftest import TinyCheckpoint


def pending(folder: Path, **options: Any) -> PendingLoad:
    found = peek(lambda: AutoModelForCausalLM.from_pretrained(folder, **options))
    assert found is not None
    return found


def rewritten(folder: Path, target: Path, **changed: torch.Tensor | None) -> Path:
    """A copy whose tensors with these ends of their names are others, or missing if None."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    for end, tensor in changed.items():
        (name,) = (name for name in tensors if name.replace(".", "_").endswith(end))
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((folder / "config.json").read_text())
    return target


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts are stored one by one, and stacked in the model."""
    config = AutoConfig.for_model(
        "mixtral",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=12,
        vocab_size=64,
    )
    return save_random(config, tmp_path_factory.mktemp("experts"), "fp32", seed=3)


def test_every_weight_is_found(tiny: TinyCheckpoint) -> None:
    """Under the model's own name, from the file that it is in, in the model's type."""
    load = pending(tiny("llama"), dtype="auto")
    found = load.weights()
    assert {*found} == {name for name, _ in load.model.named_parameters()}
    for name, weight in found.items():
        assert weight.raw
        assert [source.name for source in weight.sources] == [name]
        assert weight.shape == tuple(load.model.get_parameter(name).shape)
        assert weight.nbytes == weight.sources[0].nbytes
        assert load.source_of(name).file in load.files
    assert load.folder == str(tiny("llama"))
    assert (load.missing(), load.misshapen(), load.quantised_by) == ([], [], None)


def test_a_cast(tiny: TinyCheckpoint) -> None:
    """Weights of another type than the model's are read and cast."""
    load = pending(tiny("llama", "bf16"), dtype=torch.float32)
    for weight in load.weights().values():
        assert (weight.dtype, weight.raw, weight.group) == ("F32", False, None)
        assert weight.nbytes == 2 * weight.sources[0].nbytes


def test_what_is_kept_in_fp32() -> None:
    """A pattern of the library's says so, not the parameter."""
    parameter = nn.Parameter(torch.empty(1, dtype=torch.bfloat16))

    config = SimpleNamespace(dtype_plan={"wo": torch.float32, "layer.*.norm": torch.float16})
    assert target_dtype(config, "block.wo", parameter) is torch.float32
    assert target_dtype(config, "layer.3.norm", parameter) is torch.float16
    assert target_dtype(config, "block.wi", parameter) is torch.bfloat16


def test_a_prefix_that_only_one_has(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """The bare model's checkpoint has names without the base model's."""
    config = tiny_config("gpt2")
    model: Any = random_model(config, torch.float32, seed=2)
    model.transformer.save_pretrained(tmp_path / "bare")
    load = pending(tmp_path / "bare", dtype="auto")
    stored = {name: weight.sources[0].name for name, weight in load.weights().items()}
    assert stored["transformer.h.0.attn.c_attn.weight"] == "h.0.attn.c_attn.weight"
    assert load.missing() == []  # the head is tied
    assert load.plain_linears() == {}  # they are no Linears


def test_experts_are_made_of_many(experts: Path) -> None:
    """In the order of their numbers, of which the tenth comes after the ninth."""
    load = pending(experts, dtype="auto")
    weight = load.weights()["model.layers.1.mlp.experts.gate_up_proj"]
    assert weight.group == weight.name
    assert not weight.raw
    order = [int(source.name.split(".")[-3]) for source in weight.sources]
    assert order == [number for number in range(12) for _ in range(2)]
    assert {part.rpartition(".")[0].split(".")[-1] for part in load.parts(weight.name)} == {
        "w1",
        "w3",
    }
    assert load.plain(weight.name) is not None
    linears = load.plain_linears()
    assert "model.layers.0.self_attn.q_proj.weight" in linears
    assert not any("expert" in path for path, _ in linears.values())


def test_the_library_makes_them(experts: Path) -> None:
    """What its operations make is what a plain load has; the model is held only where asked."""
    load = pending(experts, dtype="auto")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight, read = load.weights()[name], load.reader()
    stored = {source.name: read(source) for source in weight.sources}
    plain = AutoModelForCausalLM.from_pretrained(experts)
    conversion = Conversion((weight,), (0,), tuple((source, 0) for source in weight.sources))
    convert, model = load.converter(), weakref.ref(load.model)
    del load
    gc.collect()
    assert model() is None
    into = {name: torch.empty(weight.shape)}
    convert(conversion, stored, into)
    assert torch.equal(into[name], plain.get_parameter(name))


def test_what_does_not_fit(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Weights of another shape are left to the library, and those that are missing."""
    folder = rewritten(
        tiny("llama"),
        tmp_path / "changed",
        layers_2_mlp_up_proj_weight=torch.zeros(4, 4),
        layers_3_mlp_up_proj_weight=None,
        layers_4_mlp_up_proj_weight=torch.zeros(176, 96, dtype=torch.int32),
    )
    load = pending(folder, dtype="auto", ignore_mismatched_sizes=True)
    name = "model.layers.{}.mlp.up_proj.weight"
    assert load.misshapen() == [name.format(2)]
    assert load.missing() == [name.format(3)]
    found = load.weights()
    assert not {name.format(2), name.format(3)} & {*found}
    assert (load.plain(name.format(2)), load.plain(name.format(3))) == (None, None)
    assert found[name.format(4)].sources[0].dtype == "I32"
    assert load.parts(name.format(3)) == {}


def test_shared_weights_count_once(tiny: TinyCheckpoint) -> None:
    """A tied head is no weight of its own."""
    load = pending(tiny("qwen3"), dtype="auto")
    assert "lm_head.weight" not in load.weights()
    assert load.weight_count() == sum(p.numel() for p in load_plain(tiny("qwen3")).parameters())
    assert load.missing() == []


def test_for_another_model(tiny: TinyCheckpoint) -> None:
    """The same load, into a model of the same shape."""
    load = pending(tiny("llama"), dtype="auto")
    with torch.device("meta"):
        other: Any = AutoModelForCausalLM.from_config(load.model.config)
    again = load.into(other)
    assert again.model is other
    assert again.weights() == load.weights()


def test_float_checkpoints_have_nothing_packed(tiny: TinyCheckpoint) -> None:
    """No statistics, no products, and rows do not change each other."""
    load = pending(tiny("llama"), dtype="auto")
    assert load.packed == {}
    assert not load.couples_rows()
    assert load.statistics_bytes(lambda nbytes: nbytes) == 0
    assert load.products()(100) == 0
    assert load.shown("model.norm.weight") is None
    assert (str(load.where), load.disable_mmap) == ("cpu", False)


def test_the_rest_is_the_librarys(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """It loads what is not taken, and misses nothing of what is; what is in no file it makes."""
    folder = rewritten(tiny("llama"), tmp_path / "less", layers_3_mlp_up_proj_weight=None)
    load = pending(folder, dtype="auto")
    taken = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    info = load.load_rest(taken)
    assert info.missing_keys == {"model.layers.3.mlp.up_proj.weight"}
    meta = {name for name, p in load.model.named_parameters() if p.is_meta}
    assert meta == {*taken, *info.missing_keys}
    stored = load.source_of("model.norm.weight")
    assert torch.equal(load.model.get_parameter("model.norm.weight"), load.reader()(stored))


def test_conversions_that_were_used_are_kept(experts: Path, tiny: TinyCheckpoint) -> None:
    """By them the library saves what it has renamed; streamed keys count as those it loaded."""
    load = pending(experts, dtype="auto")
    load.load_rest([*load.weights()])
    used: Any = vars(load.model)["_weight_conversions"]
    assert any("experts" in pattern for entry in used for pattern in entry.target_patterns)
    other = pending(tiny("llama"), dtype="auto")
    other.load_rest([*other.weights()])
    used = vars(other.model)["_weight_conversions"]
    assert not any("experts" in pattern for entry in used for pattern in entry.target_patterns)
