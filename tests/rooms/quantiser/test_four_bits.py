"""`pipeload.quantize` to nf4 and fp4: the checkpoint that bitsandbytes and the library make."""

from __future__ import annotations

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from typer.testing import CliRunner

import pipeload
from pipeload.cli.commands import app
from pipeload.errors import MemoryLimitError, OptionError, UnsupportedModelError
from tests.rooms.quantiser.test_quantise import Full
from tests.support.exact import (
    assert_same,
    assert_streamed,
    limits,
    load,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain, save_random, tensor_files
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

pytest.importorskip("bitsandbytes")

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"method": "nf4"},
    "nf4 double": {"method": "nf4", "double_quant": True},
    "fp4": {"method": "fp4"},
    "fp4 double": {"method": "fp4", "double_quant": True},
}
MODELS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "llama": (torch.bfloat16, {}),
    "qwen2": (torch.float32, {}),
    "odd": (torch.bfloat16, {"intermediate_size": 400}),
    "qwen3": (torch.bfloat16, {"head_dim": 64, "tie_word_embeddings": True}),
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source(family)`: the folder of a small float checkpoint, made once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            dtype, sizes = MODELS[family]
            kind = "llama" if family == "odd" else family
            config = AutoConfig.for_model(kind, **(SIZES | sizes))
            folder = tmp_path_factory.mktemp(family)
            made[family] = save_random(config, folder, dtype, seed=5, max_shard_size="1MB")
        return made[family]

    return checkpoint


def by_the_library(source: Path, folder: Path, form: dict[str, Any], dtype: torch.dtype) -> Path:
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype="auto",
        device_map="cpu",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=form["method"],
            bnb_4bit_use_double_quant=form.get("double_quant", False),
            bnb_4bit_compute_dtype=dtype,
        ),
    )
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def state(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def assert_equal_checkpoints(got: Path, wanted: Path) -> None:
    """Tensor by tensor; a state of quantisation is JSON, in which spaces mean nothing."""
    ours, theirs = tensors(got), tensors(wanted)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if "quant_state" in name:
            assert state(ours[name]) == state(tensor), name
        else:
            assert ours[name].dtype == tensor.dtype, name
            assert torch.equal(ours[name], tensor), name


KINDS = ["llama", "qwen2", "qwen3"]


@pytest.mark.parametrize(
    ("family", "form"),
    few(
        itertools.product(KINDS, FORMS),
        [(KINDS[number % len(KINDS)], form) for number, form in enumerate(FORMS)],
    ),
)
def test_what_the_library_makes(
    family: str, form: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """The same bits, the same configuration; streamed as plain."""
    floats, options = source(family), FORMS[form]
    made = pipeload.quantize(floats, tmp_path / "made", **options)
    wanted = by_the_library(floats, tmp_path / "wanted", options, MODELS[family][0])
    assert_equal_checkpoints(made, wanted)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (made, wanted)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    expected = outputs(load_plain(made))
    for limit in limits(made, 2):
        model = load(made, limit)
        assert_same(outputs(model), expected, f"at {limit}")
        if limit == limits(made, 2)[0]:
            assert_streamed(model)


def outputs(model: Any) -> list[torch.Tensor]:
    return step_logits(model, prompt(), 2) + step_logits(model, prompt(2, 7), 1)


def test_little_memory_and_a_full_disk(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 64 rows, in shards, and with a second run: the same."""
    floats, options = source("llama"), FORMS["nf4 double"]
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.quantize(floats, tmp_path / "none", memory_limit=1, **options)
    least = (refusal.value.smallest_limit or 0) + 30_000_000  # this process may grow
    disk = Full(monkeypatch)
    small: dict[str, Any] = options | {"memory_limit": least, "max_shard_size": "200KB"}
    with pytest.raises(OptionError, match="disk is full"):
        pipeload.quantize(floats, tmp_path / "small", **small)
    disk.full = False
    made = pipeload.quantize(floats, tmp_path / "small", **small)
    assert len(set(tensor_files(made).values())) > 3
    assert_equal_checkpoints(made, pipeload.quantize(floats, tmp_path / "roomy", **options))
    card = (made / "README.md").read_text()
    assert all(words in card for words in ("NF4 of bitsandbytes", "quantised as well", "lm_head"))


def test_linears_that_are_kept(source: Callable[[str], Path], tmp_path: Path) -> None:
    """The library would take all by itself, and then fail where the processor has its kernels."""
    made = pipeload.quantize(source("odd"), tmp_path / "made", method="nf4")
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    names = ("gate_proj", "up_proj", "down_proj")
    paths = [f"model.layers.{layer}.mlp.{name}" for layer in range(3) for name in names]
    assert sorted(config["llm_int8_skip_modules"]) == sorted(["lm_head", *paths])
    model = load_plain(made)
    assert type(model.get_submodule(paths[0])) is torch.nn.Linear
    expected = outputs(model)
    for limit in limits(made, 2):
        assert_same(outputs(load(made, limit)), expected, f"at {limit}")


def test_without_bitsandbytes(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that names what to install; the other methods do without."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    arguments = ["quantize", str(source("llama")), str(tmp_path / "made"), "--method"]
    refused = CliRunner().invoke(app, [*arguments, "nf4"])
    assert refused.exit_code == 1
    assert "pip install 'pipeload[bitsandbytes]'" in " ".join(refused.stderr.split())
    assert CliRunner().invoke(app, [*arguments, "int8"]).exit_code == 0


def test_options_that_mean_nothing(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Double quantisation is bitsandbytes' own."""
    with pytest.raises(OptionError, match="double_quant=True is of nf4 and fp4"):
        pipeload.quantize(source("llama"), tmp_path / "made", double_quant=True)


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ({"load_in_4bit": True}, "--method nf4`"),
        ({"load_in_8bit": True}, "--method int8`"),
        ({"quantization_config": BitsAndBytesConfig(load_in_4bit=True)}, "--method fp4`"),
        (
            {
                "quantization_config": BitsAndBytesConfig(
                    load_in_4bit=True,
                    bnb_4bit_quant_type="nf4",
                    bnb_4bit_use_double_quant=True,
                )
            },
            "--method nf4 --double-quant`",
        ),
        ({"quantization_config": BitsAndBytesConfig(load_in_8bit=True)}, "--method int8`"),
    ],
)
def test_refusals_name_the_command(
    asked: dict[str, Any], command: str, source: Callable[[str], Path]
) -> None:
    """Of quantising while a model is loaded."""
    with pytest.raises(UnsupportedModelError, match="pipeload quantize SRC DST") as refusal:
        pipeload.from_pretrained(source("llama"), memory_limit="100GB", **asked)
    assert command in str(refusal.value)


def test_the_command(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Its options arrive."""
    arguments = ["quantize", str(source("llama")), str(tmp_path / "made"), "--method", "fp4"]
    done = CliRunner().invoke(app, [*arguments, "--double-quant", "--memory-limit", "50GB"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert written["bnb_4bit_quant_type"] == "fp4"
    assert written["bnb_4bit_use_double_quant"]
