#!/usr/bin/env python3
"""Ctrl-C and SIGTERM at random moments of `pipeload run` and `pipeload quantize`, as real signals.

    python tests/tools/signals.py --moments 100
    python tests/tools/signals.py --command quantize --signal term --moments 20 --cold

After each: the exit status a shell expects, nothing said but the answer so far, nothing on disk but
what a second run goes on with, and that run does all the rest. `generate` in a process that lives
on is `tests/promises/failures/test_interrupts.py`; `--command generate` sends it real signals.

Children are forked from a process that has imported everything; with --cold they are started anew,
and the signal may come while they import.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = {"int": signal.SIGINT, "term": signal.SIGTERM}
WAIT_SECONDS = 120.0
PROMPT = "ab"

# A shell's background job ignores SIGINT, and so would its children.
_CLI = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import pipeload.cli.commands
pipeload.cli.commands.main()
"""

_GENERATE = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from tests.support.models import load_plain
from tests.support.streaming import assert_nothing_held, generated, load_streamed
folder, count = Path(sys.argv[1]), int(sys.argv[2])
expected = generated(load_plain(folder))
models = [load_streamed(folder, spare=spare) for spare in (0, 700_000, 10_000_000)]
for number in range(count):
    model = models[number % 3]
    try:
        print("go", flush=True)
        while True:
            assert generated(model) == expected
    except KeyboardInterrupt:
        pass
    assert generated(model) == expected
    assert_nothing_held(model)
print("right", flush=True)
"""


@dataclass(slots=True)
class Tally:
    """How runs ended, and what was wrong."""

    ends: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def count(self, end: str) -> None:
        self.ends[end] = self.ends.get(end, 0) + 1


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that has ended."""

    status: int
    """As `subprocess` has it: negative for a signal."""
    out: str
    err: str
    seconds: float


# Struck in a callback of its import locks, Python drops the interrupt and says so.
_LOST_BY_PYTHON = re.compile(
    r"Exception ignored in: <function _get_module_lock.*?KeyboardInterrupt: \n", re.DOTALL
)


def environment() -> dict[str, str]:
    path = f"{ROOT}:{ROOT / 'hooks'}"
    return os.environ | {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }


def run_cold(words: Sequence[str], *, number: int | None = None, after: float = 0.0) -> Ended:
    """Start `pipeload` with these words; send it the signal after so many seconds."""
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-c", _CLI, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as child:
        if number is not None:
            time.sleep(after)
            child.send_signal(number)
        try:
            out, err = child.communicate(timeout=WAIT_SECONDS)
        except BaseException:
            child.kill()
            raise
    return Ended(child.returncode, out, err, time.monotonic() - started)


def run_forked(words: Sequence[str], *, number: int | None = None, after: float = 0.0) -> Ended:
    """The same in a fork of this process, which has imported what the command needs."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # A child struck before it has begun would go on as a second one of us.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pid = os.fork()
        if pid == 0:
            _become_command(words, out.fileno(), err.fileno())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if number is not None:
            time.sleep(after)
            os.kill(pid, number)
        status = _wait(pid)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return Ended(status, texts[0], texts[1], time.monotonic() - started)


def _become_command(words: Sequence[str], out: int, err: int) -> None:
    # Struck before the command has begun, or once it has ended, it has nothing to break.
    status = 130
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.argv = ["pipeload", *words]
        import atexit

        from pipeload.cli import commands

        try:
            commands.main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit._run_exitfuncs()  # what the interpreter does at its end
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        import traceback

        places = traceback.extract_tb(error.__traceback__)
        if not isinstance(error, KeyboardInterrupt) or any(p.name == "main" for p in places):
            status = 70
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(status)


def _wait(pid: int) -> int:
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return -signal.SIGKILL
        time.sleep(0.005)


def digest(folder: Path) -> dict[str, str]:
    """Of every file, by name."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


class Command:
    """A command that is struck again and again, in a folder of its own."""

    def __init__(self, model: Path, scratch: Path, *, cold: bool) -> None:
        self.model, self.scratch = model, scratch
        self.run = run_cold if cold else run_forked
        scratch.mkdir()
        whole = self.run(self.words())
        assert whole.status == 0, whole.err
        self.seconds = whole.seconds
        self.whole = self.result(whole)
        self.clear()

    def words(self) -> list[str]:
        raise NotImplementedError

    def result(self, ended: Ended) -> object:
        """What a whole run gives."""
        raise NotImplementedError

    def leftover(self) -> list[str]:
        """What is on disk that no second run would go on with."""
        raise NotImplementedError

    def clear(self) -> None:
        for path in self.scratch.iterdir():
            shutil.rmtree(path)

    def strike(self, number: int, after: float) -> tuple[str, list[str]]:
        """One run with a signal, and one after it: how the first ended, and what was wrong."""
        before = digest(self.model)
        ended = self.run(self.words(), number=number, after=after)
        where = f"{type(self).__name__} {signal.Signals(number).name} after {after:.3f} s"
        faults = [f"{where}: {name} is left over" for name in self.leftover()]
        wanted = 130 if number == signal.SIGINT else -number
        end = "finished" if ended.status == 0 else str(ended.status)
        if ended.status not in (0, wanted):
            faults.append(f"{where}: status {ended.status}, not {wanted}: {ended.err[-800:]}")
        told = _LOST_BY_PYTHON.sub("", ended.err)
        if "Traceback" in told or "Exception ignored" in told:
            faults.append(f"{where}: {ended.err[-1500:]}")
        if not self.is_done(ended):
            again = self.run(self.words())
            if again.status != 0 or self.result(again) != self.whole:
                faults.append(f"{where}: the second run: {again.status} {again.err[-800:]}")
        elif self.result(ended) != self.whole:
            faults.append(f"{where}: what it had made is not whole")
        if digest(self.model) != before:
            faults.append(f"{where}: the source was changed")
        self.clear()
        return end, faults

    def is_done(self, ended: Ended) -> bool:
        """Whether nothing is left to be done."""
        return ended.status == 0


class Run(Command):
    """`pipeload run`."""

    def words(self) -> list[str]:
        limit = ["--memory-limit", "2GB", "--io-mode", "direct"]
        return ["run", str(self.model), PROMPT, "--max-new-tokens", "60", "--quiet", *limit]

    def result(self, ended: Ended) -> object:
        return ended.out

    def leftover(self) -> list[str]:
        return [str(path) for path in self.scratch.rglob("*")]


class Quantize(Command):
    """`pipeload quantize`."""

    def words(self) -> list[str]:
        options = ["--max-shard-size", "100KB", "--method", "int8", "--quiet"]
        return ["quantize", str(self.model), str(self.scratch / "made"), *options]

    def result(self, _ended: Ended) -> object:
        return digest(self.scratch / "made")

    def leftover(self) -> list[str]:
        allowed = {"made", ".made.partial"}
        return [path.name for path in self.scratch.iterdir() if path.name not in allowed]

    def is_done(self, _ended: Ended) -> bool:
        return (self.scratch / "made").exists()


COMMANDS: dict[str, type[Command]] = {"run": Run, "quantize": Quantize}


def strike_command(
    name: str, model: Path, *, number: int, moments: int, cold: bool, seed: int = 0
) -> Tally:
    """Strike a command at so many random moments of its run."""
    tally = Tally()
    random_ = random.Random(seed)
    with scratch_folder() as scratch:
        command = COMMANDS[name](model, scratch / "work", cold=cold)
        # Cold, the first moments of the interpreter are not ours: there is no handler yet.
        first = 1.0 if cold else 0.02
        for _ in range(moments):
            after = random_.uniform(first, max(first, command.seconds))
            end, faults = command.strike(number, after)
            tally.count(end)
            tally.faults += faults
    return tally


def strike_generate(model: Path, *, moments: int, seed: int = 0) -> Tally:
    """Ctrl-C at random moments of `generate` in one process that catches it and goes on."""
    random_ = random.Random(seed)
    tally = Tally()
    command = [sys.executable, "-c", _GENERATE, str(model), str(moments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == "go\n":
                time.sleep(random_.uniform(0.001, 0.25))
                child.send_signal(signal.SIGINT)
                tally.count("interrupted")
            elif line == "right\n":
                tally.count("right")
        _, err = child.communicate(timeout=WAIT_SECONDS)
    if child.returncode or tally.ends != {"interrupted": moments, "right": 1}:
        tally.faults.append(f"generate: status {child.returncode}, {tally.ends}: {err[-1500:]}")
    return tally


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """One that a forked child does not delete at its own end, as a TemporaryDirectory would."""
    folder = Path(tempfile.mkdtemp(prefix="pipeload-signals-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def small_talker() -> Iterator[Path]:
    """A tiny checkpoint that `pipeload run` takes, with a tokenizer of letters."""
    from tests.support.models import save_random
    from tests.support.talking import add_letters

    with scratch_folder() as folder:
        save_random("llama", folder / "model", "bf16", seed=11)
        add_letters(folder / "model")
        yield folder / "model"


def main() -> int:
    """Print how runs ended; 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=100)
    parser.add_argument("--command", action="append", choices=["generate", *COMMANDS])
    parser.add_argument("--signal", action="append", choices=[*SIGNALS])
    parser.add_argument("--cold", action="store_true", help="start each child anew")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.update(environment())
    import torch

    import pipeload.cli.quantise
    import pipeload.cli.run  # noqa: F401

    torch.set_num_threads(1)
    faults = 0
    with small_talker() as model:
        for name in options.command or ["generate", *COMMANDS]:
            for which in ["int"] if name == "generate" else options.signal or [*SIGNALS]:
                if name == "generate":
                    tally = strike_generate(model, moments=options.moments, seed=options.seed)
                else:
                    tally = strike_command(
                        name,
                        model,
                        number=SIGNALS[which],
                        moments=options.moments,
                        cold=options.cold,
                        seed=options.seed,
                    )
                faults += len(tally.faults)
                print(f"{name} {which}: {tally.ends}, faults={len(tally.faults)}", flush=True)
                for fault in tally.faults[:10]:
                    print("  ", fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
