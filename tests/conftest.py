"""Fixtures that more than one test file needs."""

from __future__ import annotations

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.cgroups import MemoryCgroup

# Nothing here may ask a model hub, nor draw over the report.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# OpenMP threads that spin while they wait take the cores from the readers.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test asserts a time, examples included.
settings.register_profile("untimed", deadline=None)
# The same examples at every run, for where a failure must be of what has changed.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# While one works: the whole suite tries many more.
settings.register_profile("quick", deadline=None, max_examples=15)
settings.load_profile("untimed")

MARKERS = (
    "slow: takes seconds, alone or in a process that it starts",
    "cgroup: needs a kernel memory cgroup, so root",
    "gpu: needs an accelerator",
    "sweep: shows again, of more, what other tests show; left to `make sweep`",
)


class TinyCheckpoint(Protocol):
    """What the fixture `tiny` gives."""

    def __call__(self, family: str, dtype: str = "fp32") -> Path: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "fail unless every place in the product that makes an error was reached"
    parser.addoption("--every-error", action="store_true", help=text)
    parser.addoption("--sweep", action="store_true", help="run tests that are marked so, too")


def pytest_configure(config: pytest.Config) -> None:
    from tests.support.raised import Raised

    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(Raised())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for `make sweep`."""
    if config.getoption("--sweep"):
        return
    left = [item for item in items if item.get_closest_marker("sweep")]
    items[:] = [item for item in items if not item.get_closest_marker("sweep")]
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Have trials remembered, and take what was imported out of garbage collection.

    Half a million objects of torch, transformers and the tests themselves: to go through them takes
    half a second, and many tests collect garbage.
    """
    if "pipeload.entry.loading" in sys.modules:
        from tests.support.known_models import remember

        remember()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Each test draws the same ones, whatever ran before it."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_many_threads() -> Iterator[None]:
    """Of torch's, in each test, whatever ran before it: here and in threads that are yet to begin.

    These have the number that was set last, in whichever thread.
    """
    import torch

    before = torch.get_num_threads()
    yield
    with ThreadPoolExecutor(1) as another:
        found = {torch.get_num_threads(), another.submit(torch.get_num_threads).result()}
    if found != {before}:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _nothing_streams_after_its_file() -> Iterator[None]:
    """A model that something still refers to would set the limit for the tests of later files."""
    from pipeload.budget.shared_limit import ACCOUNTANT

    yield
    ACCOUNTANT.forget_all()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """`tiny(family, dtype)`: the folder of a tiny random checkpoint, made once.

    Tests share these folders and must not change them.
    """
    from tests.support.models import save_random

    made: dict[tuple[str, str], Path] = {}

    def checkpoint(family: str, dtype: str = "fp32") -> Path:
        key = (family, dtype)
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
            # Small shards: some layers lie in two files.
            made[key] = save_random(family, folder, dtype, seed=7, max_shard_size="200KB")
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def smollm2_bf16() -> Path:
    """The folder of the real SmolLM2-135M-Instruct in bf16."""
    from tests.support.models import smollm2

    return smollm2("bf16")


@pytest.fixture(scope="session")
def smollm2_fp32() -> Path:
    """The folder of the real SmolLM2-135M-Instruct in fp32."""
    from tests.support.models import smollm2

    return smollm2("fp32")


@pytest.fixture
def cgroup() -> Callable[[int], AbstractContextManager[MemoryCgroup]]:
    """`with cgroup(limit_bytes) as group`: a kernel memory cgroup, or a skip."""
    from tests.support.cgroups import memory_cgroup

    return memory_cgroup
