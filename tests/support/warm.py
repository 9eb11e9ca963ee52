"""A `python` that has imported torch, transformers and pipeload: what depends on no fresh process.

To import them takes longer than most programs of tests run.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def warm_python() -> list[str]:
    """The words that take the place of `sys.executable`: a process for each, as by it."""
    address = Path(tempfile.mkdtemp(prefix="pipeload-warm-")) / "socket"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "hooks")])
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", str(address)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        stdin=subprocess.PIPE,  # which ends with this process, and the other with it
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    _SERVERS.append(server)
    client = Path(__file__).with_name("warm_client.py")
    return [sys.executable, "-I", "-S", str(client), str(address)]


_SERVERS: list[subprocess.Popen[str]] = []
"""Kept, so that their pipes stay open."""
