"""Scripts that never generate: scores, embeddings, labels, evaluation. Streamed as plain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import transformers
from torch.nn.functional import log_softmax, normalize
from transformers import AutoTokenizer, BertConfig, pipeline

from tests.support.exact import prompt
from tests.support.models import load_plain, randomize
from tests.support.users import WAYS, Pair, load_by, words

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
TEXTS = ["w17 w99 w300 w40", "w5 w6", "w7 w8 w9 w10 w11 w12 w13", "w100"]


@pytest.fixture(scope="module", params=WAYS)
def decoder(request: pytest.FixtureRequest, tiny: TinyCheckpoint) -> Pair:
    folder = tiny("llama")
    return Pair(load_plain(folder), load_by(request.param, folder))


class Encoders(NamedTuple):
    """Makes pairs of tiny BERTs, one for each kind of head."""

    folders: dict[str, Path]
    way: str

    def pair(self, head: str = "") -> Pair:
        auto_class = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
        folder = self.folders[head or "MaskedLM"]
        options = {} if head else {"add_pooling_layer": False}
        plain = auto_class.from_pretrained(folder, **options)
        return Pair(plain, load_by(self.way, folder, auto_class, **options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = BertConfig(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=64,
    )
    made = {}
    for head in HEADS:
        config.num_labels = 2 if head == "QuestionAnswering" else 3
        model = getattr(transformers, f"BertFor{head}")(config)
        randomize(model, seed=3)
        made[head] = tmp_path_factory.mktemp(head)
        model.save_pretrained(made[head])
    return made


@pytest.fixture(params=WAYS)
def encoders(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Encoders:
    return Encoders(folders, request.param)


# -- likelihoods, as evaluation harnesses compute them --------------------------------------------


class Request(NamedTuple):
    """What is given, and what is to be judged."""

    context: list[int]
    continuation: list[int]


def padded(rows: Sequence[Sequence[int]], side: str, pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask, `[rows, longest]`."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        place = slice(longest - len(tokens), None) if side == "left" else slice(len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    return ids, mask


@torch.no_grad()
def loglikelihoods(
    model: Any, requests: Sequence[Request], *, side: str, batch: int, pad: int = 0
) -> list[tuple[float, bool]]:
    """For each request the continuation's log-probability, and whether it is the greedy one."""
    order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i])))
    found: dict[int, tuple[float, bool]] = {}
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        rows = [requests[i].context + requests[i].continuation for i in part]
        ids, mask = padded([row[:-1] for row in rows], side, pad)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        scores = log_softmax(logits.float(), dim=-1)
        for row, index in enumerate(part):
            wanted = torch.tensor(requests[index].continuation)
            own = scores[row][mask[row].bool()][-len(wanted) :]
            chosen = own.gather(1, wanted[:, None])
            found[index] = (float(chosen.sum()), bool((own.argmax(-1) == wanted).all()))
    return [found[index] for index in range(len(requests))]


@pytest.mark.parametrize("side", ["left", "right"])
def test_loglikelihoods(decoder: Pair, side: str) -> None:
    """Batches of unequal length, the last one smaller than the others."""
    requests = [
        Request(prompt(1, 3 + 2 * n, seed=n)[0].tolist(), prompt(1, 1 + n % 3, seed=-n)[0].tolist())
        for n in range(7)
    ]
    scores = decoder.check(lambda model: loglikelihoods(model, requests, side=side, batch=3))
    assert len(set(scores)) == 7


def test_multiple_choice(smollm2_bf16: Path) -> None:
    """A real question: four answers, all in one batch; the model picks the same one."""
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_bf16)
    question = tokenizer("The capital of France is").input_ids
    answers = [" Paris", " London", " a town on the river Thames", " Rome, Italy"]
    requests = [Request(question, tokenizer(answer).input_ids) for answer in answers]
    pair = Pair(load_plain(smollm2_bf16), load_by("streaming", smollm2_bf16))
    scores = pair.check(
        lambda model: loglikelihoods(
            model, requests, side="left", batch=4, pad=tokenizer.pad_token_id
        )
    )
    assert max(scores) == scores[0]


def test_rolling_perplexity(decoder: Pair) -> None:
    """Windows with a stride, and the loss that the library computes from labels."""
    text = prompt(1, 50)

    @torch.inference_mode()
    def losses(model: Any) -> list[torch.Tensor]:
        found = []
        for begin in range(0, 40, 10):
            ids = text[:, begin : begin + 20]
            labels = ids.clone()
            labels[:, :5] = -100
            found.append(model(ids, labels=labels).loss)
        return found

    decoder.check(losses)


# -- encoders -------------------------------------------------------------------------------------


def test_sentence_embeddings(encoders: Encoders) -> None:
    """Mean pooling over what is not padding, of batches of unequal length."""
    tokenizer = words()

    @torch.no_grad()
    def embeddings(model: Any) -> torch.Tensor:
        inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
        states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        return normalize((states * mask).sum(1) / mask.sum(1), dim=1)

    found = encoders.pair().check(embeddings)
    assert (found @ found.T).fill_diagonal_(0).max() < 0.999


# Task: (head, options of the call).
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "feature-extraction": ("", {"return_tensors": True}),
    "fill-mask": ("MaskedLM", {"top_k": 4}),
    "text-classification": ("SequenceClassification", {"top_k": None}),
    "token-classification": ("TokenClassification", {"aggregation_strategy": "simple"}),
}


@pytest.mark.parametrize("task", TASKS)
def test_pipelines(encoders: Encoders, task: str) -> None:
    """The library's own pipelines: one text, a list, batches."""
    head, options = TASKS[task]
    make: Any = pipeline
    texts = [f"{text} [MASK]" for text in TEXTS] if task == "fill-mask" else TEXTS

    def use(model: Any) -> list[Any]:
        pipe = make(task, model=model, tokenizer=words(), device="cpu")
        return [pipe(texts[0], **options), pipe(texts, batch_size=3, **options)]

    one, several = encoders.pair(head).check(use)
    assert len(one) > 0
    assert len(several) == len(TEXTS)


def test_question_answering(encoders: Encoders) -> None:
    """Where an answer begins and ends, of pairs of texts."""

    @torch.no_grad()
    def use(model: Any) -> list[Any]:
        inputs = words()(TEXTS[::2], TEXTS[1::2], padding=True, return_tensors="pt")
        output = model(**inputs)
        ends = [output.start_logits.argmax(-1), output.end_logits.argmax(-1)]
        return [output.start_logits, output.end_logits, *ends]

    encoders.pair("QuestionAnswering").check(use)


def test_reranking(encoders: Encoders) -> None:
    """Pairs of question and passage, scored under inference mode and sorted."""

    @torch.inference_mode()
    def use(model: Any) -> list[Any]:
        inputs = words()([TEXTS[0]] * 3, TEXTS[1:], padding=True, return_tensors="pt")
        scores = model(**inputs).logits[:, 0]
        return [scores.clone(), scores.argsort().tolist()]

    encoders.pair("SequenceClassification").check(use)


def test_features_of_a_decoder(tiny: TinyCheckpoint) -> None:
    """A decoder without its head, as embedding models are."""
    folder = tiny("qwen3", "bf16")
    pair = Pair(
        transformers.AutoModel.from_pretrained(folder, dtype="auto"),
        load_by("streaming", folder, transformers.AutoModel),
    )

    def use(model: Any) -> Any:
        pipe: Any = pipeline("feature-extraction", model=model, tokenizer=words(), device="cpu")
        return pipe(TEXTS, batch_size=2, return_tensors=True)

    pair.check(use)
