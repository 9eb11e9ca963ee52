"""The library's own server and chat, `-m transformers.cli.transformers`, through pipeload."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.promises.ways_in.test_scripts import SPARE_BYTES, WAIT_SECONDS, environment, streamed
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the server needs {', '.join(MISSING)}"),
]
COMMANDS = ("-m", "transformers.cli.transformers")
SERVE = (*COMMANDS, "serve")
OPTIONS = ("--device", "cpu", "--default-seed", "1", "--port")
QUESTION = "What is the capital of France? Name a second one, too."


def served(folder: Path, log: Path, before: Sequence[str] = ()) -> tuple[list[str], int]:
    """What a server says, and the status it ends with on Ctrl-C."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [*warm_python(), *before, *SERVE, str(folder), *OPTIONS, str(port)]
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # not to be ignored there
    with log.open("w") as output:
        try:
            child = subprocess.Popen(words, env=environment(), stdout=output, stderr=output)
        finally:
            signal.signal(signal.SIGINT, previous)
    address = f"http://localhost:{port}"
    try:
        until = time.monotonic() + WAIT_SECONDS
        while not answers(address):
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.2)
        said = [complete(address, stream=stream) for stream in (False, True)]
        said.append(chat(address, folder, before))
        child.send_signal(signal.SIGINT)
        return said, child.wait(WAIT_SECONDS)
    finally:
        child.kill()
        child.wait()


def chat(address: str, folder: Path, before: Sequence[str]) -> str:
    """What `transformers chat` shows of a talk with the server, but for the time it took."""
    words = [*before, *COMMANDS, "chat", str(folder), f"{address}/v1"]
    done = subprocess.run(
        [sys.executable, *words, "max_new_tokens=8", "do_sample=False"],
        env=environment(HF_HUB_OFFLINE="0"),  # its client asks nobody else, but would not ask us
        input=f"{QUESTION}\nn\n!exit\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"^(\d+ tokens) in .*$", r"\1", done.stdout, flags=re.MULTILINE)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def complete(address: str, **options: Any) -> str:
    """What it answers, as one text or in pieces."""
    question = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16} | options
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as reply:
        text = reply.read().decode()
    if not options["stream"]:
        content: str = json.loads(text)["choices"][0]["message"]["content"]
        return content
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [choice["delta"] for event in events for choice in event.get("choices") or []]
    return "".join(delta.get("content") or "" for delta in deltas)


def test_a_server_answers_as_plain(smollm2_bf16: Path, tmp_path: Path) -> None:
    """Under a limit that does not hold the model; one too small is refused in a line."""
    refused = streamed("--memory-limit", "1MB", *SERVE, smollm2_bf16, "--device", "cpu", warm=True)
    assert refused.status == 1
    line = refused.err.splitlines()[-1]
    found = re.search(r"^error: .*smallest limit that works here is (\d+) bytes", line)
    assert found is not None, refused.err
    pipeload = ("-m", "pipeload", "--memory-limit", str(int(found[1]) + SPARE_BYTES))
    plain = served(smollm2_bf16, tmp_path / "log")
    assert all(len(text.split()) > 3 for text in plain[0])
    assert "8 tokens" in plain[0][-1]
    assert served(smollm2_bf16, tmp_path / "log", pipeload) == plain
