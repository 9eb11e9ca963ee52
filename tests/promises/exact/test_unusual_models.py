"""Kinds of models that `model_types/run.py` found to need care, each as small as it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

import pipeload
from pipeload.budget.pass_shape import read_shape
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.engine import table_parameters
from tests.support.models import randomize, save_random, tiny_config
from tests.support.streaming import logits, session_of
from tests.tools.model_types import configs
from tests.tools.model_types.check import tiny_planning

if TYPE_CHECKING:
    from pathlib import Path


class Block(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 96, bias=False)
        self.down = nn.Linear(96, 48, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return result


class TwoTowers(PreTrainedModel):
    """Reads tokens, and pictures if it is given some."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(80, 48)
        self.positions = nn.Embedding(40, 48)
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.tower: Any = nn.ModuleList(Block() for _ in range(4))
        self.post_init()  # type: ignore[no-untyped-call]

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        # As the library's towers do: the whole table, not through its module.
        hidden = pixels + self.positions.weight[None, : pixels.shape[1]]
        for block in self.tower:
            hidden = block(hidden)
        return hidden

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.words(input_ids)
        if pixel_values is not None:
            hidden = torch.cat([self.see(pixel_values), hidden], 1)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class Reaching(TwoTowers):
    """With a picture, it adds a block's weight to something, from outside the block."""

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.tower[2].down.weight
        return super().see(pixels) + weight.T[:5]


class Picking(TwoTowers):
    """Takes rows of its words' table past the module, as for a padding token's embedding."""

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        weight = self.words.weight
        picked = weight[3] + weight[-1, :] + weight[torch.tensor([5, -2])].sum(0)
        result: torch.Tensor = super().see(pixels) + picked + weight[4:6].mean(0)
        return result


class Mixing(TwoTowers):
    """Multiplies with its words' table, as where a word is not sure yet."""

    def see(self, pixels: torch.Tensor) -> torch.Tensor:
        weight = self.words.weight
        result: torch.Tensor = super().see(pixels) + (pixels @ weight.T).softmax(-1) @ weight
        return result


IDS = torch.arange(3, 14)[None]
PIXELS = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(2))


def streamed_and_plain(kind: type[TwoTowers], folder: Path) -> tuple[Any, Any]:
    """Both of one random checkpoint, the first at its smallest limit."""
    model = kind(PreTrainedConfig())
    randomize(model, seed=3)
    model.save_pretrained(folder)
    config = PreTrainedConfig()
    ACCOUNTANT.forget_all()
    with tiny_planning():
        limit = pipeload.smallest_limit(folder, auto_class=kind, config=config)
        streamed = pipeload.from_pretrained(
            folder, auto_class=kind, config=config, memory_limit=limit
        )
    assert streamed.pipeload.plan.bytes_per_pass > 0
    return streamed, kind.from_pretrained(folder, config=PreTrainedConfig())


@torch.no_grad()
def test_a_table_that_is_used_whole(tmp_path: Path) -> None:
    """Whether the first call has a picture or none, positions of a picture are there."""
    streamed, plain = streamed_and_plain(TwoTowers, tmp_path)
    with tiny_planning():
        for given in ({}, {"pixel_values": PIXELS}, {}):
            assert torch.equal(streamed(IDS, **given), plain(IDS, **given))


@torch.no_grad()
def test_rows_of_a_table(tmp_path: Path) -> None:
    """They are read, in every pass that asks for them; the table as a whole never is."""
    streamed, plain = streamed_and_plain(Picking, tmp_path)
    (table,) = session_of(streamed).streamer.tables
    assert list(table.parameters) == ["words.weight"]
    with tiny_planning():
        for given in ({}, {"pixel_values": PIXELS}, {"pixel_values": PIXELS}, {}):
            assert torch.equal(streamed(IDS, **given), plain(IDS, **given))


@torch.no_grad()
def test_a_table_as_a_matrix(tmp_path: Path) -> None:
    """It is read as a whole then and stays, if it fits."""
    streamed, plain = streamed_and_plain(Mixing, tmp_path)
    with tiny_planning():
        assert torch.equal(streamed(IDS), plain(IDS))
        (table,) = session_of(streamed).streamer.tables
        with (
            mock.patch.object(table_parameters, "rss_bytes", return_value=1 << 60),
            pytest.raises(pipeload.MemoryLimitError, match=r"table 'words\.weight'"),
        ):
            streamed(IDS, pixel_values=PIXELS)
        for given in ({"pixel_values": PIXELS}, {}, {"pixel_values": PIXELS}):
            read = table.bytes_read
            assert torch.equal(streamed(IDS, **given), plain(IDS, **given))
        assert table.bytes_read == read


@torch.no_grad()
def test_a_call_of_another_kind_is_watched(tmp_path: Path) -> None:
    """What only a picture leads to is refused when that comes, not computed with what is there.

    The weight is the right side of an operator, which would drop a TypeError.
    """
    streamed, plain = streamed_and_plain(Reaching, tmp_path)
    with tiny_planning():
        assert torch.equal(streamed(IDS), plain(IDS))
        for _ in range(2):
            with pytest.raises(pipeload.UnsupportedModelError, match=r"'tower\.2\.down\.weight'"):
                streamed(IDS, pixel_values=PIXELS)
            assert torch.equal(streamed(IDS), plain(IDS))


def test_a_tied_head_that_stays(tmp_path: Path) -> None:
    """As one unit, which this vocabulary is, it has its weight in every pass.

    It shares it with a table that puts a placeholder there, while other weights are streamed.
    """
    config = tiny_config("llama", vocab_size=100, tie_word_embeddings=True)
    folder = save_random(config, tmp_path, "fp32", seed=5)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 14)[None]
    ACCOUNTANT.forget_all()
    with tiny_planning():
        limit = pipeload.smallest_limit(folder)
        while True:
            model = pipeload.from_pretrained(folder, memory_limit=limit)
            assert model.pipeload.plan.bytes_per_pass > 0
            for _ in range(2):
                assert torch.equal(logits(model, ids), logits(plain, ids)), limit
            (head,) = (unit for unit in model.pipeload.plan.units if unit.name == "lm_head")
            model.pipeload.remove()
            if not head.streamed_bytes:
                return
            limit += 100_000


@pytest.mark.parametrize(
    ("inputs", "positions"),
    [
        ({"input_values": torch.zeros(2, 16000)}, 100),  # a second of sound: 50 frames each
        ({"pixel_values": torch.zeros(64, 1176)}, 64 * 1176 // 320),  # patches, side by side
        ({"hidden_states": torch.zeros(64, 8)}, 64),
        ({"input_ids": torch.zeros(2, 30, dtype=torch.long)}, 60),
    ],
)
def test_positions_of_numbers_that_are_no_tokens(inputs: dict[str, Any], positions: int) -> None:
    """A row of floats is not so many tokens: a pass over it would be refused for nothing."""
    shape = read_shape((), inputs)
    assert shape.tokens * shape.batch == positions


@pytest.mark.parametrize("rows", [1, 3])
def test_padding_of_layers_with_a_state(tmp_path: Path, rows: int) -> None:
    """What a mask hides stays out of their state, also of a single sequence."""
    config = configs.tiny_config("qwen3_next", "names")
    folder = save_random(config, tmp_path, "fp32", seed=5)
    ids = torch.arange(3, 3 + 12 * rows).reshape(rows, 12)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((4, 0, 7)[:rows]):
        mask[row, :padding] = 0
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "output_logits": True}
    options |= {"return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}

    def answers(model: Any, given: torch.Tensor) -> list[torch.Tensor]:
        output = model.generate(ids, attention_mask=given, **options)
        return [output.sequences, *output.logits]

    plain = AutoModelForCausalLM.from_pretrained(folder)
    wanted = answers(plain, mask)
    assert not torch.equal(wanted[1], answers(plain, torch.ones_like(mask))[1])
    ACCOUNTANT.forget_all()
    with tiny_planning():
        limit = pipeload.smallest_limit(folder)
        model = pipeload.from_pretrained(folder, memory_limit=limit)
        assert model.pipeload.plan.bytes_per_pass > 0
        for got, tensor in zip(answers(model, mask), wanted, strict=True):
            assert torch.equal(got, tensor)


@torch.no_grad()
def test_nothing_is_left_on_meta(tmp_path: Path) -> None:
    """Neither before the first pass nor after it; biases and buffers have their values."""
    folder = save_random("gpt2", tmp_path, "bf16", seed=5)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ACCOUNTANT.forget_all()
    with tiny_planning():
        limit = pipeload.smallest_limit(folder, dtype="auto")
        model: Any = pipeload.from_pretrained(folder, memory_limit=limit, dtype="auto")
        assert model.pipeload.plan.bytes_per_pass > 0
        for _ in range(2):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                assert tensor.device == model.device, name
                assert tensor.device.type == "cpu", name
            for name, buffer in plain.named_buffers():
                assert torch.equal(model.get_buffer(name), buffer), name
            for name, parameter in plain.named_parameters():
                if name.endswith(("bias", "ln_1.weight", "ln_f.weight")):
                    assert torch.equal(model.get_parameter(name), parameter), name
            assert torch.equal(logits(model, IDS), logits(plain, IDS))
