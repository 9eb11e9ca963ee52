"""Requests that share each reading of the weights have the bits of a run alone."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

import pipeload
from pipeload.budget import cut as budget_cut
from pipeload.budget import passes_in_turns
from pipeload.budget.governor import Governor
from pipeload.budget.pass_needs import PassNeeds
from pipeload.engine import convoy as engine_convoy
from pipeload.engine.convoy_members import Member
from pipeload.engine.passes import Passes
from pipeload.engine.replan import Replan
from pipeload.errors import MemoryLimitError, OptionError, ReadError, UnsupportedOperationError
from tests.promises.exact.test_generation import MODES, RECORDED
from tests.support.exact import (
    ROOMY,
    assert_same,
    load,
    load_smallest,
    prompt,
    smallest_limit,
    steady_floor,
)
from tests.support.models import load_plain
from tests.support.streaming import (
    assert_nothing_held,
    in_thread,
    logits,
    our_threads_of_passes,
    session_of,
    wait_for_threads,
)
from tests.support.sweeps import few

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

LATEST = 30
"""Seconds after which a thread is stuck."""


SOME = ("greedy", "sampling", "beam search", "static cache", "prompt lookup", "hidden states")


def requests(modes: Iterable[str] = SOME) -> list[dict[str, Any]]:
    """One of each mode of `generate`, with prompts and answers of many lengths."""
    made = []
    for number, (rows, options) in enumerate(MODES[mode] for mode in modes):
        ids = prompt(rows, 5 + 2 * number, seed=number)
        longest = {"max_new_tokens": 4 + number % 3}
        if "min_new_tokens" in options:
            longest["min_new_tokens"] = longest["max_new_tokens"]
        made.append({"input_ids": ids, "seed": number, **RECORDED, **options, **longest})
    return made


def alone(model: Any, request: dict[str, Any]) -> Any:
    """What a request gives that runs by itself."""
    arguments = dict(request)
    torch.manual_seed(arguments.pop("seed"))
    return model.generate(**arguments)


@functools.cache
def wanted_of(folder: Path, modes: tuple[str, ...] = SOME) -> list[Any]:
    plain = load_plain(folder)
    return [alone(plain, request) for request in requests(modes)]


def assert_all_same(found: dict[int, Any], wanted: list[Any]) -> None:
    assert sorted(found) == list(range(len(wanted)))
    for number, value in enumerate(wanted):
        assert_same(found[number], value, f"request {number}")


def check_usable(model: Any, wanted: list[Any]) -> None:
    """Nothing is held, and the model gives what it gave."""
    assert_nothing_held(model)
    assert_same(alone(model, requests()[1]), wanted[1])


@pytest.fixture(autouse=True)
def light_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads take nothing, as the process takes nothing: a tiny model would fit in their room."""
    monkeypatch.setattr(passes_in_turns, "_THREAD_BYTES", 0)


@pytest.mark.parametrize(
    ("family", "dtype", "ranges"),
    few(
        [("llama", "bf16", True), ("gemma3", "bf16", False), ("gpt2", "fp32", True)],
        [("llama", "bf16", True), ("gemma3", "bf16", False)],
    ),
)
def test_every_mode_at_once(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, ranges: bool
) -> None:
    """Tokens, scores, logits and hidden states are equal; the process's random numbers stay."""
    if ranges:
        monkeypatch.setattr(budget_cut, "CHUNKS", (1 << 14,))
        monkeypatch.setattr(budget_cut, "_TABLE_BYTES", 1 << 12)
    folder = tiny(family, dtype)
    model, before = load_smallest(folder), torch.get_rng_state()
    found = dict(pipeload.generate_many(model, requests(MODES), at_once=20))
    assert torch.equal(torch.get_rng_state(), before)
    assert_all_same(found, wanted_of(folder, tuple(MODES)))
    check_usable(model, wanted_of(folder))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_quantised(tiny: TinyCheckpoint, tmp_path: Path, method: str) -> None:
    """What is packed on disk is as exact."""
    folder = tmp_path / "quantised"
    group = 32 if method == "int4" else None
    pipeload.quantize(tiny("llama", "bf16"), folder, method=method, group_size=group)
    model = load_smallest(folder)
    assert_all_same(dict(pipeload.generate_many(model, requests(), at_once=4)), wanted_of(folder))
    check_usable(model, wanted_of(folder))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_weights_are_read_once_for_all(tiny: TinyCheckpoint, count: int) -> None:
    """As often as for one of them; a pass each, and their tokens, are counted."""
    model = load_smallest(tiny("llama", "fp32"), tokens=40, batch=8)
    many = [
        {"input_ids": prompt(1, 9, seed=seed), "max_new_tokens": 12, "eos_token_id": None}
        for seed in range(count)
    ]
    model.generate(**many[0])
    start = model.pipeload.stats()
    model.generate(**many[0])
    one = model.pipeload.stats()
    found = dict(pipeload.generate_many(model, many, at_once=count))
    all_of_them = model.pipeload.stats()
    assert len(found) == count
    assert all_of_them.bytes_read - one.bytes_read <= 1.05 * (one.bytes_read - start.bytes_read)
    assert all_of_them.passes - one.passes == 12 * count
    assert all_of_them.tokens - one.tokens == 12 * count


def test_requests_are_taken_as_there_is_room(tiny: TinyCheckpoint) -> None:
    """No more than asked for at once; those that end make room for others, which join."""
    folder, taken, ended = tiny("llama", "bf16"), 0, 0
    model = load_smallest(folder)

    def given() -> Iterator[dict[str, Any]]:
        nonlocal taken
        for request in requests():
            taken += 1
            assert taken - ended <= 3
            yield request

    found = {}
    for number, output in pipeload.generate_many(model, given(), at_once=3):
        ended += 1
        found[number] = output
    assert_all_same(found, wanted_of(folder))


def test_a_model_that_fits(tiny: TinyCheckpoint) -> None:
    """Nothing is streamed after the first pass: members take turns all the same."""
    folder = tiny("llama", "bf16")
    model = load(folder, ROOMY)
    for at_once in (4, "auto"):
        found = dict(pipeload.generate_many(model, requests(), at_once=at_once))
        assert_all_same(found, wanted_of(folder))


def test_another_limit_between_two_results(tiny: TinyCheckpoint) -> None:
    """What was all there streams from the next round on, and the other way round."""
    folder = tiny("llama", "bf16")
    wanted, smallest = wanted_of(folder), smallest_limit(folder)
    for first, second in ((ROOMY, smallest), (smallest, ROOMY)):
        model = load(folder, first)
        alone(model, requests()[0])
        running = pipeload.generate_many(model, requests(), at_once=4)
        found = dict([next(running)])
        session_of(model).governor.take_limit(second)  # as `set_memory_limit` has it do
        found.update(running)
        assert_all_same(found, wanted)
        assert (model.pipeload.plan.bytes_per_pass > 0) == (second == smallest)
        check_usable(model, wanted)


def test_the_model_can_be_called_between_two_results(tiny: TinyCheckpoint) -> None:
    """By itself, and for more requests: those that run are finished meanwhile."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    many = requests()
    first, second = (pipeload.generate_many(model, many, at_once=3) for _ in range(2))
    found: list[dict[int, Any]] = [{}, {}]
    for one, other in zip(first, second, strict=True):
        found[0].update([one])
        found[1].update([other])
        draw = torch.rand(3)
        assert not torch.equal(draw, torch.rand(3))
        if len(found[0]) == 2:
            assert_same(alone(model, many[1]), wanted[1])
    for each in found:
        assert_all_same(each, wanted)
    check_usable(model, wanted)


def test_other_threads_wait(tiny: TinyCheckpoint) -> None:
    """A pass of a thread that is no member begins when the members have ended."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    running = pipeload.generate_many(model, requests(), at_once=20)
    number, output = next(running)
    assert_same(output, wanted[number])
    got = in_thread(logits, model).result(LATEST)
    assert torch.equal(got, logits(load_plain(folder)))
    assert len(dict(running)) == len(wanted) - 1


class Boom(transformers.StoppingCriteria):
    """Ends a request in some way once it has made some tokens."""

    def __init__(self, after: int, error: BaseException | None = None) -> None:
        self.left, self.error = after, error

    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        self.left -= 1
        if not self.left and self.error is not None:
            raise self.error
        return torch.full((len(ids),), self.left <= 0)


def failing(after: int, error: BaseException) -> dict[str, Any]:
    return requests()[0] | {"stopping_criteria": [Boom(after, error)]}


def test_one_that_fails_is_an_exception_and_others_go_on(tiny: TinyCheckpoint) -> None:
    """Whatever it raises: also what ends a thread past all hooks."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    errors = [ValueError("boom"), SystemExit(3), KeyboardInterrupt()]
    many = [*requests(), *(failing(2 + at, error) for at, error in enumerate(errors))]
    many += [{"input_ids": "no tensor"}, {"no_such_option": 1, "input_ids": prompt()}]
    found = dict(pipeload.generate_many(model, many, at_once=30))
    broken = [found.pop(number) for number in range(len(wanted), len(many))]
    assert broken[:3] == errors
    assert all(isinstance(error, Exception) for error in broken[3:])
    assert_all_same(found, wanted)
    check_usable(model, wanted)


def test_an_error_that_is_its_own_cause(tiny: TinyCheckpoint) -> None:
    """As `raise error from error` makes it: what its frames hold is let go of once."""
    model, error = load_smallest(tiny("llama", "fp32")), ValueError("boom")
    error.__cause__ = error
    running = pipeload.generate_many(model, [failing(2, error)])
    assert in_thread(list, running).result(LATEST) == [(0, error)]
    assert_nothing_held(model)


def test_no_thread_is_to_be_had(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what is said, and those that run are ended."""
    model = load_smallest(tiny("llama", "bf16"))
    before, real = our_threads_of_passes(), threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "pipeload-request-2":
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(iter(pipeload.generate_many(model, requests(), at_once=3)))
    wait_for_threads(before, our_threads_of_passes)
    assert_nothing_held(model)


def test_an_interrupt_while_a_request_begins(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread ends as well, also where it comes only after that was seen to."""
    folder = tiny("llama", "bf16")
    model, wanted, before = load_smallest(folder), wanted_of(folder), our_threads_of_passes()
    convoy = session_of(model).passes.convoy
    lock, closing = convoy._lock, threading.Event()

    class Late:
        """The convoy's lock, which a request's thread gets once somebody else has had it."""

        def __enter__(self) -> None:
            if threading.current_thread().name.startswith("pipeload-request"):
                closing.wait(LATEST)
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            closing.set()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def member(*args: Any) -> Member:
        made = Member(*args)
        monkeypatch.setattr(made.entered, "wait", interrupted)
        return made

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            next(iter(pipeload.generate_many(model, requests(), at_once=3)))

    with monkeypatch.context() as patch:
        patch.setattr(convoy, "_lock", Late())
        patch.setattr(engine_convoy, "Member", member)
        in_thread(run).result(LATEST)
    wait_for_threads(before, our_threads_of_passes)
    check_usable(model, wanted)


def test_what_fails_at_the_beginning_is_told(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first; the next one begins for all that are left."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    real, fails = Passes.rest, [True]

    def rest(passes: Passes) -> None:
        if fails.pop() if fails else False:
            raise ZeroDivisionError
        real(passes)

    monkeypatch.setattr(Passes, "rest", rest)
    found = in_thread(lambda: dict(pipeload.generate_many(model, requests(), at_once=20))).result(
        LATEST
    )
    (broken,) = (number for number, one in found.items() if isinstance(one, Exception))
    assert isinstance(found[broken], ZeroDivisionError)
    for number in found.keys() - {broken}:
        assert_same(found[number], wanted[number])
    check_usable(model, wanted)


def test_one_that_dies_inside_a_pass(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a block, by an error that runs hooks and by one that runs none."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    rows = requests()[3]["input_ids"].shape
    block = model.model.layers[2].mlp
    real, raised = block.forward, [ValueError("boom"), GeneratorExit()]

    def forward(values: torch.Tensor) -> torch.Tensor:
        if raised and values.shape[:2] == rows:
            raise raised[-1]
        return real(values)  # type: ignore[no-any-return]

    monkeypatch.setattr(block, "forward", forward)
    while raised:
        found = dict(pipeload.generate_many(model, requests(), at_once=20))
        assert found[3] is raised[-1]
        assert_same(found[4], wanted[4])
        assert_nothing_held(model)
        raised.pop()
    check_usable(model, wanted)


def test_a_disk_that_fails(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that need the block are told; the next ones read it."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    files = session_of(model).files
    real = type(files).read_pages
    fails = [True]

    def read_pages(*args: Any) -> int:
        if fails[0]:
            raise ReadError("the disk failed")
        return real(*args)

    monkeypatch.setattr(type(files), "read_pages", read_pages)
    found = dict(pipeload.generate_many(model, requests()[:3], at_once=3))
    assert all(isinstance(error, ReadError) for error in found.values())
    assert_nothing_held(model)
    fails[0] = False
    assert_all_same(dict(pipeload.generate_many(model, requests(), at_once=9)), wanted)


def test_what_fails_at_the_end_is_told(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever, and other passes may begin."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    with monkeypatch.context() as patch:
        for name in ("pass_ended", "drop_settled"):
            patch.setattr(Replan, name, lambda _self: 1 / 0)
        ((_, outcome),) = pipeload.generate_many(
            model, [{"input_ids": prompt(), "max_new_tokens": 1}]
        )
    assert isinstance(outcome, ZeroDivisionError)
    check_usable(model, wanted)


def test_closing_what_has_ended_waits_for_nobody(tiny: TinyCheckpoint) -> None:
    """A forgotten iterator is collected anywhere, also where the convoy's lock is held."""
    model = load_smallest(tiny("llama", "bf16"))
    running, before = pipeload.generate_many(model, requests(), at_once=20), our_threads_of_passes()
    next(running)
    logits(model)
    wait_for_threads(before, our_threads_of_passes)
    with session_of(model).passes.convoy._lock:
        in_thread(running.close).result(LATEST)  # type: ignore[attr-defined]


def test_closing_ends_those_that_run(tiny: TinyCheckpoint) -> None:
    """Wherever they are; no thread is left."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    before, drawn = our_threads_of_passes(), torch.get_rng_state()
    for count in range(4):
        running = pipeload.generate_many(model, requests(), at_once=5)
        for number, output in itertools.islice(running, count):
            assert_same(output, wanted[number])
        running.close()  # type: ignore[attr-defined]
        wait_for_threads(before, our_threads_of_passes)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert_nothing_held(model)
    check_usable(model, wanted)


def test_an_interrupt_while_one_waits(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C reaches the caller; the members end."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    convoy, before = session_of(model).passes.convoy, our_threads_of_passes()
    real = convoy.outcome

    def interrupted(party: Any) -> Any:
        real(party)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convoy, "outcome", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(pipeload.generate_many(model, requests(), at_once=5))
    wait_for_threads(before, our_threads_of_passes)
    check_usable(model, wanted)


def test_random_ends(tiny: TinyCheckpoint) -> None:
    """Requests join, end, fail and are cancelled at random; no answer is another."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    choose, before, many = random.Random(4), our_threads_of_passes(), requests()
    for _ in range(8):
        order = [choose.randrange(len(many)) for _ in range(10)]
        given = [
            failing(choose.randint(1, 4), ValueError("boom")) if choose.random() < 0.2 else many[at]
            for at in order
        ]
        running = pipeload.generate_many(model, given, at_once=choose.choice([2, 3, 7]))
        for number, output in itertools.islice(running, choose.choice([1, 4, 10])):
            if not isinstance(output, ValueError):
                assert_same(output, wanted[order[number]])
        running.close()  # type: ignore[attr-defined]
        assert_nothing_held(model)
    wait_for_threads(before, our_threads_of_passes)
    check_usable(model, wanted)


def test_results_that_are_waited_for_inside_a_call(tiny: TinyCheckpoint) -> None:
    """Of the same model, in a pass or in a request: it would wait for itself."""
    model = load_smallest(tiny("llama", "fp32"))
    many = [{"input_ids": prompt(), "max_new_tokens": 1}]

    def ask(*_: object) -> None:
        next(pipeload.generate_many(model, many))

    handle = model.model.norm.register_forward_hook(ask)
    with pytest.raises(UnsupportedOperationError, match="inside a call of the same model"):
        model.generate(prompt(), max_new_tokens=1)
    ((_, error),) = pipeload.generate_many(model, many)
    assert isinstance(error, UnsupportedOperationError)
    handle.remove()
    ((_, tokens),) = pipeload.generate_many(model, many)
    assert tokens.shape == (1, 20)
    assert_nothing_held(model)


def test_what_a_model_writes_on_itself_is_each_requests_own(tiny: TinyCheckpoint) -> None:
    """As the positions of pictures; afterwards it is as before."""
    model = load_smallest(tiny("llama", "fp32"))
    seen: dict[int, set[Any]] = {}

    def note(module: Any, _args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] > 1:  # a prompt
            module.remembered = kwargs["input_ids"][0, 0].item()
        seen.setdefault(threading.get_ident(), set()).add(module.remembered)

    model.model.register_forward_pre_hook(note, with_kwargs=True)
    prompts = [prompt(1, 6, seed=seed) for seed in range(4)]
    many = [{"input_ids": ids, "max_new_tokens": 4} for ids in prompts]
    dict(pipeload.generate_many(model, many, at_once=4))
    assert sorted(map(sorted, seen.values())) == sorted([ids[0, 0].item()] for ids in prompts)
    assert not hasattr(model.model, "remembered")


def of_many_lengths(count: int = 4) -> list[dict[str, Any]]:
    """Greedy requests that end one after the other."""
    prompts = [prompt(1, 5 + number, seed=number) for number in range(count)]
    longest = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return [
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3 + 4 * n}
        | longest
        for n, ids in enumerate(prompts)
    ]


@pytest.mark.filterwarnings("ignore")  # the adapters' library warns of its own
@torch.no_grad()
def test_adapters_that_add_tokens(tiny: TinyCheckpoint) -> None:
    """What they put in place for a call stays for each request until its own call is over."""
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(load_smallest(tiny("llama", "fp32")), config).eval()
    many = of_many_lengths()
    wanted = [model.generate(**request) for request in many]
    assert_all_same(dict(pipeload.generate_many(model, many, at_once=4)), wanted)
    assert_same(model.generate(**many[3]), wanted[3])


@pytest.mark.filterwarnings("ignore")  # the adapters' library warns of its own
@torch.no_grad()
def test_adapters_of_one_request(tiny: TinyCheckpoint) -> None:
    """They would be the others' as well: so it is refused beside others, and told why."""
    peft: Any = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(load_smallest(tiny("llama", "fp32")), config, adapter_name="a")
    model.add_adapter("b", config)
    model.eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_()
    many = of_many_lengths(3)
    many[1]["adapter_names"] = ["b"]
    wanted = [model.generate(**request) for request in many]
    assert_all_same(dict(pipeload.generate_many(model, many, at_once=1)), wanted)
    found = dict(pipeload.generate_many(model, many, at_once=3))
    assert isinstance(found[1], OptionError)
    assert "request 1 names adapters" in str(found[1])
    for number in (0, 2):
        assert_same(found[number], wanted[number])


def test_seeds(tiny: TinyCheckpoint) -> None:
    """One that is given is used; without one, the numbers are others."""
    model = load_smallest(tiny("llama", "fp32"))
    sampled = {"input_ids": prompt(), "do_sample": True, "max_new_tokens": 12}
    many = [sampled, sampled, sampled | {"seed": 3}, sampled | {"seed": 3}]
    found = dict(pipeload.generate_many(model, many, at_once=4))
    assert torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[1])


def test_autocast_and_inference_mode_come_along(tiny: TinyCheckpoint) -> None:
    """What the caller has around the call, its threads have around theirs."""
    folder = tiny("llama", "fp32")
    model, plain, many = load_smallest(folder), load_plain(folder), requests()[:4]
    exact = alone(plain, many[0]).scores[0]
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        wanted = [alone(plain, request) for request in many]
        assert_all_same(dict(pipeload.generate_many(model, many, at_once=4)), wanted)
    assert not torch.equal(wanted[0].scores[0], exact)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (["no", "dict"], "request 1 is a list. Give a dict of generate"),
        (None, "request 1 is a NoneType. Give a dict of generate"),
        ({"seed": "three"}, "seed='three' of request 1 is no seed"),
        ({"seed": True}, "seed=True of request 1 is no seed"),
        ({"seed": 1 << 64}, "is no seed. Give a whole number"),
    ],
)
def test_what_is_no_request(tiny: TinyCheckpoint, request_: Any, words: str) -> None:
    """It is told by its result; the others are answered."""
    model = load_smallest(tiny("llama", "fp32"))
    good = {"input_ids": prompt(), "max_new_tokens": 1}
    found = dict(pipeload.generate_many(model, [good, request_, good], at_once=2))
    assert isinstance(found[1], OptionError)
    assert words in str(found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("at_once", [0, -1, "many", 1.5])
def test_what_is_no_number_of_requests(tiny: TinyCheckpoint, at_once: Any) -> None:
    """It is refused at once."""
    with pytest.raises(OptionError, match="is no number of requests"):
        pipeload.generate_many(load_smallest(tiny("llama", "fp32")), [], at_once=at_once)


def test_a_model_that_is_not_streamed(tiny: TinyCheckpoint) -> None:
    """A plain one, and one that was."""
    plain = load_plain(tiny("llama", "fp32"))
    with pytest.raises(OptionError, match="is not streamed"):
        pipeload.generate_many(plain, [])
    model = load(tiny("llama", "fp32"), ROOMY)
    handle = model.pipeload
    handle.remove()
    with pytest.raises(OptionError, match="is not streamed"):
        pipeload.generate_many(model, [])
    with pytest.raises(pipeload.UnsupportedOperationError, match="a plain one since remove"):
        handle.session  # noqa: B018


def test_removing_is_refused_while_requests_run(tiny: TinyCheckpoint) -> None:
    """And works once they have ended."""
    model = load_smallest(tiny("llama", "bf16"))
    running = pipeload.generate_many(model, requests(), at_once=20)
    next(running)
    with pytest.raises(pipeload.UnsupportedOperationError, match="while a forward pass is running"):
        model.pipeload.remove()
    running.close()  # type: ignore[attr-defined]
    model.pipeload.remove()


def test_memory_that_runs_short(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest gives way to the oldest, and is begun again; only who cannot be is told."""
    folder = tiny("llama", "bf16")
    model, wanted, many = load_smallest(folder), wanted_of(folder), requests()
    real, rounds = Governor.before_passes, []

    def before_passes(governor: Governor, calls: Any) -> int:
        rounds.append(len(calls))
        if len(rounds) in {3, 6}:
            raise MemoryLimitError("no room", limit=1, smallest_limit=2)
        return min(real(governor, calls), 4)

    monkeypatch.setattr(Governor, "before_passes", before_passes)
    assert_all_same(dict(pipeload.generate_many(model, many, at_once=6)), wanted)
    assert max(rounds) == 6
    rounds.clear()
    stubborn = [request | {"stopping_criteria": [Boom(99)]} for request in many[:6]]
    found = dict(pipeload.generate_many(model, stubborn, at_once=6))
    told = [number for number, one in found.items() if isinstance(one, MemoryLimitError)]
    assert sorted(told) == [3, 4]  # the newest of four, and the one that took its place
    assert [found[number].limit for number in told] == [1, 1]
    check_usable(model, wanted)


def test_memory_that_is_there_again(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many run as before it was short."""
    folder = tiny("llama", "bf16")
    model, wanted, many = load_smallest(folder), wanted_of(folder), requests()
    real, rounds = Governor.before_passes, []

    def before_passes(governor: Governor, calls: Any) -> int:
        rounds.append(len(calls))
        if len(rounds) in {3, 6, 9}:
            raise MemoryLimitError("no room", limit=1, smallest_limit=2)
        return real(governor, calls)

    monkeypatch.setattr(Governor, "before_passes", before_passes)
    found = dict(pipeload.generate_many(model, many * 3, at_once=4))
    assert_all_same(found, wanted * 3)
    assert min(rounds[2:10]) == 1
    assert max(rounds[10:]) == 4


def test_memory_that_is_not_there_for_one(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that does not fit by itself is refused in words; the others are answered."""
    folder = tiny("llama", "bf16")
    model, wanted = load_smallest(folder), wanted_of(folder)
    real = PassNeeds.for_pass

    def for_pass(needs: PassNeeds, args: Any, kwargs: Any, module: Any = None) -> int:
        more: int = (1 << 40) * (kwargs["input_ids"].shape[1] == 99)
        return real(needs, args, kwargs, module) + more

    monkeypatch.setattr(PassNeeds, "for_pass", for_pass)
    many = [*requests()[:3], {"input_ids": prompt(1, 99), "max_new_tokens": 2}, *requests()[3:]]
    found = dict(pipeload.generate_many(model, many, at_once=7))
    assert isinstance(found.pop(3), MemoryLimitError)
    assert_all_same(dict(enumerate(found[number] for number in sorted(found))), wanted)
