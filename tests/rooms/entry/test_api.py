"""Existing code, unchanged: every from_pretrained inside is streamed, and nothing is after."""

from __future__ import annotations

import contextvars
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    modeling_utils,
)

import pipeload
from pipeload.entry import api
from pipeload.errors import MemoryLimitError, OptionError
from pipeload.hf.takeover import intercept_loading
from tests.support.measuring import given
from tests.support.models import load_plain
from tests.support.streaming import FLOOR_BYTES, WAIT_SECONDS, logits, smallest_limit, steady_floor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

PLACES = (PreTrainedModel, modeling_utils)


def library() -> list[dict[str, object]]:
    """All that the places in which loading is taken over hold."""
    return [dict(vars(place)) for place in PLACES]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves the library as it was, and starts from the same floor."""
    before = library()
    with steady_floor():
        yield
    assert library() == before


@pytest.fixture
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture
def limit(folder: Path) -> int:
    """One at which the tiny model is really streamed."""
    return smallest_limit(folder, dtype="auto")


def first(pair: Any) -> Any:
    return pair[0]


def is_streamed(model: Any) -> bool:
    return "pipeload" in model.__dict__


def test_every_class(folder: Path, limit: int) -> None:
    """Auto classes and the model's own, by position and by name; equal to plain."""
    loads: list[Callable[[], Any]] = [
        lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
        lambda: LlamaForCausalLM.from_pretrained(pretrained_model_name_or_path=folder),
        lambda: first(AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)),
    ]
    expected: Any = load_plain(folder)
    for load in loads:
        with pipeload.streaming(limit):
            model = load()
        assert is_streamed(model)
        assert torch.equal(logits(model), logits(expected))
        model.pipeload.remove()
    with pipeload.streaming(limit + 200_000):  # of another model
        base: Any = AutoModel.from_pretrained(folder)
    with torch.no_grad():
        ids = torch.arange(3, 20)[None]
        states = base(ids).last_hidden_state
        assert torch.equal(states, expected.model(ids).last_hidden_state)


def test_outside_is_plain(folder: Path, limit: int) -> None:
    """Before, after, and after an error inside."""
    with pytest.raises(ZeroDivisionError), pipeload.streaming(limit):
        raise ZeroDivisionError
    assert not is_streamed(load_plain(folder))


def test_a_pipeline_by_name(folder: Path, limit: int) -> None:
    """`pipeline("...", model="id")` loads its own model."""
    with pipeload.streaming(limit):
        pipe = transformers.pipeline(
            "text-generation", model=str(folder), tokenizer=_no_tokenizer(), device="cpu"
        )
    assert is_streamed(pipe.model)


def _no_tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), unk_token="a"
    )


def test_nested(folder: Path, limit: int) -> None:
    """The innermost counts; after it the outer one does. "auto" inside takes the outer limit."""
    with pipeload.streaming(limit + 4096):
        with pipeload.streaming(limit):
            inner: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert inner.pipeload.plan.memory_limit == limit
        inner.pipeload.remove()
        outer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert outer.pipeload.plan.memory_limit == limit + 4096
        outer.pipeload.remove()
        with pipeload.streaming(tokens=20):
            again = pipeload.from_pretrained(folder, dtype="auto")
        assert again.pipeload.plan.memory_limit == limit + 4096


def test_threads_have_contexts_of_their_own(folder: Path, limit: int) -> None:
    """Streaming in one thread does not reach another, unless it runs in a copy of its context."""
    models: dict[str, Any] = {}

    def load(name: str) -> None:
        models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    with pipeload.streaming(limit):
        copied = contextvars.copy_context()
        threads = [
            threading.Thread(target=load, args=("alone",)),
            threading.Thread(target=copied.run, args=(load, "copied")),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not is_streamed(models["alone"])
    assert is_streamed(models["copied"])


def test_contexts_that_overlap(folder: Path, limit: int) -> None:
    """One thread leaves its context while another one is inside its own: that one goes on."""
    inside, left = threading.Event(), threading.Event()
    models: list[Any] = []

    def stay() -> None:
        with pipeload.streaming(limit):
            inside.set()
            left.wait(WAIT_SECONDS)
            models.append(AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))

    untouched = library()
    thread = threading.Thread(target=stay)
    with pipeload.streaming(limit + 4096):
        thread.start()
        assert inside.wait(WAIT_SECONDS)
        assert library() != untouched
    assert not is_streamed(AutoModelForCausalLM.from_pretrained(folder))
    left.set()
    thread.join(WAIT_SECONDS)
    assert models[0].pipeload.plan.memory_limit == limit
    assert library() == untouched


def test_one_at_a_time() -> None:
    """While a model is built the library patches itself for all threads: two would mix that up."""
    inside, most = 0, 0

    def answer(_load: Any, _pretrained: str) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        waiting.wait(0.05)
        inside -= 1

    waiting = threading.Event()
    with intercept_loading(answer):
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(LlamaForCausalLM.from_pretrained, "any"),
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 1


def test_everywhere(folder: Path, limit: int) -> None:
    """For all threads, until it is ended; a context inside counts first."""
    models: list[Any] = []
    api.stream_everywhere(limit)
    try:
        thread = threading.Thread(
            target=lambda: models.append(AutoModelForCausalLM.from_pretrained(folder))
        )
        thread.start()
        thread.join()
        assert is_streamed(models[0])
        with (
            pytest.raises(OptionError, match="differs from that of a model"),
            pipeload.streaming(1),
        ):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        api.stream_everywhere(None)
    assert not is_streamed(AutoModelForCausalLM.from_pretrained(folder))


def test_a_bad_option_changes_nothing(folder: Path) -> None:
    """It is said when the context is entered."""
    with pytest.raises(OptionError, match="tokens=0"), pipeload.streaming(tokens=0):
        raise AssertionError("entered")
    with pytest.raises(OptionError, match="4XB"):
        api.stream_everywhere("4XB")
    assert not is_streamed(load_plain(folder))


def test_as_a_decorator(folder: Path, limit: int) -> None:
    @pipeload.streaming(limit)
    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")

    for _ in range(2):
        model = load()
        assert is_streamed(model)
        model.pipeload.remove()


def test_the_environment_says_the_limit(
    folder: Path, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody passes one. What it says wrongly is refused by its name."""
    monkeypatch.setenv("PIPELOAD_MEMORY_LIMIT", str(limit))
    model = pipeload.from_pretrained(folder, dtype="auto")
    assert model.pipeload.plan.memory_limit == limit
    model.pipeload.remove()
    monkeypatch.setenv("PIPELOAD_MEMORY_LIMIT", "lots")
    with pytest.raises(OptionError, match=r"variable PIPELOAD_MEMORY_LIMIT: .*lots"):
        pipeload.from_pretrained(folder)


def test_a_limit_that_nobody_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "auto" comes to too little, the refusal says what it was made of."""
    monkeypatch.setattr("pipeload.system.memory.allowed_bytes", lambda: 100_000_000)
    with given(allowed_bytes=100_000_000):
        with pytest.raises(MemoryLimitError, match=r'named it: "auto" leaves a part of the 100 MB'):
            pipeload.from_pretrained(folder)
        with pytest.raises(MemoryLimitError) as refusal:
            pipeload.from_pretrained(folder, memory_limit="50%")
    assert "auto" not in str(refusal.value)


class Small(PreTrainedModel):
    """A model without repeated blocks."""

    config_class = transformers.LlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.one = torch.nn.Linear(32, 32)
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> Any:
        return self.one(x)


def test_a_model_with_nothing_to_stream(tmp_path: Path) -> None:
    """A script may load small ones beside: whole if the limit holds them; asked for by itself it is
    refused."""
    model = Small(transformers.LlamaConfig(hidden_size=32))
    model.save_pretrained(tmp_path)
    with pipeload.streaming("100GB"):
        loaded = Small.from_pretrained(tmp_path)
    assert not is_streamed(loaded)
    assert torch.equal(loaded.one.weight, model.one.weight)
    with pytest.raises(pipeload.UnsupportedModelError, match="nothing to stream"):
        pipeload.from_pretrained(tmp_path, memory_limit="100GB", auto_class=Small)
    with (
        pytest.raises(MemoryLimitError, match="Small has nothing"),
        pipeload.streaming(FLOOR_BYTES // 1000),
    ):
        Small.from_pretrained(tmp_path)
