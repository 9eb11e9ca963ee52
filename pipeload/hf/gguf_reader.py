"""Private parts of transformers: what it asks the package gguf for, in little time and memory.

The package's own reader makes several arrays of each string: of a vocabulary of 128,000 words with
their merges it took half a minute and 650 MB, for a configuration. And the library has the table of
all names made anew for every module of a model. Seen in gguf 0.19.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.checkpoint.gguf import StringArray, read_gguf, read_strings
from pipeload.hf.patched_name import Patch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeload.checkpoint.gguf import Value

_UNSIGNED, _BOOL, _STRING, _ARRAY, _DOUBLE = 10, 7, 8, 9, 12
_thread = threading.local()


class Field(NamedTuple):
    """A value as the package shows it: those of `parts` that `data` names, of types."""

    parts: Sequence[Any]
    data: Sequence[int]
    types: list[int]


class Named(NamedTuple):
    """A tensor, of which nobody asks more than its name."""

    name: str


class LightReader:
    """In place of the package's reader, for who wants metadata and the names of tensors alone."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: the file is malformed.
            ReadError: the system could not read it.
        """
        metadata, entries = read_gguf(path)
        self.fields = {key: _field(path, value) for key, value in metadata.items()}
        self.tensors = [Named(name) for name in entries]


def _field(path: Path, value: Value) -> Field:
    if isinstance(value, StringArray):
        strings = read_strings(path, value)
        return Field(strings, range(len(strings)), [_ARRAY, _STRING])
    if isinstance(value, (array, tuple)):
        kind = _BOOL if isinstance(value, tuple) else _kind(value[0] if value else 0)
        return Field([[item] for item in value], range(len(value)), [_ARRAY, kind])
    if isinstance(value, str):
        return Field([value.encode()], [0], [_STRING])
    return Field([[value]], [0], [_kind(value)])


def _kind(value: float) -> int:
    """A type that the library takes for the same as the value's own."""
    if isinstance(value, bool):
        return _BOOL
    return _UNSIGNED if isinstance(value, int) else _DOUBLE


@contextlib.contextmanager
def light_reader() -> Iterator[None]:
    """Have the package's reader be a light one inside, in this thread."""
    with _reader_patch():
        _thread.light = True
        try:
            yield
        finally:
            _thread.light = False


@contextlib.contextmanager
def names_once() -> Iterator[None]:
    """Have the package make each table of names once inside: it only depends on what is asked."""
    import gguf

    with Patch(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)):
        yield


@functools.cache
def _reader_patch() -> Patch:
    import gguf  # not there unless a file of its kind is read

    def reader(path: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "light", False):
            return LightReader(Path(path))
        return patch.original(path, *args, **kwargs)

    patch = Patch(gguf, "GGUFReader", reader)
    return patch
