"""`pipeload.convert` of GGUF files: their integers where kernels take them, the others rounded."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

import pipeload
from pipeload.checkpoint.gguf import open_gguf
from pipeload.errors import CheckpointError, MemoryLimitError, UnsupportedModelError
from pipeload.formats.integers.linear import Int4Linear, Int8Linear
from pipeload.formats.integers.parted_linear import PartedLinear
from pipeload.formats.integers.rounding import to_int8
from tests.support.commands import invoke
from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.gguf_models import load_plain_gguf, save_gguf
from tests.support.models import load_plain

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("gguf")
__all__ = ["steady_floor"]  # a fixture: every test here runs with it
USUAL = ("Q4_K", "Q6_K")


def assert_made_of(model: Any, floats: Any) -> dict[str, int]:
    """Compare in fp32 with the plain load of the file; return how many Linears became what."""
    found = {"int4": 0, "int8": 0}
    for (path, module), (_, one) in zip(model.named_modules(), floats.named_modules(), strict=True):
        if isinstance(module, Int4Linear):
            found["int4"] += 1
            torch.testing.assert_close(module.dequantised(), one.weight, rtol=1e-5, atol=1e-6)
        elif isinstance(module, Int8Linear):
            found["int8"] += 1
            assert torch.equal(module.weight, to_int8(one.weight)[0]), path
            assert torch.equal(module.scale, to_int8(one.weight)[1]), path
        else:
            mine = dict(module.named_parameters(recurse=False))
            for name, wanted in one.named_parameters(recurse=False):
                assert torch.equal(mine[name], wanted), f"{path}.{name}"
    return found


@pytest.mark.parametrize(
    ("architecture", "kinds", "int4s"),
    [
        ("llama", USUAL, True),  # rows of queries and keys are in another order in the file
        ("llama", ("Q4_0", "Q4_1", "Q8_0", "Q5_0", "F16"), True),
        ("llama", ("Q5_K", "Q3_K", "IQ4_XS"), False),
        ("qwen2", ("Q4_0",), True),  # with biases
        ("starcoder2", USUAL, True),
    ],
)
def test_what_weights_become(
    architecture: str, kinds: tuple[str, ...], int4s: bool, tmp_path: Path
) -> None:
    """In fp32 nothing is rounded but what has no kernel, and that as a plain load's floats are."""
    file = save_gguf(tmp_path, architecture, kinds)
    folder = pipeload.convert(file, tmp_path / "made", dtype="float32")
    found = assert_made_of(load_plain(folder), load_plain_gguf(file))
    assert (found["int4"] > 0) == int4s
    others = not {*kinds} <= {"Q4_0", "Q4_1", "Q4_K", "F16"}
    assert (found["int8"] > 0) == others
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert ("code for code" in card) == int4s
    assert ("rounded again, to int8" in card) == others


def test_streamed_is_plain(tmp_path: Path) -> None:
    """At the smallest limit, in the middle, and where all fits; and after remove()."""
    folder = pipeload.convert(save_gguf(tmp_path, "llama", USUAL, files=3), tmp_path / "made")

    def outputs(model: Any) -> list[torch.Tensor]:
        made = step_logits(model, prompt(), 3) + step_logits(model, prompt(2, 120), 0)
        return [*made, model.generate(prompt(), max_new_tokens=4, do_sample=False)]

    model = load_plain(folder)
    assert model.dtype == torch.bfloat16
    expected = outputs(model)
    for place, limit in enumerate(limits(folder, 3)):
        model = load(folder, limit)
        assert_same(outputs(model), expected, f"at {limit}")
        if not place:
            assert_streamed(model)
    model.pipeload.remove()
    assert_same(outputs(model), expected, "after remove()")


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_an_int8_head(architecture: str, tmp_path: Path) -> None:
    """Of blocks, too; one that is the embedding leaves that as it is."""
    file = save_gguf(tmp_path, architecture, USUAL)
    folder = pipeload.convert(file, tmp_path / "made", head="int8", dtype="float32")
    model, floats = load_plain(folder), load_plain_gguf(file)
    assert isinstance(model.lm_head, Int8Linear)
    assert torch.equal(model.lm_head.weight, to_int8(floats.lm_head.weight)[0])
    embedding = floats.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    expected = step_logits(model, prompt(), 2)
    made = load(folder, limits(folder, 2)[0])
    assert_same(step_logits(made, prompt(), 2), expected, "streamed")


def test_large_weights_come_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where the file's order of rows has no seam; the numbers are those of the whole."""
    file = save_gguf(tmp_path, "llama", USUAL)
    whole = load_plain(pipeload.convert(file, tmp_path / "whole", dtype="float32"))
    monkeypatch.setattr("pipeload.quantiser.gguf_tensor.PART_BYTES", 8 << 10)
    monkeypatch.setattr("pipeload.quantiser.tensor._MOST_ITEMS", 1)  # the fewest rows at once
    model = load_plain(pipeload.convert(file, tmp_path / "made", dtype="float32"))
    parted = {p: m for p, m in model.named_modules() if isinstance(m, PartedLinear)}
    assert parted
    for path, module in parted.items():
        parts: list[Any] = [*module.parts]
        rows = torch.cat([part.dequantised() for part in parts])
        assert torch.equal(rows, whole.get_submodule(path).dequantised()), path


def test_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is what the library makes of the file; a tokenizer that it cannot make is said."""
    file = save_gguf(tmp_path, "llama", USUAL)
    with caplog.at_level(logging.WARNING, "pipeload"):
        folder = pipeload.convert(tmp_path, tmp_path / "made", gguf_file=file.name)
    assert "gets no tokenizer" in caplog.text
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert told["architectures"] == ["LlamaForCausalLM"]
    assert told["quantization_config"]["method"] == "gguf"
    assert {"bits": 8} in told["quantization_config"]["modules"].values()
    assert (folder / "generation_config.json").exists()
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"`{file.name}`" in card


def test_tokenizer_and_ends(tmp_path: Path) -> None:
    """Both are there, and an answer ends where the file says that it does."""
    said = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.merges": ["t 1", "t1 2"],
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    file = save_gguf(tmp_path, "llama", USUAL, extra=said)
    folder = pipeload.convert(file, tmp_path / "made")
    auto: Any = transformers.AutoTokenizer
    mine, theirs = auto.from_pretrained(folder), auto.from_pretrained(tmp_path, gguf_file=file.name)
    assert mine("t12t1")["input_ids"] == theirs("t12t1")["input_ids"] == [0, 2, 3, 0, 2]
    assert mine.chat_template == theirs.chat_template == said["tokenizer.chat_template"]
    assert load_plain(folder).generation_config.eos_token_id == [7, 9]


def test_little_memory_makes_the_same(tmp_path: Path) -> None:
    """At the limit that a refusal names; less is refused before anything is made."""
    file = save_gguf(tmp_path, "llama", USUAL)
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.convert(file, tmp_path / "made", memory_limit=1_000_000)
    assert not list(tmp_path.glob(".made*"))
    limit = refusal.value.smallest_limit
    assert limit is not None
    least = pipeload.convert(file, tmp_path / "least", memory_limit=limit + 50_000_000)
    most = pipeload.convert(file, tmp_path / "most")
    name = "model.safetensors"
    assert (least / name).read_bytes() == (most / name).read_bytes()


def test_what_is_refused(tmp_path: Path) -> None:
    """Floats, Linears of another kind, experts, a missing weight, scales that are no numbers."""
    for folder in ("floats", "falcon", "mixture", "lacking", "broken"):
        (tmp_path / folder).mkdir()
    floats = save_gguf(tmp_path / "floats", "llama", ("F16",))
    with pytest.raises(UnsupportedModelError, match=r"are of F16, F32\. Use `pipeload quantize`"):
        pipeload.convert(floats, tmp_path / "made")
    falcon = save_gguf(tmp_path / "falcon", "falcon", USUAL)
    with pytest.raises(UnsupportedModelError, match="has no Linear of integers"):
        pipeload.convert(falcon, tmp_path / "made")
    mixture = save_gguf(tmp_path / "mixture", "qwen3moe", USUAL)
    with pytest.raises(UnsupportedModelError, match="is a mixture of experts, which convert"):
        pipeload.convert(mixture, tmp_path / "made")
    lacking = save_gguf(tmp_path / "lacking", "llama", USUAL, without=("blk.1.ffn_up.weight",))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        pipeload.convert(lacking, tmp_path / "made")
    broken = save_gguf(tmp_path / "broken", "llama", ("Q4_0",))
    entry = open_gguf(broken).checkpoint.entries["blk.0.ffn_up.weight"]
    with broken.open("r+b") as file:
        file.seek(entry.start)
        file.write(b"\x00\x7c")  # an infinite scale
    with pytest.raises(CheckpointError, match="not finite"):
        pipeload.convert(broken, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_the_command(tmp_path: Path) -> None:
    """`pipeload convert FILE.gguf DST` says what was rounded again."""
    file = save_gguf(tmp_path, "llama", ("Q4_0", "Q8_0"))
    made = invoke("convert", str(file), str(tmp_path / "made"))
    assert made.exit_code == 0, made.output
    assert "Linears of Q8_0 became int8, rounded again" in made.stdout
    told = invoke("convert", str(file), str(tmp_path / "more"), "--dtype", "auto", "--json")
    assert json.loads(told.stdout)["rounded_again"] == {"Q8_0": 14}
    tensors = load_file(tmp_path / "more" / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float32
