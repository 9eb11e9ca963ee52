"""The files of `pipeload batch`: a request on each line, and a result on each line.

[Note: whole lines] A result is appended with its line's end as its last byte, and is on the disk
before the next one is written. So whatever kills the process leaves whole lines, and at most one
that lacks its end: that one is cut off by the next run, which answers what has no line yet. Lines
are known by the number of their request, so that nothing that a request says can confuse that.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeload.errors import OptionError
from pipeload.serving.request_error import RequestError, parse_json
from pipeload.system.folder_lock import try_lock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from typing_extensions import Self

_ID = "batch_req_"
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
URLS = ("/v1/chat/completions", "/v1/completions")
"""What requests may be for."""
_LINE_KEYS = {"custom_id", "method", "url", "body"}
_BEGIN = f'{{"id": "{_ID}'.encode()
"""Of each result."""
# JSON lets them stand for themselves, and some who read lines end one there.
_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


class Shard(NamedTuple):
    """Every `parts`-th line, from line `part` on."""

    part: int
    """From 1."""
    parts: int

    def has(self, number: int) -> bool:
        """Whether the line of that number, from 1, is in it."""
        return number % self.parts == self.part % self.parts


class Line(NamedTuple):
    """A request as it stands in the file."""

    number: int
    """Of the line, from 1."""
    custom_id: str | None
    """None where the line gives none."""
    url: str
    body: dict[str, Any]
    wrong: RequestError | None = None
    """Why it is no request."""

    @property
    def id(self) -> str:
        """What its result is known by."""
        return f"{_ID}{self.number}"


def read_lines(path: Path, shard: Shard) -> Iterator[Line]:
    """The requests of a file that are in a part of it; empty lines are none.

    Raises:
        OptionError: the file cannot be read.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OptionError(
                    f"the requests {str(path)!r} are no file: they are read twice, which a pipe "
                    "gives once. Put them in a file first."
                )
            for number, data in enumerate(file, 1):
                if not data.strip():
                    continue
                line = _parse(number, data)
                again = line.custom_id in seen
                if line.custom_id is not None:
                    seen.add(line.custom_id)
                if again and line.wrong is None:
                    wrong = RequestError(
                        f"custom_id {line.custom_id!r} stands in a line before. Give each its own.",
                        parameter="custom_id",
                    )
                    line = line._replace(wrong=wrong)
                if shard.has(number):
                    yield line
    except OSError as error:
        raise OptionError(
            f"cannot read the requests {str(path)!r}: {error.strerror}. Check the path."
        ) from error


def _parse(number: int, data: bytes) -> Line:
    try:
        given = parse_json(data)
    except (ValueError, RecursionError) as error:
        wrong = RequestError(f"line {number} is no JSON ({error}). Write one object on each line.")
        return Line(number, None, "", {}, wrong)
    if not isinstance(given, dict):
        wrong = RequestError(f"line {number} is no JSON object. Write one on each line.")
        return Line(number, None, "", {}, wrong)
    name, url, body = given.get("custom_id"), given.get("url"), given.get("body")
    custom_id = name if isinstance(name, str) and name else None
    return Line(
        number,
        custom_id,
        url if isinstance(url, str) else "",
        body if isinstance(body, dict) else {},
        _fault(given, custom_id),
    )


def _fault(given: dict[str, Any], custom_id: str | None) -> RequestError | None:
    """What is wrong with a line, its body apart."""
    if custom_id is None:
        return RequestError(
            "custom_id is to be a text. Give each line its own.", parameter="custom_id"
        )
    if given.get("method") != "POST":
        message = f'method is {given.get("method")!r}. Write "POST".'
        return RequestError(message, parameter="method")
    if given.get("url") not in URLS:
        message = f"url is {given.get('url')!r}. What is served: {', '.join(URLS)}."
        return RequestError(message, parameter="url")
    if not isinstance(given.get("body"), dict):
        return RequestError("body is to be an object: what is asked.", parameter="body")
    if unknown := sorted(given.keys() - _LINE_KEYS):
        return RequestError(
            f"{unknown[0]!r} means nothing here. Leave it out.", parameter=unknown[0]
        )
    return None


def _may_be_torn(data: bytes) -> bool:
    """Whether it is what a kill left of a result: else it is somebody else's, and stays."""
    return data.startswith(_BEGIN) or _BEGIN.startswith(data)


class Results:
    """The file of results, which one process at a time appends to. A context manager."""

    def __init__(self, path: Path) -> None:
        """Open it, and cut off what a run that was killed has left of a line.

        Raises:
            OptionError: it cannot be written, another process writes it, or it holds other lines.
        """
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise OptionError(
                f"cannot write the results {str(path)!r}: {error.strerror}. Name another file."
            ) from error
        try:
            self._found = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> dict[str, str | None]:
        """Which results are there: the `custom_id` of each, by its id."""
        if try_lock(self._file) is False:
            raise OptionError(
                f"another process writes {str(self._path)!r}. Let it end, or name another file."
            )
        found: dict[str, str | None] = {}
        end = 0
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            for number, data in enumerate(file, 1):
                if not data.endswith(b"\n"):
                    if not _may_be_torn(data):
                        raise self._is_no_result(number)
                    break
                line = None
                with contextlib.suppress(ValueError):
                    line = json.loads(data)
                if not isinstance(line, dict) or not str(line.get("id", "")).startswith(_ID):
                    raise self._is_no_result(number)
                found[line["id"]] = line.get("custom_id")
                end += len(data)
        if os.fstat(self._file).st_size > end:
            os.ftruncate(self._file, end)
        return found

    def _is_no_result(self, number: int) -> OptionError:
        return OptionError(
            f"line {number} of {str(self._path)!r} is no result of pipeload batch. Name another "
            "file."
        )

    def has(self, line: Line) -> bool:
        """Whether that request has its result.

        Raises:
            OptionError: the result is of another request.
        """
        if line.id not in self._found:
            return False
        if self._found[line.id] != line.custom_id:
            raise OptionError(
                f"{str(self._path)!r} holds results of other requests: of line {line.number} there "
                f"is {self._found[line.id]!r}, and it asks for {line.custom_id!r}. Name another "
                "file."
            )
        return True

    def answer(self, line: Line, body: dict[str, Any]) -> None:
        """Append what came of a request."""
        self._append(line, 200, body)

    def refuse(self, line: Line, error: RequestError) -> None:
        """Append why nothing came of it."""
        if line.custom_id is None:
            told = {"code": error.code, "message": str(error)}
            self._write({"id": line.id, "custom_id": None, "response": None, "error": told})
            return
        self._append(line, error.status, error.body())

    def _append(self, line: Line, status: int, body: dict[str, Any]) -> None:
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        whole = {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}
        self._write(whole)

    def _write(self, result: dict[str, Any]) -> None:
        self._found[result["id"]] = result["custom_id"]
        text = json.dumps(result, ensure_ascii=False).translate(_LINE_ENDS)
        data = memoryview(text.encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)
        except OSError as error:
            cure = "Make room" if error.errno in _NO_ROOM else "Check the disk"
            raise OptionError(
                f"cannot write the results {str(self._path)!r}: {error.strerror}. {cure}, and run "
                "the same command again: it goes on from what is there."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
