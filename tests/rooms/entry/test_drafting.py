"""`from_pretrained(draft=...)`: `generate` as ever, in fewer passes, as long as that pays."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import logging
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import transformers
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

import pipeload
from pipeload.budget.pass_shape import largest
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from pipeload.checkpoint.fingerprint import SOURCE_DIGEST
from pipeload.entry import draft_search, drafting
from pipeload.entry.attached_draft import attach_draft
from pipeload.entry.draft_control import DraftControl
from pipeload.errors import CheckpointError, MemoryLimitError, OptionError
from pipeload.hf import assisted
from tests.support.commands import save_tokenizer
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.streaming import smallest_limit, steady_floor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPARE = 1_200_000
"""Bytes over the smallest limit: not for the whole model, but for a copy of it."""
NEW = 24
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
PROMPT = torch.arange(5, 24)[None]


class Steady(DraftControl):
    """Three guesses for each pass after the second, whatever the clock says."""

    pays = True

    def promises(self, *_figures: float) -> bool:
        return True

    def count(self, room: int) -> int:
        return max(0, min(3, room))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its copy, and a copy of another one that is said to be larger."""
    folder = tmp_path_factory.mktemp("shelf")
    save_random("llama", folder / "model", "fp32", seed=3)
    pipeload.quantize(folder / "model", folder / "copy", method="int8")
    other = save_random("llama", folder / "aside" / "other", "fp32", seed=4)
    pipeload.quantize(other, folder / "a-copy-of-another", method="int8")
    return folder


@pytest.fixture(scope="module")
def plain_model(shelf: Path) -> Any:
    return load_plain(shelf / "model")


@pytest.fixture(autouse=True)
def nobody_else(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process seems to hold what was planned for it, and no model of other tests."""
    gc.collect()
    ACCOUNTANT.forget_all()
    monkeypatch.setattr(Accountant, "other_bytes", lambda _self: 0)
    with steady_floor():
        yield
    ACCOUNTANT.forget_all()


@pytest.fixture
def steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "DraftControl", Steady)


def load(shelf: Path, draft: object, **options: Any) -> Any:
    folder = shelf / "model"
    limit = smallest_limit(folder) + SPARE
    settings = {"dtype": "auto", "memory_limit": limit, "draft": draft, **options}
    return pipeload.from_pretrained(folder, **settings)


def counted(model: Any, **options: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and the passes of the model that it took."""
    before = model.pipeload.stats().passes
    ids = model.generate(PROMPT, **{**GREEDY, **options})
    return ids[0].tolist(), model.pipeload.stats().passes - before


# -- finding one ---------------------------------------------------------------------------------


def test_a_copy_is_found_by_what_it_was_made_of(shelf: Path) -> None:
    """Not by its name: one that names another digest is not taken."""
    model = load(shelf, None)
    files = model.pipeload.session.files
    assert draft_search.find_own_copy(shelf / "model", files) == shelf / "copy"
    told = json.loads((shelf / "copy" / "config.json").read_text())
    assert len(told[SOURCE_DIGEST]) == 64


def test_a_wrong_digest(shelf: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then none is found, which is said with the command that makes one; the model answers."""
    shutil.copytree(shelf / "model", tmp_path / "model")
    shutil.copytree(shelf / "a-copy-of-another", tmp_path / "copy")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    caplog.set_level(logging.INFO, "pipeload")
    model = load(tmp_path, "auto")
    assert f"pipeload quantize {tmp_path / 'model'} model-draft" in caplog.text
    assert counted(model)[1] == NEW
    assert "generate" not in vars(model)


def test_the_smallest_copy_in_the_cache(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several, in the folder that pipeload keeps models in."""
    cache = tmp_path / "pipeload"
    shutil.copytree(shelf / "copy", cache / "small")
    shutil.copytree(shelf / "copy", cache / "large")
    shutil.copy(cache / "large" / "model.safetensors", cache / "large" / "more.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = load(shelf, None)
    files = model.pipeload.session.files
    assert draft_search.find_own_copy("some/model", files) == cache / "small"


# -- generating ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("steadily")
def test_as_the_library_with_the_same_draft(shelf: Path) -> None:
    """Greedy or sampled, equal to plain assisted generation with as many guesses."""
    model = load(shelf, "auto")
    counted(model)  # the draft is there after that
    plain, draft = load_plain(shelf / "model"), load_plain(shelf / "copy")
    draft.generation_config.num_assistant_tokens = 3
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    calls: list[int] = []
    plain.register_forward_hook(lambda *_: calls.append(1))
    for options in ({}, {"do_sample": True, "temperature": 1.3, "top_k": 20}):
        calls.clear()
        torch.manual_seed(5)
        wanted = plain.generate(PROMPT, assistant_model=draft, **{**GREEDY, **options})
        torch.manual_seed(5)
        got, passes = counted(model, **options)
        assert got == wanted[0].tolist()
        assert passes == len(calls)
    assert len(ACCOUNTANT.clients) == 2


@pytest.mark.usefixtures("steadily")
def test_a_draft_that_comes_in_the_middle(
    shelf: Path, plain_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """After two passes; mask and positions are those of the text by then."""
    caplog.set_level(logging.INFO, "pipeload")
    model, plain = load(shelf, shelf / "copy"), plain_model
    mask = torch.ones_like(PROMPT)
    wanted = plain.generate(PROMPT, attention_mask=mask, **GREEDY)[0].tolist()
    got, passes = counted(model, attention_mask=mask)
    assert got == wanted
    assert 3 < passes < NEW
    assert "in memory" in caplog.text
    assert counted(model)[0] == wanted  # it is there from the beginning now
    governors = ACCOUNTANT.clients
    draft = next(one for one in governors if one is not model.pipeload.session.governor)
    assert draft.budget >= draft.wants[1]  # all of it is held


@pytest.mark.usefixtures("steadily")
def test_lookup(shelf: Path, plain_model: Any) -> None:
    """Tokens that followed the latest ones before; the same answer."""
    model, plain = load(shelf, "lookup"), plain_model
    assert inspect.signature(model.generate) == inspect.signature(plain.generate)
    ids = PROMPT.repeat(1, 3)
    assert torch.equal(model.generate(ids, **GREEDY), plain.generate(ids, **GREEDY))
    assert len(ACCOUNTANT.clients) == 1


class _Stop(StoppingCriteria):
    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"stopping_criteria": StoppingCriteriaList([_Stop()])},
        {"prompt_lookup_num_tokens": 3},
        {"guidance_scale": 1.5},
        {"prefill_chunk_size": 4},
        {"assistant_ensemble_weight": 0.5},
        {"watermarking_config": {"bias": 2.0}},
        {"assistant_tokenizer": object()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_is_left_to_the_library(plain_model: Any, options: dict[str, Any]) -> None:
    """Ways to generate that guesses do not fit, or that say themselves who guesses."""
    assert assisted.hindrance(plain_model, (PROMPT,), {**GREEDY, **options})


def test_what_is_not_one_prompt(plain_model: Any) -> None:
    """Batches, embeddings, and arguments that only a caller of that version knows the place of."""
    model = plain_model
    assert not assisted.hindrance(model, (PROMPT,), GREEDY)
    assert assisted.hindrance(model, (PROMPT.repeat(2, 1),), GREEDY)
    assert assisted.hindrance(model, (), {"inputs_embeds": torch.ones(1, 2, 96)})
    assert assisted.hindrance(model, (PROMPT, None, None), GREEDY)


@pytest.mark.usefixtures("steadily")
def test_a_named_assistant_goes_before(
    shelf: Path, plain_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one `generate` at a time is guessed for; requests that share readings are not."""
    model, plain = load(shelf, shelf / "copy"), plain_model
    monkeypatch.setattr(assisted, "assist", None)  # not to be called
    wanted = counted(model, assistant_model=plain)[0]
    with _course_of(model).busy:
        assert counted(model)[0] == wanted
    (_, many), *_ = pipeload.generate_many(model, [{"input_ids": PROMPT, **GREEDY}])
    assert many[0].tolist() == wanted


def _course_of(model: Any) -> Any:
    cells = vars(model)["generate"].__closure__
    return next(c.cell_contents for c in cells if isinstance(c.cell_contents, drafting.Drafting))


# -- giving up -----------------------------------------------------------------------------------


class _Clock:
    """A second passes each time it is asked."""

    def __init__(self) -> None:
        self.perf_counter = itertools.count(1.0).__next__


def test_given_up_where_guesses_are_wrong(
    shelf: Path,
    plain_model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A draft of random weights goes in the middle of an answer, and its memory is the model's."""
    caplog.set_level(logging.INFO, "pipeload")
    monkeypatch.setattr(assisted, "time", _Clock())
    save_random(tiny_config("llama", num_hidden_layers=1), tmp_path / "wrong", "fp32", seed=9)
    model, plain = load(shelf, tmp_path / "wrong"), plain_model
    governor = model.pipeload.session.governor
    alone = governor.budget
    seen = []
    watch = model.register_forward_hook(lambda *_: seen.append(governor.budget))
    wanted = plain.generate(PROMPT, **{**GREEDY, "max_new_tokens": 60})[0].tolist()
    assert counted(model, max_new_tokens=60)[0] == wanted
    watch.remove()
    assert "is given up" in caplog.text
    assert min(seen) < alone  # it was there
    gc.collect()
    assert len(ACCOUNTANT.clients) == 1
    assert governor.budget == alone
    assert counted(model) == (wanted[: PROMPT.shape[1] + NEW], NEW)


@pytest.mark.parametrize("why", ["whole", "large", "fast", "late"])
def test_never_loaded(
    shelf: Path,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where all fits, the draft does not, passes do not wait, or little is to come."""
    caplog.set_level(logging.INFO, "pipeload")
    monkeypatch.setattr(drafting.Drafting, "_loaded", None)  # not to be called
    options: dict[str, Any] = {}
    if why == "whole":
        options["memory_limit"] = smallest_limit(shelf / "model") + 100_000_000
    elif why == "large":
        options["memory_limit"] = smallest_limit(shelf / "model") + 100_000
    elif why == "fast":
        monkeypatch.setattr(DraftControl, "promises", lambda *_figures: False)
    new = 12 if why == "late" else NEW
    model = load(shelf, shelf / "copy", **options)
    assert counted(model, max_new_tokens=new)[1] == new
    told = {"whole": "the whole model fits", "large": "the limit leaves"}
    assert told.get(why, "") in caplog.text


@pytest.mark.parametrize("broken", [True, False])
def test_a_draft_that_cannot_be_loaded(
    shelf: Path,
    broken: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer goes on without: also where it turns out to be larger than it looked."""
    caplog.set_level(logging.INFO, "pipeload")
    monkeypatch.setattr(drafting, "DraftControl", Steady)
    folder = shelf / "copy"
    if broken:
        monkeypatch.setattr(drafting.Drafting, "_loaded", lambda _self: 1 / 0)
    else:
        monkeypatch.setattr(drafting, "held_bytes", lambda _folder: 0)
        folder = shelf / "model"
    model = load(shelf, folder)
    assert counted(model)[1] == NEW
    assert ("division by zero" if broken else "does not fit") in caplog.text
    gc.collect()
    assert len(ACCOUNTANT.clients) == 1


@pytest.mark.usefixtures("steadily")
def test_the_plain_model_has_none(shelf: Path) -> None:
    """`remove` takes it off and frees it; whoever has kept the method is told."""
    model = load(shelf, shelf / "copy")
    wanted, _ = counted(model)
    kept = model.generate, model._get_candidate_generator
    model.pipeload.remove()
    assert not {"generate", "_get_candidate_generator"} & vars(model).keys()
    assert model.generate(PROMPT, **GREEDY)[0].tolist() == wanted
    gc.collect()
    assert ACCOUNTANT.clients == []
    del model
    gc.collect()
    for method in kept:
        with pytest.raises(ReferenceError, match="gone"):
            method()


# -- what must not change an answer --------------------------------------------------------------


WHOLE: dict[str, Any] = {"return_dict_in_generate": True, **GREEDY}


@pytest.mark.usefixtures("steadily")
def test_a_cache_that_holds_something(shelf: Path, plain_model: Any) -> None:
    """The turn is the plain model's: on top of such a cache, nothing is guessed."""
    model = load(shelf, "lookup")
    first = model.generate(PROMPT.repeat(1, 3), **WHOLE)
    ids = torch.cat([first.sequences, PROMPT], dim=1)
    held = first.cache.get_seq_length()
    assert held >= first.sequences.shape[1] - 1
    assert assisted.hindrance(model, (ids,), {**WHOLE, "cache": first.cache})
    second = model.generate(ids, cache=first.cache, **WHOLE)
    assert second.sequences.tolist() == plain_model.generate(ids, **GREEDY).tolist()
    assert second.cache.get_seq_length() == second.sequences.shape[1] - 1


@pytest.mark.usefixtures("steadily")
def test_a_prompt_that_fits_without_the_draft_alone(
    shelf: Path, plain_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft makes way for it, and comes back for a shorter one."""
    caplog.set_level(logging.INFO, "pipeload")
    model = load(shelf, shelf / "copy")
    governor = model.pipeload.session.governor

    def fits(tokens: int) -> bool:
        ids, cache = torch.zeros((1, tokens), dtype=torch.long), DynamicCache(config=model.config)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": ids + 1, "position_ids": ids}
        given |= {"cache": cache, "logits_to_keep": 1, "use_cache": True}
        return governor.pass_bytes((), given) is not None

    counted(model)
    course = _course_of(model)
    beside = course.assistant.pipeload.session.governor
    whole = beside.budget
    assert beside.shrink(0)
    tokens = 1 + largest(fits, most=100_000)  # not even beside a draft that holds its least
    assert beside.shrink(whole)
    del beside
    long = 5 + torch.arange(tokens)[None] % 500
    short: dict[str, Any] = {**GREEDY, "max_new_tokens": 2}
    got = model.generate(long, **short)
    assert torch.equal(got, plain_model.generate(long, **short))
    assert f"makes way: a pass after {tokens} tokens does not fit" in caplog.text
    assert course.assistant is None
    assert counted(model)[1] < NEW
    assert course.assistant is not None
    # Also where nothing would be guessed, and before a call that is never assisted.
    one: dict[str, Any] = {**GREEDY, "max_new_tokens": 1}
    assert torch.equal(model.generate(long, **one), plain_model.generate(long, **one))
    assert course.assistant is None
    assert counted(model)[1] < NEW
    assert course.assistant is not None
    beams: dict[str, Any] = {**short, "num_beams": 2}
    assert torch.equal(model.generate(PROMPT, **beams), plain_model.generate(PROMPT, **beams))
    assert course.assistant is None


@pytest.mark.parametrize("where", ["pass", "making", "memory"])
@pytest.mark.usefixtures("steadily")
def test_an_error_inside_the_draft(
    shelf: Path,
    plain_model: Any,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The answer goes on without it; one warning says why."""
    caplog.set_level(logging.INFO, "pipeload")
    model = load(shelf, shelf / "copy")
    wanted = counted(model)[0]
    course = _course_of(model)
    if where == "making":
        monkeypatch.setattr(type(model), "_get_candidate_generator", lambda *_a, **_o: 1 / 0)
    else:
        wrong = {"pass": ValueError("of the draft"), "memory": _none_left()}

        def fail(*_inputs: object) -> None:
            raise wrong[where]

        course.assistant.register_forward_pre_hook(fail)
    assert counted(model) == (wanted, NEW)
    assert course.assistant is None
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == (where != "memory")
    assert all("the answer goes on" in one.getMessage() for one in warned)
    assert course.given_up == (where != "memory")
    gc.collect()
    assert len(ACCOUNTANT.clients) == 1
    assert wanted == plain_model.generate(PROMPT, **GREEDY)[0].tolist()


@pytest.mark.usefixtures("steadily")
def test_a_lookup_that_does_not_fit(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no more rows than one are asked of a pass, and none are looked up."""
    model = load(shelf, "lookup")
    monkeypatch.setattr(drafting.Drafting, "fits", lambda *_: False)
    ids, before = PROMPT.repeat(1, 3), model.pipeload.stats().passes
    model.generate(ids, **GREEDY)
    assert model.pipeload.stats().passes - before == NEW
    assert not _course_of(model).given_up


@pytest.mark.usefixtures("steadily")
def test_the_cache_of_a_window(tmp_path: Path) -> None:
    """After an assisted answer it drops what is behind the window, as the plain model's."""
    save_random(tiny_config("mistral", sliding_window=8), tmp_path / "model", "fp32", seed=3)
    model, plain = (
        load(tmp_path, "lookup", memory_limit=_room(tmp_path)),
        load_plain(tmp_path / "model"),
    )
    ids = PROMPT.repeat(1, 3)
    answers = [one.generate(ids, **WHOLE) for one in (model, plain)]
    assert answers[0].sequences.tolist() == answers[1].sequences.tolist()
    long = torch.cat([answers[0].sequences, ids], dim=1)
    caches = [
        one.generate(long, cache=a.cache, **WHOLE).cache
        for one, a in zip((model, plain), answers, strict=True)
    ]
    assert caches[0].layers[0].keys.shape == caches[1].layers[0].keys.shape
    assert not any(layer.record_past for layer in answers[0].cache.layers)


def _none_left() -> MemoryLimitError:
    return MemoryLimitError("none is left", limit=1, smallest_limit=2)


def _room(folder: Path) -> int:
    return smallest_limit(folder / "model") + SPARE // 2


# -- coming and going ----------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["auto", "named"])
@pytest.mark.usefixtures("steadily")
def test_a_copy_that_is_unknown(
    shelf: Path, tmp_path: Path, draft: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is found is passed over; one that was named, and broke later, is warned of."""
    caplog.set_level(logging.INFO, "pipeload")
    for name in ("model", "copy"):
        shutil.copytree(shelf / name, tmp_path / name)
    config = tmp_path / "copy" / "config.json"
    told = json.loads(config.read_text()) | {"model_type": "of_another_library"}
    if draft == "auto":
        config.write_text(json.dumps(told))
        model = load(tmp_path, "auto")
        assert "generate" not in vars(model)
    else:
        model = load(tmp_path, tmp_path / "copy")
        config.write_text(json.dumps(told))
    assert counted(model)[1] == NEW
    levels = [one.levelname for one in caplog.records if "no drafts by" in one.getMessage()]
    assert levels == ([] if draft == "auto" else ["WARNING"])


@pytest.mark.usefixtures("steadily")
def test_passing_reasons(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another thread's pass runs, or this text leaves no room, the draft comes later."""
    model = load(shelf, shelf / "copy")
    course, governor = _course_of(model), model.pipeload.session.governor
    with monkeypatch.context() as held:
        held.setattr(type(governor), "shrink", lambda *_: False)
        assert counted(model)[1] == NEW
    wide = governor.budget
    governor.shrink(governor.wants[0])
    course.begin(NEW, PROMPT.shape[1])
    assert course.assistant is None
    assert not course.given_up
    governor.shrink(wide)
    assert counted(model)[1] < NEW
    assert course.assistant is not None


@pytest.mark.usefixtures("steadily")
def test_an_interrupt_while_it_is_loaded(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the answer; what there was of a draft goes, and one comes with the next answer."""
    model = load(shelf, shelf / "copy")
    loaded = drafting.Drafting._loaded

    def interrupted(course: Any) -> Any:
        draft = loaded(course)
        assert draft is not None
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(drafting.Drafting, "_loaded", interrupted)
        with pytest.raises(KeyboardInterrupt):
            counted(model)
    assert counted(model)[1] < NEW
    assert len(ACCOUNTANT.clients) == 2


@pytest.mark.usefixtures("steadily")
def test_why_nothing_is_guessed(shelf: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Is said once for each reason."""
    caplog.set_level(logging.INFO, "pipeload")
    model = load(shelf, "lookup")
    for _ in range(2):
        counted(model, stopping_criteria=StoppingCriteriaList([_Stop()]), max_new_tokens=1)
    said = [one.getMessage() for one in caplog.records if "nothing is guessed for" in one.msg]
    assert len(said) == 1
    assert "criteria of the caller's" in said[0]


def test_states_that_cannot_be_cut_back() -> None:
    """Linear attention keeps one state, which a wrong guess has changed."""
    config = tiny_config("llama")
    config.layer_types = ["linear_attention", "full_attention"]
    model: Any = SimpleNamespace(config=config)
    assert "linear_attention" in assisted.hindrance(model, (PROMPT,), GREEDY)


# -- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": 3}, "draft=3 means nothing. Give 'auto', 'lookup', 'off'"),
        ({"draft": ""}, "means nothing"),
        ({"draft": "auto", "ranks": 2}, "goes with no ranks="),
        ({"draft": "lookup", "auto_class": transformers.AutoModel}, "does not. Leave it out"),
    ],
)
def test_what_means_nothing(shelf: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load(shelf, **options)
    assert ACCOUNTANT.clients == []


def test_no_decoder(shelf: Path) -> None:
    """A model with an encoder is refused when it is loaded, not left without a word."""
    model, request = load(shelf, None), SimpleNamespace(draft="lookup")
    model.config.is_encoder_decoder = True
    with pytest.raises(OptionError, match="has an encoder"):
        attach_draft(model, shelf / "model", cast("Any", request), {})
    assert ACCOUNTANT.clients == []


def test_a_plan_has_no_draft(shelf: Path) -> None:
    """Arguments of `from_pretrained` are taken, and the plan is that of the model alone."""
    limit = smallest_limit(shelf / "model") + SPARE
    folder = shelf / "model"
    plans = [
        pipeload.plan(folder, memory_limit=limit, dtype="auto", draft=draft)
        for draft in ("auto", None)
    ]
    assert plans[0] == plans[1]
    least = [pipeload.smallest_limit(folder, dtype="auto", draft=d) for d in ("lookup", None)]
    assert least[0] == least[1]
    with pytest.raises(OptionError, match="means nothing"):
        pipeload.plan(folder, memory_limit=limit, draft=3)  # type: ignore[arg-type]


def test_the_tokenizer_of_a_subfolder(shelf: Path, tmp_path: Path) -> None:
    """The model's own words are compared, not those of another folder that it is in."""
    shutil.copytree(shelf / "model", tmp_path / "model" / "inner")
    save_tokenizer(tmp_path / "model" / "inner")
    save_random(tiny_config("llama", vocab_size=512), tmp_path / "draft", "fp32", seed=1)
    save_tokenizer(tmp_path / "draft", reverse=True)
    limit = smallest_limit(shelf / "model") + SPARE
    draft, folder = tmp_path / "draft", tmp_path / "model"
    with pytest.raises(OptionError, match="has other tokens than"):
        pipeload.from_pretrained(folder, memory_limit=limit, draft=draft, subfolder="inner")


@pytest.mark.parametrize("tokenizer", [False, True])
def test_other_tokens(shelf: Path, tmp_path: Path, tokenizer: bool) -> None:
    """By their number, or by what they stand for."""
    shutil.copytree(shelf / "model", tmp_path / "model")
    words = 512 if tokenizer else 400
    save_random(tiny_config("llama", vocab_size=words), tmp_path / "draft", "fp32", seed=1)
    if tokenizer:
        save_tokenizer(tmp_path / "model")
        save_tokenizer(tmp_path / "draft", reverse=True)
    with pytest.raises(OptionError, match="has other tokens than"):
        load(tmp_path, tmp_path / "draft")


def test_no_model(shelf: Path, tmp_path: Path) -> None:
    """It is refused when the model is loaded, not when it answers."""
    shutil.copytree(shelf / "copy", tmp_path / "draft")
    (tmp_path / "draft" / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load(shelf, tmp_path / "draft")
    with pytest.raises(CheckpointError):
        load(shelf, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's own `generate` calls the model's."""
    peft = pytest.importorskip("peft")
    model = load(shelf, "lookup")
    begun: list[int] = []

    def begin(room: int, _tokens: int) -> int:
        begun.append(room)
        return 0

    monkeypatch.setattr(_course_of(model), "begin", begin)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    adapted.generate(input_ids=PROMPT, **GREEDY)
    assert len(begun) == NEW
