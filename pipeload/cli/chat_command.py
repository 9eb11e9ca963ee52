"""`pipeload chat`, as it is typed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeload.cli import choices
from pipeload.cli import options as opt
from pipeload.cli.exit_status import load, reported
from pipeload.cli.model_path import check_path

ChatTokens = Annotated[
    int,
    typer.Option(min=2, help="The longest conversation to keep memory free for, in tokens."),
]

Session = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        dir_okay=False,
        help="Keep the conversation in this file, with keys and values; go on with what it has.",
    ),
]


def chat(
    model: opt.Model,
    *,
    memory_limit: opt.MemoryLimit = "auto",
    device: opt.Device = "cpu",
    host_memory_limit: opt.HostMemoryLimit = None,
    max_new_tokens: opt.NewTokens = 512,
    tokens: ChatTokens = 2048,
    dtype: opt.DtypeOption = choices.Dtype.AUTO,
    seed: opt.Seed = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    draft: opt.Draft = "off",
    system: opt.System = None,
    session: Session = None,
    io_mode: opt.IoModeOption = choices.IoMode.AUTO,
    exact_inputs: opt.ExactInputs = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Talk with a model: each turn goes on from the last one's cache."""
    if session is not None and draft != "off":
        raise typer.BadParameter("--session goes with no --draft; drop one of them.")
    opt.check_sampling(temperature, seed, top_p, top_k)
    with reported(debug=debug, quiet=quiet, smaller_pass=("--tokens",)):
        check_path(model, files=True)
        load("from_pretrained")
        from pipeload.cli import chat as cli_chat
        from pipeload.cli.asked import Arguments

        cli_chat.chat(
            Arguments(
                model=model,
                prompt="",
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
                draft=draft,
                session=session,
                io_mode=io_mode.value,
                exact_inputs=exact_inputs,
            ),
            debug=debug,
        )
