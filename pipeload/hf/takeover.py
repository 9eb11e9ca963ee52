"""Private parts of transformers: where its loading is taken over, and given back.

A model is built by the library's own `from_pretrained`; only the step that fills it with weights
(`PreTrainedModel._load_pretrained_model`) is taken over, for one call in one thread, and the one
that judges quantised checkpoints is listened to. All are replaced only while somebody wants it.
Seen in 5.24.0, tried on 5.17.0 as well.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    modeling_gguf_pytorch_utils,
    modeling_utils,
)

from pipeload.checkpoint.headers import open_checkpoint
from pipeload.checkpoint.hung_reads import resolve_timeout
from pipeload.errors import CheckpointError, PipeloadError, UnsupportedModelError
from pipeload.formats.format import named
from pipeload.formats.registry import (
    check_config,
    check_unpacked,
    format_of,
    is_known,
    is_unpacked,
    method_of,
    nearest_form,
    not_loadable,
    packed_for_accelerator,
)
from pipeload.hf.arguments import check_devices, no_checkpoint
from pipeload.hf.coded_checkpoint import settings_of, take_settings, taken_over
from pipeload.hf.codes_quantizer import CodesQuantizer
from pipeload.hf.gguf import Translated, translate, whole_config
from pipeload.hf.gguf_reader import light_reader
from pipeload.hf.patched_name import Patch
from pipeload.hf.pending_load import PendingLoad

if TYPE_CHECKING:
    import os

    from pipeload.weights.device_interface import Device

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
def take_over_loading(
    stream: Callable[[PendingLoad], Any],
    device: Device | None = None,
    read_timeout: float | str | None = "auto",
) -> Iterator[None]:
    """Have this thread's next `from_pretrained` inside give its meta model to `stream`.

    It is to compute on `device`, the CPU if None. `stream` must fill or replace every parameter and
    return the library's loading report.
    """
    seconds = resolve_timeout(read_timeout)
    with _LOAD, _QUANTIZER, _GGUF:
        _thread.pending, _thread.where = stream, None if device is None else device.where
        _thread.read_timeout = seconds
        try:
            yield
        finally:
            _thread.pending = _thread.where = None


class _Found(Exception):  # noqa: N818 - carries a result out of the library's loader
    def __init__(self, pending: PendingLoad) -> None:
        super().__init__()
        self.pending = pending


def peek(
    load: Callable[[], object],
    device: Device | None = None,
    read_timeout: float | str | None = "auto",
) -> PendingLoad | None:
    """Find what `load`'s `from_pretrained` was about to fill with weights; None if it loads none.

    Whoever may answer for it is not asked. No weights are read.
    """

    def stop(pending: PendingLoad) -> Any:
        raise _Found(pending)

    try:
        with intercept_loading(plainly), take_over_loading(stop, device, read_timeout):
            load()
    except _Found as found:
        return found.pending
    return None


@contextlib.contextmanager
def intercept_loading(intercept: Intercept) -> Iterator[None]:
    """Have `intercept` answer every `from_pretrained` of every class inside, in this context.

    It is called with the library's own function, bound to the class, and what that was called with.
    Models that one loads while it is loaded are left to the library.
    """
    with _FROM_PRETRAINED, _GGUF:
        before = _scoped.get()
        _scoped.set(intercept)
        try:
            yield
        finally:
            # Not `reset`: a notebook leaves a context in another one than it entered it in.
            _scoped.set(before)


def intercept_everywhere(intercept: Intercept | None) -> None:
    """Have it answer in all threads, where `intercept_loading` says nothing, until it is None."""
    global _everywhere  # noqa: PLW0603 - what it is for
    with _everywhere_lock:
        if intercept is not None and _everywhere is None:
            _FROM_PRETRAINED.install()
            _GGUF.install()
        elif intercept is None and _everywhere is not None:
            _FROM_PRETRAINED.uninstall()
            _GGUF.uninstall()
        _everywhere = intercept


def current_intercept() -> Intercept | None:
    """Tell who would answer a `from_pretrained` that is called here and now."""
    return _scoped.get() or _everywhere


def plainly(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Leave it to the library. An `Intercept`."""
    return load(*args, **kwargs)


@functools.wraps(PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]
def _from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    load = partial(_FROM_PRETRAINED.original.__func__, cls)
    intercept = current_intercept()
    with _one_at_a_time:
        _thread.key_mapping = kwargs.get("key_mapping")
        if intercept is None:
            return load(*args, **kwargs)
        with intercept_loading(plainly):
            return intercept(load, *args, **kwargs)


def _load(
    model: PreTrainedModel,
    state_dict: dict[str, Any] | Translated | None,
    checkpoint_files: list[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> tuple[Any, Any]:
    stream = getattr(_thread, "pending", None)
    if stream is None:
        load: _Loader = _LOAD.original.__func__
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)
    _thread.pending = None  # one shot: models that this one loads inside are plain
    translated = state_dict if isinstance(state_dict, Translated) else None
    if (state_dict is not None and translated is None) or not checkpoint_files:
        raise no_checkpoint()
    if load_config.hf_quantizer is not None:
        wanted = load_config.hf_quantizer.quantization_config
        if not load_config.hf_quantizer.pre_quantized:
            raise _quantises(wanted)
        check_unpacked(wanted)
        _check_unpacks(wanted, load_config.weight_mapping or [])
    if _thread.where is None:
        check_devices("device_map", load_config.device_map or {})
    else:
        # What it loads itself belongs there, too. Not by an argument: quantizers choose otherwise,
        # and the library wants accelerate for one. The record is frozen, but read later.
        object.__setattr__(load_config, "device_map", {"": _thread.where})
    if translated is not None:
        checkpoint, file_format = translated.checkpoint, translated.format
    else:
        _refuse_pickled(checkpoint_files)
        index = (load_config.sharded_metadata or {}).get("weight_map")
        checkpoint, file_format = open_checkpoint([Path(f) for f in checkpoint_files], index), None
    timeout = _thread.read_timeout
    return stream(PendingLoad(model, checkpoint, load_config, timeout, file_format)), None


def _load_gguf(
    path: str,
    return_tensors: bool = False,
    model_to_load: Any = None,
    torch_dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Answer for the library's reader of GGUF files: with no tensors where they are streamed."""
    if return_tensors and getattr(_thread, "pending", None) is not None:
        return {"tensors": translate(path, model_to_load)}
    load: Callable[..., dict[str, Any]] = _GGUF.original
    if return_tensors:
        return load(path, return_tensors, model_to_load, torch_dtype)
    with light_reader():
        parsed = load(path)
    return whole_config(path, parsed)


def _get_quantizer(
    config: Any, quantization_config: Any, device_map: Any, *args: Any, **kwargs: Any
) -> tuple[Any, Any, Any]:
    """Call the library's, and refuse what is not streamed before the model is even built."""
    get = _QUANTIZER.original
    if getattr(_thread, "pending", None) is None:
        made: tuple[Any, Any, Any] = get(config, quantization_config, device_map, *args, **kwargs)
        return made
    stored = getattr(config, "quantization_config", None)
    stored = stored or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    # What the library does not know is for it to say.
    asked = quantization_config if kwargs.get("gguf_file") is None else None
    settings = settings_of(config)
    form = taken_over(settings, asked, on_cpu=_thread.where is None)
    if form is not None:
        if asked is not None and named(asked) != form.method:
            raise _quantises(asked)
        renamed = getattr(_thread, "key_mapping", None)
        taking = CodesQuantizer(take_settings(config), form, _thread.read_timeout, renamed)
        taking.validate_environment(device_map=device_map)
        return taking, config, {"": "cpu"} if device_map is None else device_map
    if stored is None and asked is not None and is_known(asked):
        raise _quantises(asked)
    found = None if stored is None else check_config(stored)
    try:
        quantizer, config, places = get(config, quantization_config, device_map, *args, **kwargs)
    except PipeloadError:
        raise
    except Exception as error:
        if found is None:
            raise
        raise not_loadable(found, error) from error
    if found is None or not is_unpacked(found):
        # Nobody said where: then quantizers choose an accelerator if they see one.
        unasked = device_map is None and places is not None
        return quantizer, config, {"": "cpu"} if unasked else places
    if _has_accelerator() and packed_for_accelerator(found):
        # It is streamed to the CPU, where the library has floats, too, when there is nothing else.
        quantizer.quantization_config.dequantize = True
    # Not `places`: that is where the kernels run.
    return quantizer, config, device_map


def _check_unpacks(config: Any, mapping: Sequence[Any]) -> None:
    method = method_of(config)
    operations = (op for entry in mapping for op in getattr(entry, "operations", ()))
    if is_unpacked(format_of(config)) and not any(
        getattr(op, "hf_quantizer", None) for op in operations
    ):
        raise UnsupportedModelError(
            f"checkpoints quantised by {method!r} cannot be streamed with transformers "
            f"{transformers.__version__}, which does not unpack them while it loads. Take a newer "
            "one."
        )


def _has_accelerator() -> bool:
    return bool(torch.accelerator.is_available())


_LOAD = Patch(PreTrainedModel, "_load_pretrained_model", staticmethod(_load))
_GGUF = Patch(modeling_gguf_pytorch_utils, "load_gguf_checkpoint", _load_gguf)
_QUANTIZER = Patch(modeling_utils, "get_hf_quantizer", _get_quantizer)
_FROM_PRETRAINED = Patch(PreTrainedModel, "from_pretrained", classmethod(_from_pretrained))


def _quantises(config: Any) -> UnsupportedModelError:
    method = method_of(config)
    return UnsupportedModelError(
        f"quantization_config= for {method!r} quantises weights while they are loaded, which "
        "needs all of them in memory. Leave it out and load what `pipeload quantize SRC DST "
        f"--method {nearest_form(config)}` makes of the checkpoint: it needs little memory."
    )


def quantisation_of(source: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """Find how a checkpoint is quantised that a model of floats was unpacked from.

    Such a model's own configuration does not tell any more. None where it is no such checkpoint.
    """
    try:
        stored, _ = PreTrainedConfig.get_config_dict(source, **options)
    except OSError:
        return None  # for the library to complain of, if it needs one
    inner = stored.get("text_config") or {}
    found = stored.get("quantization_config") or inner.get("quantization_config")
    if not isinstance(found, dict) or not is_unpacked(format_of(found)):
        return None
    return found | {"dequantize": True}


def _refuse_pickled(files: Sequence[str]) -> None:
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{Path(file).name!r} is a pickled checkpoint: loading it can run code, and it "
                "cannot be streamed. If you trust it, convert it once: "
                "AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET), then "
                "load TARGET."
            )
