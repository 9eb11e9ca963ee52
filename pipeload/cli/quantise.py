"""`pipeload quantize` and `convert`: make the checkpoint, and say how far it is."""

from __future__ import annotations

import json as json_text
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from pipeload._sizes import format_size
from pipeload.cli.load_model import DTYPES, check_model, explained
from pipeload.cli.log_lines import silence_libraries
from pipeload.cli.progress_bar import BytesBar, LateBar, ProgressBar
from pipeload.formats.form_names import INT8
from pipeload.quantiser import convert as take_over
from pipeload.quantiser import quantise
from pipeload.quantiser.gguf_tensor import listed

if TYPE_CHECKING:
    from pathlib import Path

    from pipeload.quantiser.quantise import Made


def run(source: str, target: Path, *, json: bool, debug: bool, **options: Any) -> None:
    """Quantise; the result is one line, or one JSON object, on stdout.

    Raises:
        PipeloadError: as `pipeload.quantize`, and for a source that the library cannot load.
    """
    silence_libraries(debug=debug)
    check_model(source)
    read = LateBar(lambda: ProgressBar("calibrating", "Linears", time_left=True))
    back = LateBar(lambda: ProgressBar("going back", "blocks", time_left=True))
    shown = LateBar(lambda: BytesBar("quantising"))
    make = partial(quantise.make, source, target, progress=shown.show, calibrating=read.show)
    with explained(source, "quantise"), closing(shown), closing(back), closing(read):
        made = make(trust_remote_code=False, going_back=back.show, **options)
    _report(made, "stayed floats", json=json)


def convert(
    source: str, target: Path, *, dtype: str, json: bool, debug: bool, **options: Any
) -> None:
    """Convert; the result is one line, or one JSON object, on stdout.

    Raises:
        PipeloadError: as `pipeload.convert`, and for a source that the library cannot load.
    """
    silence_libraries(debug=debug)
    check_model(source, files=True)
    shown = LateBar(lambda: BytesBar("converting"))
    with explained(source, "convert"), closing(shown):
        made = take_over.make(
            source,
            target,
            dtype=DTYPES[dtype],
            progress=shown.show,
            trust_remote_code=False,
            **options,
        )
    _report(made, "are floats", json=json)


def _report(made: Made, are_floats: str, *, json: bool) -> None:
    folder, floats, rounded = made
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if json:
        figures = {"folder": str(folder), "bytes": nbytes, "float_share": floats.share}
        figures |= {"rounded_again": dict(rounded)} if rounded else {}
        typer.echo(json_text.dumps(figures))
    else:
        again = f"; {listed(rounded)} became {INT8}, rounded again" if rounded else ""
        typer.echo(f"{folder}: {format_size(nbytes)}; {floats.described()} {are_floats}{again}")
