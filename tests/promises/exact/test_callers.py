"""Other ways to run a model than `generate` in one thread: equal output, bit for bit."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    ContinuousBatchingConfig,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    pipeline,
)

from tests.support.exact import (
    assert_same,
    assert_streamed,
    load_smallest,
    prompt,
    steady_floor,
    step_logits,
)
from tests.support.models import load_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each token of the tiny models."""
    inner = Tokenizer(WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", pad_token="w0", bos_token="w1", eos_token="w2"
    )


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Run all at once, each in a thread of its own; their results, or the first error."""
    results: list[Any] = [None] * len(works)
    together = threading.Barrier(len(works))

    def run(index: int) -> None:
        together.wait()
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.mark.parametrize("threads", [2, 4])
def test_threads_at_once(tiny: TinyCheckpoint, threads: int) -> None:
    """Threads that generate on one model at once get what each gets on a plain one alone."""
    folder = tiny("llama", "fp32")
    prompts = [prompt(1 + row % 2, 7 + row, seed=row) for row in range(threads)]
    plain = load_plain(folder)
    wanted = [plain.generate(ids, **GREEDY) for ids in prompts]
    model = load_smallest(folder)

    def work(ids: torch.Tensor) -> Callable[[], Any]:
        return lambda: model.generate(ids, **GREEDY)

    assert_same(in_threads(*(work(ids) for ids in prompts)), wanted)
    assert_streamed(model)


def test_two_models_in_two_threads(tiny: TinyCheckpoint) -> None:
    """Two streamed models do not disturb each other."""
    first, second = tiny("llama", "fp32"), tiny("qwen3", "bf16")
    wanted = [step_logits(load_plain(folder), prompt(), 6) for folder in (first, second)]
    one, two = load_smallest(first), load_smallest(second)
    got = in_threads(lambda: step_logits(one, prompt(), 6), lambda: step_logits(two, prompt(), 6))
    assert_same(got, wanted)
    assert_streamed(one)
    assert_streamed(two)


def test_continuous_batching(tiny: TinyCheckpoint) -> None:
    """`generate_batch`, which has a thread of its own, gives equal tokens for each prompt."""
    folder = tiny("llama", "fp32")
    prompts = [prompt(1, length, seed=length)[0].tolist() for length in (5, 17, 9)]

    def tokens(model: Any) -> list[list[int]]:
        model.generation_config.do_sample = False
        # Without sizes, the library takes nine tenths of the free memory for its cache.
        sizes = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        answers = model.generate_batch(prompts, continuous_batching_config=sizes, max_new_tokens=8)
        return [answer.generated_tokens for answer in answers.values()]

    wanted = tokens(load_plain(folder))
    assert [len(answer) for answer in wanted] == [8, 8, 8]
    model = load_smallest(folder)
    assert tokens(model) == wanted
    assert_streamed(model)


def test_text_streamer(tiny: TinyCheckpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    """A streamer that is read while a thread generates yields the plain model's words."""
    folder = tiny("llama", "bf16")

    def words(model: Any) -> str:
        streamer = TextIteratorStreamer(tokenizer, timeout=60)
        thread = threading.Thread(
            target=model.generate, args=(prompt(),), kwargs=GREEDY | {"streamer": streamer}
        )
        thread.start()
        text = "".join(streamer)
        thread.join(60)
        return text

    model = load_smallest(folder)
    assert words(model) == words(load_plain(folder)) != ""
    assert_streamed(model)


def test_pipeline(tiny: TinyCheckpoint, tokenizer: PreTrainedTokenizerFast) -> None:
    """A text-generation pipeline made of the streamed model writes the plain model's text."""
    folder = tiny("llama", "bf16")
    texts = ["w17 w99 w300 w4", "w5 w6"]

    def written(model: Any) -> list[Any]:
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        answers = [generator(text, **GREEDY) for text in texts]
        return [*answers, generator(texts, batch_size=2, **GREEDY)]

    model = load_smallest(folder)
    assert written(model) == written(load_plain(folder))
    assert_streamed(model)


def test_block_by_itself(tiny: TinyCheckpoint) -> None:
    """A block called outside any pass, before the first and between two, has its weights."""
    folder = tiny("llama", "fp32")
    model, plain = load_smallest(folder), load_plain(folder)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn((1, 5, 96), generator=generator)

    @torch.no_grad()
    def block(owner: Any, layer: int) -> Any:
        angles = owner.model.rotary_emb(hidden, torch.arange(5)[None])
        return owner.model.layers[layer](hidden, position_embeddings=angles)

    for layer in (2, 5, 2, 2, 0):
        assert_same(block(model, layer), block(plain, layer), f"layer {layer}")
    assert_same(step_logits(model, prompt(), 3), step_logits(plain, prompt(), 3))
    assert_same(block(model, 4), block(plain, 4))
    assert_same(step_logits(model, prompt(), 1), step_logits(plain, prompt(), 1))


def test_base_model_by_itself(tiny: TinyCheckpoint) -> None:
    """A pass may begin at the inner model, without the head."""
    folder = tiny("llama", "fp32")
    model, plain = load_smallest(folder), load_plain(folder)
    with torch.no_grad():
        for _ in range(2):
            wanted = plain.model(prompt(2)).last_hidden_state
            assert_same(model.model(prompt(2)).last_hidden_state, wanted)
        assert_same(model(prompt()).logits, plain(prompt()).logits)
    assert_streamed(model)


def test_hooks_of_the_user(tiny: TinyCheckpoint) -> None:
    """A forward hook on a block sees what it sees on the plain model."""
    folder = tiny("llama", "fp32")

    def seen(model: Any) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            for layer in model.model.layers
        ]
        step_logits(model, prompt(), 2)
        for hook in hooks:
            hook.remove()
        return outputs

    model = load_smallest(folder)
    assert_same(seen(model), seen(load_plain(folder)))
    assert_streamed(model)


def test_slow_computing(tiny: TinyCheckpoint) -> None:
    """However far the readers could run ahead, a weight in use is the file's for as long."""
    folder = tiny("llama", "bf16")
    plain, model = load_plain(folder), load_smallest(folder)
    compared: list[str] = []

    def compare(name: str, linear: torch.nn.Linear) -> None:
        wanted = plain.get_parameter(f"{name}.weight")
        if linear.weight.shape == wanted.shape:  # else it runs in ranges of rows
            assert torch.equal(linear.weight, wanted), name
            time.sleep(0.01)  # the readers have all the time that they want
            assert torch.equal(linear.weight, wanted), name
            compared.append(name)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda linear, _, name=name: compare(name, linear))
    wanted = step_logits(plain, prompt(), 2)
    assert_same(step_logits(model, prompt(), 2), wanted)
    assert_streamed(model)
    layers = {name.split(".")[2] for name in compared if ".layers." in name}
    assert len(layers) == len(model.model.layers)
