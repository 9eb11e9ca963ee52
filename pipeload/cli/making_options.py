"""The options of `quantize` and `convert`, as `options` has those of other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeload.cli.choices import Dtype, Head, Method, ZeroPoints

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="Folder with a float checkpoint, or a hub id.")
]
Target = Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")]
MethodOption = Annotated[
    Method,
    typer.Option(
        help="int8: close to the original; int4: half the size again; nf4, fp4: what "
        "bitsandbytes makes."
    ),
]
GroupSize = Annotated[
    int | None,
    typer.Option(help="Of int4: 32, 64 (by default) or 128 weights share a scale and a zero."),
]
ZeroPointsOption = Annotated[
    ZeroPoints | None,
    typer.Option(
        help='Of int4, without a text: "search" (by default) for the least error; "rtn" rounds to '
        'nearest, "hqq" moves the zeros of that.'
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|builtin|off",
        help="Of int4 and int8: a text that the model reads once, so that errors count by how "
        'large their inputs are. "builtin" is one that comes with pipeload, and read by default '
        "with --size.",
    ),
]
CalibrationTokens = Annotated[
    int | None, typer.Option(min=1, help="The most tokens of that text; 4096 by default.")
]
GptqOption = Annotated[
    bool, typer.Option("--gptq", help="Of int4 with a text: columns make up for others' errors.")
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help='Of int4: what all weights may take, as in "3GB". Linears that matter more get more '
        "bits.",
    ),
]
DoubleQuant = Annotated[
    bool, typer.Option("--double-quant", help="Of nf4 and fp4: scales are quantised, too.")
]
HeadOption = Annotated[
    Head,
    typer.Option(
        help="int8: the output head as well, also one that is the embedding; not with nf4 and fp4."
    ),
]
ShardSize = Annotated[str, typer.Option(help="The most that one file takes.")]

# -- convert -------------------------------------------------------------------------------------

CodedSource = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Folder or hub id: GPTQ, AWQ, AutoRound, compressed-tensors, MLX, HQQ, torchao or "
        "Quark; or a GGUF file.",
    ),
]
ConvertedDtype = Annotated[
    Dtype,
    typer.Option(
        help="Of scales and floats. bf16 is fast; auto is what the checkpoint says (GGUF: fp32)."
    ),
]
