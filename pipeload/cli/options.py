"""The options of the commands: the type, the check and the help of each, in one place.

What several commands take has one name here and means the same in all of them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeload._sizes import parse_share, parse_size
from pipeload.cli.choices import Dtype, IoMode
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable


def _limit(text: str, name: str) -> str:
    if text == "auto":
        return text
    parse = parse_share if text.rstrip().endswith("%") else parse_size
    return _checked(text, name, parse)


def _process_limit(text: str) -> str:
    return _limit(text, "--memory-limit")


def _host_limit(text: str | None) -> str | None:
    return None if text is None else _limit(text, "--host-memory-limit")


def _rate(text: str | None) -> str | None:
    return None if text is None else _checked(text, "--disk-rate", parse_size)


def checked_limits(texts: list[str] | None) -> list[str] | None:
    """Several limits, each as it was typed.

    Raises:
        BadParameter: one of them is none.
    """
    for text in texts or ():
        _process_limit(text)
    return texts


def _machines(texts: list[str] | None) -> list[str] | None:
    for text in texts or ():
        limit, at, rate = text.partition("@")
        if not at:
            raise typer.BadParameter(f"{text!r} is no LIMIT@RATE; give 8GB@500MB, for example.")
        _checked(limit, "--machine", parse_size)
        _checked(rate, "--machine", parse_size)
    return texts


def _ranks(text: str | None) -> str | None:
    if text is not None and text not in ("auto", "mixed") and not (text.isdecimal() and int(text)):
        raise typer.BadParameter(f'{text!r} is neither "auto", "mixed" nor a number of ranks.')
    return text


def _finite(value: float | None) -> float | None:
    if value is not None and not 0 <= value < math.inf:
        raise typer.BadParameter(f"{value} is no number of at least 0.")
    return value


def _more_than_zero(value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} is no number above 0.")
    return value


def _share(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is no number above 0 and up to 1.")
    return value


def _texts(values: list[str] | None) -> list[str] | None:
    if values and not all(values):
        raise typer.BadParameter("an empty text is everywhere; leave the option out.")
    return values


def _checked(text: str, name: str, parse: Callable[..., object]) -> str:
    try:
        parse(text, name=name)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    return text


# -- of several commands -------------------------------------------------------------------------

Model = Annotated[
    str, typer.Argument(help="Folder with a safetensors checkpoint, or a model hub id.")
]
MemoryLimit = Annotated[
    str,
    typer.Option(
        callback=_process_limit,
        help='What the whole process may hold: "2GB", "1.5GiB", "50%" or "auto".',
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help='Where the model computes: "cpu", "cuda", "xpu", "mps", or "auto"; then the '
        "memory limit is the device's."
    ),
]
HostMemoryLimit = Annotated[
    str | None,
    typer.Option(
        callback=_host_limit, help="With a device: what the process may hold in host memory."
    ),
]
DtypeOption = Annotated[Dtype, typer.Option(help='"auto" keeps what the checkpoint has.')]
IoModeOption = Annotated[
    IoMode,
    typer.Option(help='"direct" reads past the page cache; "auto" uses it when everything fits.'),
]
ExactInputs = Annotated[
    bool,
    typer.Option(
        "--exact-inputs",
        help="Of an int8 or int4 checkpoint by pipeload: round no inputs, as faster kernels would.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write down reads, waits and computing there."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")]
MaxTemperature = Annotated[
    float | None,
    typer.Option(
        metavar="CELSIUS",
        callback=_more_than_zero,
        help="Wait between passes while the processor is hotter (Linux).",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' notes.")]

# -- run -----------------------------------------------------------------------------------------

Prompt = Annotated[
    str,
    typer.Argument(
        help='The prompt; "@FILE" reads a file, "-" or nothing standard input, less its last line '
        'end. "@@" is an "@".'
    ),
]
NewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to generate.")]
RunTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Longest sequence to keep memory free for; by default all that prompt and answer "
        "may come to. Longer ones take it from the weights.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Sample, and with this seed again the same. Without it and the next three, greedy.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        callback=_finite, help="Sample: below 1 the likelier, above 1 the others; 0: greedy."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(callback=_share, help="Sample among the likeliest tokens of this probability."),
]
TopK = Annotated[
    int | None, typer.Option(min=1, help="Sample among so many of the likeliest tokens.")
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(callback=_more_than_zero, help="Above 1: tokens there already become unlikelier."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        callback=_texts, help="End the answer before this text; may be given several times."
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        metavar="auto|MODEL|lookup|off",
        help=(
            "What guesses tokens for one pass to check, while that pays: a small MODEL; `auto`, a "
            "copy by `pipeload quantize`; `lookup`, the text so far. Last bits may change. In a "
            "chat, turns that go on from the last one's cache are not guessed."
        ),
    ),
]
System = Annotated[str | None, typer.Option(help="System message for the model.")]
NoChatTemplate = Annotated[
    bool, typer.Option("--no-chat-template", help="Continue the prompt as plain text.")
]


def check_sampling(temperature: float | None, *others: float | None) -> None:
    """Refuse `--temperature 0` beside the options of drawing tokens, which are `others`.

    Raises:
        BadParameter: they contradict one another.
    """
    if temperature == 0 and any(value is not None for value in others):
        raise typer.BadParameter(
            "--temperature 0 takes the likeliest token always; drop --seed, --top-p and --top-k."
        )


Ranks = Annotated[
    str | None,
    typer.Option(
        callback=_ranks,
        help='Share the model with other machines: "auto", their number, or "mixed" for other '
        "processors; run the same command on each, by torchrun. Rank 0 prints.",
    ),
]

# -- plan ----------------------------------------------------------------------------------------

PlanLimits = Annotated[
    list[str] | None,
    typer.Option(
        callback=checked_limits,
        help='What the whole process may hold: "2GB", "50%" or "auto"; several make a table.',
    ),
]
Machines = Annotated[
    list[str] | None,
    typer.Option(
        "--machine",
        metavar="LIMIT@RATE",
        callback=_machines,
        help="Deal the model out to machines with such limits and bytes per second from disk; "
        "once for each.",
    ),
]

Tokens = Annotated[int, typer.Option(min=1, help="Longest sequence, prompt and answer together.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences at once.")]
DiskRate = Annotated[
    str | None,
    typer.Option(callback=_rate, help='Bytes per second, as "1GB"; measured when not given.'),
]

# -- eval ----------------------------------------------------------------------------------------

WindowsPerPass = Annotated[
    int | None,
    typer.Option(
        min=1, help="Windows per pass; by default as many as save reading, with LLM.int8 one."
    ),
]

# -- demo ----------------------------------------------------------------------------------------

DemoLimit = Annotated[
    str,
    typer.Option(
        callback=_process_limit, help='"auto" is a limit that holds only part of the layers.'
    ),
]
DemoFolder = Annotated[
    Path | None, typer.Option(help="Where to make the model; the user's cache by default.")
]
