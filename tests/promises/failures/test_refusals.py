"""What cannot be streamed is refused before anything is loaded, and the error says why."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import pipeload
from pipeload import CheckpointError, MemoryLimitError, OptionError, UnsupportedModelError
from pipeload.system.pages import PAGE
from tests.support.models import load_plain, randomize, save_random
from tests.support.streaming import (
    FLOOR_BYTES,
    assert_nothing_held,
    load_streamed,
    logits,
    smallest_limit,
    steady_floor,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


# -- models that use block weights from outside the block -----------------------------------------


class Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(96, 176, bias=False)
        self.down = nn.Linear(176, 96, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return result


class HonestModel(PreTrainedModel):
    """Its blocks keep their weights to themselves."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(5))
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class ReadingModel(HonestModel):
    """Scales its input by a weight of a block, before any block has run."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * self.blocks[3].up.weight.norm())


class SideDoorModel(HonestModel):
    """Uses a part of the last block by itself."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        last = self.blocks[4]
        result: torch.Tensor = last.down(torch.relu(last.up(super().forward(hidden))))
        return result


class EditingModel(HonestModel):
    """Edits a weight in place between blocks, as RWKV does for half precision."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in self.blocks:
                block.down.weight.div_(2)
        return super().forward(hidden)


class AskingModel(HonestModel):
    """Looks at shapes and dtypes of weights, which is harmless."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[2].up.weight
        assert weight.requires_grad
        hidden = hidden.to(weight.dtype).to(weight.device)
        result: torch.Tensor = super().forward(hidden) / weight.shape[0] * weight.size(0)
        result /= weight.numel()
        return result


def saved(kind: type[HonestModel], folder: Path) -> Path:
    model = kind(PreTrainedConfig())
    randomize(model, seed=3)
    model.save_pretrained(folder)
    return folder


def run(model: Any) -> torch.Tensor:
    hidden = torch.randn(1, 4, 96, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        result: torch.Tensor = model(hidden)
    return result


def load_custom(kind: type[HonestModel], folder: Path, **options: Any) -> Any:
    return load_streamed(folder, auto_class=kind, config=PreTrainedConfig(), **options)


@pytest.mark.parametrize("kind", [ReadingModel, SideDoorModel, EditingModel])
def test_a_model_that_uses_weights_from_outside(kind: type[HonestModel], tmp_path: Path) -> None:
    """It is refused by name of weight and function, every time; no number is ever wrong."""
    model = load_custom(kind, saved(kind, tmp_path))
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"\w+\(\) was called on .*'blocks\.\d"):
            run(model)
        assert_nothing_held(model)


@pytest.mark.parametrize("kind", [HonestModel, AskingModel])
def test_a_model_that_does_not(kind: type[HonestModel], tmp_path: Path) -> None:
    """A model of one's own streams like any other."""
    model = load_custom(kind, saved(kind, tmp_path))
    plain = kind.from_pretrained(tmp_path, config=PreTrainedConfig())
    for _ in range(2):
        assert torch.equal(run(model), run(plain))


@torch.no_grad()
def test_rwkv(tmp_path: Path) -> None:
    """The library's own model that edits its blocks' weights from outside: those stay in memory.

    What was edited stays edited when the model is plain again.
    """
    options = {"hidden_size": 96, "num_hidden_layers": 6, "vocab_size": 128, "rescale_every": 2}
    config = transformers.AutoConfig.for_model("rwkv", **options)
    folder = save_random(config, tmp_path, "fp32", seed=1)
    plain = load_plain(folder)
    model = load_streamed(folder, modules=True)
    for _ in range(2):
        assert torch.equal(logits(model), logits(plain))
    assert model.pipeload.plan.bytes_per_pass > 0
    model.pipeload.remove()
    assert torch.equal(logits(model), logits(plain))


def test_a_model_without_blocks(tmp_path: Path) -> None:
    """There is nothing to stream in a single linear map."""

    class Flat(PreTrainedModel):
        config_class = PreTrainedConfig

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.map = nn.Linear(96, 96)
            self.post_init()  # type: ignore[no-untyped-call]

    model = Flat(PreTrainedConfig())
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Flat has no repeated blocks.*without"):
        pipeload.from_pretrained(tmp_path, auto_class=Flat, config=PreTrainedConfig())


# -- checkpoints and arguments that cannot be streamed ---------------------------------------------


def test_a_pickled_checkpoint(folder: Path, tmp_path: Path) -> None:
    """It is refused without being opened."""
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match="pickled"):
        pipeload.from_pretrained(tmp_path)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "gguf": ({"gguf_file": "model.gguf"}, CheckpointError, "model.gguf.*does not exist"),
    "state_dict": ({"state_dict": {"x": torch.ones(1)}}, OptionError, "state_dict= cannot be"),
    "cuda": ({"device_map": {"": "cuda"}}, OptionError, "device_map puts modules on cuda"),
    "meta": ({"device_map": {"": "meta"}}, OptionError, "device_map puts modules on meta"),
    "tokens": ({"tokens": 0}, OptionError, "tokens=0 must be a whole number"),
    "tokens kind": ({"tokens": 2.5}, OptionError, r"tokens=2\.5 must be a whole number"),
    "batch": ({"batch": -1}, OptionError, "batch=-1 must be a whole number"),
    "batch kind": ({"batch": True}, OptionError, "batch=True must be a whole number"),
    "readers": ({"readers": 0}, OptionError, "readers=0 must be a whole number from 1 to 64"),
    "readers kind": ({"readers": 2.5}, OptionError, r"readers=2\.5 must be a whole number"),
    "readers text": ({"readers": "4"}, OptionError, "readers='4' must be a whole number"),
    "io_mode": ({"io_mode": "fast"}, OptionError, "io_mode='fast' is unknown.*direct, buffered"),
    "limit text": ({"memory_limit": "much"}, OptionError, "much"),
    "limit unit": ({"memory_limit": "4XB"}, OptionError, "4XB"),
    "limit negative": ({"memory_limit": -5}, OptionError, "-5"),
    "limit zero": ({"memory_limit": 0}, OptionError, "0"),
    "limit None": ({"memory_limit": None}, OptionError, "None"),
    "auto_class": ({"auto_class": transformers.AutoConfig}, OptionError, "AutoConfig"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("load", [pipeload.from_pretrained, pipeload.plan])
def test_arguments_without_a_meaning(name: str, load: Any, folder: Path) -> None:
    """One clear error that names the argument, and the library's own loading is left as it was."""
    options, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        load(folder, **options)
    assert isinstance(load_plain(folder), LlamaForCausalLM)


@pytest.mark.parametrize("pretrained", ["", None])
def test_no_checkpoint(pretrained: Any) -> None:
    """A model without a checkpoint has nothing to stream."""
    with pytest.raises((OptionError, CheckpointError, OSError)):
        pipeload.from_pretrained(pretrained)


def test_a_missing_folder_is_the_librarys_error(tmp_path: Path) -> None:
    """It knows about hub ids, we do not."""
    with pytest.raises(OSError, match="nowhere"):
        pipeload.from_pretrained(tmp_path / "nowhere")


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float32}, {"tokens": 64, "batch": 3}])
def test_the_smallest_limit_works(tiny: TinyCheckpoint, options: dict[str, Any]) -> None:
    """What the error says works, and one page less does not, whatever was asked for at first."""
    folder = tiny("llama", "bf16")
    with steady_floor():
        least = smallest_limit(folder, **options)
        assert pipeload.plan(folder, memory_limit=least, **options).smallest_limit == least
        assert pipeload.plan(folder, memory_limit=2 * least, **options).smallest_limit == least
        for load in (pipeload.plan, pipeload.from_pretrained):
            with pytest.raises(MemoryLimitError, match=f"{least} bytes") as refusal:
                load(folder, memory_limit=least - PAGE, **options)
            assert refusal.value.limit == least - PAGE
            assert refusal.value.smallest_limit == least
        model = pipeload.from_pretrained(folder, memory_limit=least, **options)
    expected = logits(load_plain(folder, **{k: v for k, v in options.items() if k == "dtype"}))
    assert torch.equal(logits(model).float(), expected.float())


def test_every_option_of_the_hint_counts(folder: Path) -> None:
    """More tokens or sequences need a larger limit."""
    with steady_floor():
        base = smallest_limit(folder)
        assert base > FLOOR_BYTES
        assert smallest_limit(folder, tokens=2000) > base
        assert smallest_limit(folder, batch=8) > base


def test_text_limits(folder: Path) -> None:
    """Decimal and binary units are told apart."""
    assert pipeload.plan(folder, memory_limit="16GB").memory_limit == 16_000_000_000
    assert pipeload.plan(folder, memory_limit="16GiB").memory_limit == 16 << 30
    assert pipeload.plan(folder).memory_limit > 0
