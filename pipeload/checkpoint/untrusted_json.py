"""What the checkpoint modules share: reading files that may lie, and saying what is wrong."""

from __future__ import annotations

import json
import reprlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeGuard

from pipeload.errors import CheckpointError, PipeloadError, ReadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "MAX_JSON_BYTES",
    "is_file",
    "is_text_map",
    "malformed",
    "parse_json",
    "read_json",
    "reading",
    "show",
]

MAX_JSON_BYTES: Final = 100_000_000  # the format's own bound on a header; taken for indexes, too
_MAX_DIGITS: Final = 400  # of an integer: none is longer, and made-up ones take minutes to convert

_repr = reprlib.Repr()  # names come from the file: control characters escaped, length bounded
_repr.maxstring = _repr.maxother = 160
_repr.maxlist = _repr.maxdict = 10
show = _repr.repr


def malformed(path: Path, what: str, advice: str = "Download the file again.") -> CheckpointError:
    """Return the error that says what is wrong with `path` and what to do."""
    return CheckpointError(f"Checkpoint file {str(path)!r} cannot be used: {what}. {advice}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system says about `path` into our own errors."""
    try:
        yield
    except PipeloadError:
        raise
    except (
        FileNotFoundError,
        NotADirectoryError,
        ValueError,
    ) as error:  # ValueError: NUL in a name
        raise malformed(path, "it does not exist", "Check the path, or download it.") from error
    except OSError as error:
        raise ReadError(
            f"Cannot read {str(path)!r}: {error.strerror or error}. Check its permissions and "
            "the disk, then try again."
        ) from error


def is_file(path: Path) -> bool:
    """Whether `path` is a file or a link to one; a name that the system refuses is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # such as a name too long for the system
        return False


def read_json(path: Path) -> object:
    """Read and parse a whole JSON file of bounded size."""
    with reading(path), path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise malformed(path, f"it has more than {MAX_JSON_BYTES} bytes of JSON")
    return parse_json(path, data, strict=False)


def parse_json(path: Path, data: bytes, *, strict: bool) -> object:
    """Parse JSON; `strict` also refuses what safetensors forbids: repeated keys, NaN, Infinity."""
    try:
        return json.loads(
            data.decode("utf-8"),
            parse_int=_parse_int,
            parse_constant=_refuse_constant if strict else None,
            object_pairs_hook=_make_unique if strict else None,
        )
    except RecursionError as error:
        raise malformed(path, "its JSON is nested too deeply") from error
    except ValueError as error:
        raise malformed(path, f"its JSON is not valid: {error}") from error


def is_text_map(value: object) -> TypeGuard[dict[str, str]]:
    """Whether parsed JSON is an object that maps strings to strings."""
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON value")


def _make_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {show(key)} stands twice in one object")
        table[key] = value
    return table
