"""Ways in which scripts in the wild call `generate`: streamed as plain, by each way in."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.generation.streamers import BaseStreamer

from tests.support.exact import prompt
from tests.support.models import load_plain
from tests.support.streaming import WAIT_SECONDS, assert_nothing_held
from tests.support.users import WAYS, Pair, join, load_by, words

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
RECORDED: dict[str, Any] = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest, tiny: TinyCheckpoint) -> Pair:
    """One pair for all tests of a way: what one leaves behind shows in the next."""
    folder = tiny("llama")
    return Pair(load_plain(folder), load_by(request.param, folder))


# -- streamers -----------------------------------------------------------------------------------


def in_background(model: Any, **options: Any) -> threading.Thread:
    thread = threading.Thread(
        target=model.generate, args=(prompt(),), kwargs=GREEDY | options, daemon=True
    )
    thread.start()
    return thread


class Stop(StoppingCriteria):
    """A user who has seen enough."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, ids: torch.Tensor, scores: Any, **_options: Any) -> Any:
        return torch.full((ids.shape[0],), self.event.is_set())


def test_breaking_off_a_streamer(pair: Pair) -> None:
    """A reader that leaves in the middle ends the answer; the next question is answered whole."""

    def talk(model: Any) -> tuple[str, str]:
        stop = Stop()
        streamer = TextIteratorStreamer(words(), timeout=WAIT_SECONDS)
        thread = in_background(
            model, streamer=streamer, stopping_criteria=StoppingCriteriaList([stop])
        )
        begun = next(iter(streamer))
        stop.event.set()
        join(thread)
        streamer = TextIteratorStreamer(words(), skip_prompt=True, timeout=WAIT_SECONDS)
        thread = in_background(model, streamer=streamer)
        whole = "".join(streamer)
        join(thread)
        return begun, whole

    begun, whole = pair.check(talk)
    assert begun
    assert len(whole.split()) == 6


def test_a_streamer_that_raises(pair: Pair) -> None:
    """A connection that breaks raises out of `put`, in the middle of an answer."""

    class Broken(BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.flatten().tolist())
            if len(self.seen) == 4:
                raise BrokenPipeError("the reader is gone")

        def end(self) -> None:
            raise AssertionError("reached the end")

    def talk(model: Any) -> list[list[int]]:
        streamer = Broken()
        with pytest.raises(BrokenPipeError):
            model.generate(prompt(), streamer=streamer, **GREEDY)
        return [*streamer.seen, model.generate(prompt(), **GREEDY).tolist()[0]]

    pair.check(talk)


def test_two_streamers_at_once(pair: Pair) -> None:
    """Two answers that are read at the same time do not mix."""

    def talk(model: Any) -> list[str]:
        streamers = [TextIteratorStreamer(words(), timeout=WAIT_SECONDS) for _ in range(2)]
        threads = [
            threading.Thread(
                target=model.generate,
                args=(prompt(1, 9, seed=seed),),
                kwargs=GREEDY | {"streamer": streamer},
                daemon=True,
            )
            for seed, streamer in enumerate(streamers)
        ]
        for thread in threads:
            thread.start()
        texts = ["".join(streamer) for streamer in streamers]
        for thread in threads:
            join(thread)
        return texts

    first, second = pair.check(talk)
    assert first != second


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the library's own needs asyncio.timeout")
def test_async_streamer(pair: Pair) -> None:
    """A server that awaits the words while a worker thread of its own generates them."""

    async def answer(model: Any) -> list[str]:
        streamer = AsyncTextIteratorStreamer(words(), timeout=WAIT_SECONDS)
        work = asyncio.create_task(
            asyncio.to_thread(model.generate, prompt(), streamer=streamer, **GREEDY)
        )
        parts = [part async for part in streamer]
        await work
        return parts

    assert len(pair.check(lambda model: asyncio.run(answer(model)))) > 2


def test_printing_streamer(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that prints as it goes."""

    def printed(model: Any) -> str:
        model.generate(prompt(), streamer=TextStreamer(words()), **GREEDY)
        return capsys.readouterr().out

    assert pair.check(printed).startswith("w")


# -- what users put into generate ----------------------------------------------------------------


class Counting(StoppingCriteria):
    """Ends each row after as many tokens as the user gave it."""

    def __init__(self, model: Any, most: int) -> None:
        self.left = most
        self.model = model
        self.probes: list[torch.Tensor] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_options: Any) -> Any:
        self.left -= 1
        # A classifier of one's own looks at the answer so far with the same model.
        self.probes.append(self.model(ids[:, -3:]).logits[:, -1])
        return torch.full((ids.shape[0],), self.left == 0)


def test_a_criterion_that_runs_the_model(pair: Pair) -> None:
    """Called between passes, and starting one of its own."""

    def use(model: Any) -> list[torch.Tensor]:
        count = Counting(model, 3)
        tokens = model.generate(
            prompt(2), stopping_criteria=StoppingCriteriaList([count]), **GREEDY
        )
        return [tokens, *count.probes]

    assert pair.check(use)[0].shape == (2, 19 + 3)


class Favour(LogitsProcessor):
    """Adds what a guide says, and forbids a third of the words."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Guidance: what the model would say without the beginning.
        scores = scores - 0.5 * self.model(ids[:, 4:]).logits[:, -1]
        scores[:, ::3] = -torch.inf
        return scores


@pytest.mark.parametrize("sampled", [False, True])
def test_a_logits_processor_of_ones_own(pair: Pair, sampled: bool) -> None:
    """That runs the same model, too, inside `generate`."""

    def use(model: Any) -> Any:
        processors = LogitsProcessorList([Favour(model)])
        return model.generate(
            prompt(2), logits_processor=processors, **(GREEDY | {"do_sample": sampled} | RECORDED)
        )

    answers = pair.check(use).sequences[:, 19:]
    assert (answers % 3 != 0).all()


def test_guidance_of_the_library(pair: Pair) -> None:
    """Its own processor runs the model with a cache of its own between the passes."""
    pair.check(
        lambda model: model.generate(
            prompt(), guidance_scale=1.7, negative_prompt_ids=prompt(1, 6, seed=3), **GREEDY
        )
    )


@pytest.mark.parametrize("beams", [1, 3])
def test_allowed_tokens(pair: Pair, beams: int) -> None:
    """A grammar: after an even token an odd one."""

    def allowed(_row: int, ids: torch.Tensor) -> list[int]:
        return list(range(4 + int(ids[-1] + 1) % 2, 512, 2))

    answers = pair.check(
        lambda model: model.generate(
            prompt(2), prefix_allowed_tokens_fn=allowed, num_beams=beams, **GREEDY
        )
    )
    assert ((answers[:, 19:] + answers[:, 18:-1]) % 2 == 1).all()


# Name: options, beside those of greedy decoding.
OPTIONS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.2},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "several answers": {"do_sample": True, "num_return_sequences": 4, "min_p": 0.02},
    "typical": {"do_sample": True, "typical_p": 0.9, "eta_cutoff": 1e-4},
    "bad words": {"bad_words_ids": [[7], [8, 9]], "sequence_bias": [[[5], 2.0]]},
    "penalties": {"encoder_repetition_penalty": 1.4, "repetition_penalty": 0.8},
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 2},
    "static cache": {"cache_implementation": "static", "max_cache_len": 64},
    "dynamic cache": {"cache_implementation": "dynamic"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(pair: Pair, name: str) -> None:
    """Tokens, scores, logits and hidden states of every step."""
    rows = 1 if name == "prompt lookup" else 2
    options = GREEDY | RECORDED | OPTIONS[name]
    pair.check(lambda model: model.generate(prompt(rows), **options))


# -- threads -------------------------------------------------------------------------------------


def test_a_pool_of_threads(pair: Pair) -> None:
    """Four workers answer eight questions of different lengths with one model."""
    questions = [prompt(1 + seed % 3, 4 + seed, seed=seed) for seed in range(8)]

    def work(model: Any) -> list[torch.Tensor]:
        with ThreadPoolExecutor(4) as pool:
            answer = lambda ids: model.generate(ids, **GREEDY)  # noqa: E731
            return list(pool.map(answer, questions, timeout=WAIT_SECONDS))

    answers = pair.check(work)
    assert torch.equal(answers[3], pair.plain.generate(questions[3], **GREEDY))


def test_generate_and_score_at_once(pair: Pair) -> None:
    """One thread generates while another scores batches with the same model."""

    def work(model: Any) -> list[Any]:
        @torch.inference_mode()
        def score() -> list[torch.Tensor]:
            return [model(prompt(2, 6, seed=seed)).logits.clone() for seed in range(8)]

        with ThreadPoolExecutor(2) as pool:
            scores = pool.submit(score)
            tokens = pool.submit(model.generate, prompt(), **GREEDY)
            return [tokens.result(WAIT_SECONDS), *scores.result(WAIT_SECONDS)]

    pair.check(work)
    assert_nothing_held(pair.model)
