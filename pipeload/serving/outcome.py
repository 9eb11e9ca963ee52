"""A request and its model: what is fitted to the model before, and who is to blame after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeload.entry.texts import check_tokens, first_line
from pipeload.errors import CheckpointError, GroupError, PipeloadError
from pipeload.hf.response_parsing import response_template
from pipeload.serving.request import Settings
from pipeload.serving.request_error import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.serving.request import Asked

TOO_LARGE, FAILED = 413, 500  # HTTP's


def settings_of(
    model: Any, tokenizer: Any, typed: str, *, max_new_tokens: int, streams: bool = False
) -> Settings:
    """What holds for all requests to a `model` that was `typed` as such on the command line.

    `streams`: to a server, whose clients see no warning of what goes beyond the model's positions.
    """
    name = Path(typed).name or Path(typed).resolve().name  # of "."
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Settings(
        tokenizer,
        name,
        frozenset({typed, name}),
        max_new_tokens,
        response_template(tokenizer, model.config.model_type),
        streams,
        positions if streams and isinstance(positions, int) and positions > 0 else None,
    )


def fitted(asked: Asked, model: Any, typed: str) -> Asked:
    """A request with its tokens where the model is.

    Raises:
        RequestError: there is one that the model does not know.
    """
    try:
        check_tokens(typed, model, int(asked.inputs["input_ids"].max()))
    except CheckpointError as error:
        raise RequestError(str(error)) from error
    inputs = {name: values.to(model.device) for name, values in asked.inputs.items()}
    return asked._replace(inputs=inputs)


def as_row(asked: Asked, body: Mapping[str, Any]) -> Asked:
    """A request that is computed as a row beside others, of which one draws from what all draw.

    Raises:
        RequestError: its `body` asks for what is not served so.
    """
    options = dict(asked.options)
    alone = {"seed": body.get("seed"), "n": options.pop("num_return_sequences", 1)}
    alone["repetition_penalty"] = options.pop("repetition_penalty", 1)
    for name, value in alone.items():
        if value not in (None, 1) or (name == "seed" and value is not None):
            raise RequestError(
                f"{name}={value!r} is not served with --batched. Leave it out, or --batched.",
                parameter=name,
            )
    options.pop("seed", None)
    return asked._replace(options=options)


def blamed(outcome: BaseException) -> RequestError | None:
    """What came of a request if it was its own fault; None where the next would fare no better.

    That is of the disk, the files, readers that ended, or a device that computes no more.
    """
    if isinstance(outcome, (MemoryError, torch.OutOfMemoryError)):
        told = str(outcome) if isinstance(outcome, PipeloadError) else first_line(outcome)
        return RequestError(told, code="memory_limit", status=TOO_LARGE)
    if isinstance(outcome, GroupError) and outcome.of_request:
        return RequestError(str(outcome), code=type(outcome).__name__, status=FAILED)
    if isinstance(outcome, (PipeloadError, torch.AcceleratorError)):
        return None
    if not isinstance(outcome, Exception):
        return None
    return RequestError(first_line(outcome), code=type(outcome).__name__, status=FAILED)
