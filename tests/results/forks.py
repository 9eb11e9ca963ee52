"""Runs in processes of their own that need not import torch again, each under a cap and a rate.

One process imports the libraries and forks for each run, all in one kernel memory group whose
limit is set for each. Needs root and control groups; a throttled disk needs those of version 1.

    python -m tests.results.forks    # that process: a job for each line, a result for each
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.cgroups import drop_caches, memory_cgroup
from tests.tools.ring_speed import disk_group

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SLACK_BYTES = 96 << 20
"""A cap is so much above what a run may hold: the process that forks, page tables."""
_NO_CAP = 1 << 50
PATIENCE = 1800.0
"""Seconds that a run may take. A throttled disk gives 3.6 GB in 144."""


class Runner:
    """The process that forks."""

    def __init__(self, group: Any) -> None:
        self._group = group
        environment = os.environ | {
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'hooks'}",
        }
        command = [sys.executable, "-W", "ignore", "-m", "tests.results.forks"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = group.popen(command, cwd=ROOT, env=environment, **pipes)

    def run(
        self,
        job: dict[str, Any],
        *,
        cap: int = 0,
        rate: int | None = None,
        patience: float = PATIENCE,
    ) -> dict[str, Any]:
        """One run from a cold cache.

        Args:
            job: as `ways.run` takes it.
            cap: bytes that it may hold, page cache included; 0: all there are.
            rate: bytes per second that its disk gives at most.
            patience: seconds that it may take.

        Raises:
            RuntimeError: it failed, was killed, or took longer; other runs can follow.
        """
        told = f"the run {job} under a cap of {cap} bytes"
        folder = Path(job["folder"])
        drop_caches(folder)
        with contextlib.ExitStack() as stack:
            if rate is not None:
                group = stack.enter_context(disk_group(folder, rate, "results"))
                job = job | {"join": str(group)}
            self._group.set_limit(cap + SLACK_BYTES if cap else _NO_CAP)
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            # One line comes for each job, so that none can be waiting in the reader's own buffer.
            late = not select.select([self._process.stdout], [], [], patience)[0]
            if late:
                self._kill_run()
            line = self._process.stdout.readline()
            self._group.set_limit(_NO_CAP)
        if late:
            raise RuntimeError(f"{told} was killed: it took more than {patience:.0f} seconds")
        if not line:
            raise RuntimeError("the process that forks has ended")
        result: dict[str, Any] = json.loads(line)
        if "died" in result:
            raise RuntimeError(f"{told} died with status {result['died']}")
        if "error" in result:
            raise RuntimeError(result["error"])
        return result

    def _kill_run(self) -> None:
        """End what was forked; the process that forks says how it went."""
        for pid in self._group.pids():
            if pid != self._process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def runner() -> Iterator[Runner]:
    """A process that forks, in a memory group of its own."""
    with memory_cgroup(_NO_CAP) as group:
        made = Runner(group)
        try:
            yield made
        finally:
            made.close()


def main() -> None:
    """Fork for each job."""
    ways = importlib.import_module("tests.results.ways")
    ways.pipeload.from_pretrained  # noqa: B018 - its room is imported when it is first named
    gc.collect()
    gc.freeze()  # what is never looked at again stays shared
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _run(json.loads(line), writing)
        os.close(writing)
        with os.fdopen(reading) as answer:
            said = answer.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(said or json.dumps({"died": status}), flush=True)


def _run(job: dict[str, Any], writing: int) -> None:
    try:
        if "join" in job:
            Path(job["join"], "cgroup.procs").write_text(str(os.getpid()))
        result = importlib.import_module("tests.results.ways").run(job)
    except BaseException:
        result = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        pipe.write(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    main()
