"""`pipeload timeline`, as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeload.cli import options as opt  # noqa: TC001 - typer reads it at run time
from pipeload.cli.exit_status import reported

Trace = Annotated[Path, typer.Argument(metavar="TRACE", help="What --trace has written.")]
Picture = Annotated[
    Path, typer.Argument(metavar="PICTURE", help="The file to draw: FILE.png, .svg or .pdf.")
]


def timeline(
    trace: Trace, picture: Picture, *, quiet: opt.Quiet = False, debug: opt.Debug = False
) -> None:
    """Draw one pass of a trace: what was read, and waited for, while what computed."""
    with reported(debug=debug, quiet=quiet):
        from pipeload.cli.timeline import draw

        draw(trace, picture)
