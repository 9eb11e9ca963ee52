"""`pipeload.quantize(size=...)`: what Linears are worth, who gets which bits, what comes of it."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from typer.testing import CliRunner

import pipeload
from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.headers import read_header, stamps_of
from pipeload.cli.commands import app
from pipeload.errors import (
    MemoryLimitError,
    OptionError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from pipeload.formats.integers.order import BY_ROWS
from pipeload.formats.integers.quantizer import PipeloadConfig, PipeloadQuantizer
from pipeload.hf.pending_load import PendingLoad
from pipeload.quantiser import mixed_bits, quantise
from pipeload.quantiser.bit_budget import Option, spend
from pipeload.quantiser.kept_gradients import GRADIENTS_FILE, KeptGradients
from pipeload.quantiser.output_gradients import OutputGradients
from pipeload.quantiser.resumable_shards import BITS_FILE, HIDDEN_FILE, Output
from pipeload.quantiser.tensor import Reading
from pipeload_hooks import Crossing, find_decoder_blocks
from tests.promises.ways_in.test_device_ways import mixture
from tests.support.commands import save_tokenizer
from tests.support.exact import (
    ROOMY,
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
    from collections.abc import Callable

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


@given(st.data())
def test_a_size_holds(data: st.DataObject) -> None:
    """Also where losses lie on a line, so that rounding says which upgrade is worth more."""
    steps = st.lists(st.integers(1, 50), min_size=1, max_size=4)
    options = {}
    for name in "abc":
        slope, sizes = data.draw(st.floats(0.01, 9.0)), [0, *data.draw(steps)]
        places = list(itertools.accumulate(sizes))
        options[name] = [Option(10 + place, slope * (300 - place)) for place in places]
    room = data.draw(st.integers(30, 400))
    chosen = spend(options, room)
    assert chosen is not None
    assert taken(options, chosen).nbytes <= room


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
    folder: Path,
    model: Any,
    ids: torch.Tensor,
    output: Output,
    *,
    blocks: list[nn.Module] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, torch.Tensor]:
    """Those of a streamed model, of a pass for each window."""
    entries = read_header(folder / "model.safetensors")
    stored = {
        path: entries[f"{path}.weight"]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    files = FileSet([folder / "model.safetensors"], "buffered", None, stamps_of(entries.values()))
    if blocks is None:
        blocks = [block.module for block in find_decoder_blocks(model)]
    kept = KeptGradients(output)
    kept.begin(len(ids), 1, len(blocks), model.dtype)
    found = OutputGradients(model, blocks, stored, Reading(files, 1 << 12), kept)
    for some in ids.split(1):
        found.add(some, advance)
    assert not (output.folder / HIDDEN_FILE).exists()
    assert all(parameter.grad is None for parameter in model.parameters())
    return kept.by_path


def of_plain(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by the library's backward."""
    found: dict[str, torch.Tensor] = {}

    def heard(path: str, gradient: torch.Tensor) -> None:
        found[path] = gradient.flatten(0, 1).float().square().sum(0)

    def ran(path: str, _module: nn.Module, _given: object, output: Any) -> None:
        output.register_hook(partial(heard, path))

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(partial(ran, path))
    with torch.enable_grad():
        logits = model(ids, use_cache=False).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    return found


@pytest.mark.parametrize("family", ["llama", "olmo"])  # the latter clips in place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_plain(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """At the smallest limit, where Linears are in ranges of rows, and where nothing streams."""
    folder, ids = tmp_path / "model", prompt(2, 24)
    clip = {"clip_qkv": 0.1} if family == "olmo" else {}
    save_random(AutoConfig.for_model(family, **SIZES, **clip), folder, dtype, seed=5)
    expected = [of_plain(load_plain(folder), some) for some in ids.split(1)]
    for limit in limits(folder, 2):
        model = load(folder, limit)
        with Output(tmp_path / f"{limit}", {}) as output:
            found = gradients(folder, model, ids, output)
        assert found.keys() == expected[0].keys()
        for path, sums in found.items():
            wanted = torch.stack([one[path] for one in expected]).sum(0)
            error = (sums - wanted).norm() / wanted.norm()
            assert error < (1e-4 if dtype is torch.float32 else 0.1), (path, limit, error)
        assert torch.is_grad_enabled()
        # It is as it was: nothing hangs on it any more, and it computes the same.
        assert_same(step_logits(model, prompt(), 1), step_logits(load_plain(folder), prompt(), 1))


def test_hooks_that_come_meanwhile(llama: Path, tmp_path: Path) -> None:
    """As another plan brings them: on their way through a Linear, too, nothing is recorded."""
    model, ids = load(llama, ROOMY), prompt(1, 24)
    linears = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    recorded: list[bool] = []

    def look(*_: object) -> None:
        recorded.append(torch.is_grad_enabled())

    def advance() -> None:
        if not recorded:
            for linear in linears:
                linear.register_forward_pre_hook(look, prepend=True)
                linear.register_forward_hook(look)

    with Output(tmp_path / "made", {}) as output:
        found = gradients(llama, model, ids, output, advance=advance)
    assert recorded == [False] * len(linears)  # there are two blocks
    wanted = of_plain(load_plain(llama), ids)
    for path, sums in found.items():
        assert (sums - wanted[path]).norm() < 1e-4 * wanted[path].norm(), path


def test_blocks_that_depend_on_more(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gives something else when it runs again, or has autograd record what goes."""
    plain: Any = LlamaMLP.forward
    calls = itertools.count(1)
    model = load(llama, ROOMY)
    with Output(tmp_path / "one", {}) as output:
        monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: plain(mlp, x) * next(calls))
        with pytest.raises(UnsupportedModelError, match="LlamaDecoderLayer by itself gives someth"):
            gradients(llama, model, prompt(), output)
        assert torch.is_grad_enabled()
        assert not (output.folder / HIDDEN_FILE).exists()
        monkeypatch.undo()
        more = [*model.model.layers, nn.Identity()]
        with pytest.raises(UnsupportedModelError, match="does not run all of its blocks"):
            gradients(llama, model, prompt(), output, blocks=more)

        def recorded(*_: object) -> None:
            raise UnsupportedOperationError("autograd is recording")

        monkeypatch.setattr(OutputGradients, "_add", recorded)
        with pytest.raises(UnsupportedModelError, match="cannot be gone back through"):
            gradients(llama, model, prompt(), output)
        monkeypatch.undo()
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
        with pytest.raises(OptionError, match=r"has 1\.05 MB free"):
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
    assert {path.name for path in folder.iterdir()}.isdisjoint(
        {BITS_FILE, HIDDEN_FILE, GRADIENTS_FILE}
    )
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


def test_a_killed_run_goes_on(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind any block, with the same numbers; other parts of the text begin anew."""
    monkeypatch.setattr(mixed_bits, "_TOKENS", 40)
    monkeypatch.setattr(mixed_bits, "WINDOW", 20)
    monkeypatch.setattr("pipeload.quantiser.calibration_text.WINDOW", 20)
    options: dict[str, Any] = {"method": "int4", "size": 1_800_000}
    batches, real, steps, sums = [1], mixed_bits._load, list[int](), list[Any]()

    def few(*given: Any, **kwargs: Any) -> Any:
        return real(*given, **kwargs)[0], batches[0]

    def seen(_self: object, _output: object, _squares: object, found: Any, reading: Any) -> Any:
        sums.append({path: one.clone() for path, one in found(reading).items()})
        return 1 / 0

    def run(stop: int) -> None:
        def gone_back(done: int, total: int) -> None:
            assert total == 4 // batches[0]
            steps.append(done)
            if len(steps) == stop:
                raise KeyboardInterrupt

        steps.clear()
        names = ("group_size", "zero_points", "head", "calibrate", "calibration_tokens", "progress")
        every: dict[str, Any] = dict.fromkeys((*names, "memory_limit"))
        every |= {"max_shard_size": "2GB", "double_quant": False, "gptq": False}
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
            quantise.make(llama, tmp_path / "made", **options, **every, going_back=gone_back)

    monkeypatch.setattr(mixed_bits, "_load", few)
    monkeypatch.setattr(mixed_bits.MixedBits, "choose", seen)
    run(stop=9)
    assert steps == [1, 2, 3, 4]
    run(stop=9)  # all of it is known
    assert steps == []
    kept = tmp_path / ".made.partial" / GRADIENTS_FILE
    for stop, left in ((1, [2, 3, 4]), (2, [3, 4]), (3, [4])):
        kept.unlink()
        run(stop)
        run(stop=9)
        assert steps == left
    kept.write_bytes(kept.read_bytes()[:100])
    run(stop=1)
    batches[0] = 2
    run(stop=9)
    assert steps == [1, 2]
    first, *others = sums
    for found in others[:-1]:
        assert found.keys() == first.keys()
        assert_same([found[path] for path in first], list(first.values()))
    torch.testing.assert_close(others[-1], first)


def test_what_matters_gets_the_bits(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Linears of one shape, the one whose gradients are large."""
    path = "model.layers.1.self_attn.q_proj"

    def found(_source: object, _text: object, shared: mixed_bits.Shared, *_: Any, **__: Any) -> Any:
        rows = {name: torch.ones(entry.shape[0]) for name, entry in shared.entries.items()}
        return rows | {path: rows[path] * 1e6, "model.layers.0.self_attn.q_proj": rows[path] * 0}

    monkeypatch.setattr("pipeload.quantiser.quantise.find_gradients", found)
    folder = pipeload.quantize(llama, tmp_path / "made", method="int4", size=1_700_000)
    told = json.loads((folder / "config.json").read_text())["quantization_config"]["modules"]
    assert told[path] == {"bits": 8}
    assert told["model.layers.0.self_attn.q_proj"] == {"bits": 4, "group_size": 128}


def test_by_the_command(tmp_path: Path) -> None:
    """A tied head, and Linears whose columns no larger groups divide: they have those that fit."""
    source, target = tmp_path / "source", tmp_path / "made"
    sizes = SIZES | {"hidden_size": 160, "head_dim": 64, "tie_word_embeddings": True}
    save_random(AutoConfig.for_model("llama", **sizes), source, torch.bfloat16, seed=5)
    save_tokenizer(source)
    asked = ["quantize", str(source), str(target), "--method", "int4", "--size", "0.62MB", "--json"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    assert 580_000 < json.loads(result.stdout)["bytes"] < 640_000
    told = json.loads((target / "config.json").read_text())["quantization_config"]["modules"]
    groups = {path: one.get("group_size") for path, one in told.items()}
    assert {groups[path] for path in groups if path.endswith("q_proj")} <= {32, None}
    assert {groups[path] for path in groups if path.endswith("down_proj")} & {64, 128}


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
    with torch.inference_mode():
        made = pipeload.quantize(llama, tmp_path / "made", method="int4", size=advised)
    assert bytes_of(made) == advised


def test_models_that_cannot_be(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, whether they become integers or not; a Linear that is in no block, or not stored."""

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(UnsupportedModelError, match=said):
            pipeload.quantize(folder, tmp_path / "made", method="int4", size="1GB")
        assert not (tmp_path / "made").exists()

    for inner in (96, 24):
        config = mixture("mixtral")
        config.intermediate_size = inner
        folder = save_random(config, tmp_path / f"experts-{inner}", torch.float32, seed=1)
        refused(folder, "has experts, and how much each")
    opt = AutoConfig.for_model("opt", **SIZES, ffn_dim=256, word_embed_proj_dim=64)
    refused(save_random(opt, tmp_path / "opt", torch.float32, seed=1), "in no block of what gener")
    plain = PendingLoad.plain_parameters
    with monkeypatch.context() as other:
        other.setattr(
            PendingLoad,
            "plain_parameters",
            lambda load: {a: b for a, b in plain(load).items() if "1.mlp.up_proj" not in a},
        )
        refused(llama, r"does not store 'model\.layers\.1\.mlp\.up_proj' as it holds it")
    shares = (Crossing(0, 1, "add"),)
    monkeypatch.setattr(mixed_bits, "try_crossing", lambda *_: shares)
    refused(llama, r"uses what 'model\.layers\.0' makes elsewhere")


def test_texts_and_weights_that_tell_nothing(llama: Path, tmp_path: Path) -> None:
    """A single token has no loss, and one that is too large for a number no gradients."""
    with pytest.raises(OptionError, match="makes 1 token, and a loss takes 2"):
        pipeload.quantize(llama, tmp_path / "made", method="int4", size="2MB", calibration_tokens=1)
    folder = Path(shutil.copytree(llama, tmp_path / "large"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] *= 1e38
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="are too large for a number"):
        pipeload.quantize(folder, tmp_path / "made", method="int4", size="2MB")


def test_a_limit_that_is_too_small(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For gradients, which take more than all else here."""
    monkeypatch.setattr(mixed_bits, "working_bytes", lambda *_: 1 << 50)
    with pytest.raises(MemoryLimitError, match=r"finding gradients needs 1\.13 PB"):
        pipeload.quantize(llama, tmp_path / "made", method="int4", size="2MB", memory_limit="2GB")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    blocks = find_decoder_blocks(load_plain(llama))
    with pytest.raises(MemoryLimitError, match="finding gradients needs"):
        mixed_bits._load(llama, blocks, 1)
    # What is advised works.
    with pytest.raises(MemoryLimitError, match="finding gradients needs") as refused:
        mixed_bits.check_limit(llama, mixed_bits.Shared({}, {}, blocks, 0), 1)
    mixed_bits._load(llama, blocks, refused.value.smallest_limit + 50_000_000)


def test_paths_that_a_checkpoint_tells() -> None:
    """Of the whole model, for that and for its base; int4 beside int8 is in the order of rows."""
    config = PipeloadConfig(
        8,
        modules={"model.layers.0.mlp.up_proj": {"bits": 4, "group_size": 32}},
        modules_to_not_convert=["model.layers.1", "lm_head"],
    )
    sizes: Any = AutoConfig.for_model("llama", **SIZES)
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
