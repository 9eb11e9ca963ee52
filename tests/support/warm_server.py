"""A process that has imported torch, transformers and pipeload, and forks for each who asks.

    python -m tests.support.warm_server SOCKET

Each fork becomes what `python WORD ...` would be, but for these imports; it ends as the interpreter
does. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
import warnings
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation.utils",
    "pipeload.entry.loading",
    "pipeload.cli.commands",
)
"""What nearly everybody needs. More of them would be memory that some would not take."""


def import_libraries() -> None:
    """As a user's script does: pipeload before transformers."""
    import pipeload

    pipeload.from_pretrained  # noqa: B018 - its room is imported when it is first named
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is never looked at again stays shared


class Forks:
    """Those that run, and who asked for each."""

    def __init__(self, listener: socket.socket, address: Path) -> None:
        self._listener, self._address = listener, address
        self._running: dict[int, socket.socket] = {}
        self._alive = os.dup(0)
        self._reading, self._writing = os.pipe()  # a byte for each that has ended
        os.set_blocking(self._writing, False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._writing)

    def next(self) -> dict[str, Any]:
        """Fork for each who asks; returns in the forks alone, which have the asker's streams."""
        while True:
            waited: list[Any] = [self._alive, self._reading, self._listener]
            ready = select.select([*waited, *self._running.values()], [], [])[0]
            if self._alive in ready:
                self._address.unlink()
                self._address.parent.rmdir()
                os._exit(0)
            if self._reading in ready:
                os.read(self._reading, 4096)
                self._tell_ends()
            for pid, connection in self._running.items():
                if connection in ready:  # who asked has been killed
                    os.kill(pid, signal.SIGKILL)
            if self._listener in ready and (asked := self._fork()) is not None:
                return asked

    def _fork(self) -> dict[str, Any] | None:
        connection = self._listener.accept()[0]
        asked, streams = _received(connection)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for opened in (*streams, self._alive, self._reading, self._writing):
                os.close(opened)
            for other in (self._listener, connection, *self._running.values()):
                other.close()
            return asked
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(BrokenPipeError):  # who asked may be gone: then it is killed next
            connection.sendall(f"{pid}\n".encode())
        self._running[pid] = connection
        return None

    def _tell_ends(self) -> None:
        for pid in [*self._running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with self._running.pop(pid) as connection, contextlib.suppress(BrokenPipeError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    text, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 16)
    asked: dict[str, Any] = json.loads(text)
    return asked, [*streams]


def become(asked: dict[str, Any]) -> None:
    """What `python` with these words is."""
    import pipeload

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    words: list[str] = asked["words"]
    if words[:2] == ["-W", "ignore"]:
        warnings.simplefilter("ignore")
        words = words[2:]
    importlib.reload(pipeload)  # which looks at the environment
    if words[0] == "-m":
        _run_module(words[1:])
    elif words[0] == "-c":
        _run_code(words[1], ["-c", *words[2:]], "")
    else:
        with open(words[0], encoding="utf-8") as file:  # noqa: PTH123 - as it was typed
            text = file.read()
        _run_code(text, words, os.path.dirname(os.path.abspath(words[0])))  # noqa: PTH100, PTH120


def _run_module(words: list[str]) -> None:
    import runpy

    sys.path[0] = os.getcwd()  # noqa: PTH109 - as Python says it
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_code(text: str, words: list[str], folder: str) -> None:
    name = words[0]
    module = types.ModuleType("__main__")
    if name != "-c":
        module.__file__ = name
    sys.modules["__main__"], sys.argv, sys.path[0] = module, words, folder
    exec(compile(text, "<string>" if name == "-c" else name, "exec"), vars(module))


def main() -> None:
    """Listen, and be what is asked for."""
    import_libraries()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen(64)
        print("ready", flush=True)
        asked = Forks(listener, Path(sys.argv[1])).next()
    become(asked)


if __name__ == "__main__":
    main()
