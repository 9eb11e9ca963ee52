"""`pipeload.convert`: what others have quantised is taken over code for code, and streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload.errors import (
    CheckpointError,
    MemoryLimitError,
    OptionError,
    UnsupportedModelError,
)
from pipeload.formats.codes.coded_weight import moved_up
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.order import unpack
from pipeload.formats.integers.packed_linear import PackedLinear
from pipeload.formats.integers.parted_linear import PartedLinear
from pipeload.formats.integers.rounding import to_int8
from pipeload.quantiser.forms import PART_BYTES
from pipeload.quantiser.resumable_shards import MANIFEST
from tests.support.children import killed_in_fork
from tests.support.commands import invoke
from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    load_smallest,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random
from tests.support.packers import SIZES, WAYS, Packed, mlx, random_codes, save_packed

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it


def codes_in(module: torch.nn.Module) -> torch.Tensor:
    """uint8 of [rows, columns] in the order of its columns, of a Linear or one in parts."""
    if isinstance(module, PartedLinear):
        return torch.cat([codes_in(part) for part in module.parts])
    if isinstance(module, Int8Linear):
        return (module.weight.int() + 128).to(torch.uint8)
    assert isinstance(module, Int4Linear)
    return unpack(module.weight, module.order)


def assert_taken_over(model: Any, packed: dict[str, Packed], bits: int = 4) -> None:
    """Every code of every Linear is there, moved to our middle, beside the column it was for."""
    for path, one in packed.items():
        module = model.get_submodule(path)
        first = module.parts[0] if isinstance(module, PartedLinear) else module
        columns = getattr(first, "columns", None)
        codes = one.codes + moved_up(bits)
        wanted = codes if columns is None else codes[:, columns.long()]
        assert torch.equal(codes_in(module), wanted), path


@pytest.mark.parametrize("name", WAYS)
def test_codes_and_numbers(name: str, tmp_path: Path) -> None:
    """In fp32 nothing is rounded at all: weights are the numbers that were meant."""
    packed = save_packed(tmp_path / "source", WAYS[name])
    folder = pipeload.convert(tmp_path / "source", tmp_path / "made", dtype="float32")
    model = load_plain(folder)
    assert_taken_over(model, packed, WAYS[name].bits)
    for path, one in packed.items():
        module = model.get_submodule(path)
        columns = getattr(module, "columns", None)
        assert (columns is not None) == WAYS[name].shuffled
        # MLX stores an offset, which the tests' packer has rounded.
        tolerance = 1e-3 if name == "mlx" else 0
        torch.testing.assert_close(module.dequantised(), one.numbers, rtol=0, atol=tolerance)
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert told["quantization_config"]["method"] == (
        WAYS[name].settings.get("quant_method") or "mlx"
    )
    assert "quantization" not in told
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "pipeload convert" in card
    assert "code for code" in card


def outputs(model: Any) -> list[torch.Tensor]:
    """Logits of prompts, few rows and many, of decoding steps, and what is generated."""
    made = step_logits(model, prompt(), 3) + step_logits(model, prompt(2, 120), 0)
    made.append(model.generate(prompt(), max_new_tokens=4, do_sample=False))
    return made


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gptq", "llama"),
        ("gptq, desc_act", "qwen2"),
        ("awq", "llama"),
        ("compressed-tensors, w8a16", "llama"),
        ("mlx", "qwen2"),
    ],
)
def test_streamed_is_plain(name: str, family: str, tmp_path: Path) -> None:
    """At the smallest limit, in the middle, and where all fits; and after remove()."""
    save_packed(tmp_path / "source", WAYS[name], family=family)
    folder = pipeload.convert(tmp_path / "source", tmp_path / "made")
    model = load_plain(folder)
    assert model.dtype == torch.bfloat16
    expected = outputs(model)
    for limit in limits(folder, 3):
        model = load(folder, limit)
        assert_same(outputs(model), expected, f"{name} at {limit}")
        if limit == limits(folder, 3)[0]:
            assert_streamed(model)
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")


def test_large_weights_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its own scales and its own order of columns."""
    monkeypatch.setattr("pipeload.quantiser.coded_contents.PART_BYTES", 16 << 10)
    packed = save_packed(tmp_path / "source", WAYS["gptq, desc_act"])
    folder = pipeload.convert(tmp_path / "source", tmp_path / "made")
    model = load_plain(folder)
    assert sum(isinstance(module, PartedLinear) for module in model.modules()) > 0
    assert_taken_over(model, packed)
    assert PART_BYTES > 16 << 10
    expected = step_logits(model, prompt(), 2)
    made = load(folder, limits(folder, 2)[0])
    assert_same(step_logits(made, prompt(), 2), expected, "in parts")


def test_gradients_go_to_the_right_columns(tmp_path: Path) -> None:
    """Adapters below are trained through weights in another order."""
    save_packed(tmp_path / "source", WAYS["gptq, desc_act"])
    folder = pipeload.convert(tmp_path / "source", tmp_path / "made", dtype="float32")
    module = load_plain(folder).model.layers[0].mlp.up_proj
    with torch.enable_grad():
        given = torch.randn(3, module.in_features, requires_grad=True)
        module(given).sum().backward()
    assert given.grad is not None
    wanted = module.dequantised().sum(0).expand(3, -1)
    torch.testing.assert_close(given.grad, wanted)


def test_what_is_quantised_besides_becomes_floats(tmp_path: Path) -> None:
    """Embeddings and the head, as MLX has them: every number, rounded once."""
    source = tmp_path / "source"
    way = WAYS["mlx"]
    save_packed(source, way)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    packed = random_codes((512, 256), way, generator, torch.float16)
    for stem in ("model.embed_tokens.", "lm_head."):
        del tensors[f"{stem}weight"]
        tensors |= {k: v.clone() for k, v in way.pack(stem, packed).items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    folder = pipeload.convert(source, tmp_path / "made")
    made = load_file(folder / "model.safetensors")
    scale, offset = (
        tensors[f"lm_head.{name}"].float().repeat_interleave(64, 1) for name in ("scales", "biases")
    )
    wanted = (packed.codes.float() * scale + offset).to(torch.bfloat16)
    assert torch.equal(made["lm_head.weight"], wanted)
    assert torch.equal(made["model.embed_tokens.weight"], wanted)
    model = load_plain(folder)
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize(
    ("name", "tied"), [("gptq", False), ("awq", True), ("compressed-tensors, int8", False)]
)
def test_an_int8_head(name: str, tied: bool, tmp_path: Path) -> None:
    """Rounded to nearest; one that was the embedding leaves that as it is."""
    source = tmp_path / "source"
    save_packed(source, WAYS[name], dtype=torch.bfloat16, tie_word_embeddings=tied)
    folder = pipeload.convert(source, tmp_path / "made", head="int8")
    stored = load_file(source / "model.safetensors")
    owner = "model.embed_tokens.weight" if tied else "lm_head.weight"
    wanted, scale = to_int8(stored[owner])
    made = load_file(folder / "model.safetensors")
    assert torch.equal(made["lm_head.weight"], wanted)
    assert torch.equal(made["lm_head.scale"], scale)
    assert torch.equal(made["model.embed_tokens.weight"], stored["model.embed_tokens.weight"])
    plain = load_plain(folder)
    assert isinstance(plain.lm_head, Int8Linear)
    expected = outputs(plain)
    assert_same(outputs(load(folder, limits(folder, 2)[0])), expected, "streamed")
    assert "Output head" in (folder / "README.md").read_text(encoding="utf-8")


def test_a_head_that_is_quantised_already(tmp_path: Path) -> None:
    """It would be rounded twice."""
    source, way = tmp_path / "source", WAYS["mlx"]
    save_packed(source, way)
    tensors = load_file(source / "model.safetensors")
    packed = random_codes((512, 256), way, torch.Generator().manual_seed(1), torch.float16)
    del tensors["lm_head.weight"]
    save_file(
        tensors | way.pack("lm_head.", packed), source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UnsupportedModelError, match="Leave --head out"):
        pipeload.convert(source, tmp_path / "made", head="int8")
    assert not (tmp_path / "made").exists()


def test_other_groups(tmp_path: Path) -> None:
    """Weights of larger groups share the smallest one's size; what no kernel takes is floats."""
    source = tmp_path / "source"
    first = save_packed(source, WAYS["gptq_v2"])  # by 32
    tensors = load_file(source / "model.safetensors")
    path = "model.layers.1.mlp.up_proj"
    tensors[f"{path}.g_idx"] = torch.arange(256, dtype=torch.int32) // 128
    tensors[f"{path}.scales"] = tensors[f"{path}.scales"][:2].contiguous()
    tensors[f"{path}.qzeros"] = tensors[f"{path}.qzeros"][:2].contiguous()
    odd = "model.layers.2.mlp.up_proj"  # by 16
    tensors[f"{odd}.g_idx"] = torch.arange(256, dtype=torch.int32) // 16
    tensors[f"{odd}.scales"] = torch.cat([tensors[f"{odd}.scales"]] * 2)
    tensors[f"{odd}.qzeros"] = torch.cat([tensors[f"{odd}.qzeros"]] * 2)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    model = load_plain(pipeload.convert(source, tmp_path / "made", dtype="float32"))
    one = first[path]
    wanted = one._replace(scale=one.scale[:2], zero=one.zero[:2], group_of=torch.arange(256) // 128)
    module = model.get_submodule(path)
    assert module.group_size == 32
    assert torch.equal(module.dequantised(), wanted.numbers)
    assert type(model.get_submodule(odd)) is torch.nn.Linear


def test_other_bits(tmp_path: Path) -> None:
    """Of MLX: 3 are the middle codes of 4 here, as 2 of another weight are; 6 become floats."""
    source, way = tmp_path / "source", WAYS["mlx"]
    packed = save_packed(source, way)
    tensors = load_file(source / "model.safetensors")
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    others = {"model.layers.1.mlp.up_proj": 2, "model.layers.2.mlp.up_proj": 6}
    for path, one in packed.items():
        bits = others.get(path, 3)
        packed[path] = one._replace(codes=one.codes & (1 << bits) - 1)
        tensors |= mlx(f"{path}.", packed[path], bits)
        told["quantization"][path] = {"group_size": 64, "bits": bits}
    told["quantization"]["bits"] = 3
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps(told), encoding="utf-8")
    model = load_plain(pipeload.convert(source, tmp_path / "made"))
    floats = "model.layers.2.mlp.up_proj"
    assert type(model.get_submodule(floats)) is torch.nn.Linear
    for path in packed.keys() - {floats}:
        assert_taken_over(model, {path: packed[path]}, others.get(path, 3))
    streamed = load_smallest(source, dtype=torch.bfloat16)
    assert_same(step_logits(streamed, prompt(), 2), step_logits(model, prompt(), 2), "as it is")


def test_old_settings_beside_the_configuration(tmp_path: Path) -> None:
    """As AutoGPTQ wrote them, before configurations said how a model is quantised."""
    source = tmp_path / "source"
    packed = save_packed(source, WAYS["gptq"])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (source / "quantize_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert_taken_over(load_plain(pipeload.convert(source, tmp_path / "made")), packed)


# -- going on, and limits ----------------------------------------------------------------------


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """Finished shards are kept, and the result is the same."""
    source = tmp_path / "source"
    save_packed(source, WAYS["awq"])
    whole = pipeload.convert(source, tmp_path / "whole", max_shard_size=200_000)
    folder = tmp_path / "made"

    def interrupted(done: int, total: int) -> None:
        if done > total // 2:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        pipeload.convert(source, folder, max_shard_size=200_000, progress=interrupted)

    killed_in_fork(run)
    partial = folder.with_name(".made.partial")
    assert (partial / MANIFEST).exists()
    kept = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert kept
    pipeload.convert(source, folder, max_shard_size=200_000)
    for name, time in kept.items():
        assert (folder / name).stat().st_mtime_ns == time
    for file in whole.glob("*.safetensors"):
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_little_memory_makes_the_same(tmp_path: Path) -> None:
    """At the limit that a refusal names; less is refused before anything is made."""
    source = tmp_path / "source"
    save_packed(source, WAYS["gptq"])
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.convert(source, tmp_path / "made", memory_limit=1_000_000)
    assert not list(tmp_path.glob(".made*"))
    limit = refusal.value.smallest_limit
    assert limit is not None
    least = pipeload.convert(source, tmp_path / "least", memory_limit=limit + 50_000_000)
    most = pipeload.convert(source, tmp_path / "most")
    name = "model.safetensors"
    assert (least / name).read_bytes() == (most / name).read_bytes()


# -- what is refused ---------------------------------------------------------------------------


def test_nothing_to_convert(tmp_path: Path) -> None:
    """Floats, a method that is not known, and experts that the library stacks: each by its name."""
    config = AutoConfig.for_model("llama", **SIZES)
    save_random(config, tmp_path / "floats", torch.bfloat16, seed=1)
    with pytest.raises(UnsupportedModelError, match=r"is not quantised, .*`pipeload quantize`"):
        pipeload.convert(tmp_path / "floats", tmp_path / "made")
    source = tmp_path / "source"
    save_packed(source, WAYS["gptq"])
    told = json.loads((source / "config.json").read_text(encoding="utf-8"))
    told["quantization_config"]["quant_method"] = "vptq"
    (source / "config.json").write_text(json.dumps(told), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"by 'vptq', .* of gptq, awq"):
        pipeload.convert(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_groups_that_no_kernel_takes(tmp_path: Path) -> None:
    """All of them: it says which they are."""
    way = WAYS["gptq_v2"]._replace(group=16)
    save_packed(tmp_path / "source", way)
    with pytest.raises(UnsupportedModelError, match="4 bits, 16 to a scale"):
        pipeload.convert(tmp_path / "source", tmp_path / "made")


def test_int8_that_is_not_symmetric(tmp_path: Path) -> None:
    """No kernel takes it: refused before anything is made; one among others becomes floats."""
    source, way = tmp_path / "source", WAYS["compressed-tensors, w8a16"]
    save_packed(source, way._replace(symmetric=False))
    with pytest.raises(
        UnsupportedModelError, match="8 bits, 256 to a scale, not symmetric; 8 bits"
    ):
        pipeload.convert(source, tmp_path / "made")
    assert not list(tmp_path.glob("*made*"))
    path = "model.layers.1.mlp.up_proj"
    packed = save_packed(tmp_path / "other", way)
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    uneven = load_file(source / "model.safetensors")
    tensors |= {name: one for name, one in uneven.items() if name.startswith(path)}
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    model = load_plain(pipeload.convert(tmp_path / "other", tmp_path / "made", dtype="float32"))
    assert type(model.get_submodule(path)) is torch.nn.Linear
    assert_taken_over(model, {name: one for name, one in packed.items() if name != path})
    streamed = load_smallest(tmp_path / "other", dtype=torch.float32)
    assert_same(step_logits(streamed, prompt(), 2), step_logits(model, prompt(), 2), "as it is")


def test_experts(tmp_path: Path) -> None:
    """The library joins them to one tensor, which no Linear holds."""
    source = tmp_path / "source"
    save_packed(source, WAYS["gptq"])
    tensors = load_file(source / "model.safetensors")
    for key in ("qweight", "qzeros", "scales", "g_idx"):
        name = f"model.layers.0.mlp.experts.0.up_proj.{key}"
        tensors[name] = tensors[f"model.layers.0.mlp.up_proj.{key}"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"'model.layers.0.mlp.experts.0.up_proj"):
        pipeload.convert(source, tmp_path / "made")


def test_parts_that_nobody_knows(tmp_path: Path) -> None:
    """A tensor beside a coded weight may change what its codes mean: refused by its name."""
    source = tmp_path / "source"
    save_packed(source, WAYS["awq"])
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.smooth"] = torch.ones(256)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.smooth'"):
        pipeload.convert(source, tmp_path / "made")


def test_scales_of_an_activation(tmp_path: Path) -> None:
    """AWQ divides by them what Starcoder 2's activation gives; converted or streamed alike."""
    source = tmp_path / "source"
    save_packed(source, WAYS["awq"], family="starcoder2")
    load_smallest(source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.act.scales"] = torch.full((512,), 3.0)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.act\.scales'"):
        pipeload.convert(source, tmp_path / "made")
    with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.0\.mlp\.act\.scales'"):
        pipeload.from_pretrained(source, memory_limit="50GB")


def test_bad_input(tmp_path: Path) -> None:
    """A file cut short, a tensor that is missing, an option that means nothing."""
    source = tmp_path / "source"
    save_packed(source, WAYS["gptq"])
    with pytest.raises(OptionError, match="dtype='int4' is unknown"):
        pipeload.convert(source, tmp_path / "made", dtype="int4")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        pipeload.convert(source, tmp_path / "made")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        pipeload.convert(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_command(tmp_path: Path) -> None:
    """`pipeload convert SRC DST`: one line, or one object, on stdout; then `plan` shows it."""
    save_packed(tmp_path / "source", WAYS["gptq"])
    made = invoke("convert", str(tmp_path / "source"), str(tmp_path / "made"))
    assert made.exit_code == 0, made.output
    assert "of the weights" in made.stdout
    told = invoke(
        "convert", str(tmp_path / "source"), str(tmp_path / "more"), "--dtype", "fp16", "--json"
    )
    assert json.loads(told.stdout)["bytes"] > 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "more", dtype="auto")
    assert model.dtype == torch.float16
    assert any(isinstance(module, PackedLinear) for module in model.modules())
    again = invoke("convert", str(tmp_path / "source"), str(tmp_path / "made"))
    assert again.exit_code != 0
    assert "is there already" in again.stderr
