"""Checkpoints quantised by bitsandbytes stream packed: equal to plain, bad ones refused by name."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

import pipeload
from pipeload.errors import CheckpointError, UnsupportedModelError, UnsupportedOperationError
from pipeload.formats.bitsandbytes import product
from pipeload.formats.bitsandbytes.kernel import make_fill
from pipeload.formats.bitsandbytes.packed_weight import is_4bit
from pipeload.formats.bitsandbytes.tiles import TILED, repack
from pipeload.hf.pending_load import PendingLoad
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
from tests.support.models import save_random
from tests.support.plain_loops import use_plain_loops
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

pytest.importorskip("bitsandbytes")

FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp4 double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "fp4",
        "bnb_4bit_use_double_quant": True,
    },
    "bf16 storage": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "int8": {"load_in_8bit": True},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 64, "sliding_window": 16, "sliding_window_pattern": 2},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`quantised(family, form)`: the folder of a small checkpoint, made once by the library."""
    floats: dict[str, Path] = {}
    made: dict[tuple[str, str], Path] = {}

    def checkpoint(family: str, form: str) -> Path:
        if family not in floats:
            config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
            folder = tmp_path_factory.mktemp(family)
            floats[family] = save_random(config, folder, torch.bfloat16, seed=5)
        if (family, form) not in made:
            model = AutoModelForCausalLM.from_pretrained(
                floats[family],
                dtype=torch.bfloat16,
                quantization_config=BitsAndBytesConfig(**FORMS[form]),
                device_map="cpu",
            )
            folder = tmp_path_factory.mktemp(f"{family} {form}")
            model.save_pretrained(folder)
            made[family, form] = folder
        return made[family, form]

    return checkpoint


@pytest.fixture(autouse=True, scope="module")
def quiet() -> None:
    """The library says at every product that int8 takes its input in fp16."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


HERE = "this processor"
AVX2 = "AVX2 alone"


@pytest.fixture(params=[HERE, AVX2])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """As it is here, and as where bitsandbytes has no kernel for 4-bit weights."""
    product._checked_fill.cache_clear()
    if request.param == AVX2:
        use_plain_loops(monkeypatch.setattr)
    yield str(request.param)
    product._checked_fill.cache_clear()


def all_outputs(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt, of decoding steps, and of two sequences; and what is generated."""
    outputs = step_logits(model, prompt(), 3) + step_logits(model, prompt(2, 7), 1)
    outputs.append(model.generate(prompt(), max_new_tokens=6, do_sample=False))
    return outputs


@pytest.mark.parametrize(
    ("processor", "family", "form"),
    [
        *few(
            [(HERE, family, form) for family in FAMILIES for form in FORMS],
            [(HERE, family, "nf4") for family in FAMILIES]
            + [(HERE, "llama", form) for form in FORMS if not form.startswith("fp4")],
        ),
        # The weights' shapes and forms choose kernels, not the family; int8 knows no other.
        *few(
            [(AVX2, "llama", form) for form in FORMS if form != "int8"],
            [(AVX2, "llama", "nf4 double")],
        ),
    ],
    indirect=["processor"],
)
def test_equal_to_plain(
    family: str, form: str, quantised: Callable[[str, str], Path], processor: str
) -> None:
    """At the smallest limit, in the middle, and where everything fits; and plain again after."""
    folder = quantised(family, form)
    expected = all_outputs(plain(folder))
    for limit in limits(folder, 3):
        model = load(folder, limit)
        assert_same(all_outputs(model), expected, f"{form} on {processor} at {limit}")
        if limit == limits(folder, 3)[0]:
            assert_streamed(model)
        if processor == AVX2 and make_fill(torch.ones(16), 64) is not None:
            assert {type(c.values) for c in companions_of(model)} == {product.Factors}
        assert not any("forward" in vars(m) for m in linears(model))
    model.pipeload.remove()
    assert_same(all_outputs(model), expected, "after remove()")
    states = [m.weight.quant_state for m in linears(model) if is_4bit(m)]
    assert {type(state.absmax) for state in states} <= {torch.Tensor}


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("form", few(["nf4 double", "int8"], ["nf4 double"]))
def test_the_real_model(form: str, smollm2_bf16: Path, tmp_path: Path) -> None:
    """SmolLM2 in a quantised form, small limits."""
    AutoModelForCausalLM.from_pretrained(
        smollm2_bf16,
        dtype=torch.bfloat16,
        quantization_config=BitsAndBytesConfig(**FORMS[form]),
        device_map="cpu",
    ).save_pretrained(tmp_path)
    expected = all_outputs(plain(tmp_path))
    model = load_smallest(tmp_path)
    assert_same(all_outputs(model), expected)
    assert_streamed(model)


def test_unpacked_bytes_count_in_the_dtype_that_is_computed_in(
    quantised: Callable[[str, str], Path], processor: str
) -> None:
    """A bf16 model that computes in fp32 unpacks to fp32, which the limit must have room for."""
    model = load_smallest(quantised("llama", "nf4"))
    largest = max(linears(model), key=lambda m: m.weight.numel() * is_4bit(m))
    assert largest.compute_dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16
    counted = model.pipeload._session.governor._needs._products(1)
    if processor == AVX2:  # all of it for a prompt, and what is kept for ranges: here as much
        wanted = 4 if make_fill(torch.ones(16), 64) is None else 8
        assert counted >= wanted * largest.in_features * largest.out_features


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_an_accelerator_that_nobody_asked_for(
    form: str, quantised: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would put a quantised model there; it is streamed to the CPU all the same."""
    folder = quantised("llama", form)
    expected = all_outputs(plain(folder))
    asked = []
    for method in ("bitsandbytes_4bit", "bitsandbytes_8bit"):

        def places(_self: object, device_map: object) -> object:
            asked.append(device_map)
            return device_map or {"": 0}

        monkeypatch.setattr(AUTO_QUANTIZER_MAPPING[method], "update_device_map", places)
    model = load(folder, limits(folder, 3)[0])
    assert asked.count(None) > 0
    assert_same(all_outputs(model), expected, form)
    assert_streamed(model)


def test_packed_bytes_are_what_is_read(quantised: Callable[[str, str], Path]) -> None:
    """A pass reads half a byte per weight, not two."""
    folder = quantised("llama", "nf4 double")
    model = load_smallest(folder)
    floats = 2 * sum(m.in_features * m.out_features for m in linears(model))
    assert 0 < model.pipeload.plan.bytes_per_pass < 0.6 * floats


@pytest.mark.parametrize(
    ("processor", "form"),
    few(
        itertools.product([HERE, AVX2], FORMS),
        [*((HERE, form) for form in FORMS), (AVX2, "nf4"), (AVX2, "nf4 double")],
    ),
    indirect=["processor"],
)
def test_statistics_are_planned_for(
    form: str,
    quantised: Callable[[str, str], Path],
    processor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scales of blocks, a sixteenth of the weights in NF4, are always there and no parameter."""
    folder = quantised("llama", form)
    model = load_smallest(folder)
    there = statistics_of(model)
    nbytes = sum(tensor.nbytes for tensor in there)
    planned = model.pipeload.plan.pinned_bytes
    monkeypatch.setattr(PendingLoad, "statistics_bytes", lambda *_args: 0)
    without = load_smallest(folder).pipeload.plan.pinned_bytes
    # Each takes a multiple of 512 bytes on a device; states are stored beside them.
    assert 10_000 < nbytes <= planned - without <= nbytes + 2 * 512 * len(there)


def statistics_of(model: Any) -> list[torch.Tensor]:
    """Every tensor that its quantised modules hold beside their weights."""
    found = [c.values for c in companions_of(model) if c.values is not None]
    for module in filter(is_4bit, linears(model)):
        state = module.weight.quant_state
        states = [state, state.state2] if state.nested else [state]
        found += [t for one in states for t in (one.absmax, one.code) if t is not None]
    return found


def companions_of(model: Any) -> list[Any]:
    """What goes with its quantised weights."""
    return [
        companion
        for seat in model.pipeload._session.streamer.seats
        for several in seat._binding._companions.values()
        for companion in several
    ]


def linears(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, torch.nn.Linear)]


def test_an_evicted_module_refuses(
    quantised: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers have no NaN: a module called by itself must not compute with what is not there."""
    monkeypatch.setattr("pipeload.entry.loading.probe_usage", lambda _model: None)  # whole blocks
    for form in ("nf4", "int8"):
        model = load_smallest(quantised("llama", form))
        expected = step_logits(model, prompt(), 1)
        module = model.model.layers[2].mlp.up_proj
        with pytest.raises(UnsupportedModelError, match=r"layers\.2\.mlp\.up_proj\.weight"):
            module(torch.ones(1, 256, dtype=torch.bfloat16))
        assert_same(step_logits(model, prompt(), 1), expected)


def test_the_limit_in_mid_life(quantised: Callable[[str, str], Path]) -> None:
    """Down and up again: residents of a quantised model come and go."""
    folder = quantised("llama", "nf4 double")
    small, _, large = limits(folder, 3)
    model = load(folder, large)
    expected = all_outputs(model)
    governor = model.pipeload._session.governor  # the fixture lets no accountant reach it
    governor.take_limit(small)
    assert model.pipeload.plan.bytes_per_pass > 0
    assert_same(all_outputs(model), expected)
    governor.take_limit(large)
    assert_same(all_outputs(model), expected)


def test_what_a_streamed_model_refuses(quantised: Callable[[str, str], Path]) -> None:
    """A state dict does not undo what the processor needs; reading it or copying is refused."""
    model = load_smallest(quantised("llama", "nf4"))
    expected = step_logits(model, prompt(), 1)
    state = model.state_dict()
    with pytest.raises(
        UnsupportedOperationError, match=r"layers\.1\.mlp\.up_proj\.weight.*on disk"
    ):
        state["model.layers.1.mlp.up_proj.weight"].clone()
    with pytest.raises(UnsupportedOperationError, match=r"layers\.1\.mlp\.up_proj.*remove\(\)"):
        copy.deepcopy(model.model.layers[1].mlp.up_proj)
    assert_same(step_logits(model, prompt(), 1), expected)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("processor", "form"),
    few(
        itertools.product([HERE, AVX2], ["nf4", "int8"]),
        [(HERE, "nf4"), (AVX2, "nf4"), (HERE, "int8")],
    ),
    indirect=["processor"],
)
def test_with_an_adapter(
    form: str, quantised: Callable[[str, str], Path], processor: str, tmp_path: Path
) -> None:
    """A LoRA on packed weights: saved, put on and off again."""
    peft: Any = pytest.importorskip("peft")
    folder = quantised("llama", form)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(plain(folder), config).eval()
    adapted.save_pretrained(tmp_path)
    expected = all_outputs(adapted)
    model = load_smallest(folder)
    alone = all_outputs(model)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path)
    assert_same(all_outputs(adapted), expected, processor)
    with pytest.raises(UnsupportedOperationError, match="merge"):
        adapted.merge_adapter()
    with adapted.disable_adapter():
        assert_same(all_outputs(adapted), alone, processor)
    adapted.save_pretrained(tmp_path / "again")
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert_same(all_outputs(adapted), expected, processor)


# -- bad checkpoints -------------------------------------------------------------------------------

LAYER = "model.layers.1.mlp.up_proj.weight"
STATE = f"{LAYER}.quant_state.bitsandbytes__nf4"
OTHER = "model.layers.1.mlp.down_proj.weight"


def blob(**changes: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    """Change entries of the JSON text that is stored as a tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].numpy())) | changes
        text = json.dumps({k: v for k, v in state.items() if v is not ...})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def put(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: value})


def swap(name: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensors[other].clone()})


BAD_4BIT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no statistics": (drop(f"{LAYER}.absmax"), "absmax is missing"),
    "no map": (drop(f"{LAYER}.quant_map"), "quant_map is missing"),
    "no state": (drop(STATE), "0 quantisation states"),
    "half nested": (drop(f"{LAYER}.nested_absmax"), "nested_absmax is missing"),
    "noise": (put(STATE, torch.arange(50, dtype=torch.uint8)), "cannot be read"),
    "a list": (put(STATE, torch.tensor(list(b"[1]"), dtype=torch.uint8)), "quantisation state is"),
    "huge": (put(STATE, torch.zeros(9000, dtype=torch.uint8)), "9000 bytes"),
    "another layer's state": (swap(STATE, STATE.replace("up", "down")), "is for shape"),
    "short statistics": (put(f"{LAYER}.absmax", torch.zeros(3, dtype=torch.uint8)), "wanted 1536"),
    "float statistics": (put(f"{LAYER}.absmax", torch.zeros(1536)), "of F32"),
    "short weight": (put(LAYER, torch.zeros(100, 1, dtype=torch.uint8)), "has 100 bytes"),
    "another shape": (blob(shape=[384, 128]), r"shape \[384, 128\]"),
    "no block size": (blob(blocksize=...), "blocksize"),
    "block size 0": (blob(blocksize=0), "blocksize=0"),
    "another kind": (blob(quant_type="int3"), "int3"),
    "the other kind": (blob(quant_type="fp4"), "says"),
    "no type": (blob(dtype="float99"), "float99"),
    "no offset": (blob(nested_offset=...), "nested_offset"),
}


@pytest.mark.parametrize("kind", BAD_4BIT)
def test_bad_4bit_weights(kind: str, quantised: Callable[[str, str], Path], tmp_path: Path) -> None:
    """One error that names the weight, before anything is computed."""
    change, words = BAD_4BIT[kind]
    folder = changed(quantised("llama", "nf4 double"), tmp_path, change)
    with pytest.raises(CheckpointError, match=words) as refusal:
        pipeload.from_pretrained(folder, memory_limit="100GB")
    assert "layers.1.mlp.up_proj.weight" in str(refusal.value)


BAD_8BIT: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "no scale": (drop(LAYER.replace("weight", "SCB")), "SCB is missing"),
    "short scale": (put(LAYER.replace("weight", "SCB"), torch.ones(3)), "wanted 384"),
    "other order": (put(f"{LAYER}_format", torch.tensor(1, dtype=torch.uint8)), "row by row"),
    "another shape": (swap(LAYER, OTHER), "its shape is"),
}


@pytest.mark.parametrize("kind", BAD_8BIT)
def test_bad_8bit_weights(kind: str, quantised: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The same for LLM.int8."""
    change, words = BAD_8BIT[kind]
    folder = changed(quantised("llama", "int8"), tmp_path, change)
    with pytest.raises(CheckpointError, match=words) as refusal:
        pipeload.from_pretrained(folder, memory_limit="100GB")
    assert "layers.1.mlp.up_proj.weight" in str(refusal.value)


def test_a_missing_weight(quantised: Callable[[str, str], Path], tmp_path: Path) -> None:
    """The library would initialise it: a quantised weight at random is none."""

    def drop_all(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(LAYER)]:
            tensors.pop(name)

    folder = changed(quantised("llama", "nf4"), tmp_path, drop_all)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        pipeload.from_pretrained(folder, memory_limit="100GB")


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    copy = Path(shutil.copytree(folder, target / "copy"))
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_a_float_checkpoint_is_not_quantised(smollm2_bf16: Path) -> None:
    """Quantising needs all weights at once."""
    with pytest.raises(UnsupportedModelError, match="quantises weights while they are loaded"):
        pipeload.from_pretrained(
            smollm2_bf16,
            memory_limit="100GB",
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
        )


# -- the order that some processors need -----------------------------------------------------------


@pytest.mark.parametrize("columns", [64, 192, 2048])
@pytest.mark.parametrize("rows", [32, 96, 512])
def test_repacking_is_the_librarys(rows: int, columns: int) -> None:
    """Byte for byte, in pieces too."""
    from bitsandbytes.functional import QuantState, _convert_weight_packed_for_cpu

    generator = torch.Generator().manual_seed(rows)
    stored = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    state = QuantState(  # type: ignore[no-untyped-call]
        absmax=torch.ones(rows * columns // 64),
        shape=torch.Size([rows, columns]),
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    wanted, _ = _convert_weight_packed_for_cpu(stored.reshape(-1, 1).clone(), state)
    made = torch.empty_like(stored)
    for start in range(0, rows, 32):
        repack(stored[start : start + 32], made[start : start + 32])
    assert torch.equal(made, wanted)
    assert TILED.rows(columns // 2) % 32 == 0
