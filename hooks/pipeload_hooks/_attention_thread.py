"""Has attention computed in a thread whose end gives back what torch's kernels keep in it.

[Note: kernels that threads keep] On processors with AMX, torch's fused attention compiles kernels
for every length of a half-precision prompt, 0.2 to 0.5 MB in each of its threads, and keeps them as
long as the thread lives: no setting bounds it. So they are had in a thread of our own, with OpenMP
threads of its own; after some lengths it ends, and another goes on. It is the same call with the
same number of threads, and so the same bits.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from pipeload_hooks._modes import PassMode, modes_of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_MOST_KEPT = 16
"""Sizes of attention times threads whose kernels are kept: some 8 MB."""
_DIMENSIONS = 4
_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_NOWHERE = (0, 0)
_Call = tuple[object, ...]


class AttentionAside(PassMode):
    """While active in a thread, attention that leaves kernels behind is computed in another.

    Not where somebody else's modes would miss it, or autograd.
    """

    def __init__(self, place: _Place | None = None) -> None:
        super().__init__()
        self._place = _Place() if place is None else place

    def twin(self) -> AttentionAside:
        """One for another thread, which computes where this one does: no two do so at once."""
        return AttentionAside(self._place)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention and self.active:
            call = _sizes(args, kwargs)
            if call is not None and not is_watched() and (thread := self._place.thread_for(call)):
                return thread.submit(_State().compute, func, args, kwargs).result()
        return func(*args, **kwargs)

    def close(self) -> None:
        """End it, and its thread when that has done what it does. May be called again."""
        self.end()
        self._place.close()


class _Place:
    """The thread that attention is computed in."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._started = _NOWHERE
        """In which process, and for how many threads of OpenMP."""
        self._met: set[_Call] = set()

    def close(self) -> None:
        """End it when it has done what it does. May be called again."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
        self._thread, self._started = None, _NOWHERE

    def thread_for(self, call: _Call) -> ThreadPoolExecutor | None:
        """Where it is computed; None where a thread of ours would compute with another number."""
        here = os.getpid(), torch.get_num_threads()
        kept = len(self._met) * here[1]
        if here != self._started or (call not in self._met and kept >= _MOST_KEPT):
            self._renew(*here)
        self._met.add(call)
        return self._thread

    def _renew(self, process: int, threads: int) -> None:
        if self._thread is not None and self._started[0] == process:
            self._thread.shutdown()
        self._met.clear()
        thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, "pipeload-attention")
        if thread is not None and thread.submit(torch.get_num_threads).result() != threads:
            thread = None  # somebody has set it for one thread alone
        self._thread, self._started = thread, (process, threads)


class _State:
    """What torch knows of a thread, and the result depends on."""

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = _autocast()

    def compute(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """The call, in whichever thread, as in the one in which this was made."""
        with torch.inference_mode(self.inference), torch.no_grad():
            if self.autocast is None:
                return func(*args, **kwargs)
            with torch.autocast("cpu", dtype=self.autocast, cache_enabled=False):
                return func(*args, **kwargs)


def _autocast() -> torch.dtype | None:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None


def _sizes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call | None:
    """What kernels are compiled for; None where none stay."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | dict(kwargs)
    tensors: list[Any] = [given.get(name) for name in _ARGUMENTS[:3]]
    if torch.is_grad_enabled() or not all(map(_is_plain, tensors)):
        return None
    query, key, value = tensors
    if query.shape[-2] == 1 or not kernels_stay(_autocast() or query.dtype):
        return None
    sizes = ((*tensor.shape[-2:], tensor.stride(-2)) for tensor in (query, key, value))
    return query.dtype, given.get("is_causal", False), given.get("attn_mask") is None, *sizes


def _is_plain(tensor: object) -> bool:
    return (
        type(tensor) is torch.Tensor and tensor.dim() == _DIMENSIONS and tensor.device.type == "cpu"
    )


@lru_cache
def kernels_stay(dtype: torch.dtype) -> bool:
    """Whether attention in `dtype` compiles kernels here that its threads keep."""
    part = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}.get(dtype)
    return part is not None and bool(torch.cpu.get_capabilities().get(part, False))


def is_watched() -> bool:
    """Whether modes of somebody else see what is computed in this thread."""
    others = (mode for mode in modes_of_thread() if not isinstance(mode, PassMode))
    return any(True for _ in others) or torch._C._len_torch_dispatch_stack() > 0
