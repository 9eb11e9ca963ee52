"""What is kept of requests that have ended: who goes on with it, and how it goes."""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import pipeload
from pipeload.errors import OptionError
from pipeload.hf.cache_layers import cut_back, rotates_by_length
from pipeload.serving.prefixes import Prefixes
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.exact import prompt
from tests.support.models import load_plain, random_model, tiny_config
from tests.support.served import TEXT, served, wait_until
from tests.support.streaming import load_streamed, logits, session_of

if TYPE_CHECKING:
    from pathlib import Path

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
LARGE = 1 << 30


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(tiny_config("llama"), torch.float32, seed=3)


def asked(ids: torch.Tensor) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **GREEDY}


def run(model: Any, prefixes: Prefixes, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tokens of one request, and how many of its prompt were not computed."""
    arguments, cached = prefixes.lend(asked(ids))
    return prefixes.keep(model.generate(**arguments)), cached


def test_a_conversation_goes_on(model: Any) -> None:
    """As `generate` does that is given its own cache: to the last bit."""
    prefixes = Prefixes(model, LARGE)
    first, none = run(model, prefixes, prompt(length=20))
    assert none == 0
    assert prefixes.nbytes > 0
    more = torch.cat([first, prompt(length=5, seed=2)], dim=1)
    found, cached = run(model, prefixes, more)
    assert cached == first.shape[1] - 1
    alone = model.generate(**asked(prompt(length=20)), return_dict_in_generate=True)
    name = next(name for name in ("cache", "past_key_values") if name in alone)
    wanted = model.generate(**asked(more), **{name: alone[name]})
    assert torch.equal(found, wanted)


def test_a_beginning_in_common(model: Any) -> None:
    """Is kept, and the rest of what was computed goes; nobody else has it meanwhile."""
    prefixes = Prefixes(model, LARGE)
    run(model, prefixes, prompt(length=40))
    other = torch.cat([prompt(length=40)[:, :30], prompt(length=9, seed=3)], dim=1)
    arguments, cached = prefixes.lend(asked(other))
    assert cached == 30
    assert prefixes.lend(asked(other))[1] == 0
    assert prefixes.nbytes == 0
    alone = model.generate(**asked(other))
    assert torch.equal(prefixes.keep(model.generate(**arguments)), alone)
    assert run(model, prefixes, other)[1] == other.shape[1] - 1  # the last one is computed


def test_a_short_beginning_is_not_worth_it(model: Any) -> None:
    """Nor is one of another text."""
    prefixes = Prefixes(model, LARGE)
    run(model, prefixes, prompt(length=15))
    assert run(model, prefixes, prompt(length=15))[1] == 0
    assert run(model, prefixes, prompt(length=30, seed=5))[1] == 0


def test_how_much_is_kept(model: Any) -> None:
    """The oldest goes first, at once or when memory is asked back."""
    prefixes = Prefixes(model, LARGE)
    for seed in (1, 2, 3):
        run(model, prefixes, prompt(length=20, seed=seed))
    one = prefixes.nbytes // 3
    assert prefixes.give_back(1) == one
    assert prefixes.lend(asked(prompt(length=20, seed=1)))[1] == 0
    assert prefixes.lend(asked(prompt(length=20, seed=3)))[1] == 19
    assert prefixes.give_back(LARGE) == one
    assert prefixes.give_back(1) == prefixes.nbytes == 0
    small = Prefixes(model, one + 1)
    for seed in (1, 2):
        run(model, small, prompt(length=20, seed=seed))
    assert small.nbytes == one
    assert small.lend(asked(prompt(length=20, seed=2)))[1] == 19


def test_a_window_does_not_go_back() -> None:
    """It is taken as it is, or not at all."""
    config = tiny_config("mistral")
    model: Any = random_model(config, torch.float32, seed=3)
    prefixes = Prefixes(model, LARGE)
    first, _ = run(model, prefixes, prompt(length=30))
    assert run(model, prefixes, prompt(length=30))[1] == 0
    assert not cut_back(object(), 1)
    assert cut_back(object(), 0)
    again, _ = run(model, prefixes, prompt(length=30))
    assert torch.equal(first, again)
    assert run(model, prefixes, first)[1] == first.shape[1] - 1


def test_states_alone(model: Any) -> None:
    """Tell no length, and are not kept; nor does whatever else fails then spoil an answer."""
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=512, state_size=4, pad_token_id=0
    )
    mamba: Any = random_model(config, torch.float32, seed=3)
    prefixes = Prefixes(mamba, LARGE)
    found, _ = run(mamba, prefixes, prompt(length=20))
    assert torch.equal(found, mamba.generate(**asked(prompt(length=20))))
    assert prefixes.nbytes == 0
    kept = Prefixes(model, LARGE)
    output = model.generate(**asked(prompt(length=20)), return_dict_in_generate=True)
    output.past_key_values.layers.append(object())  # of which nothing can be told
    assert torch.equal(kept.keep(output), output.sequences)
    assert kept.nbytes == 0


@pytest.mark.parametrize("kind", ["longrope", "dynamic", "default"])
def test_where_keys_depend_on_the_length(kind: str) -> None:
    """Nothing can be kept: those of a longer text are rotated by other factors."""
    config = tiny_config("llama")
    ropes: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        factors = [1.0] * 8
        ropes |= {
            "short_factor": factors,
            "long_factor": [2.0 * factor for factor in factors],
            "original_max_position_embeddings": 16,
        }
    config.rope_parameters = {"a_kind": ropes} if kind == "dynamic" else ropes
    assert rotates_by_length(config) == (kind != "default")
    config.rope_parameters = ropes
    model: Any = random_model(config, torch.float32, seed=3)
    if kind == "default":
        assert Prefixes(model, LARGE).nbytes == 0
        return
    with pytest.raises(OptionError, match="of LlamaForCausalLM: it rotates keys by the length"):
        Prefixes(model, LARGE)


def test_a_model_without_a_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with one by a name that nobody knows."""
    monkeypatch.setattr(model, "forward", lambda input_ids: input_ids)
    with pytest.raises(OptionError, match=r"it takes no cache\. Leave that out\."):
        Prefixes(model, LARGE)


def test_they_are_the_first_to_go(tiny: Any) -> None:
    """Asked back where a pass would be refused, and not before."""
    model = load_streamed(tiny("llama"))
    account = session_of(model).governor.ledger.account
    given: list[int] = []

    def spare(nbytes: int) -> int:
        given.append(nbytes)
        return 0

    account.spare = spare
    try:
        logits(model)
        assert given == []
        with pytest.raises(pipeload.MemoryLimitError):
            model(torch.ones(64, 200, dtype=torch.long), use_cache=False)
        assert given[-1] > 0
        given.clear()
        # At the smallest limit only one of them has room at a time.
        many = [{"input_ids": prompt(), "max_new_tokens": 2, "do_sample": False}] * 2
        assert len(list(pipeload.generate_many(model, many, at_once=2))) == 2
        assert given
        account.spare = lambda nbytes: nbytes  # as if there were as much as is needed
        session_of(model).governor.make_room(1 << 40, "a.weight")
        account.spare = None
        with pytest.raises(pipeload.MemoryLimitError):
            session_of(model).governor.make_room(1 << 40, "a.weight")
    finally:
        account.spare = None


def test_what_fails_keeps_no_cache(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request that is over: its memory is there for the next one, without a collection."""
    with served(talker, prefix_bytes=LARGE) as running:
        prompt = {"prompt": "x" * 30}
        assert running.client.ask(TEXT, prompt).status == 200
        lent: list[weakref.ref[Any]] = []

        def fails(*, past_key_values: Any = None, cache: Any = None, **_others: Any) -> None:
            found = past_key_values or cache
            lent.append(weakref.ref(found))
            raise IndexError("made up")

        monkeypatch.setattr(running.model, "generate", fails)
        gc.collect()
        gc.disable()
        try:
            assert running.client.ask(TEXT, prompt).status == 500
            wait_until(lambda: not running.service.desk.running)
            wait_until(lambda: lent[0]() is None)
        finally:
            gc.enable()


def test_a_server_that_keeps_some(talker: Path) -> None:
    """Says how much of a prompt it did not compute, and keeps nothing at its end."""
    with served(talker, prefix_bytes=LARGE) as running:
        ask = running.client.ask
        first = ask(TEXT, {"prompt": "x" * 30, "max_tokens": 6})
        assert "prompt_tokens_details" not in first.body["usage"]
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)
        longer = {"prompt": "x" * 30 + "and", "max_tokens": 6, "stream": True}
        second = ask(TEXT, longer | {"stream_options": {"include_usage": True}})
        assert second.events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 30}
        plain = load_plain(talker)
        inputs = tokenizer(longer["prompt"], return_tensors="pt")
        wanted = plain.generate(**inputs, max_new_tokens=6, do_sample=False)[0, 33:]
        assert second.said == tokenizer.decode(wanted, skip_special_tokens=True)
        assert f"pipeload_prefix_bytes {float(running.service.desk.kept_bytes)}" in (
            ask("/metrics").text
        )
        several = ask(TEXT, {"prompt": "x" * 30, "n": 2, "seed": 1})
        assert several.status == 200
        account = session_of(running.model).governor.ledger.account
        assert account.spare is not None
    assert account.spare is None
