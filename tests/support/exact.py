"""What the tests of bit-identical output share: limits that bite, outputs step by step, comparison.

Tiny models are smaller than the noise in a process's size. The fixture
`steady_floor` makes the floor of every plan the same, so that limits a few
kilobytes apart give plans that differ as they should.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pipeload
from pipeload.budget.shared_limit import Accountant
from pipeload.errors import MemoryLimitError
from pipeload.hf import recipes
from pipeload.system.pages import PAGE
from tests.support.measuring import steady

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

FLOOR_BYTES = 300 << 20
ROOMY = 4_000_000_000
"""A limit that every model here fits."""


@pytest.fixture(autouse=True)
def steady_floor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of the test assumes that this process holds `FLOOR_BYTES` beside the model."""
    monkeypatch.setattr("pipeload.engine.restore.rss_bytes", lambda: FLOOR_BYTES)
    monkeypatch.setattr(Accountant, "other_bytes", lambda _self: FLOOR_BYTES)
    # Each model is alone: one that is about to be let go has no part in the limit.
    monkeypatch.setattr(Accountant, "clients", property(lambda _self: []))
    _LIMITS.clear()
    with steady(FLOOR_BYTES):
        yield


_LIMITS: dict[tuple[object, ...], int] = {}
"""What a test has asked for before: to find one takes as long as to load."""


def _known(find: Callable[..., int]) -> Callable[..., int]:
    """Have it asked once by each test."""

    @functools.wraps(find)
    def ask(folder: Path, **options: Any) -> int:
        files = sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir())
        asked = repr((folder, files, recipes._PIECE_BYTES, sorted(options.items())))
        key = (find.__name__, asked, torch.get_num_threads())
        if key not in _LIMITS:
            _LIMITS[key] = find(folder, **options)
        return _LIMITS[key]

    return ask


@_known
def smallest_limit(folder: Path, **options: Any) -> int:
    """The smallest limit that works, as the refusal of a smaller one tells it."""
    with pytest.raises(MemoryLimitError) as refusal:
        pipeload.plan(folder, memory_limit=1, **options)
    limit = refusal.value.smallest_limit
    assert limit is not None
    return limit


@_known
def fitting_limit(folder: Path, **options: Any) -> int:
    """About the smallest limit with which nothing is streamed."""
    limit = ROOMY
    for _ in range(2):  # the reserve shrinks with the limit
        plan = pipeload.plan(folder, memory_limit=limit, **options)
        assert plan.fits
        # The planner counts up to two pages more for each tensor than it then takes.
        weights = [weight for unit in plan.units for weight in unit.resident_weights]
        spare = 2 * PAGE * sum(len(w.sources) + (w.group is not None) for w in weights)
        used = plan.floor_bytes + plan.reserve_bytes + plan.resident + plan.scratch_bytes
        limit = used + spare
    return limit


def limits(folder: Path, count: int = 4, **options: Any) -> list[int]:
    """`count` limits, evenly spaced from the smallest that works to where everything fits."""
    low, high = smallest_limit(folder, **options), fitting_limit(folder, **options)
    return [low + (high - low) * step // (count - 1) for step in range(count)]


def load(folder: Path, limit: int, **options: Any) -> Any:
    """A model streamed under that limit, with direct reads unless `options` say otherwise."""
    settings: dict[str, Any] = {"dtype": "auto", "io_mode": "direct"} | options
    return pipeload.from_pretrained(folder, memory_limit=limit, **settings)


def load_smallest(folder: Path, **options: Any) -> Any:
    """A model streamed at the smallest limit that works."""
    return load(folder, smallest_limit(folder, **options), **options)


def step_logits(model: Any, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Logits of the prompt, and of each greedy decode step with one row per sequence."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
        logits = [output.logits]
        for _ in range(steps):
            # The library renamed it in 5.24.
            cache = next(name for name in ("cache", "past_key_values") if name in output)
            token = logits[-1][:, -1:].argmax(-1)
            output = model(input_ids=token, use_cache=True, **{cache: output[cache]})
            logits.append(output.logits)
    return logits


def prompt(rows: int = 1, length: int = 19, *, seed: int = 11) -> torch.Tensor:
    """Random token ids; none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 512, (rows, length), generator=generator)


def assert_same(got: Any, wanted: Any, where: str = "output") -> None:
    """Equal to the last bit, through tuples, lists and the library's output objects."""
    if isinstance(wanted, torch.Tensor):
        assert got.dtype == wanted.dtype, where
        assert not wanted.isnan().any(), f"{where}: the reference itself is NaN"
        assert torch.equal(got, wanted), where
    elif isinstance(wanted, (tuple, list)):
        assert len(got) == len(wanted), where
        for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(wanted, dict):
        _assert_same_values(got, wanted, where)
    else:
        assert got == wanted, where


def _assert_same_values(got: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    assert got.keys() == wanted.keys(), where
    for name, value in wanted.items():
        if name not in {"cache", "past_key_values"}:  # a cache object has no equality
            assert_same(got[name], value, f"{where}.{name}")


def assert_streamed(model: Any) -> None:
    """Every pass read all that the plan streams: not only resident weights were compared.

    What stays as it is stored was read once, and unpacked in every pass.
    """
    plan, stats = model.pipeload.plan, model.pipeload.stats()
    assert plan.bytes_per_pass > 0 or plan.stored_bytes > 0
    # With no more of them than buffers, each would keep its own.
    assert sum(unit.streamed.nbytes > 0 for unit in plan.units) > plan.slots
    assert stats.passes > 0
    # The plan counts whole pages, but the last one of a file may be cut short.
    read = [unit for unit in plan.units if not unit.stored]
    sources = {source for unit in read for w in unit.streamed.weights for source in w.sources}
    assert bytes_streamed(model) >= stats.passes * sum(source.nbytes for source in sources)


def bytes_streamed(model: Any) -> int:
    """What has been read beside the weights that are read once; all blocks must have run."""
    handle = model.pipeload
    session = handle._session
    once: int = session.pinned_read.nbytes
    once += sum(table.bytes_read for table in session.streamer.tables)
    once += sum(
        layout.read_bytes for unit in handle.plan.units for layout in (*unit.resident, *unit.stored)
    )
    read: int = handle.stats().bytes_read
    return read - once
