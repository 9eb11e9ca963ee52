"""What the user asked for, checked and parsed before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeload.budget.plan_options import Options
from pipeload.budget.reserve import PassHint
from pipeload.budget.shared_limit import ACCOUNTANT, host_limit_alone
from pipeload.checkpoint.hung_reads import resolve_timeout
from pipeload.checkpoint.io_mode import IO_MODES
from pipeload.devices.open_device import open_device
from pipeload.devices.shared_device_limit import account_of, device_limit
from pipeload.entry.ranks import check_ranks
from pipeload.errors import OptionError
from pipeload.system.memory import parse_limit

if TYPE_CHECKING:
    from pipeload.entry.options import GivenOptions
    from pipeload.weights.device_interface import Device

LIMIT_VARIABLE = "PIPELOAD_MEMORY_LIMIT"
"""The environment variable that says what "auto" means."""
_MAX_READERS = 64
_PRESSURES = ("off", "auto")
_NO_DRAFT = "off"


@dataclass(frozen=True, slots=True)
class Request:
    """How models are to be streamed."""

    options: Options
    hint: PassHint
    pressure: bool
    exact_inputs: bool
    ranks: int | str | None = None
    """Of several machines; None where this process has the model for itself."""
    draft: str | os.PathLike[str] | None = None
    """What guesses tokens: a model, "auto" or "lookup"; None: nothing."""


def make_request(given: GivenOptions, enclosing: Request | None = None) -> Request:
    """Check what was asked for.

    Args:
        given: what the user gave.
        enclosing: the request of the `streaming` context that this is made in.

    Raises:
        OptionError: something means nothing.
    """
    _check(given)
    outer = None if enclosing is None else enclosing.options
    device = None if outer is None else outer.device
    if given.device is not None:
        device = open_device(given.device)
    timeout = resolve_timeout(given.read_timeout)
    hint = PassHint(given.tokens, given.batch)
    if device is None:
        if given.host_memory_limit is not None:
            raise host_limit_alone(given.host_memory_limit)
        process_limit, device_bytes = given.memory_limit, 0
    else:
        if given.pressure == "auto":
            raise OptionError(
                f"pressure='auto' gives weights back to the host, and on {device.where} it holds "
                "none that could be. Leave it out."
            )
        process_limit = "auto" if given.host_memory_limit is None else given.host_memory_limit
        device_bytes = _device_limit(device, given.memory_limit, outer)
    limit, found_out = _resolve_limit(process_limit, outer)
    options = Options(
        limit,
        given.io_mode,
        given.readers,
        given.disk_rate,
        timeout,
        device=device,
        device_limit=device_bytes,
        found_out=found_out,
    )
    draft = _checked_draft(given)
    ranks = check_ranks(given.ranks, device)
    return Request(options, hint, given.pressure == "auto", bool(given.exact_inputs), ranks, draft)


def _check(given: GivenOptions) -> None:
    """Refuse what means nothing whatever the machine is."""
    for name, value in (("tokens", given.tokens), ("batch", given.batch)):
        if not _is_whole(value) or value < 1:
            raise OptionError(f"{name}={value!r} must be a whole number of at least 1.")
    readers = given.readers
    if readers is not None and not (_is_whole(readers) and 1 <= readers <= _MAX_READERS):
        raise OptionError(
            f"readers={readers!r} must be a whole number from 1 to {_MAX_READERS}, or None."
        )
    if given.io_mode not in IO_MODES:
        raise OptionError(
            f"io_mode={given.io_mode!r} is unknown. Choose one of {', '.join(IO_MODES)}."
        )
    if given.pressure not in _PRESSURES:
        raise OptionError(f"pressure={given.pressure!r} is unknown. Choose one of 'off', 'auto'.")
    if given.exact_inputs not in (True, False):  # 1 and 0 come of the environment
        raise OptionError(
            f"exact_inputs={given.exact_inputs!r} means nothing. Give True or False; in the "
            "environment, 1 or 0."
        )


def _checked_draft(given: GivenOptions) -> str | os.PathLike[str] | None:
    """What guesses tokens; None for "off"."""
    draft = given.draft
    if draft is None or draft == _NO_DRAFT:
        return None
    if not isinstance(draft, (str, os.PathLike)) or not os.fspath(draft):
        raise OptionError(
            f"draft={draft!r} means nothing. Give 'auto', 'lookup', 'off', or the folder or hub id "
            "of a small model."
        )
    if given.ranks is not None:
        raise OptionError(
            f"draft={str(draft)!r} goes with no ranks=: how much is guessed follows the clock, and "
            "those of ranks differ. Pass generate() an assistant_model= instead, on all of them."
        )
    return draft


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
