"""Processes that are forked from one in which models stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.system.memory import rss_bytes
from pipeload_hooks import is_placeholder
from tests.promises.ways_in.test_scripts import environment
from tests.support.children import in_fork
from tests.support.models import load_plain
from tests.support.streaming import IDS, WAIT_SECONDS, load_streamed, logits

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("used", ["fresh", "used", "used past its hooks"])
def test_a_child_is_told_before_it_computes(folder: Path, used: str) -> None:
    """With torch's threads lost, the first product of its pass would never end."""
    model = load_streamed(folder)
    torch.ones(1 << 20).cos()  # they are there now
    if used == "used":
        logits(model)
    elif used != "fresh":
        with torch.no_grad():
            model.forward(IDS)  # nobody says that it is over
    child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_SECONDS))
        try:
            model(torch.arange(4000)[None] % 9)
        except pipeload.UnsupportedOperationError as error:
            os._exit("set_num_threads(1)" in str(error))
        os._exit(7)
    assert os.waitpid(child, 0)[1] == 1 << 8


def test_a_child_loads_its_own(folder: Path) -> None:
    """As the error says: within the same limit, though the parent's weights were there, too."""
    expected = logits(load_plain(folder))
    torch.set_num_threads(1)
    model = load_streamed(folder, spare=300_000)
    assert torch.equal(logits(model), expected)
    limit = model.pipeload.plan.memory_limit

    def load() -> None:
        assert ACCOUNTANT.clients == []
        smallest = pipeload.smallest_limit(folder)
        own = pipeload.from_pretrained(folder, memory_limit=max(limit, smallest))
        assert len(ACCOUNTANT.clients) == 1
        assert torch.equal(logits(own), expected)
        assert all(map(is_placeholder, model.model.layers[0].mlp.parameters()))

    assert in_fork(load) == ""
    assert len(ACCOUNTANT.clients) == 1
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
def test_the_parents_weights_are_given_back(smollm2_bf16: Path) -> None:
    """When the child plans or loads, not before; also those that it has dropped already."""
    torch.set_num_threads(1)
    limit = pipeload.smallest_limit(smollm2_bf16, dtype="auto") + 80_000_000
    models = [pipeload.from_pretrained(smollm2_bf16, dtype="auto", memory_limit=limit)]
    logits(models[0])
    held = models[0].pipeload.plan.resident
    assert held > 60_000_000

    def plan() -> None:
        models.clear()
        before = rss_bytes()
        pipeload.plan(smollm2_bf16, dtype="auto", memory_limit=limit)
        assert before - rss_bytes() > held // 2

    assert in_fork(plan) == ""


def test_a_model_that_needs_no_thread_counts_on(folder: Path) -> None:
    """It works in the child as well."""
    model = load_streamed(folder, spare=10_000_000)
    torch.set_num_threads(1)
    logits(model)

    def check() -> None:
        assert len(ACCOUNTANT.clients) == 1
        assert pipeload.smallest_limit(folder) > model.pipeload.plan.resident
        logits(model)

    assert in_fork(check) == ""


@pytest.mark.parametrize("spare", [0, 10_000_000])
def test_a_child_of_a_process_in_which_requests_run(folder: Path, spare: int) -> None:
    """It does not wait for them: they are not there."""
    expected = logits(load_plain(folder))
    torch.set_num_threads(1)
    model = load_streamed(folder, spare=spare)
    logits(model)  # what fits is all there then
    many = [{"input_ids": IDS[:1], "max_new_tokens": new} for new in (1, 5, 5)]
    running = pipeload.generate_many(model, many, at_once=3)
    next(running)

    def check() -> None:
        if spare:
            assert torch.equal(logits(model), expected)
        else:
            with pytest.raises(pipeload.UnsupportedOperationError, match="was forked"):
                logits(model)

    assert in_fork(check) == ""
    assert len(list(running)) == 2
    assert torch.equal(logits(model), expected)


_PRELOAD = """
import os, signal, sys, torch, pipeload
folder = sys.argv[1]
torch.set_num_threads(2)
limit = pipeload.smallest_limit(folder, dtype="auto") + 50_000_000
model = pipeload.from_pretrained(folder, dtype="auto", memory_limit=limit)
if os.fork() == 0:
    signal.alarm(int(sys.argv[2]))
    own = pipeload.from_pretrained(folder, dtype="auto", memory_limit=limit)
    assert own.pipeload.plan.bytes_per_pass > 0
    print(own.generate(torch.tensor([[504, 3575, 282]]), max_new_tokens=3, do_sample=False).shape)
    sys.stdout.flush()
    os._exit(0)
sys.exit(os.wait()[1])
"""


@pytest.mark.slow
def test_loading_alone_starts_no_threads_of_torchs(smollm2_bf16: Path) -> None:
    """As plain: a child of a process that has computed nothing computes with two threads."""
    done = subprocess.run(
        [sys.executable, "-c", _PRELOAD, str(smollm2_bf16), str(int(WAIT_SECONDS))],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * WAIT_SECONDS,
    )
    assert (done.returncode, done.stdout) == (0, "torch.Size([1, 6])\n"), done.stderr
