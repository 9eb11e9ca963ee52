"""A process that answers prompts of many lengths stays within its limit, and its memory flat."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.warm import warm_python

_COMMAND = Path(__file__).parents[2] / "tools/many_requests.py"
# Kernels of AMX are larger, and the thread that attention has there comes and goes: memory is flat
# from some 500 requests on (the second half of 2000 with 300 lengths adds 1 MB).
_AMX = ["--most-growth", "45"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("requests", "lengths", "dtype"),
    [
        pytest.param(80, 40, "float32", id="float32"),
        pytest.param(160, 120, "bfloat16", id="bfloat16", marks=pytest.mark.sweep),
        pytest.param(400, 300, "bfloat16", id="bfloat16 long", marks=pytest.mark.sweep),
    ],
)
def test_many_lengths(requests: int, lengths: int, dtype: str) -> None:
    """`python tests/tools/many_requests.py` sends 2000."""
    size = ["--requests", str(requests), "--lengths", str(lengths), "--dtype", dtype]
    if dtype == "bfloat16" and torch.cpu.get_capabilities().get("amx_bf16"):
        size += _AMX
    done = subprocess.run(
        [*warm_python(), str(_COMMAND), *size], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
