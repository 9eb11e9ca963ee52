"""The limit at run time, under a kernel cap as large: exact, never killed, VmHWM below it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.cgroups import memory_cgroup
from tests.support.models import smollm2
from tests.support.streaming import in_thread
from tests.support.sweeps import few
from tests.tools import growing
from tests.tools.limits import Cell, bytes_of_all, fault

pytestmark = [pytest.mark.slow, pytest.mark.cgroup]

# All by hand: tests/tools/limits.py. Prompt, batch, new tokens and hint; then the limit.
Cells = dict[str, tuple[Cell, int]]
CELLS = {
    "smallest": ((16, 4, 4, 20), "x1"),
    "half": ((512, 1, 6, 518), "+0.5"),
    "refused": ((500, 4, 1, 300), "x1"),
    "growing": ((100, 4, 2, 64), "+1.12"),
    "squeezed": ((16, 1, 6, 256), "+0.95"),
}


@pytest.fixture(autouse=True)
def groups_work() -> None:
    """Skips where no memory control group can be made."""
    with memory_cgroup(1 << 40):
        pass
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="module")
def cells() -> Cells:
    """Cells of a real model, and their limits in bytes."""
    asked = [(Cell(smollm2("bf16"), *shape), limit) for shape, limit in CELLS.values()]
    sizes = bytes_of_all(asked)
    return {
        name: (cell, nbytes) for name, (cell, _), nbytes in zip(CELLS, asked, sizes, strict=True)
    }


@pytest.mark.parametrize("name", few(["smallest", "half"], ["smallest"]))
def test_smollm2(name: str, cells: Cells) -> None:
    """A real model, from the smallest limit to nearly all of it."""
    cell, nbytes = cells[name]
    result = cell.capped(nbytes)
    assert fault(result, cell.free("plain"), nbytes) == ""
    assert "refused" not in result
    assert 0.85 * result["predicted"] <= result["peak"] <= result["predicted"] * 1.02


def test_a_pass_that_cannot_fit_is_refused(cells: Cells) -> None:
    """It says what would fit, and the process lives and generates on."""
    cell, nbytes = cells["refused"]
    result = cell.capped(nbytes)
    assert fault(result, {}, nbytes) == ""
    assert re.search("largest batch at this length [23]", result["refused"])
    assert 16 <= result["chunk"] < 500  # and the child went on with just that
    longest = re.search(r"longest prompt that fits at this batch is (\d+)", result["refused"])
    assert longest is not None
    assert 300 <= int(longest[1]) < 500


def test_residents_yield_and_come_back(cells: Cells) -> None:
    """To a longer cache and to the user's own memory; the tokens stay the same."""
    cell, limit = cells["growing"]
    folder = cell.folder
    shape = (50, 4, "list")
    result = growing.run(folder, limit, *shape, hint=64)
    assert "died" not in result, result
    assert result["peak"] <= limit
    resident = [nbytes for _, nbytes, _ in result["samples"]]
    assert min(resident) < 0.8 * resident[0]
    assert result["after"] >= resident[0]  # which is of a longer context
    assert result["tokens"] == growing.run(folder, None, *shape)["tokens"]


_SQUEEZED = r"""
import json, sys, time
import pipeload
pipeload.from_pretrained
import torch, transformers
folder, limit = sys.argv[1], int(sys.argv[2])
model = pipeload.from_pretrained(folder, memory_limit=limit, pressure="auto", dtype="auto")
model.generation_config.eos_token_id = None
ids = torch.arange(16)[None] + 5
texts, resident = set(), []
print("ready", flush=True)
while not sys.stdin.readline().startswith("end"):
    output = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    texts.add(tuple(output[0].tolist()))
    resident.append(model.pipeload.stats().resident_bytes)
    print("done", flush=True)
print(json.dumps({"texts": len(texts), "resident": resident}))
"""
_NEIGHBOUR = r"""
import sys, time
held = []
for _ in range(int(sys.argv[1]) // 5_000_000):
    held.append(bytearray(b"x" * 5_000_000))
    time.sleep(0.1)
print("full", flush=True)
sys.stdin.readline()
"""


def test_a_squeezed_group(cells: Cells) -> None:
    """A neighbour fills the group while the model streams in it: it gives back, and nobody dies."""
    cell, limit = cells["squeezed"]
    folder = cell.folder
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with memory_cgroup(limit + 60_000_000) as group:
        command = [sys.executable, "-c", _SQUEEZED, str(folder), str(limit)]
        model = group.popen(command, **pipes)
        assert model.stdin is not None
        assert model.stdout is not None
        assert model.stdout.readline() == "ready\n"

        def generate(times: int) -> None:
            assert model.stdin is not None
            assert model.stdout is not None
            for _ in range(times):
                model.stdin.write("go\n")
                model.stdin.flush()
                assert model.stdout.readline() == "done\n"

        generate(3)
        neighbour = group.popen([sys.executable, "-c", _NEIGHBOUR, "150000000"], **pipes)
        assert neighbour.stdout is not None
        reader = in_thread(neighbour.stdout.readline)
        while not reader.done():
            generate(1)
        assert reader.result() == "full\n"
        generate(3)
        neighbour.communicate("end\n")
        generate(8)
        result = json.loads(model.communicate("end\n")[0].splitlines()[-1])
        assert group.oom_kills() == 0
    assert result["texts"] == 1
    assert min(result["resident"]) < 0.7 * result["resident"][2]
    assert result["resident"][-1] > 0.9 * result["resident"][2]
