"""`pipeload.quantize(size=...)`: what Linears are worth, who gets which bits, what comes of it."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from typer.testing import CliRunner

import pipeload
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header, stamps_of
from pipeload.cli.commands import app
from pipeload.errors import MemoryLimitError, OptionError, UnsupportedModelError
from pipeload.formats.integers.order import BY_ROWS
from pipeload.formats.integers.quantizer import PipeloadConfig, PipeloadQuantizer
from pipeload.quantiser import mixed_bits
from pipeload.quantiser.bit_budget import Option, spend
from pipeload.quantiser.output_gradients import OutputGradients
from pipeload.quantiser.resumable_shards import BITS_FILE, HIDDEN_FILE, Output
from pipeload.quantiser.tensor import Reading
from pipeload_hooks import find_decoder_blocks
from tests.promises.ways_in.test_device_ways import mixture
from tests.support.commands import save_tokenizer
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

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


# -- who gets which ------------------------------------------------------------------------------


def test_the_best_that_fits() -> None:
    """Where all upgrades are as large, there is no better choice; tried are all of them."""
    losses = {"a": (9.0, 4.0, 3.0), "b": (5.0, 4.5, 0.1), "c": (7.0, 1.0, 0.9)}
    options = {
        name: [Option(10 + number, loss) for number, loss in enumerate(found)]
        for name, found in losses.items()
    }
    for room in range(30, 37):
        chosen = spend(options, room)
        assert chosen is not None
        assert taken(options, chosen).nbytes <= room
        every = itertools.product(range(3), repeat=3)
        choices = [taken(options, dict(zip(options, one, strict=True))) for one in every]
        best = min(one.loss for one in choices if one.nbytes <= room)
        # "b" has an upgrade that is worth nothing before the next one: both at once, or neither.
        assert taken(options, chosen).loss <= best + 0.5
    assert spend(options, 29) is None
    assert spend(options, 10**6) == dict.fromkeys(options, 2)


def test_a_larger_form_that_is_worse_is_not_taken() -> None:
    """And one that is no better costs nothing; an upgrade that does not fit leaves room for one."""
    assert spend({"a": [Option(10, 1.0), Option(20, 2.0), Option(30, 1.0)]}, 100) == {"a": 0}
    both = {"a": [Option(10, 9.0), Option(90, 0.0)], "b": [Option(10, 1.0), Option(12, 0.99)]}
    assert spend(both, 30) == {"a": 0, "b": 1}


def taken(options: dict[str, list[Option]], chosen: dict[str, int]) -> Option:
    """All of a choice together."""
    found = [options[name][number] for name, number in chosen.items()]
    return Option(sum(one.nbytes for one in found), sum(one.loss for one in found))


# -- what they are worth -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    save_random(AutoConfig.for_model("llama", **SIZES), folder, torch.float32, seed=5)
    save_tokenizer(folder)
    return folder


def gradients(
    folder: Path, model: Any, ids: torch.Tensor, output: Output, *, without: str = ""
) -> dict[str, torch.Tensor]:
    """Those of a streamed model, of one pass of all windows."""
    entries = read_header(folder / "model.safetensors")
    stored = {
        path: entries[f"{path}.weight"]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path != without
    }
    files = FileSet([folder / "model.safetensors"], "buffered", None, stamps_of(entries.values()))
    blocks = [block.module for block in find_decoder_blocks(model)]
    found = OutputGradients(model, blocks, stored, Reading(files, 1 << 12), output)
    found.add(ids, lambda: None)
    assert not torch.is_inference_mode_enabled()
    return found.by_path


def of_plain(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by the library's backward."""
    found: dict[str, torch.Tensor] = {}

    def heard(path: str, _module: nn.Module, _given: object, outputs: Any) -> None:
        found[path] = outputs[0].flatten(0, 1).square().sum(0)

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(partial(heard, path))
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    return found


def test_gradients_are_those_of_plain(llama: Path, tmp_path: Path) -> None:
    """At the smallest limit, where Linears are in ranges of rows, and where nothing streams."""
    ids = prompt(2, 24)
    expected = of_plain(load_plain(llama), ids)
    for limit in limits(llama, 2):
        model = load(llama, limit)
        with Output(tmp_path / f"{limit}", {}) as output:
            found = gradients(llama, model, ids, output)
            assert (output.folder / HIDDEN_FILE).stat().st_size == 2 * ids.numel() * 256 * 4
        assert found.keys() == expected.keys()
        for path, sums in found.items():
            error = (sums - expected[path]).norm() / expected[path].norm()
            assert error < 1e-4, (path, limit, error)
        assert torch.is_grad_enabled()
        # It is as it was: nothing hangs on it any more, and it computes the same.
        assert_same(step_logits(model, prompt(), 1), step_logits(load_plain(llama), prompt(), 1))


def test_blocks_that_depend_on_more(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gives something else when it runs again, and a Linear that is stored otherwise."""
    plain: Any = LlamaMLP.forward
    calls = itertools.count(1)
    model = load_smallest(llama)
    with Output(tmp_path / "one", {}) as output:
        with pytest.raises(UnsupportedModelError, match=r"'model\.layers\.1\.mlp\.up_proj' of"):
            gradients(llama, model, prompt(), output, without="model.layers.1.mlp.up_proj")
        assert torch.is_grad_enabled()
        monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: plain(mlp, x) * next(calls))
        with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer by itself gives someth"):
            gradients(llama, model, prompt(), output)


# -- what comes of it ----------------------------------------------------------------------------


def bytes_of(folder: Path) -> int:
    return sum(entry.nbytes for entry in read_header(folder / "model.safetensors").values())


def test_streamed_is_plain(llama: Path, tmp_path: Path) -> None:
    """Within the size, with several forms beside each other; saved again as well."""
    smallest = pipeload.quantize(llama, tmp_path / "least", method="int4", group_size=128)
    largest = pipeload.quantize(llama, tmp_path / "most", method="int8")
    least, most = bytes_of(smallest), bytes_of(largest)
    size = (2 * least + most) // 3
    folder = pipeload.quantize(llama, tmp_path / "made", method="int4", size=size)
    assert 0.9 * size < bytes_of(folder) <= size
    told = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
    assert len(told) == 7 * SIZES["num_hidden_layers"]
    assert {"bits": 8} in told.values()
    assert any(one["bits"] == 4 for one in told.values())
    card = (folder / "README.md").read_text()
    assert "or int8, by Linear" in card
    assert "| Bits | int" in card
    assert {path.name for path in folder.iterdir()}.isdisjoint({BITS_FILE, HIDDEN_FILE})
    expected = step_logits(load_plain(folder), prompt(), 3)
    for limit in limits(folder, 3):
        assert_same(step_logits(load(folder, limit), prompt(), 3), expected, f"at {limit}")
    load_plain(folder).save_pretrained(tmp_path / "saved")
    assert_same(step_logits(load_plain(tmp_path / "saved"), prompt(), 3), expected, "saved")
    # The base alone, whose paths are others than those that the checkpoint tells.
    whole, bare = load_plain(folder).model, AutoModel.from_pretrained(folder, dtype="auto")
    streamed = load_smallest(folder, auto_class=AutoModel)
    with torch.no_grad():
        hidden = [one(prompt()).last_hidden_state for one in (whole, bare, streamed)]
    assert_same(hidden[1], hidden[0], "the base")
    assert_same(hidden[2], hidden[0], "the base, streamed")
    # The ends: all that fits is taken, and no more than there is.
    for name, end in (("least", least), ("most", 10 * most)):
        made = pipeload.quantize(llama, tmp_path / f"{name}-mixed", method="int4", size=end)
        assert bytes_of(made) == {"least": least, "most": most}[name]


def test_what_was_chosen_is_kept(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped when it has chosen goes on with that."""
    options: dict[str, Any] = {"method": "int4", "size": 1_800_000, "head": "int8"}
    whole = pipeload.quantize(llama, tmp_path / "whole", **options)
    with monkeypatch.context() as stopped:
        stopped.setattr("pipeload.quantiser.quantise.write_weights", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipeload.quantize(llama, tmp_path / "made", **options)
    assert (tmp_path / ".made.partial" / BITS_FILE).exists()
    assert not (tmp_path / ".made.partial" / HIDDEN_FILE).exists()
    monkeypatch.setattr(OutputGradients, "add", lambda *_: 1 / 0)
    made = pipeload.quantize(llama, tmp_path / "made", **options)
    for name in ("model.safetensors", "config.json"):
        assert (made / name).read_bytes() == (whole / name).read_bytes()
    assert not (made / BITS_FILE).exists()


def test_by_the_command(llama: Path, tmp_path: Path) -> None:
    """With its own group for a Linear whose columns no larger one divides."""
    target = str(tmp_path / "made")
    asked = ["quantize", str(llama), target, "--method", "int4", "--size", "1.8MB", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["bytes"] < 1_820_000


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"size": 1000},
            "size=1.00 kB is too small: with the fewest bits everywhere the weights take",
        ),
        ({"size": "1 parsec"}, "size='1 parsec'"),
        ({"size": "1MB", "method": "int8"}, 'size is of method="int4"'),
        ({"size": "1MB", "group_size": 64}, "group_size=64 would change nothing with a size"),
        ({"size": "1MB", "calibrate": "off"}, "a size needs a text"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], said: str, llama: Path, tmp_path: Path
) -> None:
    """Each is refused before anything is made."""
    with pytest.raises(OptionError) as refused:
        pipeload.quantize(llama, tmp_path / "made", **({"method": "int4"} | options))
    assert said in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_size_that_is_advised(llama: Path, tmp_path: Path) -> None:
    """It is the smallest: a byte less is refused again."""
    with pytest.raises(OptionError) as refused:
        pipeload.quantize(llama, tmp_path / "made", method="int4", size=1000)
    advised = int(str(refused.value).split("at least ")[1].split()[0])
    with pytest.raises(OptionError, match="is too small"):
        pipeload.quantize(llama, tmp_path / "made", method="int4", size=advised - 1)
    made = pipeload.quantize(llama, tmp_path / "made", method="int4", size=advised)
    assert bytes_of(made) == advised


def test_models_that_cannot_be(tmp_path: Path) -> None:
    """Experts, and a Linear that is in no block."""
    experts = save_random(mixture("mixtral"), tmp_path / "experts", torch.float32, seed=1)
    with pytest.raises(UnsupportedModelError, match="has experts, and how much each"):
        pipeload.quantize(experts, tmp_path / "made", method="int4", size="1GB")
    config = AutoConfig.for_model("opt", **SIZES, ffn_dim=256, word_embed_proj_dim=64)
    save_random(config, tmp_path / "opt", torch.float32, seed=1)
    with pytest.raises(UnsupportedModelError, match="lies in no block of what generates"):
        pipeload.quantize(tmp_path / "opt", tmp_path / "made", method="int4", size="1GB")


def test_a_limit_that_is_too_small(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For gradients, which take more than all else here."""
    monkeypatch.setattr(mixed_bits, "working_bytes", lambda *_: 1 << 50)
    with pytest.raises(MemoryLimitError, match=r"finding gradients needs 1\.13 PB"):
        pipeload.quantize(llama, tmp_path / "made", method="int4", size="2MB", memory_limit="2GB")


def test_paths_that_a_checkpoint_tells() -> None:
    """Of the whole model, for that and for its base; int4 beside int8 is in the order of rows."""
    config = PipeloadConfig(
        8,
        modules={"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}},
        modules_to_not_convert=["model.layers.1", "lm_head"],
    )
    sizes = LlamaConfig(**SIZES)
    for make, path in ((LlamaForCausalLM, "model.layers"), (LlamaModel, "layers")):
        with torch.device("meta"):
            model: Any = make(sizes)
        PipeloadQuantizer(config)._process_model_before_weight_loading(model)
        first, second = model.get_submodule(path)
        assert (first.mlp.up_proj.bits, first.mlp.up_proj.order) == (4, BY_ROWS)
        assert first.mlp.up_proj.path == f"{path}.0.mlp.up_proj"
        assert first.mlp.down_proj.bits == 8
        assert type(second.mlp.up_proj) is nn.Linear


def test_bits_that_nobody_knows() -> None:
    """Of a single Linear, in a checkpoint's config."""
    for told in ({"bits": 2}, {"bits": 4}, {"bits": 4, "group_size": 16}):
        with pytest.raises(OptionError, match=r"knows \{'bits': 8\}, or 4 with a group_size"):
            PipeloadConfig(8, modules={"lm_head": told})
