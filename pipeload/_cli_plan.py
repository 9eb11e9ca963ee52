"""`pipeload plan` and the choices of `pipeload demo`: what a limit means on this disk."""

from __future__ import annotations

import contextlib
import json as json_module
import multiprocessing
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pipeload
from pipeload._arena import Arena, Region, Work
from pipeload._cli_output import log, silence_libraries
from pipeload._cli_run import DTYPES, check_model, explained, load_tokenizer
from pipeload._demo_model import STAMP, default_model_folder, make_smollm2
from pipeload._device_plan import DevicePlan
from pipeload._memory import peak_rss_bytes
from pipeload._open_device import open_device
from pipeload._pages import PAGE
from pipeload._reader import FileSet, resolve_io_mode
from pipeload._reader_pool import run_jobs
from pipeload._sizes import format_size
from pipeload.errors import CheckpointError, MemoryLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeload._plan import Plan

# A probe reads this many pieces of this size: enough for a rate, little enough to be quick.
_PROBE_PIECES = 16
_PROBE_PIECE_BYTES = 8 << 20
_PROBE_READERS = 8
# A limit that is chosen lies this far from the smallest one to the one with which all fits.
_CHOSEN_SHARE = 1 / 3
_ENDLESS = 1 << 50


def show(
    model: str,
    *,
    memory_limit: str,
    device: str,
    host_memory_limit: str | None,
    tokens: int,
    batch: int,
    dtype: str,
    io_mode: str,
    disk_rate: int | None,
    json: bool,
    debug: bool,
) -> None:
    """Print the plan to stdout.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option.
    """
    probed = disk_rate is None
    with _as_when_running(model, debug=debug):
        plan = _plan(
            model,
            memory_limit=memory_limit,
            device=device,
            host_memory_limit=host_memory_limit,
            tokens=tokens,
            batch=batch,
            dtype=DTYPES[dtype],
            io_mode=io_mode,
        )
    rate = probe(checkpoint_files(model)) if disk_rate is None else float(disk_rate)
    plan = replace(plan, disk_rate=rate)
    if isinstance(plan, DevicePlan) and (found := open_device(device)) is not None:
        plan = replace(plan, link_rate=found.link_rate(), compute_rate=found.compute_rate())
    if json:
        text = json_module.dumps({"model": model, **_figures(plan, batch=batch, probed=probed)})
    else:
        text = _text(plan, batch=batch, probed=probed)
    sys.stdout.write(text + "\n")


def probe(files: Sequence[Path]) -> float:
    """Bytes per second past the page cache, from a few pieces spread over `files`.

    Raises:
        ReadError: the disk failed.
    """
    opened = FileSet(files, resolve_io_mode("auto", files, fits_cache=False))
    arena = Arena(_PROBE_READERS * _PROBE_PIECE_BYTES, device=torch.device("cpu"), huge=True)
    scratch = [arena.take(_PROBE_PIECE_BYTES) for _ in range(_PROBE_READERS)]
    # Memory that was never written costs time at first touch, which is not the disk's.
    arena.tensor(0, "U8", (arena.nbytes,), arena.nbytes).zero_()

    def job(path: Path, first: int, stop: int) -> Work:
        def read(region: Region | None) -> int:
            assert region is not None  # noqa: S101 - every reader above has one
            return opened.read_pages(path, first, stop, region.buffer(0, stop - first))

        return read

    try:
        return run_jobs([job(*piece) for piece in _spread(files)], scratch, opened.stalls).rate
    finally:
        opened.close()


def checkpoint_files(model: str) -> list[Path]:
    """The safetensors files of a folder, or of a hub model that was downloaded before.

    Raises:
        CheckpointError: there are none.
    """
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
        weights = _plan(model, memory_limit=_ENDLESS, **options).resident
        try:
            tight = _plan(model, memory_limit=1, **options)
        except MemoryLimitError as error:  # a tenth more, as the process grows a little meanwhile
            tight = _plan(model, memory_limit=error.smallest_limit * 11 // 10, **options)
    whole = tight.floor_bytes + tight.reserve_bytes + weights
    limit = tight.smallest_limit + round((whole - tight.smallest_limit) * _CHOSEN_SHARE)
    if not isinstance(tight, DevicePlan):
        # A CUDA build of torch took more while it was loaded, and that is the peak that is shown.
        limit = max(limit, min(peak_rss_bytes(), whole - weights // 4))
    log.info(
        "%s are in use before; with all weights it would be %s."
        if isinstance(tight, DevicePlan)
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
    check_model(model)
    try:
        tokenizer = load_tokenizer(model)
    except CheckpointError:
        tokenizer = None  # a plan needs none
    yield
    del tokenizer


def _plan(model: str, **options: Any) -> Plan:
    with explained(model):
        return pipeload.plan(model, trust_remote_code=False, **options)


def _spread(files: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """Pieces at even distances over all bytes of all files; each lies within one file."""
    pieces = [
        (path, first, min(first + _PROBE_PIECE_BYTES, -(-path.stat().st_size // PAGE) * PAGE))
        for path in files
        for first in range(0, path.stat().st_size, _PROBE_PIECE_BYTES)
    ]
    step = max(1.0, len(pieces) / _PROBE_PIECES)
    return [pieces[int(index * step)] for index in range(min(len(pieces), _PROBE_PIECES))]


def _tokens_per_second(plan: Plan, batch: int) -> float | None:
    return batch / plan.seconds_per_pass if plan.seconds_per_pass else None


def _figures(plan: Plan, *, batch: int, probed: bool) -> dict[str, object]:
    return {
        "memory_limit": plan.memory_limit,
        "smallest_limit": plan.smallest_limit,
        "floor_bytes": plan.floor_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "resident_bytes": plan.resident,
        "buffer_bytes": plan.buffers,
        "slots": plan.slots,
        "scratch_bytes": plan.scratch_bytes,
        "units": len(plan.units),
        "bytes_per_pass": plan.bytes_per_pass,
        "bytes_per_token": plan.bytes_per_pass / batch,
        "fits": plan.fits,
        "io_mode": plan.io_mode,
        "readers": plan.readers,
        "disk_bytes_per_second": plan.disk_rate,
        "disk_rate_measured": probed,
        "seconds_per_pass": plan.seconds_per_pass,
        "tokens_per_second": _tokens_per_second(plan, batch),
        **(plan.host_figures() if isinstance(plan, DevicePlan) else {}),
    }


def _text(plan: Plan, *, batch: int, probed: bool) -> str:
    lines = [plan.table(), ""]
    rate = format_size(round(plan.disk_rate or 0)) + "/s"
    source = "measured just now" if probed else "as given"
    speed = _tokens_per_second(plan, batch)
    if plan.fits or speed is None:
        lines.append("All weights fit: the disk is needed for the first pass only.")
    else:
        per_token = format_size(round(plan.bytes_per_pass / batch))
        link = ""
        if isinstance(plan, DevicePlan) and plan.link_rate:
            copied = format_size(round(plan.link_bytes_per_pass / batch))
            link = f", {copied} over the link at {format_size(round(plan.link_rate))}/s"
        lines.append(
            f"{len(plan.units)} units; {per_token} come from disk per token. "
            f"At {rate} ({source}){link}\n"
            f"that allows at most {speed:.3g} tokens/s; computing may take longer."
        )
    if plan.io_mode == "buffered" and not plan.fits:
        lines.append(
            "The page cache has room for all of it, so passes after the first may read from there."
        )
    return "\n".join(lines)
