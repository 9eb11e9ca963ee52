"""`pipeload batch`, as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeload._sizes import parse_size
from pipeload.cli import choices
from pipeload.cli import options as opt
from pipeload.cli.batch_file import Shard
from pipeload.cli.exit_status import load, reported
from pipeload.cli.model_path import check_path
from pipeload.errors import OptionError

Requests = Annotated[
    Path, typer.Argument(metavar="REQUESTS", help="A request on each line, as of OpenAI's batches.")
]
Results = Annotated[
    Path, typer.Argument(metavar="RESULTS", help="A result on each line; those there are kept.")
]


def _at_once(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f'{text!r} is neither "auto" nor a whole number from 1.')
    return text


def _shard(text: str) -> str:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise typer.BadParameter(f'{text!r} is no part. Write "2/4" for the second of four.')
    return text


AtOnce = Annotated[
    str,
    typer.Option(
        callback=_at_once,
        help='The most requests that share a reading; "auto": as many as fit and help.',
    ),
]
ShardOption = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="I/N",
        callback=_shard,
        help="Answer every N-th line, from the I-th on: a part for each of N machines.",
    ),
]


def _size(text: str | None) -> str | None:
    try:
        parse_size(text or 1, name="--prefix-cache")
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    return text


PrefixCache = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        callback=_size,
        help='Keep so much of what was computed, "500MB" say, for requests that go on with it. '
        "Last bits may change.",
    ),
]
Batched = Annotated[
    bool,
    typer.Option(
        "--batched",
        help="Compute requests as rows of one pass: faster where computing binds. Last bits are "
        "then not those of each alone.",
    ),
]


def prefix_bytes(text: str | None) -> int:
    """How much of what was computed is kept."""
    return 0 if text is None else parse_size(text)


def batch(
    model: opt.Model,
    requests: Requests,
    results: Results,
    *,
    memory_limit: opt.MemoryLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    max_new_tokens: opt.NewTokens = 128,
    at_once: AtOnce = "auto",
    batched: Batched = False,
    prefix_cache: PrefixCache = None,
    shard: ShardOption = "1/1",
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    io_mode: opt.IoModeOption = choices.IoMode.AUTO,
    trace: opt.TraceFile = None,
    ranks: opt.Ranks = None,
    max_temperature: opt.MaxTemperature = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Answer a file of requests, many by each reading; run again after a kill, it goes on."""
    with reported(debug=debug, quiet=quiet or json, smaller_pass=("--max-new-tokens",)):
        check_path(model, files=True)
        others = {
            "--prefix-cache": prefix_cache is not None,
            "--max-temperature": max_temperature is not None,
            "--device": device != "cpu",
        }
        alone = {"--batched": batched, "--prefix-cache": prefix_cache is not None}
        if ranks is not None and any(alone.values()):
            other = next(name for name, asked in alone.items() if asked)
            raise OptionError(f"--ranks goes with no {other}. Leave one of them out.")
        if batched and any(others.values()):
            other = next(name for name, asked in others.items() if asked)
            raise OptionError(f"--batched goes with no {other}. Leave one of them out.")
        load("generate_many")
        from pipeload.cli import batch as cli_batch

        part, _, parts = shard.partition("/")
        cli_batch.run(
            cli_batch.Arguments(
                model=model,
                requests=requests,
                results=results,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                max_new_tokens=max_new_tokens,
                at_once=at_once if at_once == "auto" else int(at_once),
                batched=batched,
                prefix_bytes=prefix_bytes(prefix_cache),
                shard=Shard(int(part), int(parts)),
                dtype=dtype.value,
                io_mode=io_mode.value,
                trace=trace,
                ranks=int(ranks) if ranks and ranks.isdecimal() else ranks,
                max_temperature=max_temperature,
                json=json,
            ),
            debug=debug,
        )
