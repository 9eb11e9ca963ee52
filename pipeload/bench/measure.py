"""`pipeload bench`: how close streaming comes to what the machine allows.

A pass cannot take less than T* = max((M - R*) / B, C). M: bytes a pass must read. R*: bytes the
limit allows to be held beside two buffers, each as large as one unit of the plan's grain: a block,
or, where two of these do not fit, its largest module or range of rows. B: the disk's rate, by a
reader of the benchmark's own. C: the pass with all weights resident. rho = T*/T is the share of
the possible that is reached. Of experts, M counts what the cache's own choice misses: a better one
would have to know the future. On a device T* = max(disk bytes / B, link bytes / L, C): the link
copies what the device's limit does not hold, the disk reads what neither limit does. L: the rate of
copies out of locked memory. B, C and T are measured beside each other in every round, since an
absolute figure says nothing on a shared machine; medians are shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeload._sizes import format_size
from pipeload.bench.report import LimitResult, legend, table
from pipeload.budget.buffer_count import BUFFER_COUNT
from pipeload.errors import OptionError, PipeloadError
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

_READ_SECONDS = 1.0
_ALL = 1 << 50


class Worker:
    """A child process that answers one JSON line for each it is given."""

    def __init__(self, *arguments: str) -> None:
        policy = os.environ.get("OMP_WAIT_POLICY", "passive")
        environment = os.environ | {"OMP_WAIT_POLICY": policy}
        # A file: nobody reads a pipe while the child works, and a full one would stop it.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", "pipeload.bench.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def ask(self, **command: float | str) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(**command)
        return self._receive()

    def send(self, **command: float | str) -> None:
        """Send a command without waiting."""
        assert self._process.stdin is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(BrokenPipeError):  # its answer will tell
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to a command that was sent."""
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - it was asked for
        line = self._process.stdout.readline()
        if not line:
            self._end()
            self._errors.seek(0)
            last = ["", *self._errors.read().strip().splitlines()][-1]
            self._errors.close()
            status = self._process.returncode
            raise PipeloadError(
                f"the measured process ended with status {status}: {last}. Run it again with a "
                "larger --memory-limit, or see what `pipeload run` says."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._errors.close()

    def _end(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it was sent last, it will not read
            self._process.communicate()  # closes its input, which ends it


def measure_disk(files: Sequence[str], seconds: float = _READ_SECONDS) -> float:
    """B: bytes per second by the fixed reader, in a process of its own."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", "pipeload.bench.reader", str(seconds), *files],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        raise OptionError(
            f"the benchmark needs direct reads, and they failed: {last}. Put the model on a disk "
            "that has them."
        )
    return float(json.loads(done.stdout)["rate"])


def run(
    *,
    model: str,
    limits: Sequence[str | int],
    new_tokens: int = 8,
    rounds: int = 3,
    prompt_tokens: int = 16,
    as_json: bool = False,
    device: str = "cpu",
    host_memory_limits: Sequence[str | int | None] = (None,),
    progress: Callable[[str], None] | None = None,
) -> list[LimitResult]:
    """Measure `model` at each limit and print a table, or JSON.

    Args:
        model: a folder or a hub id.
        limits: memory limits, as for `pipeload.from_pretrained`.
        new_tokens: tokens timed in each run.
        rounds: runs of everything, in turn; the medians are shown.
        prompt_tokens: length of the prompt.
        as_json: print one JSON object instead of the table.
        device: where it computes; the limits are the device's then.
        host_memory_limits: as for `pipeload.from_pretrained`; each limit is measured with each.
        progress: called with a line after each that was measured.

    Raises:
        PipeloadError: a measured process failed; says its last line.
    """
    sizes = [parse_limit(limit) for limit in limits]
    if not sizes or new_tokens < 1 or rounds < 1 or prompt_tokens < 1:
        raise OptionError(
            "bench measures nothing so. Give at least one memory limit, token and round."
        )
    shape = (str(prompt_tokens), str(new_tokens), "direct", device)
    pairs = [(size, str(host or "-")) for host in host_memory_limits for size in sizes]
    measured = _Progress(progress, rounds * len(pairs))
    samples = [_round(model, pairs, new_tokens, shape, measured) for _ in range(rounds)]
    rows = [_row([sample[index] for sample in samples]) for index in range(len(pairs))]
    if as_json:
        report = {"model": model, "rounds": rounds, "rows": [asdict(row) for row in rows]}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(f"{table(rows)}\n\n{legend(rows)}\n")
    return rows


def _round(
    model: str,
    limits: Sequence[tuple[int, str]],
    new_tokens: int,
    shape: Sequence[str],
    progress: _Progress,
) -> list[dict[str, Any]]:
    """Everything once: for each limit B, T, B; then C, and B while C's process computes alike."""
    results = []
    with contextlib.ExitStack() as stack:
        # What a process holds in host memory is told from its start; on a device that is the lesser
        # part, and a start takes long.
        one = stack.enter_context(Worker(model, *shape)) if shape[-1] != "cpu" else None
        for limit, host in limits:
            with Worker(model, *shape) if one is None else contextlib.nullcontext(one) as worker:
                result = worker.ask(load=limit, host=host)
                before = measure_disk(result["files"])
                result |= worker.ask(decode=new_tokens)
                result["disk_rate"] = (before + measure_disk(result["files"])) / 2
                results.append(result)
                progress.tell(result)
        resident = one or stack.enter_context(Worker(model, *shape))
        resident.ask(load=_ALL, host="-")
        for result in results:
            result["resident_seconds"] = resident.ask(decode=new_tokens)["seconds"]
            if "device" in result:  # what computes on a device leaves the processor to the readers
                result["busy_disk_rate"] = result["disk_rate"]
                continue
            count = max(2, round(2 * _READ_SECONDS / result["seconds"]))
            resident.send(duty=count, period=result["seconds"])
            result["busy_disk_rate"] = measure_disk(result["files"], count * result["seconds"])
            resident.receive()
    return results


class _Progress:
    """Says how far it is, to whoever wants to know."""

    def __init__(self, tell: Callable[[str], None] | None, count: int) -> None:
        self._tell = tell
        self._count = count
        self._done = 0

    def tell(self, result: dict[str, Any]) -> None:
        """Tell that one more limit was measured, and what came out."""
        self._done += 1
        if self._tell is not None:
            limit, seconds = format_size(result["memory_limit"]), result["seconds"]
            self._tell(f"{self._done} of {self._count}: {limit}, {seconds:.3g} s per token")


def _row(samples: Sequence[dict[str, Any]]) -> LimitResult:
    """Medians over the rounds; ratios are taken within a round first."""
    for sample in samples:
        room = sample["memory_limit"] - sample["floor"] - sample["reserve"]
        buffers = BUFFER_COUNT * sample["smallest_unit"]
        held_at_best = room - buffers - sample["expert_cache"]
        needed = sample["needed_per_pass"] + sample["expert_bytes"]
        to_read = max(0, needed - held_at_best) if sample["bytes_per_pass"] else 0
        copying = 0.0
        if "device" in sample:
            held_at_best -= sample["pinned"]
            to_copy = max(0, sample["blocks"] - held_at_best)
            copying = to_copy / sample["link_rate"]
            to_read = max(0, to_copy - max(0, sample["host_room"] - buffers))
            sample["held"] -= sample["pinned"]
        for name in ("disk_rate", "busy_disk_rate"):
            reading = to_read / sample[name]
            sample[f"least_{name}"] = max(reading, copying, sample["resident_seconds"])
        sample["rho"] = sample["least_disk_rate"] / sample["seconds"]
        sample["rho_busy"] = sample["least_busy_disk_rate"] / sample["seconds"]
        sample["rate_share"] = sample["read_rate"] / sample["busy_disk_rate"]
        sample["held_share"] = sample["held"] / held_at_best if sample["bytes_per_pass"] else 1.0
        sample["tokens_per_second"] = 1 / sample["seconds"]

    def middle(name: str) -> float:
        return float(statistics.median(sample[name] for sample in samples))

    return LimitResult(
        memory_limit=samples[0]["memory_limit"],
        tokens_per_second=middle("tokens_per_second"),
        seconds=middle("seconds"),
        least_seconds=middle("least_disk_rate"),
        rho=middle("rho"),
        rho_busy=middle("rho_busy"),
        rate_share=middle("rate_share"),
        held_share=middle("held_share"),
        disk_rate=middle("disk_rate"),
        busy_disk_rate=middle("busy_disk_rate"),
        read_rate=middle("read_rate"),
        resident_seconds=middle("resident_seconds"),
        stall_seconds=middle("stall"),
        bytes_per_token=middle("bytes"),
        reads_per_token=middle("reads"),
        misses_per_token=middle("misses"),
        peak_rss=max(sample["peak_rss"] for sample in samples),
        io_mode=samples[0]["io_mode"],
        device=samples[0].get("device", "cpu"),
        host_memory_limit=samples[0].get("host_memory_limit", 0),
        link_rate=middle("link_rate") if "link_rate" in samples[0] else 0.0,
        copied_per_token=middle("copied"),
        peak_device=max(sample["peak_device"] for sample in samples),
    )
