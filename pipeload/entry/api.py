"""The functions of `pipeload`: where the checkpoint's tower and the model's tower meet."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, TypeVar

import transformers

from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.devices.shared_device_limit import account_of
from pipeload.engine.forks import give_back_inherited
from pipeload.engine.handle import Handle
from pipeload.entry.attached_draft import attach_draft
from pipeload.entry.exact_inputs import keep_inputs_exact
from pipeload.entry.loading import Loading, needs_of, plan_pending, touched_of
from pipeload.entry.options import GivenOptions
from pipeload.entry.request import make_request
from pipeload.entry.sources import check_source
from pipeload.entry.wrap import wrap as wrap_model
from pipeload.errors import OptionError
from pipeload.hf.takeover import (
    current_intercept,
    intercept_everywhere,
    intercept_loading,
    peek,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import torch
    from torch import nn

    from pipeload.budget.plan import Plan
    from pipeload.entry.request import Request

_Model = TypeVar("_Model", bound="nn.Module")


def from_pretrained(
    pretrained: str | os.PathLike[str],
    *args: Any,
    memory_limit: int | str = "auto",
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    pressure: str = "off",
    read_timeout: float | str | None = "auto",
    device: str | torch.device | None = None,
    host_memory_limit: int | str | None = None,
    exact_inputs: bool = False,
    ranks: int | str | None = None,
    draft: str | os.PathLike[str] | None = None,
    auto_class: type[Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model whose decoder layers are streamed from disk while it runs.

    Args:
        pretrained: a folder or a hub id, as for transformers.
        *args: passed on to the library's `from_pretrained`.
        memory_limit: what the whole process may hold while the model runs: bytes, "4GB" (10^9),
            "4GiB", or "50%" of the least of control group, available and physical memory. "auto"
            is the limit of the `streaming` context that this is called in, or of a model that
            streams in this process already (all share one), or what the environment variable
            PIPELOAD_MEMORY_LIMIT says; else nine tenths of that least.
        tokens: longest sequence (prompt and answer, in tokens) to keep memory free for. Longer ones
            run as well, with fewer weights resident, as long as they fit at all.
        batch: sequences at once to keep memory free for.
        io_mode: "direct" reads past the page cache, "buffered" through it, "uncached" through it
            and drops what was read; "auto" takes the page cache when everything streamed fits in
            it.
        readers: threads that read at once; four when None, two when weights are cast.
        pressure: with "auto", weights are given back when the process's control groups have no more
            room or it waits for memory, before the kernel has to act; "off" looks at `memory_limit`
            alone.
        read_timeout: seconds that a single read may take before whoever waits for it gets a
            ReadError; the model runs again once the disk answers. None or 0: wait for ever. "auto"
            is what the environment variable PIPELOAD_READ_TIMEOUT says, else 120.
        device: where the model computes: "cpu"; "cuda", "cuda:1", "xpu", "mps"; or "auto", CUDA or
            XPU if there is one. None is that of the `streaming` context that this is called in,
            else the CPU. On a device, `memory_limit` is the device's: what its allocator holds
            for tensors of all kinds; weights pass through host memory.
        host_memory_limit: with a device, what the whole process may hold in host memory; None is
            what memory_limit="auto" means on the CPU.
        exact_inputs: whether inputs of int8 and int4 weights that pipeload has made are multiplied
            as they are, by torch's kernels, also where faster ones of our own round those of a few
            rows to int16 (`handle.plan.kernel` says which it is).
        ranks: with "auto" or their number, the blocks of the model are dealt out to the ranks that
            the environment tells of, as `torchrun` sets it (RANK, WORLD_SIZE, MASTER_ADDR,
            MASTER_PORT): all run the same script, each within its own limit and from its own disk.
            "mixed" takes ranks with other processors, or another number of threads: results are
            the same on all of them, but those of no single machine. None: by itself.
        draft: what guesses tokens, several of which `model.generate` has one reading check, of one
            prompt at a time: a folder or hub id of a small model with the same tokens; "auto", the
            model's own copy by `pipeload quantize`, if there is one beside it or in the caches;
            "lookup", the text so far. A model is loaded after two passes, where these wait for the
            disk and it fits the limit, and dropped when it does not pay, or a pass does not fit
            beside it. Tokens are those of the library's assisted generation: several rows at once
            may change last bits, and sampling draws other tokens. Calls with `assistant_model=`, or
            a cache that holds something, are left to the library. None or "off": nothing.
        auto_class: the class whose `from_pretrained` is called. AutoModelForCausalLM when None.
        **kwargs: passed on to the library's `from_pretrained`.

    Returns:
        The library's own model (with `output_loading_info=True`, the library's pair).
        `model.pipeload` is its handle.

    Raises:
        MemoryLimitError: before any weight is read; says the smallest limit that works.
        CheckpointError: a file is missing, malformed or pickled.
        UnsupportedModelError: the model cannot be streamed exactly.
        OptionError: an option means nothing, or the draft has other tokens.
        ReadError: the disk failed, or does not answer.
        GroupError: a rank does not come, is lost, or has another model.
    """
    request = make_request(GivenOptions.among(locals()), _enclosing())
    passed_on = check_source(pretrained, kwargs, request.options.device)
    loading = Loading(request, lenient=False)
    with intercept_loading(loading):
        result = (auto_class or transformers.AutoModelForCausalLM).from_pretrained(
            pretrained, *args, **passed_on
        )
    if not loading.loaded:
        raise _nothing_loaded(pretrained, auto_class)
    if request.draft is not None:
        model = result[0] if isinstance(result, tuple) else result
        attach_draft(model, pretrained, request, kwargs)
    return result


def wrap(
    model: _Model,
    memory_limit: int | str = "auto",
    *,
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    pressure: str = "off",
    read_timeout: float | str | None = "auto",
    device: str | torch.device | None = None,
    host_memory_limit: int | str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    spill_dir: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> _Model:
    """Stream a model that plain `from_pretrained` made, used or not; its memory is given back.

    Its weights are compared with the checkpoint's (not read where they are still a mapping of it);
    adapters and whatever else the checkpoint knows nothing of stays in memory.
    `pipeload.handle(model).remove()` undoes it.

    Args:
        model: a transformers model on the CPU, or one that holds such a model, as PEFT's do; or a
            model on the meta device, with `checkpoint`.
        memory_limit: as for `from_pretrained`.
        tokens: as for `from_pretrained`.
        batch: as for `from_pretrained`.
        io_mode: as for `from_pretrained`.
        readers: as for `from_pretrained`.
        pressure: as for `from_pretrained`.
        read_timeout: as for `from_pretrained`.
        device: as for `from_pretrained`.
        host_memory_limit: as for `from_pretrained`.
        checkpoint: a folder or a hub id; where the model says it is from when None.
        spill_dir: a folder in which weights that are not the checkpoint's are written, to be
            streamed from there. The space is free again when the handle is removed, the model is
            gone, or the process ends in whatever way: the file has no name while it is used, except
            on network mounts and where there is no /proc. What a killed process left there is
            deleted by the next one, or named.
        **kwargs: what the library's `from_pretrained` needs to find the checkpoint: `revision`,
            `subfolder`, `variant`, `cache_dir`, `token`, `key_mapping` and the like.

    Returns:
        `model` itself.

    Raises:
        CheckpointError: a weight is not the checkpoint's (names the first), or there is none.
        MemoryLimitError: as for `from_pretrained`; nothing has changed then.
        UnsupportedModelError: it cannot be streamed exactly.
        OptionError: an option means nothing, or the model is not on the CPU, or streamed already.
        ReadError: the disk failed, or does not answer.
    """
    request = make_request(GivenOptions.among(locals()), _enclosing())
    wrap_model(model, request, checkpoint, spill_dir, kwargs)
    return model


@contextlib.contextmanager
def streaming(
    memory_limit: int | str = "auto",
    *,
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    pressure: str = "off",
    read_timeout: float | str | None = "auto",
    device: str | torch.device | None = None,
    host_memory_limit: int | str | None = None,
    exact_inputs: bool = False,
) -> Iterator[None]:
    """Inside, every `from_pretrained` of every model class is streamed: scripts need no change.

    It holds for the code that runs inside, also for a `pipeline("...", model="id")`; the innermost
    one counts. A thread that is started inside has a context of its own, in which models are loaded
    plainly unless it runs in a copy of this one (`contextvars.copy_context().run`, as
    `asyncio.to_thread` does). Also a decorator. A model that has nothing to stream is loaded
    plainly if it fits the limit.

    Args:
        memory_limit: as for `from_pretrained`.
        tokens: as for `from_pretrained`.
        batch: as for `from_pretrained`.
        io_mode: as for `from_pretrained`.
        readers: as for `from_pretrained`.
        pressure: as for `from_pretrained`.
        read_timeout: as for `from_pretrained`.
        device: as for `from_pretrained`.
        host_memory_limit: as for `from_pretrained`.
        exact_inputs: as for `from_pretrained`; other models are loaded as ever.

    Raises:
        OptionError: an option means nothing.
    """
    request = make_request(GivenOptions.among(locals()), _enclosing())
    with intercept_loading(Loading(request, lenient=True)):
        yield


def stream_everywhere(memory_limit: int | str | None, **options: Any) -> None:
    """Like `streaming`, for all threads, until it is called with None.

    Args:
        memory_limit: as for `from_pretrained`, and from now on that of models which stream already;
            None ends it.
        **options: as for `streaming`.

    Raises:
        MemoryLimitError: models that stream already need more; nothing changes.
        OptionError: an option means nothing; nothing changes.
    """
    if memory_limit is None:
        intercept_everywhere(None)
        return
    request = make_request(GivenOptions(memory_limit, **options))
    if ACCOUNTANT.clients:
        ACCOUNTANT.set_limit(request.options.memory_limit)
    if (device := request.options.device) is not None and account_of(device).clients:
        account_of(device).set_limit(request.options.device_limit)
    intercept_everywhere(Loading(request, lenient=True))


def plan(
    pretrained: str | os.PathLike[str],
    *args: Any,
    memory_limit: int | str = "auto",
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    disk_rate: float | None = None,
    device: str | torch.device | None = None,
    host_memory_limit: int | str | None = None,
    exact_inputs: bool = False,
    draft: str | os.PathLike[str] | None = None,
    auto_class: type[Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """What `from_pretrained` with the same arguments would do. Reads headers only, no weights.

    Args:
        pretrained: a folder or a hub id.
        *args: as for `from_pretrained`.
        memory_limit: as for `from_pretrained`.
        tokens: as for `from_pretrained`.
        batch: as for `from_pretrained`.
        io_mode: as for `from_pretrained`.
        readers: as for `from_pretrained`.
        disk_rate: bytes per second to predict `seconds_per_pass` with.
        device: as for `from_pretrained`.
        host_memory_limit: as for `from_pretrained`.
        exact_inputs: as for `from_pretrained`.
        draft: as for `from_pretrained`; changes nothing here: one comes later, where there is room.
        auto_class: as for `from_pretrained`.
        **kwargs: as for `from_pretrained`.

    Raises:
        MemoryLimitError: the limit is too small; its `smallest_limit` is the least that works.
        CheckpointError: as for `from_pretrained`.
        UnsupportedModelError: as for `from_pretrained`.
        OptionError: as for `from_pretrained`.
    """
    request = make_request(GivenOptions.among(locals()), _enclosing())
    where = request.options.device
    give_back_inherited()
    passed_on = check_source(pretrained, kwargs, where)
    auto = auto_class or transformers.AutoModelForCausalLM
    pending = peek(lambda: auto.from_pretrained(pretrained, *args, **passed_on), where)
    if pending is None:
        raise _nothing_loaded(pretrained, auto_class)
    keep_inputs_exact(pending, request, lenient=False)
    touched = touched_of(pending.model, pending.model)
    return plan_pending(pending, needs_of(pending, where), touched, request).plan


def handle(model: nn.Module) -> Handle:
    """The handle of a streamed model, also when it is wrapped in another module (PEFT).

    Raises:
        OptionError: nothing in `model` is streamed.
    """
    for module in model.modules():
        found = module.__dict__.get("pipeload")
        if isinstance(found, Handle):
            return found
    raise OptionError(
        f"{type(model).__name__} is not streamed: load it with pipeload.from_pretrained, or pass "
        "it to pipeload.wrap."
    )


def _nothing_loaded(pretrained: object, auto_class: type[Any] | None) -> OptionError:
    name = (auto_class or transformers.AutoModelForCausalLM).__name__
    return OptionError(
        f"{name}.from_pretrained loaded no checkpoint from {str(pretrained)!r}, so there is "
        "nothing to stream. Pass a model class as auto_class=."
    )


def _enclosing() -> Request | None:
    intercept = current_intercept()
    return intercept.request if isinstance(intercept, Loading) else None
