"""The front of a GGUF file: a cursor that believes no length, and the values of its metadata.

All numbers are little-endian. A string is its length in eight bytes, then UTF-8; an array is the
type of its items, their number, then the items.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from pipeload.checkpoint.untrusted_json import MAX_JSON_BYTES, malformed, reading, show

if TYPE_CHECKING:
    from io import FileIO
    from pathlib import Path

    from pipeload.errors import CheckpointError

__all__ = ["Cursor", "StringArray", "Value", "read_metadata", "read_strings"]

MAX_HEADER_BYTES: Final = MAX_JSON_BYTES
"""The largest known, of half a million words with their merges, have 20 MB."""
_MAX_KEY_BYTES: Final = 65535  # the format's own bound
_BLOCK_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct("<Q")
_NUMBER: Final = struct.Struct("<I")

_STRING, _ARRAY, _BOOL = 8, 9, 7
# The codes of struct and array agree, for what has them: `array` is in the machine's order.
_CODES: Final = {
    number: code
    for number, code in enumerate(("B", "b", "H", "h", "I", "i", "f", "B", "", "", "Q", "q", "d"))
    if code
}
_SCALARS: Final = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_MIN_PAIR_BYTES: Final = 8 + 4 + 1
_SWAPS: Final = struct.pack("=H", 1) != struct.pack("<H", 1)


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings that was passed over, as a vocabulary is."""

    count: int
    start: int
    """Place in the file of the first string's length."""
    stop: int
    """Place after the last string."""

    def __len__(self) -> int:
        """How many strings there are."""
        return self.count


Value: TypeAlias = (
    "str | int | float | bool | array[int] | array[float] | tuple[bool, ...] | StringArray"
)


class Cursor:
    """Reads a file from its start on, a block ahead at most."""

    def __init__(self, path: Path, file: FileIO, file_bytes: int) -> None:
        self._path, self._file, self._file_bytes = path, file, file_bytes
        self._held = bytearray()
        self.place = 0
        """Of the next byte in the file."""

    def wrong(self, what: str, advice: str = "Download the file again.") -> CheckpointError:
        """Make the error for what is wrong with the file."""
        return malformed(self._path, what, advice)

    @property
    def left(self) -> int:
        """How many bytes the file has from here on."""
        return self._file_bytes - self.place

    def take(self, nbytes: int, what: str) -> bytes:
        """Take the next bytes; `what` they are, for the error if the file does not have them."""
        start = self.place
        self._hold(start + nbytes, what)
        self.place = start + nbytes
        return bytes(self._held[start : self.place])

    def number(self, what: str) -> int:
        """Take an integer of four bytes."""
        return int(_NUMBER.unpack(self.take(4, what))[0])

    def length(self, what: str) -> int:
        """Take an integer of eight bytes."""
        return int(_LENGTH.unpack(self.take(8, what))[0])

    def name(self, what: str) -> str:
        """Take a string that names something: valid, printable or not, and not too long."""
        length = self.length(what)
        if length > _MAX_KEY_BYTES:
            raise self.wrong(f"{what} has {length} bytes, wanted at most {_MAX_KEY_BYTES}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"{what} is not valid UTF-8") from None

    def text(self, what: str) -> str:
        """Take a string for people; bytes that are no UTF-8 are replaced."""
        return self.take(self.length(what), what).decode("utf-8", "replace")

    def pass_strings(self, count: int, what: str) -> StringArray:
        """Pass over so many strings: only their lengths are looked at."""
        self.check_room(count, 8, what)
        start = place = self.place
        read = _LENGTH.unpack_from
        for _ in range(count):
            if place + 8 > len(self._held):
                self._hold(place + 8, what)
            place += 8 + read(self._held, place)[0]
        self._hold(place, what)
        self.place = place
        return StringArray(count, start, place)

    def check_room(self, count: int, least: int, what: str) -> None:
        """Refuse more items, of at least so many bytes each, than the rest of the file can hold."""
        if count * least > self.left:
            raise self.wrong(
                f"it claims {count} {what}, and has {self.left} bytes for them: it is truncated or "
                "broken"
            )

    def _hold(self, stop: int, what: str) -> None:
        """Have the file's bytes up to `stop`; nothing is allocated for what is not there."""
        if stop > self._file_bytes:
            got = f"got {self._file_bytes} bytes, wanted {stop} or more for {what}"
            raise self.wrong(f"it is truncated: {got}")
        if stop > MAX_HEADER_BYTES:
            raise self.wrong(f"its header is longer than {MAX_HEADER_BYTES} bytes, at {what}")
        while len(self._held) < stop:
            block = self._file.read(max(_BLOCK_BYTES, stop - len(self._held)))
            if not block:
                raise self.wrong(f"it was cut short while it was read, at {what}")
            self._held += block


def read_strings(path: Path, strings: StringArray) -> list[bytes]:
    """Read the strings that `read_metadata` has passed over.

    Raises:
        CheckpointError: the file is not there any more, or another.
        ReadError: the system could not read it.
    """
    with reading(path), path.open("rb") as file:
        file.seek(strings.start)
        block = file.read(strings.stop - strings.start)
    found, place, read = [], 0, _LENGTH.unpack_from
    for _ in range(strings.count):
        length = read(block, place)[0] if place + 8 <= len(block) else len(block)
        found.append(block[place + 8 : place + 8 + length])
        place += 8 + length
    if place != strings.stop - strings.start or len(block) < place:
        raise malformed(path, "it was changed while it was read", "Load it again.")
    return found


def read_metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    """Read so many keys with their values.

    Raises:
        CheckpointError: a key stands twice, a value is of no known type, or the file ends.
    """
    cursor.check_room(count, _MIN_PAIR_BYTES, "metadata keys")
    found: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in found:
            raise cursor.wrong(f"the metadata key {show(key)} stands twice")
        found[key] = _value(cursor, cursor.number(f"the type of {show(key)}"), show(key))
    return found


def _value(cursor: Cursor, kind: int, key: str) -> Value:
    if kind == _STRING:
        return cursor.text(f"the value of {key}")
    if kind == _ARRAY:
        return _array(cursor, key)
    if kind not in _SCALARS:
        raise cursor.wrong(f"the metadata key {key} has a value of type {kind}, which is none")
    scalar = _SCALARS[kind]
    (value,) = scalar.unpack(cursor.take(scalar.size, f"the value of {key}"))
    if kind != _BOOL:
        return int(value) if isinstance(value, int) else float(value)
    if value > 1:
        raise cursor.wrong(f"the metadata key {key} is {value}, wanted a truth value of 0 or 1")
    return bool(value)


def _array(cursor: Cursor, key: str) -> Value:
    kind = cursor.number(f"the type of the items of {key}")
    count = cursor.length(f"the number of items of {key}")
    if kind == _STRING:
        return cursor.pass_strings(count, f"strings of {key}")
    if kind not in _SCALARS:
        what = "arrays" if kind == _ARRAY else f"items of type {kind}"
        raise cursor.wrong(f"the metadata key {key} is an array of {what}, which cannot be read")
    cursor.check_room(count, _SCALARS[kind].size, f"items of {key}")
    raw = cursor.take(count * _SCALARS[kind].size, f"the items of {key}")
    if kind == _BOOL:
        return tuple(map(bool, raw))
    values = _empty(_CODES[kind])
    values.frombytes(raw)
    if _SWAPS:
        values.byteswap()
    return values


def _empty(code: str) -> array[int] | array[float]:
    return array(code)
