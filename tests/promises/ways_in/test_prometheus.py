"""A real Prometheus reads a server's figures, and understands the dashboard's questions."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.support.served import served, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMETHEUS = shutil.which("prometheus")
DASHBOARD = Path(__file__).resolve().parents[3] / "examples" / "grafana.json"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus: Debian's package"),
]


def expressions(part: Any) -> Iterator[str]:
    """What a dashboard asks for."""
    if isinstance(part, dict):
        if isinstance(expression := part.get("expr"), str):
            yield expression
        for value in part.values():
            yield from expressions(value)
    elif isinstance(part, list):
        for value in part:
            yield from expressions(value)


def test_it_scrapes(talker: Path, tmp_path: Path) -> None:
    """The target is up, its counts are ours, and every panel of the dashboard shows something."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = free.getsockname()[1]
    config = tmp_path / "prometheus.yml"
    with served(talker) as server, (tmp_path / "log").open("w") as log:
        target = {"targets": [f"127.0.0.1:{server.client.port}"]}
        scraped = {"job_name": "pipeload", "scrape_interval": "1s", "static_configs": [target]}
        config.write_text(json.dumps({"scrape_configs": [scraped]}))  # which is YAML, too
        options = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        options.append(f"--web.listen-address=127.0.0.1:{own}")
        assert PROMETHEUS is not None
        child = subprocess.Popen([PROMETHEUS, *options], stdout=log, stderr=log)

        def found(query: str) -> list[dict[str, Any]]:
            """What it answers; nothing while it starts."""
            address = f"http://127.0.0.1:{own}/api/v1/query?"
            try:
                asked = address + urllib.parse.urlencode({"query": query})
                with urllib.request.urlopen(asked, timeout=10) as reply:
                    answer = json.load(reply)
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
                return []
            except (urllib.error.URLError, TimeoutError):
                return []
            assert answer["status"] == "success", (query, answer)
            result: list[dict[str, Any]] = answer["data"]["result"]
            return result

        def value(query: str) -> float | None:
            result = found(query)
            return float(result[0]["value"][1]) if result else None

        try:
            wait_until(lambda: value("up") == 1)
            assert server.client.chat("Hello", max_tokens=3).status == 200
            wait_until(lambda: value('pipeload_requests_total{status="200"}') == 1)
            assert value('pipeload_tokens_total{kind="new"}') == 3
            asked = [*expressions(json.loads(DASHBOARD.read_text(encoding="utf-8")))]
            assert asked
            for query in asked:
                wait_until(lambda query=query: found(query))
        finally:
            child.terminate()
            child.wait(30)
