"""`pipeload eval`, as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeload.cli import choices
from pipeload.cli import options as opt
from pipeload.cli.exit_status import load, reported
from pipeload.cli.model_path import check_path

Models = Annotated[
    list[str], typer.Argument(help="Folders or hub ids, float or quantised; one row for each.")
]
Text = Annotated[Path, typer.Option(help="The text that is to be predicted, in UTF-8.")]
WindowLength = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens seen at once; 1024, or all that the models know."),
]
Stride = Annotated[
    int | None, typer.Option(min=1, help="Tokens scored per window; half of it by default.")
]
MaxTokens = Annotated[
    int | None, typer.Option(min=2, help="Stop after this many tokens of the text.")
]

Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="How far predictions are from the first model's; its logits wait in a file (TMPDIR).",
    ),
]


def evaluate(
    models: Models,
    *,
    text: Text,
    memory_limit: opt.MemoryLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    window: WindowLength = None,
    stride: Stride = None,
    batch: opt.WindowsPerPass = None,
    max_tokens: MaxTokens = None,
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    compare: Compare = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure perplexity: how well models predict a text, by a sliding window."""
    with reported(debug=debug, quiet=quiet or json, smaller_pass=("--window", "--batch")):
        for model in models:
            check_path(model, files=True)
        load("from_pretrained")
        from pipeload.cli import evaluate as cli_evaluate

        cli_evaluate.run(
            cli_evaluate.Arguments(
                models=tuple(models),
                text=text,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                window=window,
                stride=stride,
                batch=batch,
                max_tokens=max_tokens,
                dtype=dtype.value,
                compare=compare,
                json=json,
            ),
            debug=debug,
        )
