"""`pipeload bench`: what can be typed for it."""

from __future__ import annotations

from functools import partial

import typer

from pipeload.cli import options as opt  # noqa: TC001 - typer reads it at run time
from pipeload.cli.exit_status import reported


def bench(
    model: opt.BenchModel = None,
    *,
    memory_limit: opt.BenchLimits = None,
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    new_tokens: opt.TimedTokens = 8,
    rounds: opt.Rounds = 3,
    compare: opt.Compare = None,
    python: opt.Pythons = None,
    gguf: opt.Gguf = None,
    json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure how close streaming comes to what this machine's disk and processor allow."""
    if compare is None and (python or gguf):
        raise typer.BadParameter("--python and --gguf are of contenders; name some in --compare.")
    if compare is not None and (device != "cpu" or host_memory_limit):
        raise typer.BadParameter("--compare is of processors; drop --device.")
    with reported(debug=debug, quiet=json):
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
