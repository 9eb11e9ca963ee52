"""`pipeload serve`: a model behind OpenAI's API, until a signal comes."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pipeload
from pipeload.cli.load_model import check_model, load_with, traced
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.run_report import describe_plan
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import OptionError
from pipeload.serving.outcome import settings_of

try:
    from pipeload.serving.server import Listening, Service
except ModuleNotFoundError as error:
    if (error.name or "").startswith("pipeload"):
        raise
    MISSING: str | None = error.name
else:
    MISSING = None

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was typed behind the command."""

    model: str
    memory_limit: str
    device: str = "cpu"
    host_memory_limit: str | None = None
    host: str = "localhost"
    port: int = 8000
    api_key: str | None = None
    at_once: int | None = 8
    """None: as many as fit and help."""
    waiting: int = 64
    grace: float = 30.0
    """Seconds."""
    max_new_tokens: int = 512
    prefix_bytes: int = 0
    dtype: str = "auto"
    io_mode: str = "auto"
    trace: Path | None = None


def serve(asked: Arguments, *, debug: bool) -> None:
    """Answer requests until SIGTERM or Ctrl-C; then those that run may end, for a while.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option, or the address
            is taken.
    """
    if MISSING is not None:
        raise OptionError(
            f"pipeload serve needs the package {MISSING}, which is not installed: "
            "pip install 'pipeload[serve]'"
        )
    silence_libraries(debug=debug)
    check_model(asked.model, files=True)
    tokenizer = load_tokenizer(asked.model)
    with closing(bound(asked.host, asked.port)) as listener:  # a port that is taken is told at once
        model = load_with(asked.model, asked)
        log.info("%s", describe_plan(pipeload.handle(model).plan))
        settings = settings_of(
            model, tokenizer, asked.model, max_new_tokens=asked.max_new_tokens, streams=True
        )
        service = Service(
            model,
            asked.model,
            settings,
            at_once=asked.at_once,
            most_waiting=asked.waiting,
            key=asked.api_key,
            local=is_local(listener),
            names={asked.host, listener.getsockname()[0]},
            prefix_bytes=asked.prefix_bytes,
        )
        listener.listen()  # from here on clients wait, if only for an instant
        _tell(asked, settings.model, listener)
        with traced(model, asked.trace):
            service.run(Listening(listener, asked.grace, log.info))


def _tell(asked: Arguments, name: str, listener: socket.socket) -> None:
    address, port = listener.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    if asked.api_key is None and not is_local(listener):
        log.warning("whoever reaches %s may ask: there is no --api-key", shown)
    log.info("%s answers at http://%s:%d/v1; Ctrl-C ends", name, shown, port)


def bound(host: str, port: int) -> socket.socket:
    """A socket at that address. It does not listen yet: clients are turned away until it does.

    Raises:
        OptionError: there is no such address here, or somebody has it.
    """
    problem: OSError | None = None
    for family, kind, protocol, address in _addresses(host, port):
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            listener.close()
            problem = problem or error
        else:
            return listener
    cause = "there is no such host" if problem is None else problem.strerror
    raise OptionError(
        f"cannot listen at {host!r}, port {port}: {cause}. Give another --host or --port."
    ) from problem


def _addresses(host: str, port: int) -> Iterator[tuple[int, int, int, tuple[str, int]]]:
    """What a name stands for here, IPv4 first: clients try that for localhost."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, address in sorted(found):
        yield family, kind, protocol, address  # type: ignore[misc]


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
