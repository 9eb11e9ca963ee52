"""What the user asked for, checked and parsed before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeload.budget.accounts import ACCOUNTANT, host_limit_alone
from pipeload.budget.options import Options
from pipeload.budget.reserve import PassHint
from pipeload.checkpoint.files import IO_MODES
from pipeload.checkpoint.stalls import resolve_timeout
from pipeload.devices.accounts import account_of, device_limit
from pipeload.devices.open_device import open_device
from pipeload.errors import OptionError
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    import torch

    from pipeload.weights.device import Device

LIMIT_VARIABLE = "PIPELOAD_MEMORY_LIMIT"
"""The environment variable that says what "auto" means."""
_MAX_READERS = 64
_PRESSURES = ("off", "auto")


@dataclass(frozen=True, slots=True)
class Request:
    """How models are to be streamed."""

    options: Options
    hint: PassHint
    pressure: bool


def make_request(
    memory_limit: int | str = "auto",
    *,
    tokens: int = 256,
    batch: int = 1,
    io_mode: str = "auto",
    readers: int | None = None,
    pressure: str = "off",
    disk_rate: float | None = None,
    read_timeout: float | str | None = "auto",
    device: str | torch.device | None = None,
    host_memory_limit: int | str | None = None,
    enclosing: Request | None = None,
) -> Request:
    """Check what was asked for.

    Args:
        memory_limit: as for `pipeload.from_pretrained`.
        tokens: as there.
        batch: as there.
        io_mode: as there.
        readers: as there.
        pressure: as there.
        disk_rate: bytes per second to predict with.
        read_timeout: as for `pipeload.from_pretrained`.
        device: as for `pipeload.from_pretrained`.
        host_memory_limit: as there.
        enclosing: what this is a part of.

    Raises:
        OptionError: something means nothing.
    """
    for name, value in (("tokens", tokens), ("batch", batch)):
        if not _is_whole(value) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1.")
    if readers is not None and not (_is_whole(readers) and 1 <= readers <= _MAX_READERS):
        raise OptionError(
            f"readers={readers!r} must be a whole number from 1 to {_MAX_READERS}, or None."
        )
    if io_mode not in IO_MODES:
        raise OptionError(f"io_mode={io_mode!r} is unknown. Choose one of {', '.join(IO_MODES)}.")
    if pressure not in _PRESSURES:
        raise OptionError(f"pressure={pressure!r} is unknown. Choose one of 'off', 'auto'.")
    outer = None if enclosing is None else enclosing.options
    found = None if outer is None else outer.device
    if device is not None:
        found = open_device(device)
    timeout = resolve_timeout(read_timeout)
    if found is None:
        if host_memory_limit is not None:
            raise host_limit_alone(host_memory_limit)
        limit, found_out = _resolve_limit(memory_limit, outer)
        options = Options(limit, io_mode, readers, disk_rate, timeout, found_out=found_out)
        return Request(options, PassHint(tokens, batch), pressure == "auto")
    if pressure == "auto":
        raise OptionError(
            f"pressure='auto' gives weights back to the host, and on {found.where} it holds none "
            "that could be. Leave it out."
        )
    named = "auto" if host_memory_limit is None else host_memory_limit
    limit, found_out = _resolve_limit(named, outer)
    options = Options(limit, io_mode, readers, disk_rate, timeout, found_out=found_out)
    options = replace(options, device=found, device_limit=_device_limit(found, memory_limit, outer))
    return Request(options, PassHint(tokens, batch), pressure=False)


def _device_limit(device: Device, memory_limit: int | str, outer: Options | None) -> int:
    """Who says "auto" gets the limit that is in force already."""
    if memory_limit != "auto":
        return device_limit(device, memory_limit)
    if outer is not None and outer.device is device:
        return outer.device_limit
    account = account_of(device)
    if account.clients and account.limit:
        return account.limit
    return device_limit(device, "auto")


def _resolve_limit(memory_limit: int | str, outer: Options | None) -> tuple[int, bool]:
    """Who says "auto" gets the limit that is in force already, else the environment's.

    Also whether neither is there, and the machine was asked.
    """
    if memory_limit != "auto":
        return parse_limit(memory_limit), False
    if outer is not None:
        return outer.memory_limit, outer.found_out
    if ACCOUNTANT.clients and ACCOUNTANT.limit:
        return ACCOUNTANT.limit, False
    named = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not named:
        return parse_limit("auto"), True
    try:
        return parse_limit(named), False
    except OptionError as error:
        raise OptionError(f"the environment variable {LIMIT_VARIABLE}: {error}") from None


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
