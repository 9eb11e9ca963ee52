"""`pipeload quantize`: makes the checkpoint, and says how far it is."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Any

import typer

from pipeload._sizes import format_size
from pipeload.cli.load_model import check_model
from pipeload.cli.log_lines import silence_libraries
from pipeload.cli.progress_bar import BytesBar, LateBar, ProgressBar
from pipeload.entry.texts import first_line
from pipeload.errors import CheckpointError, PipeloadError
from pipeload.quantiser.quantise import make

if TYPE_CHECKING:
    from pathlib import Path


def run(source: str, target: Path, *, json: bool, debug: bool, **options: Any) -> None:
    """Quantise; the result is one line, or one JSON object, on stdout.

    Raises:
        PipeloadError: as `pipeload.quantize`, and for a source that the library cannot load.
    """
    silence_libraries(debug=debug)
    check_model(source)
    read = LateBar(lambda: ProgressBar("calibrating", "Linears", time_left=True))
    shown = LateBar(lambda: BytesBar("quantising"))
    try:
        made = make(
            source,
            target,
            progress=shown.show,
            calibrating=read.show,
            trust_remote_code=False,
            **options,
        )
    except PipeloadError:
        raise
    except Exception as error:  # a configuration can make the library raise nearly anything
        raise CheckpointError(
            f"cannot quantise {source!r}: {first_line(error)}. Check the checkpoint; --debug shows "
            "where it failed."
        ) from error
    finally:
        read.close()
        shown.close()
    folder, floats = made
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if json:
        figures = {"folder": str(folder), "bytes": nbytes, "float_share": floats.share}
        typer.echo(json_text.dumps(figures))
    else:
        typer.echo(f"{folder}: {format_size(nbytes)}; {floats.described()} stayed floats")
