"""Experts as integers, as `pipeload quantize` makes them: streamed one by one as plain has them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import pipeload
from pipeload.formats.integers import product
from pipeload.formats.integers.packed_experts import PackedExperts
from tests.support.experts import EXPERTS, LAYERS, ROUTED, experts_of, save_for_integers
from tests.support.models import load_plain, move_data_start
from tests.support.streaming import assert_nothing_held, generated, load_streamed, logits

if TYPE_CHECKING:
    from collections.abc import Callable

FORMS: dict[str, dict[str, Any]] = {
    "int4": {"method": "int4"},
    "int8": {"method": "int8"},
}
CACHES = (1_000, 3_000_000, 100_000_000)
"""Bytes over the smallest limit: no expert stays, some, all."""
PROMPTS = [
    torch.arange(3, 3 + batch * tokens).reshape(batch, tokens)
    for batch, tokens in ((1, 1), (1, 17), (4, 1), (2, 90))
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`made(kind, form, dtype)`: the folder of a quantised model, made once."""
    folders: dict[tuple[str, str, str], Path] = {}

    def make(kind: str = "qwen3_moe", form: str = "int4", dtype: str = "bf16") -> Path:
        if (kind, form, dtype) not in folders:
            folder = tmp_path_factory.mktemp(f"{kind}-{form}-{dtype}")
            save_for_integers(folder / "floats", kind, dtype)
            pipeload.quantize(folder / "floats", folder / "made", **FORMS[form])
            folders[kind, form, dtype] = folder / "made"
        return folders[kind, form, dtype]

    return make


@pytest.mark.parametrize(
    ("kind", "form", "dtype"),
    [
        ("qwen3_moe", "int4", "bf16"),
        pytest.param("qwen3_moe", "int8", "fp32", marks=pytest.mark.sweep),
        ("mixtral", "int8", "bf16"),  # its tensors have other names than the model's
        ("gpt_oss", "int4", "bf16"),  # stacked, turned round, with biases
    ],
)
def test_logits_and_tokens(made: Callable[..., Path], kind: str, form: str, dtype: str) -> None:
    """Prompts, batches and decoding, whatever stays in memory; and when all is given back."""
    folder = made(kind, form, dtype)
    plain = load_plain(folder)
    experts = [module for module in plain.modules() if isinstance(module, PackedExperts)]
    assert len(experts) == LAYERS
    expected = [logits(plain, ids) for ids in PROMPTS]
    assert not any(one.isnan().any() for one in expected)
    tokens = generated(plain, PROMPTS[1])
    for spare in CACHES:
        model = load_streamed(folder, spare=spare, modules=True)
        for _ in range(2):
            for ids, wanted in zip(PROMPTS, expected, strict=True):
                assert torch.equal(logits(model, ids), wanted), (spare, ids.shape)
        assert generated(model, PROMPTS[1]) == tokens
        stats = model.pipeload.stats()
        assert stats.expert_misses, spare
        assert (stats.expert_hits > 0) == (spare != CACHES[0])
        assert_nothing_held(model)
    model.pipeload.remove()
    assert torch.equal(logits(model, PROMPTS[1]), expected[1])


@pytest.mark.parametrize("form", FORMS)
def test_packed_bytes_are_read_and_kept(made: Callable[..., Path], form: str) -> None:
    """Of what is routed to: 4 bits a number and 32 for each 64 of them; 8, and 16 for each row."""
    model = load_streamed(made(form=form), spare=CACHES[-1])
    share = model.pipeload.plan.experts
    numbers = 3 * 128 * 256
    expert = numbers * 9 // 16 if form == "int4" else numbers + 2 * (256 + 256)
    assert share is not None
    assert share.experts == LAYERS * EXPERTS
    assert expert <= share.total_bytes / share.experts <= expert + 2 * 4096
    logits(model, PROMPTS[0])
    stats = model.pipeload.stats()
    assert (stats.expert_hits, stats.expert_misses) == (0, LAYERS * ROUTED)
    assert stats.expert_bytes == LAYERS * ROUTED * expert
    assert expert <= stats.expert_bytes_read / (LAYERS * ROUTED) <= expert + 2 * 4096
    logits(model, PROMPTS[0])
    assert model.pipeload.stats().expert_bytes_read == stats.expert_bytes_read


def test_what_was_not_read_is_not_computed_with(made: Callable[..., Path]) -> None:
    """Every byte of it is 0xFF: scales that are no numbers."""
    model = load_streamed(made(), spare=CACHES[-1])
    logits(model, PROMPTS[0])
    experts = experts_of(model)
    for seat, there in zip(experts.seats, experts._there, strict=True):
        (view,) = seat.memory.views.values()
        absent = [expert for expert in range(EXPERTS) if expert not in there]
        assert (view[absent] == 255).float().mean() > 0.9  # but for pages with one that is there
    module = model.model.layers[1].mlp.experts
    hidden, by = torch.randn(3, 256).bfloat16(), torch.rand(3, ROUTED)
    ids = torch.arange(3 * ROUTED).view(3, ROUTED)
    plain = load_plain(made()).model.layers[1].mlp.experts
    with torch.no_grad():
        assert torch.equal(module(hidden, ids, by), plain(hidden, ids, by))


def test_exact_inputs(made: Callable[..., Path]) -> None:
    """Experts are multiplied as floats then, in plain and streamed models alike."""
    folder = made()
    config = AutoConfig.from_pretrained(folder)
    config.quantization_config["exact_inputs"] = True
    plain = load_plain(folder, config=config)
    model = load_streamed(folder, spare=CACHES[1], exact_inputs=True)
    found = [logits(plain, ids) for ids in PROMPTS]
    for ids, wanted in zip(PROMPTS, found, strict=True):
        assert torch.equal(logits(model, ids), wanted)
    rounded = [logits(load_plain(folder), ids) for ids in PROMPTS]
    same = all(torch.equal(*pair) for pair in zip(found, rounded, strict=True))
    assert same == (product.compiled() is None)


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_whichever_way_the_library_would_multiply(made: Callable[..., Path], way: str) -> None:
    """One module computes, and its bits are the same in all."""
    folder = made()
    expected = logits(load_plain(folder))
    assert torch.equal(logits(load_plain(folder, experts_implementation=way)), expected)
    model = load_streamed(folder, spare=CACHES[1], experts_implementation=way)
    assert torch.equal(logits(model), expected)


def test_in_another_dtype(made: Callable[..., Path]) -> None:
    """Scales stay what they are; inputs and biases are cast."""
    for kind in ("qwen3_moe", "gpt_oss"):
        folder = made(kind)
        plain = load_plain(folder, dtype=torch.float32)
        model = load_streamed(folder, spare=CACHES[1], dtype=torch.float32)
        assert torch.equal(logits(model), logits(plain))


def test_read_whole_where_they_are_small(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their blocks, as all integers: evicted ones refuse to be computed with."""
    monkeypatch.setattr("pipeload.budget.expert_banks._BANK_BYTES", 1 << 40)
    model = load_streamed(Path(shutil.copytree(made(), tmp_path / "another")))
    assert model.pipeload.plan.experts is None
    expected = logits(load_plain(made()))
    assert torch.equal(logits(model), expected)
    module = model.model.layers[2].mlp.experts
    given = torch.ones(1, 256).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    with pytest.raises(pipeload.UnsupportedModelError, match=r"layers\.2\.mlp\.experts"):
        module(*given)
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("start", [2, 8])
def test_anywhere_in_a_file(made: Callable[..., Path], start: int, tmp_path: Path) -> None:
    """Other writers than ours do not align them."""
    folder = Path(shutil.copytree(made(form="int8"), tmp_path / "moved"))
    expected = logits(load_plain(folder))
    for file in folder.glob("*.safetensors"):
        move_data_start(file, start)
    assert torch.equal(logits(load_plain(folder)), expected)
    for spare in CACHES:
        assert torch.equal(logits(load_streamed(folder, spare=spare)), expected)


def test_saved_and_loaded_again(made: Callable[..., Path], tmp_path: Path) -> None:
    """By the library alone; a streamed model that was removed as well."""
    for kind in ("mixtral", "gpt_oss"):
        expected = logits(load_plain(made(kind, "int8")))
        load_plain(made(kind, "int8")).save_pretrained(tmp_path / kind)
        assert torch.equal(logits(load_plain(tmp_path / kind)), expected)
        streamed = load_streamed(made(kind, "int8"), spare=CACHES[1])
        streamed.pipeload.remove()
        streamed.save_pretrained(tmp_path / f"{kind}-removed")
        assert torch.equal(logits(load_plain(tmp_path / f"{kind}-removed")), expected)


def test_the_smallest_limit_and_the_bytes_of_a_token(
    made: Callable[..., Path], tmp_path: Path
) -> None:
    """Against the floats: less than a third of the bytes, and no larger a limit."""
    floats = save_for_integers(tmp_path)
    plans = [
        pipeload.plan(folder, memory_limit="16GB", dtype="auto") for folder in (floats, made())
    ]
    shares = [plan.experts for plan in plans]
    assert shares[0] is not None and shares[1] is not None  # noqa: PT018 - one for mypy
    assert shares[1].routed_bytes and shares[0].routed_bytes  # noqa: PT018 - the same
    assert shares[1].routed_bytes < shares[0].routed_bytes / 3
    assert plans[1].smallest_limit < plans[0].smallest_limit
    row = next(name for name, *_ in shares[1].rows())
    assert row == "expert cache"


def test_experts_that_are_missing_or_others(made: Callable[..., Path], tmp_path: Path) -> None:
    """The parameter is named, with what it is and should be."""
    folder = Path(shutil.copytree(made(), tmp_path / "broken"))
    name = "model.layers.1.mlp.experts.packed"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    whole = tensors.pop(name)
    words = rf"{re.escape(name)}' of a quantised module is not in .*wanted \[32, 55296\] of U8"
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(pipeload.CheckpointError, match=words):
        pipeload.from_pretrained(folder, memory_limit="16GB")
    save_file(tensors | {name: whole[:, :64].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(pipeload.CheckpointError, match=r"is \[32, 64\] of U8 in"):
        pipeload.from_pretrained(folder, memory_limit="16GB")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_adapters_beside_experts(made: Callable[..., Path]) -> None:
    """On Linears, streamed and plain; trained on the plain model, through the experts."""
    peft = pytest.importorskip("peft")
    found = []
    plain = AutoModelForCausalLM.from_pretrained(made(), dtype="auto")
    for one in (plain, load_streamed(made(), spare=CACHES[1])):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(one, config)
        found.append(logits(adapted))
        if one is plain:
            adapted(PROMPTS[1], labels=PROMPTS[1]).loss.backward()
            grads = [p.grad for p in adapted.parameters() if p.requires_grad]
            assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert torch.equal(*found)
