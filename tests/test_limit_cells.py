"""The limit at run time, under a kernel cap as large: exact, never killed, VmHWM below it."""

from __future__ import annotations

import os

import pytest

from tests import growing
from tests.cgroups import memory_cgroup
from tests.limits import Cell, fault
from tests.models import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.cgroup]

CELLS = (("x1", 16, 1), ("x1", 512, 4), ("x1.25", 16, 4), ("+0.5", 512, 1), ("+0.95", 16, 1))


@pytest.fixture(autouse=True)
def groups_work() -> None:
    """Skips where no memory control group can be made."""
    with memory_cgroup(1 << 40):
        pass
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.mark.parametrize(("limit", "prompt", "batch"), CELLS)
def test_smollm2(limit: str, prompt: int, batch: int) -> None:
    """A real model, from the smallest limit to nearly all of it."""
    cell = Cell(smollm2("bf16"), prompt, batch, new=6, hint=prompt + 6)
    nbytes = cell.bytes_of(limit)
    result = cell.capped(nbytes)
    assert fault(result, cell.free("plain"), nbytes) == ""
    assert "refused" not in result
    assert 0.85 * result["predicted"] <= result["peak"] <= result["predicted"] * 1.02


def test_a_pass_that_cannot_fit_is_refused() -> None:
    """It says what would fit, and the process lives and generates on."""
    cell = Cell(smollm2("bf16"), prompt=2048, batch=4, new=4, hint=32)
    nbytes = cell.bytes_of("x1")
    result = cell.capped(nbytes)
    assert fault(result, {}, nbytes) == ""
    for part in ("longest prompt that fits", "largest batch", "prefill_chunk_size="):
        assert part in result["refused"]


@pytest.mark.parametrize("event", ["", "halve", "list"])
def test_residents_yield_and_come_back(event: str) -> None:
    """To a longer cache, to another limit, to the user's own memory; the tokens stay the same."""
    folder = smollm2("bf16")
    limit = Cell(folder, 100, 4, new=2, hint=128).bytes_of("+1.2" if event == "list" else "+0.5")
    shape = (400, 4, event)
    result = growing.run(folder, limit, *shape, hint=128)
    assert "died" not in result, result
    assert result["peak"] <= limit
    resident = [nbytes for _, nbytes, _ in result["samples"]]
    assert min(resident) < 0.8 * resident[0]
    assert result["after"] == resident[0]
    assert result["tokens"] == growing.run(folder, None, *shape)["tokens"]
