"""The command line: what can be typed. The work is done in the _cli files.

Those are imported inside the commands, and torch with them: `--help` stays quick, and
OMP_WAIT_POLICY is set before torch reads it.
"""

from __future__ import annotations

import enum
import os
import sys
from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer

from pipeload import __version__
from pipeload._cli_output import Commands, replace_unprintable, reported
from pipeload._sizes import parse_share, parse_size
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_TEXT = "the prompt is no text in UTF-8"
DEMO_QUESTION = "What is the capital of France? Answer in one sentence."

app = typer.Typer(
    cls=Commands,
    help="Run Hugging Face models larger than memory, their layers streamed from disk.",
    epilog="A script of your own needs no change: "
    "python -m pipeload --memory-limit 2GB script.py ...",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class IoMode(str, enum.Enum):
    """How the checkpoint is read."""

    AUTO = "auto"
    DIRECT = "direct"
    BUFFERED = "buffered"
    UNCACHED = "uncached"


class Dtype(str, enum.Enum):
    """The dtype that weights have in memory."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


class Method(str, enum.Enum):
    """What weights become."""

    INT8 = "int8"
    INT4 = "int4"
    NF4 = "nf4"
    FP4 = "fp4"


class ZeroPoints(str, enum.Enum):
    """How the zeros of int4 groups are found."""

    RTN = "rtn"
    HQQ = "hqq"


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
    return None if text is None else _size(text, "--disk-rate")


def _size(text: str, name: str) -> str:
    return _checked(text, name, parse_size)


def _checked(text: str, name: str, parse: Callable[..., object]) -> str:
    try:
        parse(text, name=name)
    except OptionError as error:
        raise typer.BadParameter(str(error)) from None
    return text


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
NewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to generate.")]
DtypeOption = Annotated[Dtype, typer.Option(help='"auto" keeps what the checkpoint has.')]
IoModeOption = Annotated[
    IoMode,
    typer.Option(help='"direct" reads past the page cache; "auto" uses it when everything fits.'),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object; sizes in bytes.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the text and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' notes.")]


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"pipeload {__version__}")
        raise typer.Exit
    # While it waits, OpenMP would spin and take the cores from the threads that read. It looks at
    # this variable once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@app.command()
def run(
    model: Model,
    prompt: Annotated[
        str, typer.Argument(help='The prompt; "-" or nothing reads standard input.')
    ] = "-",
    *,
    memory_limit: MemoryLimit = "auto",
    device: Device = "cpu",
    host_memory_limit: HostMemoryLimit = None,
    max_new_tokens: NewTokens = 128,
    dtype: DtypeOption = Dtype.AUTO,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Sample with this seed; without one, greedy.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message for the model.")] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompt as plain text.")
    ] = False,
    io_mode: IoModeOption = IoMode.AUTO,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt; the text appears token by token, statistics at the end on stderr."""
    if system is not None and no_chat_template:
        raise typer.BadParameter("--system needs the chat template; drop --no-chat-template.")
    with reported(debug=debug, quiet=quiet or json):
        text = _read_prompt(prompt)
        from pipeload import _cli_run

        _cli_run.run(
            _cli_run.Request(
                model=model,
                prompt=text,
                system=system,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                max_new_tokens=max_new_tokens,
                dtype=dtype.value,
                seed=seed,
                io_mode=io_mode.value,
                chat_template=not no_chat_template,
                json=json,
            ),
            debug=debug,
        )


@app.command()
def plan(
    model: Model,
    *,
    memory_limit: MemoryLimit = "auto",
    device: Device = "cpu",
    host_memory_limit: HostMemoryLimit = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Longest sequence, prompt and answer together.")
    ] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    dtype: DtypeOption = Dtype.AUTO,
    io_mode: IoModeOption = IoMode.AUTO,
    disk_rate: Annotated[
        str | None,
        typer.Option(callback=_rate, help='Bytes per second, as "1GB"; measured when not given.'),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a memory limit buys: what stays in memory, what is read per token, how fast."""
    with reported(debug=debug, quiet=json):
        from pipeload import _cli_plan

        _cli_plan.show(
            model,
            memory_limit=memory_limit,
            device=device,
            host_memory_limit=host_memory_limit,
            tokens=tokens,
            batch=batch,
            dtype=dtype.value,
            io_mode=io_mode.value,
            disk_rate=None if disk_rate is None else parse_size(disk_rate, name="--disk-rate"),
            json=json,
            debug=debug,
        )


@app.command("eval")
def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub ids, float or quantised; one row for each.")
    ],
    *,
    text: Annotated[Path, typer.Option(help="The text that is to be predicted, in UTF-8.")],
    memory_limit: MemoryLimit = "auto",
    window: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens seen at once; 1024, or all that the models know."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens scored per window; half of it by default.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Windows per pass; by default as many as save reading, with LLM.int8 one."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Stop after this many tokens of the text.")
    ] = None,
    dtype: DtypeOption = Dtype.AUTO,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Measure perplexity: how well models predict a text, by a sliding window."""
    with reported(debug=debug, quiet=quiet or json):
        from pipeload import _cli_eval

        _cli_eval.run(
            _cli_eval.Request(
                models=tuple(models),
                text=text,
                memory_limit=memory_limit,
                window=window,
                stride=stride,
                batch=batch,
                max_tokens=max_tokens,
                dtype=dtype.value,
                json=json,
            ),
            debug=debug,
        )


@app.command()
def demo(
    memory_limit: Annotated[
        str,
        typer.Option(
            callback=_process_limit, help='"auto" is a limit that holds only part of the layers.'
        ),
    ] = "auto",
    folder: Annotated[
        Path | None, typer.Option(help="Where to make the model; the user's cache by default.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Try pipeload on a small real model, SmolLM2-135M-Instruct, with too little memory for it."""
    with reported(debug=debug, quiet=quiet or json):
        from pipeload import _cli_plan, _cli_run

        model = _cli_plan.make_demo_model(folder)
        if memory_limit == "auto":
            memory_limit = str(_cli_plan.choose_limit(model, debug=debug))
        _cli_run.run(
            _cli_run.Request(
                model=model,
                prompt=DEMO_QUESTION,
                memory_limit=memory_limit,
                max_new_tokens=64,
                io_mode=_cli_plan.past_the_cache(model),
                json=json,
            ),
            debug=debug,
        )


@app.command()
def bench(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id; the demo's model by default.")
    ] = None,
    *,
    memory_limit: Annotated[
        list[str] | None,
        typer.Option(help="A limit to measure at; may be given several times."),
    ] = None,
    device: Device = "cpu",
    host_memory_limit: HostMemoryLimit = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens timed in each run.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of everything; medians count.")] = 3,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure how close streaming comes to what this machine's disk and processor allow."""
    limits: list[str | int] = [_size(text, "--memory-limit") for text in memory_limit or []]
    with reported(debug=debug, quiet=json):
        from pipeload import _cli_plan, _cli_run
        from pipeload import bench as benchmark

        chosen = model or _cli_plan.make_demo_model()
        _cli_run.check_model(chosen)
        benchmark.run(
            model=chosen,
            limits=limits
            or [
                _cli_plan.choose_limit(
                    chosen, debug=debug, device=device, host_memory_limit=host_memory_limit
                )
            ],
            device=device,
            host_memory_limits=[host_memory_limit],
            new_tokens=new_tokens,
            rounds=rounds,
            as_json=json,
            progress=None if json else partial(typer.echo, err=True),
        )


@app.command()
def quantize(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Folder with a float checkpoint, or a hub id.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The folder to make.")],
    *,
    method: Annotated[
        Method,
        typer.Option(
            help="int8: close to the original; int4: half the size again; nf4, fp4: what "
            "bitsandbytes makes."
        ),
    ] = Method.INT8,
    group_size: Annotated[
        int, typer.Option(help="Of int4: 32, 64 or 128 weights share a scale and a zero.")
    ] = 64,
    zero_points: Annotated[
        ZeroPoints, typer.Option(help='Of int4: "hqq" takes longer and is closer than "rtn".')
    ] = ZeroPoints.RTN,
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="Of nf4 and fp4: scales are quantised, too.")
    ] = False,
    memory_limit: MemoryLimit = "auto",
    max_shard_size: Annotated[str, typer.Option(help="The most that one file takes.")] = "2GB",
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Make a quantised copy of a checkpoint; run again after a kill, it goes on."""
    with reported(debug=debug, quiet=quiet or json):
        from pipeload import _cli_quantise

        _cli_quantise.run(
            source,
            target,
            method=method.value,
            group_size=group_size,
            zero_points=zero_points.value,
            double_quant=double_quant,
            memory_limit=memory_limit,
            max_shard_size=max_shard_size,
            json=json,
            debug=debug,
        )


def _read_prompt(prompt: str) -> str:
    text = prompt
    if prompt == "-":
        if sys.stdin.isatty():
            end = "Ctrl-Z and Enter" if os.name == "nt" else "Ctrl-D"
            typer.echo(f"Type the prompt, then {end} on a line of its own.", err=True)
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"{_NO_TEXT} ({error}).", param_hint="PROMPT") from None
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        # How Python shows bytes of an argument that are no text.
        raise typer.BadParameter(f"{_NO_TEXT}.", param_hint="PROMPT")
    if not text.strip():
        raise typer.BadParameter("the prompt is empty.", param_hint="PROMPT")
    return text


def command_names() -> list[str]:
    """What can be typed after `pipeload`."""
    commands = app.registered_commands
    return [c.name or c.callback.__name__ for c in commands if c.callback is not None]


def main() -> None:
    """Entry of the `pipeload` command."""
    replace_unprintable()
    try:
        app(prog_name="pipeload")
    except KeyboardInterrupt:  # outside any command, as while typer itself is imported
        sys.exit(130)
