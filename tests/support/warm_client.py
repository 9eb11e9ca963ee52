"""What a test runs in the place of `python`: has a process that is warm run the words instead.

    python -I -S warm_client.py SOCKET [-W ignore] [-c CODE | -m MODULE | SCRIPT] [WORD ...]

It is given this one's folder, environment and standard streams, and signals that this one gets;
this one ends as it does.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Ask, wait, and end in the same way."""
    pids: list[int] = []
    early: list[int] = []

    def forward(number: int, _frame: object) -> None:
        if pids:
            os.kill(pids[0], number)
        else:
            early.append(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes as long to import as the rest
    asked = {"words": sys.argv[2:], "folder": folder, "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(sys.argv[1])
        text = json.dumps(asked).encode() + b"\n"
        sent = socket.send_fds(server, [text], [0, 1, 2])
        server.sendall(text[sent:])
        with server.makefile() as answers:
            pids.append(int(answers.readline()))
            for missed in early:
                os.kill(pids[0], missed)
            status = int(answers.readline())
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
