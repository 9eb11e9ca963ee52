"""Writes down what happens while a model streams: reads, waits, computing, what goes.

[Note: nothing when off] Whoever is watched does not know of it: for as long as a trace is written,
an attribute of the object stands before the method of its class, and notes when that is called.
Afterwards it is gone, so that a model without a trace asks no question for it.

The file has the form that Chrome's tracing made common, and Perfetto shows: a list of events. It
grows as they come, and is of use without its end.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TextIO

from pipeload.errors import OptionError, UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from typing_extensions import Self

    from pipeload.engine.session import Session

_MICRO = 1e6


class Trace:
    """One that is being written. A context manager; what it watched goes on after it."""

    def __init__(self, session: Session, path: Path) -> None:
        self._session, self._path = session, path
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._failed: OSError | None = None
        self._named: set[int] = set()
        """Threads whose names were written."""
        self._running: dict[tuple[int, int], float] = {}
        """When a site began, by thread and site."""
        self._watched: list[tuple[object, str]] = []

    def __enter__(self) -> Self:
        """Begin the file, and watch.

        Raises:
            OptionError: it cannot be written.
            UnsupportedOperationError: another one is being written of this model.
        """
        prefetcher, streamer = self._session.prefetcher, self._session.streamer
        if "acquire" in vars(streamer):
            raise UnsupportedOperationError(
                "a trace of this model is being written already. Let that one end first."
            )
        try:
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise self._refused(error) from error
        try:
            self._count()
            self._watch(prefetcher, "acquire", self._waited)
            self._watch(prefetcher, "resplit", self._replanned)
            self._watch(streamer, "acquire", self._began)
            self._watch(streamer, "release", self._ended)
            self._watch(prefetcher.dispatcher, "begin_load", self._load_began)
            self._watch(prefetcher.dispatcher, "end_load", self._load_ended)
        except BaseException:  # an interrupt
            self._leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more, and end the file.

        Raises:
            OptionError: something of it could not be written.
        """
        self._leave()
        if self._failed is not None:
            raise self._refused(self._failed) from self._failed

    def _leave(self) -> None:
        for watched, name in self._watched:
            vars(watched).pop(name, None)
        with self._lock:
            file, self._file = self._file, None
            if file is None:
                return
            try:
                with file:
                    file.write("\n]\n")
            except OSError as error:
                self._failed = self._failed or error

    def _refused(self, error: OSError) -> OptionError:
        return OptionError(
            f"cannot write the trace {str(self._path)!r}: {error.strerror}. Name another file."
        )

    def _watch(self, watched: Any, name: str, note: Callable[..., Any]) -> None:
        method = getattr(watched, name)

        def noting(*args: Any, **options: Any) -> Any:
            return note(method, *args, **options)

        self._watched.append((watched, name))
        vars(watched)[name] = noting

    # -- what is noted; each calls the method that it stands before --------------------------------

    def _waited(self, acquire: Callable[[int], float], index: int) -> float:
        began = time.perf_counter()
        seconds = acquire(index)
        if seconds:
            self._span("wait", self._unit(index), began)
        return seconds

    def _began(self, acquire: Callable[[int], bool], site: int) -> bool:
        found = acquire(site)
        self._running[threading.get_ident(), site] = time.perf_counter()
        return found

    def _ended(self, release: Callable[[int], bool], site: int) -> bool:
        began = self._running.pop((threading.get_ident(), site), None)
        if began is not None:
            self._span("compute", self._session.streamer.seats[site].name, began)
        return release(site)

    def _load_began(self, begin: Callable[..., None], index: int, slot: int | None) -> None:
        dispatcher = self._session.prefetcher.dispatcher
        before = None if slot is None else dispatcher.occupant(slot)
        if before is not None and before != index:
            self._event("i", "evict", self._unit(before), s="t")
        nbytes = self._session.prefetcher.units[index].plan.streamed.nbytes
        self._event("b", "read", self._unit(index), id=index, args={"streamed": nbytes})
        begin(index, slot)

    def _load_ended(self, end: Callable[[Any], None], load: Any) -> None:
        end(load)
        self._event("e", "read", self._unit(load.unit), id=load.unit)
        self._count()

    def _replanned(self, resplit: Callable[..., None], *args: Any, **options: Any) -> None:
        resplit(*args, **options)
        self._count()

    def _unit(self, index: int) -> str:
        return self._session.prefetcher.units[index].plan.name

    # -- how it is written -------------------------------------------------------------------------

    def _count(self) -> None:
        """How much is in memory now."""
        counters = self._session.prefetcher.counters
        held = {"resident": counters.resident_bytes, "buffers": counters.buffer_bytes}
        self._event("C", "memory", "bytes", args=held)

    def _span(self, kind: str, name: str, began: float) -> None:
        seconds = time.perf_counter() - began
        self._event("X", kind, name, at=began, dur=round(seconds * _MICRO, 1))

    def _event(
        self, phase: str, kind: str, name: str, *, at: float | None = None, **more: Any
    ) -> None:
        me = threading.get_ident()
        when = (time.perf_counter() if at is None else at) * _MICRO
        event = {"ph": phase, "cat": kind, "name": f"{kind} {name}", "ts": round(when, 1)}
        event |= {"pid": os.getpid(), "tid": me, **more}
        with self._lock:
            if self._file is None or self._failed is not None:
                return
            events = [event]
            if me not in self._named:
                told = {"name": threading.current_thread().name}
                named = {"ph": "M", "name": "thread_name", "args": told}
                events.insert(0, named | {"pid": os.getpid(), "tid": me})
            try:
                for each in events:
                    self._file.write(("[\n" if not self._named else ",\n") + json.dumps(each))
                    self._named.add(me)
            except OSError as error:  # told at the end: whoever is watched is not to fail for it
                self._failed = error
