"""`pipeload bench`: what can be typed for it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pipeload.cli import options as opt
from pipeload.cli.exit_status import reported
from pipeload.cli.model_path import check_path

BenchModel = Annotated[
    str | None, typer.Argument(help="Folder or hub id; the demo's model by default.")
]
BenchLimits = Annotated[
    list[str] | None,
    typer.Option(
        callback=opt.checked_limits, help="A limit to measure at; may be given several times."
    ),
]
TimedTokens = Annotated[int, typer.Option(min=1, help="Tokens timed in each run.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of everything; medians count.")]


def _interpreters(texts: list[str] | None) -> list[str] | None:
    for text in texts or ():
        way, equals, path = text.partition("=")
        if not (way and equals and path):
            raise typer.BadParameter(
                f"{text!r} is no NAME=PATH; give airllm=env/bin/python, for example."
            )
    return texts


Compare = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Time other ways beside it, each under the limit: plain, accelerate, airllm, "
        "llama.cpp, llama.cpp-repacked.",
    ),
]
Pythons = Annotated[
    list[str] | None,
    typer.Option(
        "--python",
        metavar="NAME=PATH",
        callback=_interpreters,
        help="With --compare: the interpreter that has this one; once for each.",
    ),
]
Gguf = Annotated[
    str | None, typer.Option(metavar="FILE", help="With --compare: the model as llama.cpp has it.")
]


def bench(
    model: BenchModel = None,
    *,
    memory_limit: BenchLimits = None,
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    new_tokens: TimedTokens = 8,
    rounds: Rounds = 3,
    compare: Compare = None,
    python: Pythons = None,
    gguf: Gguf = None,
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure how close streaming comes to what this machine's disk and processor allow."""
    if compare is None and (python or gguf):
        raise typer.BadParameter("--python and --gguf are of contenders; name some in --compare.")
    if compare is not None and (device != "cpu" or host_memory_limit):
        raise typer.BadParameter("--compare is of processors; drop --device.")
    with reported(debug=debug, quiet=json):
        if model is not None:
            check_path(model)
        from pipeload.bench import measure as benchmark
        from pipeload.cli import plan as cli_plan
        from pipeload.cli.load_model import check_model

        chosen = model or cli_plan.make_demo_model()
        check_model(chosen)
        progress = None if json else partial(typer.echo, err=True)
        limits: list[str] | list[int] = memory_limit or [
            cli_plan.choose_limit(
                chosen, debug=debug, device=device, host_memory_limit=host_memory_limit
            )
        ]
        if compare is not None:
            from pipeload.bench import compare as comparison

            comparison.compare(
                comparison.Setting(
                    model=chosen,
                    ways=[way.strip() for way in compare.split(",")],
                    pythons=dict(text.split("=", 1) for text in python or ()),
                    gguf=gguf,
                    new_tokens=new_tokens,
                    rounds=rounds,
                ),
                limits,
                as_json=json,
                progress=progress,
            )
            return
        benchmark.run(
            model=chosen,
            limits=limits,
            device=device,
            host_memory_limits=[host_memory_limit],
            new_tokens=new_tokens,
            rounds=rounds,
            as_json=json,
            progress=progress,
        )
