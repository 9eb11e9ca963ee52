"""A model between the library's loader and its first pass."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.checkpoint.file_reads import FileSet
from pipeload.engine.assembly import Assembly
from pipeload.engine.backend import CpuTarget
from pipeload.entry.loading import needs_of, plan_pending, touched_of
from pipeload.entry.options import GivenOptions
from pipeload.entry.request import make_request
from pipeload.errors import MemoryLimitError
from pipeload.hf import marks
from pipeload.hf.takeover import peek
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.streaming import logits, our_threads, steady_floor, wait_for_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeload.hf.pending_load import PendingLoad


class Made(NamedTuple):
    """A model whose weights have their places."""

    assembly: Assembly
    pending: PendingLoad

    @property
    def model(self) -> Any:
        return self.pending.model


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Neither a thread nor an account, however a test ends."""
    gc.collect()
    before, clients = our_threads(), len(ACCOUNTANT.clients)
    with steady_floor(modules=True):
        yield
    gc.collect()
    wait_for_threads(before)
    assert len(ACCOUNTANT.clients) <= clients


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a vocabulary that is large enough for a table of rows and a head in ranges of rows."""
    config = tiny_config("llama", vocab_size=32768, num_hidden_layers=2)
    return save_random(config, tmp_path_factory.mktemp("llama"), "fp32", seed=4)


@pytest.fixture
def make(folder: Path) -> Callable[[], Made]:
    """What `entry.loading` does, up to the library's part, at the smallest limit."""

    def assemble() -> Made:
        pending = peek(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="auto"))
        assert pending is not None
        needs = needs_of(pending, None)
        touched = touched_of(pending.model, pending.model)
        try:
            plan_pending(pending, needs, touched, make_request(GivenOptions(1)))
        except MemoryLimitError as error:
            request = make_request(GivenOptions(error.smallest_limit))
        build = plan_pending(pending, needs, touched, request)
        target = CpuTarget()
        return Made(Assembly(pending, build, target, needs, request.hint, pressure=False), pending)

    return assemble


def load_rest(made: Made) -> None:
    parts = made.assembly._build.parts
    made.pending.finish(made.pending.load_rest([weight.name for weight in parts.weights]))


def test_what_is_there_before_the_first_pass(make: Callable[[], Made], folder: Path) -> None:
    """What stays has its values; what streams a placeholder, which the library leaves alone."""
    made, plain = make(), load_plain(folder)
    parts = made.assembly._build.parts
    pinned = {weight.name for weight in parts.pinned}
    assert pinned
    assert parts.streamed
    for name, parameter in made.model.named_parameters():
        assert not parameter.is_meta
        assert marks.is_initialised(parameter)
        assert torch.equal(parameter, plain.get_parameter(name)) is (name in pinned)
        assert parameter.shape == plain.get_parameter(name).shape
        assert parameter.requires_grad
    assert not hasattr(made.model, "pipeload")
    assert not any(module._forward_pre_hooks for module in made.model.modules())
    made.assembly.give_up()


def test_seats_and_tables(make: Callable[[], Made]) -> None:
    """One for each site and each table of the cut, with the model's own parameters."""
    made = make()
    parts, assembly = made.assembly._build.parts, made.assembly
    assert [seat.name for seat in assembly._seats] == [site.name for site in parts.sites]
    for seat in assembly._seats:
        for name, parameter in seat.parameters.items():
            assert parameter is made.model.get_parameter(name)
    assert [[*table.parameters] for table in assembly._tables] == [["model.embed_tokens.weight"]]
    rows = [unit.rows for unit in assembly._prefetcher.units]
    for site in parts.sites:
        of_site = [rows[index] for index in site.units]
        if site.whole is None:
            assert of_site == [(0, 0)]
        else:
            assert (of_site[0][0], of_site[-1][1]) == (0, site.whole.shape[0])
            assert all(one[1] == other[0] for one, other in itertools.pairwise(of_site))
    assert any(site.whole is not None for site in parts.sites)
    assembly.give_up()


def test_it_streams_when_it_is_finished(make: Callable[[], Made], folder: Path) -> None:
    """With a handle, to the bits of a plain load; and is a plain model when it is taken down."""
    made, order = make(), list[str]()
    made.assembly.at_removal(lambda: order.append("first pushed"))
    load_rest(made)
    model = made.model
    made.assembly.finish(model)
    made.assembly.at_removal(lambda: order.append("last pushed"))
    expected = logits(load_plain(folder))
    assert torch.equal(logits(model), expected)
    assert pipeload.handle(model).plan.bytes_per_pass > 0
    assert not model._valid_auto_compile_criteria({}, None)
    model.pipeload.remove()
    assert order == ["last pushed", "first pushed"]
    assert not hasattr(model, "pipeload")
    assert "_valid_auto_compile_criteria" not in vars(model)
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    assert torch.equal(logits(model), expected)


def test_giving_up_twice(make: Callable[[], Made]) -> None:
    """Whatever failed after it was made; what was entered for the way down is done once."""
    clients = len(ACCOUNTANT.clients)
    made, taken = make(), list[int]()
    assert len(ACCOUNTANT.clients) == clients + 1
    made.assembly.at_removal(lambda: taken.append(1))
    made.assembly.give_up()
    assert len(ACCOUNTANT.clients) == clients
    made.assembly.give_up()
    assert taken == [1]
    assert not made.assembly._files._files


def test_given_up_after_it_was_finished(make: Callable[[], Made]) -> None:
    """As where whoever loads raises at the very end: no hook, no guard, parameters like any."""
    made = make()
    load_rest(made)
    made.assembly.finish(made.model)
    assert {type(p) for p in made.model.parameters()} != {torch.nn.Parameter}
    made.assembly.give_up()
    assert {type(p) for p in made.model.parameters()} == {torch.nn.Parameter}
    assert not any(module._forward_pre_hooks for module in made.model.modules())
    assert not hasattr(made.model, "pipeload")


def test_dropped_before_it_is_finished(make: Callable[[], Made]) -> None:
    """As where the library's part of the load raises: see the fixture above."""
    before = our_threads()
    made = make()
    assert our_threads() - before
    del made


@pytest.mark.parametrize("part", ["Prefetcher", "Governor"])
def test_a_part_that_cannot_be_made(
    make: Callable[[], Made], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened before is closed, and all else gone: see the fixture above."""
    opened: list[FileSet] = []

    def note(*args: Any) -> FileSet:
        opened.append(FileSet(*args))
        return opened[0]

    def fail(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr("pipeload.engine.assembly.FileSet", note)
    monkeypatch.setattr(f"pipeload.engine.assembly.{part}", fail)
    with pytest.raises(RuntimeError, match="no more memory"):
        make()
    (files,) = opened
    assert not files._files


def test_weights_that_are_asked_for_by_themselves(make: Callable[[], Made], folder: Path) -> None:
    """Read whole, as a plain copy lies in memory; streamed and pinned ones are known apart."""
    made, plain = make(), load_plain(folder)
    own = made.assembly._own_weights()
    parts = made.assembly._build.parts
    assert {weight.name for weight in own.own.values()} == {weight.name for weight in parts.weights}
    assert {weight.name for weight in own.hidden.values()} >= {*parts.streamed}
    assert not {weight.name for weight in own.hidden.values()} & {w.name for w in parts.pinned}
    for weight in parts.weights:
        got = own.read(weight)
        assert torch.equal(got, plain.get_parameter(weight.name))
        assert got.data_ptr() % 64 == 0, "as torch's own allocator puts it"
    made.assembly.give_up()
