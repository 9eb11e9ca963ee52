"""Other ways to a model on a device: wrapped, in a context, in a pipeline, with adapters."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, pipeline

import pipeload
from pipeload.devices import device_residents
from pipeload.formats.bitsandbytes import product
from tests.promises.exact.test_device import HOST, freshly_allocated, load, reference, smallest
from tests.support.exact import prompt
from tests.support.fake_device import FakeDevice, lend
from tests.support.models import load_plain, save_random
from tests.support.plain_loops import use_plain_loops
from tests.support.streaming import (
    Reference,
    check,
    finish_reads,
    generated,
    hooked_sites,
    load_streamed,
    logits,
    prefetcher_of,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeload.weights.arena import Arena
    from tests.conftest import TinyCheckpoint


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The one that `device="fake"` names."""
    yield from lend(monkeypatch, hosting=False)


def test_wrap_moves_a_plain_model_there(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Its parameters stay the same objects; it computes as one that was loaded there."""
    folder = tiny("llama")
    expected = reference(folder)
    plain = load_plain(folder)
    parameters = {name: id(parameter) for name, parameter in plain.named_parameters()}
    limit = smallest(folder) + 100_000
    model = pipeload.wrap(plain, limit, device="fake", host_memory_limit=HOST)
    assert model is plain
    for _ in range(2):
        check(model, expected)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert device.allocated_bytes() > 0


def test_wrap_that_does_not_fit_changes_nothing(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Neither weights nor buffers."""
    folder = tiny("llama")
    plain = load_plain(folder)
    expected = logits(plain), generated(plain)
    before = [(p, p.data_ptr()) for p in plain.parameters()]
    with pytest.raises(pipeload.MemoryLimitError):
        pipeload.wrap(plain, 1000, device="fake", host_memory_limit=HOST)
    device.nbytes = 1000
    with pytest.raises(pipeload.ReadError, match="could not be put on cpu"):
        pipeload.wrap(plain, smallest(folder), device="fake", host_memory_limit=HOST)
    assert all(p.data_ptr() == address for p, address in before)
    assert torch.equal(logits(plain), expected[0])
    assert not hasattr(plain, "hf_device_map")


def test_wrap_a_model_without_weights(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """On meta: the library makes the rest where the model is."""
    folder = tiny("llama")
    expected = reference(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    limit = smallest(folder) + 100_000
    pipeload.wrap(model, limit, device="fake", host_memory_limit=HOST, checkpoint=folder)
    check(model, expected)


def test_a_context_has_its_device(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """Models that are loaded inside stream to it; so do ours, unless they say otherwise."""
    folder = tiny("llama")
    expected = reference(folder)
    limit = 2 * smallest(folder)
    with pipeload.streaming(limit, device="fake", host_memory_limit=HOST):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map="auto")
        ours = pipeload.from_pretrained(folder, dtype="auto", memory_limit=limit)
    models: list[Any] = [model, ours]
    for one in models:
        assert one.pipeload.plan.device == "cpu"
        assert one.pipeload.plan.memory_limit == limit
        check(one, expected)


def test_a_pipeline(tiny: TinyCheckpoint, device: FakeDevice, smollm2_bf16: Path) -> None:
    """It finds the device in the model's map, and moves what it is given there."""
    from transformers import AutoTokenizer

    model = load(tiny("llama"))
    tokenizer = AutoTokenizer.from_pretrained(smollm2_bf16)
    speak: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert speak.device == device.where
    ids = prompt(length=5)
    wanted = freshly_allocated(tiny("llama")).generate(ids, max_new_tokens=4, do_sample=False)
    got = speak.model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(got, wanted)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")
def test_adapters(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """LoRA on a streamed model, as on a plain one."""
    from peft import LoraConfig, get_peft_model

    folder = tiny("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    results = []
    for base in (freshly_allocated(folder), load(folder)):
        torch.manual_seed(5)
        model: Any = get_peft_model(base, config).eval()
        results.append((logits(model), generated(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("way", [load, load_streamed])
def test_the_numbers_of_torch_are_the_users(
    tiny: TinyCheckpoint, device: FakeDevice, way: Callable[..., Any]
) -> None:
    """No thread of ours draws from its generator: what a seed gives is as without us."""
    folder = tiny("llama")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = way(folder, spare=300_000)
    for _ in range(2):
        logits(model)
    assert generated(model)
    model.pipeload.remove()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("way", [load, load_streamed])
def test_no_way_back_to_a_checkpoint_that_changed(
    tiny: TinyCheckpoint, tmp_path: Path, device: FakeDevice, way: Callable[..., Any]
) -> None:
    """What is left of the file, or what took its place, is not the model's."""
    folder = tmp_path / "changing"
    shutil.copytree(tiny("llama"), folder)
    model = way(folder, spare=100_000)
    logits(model)
    file = next(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(pipeload.CheckpointChangedError, match="was changed in place"):
        model.pipeload.remove()
    assert hooked_sites(model) > 0


def mixture(family: str) -> Any:
    """A configuration of four experts a layer."""
    return AutoConfig.for_model(
        family,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        num_local_experts=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_made_on_the_way(tmp_path: Path, device: FakeDevice, family: str) -> None:
    """Their checkpoint holds them one by one: conversions run in the staging, or before it."""
    folder = save_random(mixture(family), tmp_path / family, "fp32", seed=3)
    expected = reference(folder)
    for spare in (0, 300_000, 20_000_000):
        model = load(folder, spare=spare)
        plan = model.pipeload.plan
        assert plan.experts is None
        assert plan.whole_experts == ("on a device, a block is copied whole",)
        check(model, expected)
        check(model, expected)
        model.pipeload.remove()
        assert torch.equal(logits(model), expected[0])


def test_no_host_memory_to_make_residents_in(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the block is told; with memory the model runs."""
    folder = save_random(mixture("mixtral"), tmp_path / "mixtral", "fp32", seed=3)
    expected = reference(folder)
    model = load(folder)
    logits(model)
    model.pipeload.set_memory_limit(model.pipeload.plan.memory_limit + 20_000_000)

    def refuse(*_args: object, **_options: object) -> Arena:
        raise MemoryError("the system refuses")

    with monkeypatch.context() as patch:
        patch.setattr(device_residents, "Arena", refuse)
        with pytest.raises(pipeload.ReadError, match="could not be put on cpu: MemoryError"):
            logits(model)
        finish_reads(prefetcher_of(model))
    check(model, expected)


def test_quantised_checkpoints_are_refused(
    tmp_path: Path, device: FakeDevice, tiny: TinyCheckpoint
) -> None:
    """With the format's name and what to do; nothing is read."""
    folder = tmp_path / "int8"
    pipeload.quantize(tiny("llama"), folder, method="int8")
    with pytest.raises(pipeload.UnsupportedModelError, match="is streamed to the CPU alone so far"):
        load(folder)


FORMS: dict[str, dict[str, Any]] = {
    "nf4 twice": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("form", few(FORMS, ["int8"]))
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
def test_bitsandbytes(
    tmp_path: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Packed bytes go over the link; their statistics are on the device from the start."""
    use_plain_loops(monkeypatch.setattr)  # else it repacks weights: this device is a processor
    product._checked_fill.cache_clear()
    config = AutoConfig.for_model(
        "llama",
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        pad_token_id=0,
    )
    floats = save_random(config, tmp_path / "floats", "bf16", seed=5)
    quantisation = BitsAndBytesConfig(**FORMS[form], bnb_4bit_compute_dtype=torch.bfloat16)
    made = AutoModelForCausalLM.from_pretrained(
        floats, dtype="auto", quantization_config=quantisation, device_map="cpu"
    )
    made.save_pretrained(tmp_path / "packed")
    del made
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype="auto")
    expected = logits(plain), generated(plain)
    for spare in (0, 300_000, 20_000_000):
        model = load(tmp_path / "packed", spare=spare)
        for _ in range(2):
            check(model, expected)
        plan = model.pipeload.plan
        assert plan.fits is (spare == 20_000_000)
        if spare == 0:
            floats_bytes = sum(p.numel() * 2 for p in plain.model.layers.parameters())
            assert plan.link_bytes_per_pass < floats_bytes
        model.pipeload.set_memory_limit(plan.memory_limit + 20_000_000)
        model.pipeload.remove()
        check_plain(model, expected)
    product._checked_fill.cache_clear()


def check_plain(model: Any, expected: Reference) -> None:
    """A model that is not streamed any more gives that."""
    assert torch.equal(logits(model), expected[0])
    assert generated(model) == expected[1]


def test_device_maps_that_agree(tiny: TinyCheckpoint, device: FakeDevice) -> None:
    """A map that says the same is no second opinion; another one is refused."""
    model = load(tiny("llama"), device_map={"": "cpu"})
    assert hooked_sites(model) > 0
    with pytest.raises(pipeload.OptionError, match="device_map puts modules on xpu:3"):
        load(tiny("llama"), device_map={"": "xpu:3"})
