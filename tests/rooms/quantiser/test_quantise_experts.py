"""Experts become integers: which, of what, and as what reached them while a text was read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

import pipeload
from pipeload.cli.commands import app
from pipeload.errors import CheckpointError, MemoryLimitError
from pipeload.formats.integers.order import BY_ROWS, pack
from pipeload.formats.integers.packed_experts import PackedExperts
from pipeload.formats.integers.rounding import to_int4
from pipeload.hf.pending_load import PendingLoad
from pipeload.quantiser import calibration, calibration_text, quantise
from pipeload.quantiser.resumable_shards import SUMS_FILE
from tests.support.commands import save_tokenizer
from tests.support.experts import EXPERTS, LAYERS, ROUTED, moe_config, save_for_integers
from tests.support.models import load_plain, save_random

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WINDOW = 32
TEXT = " ".join(f"w{3 + 7 * i * i % 500}" for i in range(6 * WINDOW))
INT4: dict[str, Any] = {"method": "int4", "group_size": 32}
_OTHERS: dict[str, dict[str, Any]] = {
    # Stacked in the file, by names of its own; the gate's rows among the others.
    "granitemoe": {"num_local_experts": 4, "intermediate_size": 128, "num_experts_per_tok": 2},
    # Without a gate, in a model of several kinds of blocks.
    "nemotron_h": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_shared_expert_intermediate_size": 128,
        "layers_block_type": ["attention", "moe", "attention", "moe"],
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
}
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`source(kind)`: a float mixture of experts with a tokenizer, made once."""
    folders: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind) / "source"
            if kind in _OTHERS:
                config = AutoConfig.for_model(kind, **(_SIZES | _OTHERS[kind]))
                save_random(config, folder, "bf16", seed=7)
            else:
                save_for_integers(folder, kind)
            save_tokenizer(folder)
            folders[kind] = folder
        return folders[kind]

    return make


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(calibration_text, "WINDOW", WINDOW)
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def experts_of(model: Any) -> list[tuple[str, PackedExperts]]:
    return [(n, m) for n, m in model.named_modules() if isinstance(m, PackedExperts)]


def routing(count: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    ids = torch.rand(count, experts, generator=generator).topk(2, -1).indices
    return ids, torch.rand(count, 2, generator=generator).bfloat16()


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


# -- what is made ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", *_OTHERS])
def test_near_the_floats(kind: str, source: Callable[[str], Path], tmp_path: Path) -> None:
    """Module by module on the same inputs: as near as the Linears beside them, none swapped."""
    floats = load_plain(source(kind))
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    forms: list[tuple[dict[str, Any], float]] = [({"method": "int8"}, 0.02), (INT4, 0.2)]
    for form, bound in forms:
        model = load_plain(pipeload.quantize(source(kind), tmp_path / form["method"], **form))
        found = experts_of(model)
        assert found
        for path, module in found:
            ids, by = routing(len(x), module.num_experts)
            with torch.no_grad():
                gap = error(module(x, ids, by), floats.get_submodule(path)(x, ids, by))
            assert 0 < gap < bound, path
        assert not [n for n, _ in model.named_parameters() if n.endswith("experts.down_proj")]


def test_integers_are_those_of_linears(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a Linear with the same weight: so a product of an expert is as good as any."""
    floats = load_plain(source("qwen3_moe"))
    model = load_plain(pipeload.quantize(source("qwen3_moe"), tmp_path / "made", method="int4"))
    for path, module in experts_of(model):
        original = floats.get_submodule(path)
        for expert in (0, 5, EXPERTS - 1):
            for place, name in zip(module.shape.places, ("gate_up_proj", "down_proj"), strict=True):
                weight = original.get_parameter(name)[expert].detach()
                values, told = to_int4(weight, 64)
                row = module.packed[expert]
                codes = pack(values, BY_ROWS).view(-1)
                assert torch.equal(row[place.start :][: len(codes)], codes)
                raw = told.view(-1).view(torch.uint8)
                assert torch.equal(row[place.told :][: len(raw)], raw)


def test_what_is_said_of_it(source: Callable[[str], Path], tmp_path: Path) -> None:
    """In config.json, the model card, and the last line."""
    runner = CliRunner()
    words = ["quantize", str(source("qwen3_moe")), str(tmp_path / "made"), "--method", "int4"]
    done = runner.invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "experts" not in done.stdout
    config = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert config["experts"] == "BF16"
    card = (tmp_path / "made" / "README.md").read_text()
    count = LAYERS * EXPERTS
    assert f"| Experts | {count} experts in {LAYERS} layers, as the Linears |" in card


def test_experts_that_do_not_fit(tmp_path: Path) -> None:
    """They stay floats, and that is said."""
    config = moe_config(hidden_size=256, moe_intermediate_size=72)
    save_random(config, tmp_path / "source", "bf16", seed=7)
    made = pipeload.quantize(tmp_path / "source", tmp_path / "made", method="int4")
    model = load_plain(made)
    assert not experts_of(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert config["experts"] is None
    assert "| Experts |" not in (made / "README.md").read_text()
    assert "experts" in (made / "README.md").read_text()


@pytest.mark.parametrize("reason", ["others", "conversion"])
def test_experts_that_others_use_stay(
    reason: str, source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that names their parameters would miss them; so would what comes of the same tensors."""
    if reason == "others":
        monkeypatch.setattr("pipeload.hf.expert_modules.names_of_others", lambda *_: True)
    else:
        real = PendingLoad.weights

        def with_another(pending: PendingLoad) -> dict[str, Any]:
            found = real(pending)
            shared = {f"{n}.other": w for n, w in found.items() if ".2.mlp.experts." in n}
            return found | shared

        monkeypatch.setattr(PendingLoad, "weights", with_another)
    folder = pipeload.quantize(source("qwen3_moe"), tmp_path / "made")
    found = [path for path, _ in experts_of(load_plain(folder))]
    left = 0 if reason == "others" else 2
    assert found == [f"model.layers.{layer}.mlp.experts" for layer in range(left)]


def test_experts_of_another_dtype_stay(tmp_path: Path) -> None:
    """One dtype goes with all integers of experts: a layer that is stored in another is left."""
    folder = save_for_integers(tmp_path / "source", "gpt_oss")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.startswith("model.layers.1.mlp.experts."):
                tensors[name] = tensor.float()
        save_file(tensors, file, metadata={"format": "pt"})
    made = pipeload.quantize(folder, tmp_path / "made", method="int8")
    model = load_plain(made)
    found = [path for path, _ in experts_of(model)]
    assert found == [f"model.layers.{layer}.mlp.experts" for layer in (0, 2)]
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.experts" in config["modules_to_not_convert"]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_values_that_are_no_numbers(
    kind: str, source: Callable[[str], Path], tmp_path: Path
) -> None:
    """The stored tensor is named, whether rows of it are read or all of it."""
    folder = save_for_integers(tmp_path / "source", kind)
    name = {
        "qwen3_moe": "model.layers.1.mlp.experts.7.up_proj.weight",
        "gpt_oss": "model.layers.1.mlp.experts.down_proj",
    }[kind]
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name].view(-1)[3] = float("inf")
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{name}.* not finite"):
        pipeload.quantize(folder, tmp_path / "made")


def test_the_limit_counts_what_is_read_whole(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Of stacks that are turned round a matrix is held in several copies; of others, rows."""
    smallest = []
    for kind in ("qwen3_moe", "gpt_oss"):
        with pytest.raises(MemoryLimitError) as refusal:
            pipeload.quantize(source(kind), tmp_path / "made", memory_limit=1)
        smallest.append(refusal.value.smallest_limit)
    matrix = 256 * 256 * 2
    assert smallest[1] - smallest[0] > matrix


def test_in_pieces_of_any_size(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows at once make the same bytes."""
    for kind in ("qwen3_moe", "gpt_oss"):
        whole = pipeload.quantize(source(kind), tmp_path / f"{kind}-whole", method="int4")
        with monkeypatch.context() as few:
            few.setattr(quantise, "_items", lambda *_: 64 * 256)
            parts = pipeload.quantize(source(kind), tmp_path / f"{kind}-parts", method="int4")
        one, other = (load_file(folder / "model.safetensors") for folder in (whole, parts))
        assert all(torch.equal(one[name], other[name]) for name in one)


# -- what a text tells -----------------------------------------------------------------------------


def plain_sums(folder: Path, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """By what the plain model's experts are given, each row by itself."""
    model = load_plain(folder)
    found: dict[str, torch.Tensor] = {}

    def before(path: str) -> Callable[..., None]:
        def look(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            hidden, chosen, _ = args
            rows, first = torch.zeros(EXPERTS), torch.zeros(EXPERTS, 256)
            second = torch.zeros(EXPERTS, 128)
            for row, experts in zip(hidden, chosen, strict=True):
                for expert in experts.tolist():
                    weight = module.gate_up_proj[expert]
                    made = row @ (weight if module.is_transposed else weight.t())
                    if module.has_bias:
                        made = made + module.gate_up_proj_bias[expert]
                    rows[expert] += 1
                    first[expert] += row.float().square()
                    second[expert] += module._apply_gate(made[None])[0].float().square()
            found.update({path: rows, f"{path}.gate_up_proj": first, f"{path}.down_proj": second})

        return look

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            module.register_forward_pre_hook(before(path))
    with torch.no_grad():
        model(ids)
    return found


@pytest.mark.parametrize(
    ("kind", "experts_implementation"),
    [("qwen3_moe", "eager"), ("qwen3_moe", "batched_mm"), ("gpt_oss", None)],
)
def test_the_inputs_of_each_expert(
    kind: str,
    experts_implementation: str | None,
    source: Callable[[str], Path],
    text: Path,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the model streams: those rows that were sent to it, and what its gate lets through.

    Whatever implementation the user asks for.
    """
    options: dict[str, Any] = {"experts_implementation": experts_implementation}
    if experts_implementation is None:
        options = {}
    monkeypatch.setattr(calibration, "_fast_bf16", lambda: True)
    folder = source(kind)
    with monkeypatch.context() as stopped:
        stopped.setattr(quantise, "write_weights", _stop)
        with pytest.raises(ZeroDivisionError):
            pipeload.quantize(folder, tmp_path / "made", calibrate=text, **options)
    content = (tmp_path / ".made.partial" / SUMS_FILE).read_bytes()
    found = {n.removeprefix("sums."): t for n, t in load(content[64:]).items()}
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT).input_ids).view(6, WINDOW)
    wanted = plain_sums(folder, ids)
    assert found.pop("done").tolist() == [6, 6, 6 * WINDOW]
    assert wanted.keys() == {name for name in found if ".experts" in name}
    for name, sums in wanted.items():
        torch.testing.assert_close(found[name], sums, rtol=0.02, atol=1e-3, msg=name)
    assert wanted["model.layers.0.mlp.experts"].sum() == 6 * WINDOW * ROUTED


def _stop(*_: object) -> None:
    raise ZeroDivisionError


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[calibration.Importances]:
    """What was known when weights were made."""
    found: list[calibration.Importances] = []
    real = calibration.collect

    def collect(*args: Any, **options: Any) -> calibration.Importances:
        found.append(real(*args, **options))
        return found[-1]

    monkeypatch.setattr(calibration, "collect", collect)
    return found


def test_experts_that_saw_too_little(
    source: Callable[[str], Path],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seen: list[calibration.Importances],
) -> None:
    """They are made as without a text; the card says how many."""
    folder = source("qwen3_moe")
    without = pipeload.quantize(folder, tmp_path / "without", **INT4)
    monkeypatch.setattr(calibration, "LEAST_ROWS", 26)
    made = pipeload.quantize(folder, tmp_path / "made", calibrate=text, **INT4)
    (known,) = seen
    name = "model.layers.1.mlp.experts"
    few = (known.mean_squares[f"{name}.down_proj"] == 0).all(1)
    assert 0 < few.sum() < EXPERTS
    blind, told = (load_file(f / "model.safetensors")[f"{name}.packed"] for f in (without, made))
    assert torch.equal(blind[few], told[few])
    assert all(not torch.equal(*pair) for pair in zip(blind[~few], told[~few], strict=True))
    assert f"; {known.few_rows} by their weights alone" in (made / "README.md").read_text()
    assert known.few_rows > few.sum()


def test_nearer_on_what_they_see(
    source: Callable[[str], Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some channels are much larger than others."""
    monkeypatch.setattr(calibration, "LEAST_ROWS", 1)
    folder = save_for_integers(tmp_path / "source")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("layernorm.weight"):
                tensor[::23] *= 12
        save_file(tensors, file, metadata={"format": "pt"})
    save_tokenizer(folder)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(TEXT).input_ids)[None, :128]
    made = pipeload.quantize(folder, tmp_path / "made", calibrate=text, **INT4)
    without = pipeload.quantize(folder, tmp_path / "without", **INT4)
    with torch.no_grad():
        wanted, got, other = (load_plain(f)(ids).logits for f in (folder, made, without))
    assert error(got, wanted) < 0.9 * error(other, wanted)


def test_it_goes_on_where_it_was(source: Callable[[str], Path], tmp_path: Path) -> None:
    """Stopped in the middle of a layer's experts: finished shards are kept, and no byte differs."""
    folder = source("qwen3_moe")
    options: dict[str, Any] = {"method": "int4", "max_shard_size": "2MB"}
    fresh = pipeload.quantize(folder, tmp_path / "fresh", **options)

    def stop(done: int, total: int) -> None:
        if done > total * 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pipeload.quantize(folder, tmp_path / "made", progress=stop, **options)
    kept = sorted((tmp_path / ".made.partial").glob("*.safetensors"))
    times = [file.stat().st_mtime_ns for file in kept]
    made = pipeload.quantize(folder, tmp_path / "made", **options)
    assert len(kept) > 1
    assert [(made / file.name).stat().st_mtime_ns for file in kept] == times
    names = sorted(file.name for file in fresh.iterdir())
    assert names == sorted(file.name for file in made.iterdir())
    assert all((made / n).read_bytes() == (fresh / n).read_bytes() for n in names if "model" in n)
