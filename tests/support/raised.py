"""Which places that make an error were reached by the tests: `pytest --every-error`.

Errors are noted as they are made, in this process, in those that pytest-xdist distributes tests to,
and in forked ranks; not in other children that tests start. With the option, and the whole suite,
the run fails if a place was not reached.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pipeload.errors import PipeloadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.error_sites import Site

ROOT = Path(__file__).resolve().parents[2]
_FRAMES = 8  # from an error to the place that had it made
_ERRORS = str(ROOT / "pipeload" / "errors.py")

# Places that only a fault of pipeload or another machine could reach: a part of the message, and
# why no test does.
UNREACHED: dict[str, str] = {
    "is another user's": "raised in a child process, which runs as that user",
    "the thread that dispatches reads has ended. Load": "a thread that ends says why before",
}

Place = tuple[str, int]
"""A file, relative to the repository, and a line."""


NOTED: set[Place] = set()
"""By the plugin; whoever forks adds what was noted there."""


class Raised:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.places = NOTED

    def pytest_configure(self) -> None:
        """Have every error note where it is made."""
        make = super(PipeloadError, PipeloadError).__init__
        assert PipeloadError.__init__ is make, "the class has an __init__ of its own"
        places = self.places

        @functools.wraps(make)
        def note(error: PipeloadError, *args: object) -> None:
            places.update(_frames())
            super(PipeloadError, error).__init__(*args)

        error_class: Any = PipeloadError
        error_class.__init__ = note

    def pytest_unconfigure(self) -> None:
        """Leave the class as it was."""
        del PipeloadError.__init__

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process of pytest-xdist has ended, and says what it saw."""
        output = getattr(node, "workeroutput", {})  # none where it crashed
        self.places |= {(file, line) for file, line in output.get("raised", ())}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say what this process saw, or judge what all saw."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["raised"] = sorted(self.places)
        elif session.config.getoption("every_error") and missing(self.places):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """List the places."""
        if not config.getoption("every_error"):
            return
        found = missing(self.places)
        terminalreporter.section("errors that no test has raised")
        for site in found:
            terminalreporter.line(f"{site.file}:{site.first}: {site.kind}: {site.message}")
        terminalreporter.line(f"{len(found)} places; {len(UNREACHED)} more are exempt")


def _frames() -> Iterable[Place]:
    frame = sys._getframe(2)
    for _ in range(_FRAMES):
        name = frame.f_code.co_filename
        if name.startswith(str(ROOT)) and name != _ERRORS:
            yield Path(name).relative_to(ROOT).as_posix(), frame.f_lineno
        if frame.f_back is None:
            return
        frame = frame.f_back


def missing(places: set[Place]) -> list[Site]:
    """The places that none of `places` lies in."""
    from tests.support.error_sites import find_sites

    lines: dict[str, set[int]] = {}
    for file, line in places:
        lines.setdefault(file, set()).add(line)
    return [
        site
        for site in find_sites()
        if lines.get(site.file, set()).isdisjoint(range(site.first, site.last + 1))
        and not any(part in site.message for part in UNREACHED)
    ]
