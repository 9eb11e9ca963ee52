"""Where the library's loading is taken over, and given back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, modeling_utils

from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.hf import takeover
from pipeload.hf.takeover import (
    current_intercept,
    intercept_everywhere,
    intercept_loading,
    peek,
    plainly,
    quantisation_of,
    take_over_loading,
)
from tests.support.models import tiny_config
from tests.support.quantised import fp8

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeload.hf.pending_load import PendingLoad
    from tests.conftest import TinyCheckpoint

REPLACED: list[tuple[Any, str]] = [
    (PreTrainedModel, "_load_pretrained_model"),
    (PreTrainedModel, "from_pretrained"),
    (modeling_utils, "get_hf_quantizer"),
]


@pytest.fixture(autouse=True)
def _all_is_given_back() -> Iterator[None]:
    """Whatever a test does, the library has its own functions afterwards."""
    before = [vars(owner)[name] for owner, name in REPLACED]
    yield
    assert [vars(owner)[name] for owner, name in REPLACED] == before
    assert current_intercept() is None


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


def load(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, **options)


def test_one_model_is_handed_over(folder: Path) -> None:
    """The next one that this thread loads, on the meta device; those after it are plain."""
    seen: list[PendingLoad] = []

    def stream(pending: PendingLoad) -> Any:
        seen.append(pending)
        assert all(parameter.is_meta for parameter in pending.model.parameters())
        return pending.load_rest(())

    with take_over_loading(stream):
        first, second = load(folder), load(folder)
    assert [pending.model for pending in seen] == [first]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_other_threads_load_plainly(folder: Path) -> None:
    """Only the one that asked is answered."""
    got: list[Any] = []
    with take_over_loading(lambda _pending: pytest.fail("another thread's")):
        thread = threading.Thread(target=lambda: got.append(load(folder)))
        thread.start()
        thread.join()
    assert isinstance(got[0], LlamaForCausalLM)


def test_a_failed_load_leaves_nothing(folder: Path) -> None:
    """Neither a function of ours, nor the wish to have a model."""

    def stream(_pending: PendingLoad) -> Any:
        raise KeyError("stream")

    with pytest.raises(KeyError, match="stream"), take_over_loading(stream):
        load(folder)
    assert takeover._thread.pending is None
    assert isinstance(load(folder), LlamaForCausalLM)


def test_peeking_reads_nothing(folder: Path) -> None:
    """Nobody else is asked; what loads no model gives None."""
    with intercept_loading(lambda *_args, **_kwargs: pytest.fail("asked")):
        pending = peek(lambda: load(folder))
    assert pending is not None
    assert all(parameter.is_meta for parameter in pending.model.parameters())
    assert peek(lambda: tiny_config("llama")) is None


def test_interceptors(folder: Path) -> None:
    """The innermost in this context answers; models that one loads inside are plain."""
    asked: list[str] = []

    def outer(load_it: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append("outer")
        inside = load(folder)
        assert isinstance(inside, LlamaForCausalLM)
        return load_it(*args, **kwargs)

    def inner(load_it: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append("inner")
        return load_it(*args, **kwargs)

    with intercept_loading(outer):
        assert isinstance(load(folder), LlamaForCausalLM)
        with intercept_loading(inner):
            load(folder)
            assert current_intercept() is inner
        with intercept_loading(plainly):
            load(folder)
    load(folder)
    assert asked == ["outer", "inner"]


def test_everywhere(folder: Path) -> None:
    """In all threads, where no context says otherwise, until it is taken back."""
    asked: list[int] = []

    def answer(load_it: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(threading.get_ident())
        return load_it(*args, **kwargs)

    intercept_everywhere(answer)
    intercept_everywhere(answer)
    try:
        load(folder)
        thread = threading.Thread(target=load, args=(folder,))
        thread.start()
        thread.join()
        with intercept_loading(plainly):
            load(folder)
    finally:
        intercept_everywhere(None)
        intercept_everywhere(None)
    load(folder)
    assert len(asked) == len({*asked}) == 2


def test_what_has_no_files_is_refused(folder: Path, tmp_path: Path) -> None:
    """Weights that are in memory, and pickled ones, which are named."""
    config = tiny_config("llama")
    with pytest.raises(OptionError, match="in memory already"):
        peek(lambda: LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}))
    config.save_pretrained(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"'pytorch_model.bin' is a pickled checkpoint"):
        peek(lambda: load(tmp_path))


def test_other_places_are_refused(folder: Path) -> None:
    """Also those that the library chose."""
    with pytest.raises(OptionError, match="device_map puts modules on meta"):
        peek(lambda: load(folder, device_map="meta"))


def test_quantising_is_refused(folder: Path) -> None:
    """It takes the whole model in memory; what can be made beforehand is named."""
    from transformers import BitsAndBytesConfig

    wanted = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with pytest.raises(UnsupportedModelError, match="--method nf4"):
        peek(lambda: load(folder, quantization_config=wanted))


def test_how_a_checkpoint_was_quantised(folder: Path, tmp_path: Path) -> None:
    """Told where the model does not tell any more: it was unpacked to floats."""
    packed = fp8(tmp_path / "fp8")
    found = quantisation_of(packed, {})
    assert found["quant_method"] == "fp8"
    assert found["dequantize"]
    assert quantisation_of(folder, {}) is None
    assert quantisation_of(tmp_path / "nothing", {}) is None
    pending = peek(lambda: load(packed))
    assert pending is not None
    assert pending.quantised_by == "fp8"
