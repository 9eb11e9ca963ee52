"""The library's loading arguments: which are passed on, which mean something else here.

Weights are placed by pipeload, so whatever places them elsewhere is either served already or cannot
be: it is dropped, or refused in words. Everything that is not named here is passed on. Whether a
`quantization_config` is for weights that are quantised already is known when the model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError
from pipeload.formats.form_names import INT8, NF4

if TYPE_CHECKING:
    from collections.abc import Callable

_STREAMED_PLACES = frozenset({"cpu", "disk"})
_AUTOMATIC = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
# What accelerate needs to spread a model over memory and disk. A streamed model is never spread:
# it needs no folder, as the checkpoint is one, and `memory_limit` says how much may stay.
_ABOUT_SPREADING = (
    "device_map",
    "max_memory",
    "offload_folder",
    "offload_buffers",
    "offload_state_dict",
    "low_cpu_mem_usage",
)


def adapt(kwargs: Mapping[str, Any], where: object = None) -> dict[str, Any]:
    """Make what is handed to the library of what the user passed.

    `where` is the device that the model is streamed to, None for the CPU.

    Raises:
        CheckpointError: pickled weights are asked for.
        OptionError: an argument places weights where streaming does not, or has them already.
        UnsupportedModelError: weights are to be quantised while they are loaded.
    """
    for name, check in _CHECKS.items():
        if kwargs.get(name) is not None:
            check(name, kwargs[name])
    if kwargs.get("device_map") is not None:
        check_devices("device_map", kwargs["device_map"], where)
    dropped = {*_ABOUT_SPREADING, "load_in_4bit", "load_in_8bit"}
    return {name: value for name, value in kwargs.items() if name not in dropped}


def check_devices(name: str, device_map: Any, where: object = None) -> None:
    """Refuse a map that puts anything elsewhere than on `where`, into host memory or on disk.

    Raises:
        OptionError: it does.
    """
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    others = {str(place) for place in places} - _STREAMED_PLACES
    if not isinstance(device_map, Mapping):
        others -= _AUTOMATIC
    # cpu:0 is the CPU, and "meta" is nowhere.
    others = {place for place in others if place.split(":")[0] != "cpu"}
    if where is not None:  # as numbers they are of the one kind that there is
        kind, _, index = str(where).partition(":")
        others -= {kind, str(where), index or "0"}
    if others:
        target = "the CPU" if where is None else where
        raise OptionError(
            f"{name} puts modules on {', '.join(sorted(others))}; pipeload places weights itself "
            f"and streams to {target}. Leave device_map out, or pass "
            "'auto' or 'cpu'; device= says where the model computes."
        )


def no_checkpoint() -> OptionError:
    """The error for weights that are no files."""
    return OptionError(
        "state_dict= cannot be streamed: its weights are in memory already. Pass a checkpoint."
    )


def _refuse_state_dict(_name: str, _value: object) -> None:
    raise no_checkpoint()


def _refuse_parallel(name: str, value: object) -> None:
    raise OptionError(
        f"{name}={value!r} spreads a model over several processes, and a streamed one runs in one. "
        "Leave it out."
    )


def _refuse_distributed(name: str, value: object) -> None:
    ranks = getattr(value, "pp_size", None)
    if not isinstance(ranks, int) or ranks < 2:
        _refuse_parallel(name, value)
    raise OptionError(
        f"{name} with pp_size={ranks} is the library's own way of giving ranks blocks, and loads "
        f"them whole. Pass ranks={ranks} to pipeload.from_pretrained in its place: blocks are "
        "dealt out to as many ranks, and streamed on each."
    )


def _check_safetensors(name: str, value: object) -> None:
    if not value:
        raise CheckpointError(
            f"{name}=False asks for pickled weights: loading them can run code, and they cannot be "
            "streamed. Leave it out; if the checkpoint has no safetensors files, convert it once."
        )


def _check_bits(name: str, value: object) -> None:
    if value:
        form = NF4 if name == "load_in_4bit" else INT8
        raise UnsupportedModelError(
            f"{name}={value!r} quantises weights while they are loaded, which needs all of them in "
            f"memory. Leave it out and load what `pipeload quantize SRC DST --method {form}` makes "
            "of the checkpoint: it needs little memory."
        )


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "state_dict": _refuse_state_dict,
    "use_safetensors": _check_safetensors,
    "load_in_4bit": _check_bits,
    "load_in_8bit": _check_bits,
    "tp_plan": _refuse_parallel,
    "tp_size": _refuse_parallel,
    "device_mesh": _refuse_parallel,
    "distributed_config": _refuse_distributed,
}
