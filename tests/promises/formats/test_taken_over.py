"""Checkpoints of GPTQ, AWQ and others, streamed as they are: what a converted one computes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import pipeload
from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.formats.codes import repack
from pipeload.formats.integers.packed_linear import PackedLinear
from tests.support.exact import (
    assert_same,
    assert_streamed,
    bytes_streamed,
    limits,
    load,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random
from tests.support.packers import (
    SIZES,
    WAYS,
    aqlm,
    quark_settings,
    random_codes,
    save_packed,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it


FEW = ("gptq, asymmetric", "gptq, desc_act", "awq", "compressed-tensors, int8", "mlx")
"""One for each way in which words lie."""


@pytest.fixture(params=few(WAYS, FEW))
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of each kind, and what `pipeload convert` makes of it."""
    save_packed(tmp_path / "source", WAYS[request.param], dtype=torch.bfloat16)
    return tmp_path / "source", pipeload.convert(tmp_path / "source", tmp_path / "made")


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of prompts, few rows and many, of decoding steps, and what is generated."""
    made = step_logits(model, prompt(), 3) + step_logits(model, prompt(2, 120), 0)
    made.append(model.generate(prompt(), max_new_tokens=4, do_sample=False))
    return made


def test_streamed_is_what_converting_makes(both: tuple[Path, Path]) -> None:
    """At the smallest limit and where all fits, and after remove()."""
    source, made = both
    expected = outputs(load_plain(made))
    smallest, _, everything = limits(source, 3)
    model = load(source, smallest)
    assert_same(outputs(model), expected, "smallest")
    assert_streamed(model)
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")
    assert_same(outputs(load(source, everything)), expected, "everything")


def test_what_is_read_is_what_is_stored(both: tuple[Path, Path]) -> None:
    """No more bytes a pass than the file has, but for pages at borders."""
    source, _ = both
    model = load(source, limits(source, 3)[0])
    stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    step_logits(model, prompt(), 0)
    before = bytes_streamed(model)
    step_logits(model, prompt(), 0)
    assert 0 < bytes_streamed(model) - before <= 1.1 * stored


@pytest.mark.parametrize(
    "name",
    few(
        ["gptq, desc_act", "awq", "mlx", "compressed-tensors, w8a16"],
        ["gptq, desc_act", "compressed-tensors, w8a16"],
    ),
)
def test_without_a_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, by torch's own operations."""
    save_packed(tmp_path / "source", WAYS[name], dtype=torch.bfloat16)
    expected = outputs(load(tmp_path / "source", limits(tmp_path / "source", 2)[0]))
    monkeypatch.setattr(repack, "compiled", lambda: None)
    made = outputs(load(tmp_path / "source", limits(tmp_path / "source", 2)[0]))
    assert_same(made, expected, "without a compiler")


def test_it_is_saved_as_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """After remove(): plain transformers loads it with the same bits."""
    save_packed(tmp_path / "source", WAYS["gptq, desc_act"], dtype=torch.bfloat16)
    model = load(tmp_path / "source", limits(tmp_path / "source", 2)[0])
    expected = outputs(model)
    model.pipeload.remove()
    model.save_pretrained(tmp_path / "saved")
    told = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert told["quantization_config"]["quant_method"] == "pipeload"
    assert_same(outputs(load_plain(tmp_path / "saved")), expected, "saved")


def test_scripts_and_settings_for_other_kernels(tmp_path: Path) -> None:
    """A script that passes what GPTQ's kernels on a GPU want runs as it is."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    expected = step_logits(load(tmp_path / "source", 10**10), prompt(), 1)
    with pipeload.streaming(limits(tmp_path / "source", 2)[0]):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "source",
            dtype=torch.bfloat16,
            quantization_config={"quant_method": "gptq", "bits": 4, "backend": "exllama_v2"},
        )
    assert_same(step_logits(model, prompt(), 1), expected, "in a script")


# PEFT asks for what transformers have renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_on_top(tmp_path: Path) -> None:
    """PEFT finds Linears, and what is read goes where they are now."""
    peft = pytest.importorskip("peft")
    save_packed(tmp_path / "source", WAYS["awq"], dtype=torch.bfloat16)
    made = pipeload.convert(tmp_path / "source", tmp_path / "made")

    def adapted(model: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        return step_logits(peft.get_peft_model(model, config), prompt(), 2)

    expected = adapted(load_plain(made))
    smallest = limits(tmp_path / "source", 2)[0]
    assert_same(adapted(load(tmp_path / "source", smallest)), expected, "adapted")


def test_a_plan_is_made(tmp_path: Path) -> None:
    """With the kernel that computes."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    plan = pipeload.plan(tmp_path / "source", memory_limit=limits(tmp_path / "source", 2)[0])
    assert plan.kernel is not None
    assert "int4" in plan.kernel


def test_what_asks_for_another_quantisation_is_refused(tmp_path: Path) -> None:
    """It would quantise what is quantised already."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    asked = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(UnsupportedModelError, match="Leave it out"):
        load(tmp_path / "source", 10**10, quantization_config=asked)


def test_other_devices_are_refused(tmp_path: Path) -> None:
    """As for checkpoints of ours."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    with pytest.raises(OptionError, match="streams to the CPU"):
        load(tmp_path / "source", 10**10, device_map={"": "cuda"})


def test_settings_that_are_not_understood(tmp_path: Path) -> None:
    """By name, before anything is read."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    path = tmp_path / "source" / "config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told["quantization_config"]["bits"] = 1
    path.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="1 bits"):
        load(tmp_path / "source", 10**10)


def test_pickled_ones_are_refused(tmp_path: Path) -> None:
    """As all are: loading them can run code."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    (file,) = (tmp_path / "source").glob("*.safetensors")
    torch.save({}, tmp_path / "source" / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(CheckpointError, match="pickled"):
        load(tmp_path / "source", 10**10)


def test_zeros_that_cannot_be_are_told_in_a_pass(tmp_path: Path) -> None:
    """What is stored contradicts the settings: one error, and no wrong text."""
    save_packed(tmp_path / "source", WAYS["gptq, asymmetric"], dtype=torch.bfloat16)
    path = tmp_path / "source" / "config.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told["quantization_config"]["sym"] = True
    path.write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not in the middle"):
        step_logits(load(tmp_path / "source", 10**10), prompt(), 0)


def test_what_is_quantised_besides_becomes_floats(tmp_path: Path) -> None:
    """Embeddings and the head, as MLX has them: in each pass, or once."""
    source, way = tmp_path / "source", WAYS["mlx"]
    save_packed(source, way, dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    packed = random_codes((512, 256), way, torch.Generator().manual_seed(1), torch.bfloat16)
    for stem in ("model.embed_tokens.", "lm_head."):
        del tensors[f"{stem}weight"]
        tensors |= {k: v.clone() for k, v in way.pack(stem, packed).items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    expected = outputs(load_plain(pipeload.convert(source, tmp_path / "made")))
    for limit in limits(source, 2):
        assert_same(outputs(load(source, limit)), expected, f"at {limit}")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gptq_v2", {"group": 16}),
        ("gptq, 8 bits", {"group": 64, "shuffled": True}),
        ("compressed-tensors, w8a16", {"symmetric": False}),
    ],
)
def test_integers_that_no_kernel_takes(
    name: str, change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They become floats as they are read: the numbers they stand for, rounded once."""
    source = tmp_path / "source"
    packed = save_packed(source, WAYS[name]._replace(**change), dtype=torch.bfloat16)
    streams_as_floats(source, {path: one.numbers for path, one in packed.items()})
    assert "no kernel takes its integers" in caplog.text


def test_codebooks(tmp_path: Path) -> None:
    """AQLM's: the same of sums of their entries."""
    source = tmp_path / "source"
    tensors, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    save_random(transformers.AutoConfig.for_model("llama", **SIZES), source, torch.bfloat16, seed=4)
    for name, one in load_file(source / "model.safetensors").items():
        if name.endswith("proj.weight"):
            made, numbers[name.removesuffix(".weight")] = aqlm(name.removesuffix("weight"), one)
            tensors |= made
        else:
            tensors[name] = one
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    told["quantization_config"] = {"quant_method": "aqlm", "num_codebooks": 2}
    (source / "config.json").write_text(json.dumps(told), encoding="utf-8")
    streams_as_floats(source, numbers)


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp4"])
def test_floats_of_few_bits(dtype: str, tmp_path: Path) -> None:
    """Quark's: the same of each times its scale."""
    source = tmp_path / "source"
    tensors, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    save_random(transformers.AutoConfig.for_model("llama", **SIZES), source, torch.bfloat16, seed=4)
    for name, one in load_file(source / "model.safetensors").items():
        if not name.endswith("proj.weight"):
            tensors[name] = one
        elif dtype == "fp4":
            # Every byte is two numbers: 1 and 0.5, at the scale 2 ** -6.
            tensors[name] = torch.full((len(one), one.shape[1] // 2), 0x12, dtype=torch.uint8)
            scale = torch.full((len(one), one.shape[1] // 32), 127 - 6, dtype=torch.uint8)
            tensors[f"{name}_scale"] = scale
            halves = torch.tensor([1, 0.5]).repeat(one.shape[1] // 2) / 64
            numbers[name.removesuffix(".weight")] = halves.expand(one.shape)
        else:
            tensors[name], scale = (one.float() * 64).to(torch.float8_e4m3fn), torch.tensor(1 / 64)
            tensors[f"{name}_scale"] = scale
            numbers[name.removesuffix(".weight")] = tensors[name].float() * scale
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    scheme, form = ("per_group", "e8m0") if dtype == "fp4" else ("per_tensor", None)
    told["quantization_config"] = quark_settings(dtype, scheme, scale_format=form)
    (source / "config.json").write_text(json.dumps(told), encoding="utf-8")
    streams_as_floats(source, numbers)


def streams_as_floats(source: Path, numbers: dict[str, torch.Tensor]) -> None:
    """What a plain model of those numbers, rounded once, computes; it is not converted."""
    config = transformers.AutoConfig.from_pretrained(source)
    del config.quantization_config
    auto: Any = transformers.AutoModelForCausalLM
    plain = auto.from_config(config, dtype=torch.bfloat16).eval()
    stored = load_file(source / "model.safetensors")
    stored |= {f"{path}.weight": one.to(torch.bfloat16) for path, one in numbers.items()}
    plain.load_state_dict({key: stored[key] for key in plain.state_dict()})
    expected = step_logits(plain, prompt(), 3)
    with pytest.raises(UnsupportedModelError, match="no Linear has integers that a kernel takes"):
        pipeload.convert(source, source.with_name("made"))
    for limit in limits(source, 2):
        model = load(source, limit)
        assert_same(step_logits(model, prompt(), 3), expected, f"at {limit}")
    model.pipeload.remove()
    assert_same(step_logits(model, prompt(), 3), expected, "after remove()")


def test_the_model_without_its_head(tmp_path: Path) -> None:
    """Names lose their prefix, and what is not wanted is left out."""
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    with torch.no_grad():
        expected = load(tmp_path / "source", 10**10).model(prompt()).last_hidden_state
        for limit in limits(tmp_path / "source", 2):
            bare = load(tmp_path / "source", limit, auto_class=transformers.AutoModel)
            assert_same(bare(prompt()).last_hidden_state, expected, f"at {limit}")


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    """The same checkpoint with other tensors."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(change(tensors) or tensors, file, {"format": "pt"})
    return folder


def test_layers_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """They are left out, as those of floats are: heads that guess several tokens, for one."""
    source = tmp_path / "source"
    save_packed(source, WAYS["awq"], dtype=torch.bfloat16)
    expected = step_logits(load(source, 10**10), prompt(), 1)
    last = "model.layers.2."

    def add(tensors: dict[str, torch.Tensor]) -> None:
        more = {n.replace(last, "model.layers.3."): t for n, t in tensors.items() if last in n}
        tensors |= {name: tensor.clone() for name, tensor in more.items()}

    assert_same(step_logits(load(rewritten(source, add), 10**10), prompt(), 1), expected)
    with pytest.raises(UnsupportedModelError, match="stands for no weight"):
        pipeload.convert(source, tmp_path / "made")


def test_names_that_the_user_changes(tmp_path: Path) -> None:
    """By `key_mapping`, as for floats."""
    source = tmp_path / "source"
    save_packed(source, WAYS["gptq"], dtype=torch.bfloat16)
    expected = step_logits(load(source, 10**10), prompt(), 1)
    rewritten(source, lambda all_: {n.replace("self_attn", "mixer"): t for n, t in all_.items()})
    model = load(source, limits(source, 2)[0], key_mapping={"mixer": "self_attn"})
    assert_same(step_logits(model, prompt(), 1), expected)


def test_what_is_kept_in_fp32_has_no_integers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model says so of single Linears; their numbers are exact then."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", ["up_proj"])
    save_packed(tmp_path / "source", WAYS["gptq"], dtype=torch.bfloat16)
    made = pipeload.convert(tmp_path / "source", tmp_path / "made")
    model = load(tmp_path / "source", 10**10)
    up = model.get_submodule("model.layers.0.mlp.up_proj")
    assert type(up) is torch.nn.Linear
    assert up.weight.dtype is torch.float32
    assert type(load_plain(made).get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear


def test_groups_that_are_said_of_no_column(tmp_path: Path) -> None:
    """compressed-tensors has -1 for all where columns are in order."""
    source = tmp_path / "source"
    packed = save_packed(source, WAYS["compressed-tensors"], dtype=torch.bfloat16)
    expected = step_logits(load(source, 10**10), prompt(), 1)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for path, one in packed.items():
            tensors[f"{path}.weight_g_idx"] = torch.full((one.codes.shape[1],), -1).int()

    assert_same(step_logits(load(rewritten(source, add), 10**10), prompt(), 1), expected)


def test_a_word_where_settings_would_be(tmp_path: Path) -> None:
    """Of a float checkpoint whose configuration says that it is not quantised."""
    folder = save_random("llama", tmp_path, "bf16", seed=1)
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    told["quantization"] = "none"
    (folder / "config.json").write_text(json.dumps(told), encoding="utf-8")
    assert_same(
        step_logits(load(folder, 10**10), prompt(), 0), step_logits(load_plain(folder), prompt(), 0)
    )


def test_packed_linears_are_where_integers_are(tmp_path: Path) -> None:
    """All but the head."""
    packed = save_packed(tmp_path / "source", WAYS["awq"], dtype=torch.bfloat16)
    model = load(tmp_path / "source", 10**10)
    assert {p for p, m in model.named_modules() if isinstance(m, PackedLinear)} == packed.keys()
