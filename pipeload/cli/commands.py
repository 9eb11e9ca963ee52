"""The command line: what can be typed. The work is done in the other files of this folder.

Those are imported inside the commands, and torch with them: `--help` stays quick, and
OMP_WAIT_POLICY is set before torch reads it.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import Annotated

import typer

from pipeload import __version__
from pipeload._sizes import parse_size
from pipeload.cli import choices
from pipeload.cli import making_options as making
from pipeload.cli import options as opt
from pipeload.cli.batch_command import batch
from pipeload.cli.bench_command import bench
from pipeload.cli.chat_command import Session, chat
from pipeload.cli.evaluate_command import evaluate
from pipeload.cli.exit_status import Commands, load, reported
from pipeload.cli.log_lines import replace_unprintable
from pipeload.cli.model_path import check_path
from pipeload.cli.prompt import read_prompt
from pipeload.cli.serve_command import serve
from pipeload.cli.timeline_command import timeline

# On a narrower terminal the tables of --help cut options' names, which their lines do not.
_TABLE_COLUMNS = 80
DEMO_QUESTION = "What is the capital of France? Answer in one sentence."

app = typer.Typer(
    cls=Commands,
    help="Run Hugging Face models larger than memory, their layers streamed from disk.",
    epilog="A script of your own needs no change: "
    "python -m pipeload --memory-limit 2GB script.py ...",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    model: opt.Model,
    prompt: opt.Prompt = "-",
    *,
    memory_limit: opt.MemoryLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    max_new_tokens: opt.NewTokens = 128,
    tokens: opt.RunTokens = None,
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    seed: opt.Seed = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    stop: opt.Stop = None,
    draft: opt.Draft = "off",
    session: Session = None,
    system: opt.System = None,
    no_chat_template: opt.NoChatTemplate = False,
    io_mode: opt.IoModeOption = choices.IoMode.AUTO,
    trace: opt.TraceFile = None,
    exact_inputs: opt.ExactInputs = False,
    ranks: opt.Ranks = None,
    max_temperature: opt.MaxTemperature = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Answer a prompt; the text appears token by token, statistics at the end on stderr."""
    if system is not None and no_chat_template:
        raise typer.BadParameter("--system needs the chat template; drop --no-chat-template.")
    if session is not None and (stop or ranks or draft != "off"):
        raise typer.BadParameter("--session goes with no --stop, --draft or --ranks; drop it.")
    opt.check_sampling(temperature, seed, top_p, top_k)
    sizes = ("--max-new-tokens", "--tokens")
    with reported(debug=debug, quiet=quiet or json, smaller_pass=sizes):
        text = read_prompt(prompt)
        check_path(model, files=True)
        load("from_pretrained")
        from pipeload.cli import run as cli_run
        from pipeload.cli.asked import Arguments

        cli_run.run(
            Arguments(
                model=model,
                prompt=text,
                system=system,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                max_new_tokens=max_new_tokens,
                tokens=tokens,
                dtype=dtype.value,
                seed=seed,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                repetition_penalty=repetition_penalty,
                stop=tuple(stop or ()),
                draft=draft,
                session=session,
                io_mode=io_mode.value,
                trace=trace,
                exact_inputs=exact_inputs,
                ranks=int(ranks) if ranks and ranks.isdecimal() else ranks,
                max_temperature=max_temperature,
                chat_template=not no_chat_template,
                json=json,
            ),
            debug=debug,
        )


@app.command()
def plan(
    model: opt.Model,
    *,
    memory_limit: opt.PlanLimits = None,
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    tokens: opt.Tokens = 256,
    batch: opt.Batch = 1,
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    io_mode: opt.IoModeOption = choices.IoMode.AUTO,
    exact_inputs: opt.ExactInputs = False,
    disk_rate: opt.DiskRate = None,
    machine: opt.Machines = None,
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Show what a memory limit buys: what stays in memory, what is read per token, how fast."""
    with reported(debug=debug, quiet=json, smaller_pass=("--tokens", "--batch")):
        check_path(model, files=True)
        load("from_pretrained")
        from pipeload.cli import plan as cli_plan

        if machine:
            from pipeload.cli import machines

            machines.show(
                model, machine, tokens=tokens, batch=batch, dtype=dtype.value, as_json=json
            )
            return
        cli_plan.show(
            cli_plan.Arguments(
                model=model,
                memory_limits=memory_limit or ["auto"],
                device=device,
                host_memory_limit=host_memory_limit,
                tokens=tokens,
                batch=batch,
                dtype=dtype.value,
                io_mode=io_mode.value,
                exact_inputs=exact_inputs,
                disk_rate=None if disk_rate is None else parse_size(disk_rate, name="--disk-rate"),
                json=json,
            ),
            debug=debug,
        )


app.command("eval")(evaluate)


@app.command()
def demo(
    *,
    memory_limit: opt.DemoLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    folder: opt.DemoFolder = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Try pipeload on a small real model, SmolLM2-135M-Instruct, with too little memory for it."""
    with reported(debug=debug, quiet=quiet or json):
        load("from_pretrained")
        from pipeload.cli import plan as cli_plan
        from pipeload.cli import run as cli_run
        from pipeload.cli.asked import Arguments

        model = cli_plan.make_demo_model(folder)
        if memory_limit == "auto":
            memory_limit = str(
                cli_plan.choose_limit(
                    model, debug=debug, device=device, host_memory_limit=host_memory_limit
                )
            )
        cli_run.run(
            Arguments(
                model=model,
                prompt=DEMO_QUESTION,
                memory_limit=memory_limit,
                device=device,
                host_memory_limit=host_memory_limit,
                max_new_tokens=64,
                io_mode=cli_plan.past_the_cache(model),
                json=json,
            ),
            debug=debug,
        )


@app.command()
def quantize(
    source: making.Source,
    target: making.Target,
    *,
    method: making.MethodOption = choices.Method.INT8,
    group_size: making.GroupSize = None,
    zero_points: making.ZeroPointsOption = None,
    double_quant: making.DoubleQuant = False,
    head: making.HeadOption = choices.Head.FLOAT,
    calibrate: making.Calibrate = None,
    calibration_tokens: making.CalibrationTokens = None,
    gptq: making.GptqOption = False,
    size: making.SizeOption = None,
    memory_limit: opt.MemoryLimit = "auto",
    max_shard_size: making.ShardSize = "2GB",
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Make a quantised copy of a checkpoint; run again after a kill, it goes on."""
    with reported(debug=debug, quiet=quiet or json):
        check_path(source)
        load("quantize")
        from pipeload.cli import quantise

        quantise.run(
            source,
            target,
            method=method.value,
            group_size=group_size,
            zero_points=None if zero_points is None else zero_points.value,
            double_quant=double_quant,
            head=head.value,
            calibrate=calibrate,
            calibration_tokens=calibration_tokens,
            gptq=gptq,
            size=size,
            memory_limit=memory_limit,
            max_shard_size=max_shard_size,
            json=json,
            debug=debug,
        )


@app.command()
def convert(
    source: making.CodedSource,
    target: making.Target,
    *,
    dtype: making.ConvertedDtype = choices.Dtype.BF16,
    head: making.HeadOption = choices.Head.FLOAT,
    memory_limit: opt.MemoryLimit = "auto",
    max_shard_size: making.ShardSize = "2GB",
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Write a GGUF file, or a GPTQ, AWQ or other 4-bit checkpoint, for pipeload's kernels."""
    with reported(debug=debug, quiet=quiet or json):
        check_path(source, files=True)
        load("convert")
        from pipeload.cli import quantise

        quantise.convert(
            source,
            target,
            dtype=dtype.value,
            head=head.value,
            memory_limit=memory_limit,
            max_shard_size=max_shard_size,
            json=json,
            debug=debug,
        )


app.command()(batch)
app.command()(bench)
app.command()(chat)
app.command()(serve)
app.command()(timeline)


def command_names() -> list[str]:
    """What can be typed after `pipeload`."""
    commands = app.registered_commands
    return [c.name or c.callback.__name__ for c in commands if c.callback is not None]


def main() -> None:
    """Run what was typed."""
    replace_unprintable()
    if shutil.get_terminal_size().columns < _TABLE_COLUMNS:
        app.rich_markup_mode = None
    try:
        app(prog_name="pipeload")
    except KeyboardInterrupt:  # outside any command
        sys.exit(130)
