"""`pipeload serve`, as it is typed."""

from __future__ import annotations

import math
import os
from typing import Annotated

import typer

from pipeload.cli import batch_command, choices
from pipeload.cli import options as opt
from pipeload.cli.exit_status import load, reported
from pipeload.cli.model_path import check_path

_KEY = "PIPELOAD_API_KEY"


def _key(text: str | None) -> str | None:
    if text is not None and not (text.isascii() and text.isprintable() and text.strip() == text):
        raise typer.BadParameter("a key is to be of printable ASCII letters.")
    if text == "" or (text is None and os.environ.get(_KEY) == ""):
        raise typer.BadParameter(f"the key is empty. Give one, or none at all: unset {_KEY}.")
    return text


Host = Annotated[
    str, typer.Option(help='Where to listen: this machine alone, or "0.0.0.0" for all networks.')
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="0 takes one that is free.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=_KEY,
        show_envvar=True,
        callback=_key,
        help="What clients must show; better in the environment, which others do not see.",
    ),
]


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise typer.BadParameter(f"{seconds} is no number of seconds. Give one.")
    return seconds


Grace = Annotated[
    float,
    typer.Option(
        min=0,
        callback=_finite,
        help="Seconds that requests have to end once Ctrl-C or SIGTERM has come.",
    ),
]
Waiting = Annotated[
    int, typer.Option(min=0, help="The most that wait while others run; more are sent away.")
]


def serve(
    model: opt.Model,
    *,
    memory_limit: opt.MemoryLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    host: Host = "localhost",
    port: Port = 8000,
    api_key: ApiKey = None,
    at_once: batch_command.AtOnce = "8",
    waiting: Waiting = 64,
    grace: Grace = 30.0,
    max_new_tokens: opt.NewTokens = 512,
    prefix_cache: batch_command.PrefixCache = None,
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    io_mode: opt.IoModeOption = choices.IoMode.AUTO,
    trace: opt.TraceFile = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Answer OpenAI's API over HTTP; requests share each reading of the weights."""
    with reported(debug=debug, quiet=quiet, smaller_pass=("--max-new-tokens",)):
        check_path(model, files=True)
        load("generate_many")
        from pipeload.cli import serve as cli_serve

        cli_serve.serve(
            cli_serve.Arguments(
                model=model,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                host=host,
                port=port,
                api_key=api_key,
                at_once=None if at_once == "auto" else int(at_once),
                waiting=waiting,
                grace=grace,
                max_new_tokens=max_new_tokens,
                prefix_bytes=batch_command.prefix_bytes(prefix_cache),
                dtype=dtype.value,
                io_mode=io_mode.value,
                trace=trace,
            ),
            debug=debug,
        )
