"""`pipeload plan` and the choices of `pipeload demo`: what a limit means on this disk."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pipeload
from pipeload._sizes import format_size
from pipeload.checkpoint.gguf import open_gguf
from pipeload.checkpoint.io_mode import resolve_io_mode
from pipeload.cli.load_model import DTYPES, check_model, explained
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.plan_text import shown
from pipeload.demo.model import STAMP, default_model_folder, make_smollm2
from pipeload.devices.open_device import open_device
from pipeload.entry.sources import is_gguf, source_of
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import CheckpointError, MemoryLimitError
from pipeload.system.memory import peak_rss_bytes
from pipeload.weights.disk_rate import probe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeload.budget.plan import Plan

# A limit that is chosen lies this far from the smallest one to the one with which all fits.
_CHOSEN_SHARE = 1 / 3
_ENDLESS = 1 << 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was typed behind the command."""

    model: str
    memory_limits: Sequence[str]
    device: str
    host_memory_limit: str | None
    tokens: int
    batch: int
    dtype: str
    io_mode: str
    exact_inputs: bool
    disk_rate: int | None
    json: bool


def show(asked: Arguments, *, debug: bool) -> None:
    """Print the plan to stdout; of several limits a table, in which some may be too small.

    Raises:
        PipeloadError: something is wrong with the model, an option, or every limit.
    """
    options: dict[str, Any] = {
        "device": asked.device,
        "host_memory_limit": asked.host_memory_limit,
        "tokens": asked.tokens,
        "batch": asked.batch,
        "dtype": DTYPES[asked.dtype],
        "io_mode": asked.io_mode,
        "exact_inputs": asked.exact_inputs,
    }
    with _as_when_running(asked.model, debug=debug):
        plans = [
            _plan_or_refusal(asked.model, memory_limit=limit, **options)
            for limit in asked.memory_limits
        ]
    if all(isinstance(plan, MemoryLimitError) for plan in plans):
        assert isinstance(plans[-1], MemoryLimitError)  # noqa: S101 - for the type checker
        raise plans[-1]
    probed = asked.disk_rate is None
    rate = probe(checkpoint_files(asked.model)) if probed else float(asked.disk_rate or 0)
    rated = [
        plan if isinstance(plan, MemoryLimitError) else _at_rates(plan, rate, asked.device)
        for plan in plans
    ]
    text = shown(asked.model, rated, batch=asked.batch, probed=probed, as_json=asked.json)
    sys.stdout.write(text + "\n")


def _plan_or_refusal(model: str, *, device: str, **options: Any) -> Plan | MemoryLimitError:
    try:
        return _plan(model, device=device, **options)
    except MemoryLimitError as error:
        if error.device is None and device not in {"cpu", "auto"}:
            raise  # the host's limit, which is the same for all of them
        return error


def _at_rates(plan: Plan, disk_rate: float, device: str) -> Plan:
    plan = replace(plan, disk_rate=disk_rate)
    share = plan.device_share
    if share is not None and (found := open_device(device)) is not None:
        share = replace(share, link_rate=found.link_rate(), compute_rate=found.compute_rate())
    return replace(plan, device_share=share)


def checkpoint_files(model: str) -> list[Path]:
    """The files of a GGUF model, a folder, or a hub model that was downloaded before.

    Raises:
        CheckpointError: there are none.
    """
    if is_gguf(model):
        return list(open_gguf(Path(model)).checkpoint.files)
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(
            snapshot_download(model, allow_patterns=["*.safetensors"], local_files_only=True)
        )
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise CheckpointError(f"{model!r} has no safetensors files. Download the model again.")


def make_demo_model(folder: Path | None = None) -> str:
    """The demo's model, made if it is not there.

    Raises:
        OptionError: a package that it is made from is missing.
    """
    target = folder or default_model_folder()
    if (target / STAMP).is_file():
        return str(make_smollm2(target))
    log.info("making SmolLM2-135M-Instruct in %s, once", target)
    # In a process of its own: the memory it takes would count as this one's peak ever after.
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    ) as child:
        return str(child.submit(make_smollm2, target).result())


def choose_limit(model: str, *, debug: bool, **where: Any) -> int:
    """A limit that holds only part of the layers. `where`: a device, and the host's limit with it.

    Raises:
        PipeloadError: something is wrong with the model.
    """
    with _as_when_running(model, debug=debug):
        options = {"dtype": "auto", **where}
        endless = _plan(model, memory_limit=_ENDLESS, **options)
        weights = endless.resident
        if endless.experts is not None:
            weights += endless.experts.cache_bytes
        try:
            tight = _plan(model, memory_limit=1, **options)
        except MemoryLimitError as error:  # a tenth more, as the process grows a little meanwhile
            tight = _plan(model, memory_limit=error.smallest_limit * 11 // 10, **options)
    whole = tight.floor_bytes + tight.reserve_bytes + weights
    limit = tight.smallest_limit + round((whole - tight.smallest_limit) * _CHOSEN_SHARE)
    if tight.device_share is None:
        # A CUDA build of torch took more while it was loaded, and that is the peak that is shown.
        limit = max(limit, min(peak_rss_bytes(), whole - weights // 4))
    log.info(
        "%s are in use before; with all weights it would be %s."
        if tight.device_share is not None
        else "Python and its libraries take %s; with all weights it would be %s.",
        format_size(tight.floor_bytes),
        format_size(whole),
    )
    return limit


def past_the_cache(model: str) -> str:
    """How a model larger than memory is read; the small one would hide in the page cache."""
    return resolve_io_mode("auto", checkpoint_files(model), fits_cache=False)


@contextlib.contextmanager
def _as_when_running(model: str, *, debug: bool) -> Iterator[None]:
    """Keep in memory what `run` keeps there, so that the same limit is enough for both."""
    silence_libraries(debug=debug)
    check_model(model, files=True)
    try:
        tokenizer = load_tokenizer(model)
    except CheckpointError:
        tokenizer = None  # a plan needs none
    yield
    del tokenizer


def _plan(model: str, **options: Any) -> Plan:
    source, named = source_of(model)
    with explained(model):
        return pipeload.plan(source, trust_remote_code=False, **named, **options)
