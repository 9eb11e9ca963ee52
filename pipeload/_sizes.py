"""Sizes in bytes: what users write ("2GB"), and what messages show ("1.23 GB"); counts, too."""

from __future__ import annotations

import re
from typing import Final

from pipeload.errors import OptionError

__all__ = ["counted", "format_least", "format_size", "parse_share", "parse_size", "show_limit"]

_DECIMAL_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_BINARY_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")

_UNIT_BYTES: Final[dict[str, int]] = {
    "": 1,
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)},
    **{unit[0].lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS) if power},
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS, start=1)},
}

_LARGEST: Final = 2**63 - 1  # what the system calls for memory and files can take

# Nothing that sizes are given for is this small: a number alone below it lacks its unit.
_NO_UNIT_BELOW: Final = 10**6
# What is meant by it, below how much: "4" are gigabytes, "500" megabytes.
_MEANT: Final = ((100, "GB"), (100_000, "MB"), (_NO_UNIT_BELOW, "kB"))

_MOST_SHOWN: Final = 80  # characters of a wrong value in a message
_MOST_BITS_SHOWN: Final = 256  # Python refuses to write out an int of many thousand digits

# At most 20 digits: longer numbers are beyond _LARGEST, and slow to read.
_SIZE: Final = re.compile(
    r"(?P<whole>[0-9]{1,20})(?:\.(?P<part>[0-9]{1,20}))?(?:e\+?(?P<power>[0-9]{1,2}))?"
    r" *(?P<unit>[a-z]*)"
)

_SHARE: Final = re.compile(r"(?P<percent>[0-9]{1,3}(?:\.[0-9]{1,20})?) *%")


def parse_size(value: int | str, *, name: str = "memory_limit") -> int:
    """Turn a size as users write it into a positive number of bytes.

    Args:
        value: Bytes, or a string: "2GB" or "2G" (2 * 10^9), "2GiB" (2 * 2^30), "1.5 GB", "2e9",
            "2000000000".
        name: The option's name, for the message.

    Raises:
        OptionError: The value is no size, lacks its unit, or is not positive.
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise _refusal(name, value, f"is a {type(value).__name__}, not a size")
    if nbytes <= 0:
        raise _refusal(name, value, "is not a positive size")
    if nbytes > _LARGEST:
        raise _refusal(name, value, "is larger than any memory")
    return nbytes


def parse_share(text: str, *, name: str = "memory_limit") -> float:
    """Turn "50%" into 0.5.

    Raises:
        OptionError: it is no percentage, or not more than 0 and at most 100.
    """
    match = _SHARE.fullmatch(text.strip())
    share = float(match["percent"]) / 100 if match is not None else 0.0
    if not 0 < share <= 1:
        raise _refusal(name, text, "is no percentage from 0 to 100")
    return share


def format_size(nbytes: int) -> str:
    """Show a number of bytes in decimal units and three significant digits, as "88.1 MB"."""
    unit, value = _DECIMAL_UNITS[0], float(nbytes)
    for larger in _DECIMAL_UNITS[1:]:
        if abs(value) < 999.5:
            break
        unit, value = larger, value / 1000
    if unit == "B":
        return f"{nbytes} B"
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def format_least(nbytes: int) -> str:
    """Show bytes of which less would not do: as `format_size`, but rounded up.

    Who types what it says has at least as much.
    """
    step: int = 10 ** max(0, len(str(nbytes)) - 3)
    return format_size(-(-nbytes // step) * step)


def counted(count: int, name: str) -> str:
    """As "1 token" and "2 tokens"."""
    return f"{count} {name}{'' if count == 1 else 's'}"


def show_limit(nbytes: int) -> str:
    """A limit in a message: "88123456 bytes (88.1 MB)"; of one that lacks its unit, what is meant.

    Limits in bytes may be as small as that, to ask for the smallest one that works.
    """
    hint = f'; did you mean "{_with_unit(str(nbytes))}"?' if nbytes < _NO_UNIT_BELOW else ""
    return f"{nbytes} bytes ({format_size(nbytes)}{hint})"


def _with_unit(number: str) -> str:
    return number + next(unit for below, unit in _MEANT if float(number) < below)


def _parse_text(text: str, name: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None:
        raise _refusal(name, text, "is not a size")
    whole, part, unit = match["whole"], match["part"] or "", match["unit"]
    # exact: a float would round
    number: int = int(whole + part) * 10 ** int(match["power"] or 0)
    scale: int = 10 ** len(part)
    factor = _UNIT_BYTES.get(unit)
    if factor is None:
        raise _refusal(name, text, f"has the unknown unit {unit[:20]!r}")
    if not unit and not match["power"] and 0 < number < _NO_UNIT_BELOW * scale:
        typed = text.strip()
        raise _refusal(name, text, f'is {typed} bytes (did you mean "{_with_unit(typed)}"?)')
    if factor == 1 and number % scale:
        raise _refusal(name, text, "is not a whole number of bytes (is the unit missing?)")
    return number * factor // scale


def _refusal(name: str, value: object, reason: str) -> OptionError:
    others = ', "50%", "auto"' if name.endswith("limit") else ""
    return OptionError(
        f"{name}={_show(value)} {reason}. Pass bytes as an int, or a number with a unit: "
        f'"2GB" (2 * 10^9 bytes), "1.5GiB" (1.5 * 2^30 bytes), "512MB"{others}.'
    )


def _show(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS_SHOWN:
        return f"(an int of {value.bit_length()} bits)"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
