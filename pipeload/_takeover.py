"""Private parts of transformers: where its loading is taken over, and given back.

A model is built by the library's own `from_pretrained`; only the step that fills it with weights
(`PreTrainedModel._load_pretrained_model`) is taken over, for one call in one thread. Both methods
are replaced only while somebody wants it. Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pipeload._checkpoint import open_checkpoint
from pipeload._loading_args import check_devices, no_checkpoint
from pipeload._patch import Patch
from pipeload._transformers import PendingLoad, quantised_by
from pipeload.errors import CheckpointError, UnsupportedModelError

_Loader = Callable[..., tuple[Any, Any]]
Intercept = Callable[..., Any]
"""Called with the library's `from_pretrained`, bound to a class, and what that was called with."""
_thread = threading.local()
_scoped: ContextVar[Intercept | None] = ContextVar("pipeload_intercept", default=None)
_everywhere: Intercept | None = None
_everywhere_lock = threading.Lock()
_one_at_a_time = threading.RLock()
"""While a model is built, the library replaces functions of its own for all threads, and two that
load at once can leave such a replacement behind (`tie_weights` that does nothing, for one)."""


@contextlib.contextmanager
def take_over_loading(stream: Callable[[PendingLoad], Any]) -> Iterator[None]:
    """Inside, this thread's next `from_pretrained` gives its meta model to `stream`.

    `stream` must fill or replace every parameter and return the library's loading report.
    """
    with _LOAD:
        _thread.pending = stream
        try:
            yield
        finally:
            _thread.pending = None


class _Found(Exception):  # noqa: N818 - carries a result out of the library's loader
    def __init__(self, pending: PendingLoad) -> None:
        super().__init__()
        self.pending = pending


def peek(load: Callable[[], object]) -> PendingLoad | None:
    """What `load`'s `from_pretrained` was about to fill with weights; None if it loads none.

    Whoever may answer for it is not asked. No weights are read.
    """

    def stop(pending: PendingLoad) -> Any:
        raise _Found(pending)

    try:
        with intercept_loading(plainly), take_over_loading(stop):
            load()
    except _Found as found:
        return found.pending
    return None


@contextlib.contextmanager
def intercept_loading(intercept: Intercept) -> Iterator[None]:
    """Inside, in this context, every `from_pretrained` of every class is `intercept`'s to answer.

    It is called with the library's own function, bound to the class, and what that was called with.
    Models that one loads while it is loaded are left to the library.
    """
    with _FROM_PRETRAINED:
        before = _scoped.get()
        _scoped.set(intercept)
        try:
            yield
        finally:
            # Not `reset`: a notebook leaves a context in another one than it entered it in.
            _scoped.set(before)


def intercept_everywhere(intercept: Intercept | None) -> None:
    """The same in all threads, wherever `intercept_loading` says nothing, until it is None."""
    global _everywhere  # noqa: PLW0603 - what it is for
    with _everywhere_lock:
        if intercept is not None and _everywhere is None:
            _FROM_PRETRAINED.install()
        elif intercept is None and _everywhere is not None:
            _FROM_PRETRAINED.uninstall()
        _everywhere = intercept


def current_intercept() -> Intercept | None:
    """Who would answer a `from_pretrained` that is called here and now."""
    return _scoped.get() or _everywhere


def plainly(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An `Intercept` that leaves it to the library."""
    return load(*args, **kwargs)


@functools.wraps(PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]
def _from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    load = partial(_FROM_PRETRAINED.original.__func__, cls)
    intercept = current_intercept()
    with _one_at_a_time:
        if intercept is None:
            return load(*args, **kwargs)
        with intercept_loading(plainly):
            return intercept(load, *args, **kwargs)


def _load(
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> tuple[Any, Any]:
    stream = getattr(_thread, "pending", None)
    if stream is None:
        load: _Loader = _LOAD.original.__func__
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)
    _thread.pending = None  # one shot: models that this one loads inside are plain
    if state_dict is not None or not checkpoint_files:
        raise no_checkpoint()
    _refuse_quantised(load_config)
    check_devices("device_map", load_config.device_map or {})
    _refuse_pickled(checkpoint_files)
    index = (load_config.sharded_metadata or {}).get("weight_map")
    checkpoint = open_checkpoint([Path(file) for file in checkpoint_files], index)
    return stream(PendingLoad(model, checkpoint, load_config)), None


_LOAD = Patch(PreTrainedModel, "_load_pretrained_model", staticmethod(_load))
_FROM_PRETRAINED = Patch(PreTrainedModel, "from_pretrained", classmethod(_from_pretrained))
_STREAMED_METHODS = {"bitsandbytes", "pipeload"}


def _refuse_quantised(load_config: Any) -> None:
    quantizer = load_config.hf_quantizer
    name = quantised_by(quantizer)
    if name is None:
        return
    if not quantizer.pre_quantized:
        raise UnsupportedModelError(
            f"quantization_config= for {name!r} quantises weights while they are loaded, which "
            "needs all of them in memory. Leave it out and load what `pipeload quantize SRC DST "
            f"--method {_nearest_method(quantizer.quantization_config)}` makes of the checkpoint: "
            "it needs little memory."
        )
    if name not in _STREAMED_METHODS:
        raise UnsupportedModelError(
            f"checkpoints quantised by {name!r} cannot be streamed by this version. Use the "
            "model's float checkpoint (bf16, fp16 or fp32), one quantised by bitsandbytes, or one "
            "that `pipeload quantize` has made of the float one."
        )


def _nearest_method(config: Any) -> str:
    """What `pipeload quantize` calls it, as far as it makes the same."""
    if not getattr(config, "load_in_4bit", False):
        return "int8"
    double = " --double-quant" if config.bnb_4bit_use_double_quant else ""
    return f"{config.bnb_4bit_quant_type}{double}"


def _refuse_pickled(files: Sequence[str]) -> None:
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{Path(file).name!r} is a pickled checkpoint: loading it can run code, and it "
                "cannot be streamed. If you trust it, convert it once: "
                "AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET), then "
                "load TARGET."
            )
