"""`python -m pipeload --memory-limit 2GB script.py ...`: an unmodified script, its models streamed.

The script finds the interpreter as Python itself would have left it: its own arguments, its folder
first on the path, `__main__` as its name. Nothing is printed that it does not print.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeload._everywhere import stream_when_imported
from pipeload._sizes import parse_share, parse_size
from pipeload.errors import OptionError, PipeloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

IO_MODES = ("auto", "direct", "buffered", "uncached")


def run(arguments: Sequence[str]) -> None:
    """Run what the command line names, as `__main__`.

    Raises:
        SystemExit: as the script ends; with 2 if the command line is wrong, with 1 after one line
            where pipeload refused something.
    """
    options, rest = _split(arguments)
    stream_when_imported(
        options.memory_limit,
        tokens=options.tokens,
        batch=options.batch,
        io_mode=options.io_mode,
        readers=options.readers,
        pressure=options.pressure,
    )
    try:
        if options.module is not None:
            sys.argv = ["-m", *rest]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(options.module, run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(rest)
            sys.path[0] = str(Path(rest[0]).resolve().parent)
            runpy.run_path(rest[0], run_name="__main__")
    except PipeloadError as error:
        _end(error)


def _split(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Pipeload's options, and the script with its own."""
    parser = _parser()
    options = parser.parse_args(arguments)
    rest: list[str] = options.script
    if options.module is not None:
        return options, rest
    if not rest:
        parser.error("name a script, or a module with -m")
    if not Path(rest[0]).exists():
        parser.error(
            f"there is no file {rest[0]!r}. For an installed command, name its module: -m MODULE"
        )
    return options, rest


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pipeload",
        description="Run a script whose models are streamed from disk. It needs no change.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory-limit",
        default="auto",
        type=_limit,
        help='what the whole process may hold: "2GB", "1.5GiB", "50%%"; "auto" asks '
        "PIPELOAD_MEMORY_LIMIT, then the system",
    )
    parser.add_argument(
        "--tokens", type=int, default=256, help="longest sequence to keep memory free for"
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--io-mode", choices=IO_MODES, default="auto")
    parser.add_argument("--readers", type=int, default=None, help="threads that read at once")
    parser.add_argument("--pressure", choices=("off", "auto"), default="off")
    script = parser.add_mutually_exclusive_group()
    script.add_argument("-m", dest="module", metavar="MODULE", help="run a module as a script")
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="...", help="the script and its arguments"
    )
    return parser


def _limit(text: str) -> str:
    try:
        if text != "auto":
            parse = parse_share if text.rstrip().endswith("%") else parse_size
            parse(text, name="--memory-limit")
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _end(error: PipeloadError) -> NoReturn:
    """Say what was refused and where the script asked for it, without the libraries' frames."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = {Path(os.__file__).parent, Path(__file__).parent}
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(p) for p in libraries)]
    own = [f for f in own if "site-packages" not in f.filename and not f.filename.startswith("<")]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    sys.stdout.flush()
    sys.stderr.write(f"error: {error}{where}\n")
    raise SystemExit(1) from error
