"""Figures of a server for Prometheus: of requests, of reading, and of memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeload.engine.stats import Stats
    from pipeload.serving.desk import Desk

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_COUNTED = {
    "passes": "Forward passes that ended.",
    "bytes_read": "Bytes read from disk.",
    "read_seconds": "Seconds during which at least one read was in flight.",
    "stall_seconds": "Seconds that blocks waited for their weights.",
    "compute_seconds": "Seconds inside passes that were not waiting.",
    "hits": "Blocks whose weights were there or under way when they ran.",
    "misses": "Blocks whose read began only when they ran.",
}
_MEASURED = {
    "resident_bytes": "Weights that are not read again.",
    "buffer_bytes": "Buffers that streamed weights pass through.",
    "memory_limit": "The limit of memory, in bytes.",
    "peak_rss_bytes": "The most memory that the process ever held.",
}


class Metrics:
    """What `/metrics` shows."""

    def __init__(self, stats: Callable[[], Stats], desk: Desk) -> None:
        """`stats`: of the model."""
        self._registry = CollectorRegistry()
        self._registry.register(_Reading(stats, desk))
        ProcessCollector(registry=self._registry)
        self._requests = Counter(
            "pipeload_requests", "Requests, by HTTP status.", ["status"], registry=self._registry
        )
        self._tokens = Counter(
            "pipeload_tokens", "Tokens of answered requests.", ["kind"], registry=self._registry
        )
        self._first, self._whole = (
            Histogram(name, about, buckets=_SECONDS, registry=self._registry)
            for name, about in (
                ("pipeload_first_token_seconds", "From a request to its answer's first token."),
                ("pipeload_request_seconds", "From a request to the end of its answer."),
            )
        )

    def ended(self, status: int) -> None:
        """A request was answered, or refused."""
        self._requests.labels(str(status)).inc()

    def answered(self, *, prompt: int, new: int, first: float | None, whole: float) -> None:
        """An answer is complete; in tokens, and in seconds since the request."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("new").inc(new)
        if first is not None:
            self._first.observe(first)
        self._whole.observe(whole)

    def text(self) -> bytes:
        """All figures, in Prometheus' own form."""
        return generate_latest(self._registry)


class _Reading:
    """Asks the model when somebody wants to know."""

    def __init__(self, stats: Callable[[], Stats], desk: Desk) -> None:
        self._stats, self._desk = stats, desk
        self._lock = threading.Lock()
        self._most: dict[str, float] = {}

    def collect(self) -> Iterator[Any]:
        """The figures now."""
        stats = self._stats()
        for name, about in _COUNTED.items():
            # A request that ends is for an instant counted nowhere: a counter never falls.
            with self._lock:
                most = max(self._most.get(name, 0.0), getattr(stats, name))
                self._most[name] = most
            yield CounterMetricFamily(f"pipeload_{name}", about, value=most)
        for name, about in _MEASURED.items():
            yield GaugeMetricFamily(f"pipeload_{name}", about, value=getattr(stats, name))
        for name, about, value in (
            ("running", "Requests that run now.", self._desk.running),
            ("waiting", "Requests that wait for them.", self._desk.waiting),
            ("prefix_bytes", "What is kept of requests that have ended.", self._desk.kept_bytes),
        ):
            yield GaugeMetricFamily(f"pipeload_{name}", about, value=value)

    def describe(self) -> Iterator[Any]:
        """Nothing: it would be asked before the model is there."""
        return iter(())
