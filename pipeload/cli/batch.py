"""`pipeload batch`: a file of requests, answered many at once, into a file of results."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import pipeload
from pipeload._sizes import counted, format_size
from pipeload._text_tables import as_text
from pipeload.cli.batch_file import Results, read_lines
from pipeload.cli.batch_ranks import follow, tell
from pipeload.cli.cooling import Cooling
from pipeload.cli.end_signals import end_signals
from pipeload.cli.load_model import check_model, load_with, traced
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.progress_bar import ProgressBar
from pipeload.cli.run_report import describe_plan
from pipeload.entry.batched import MOST_ROWS, Batched
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import MemoryLimitError, OptionError
from pipeload.ring.joining import rank_here, wanted_size
from pipeload.serving.outcome import as_row, blamed, fitted, settings_of
from pipeload.serving.prefixes import Prefixes
from pipeload.serving.reply import answer, ends_of
from pipeload.serving.request import parse
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.cli.batch_file import Line, Shard
    from pipeload.serving.request import Asked, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was typed behind the command."""

    model: str
    requests: Path
    results: Path
    memory_limit: str
    device: str = "cpu"
    host_memory_limit: str | None = None
    at_once: int | str = "auto"
    batched: bool = False
    """Computed as rows of one pass."""
    prefix_bytes: int = 0
    max_new_tokens: int
    shard: Shard
    dtype: str = "auto"
    io_mode: str = "auto"
    trace: Path | None = None
    ranks: int | str | None = None
    max_temperature: float | None = None
    """In degrees Celsius."""
    json: bool = False


@dataclass(slots=True)
class Counts:
    """What this run has done. Sizes in bytes."""

    requests: int = 0
    """In this part of the file."""
    found: int = 0
    """That were answered before."""
    answered: int = 0
    failed: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    peak_rss_bytes: int = 0

    @property
    def done(self) -> int:
        """Requests that have a result."""
        return self.found + self.answered + self.failed


def run(asked: Arguments, *, debug: bool) -> None:
    """Answer what has no result yet.

    Raises:
        PipeloadError: something is wrong with the model, the limit, an option, or the disk; what
            was answered is in the file.
    """
    silence_libraries(debug=debug)
    if asked.batched and asked.at_once != "auto" and int(asked.at_once) > MOST_ROWS:
        raise OptionError(
            f"--at-once {asked.at_once} is more requests than --batched has rows for, {MOST_ROWS}. "
            f"Give {MOST_ROWS} or fewer, or leave --batched out."
        )
    check_model(asked.model, files=True)
    cooling = None if asked.max_temperature is None else Cooling(asked.max_temperature)
    tokenizer = load_tokenizer(asked.model)
    if rank := rank_here(asked.ranks):
        trace = None if asked.trace is None else Path(f"{asked.trace}.rank{rank}")
        follow(_load(asked), tokenizer, asked.at_once, cooling, trace)
        return
    with Results(asked.results) as results:
        counts = Counts()
        for line in read_lines(asked.requests, asked.shard):
            counts.requests += 1
            counts.found += results.has(line)
        if counts.found:
            log.info("%d of %s are answered already", counts.found, _requests(counts.requests))
        if counts.done < counts.requests or _others_wait(asked.ranks):
            model = _load(asked)
            settings = settings_of(
                model, tokenizer, asked.model, max_new_tokens=asked.max_new_tokens
            )
            _Job(asked, model, settings, results, counts, cooling=cooling).run()
    _report(asked, counts, cooling)


def _others_wait(ranks: int | str | None) -> bool:
    """Whether other ranks have a part in the model, and wait to hear that all is answered."""
    return ranks is not None and wanted_size(ranks) > 1


def _load(asked: Arguments) -> Any:
    more = {} if asked.ranks is None else {"ranks": asked.ranks}
    model = load_with(asked.model, asked, **more)
    log.info("%s", describe_plan(pipeload.handle(model).plan))
    return model


def _requests(count: int) -> str:
    return counted(count, "request")


class _Running(NamedTuple):
    """A request on its way."""

    line: Line
    asked: Asked
    cached: int
    """Tokens of its prompt that are not computed again."""


class _Job:
    """The requests of one run on their way."""

    def __init__(
        self,
        asked: Arguments,
        model: Any,
        settings: Settings,
        results: Results,
        counts: Counts,
        *,
        cooling: Cooling | None,
    ) -> None:
        self._asked, self._model, self._settings = asked, model, settings
        self._results, self._counts, self._cooling = results, counts, cooling
        self._running: dict[int, _Running] = {}
        self._given = 0
        self._prefixes = Prefixes(model, asked.prefix_bytes) if asked.prefix_bytes else None
        self._again: list[_Running] = []
        """What did not fit in memory beside what it was lent: it runs once more without."""
        self._ending = False
        self._rows: Batched | None = None
        self._bar = _Rate(counts)

    def run(self) -> None:
        """Answer them, until the file ends or a signal comes."""
        handle = pipeload.handle(self._model)
        account = handle.session.governor.ledger.account
        account.spare = None if self._prefixes is None else self._prefixes.give_back
        began, before = time.monotonic(), handle.stats().bytes_read
        try:
            with end_signals(self._end), traced(self._model, self._asked.trace):
                self._answer(self._requests())
                if self._again:
                    self._given = 0
                    self._answer(self._repeated())
        finally:
            account.spare = None
            self._bar.close()
            stats = handle.stats()
            self._counts.seconds = time.monotonic() - began
            self._counts.bytes_read = stats.bytes_read - before
            self._counts.peak_rss_bytes = stats.peak_rss_bytes

    def _answer(self, requests: Iterator[dict[str, Any]]) -> None:
        asked = self._asked
        if asked.batched:
            most = None if asked.at_once == "auto" else int(asked.at_once)
            self._rows = Batched(self._model, requests, most, lambda: self._ending)
            many: Any = self._rows.outcomes()
        else:
            requests = tell(self._model, requests, self._last, ending=lambda: self._ending)
            many = pipeload.generate_many(self._model, requests, at_once=asked.at_once)
        with contextlib.closing(many):
            for number, outcome in many:
                self._take(self._running.pop(number), outcome)
                del outcome  # with its cache, before the next one wants memory

    def _last(self) -> Asked:
        """What was taken last."""
        return self._running[self._given - 1].asked

    def _end(self) -> None:
        """Begin no more requests; the second time, end at once."""
        if self._ending:
            if self._cooling is not None:
                self._cooling.end()
            raise KeyboardInterrupt
        self._ending = True
        running = len(self._running) if self._rows is None else self._rows.running
        log.warning("finishing %s; once more ends at once", _requests(running))

    def _requests(self) -> Iterator[dict[str, Any]]:
        # Rows of one pass draw or do not: those that draw come after the others.
        for kinds in ({False}, {True}) if self._asked.batched else ({False, True},):
            yield from self._requests_of(kinds)

    def _requests_of(self, kinds: set[bool]) -> Iterator[dict[str, Any]]:
        """Those that draw, or do not."""
        for line in read_lines(self._asked.requests, self._asked.shard):
            yield from self._repeated()
            if self._ending:
                return
            if self._results.has(line):
                continue
            try:
                asked = self._parsed(line)
            except RequestError as error:
                self._refuse(line, error)
                continue
            if asked.options["do_sample"] in kinds:
                yield self._lent(line, asked)

    def _lent(self, line: Line, asked: Asked) -> dict[str, Any]:
        # Not where requests are read: that would hold what was lent until the next one is.
        arguments, cached = asked.arguments, 0
        if self._prefixes is not None and asked.answers == 1:
            arguments, cached = self._prefixes.lend(arguments)
        return self._started(_Running(line, asked, cached), arguments)

    def _repeated(self) -> Iterator[dict[str, Any]]:
        while self._again and not self._ending:
            yield self._started(self._again.pop())

    def _started(
        self, running: _Running, arguments: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Its arguments, unless others are given, with what waits for a processor to cool."""
        self._running[self._given] = running
        self._given += 1
        given = running.asked.arguments if arguments is None else arguments
        if self._cooling is not None:
            criteria = given.get("stopping_criteria", ())
            given["stopping_criteria"] = [*criteria, self._cooling]
        return given

    def _parsed(self, line: Line) -> Asked:
        if line.wrong is not None:
            raise line.wrong
        asked = parse(line.url, line.body, self._settings)
        asked = as_row(asked, line.body) if self._asked.batched else asked
        return fitted(asked, self._model, self._asked.model)

    def _take(self, running: _Running, outcome: Any) -> None:
        """Write what came of a request.

        Raises:
            PipeloadError: it was not the request's fault, and the next ones would fare no better.
        """
        line, asked, cached = running
        if isinstance(outcome, MemoryLimitError) and cached:
            self._again.append(running._replace(cached=0))
            return
        if isinstance(outcome, BaseException):
            error = blamed(outcome)
            if error is None:
                raise outcome
            self._refuse(line, error)
            return
        if self._prefixes is not None and not isinstance(outcome, torch.Tensor):
            outcome = self._prefixes.keep(outcome)
        exact = not (cached or self._asked.batched)
        ends = ends_of(self._model)
        body, tokens = answer(asked, outcome, self._settings, ends, cached=cached, exact=exact)
        self._results.answer(line, body)
        self._counts.answered += 1
        self._counts.new_tokens += tokens
        self._show()

    def _refuse(self, line: Line, error: RequestError) -> None:
        self._results.refuse(line, error)
        self._counts.failed += 1
        log.warning("line %d: %s", line.number, error)
        self._show()

    def _show(self) -> None:
        self._bar.show(self._counts.done, self._counts.requests)


class _Rate(ProgressBar):
    """How many requests are done, how fast, and how long the rest takes."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        super().__init__("batch", "requests", time_left=True)

    def _describe(self, done: int, total: int, seconds: float) -> str:
        new = done - self._counts.found  # those that were there have taken no time
        text = super()._describe(new, total - self._counts.found, seconds)
        return f"{text}, {self._counts.new_tokens / seconds:.3g} tokens per second"


def _report(asked: Arguments, counts: Counts, cooling: Cooling | None) -> None:
    if asked.json:
        heat = {} if cooling is None else cooling.as_dict()
        sys.stdout.write(json.dumps({"model": asked.model, **asdict(counts), **heat}) + "\n")
        return
    left = counts.requests - counts.done
    rate = counts.new_tokens / counts.seconds if counts.seconds else 0.0
    log.info(
        "%s answered, %d with an error, %d left; %s in %.3g s, %.3g per second; %s read",
        _requests(counts.answered),
        counts.failed,
        left,
        counted(counts.new_tokens, "token"),
        counts.seconds,
        rate,
        format_size(counts.bytes_read),
    )
    if cooling is not None:
        log.info("%s", as_text(cooling.rows()))
