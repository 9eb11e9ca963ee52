"""Every way in, on the real small model: each bit of its logits is that of a plain one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.promises.ways_in.test_scripts import SCRIPTS, Done, python
from tests.support.models import load_plain
from tests.support.streaming import logits
from tests.support.users import WAYS, load_by

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
SCRIPT = str(SCRIPTS / "logits.py")
LIMIT = "500000000"
"""Two thirds of what the whole model takes with Python and its libraries."""

_ENVIRONMENT = """
import runpy, sys, pipeload
sys.argv = sys.argv[1:]
model = runpy.run_path(sys.argv[0], run_name="__main__")["model"]
"""
_MAGIC = """
import sys
from IPython.core.interactiveshell import InteractiveShell
_, script, folder, limit = sys.argv
shell = InteractiveShell()
shell.history_manager.enabled = False
for cell in ("%load_ext pipeload", f"%pipeload {limit}", f"%run {script} {folder}"):
    shell.run_cell(cell).raise_error()
model = shell.user_ns["model"]
"""
_STREAMS = "sys.stderr.write(f'\\n{model.pipeload.plan.bytes_per_pass}')"


@pytest.mark.parametrize("way", WAYS)
def test_in_a_program(way: str, smollm2_bf16: Path) -> None:
    """`pipeload.from_pretrained`, inside `pipeload.streaming`, and `pipeload.wrap` after use."""
    expected = logits(load_plain(smollm2_bf16))
    model = load_by(way, smollm2_bf16, ranges=False)
    assert model.pipeload.plan.bytes_per_pass > 0
    assert torch.equal(logits(model), expected)
    model.pipeload.remove()
    assert torch.equal(logits(model), expected)


@pytest.fixture(scope="module")
def plain(smollm2_bf16: Path) -> bytes:
    """What the script prints by itself."""
    done = python(SCRIPT, smollm2_bf16, warm=True)
    assert done.status == 0, done.err
    return done.out


def streamed(done: Done) -> bytes:
    """What it printed, its last word to stderr being what a pass reads."""
    assert done.status == 0, done.err
    assert int(done.err.splitlines()[-1]) > 10_000_000
    return done.out


def test_a_script(smollm2_bf16: Path, plain: bytes) -> None:
    """`python -m pipeload`."""
    done = python("-m", "pipeload", "--memory-limit", LIMIT, SCRIPT, smollm2_bf16)
    assert done.out == plain, done.err


def test_the_environment(smollm2_bf16: Path, plain: bytes) -> None:
    """`PIPELOAD_MEMORY_LIMIT` and `import pipeload`."""
    code = _ENVIRONMENT + _STREAMS
    done = python("-c", code, SCRIPT, smollm2_bf16, warm=True, PIPELOAD_MEMORY_LIMIT=LIMIT)
    assert streamed(done) == plain


def test_a_notebook(smollm2_bf16: Path, plain: bytes, tmp_path: Path) -> None:
    """`%load_ext pipeload` and `%pipeload LIMIT`."""
    pytest.importorskip("IPython")
    code = _MAGIC + _STREAMS
    done = python("-c", code, SCRIPT, smollm2_bf16, LIMIT, warm=True, IPYTHONDIR=str(tmp_path))
    said, _, rest = streamed(done).partition(b"\n")
    assert f"({LIMIT} bytes)".encode() in said
    assert rest == plain
