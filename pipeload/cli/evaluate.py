"""`pipeload eval`: how well models predict a text, and what that took."""

from __future__ import annotations

import contextlib
import gc
import json as json_module
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import transformers

import pipeload
from pipeload._sizes import format_size
from pipeload.cli.load_model import (
    DTYPES,
    check_model,
    explained,
    load_whole,
)
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.progress_bar import ProgressBar
from pipeload.cli.run_report import describe_limits
from pipeload.entry.device_refusals import refuse_quantised
from pipeload.entry.loading import needs_of
from pipeload.entry.options import GivenOptions
from pipeload.entry.request import make_request
from pipeload.entry.sources import check_source, source_of
from pipeload.entry.texts import check_tokens, load_tokenizer, read_text
from pipeload.errors import CheckpointError, MemoryLimitError, OptionError
from pipeload.evaluate import report
from pipeload.evaluate.compare import FirstLogits
from pipeload.evaluate.perplexity import measure, tokens_to_hint
from pipeload.evaluate.progress import all_passes
from pipeload.evaluate.text_windows import default_stride, default_window, slide
from pipeload.evaluate.tokenized_text import Encoded, encode
from pipeload.hf.takeover import peek

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import torch

    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.evaluate.text_windows import Window
    from pipeload.weights.device_interface import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was typed behind the command."""

    models: tuple[str, ...]
    text: Path
    memory_limit: int | str = "auto"
    device: str = "cpu"
    host_memory_limit: int | str | None = None
    window: int | None = None
    stride: int | None = None
    batch: int | None = None
    max_tokens: int | None = None
    dtype: str = "auto"
    compare: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class _Subject:
    """A model that is going to be measured, and the text as it reads it."""

    name: str
    weights: int
    weight_bytes: int
    positions: int | None
    """The longest sequence that it was made for."""
    encoded: Encoded
    batch: int | None
    """Windows per pass; None leaves it to the limit."""
    needs: PassNeeds
    forward: Callable[..., object]
    """Of the model's class: how it can be called."""


def run(asked: Arguments, *, debug: bool) -> None:
    """Measure one model after the other; the table, or one JSON object, goes to stdout.

    Raises:
        PipeloadError: something is wrong with a model, the text, the limit or an option.
    """
    silence_libraries(debug=debug)
    text = read_text(asked.text)
    for model in asked.models:
        check_model(model, files=True)
    given = GivenOptions(
        asked.memory_limit, device=asked.device, host_memory_limit=asked.host_memory_limit
    )
    options = make_request(given).options
    device = options.device
    subjects = [_prepare(model, text, asked, device) for model in asked.models]
    window = _choose_window(asked, subjects)
    stride = default_stride(window) if asked.stride is None else asked.stride
    if stride > window:
        raise OptionError(
            f"--stride {stride} is more than the window of {window} tokens, so tokens between two "
            f"windows would be left out. Give at most {window}."
        )
    table = report.ResultTable(asked.models, compare=asked.compare)
    rows: list[report.ModelResult] = []
    with _first_logits(asked) as first:
        for subject in subjects:
            alike = subject.encoded.same_tokens(subjects[0].encoded)
            predicted = None if first is None or not alike else first.compare
            if first is not None and not rows:
                predicted = first.keep
            row = _evaluate(subject, asked, predicted, window=window, stride=stride)
            gc.collect()  # the next one needs its memory
            agreement = None if first is None else first.agreement()
            rows.append(
                report.compared(row, rows[0] if rows else row, agreement, same_tokens=alike)
            )
            # For all of them the same, whatever "auto" meant.
            asked = replace(
                asked,
                memory_limit=row.memory_limit,
                host_memory_limit=None if device is None else row.host_memory_limit,
            )
            if not asked.json:
                sys.stdout.write((table.head() if len(rows) == 1 else "") + table.line(rows[-1]))
                sys.stdout.flush()  # a model may take hours
    if asked.json:
        result = {"text": str(asked.text), "window": window, "stride": stride}
        models = [row.as_dict() for row in rows]
        sys.stdout.write(json_module.dumps(result | {"models": models}) + "\n")
    else:
        sys.stdout.write(report.notes(rows, shortened=asked.max_tokens is not None))


@contextlib.contextmanager
def _first_logits(asked: Arguments) -> Iterator[FirstLogits | None]:
    """Where the first model's logits wait for the others; None if nobody asked.

    Raises:
        OptionError: there are no others, or there is no room.
    """
    if not asked.compare:
        yield None
        return
    if len(asked.models) == 1:
        raise OptionError("--compare compares models with the first one. Name another one as well.")
    with closing(FirstLogits()) as first:
        yield first


def _prepare(model: str, text: str, asked: Arguments, device: Device | None) -> _Subject:
    encoded = encode(load_tokenizer(model), text, most=asked.max_tokens)
    if len(encoded.ids) < 2:
        raise OptionError(
            f"{str(asked.text)!r} makes fewer than 2 tokens with the tokenizer of {model!r}, and "
            "the first has nothing before it, so it is not scored. Give a longer text."
        )
    source, named = source_of(model)
    options = {"dtype": DTYPES[asked.dtype], "trust_remote_code": False, **named}
    with explained(model):
        passed_on = check_source(source, options)
        auto: Any = transformers.AutoModelForCausalLM
        pending = peek(lambda: auto.from_pretrained(source, **passed_on), device)
    if pending is None:
        raise CheckpointError(f"{model!r} has no weights. Name a folder that holds some.")
    if device is not None:
        refuse_quantised(pending, device)  # now, not when those before it are measured
    check_tokens(model, pending.model, int(encoded.ids.max()))
    return _Subject(
        model,
        pending.weight_count(),
        pending.checkpoint.total_bytes,
        getattr(pending.model.config.get_text_config(), "max_position_embeddings", None),
        encoded,
        batch=asked.batch or (1 if pending.couples_rows() else None),
        needs=needs_of(pending, device),
        forward=type(pending.model).forward,
    )


def _choose_window(asked: Arguments, subjects: Sequence[_Subject]) -> int:
    """The same for all models: figures of different windows do not compare."""
    least = min(subjects, key=lambda subject: subject.positions or sys.maxsize)
    positions = least.positions or sys.maxsize
    if asked.window is None:
        return default_window(positions)
    if asked.window > positions:
        raise OptionError(
            f"--window {asked.window} is longer than the {positions} positions that "
            f"{least.name!r} was made for. Give at most {positions}."
        )
    return asked.window


def _evaluate(
    subject: _Subject,
    asked: Arguments,
    predicted: Callable[[Window, torch.Tensor], None] | None,
    *,
    window: int,
    stride: int,
) -> report.ModelResult:
    encoded = subject.encoded
    tokens = len(encoded.ids)
    windows = slide(tokens, window=window, stride=stride)
    if tokens < window:
        log.info("%d tokens, less than a window of %d: all are seen at once", tokens, window)
    model = load_whole(
        subject.name,
        memory_limit=asked.memory_limit,
        device=asked.device,
        host_memory_limit=asked.host_memory_limit,
        tokens=tokens_to_hint(subject.needs, subject.forward, windows, subject.batch or 1),
        batch=subject.batch or 1,
        dtype=DTYPES[asked.dtype],
    )
    handle = pipeload.handle(model)
    log.info(
        "%s: %d tokens in %d windows; %s, %s read per pass",
        subject.name,
        tokens,
        len(windows),
        describe_limits(handle.plan),
        format_size(handle.plan.bytes_per_pass),
    )
    scored = sum(one.scored for one in windows)
    try:
        bar = ProgressBar(subject.name, "tokens", time_left=True)
        with all_passes(model, bar, scored) as shown:
            losses = measure(
                model,
                handle,
                encoded.ids,
                windows,
                batch=subject.batch,
                pass_begins=shown.pass_begins,
                predicted=predicted,
            )
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"{subject.batch or 1} x {min(window, tokens)} tokens do not fit beside the weights "
            f"of {subject.name!r} within {format_size(error.limit)}. --memory-limit "
            f"{error.smallest_limit} is enough, and so may be a smaller --window or --stride.",
            limit=error.limit,
            smallest_limit=error.smallest_limit,
        ) from error
    return report.make_row(
        subject.name,
        losses,
        handle.stats(),
        weights=subject.weights,
        weight_bytes=subject.weight_bytes,
        text_tokens=tokens,
        text_bytes=encoded.bytes_of(losses.scored),
    )
