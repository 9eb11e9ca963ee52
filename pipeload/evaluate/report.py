"""The figures of `pipeload eval`, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from pipeload._sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeload.engine.stats import Stats
    from pipeload.evaluate.compare import Agreement
    from pipeload.evaluate.perplexity import Losses

_COLUMNS = (
    "weights",
    "B/weight",
    "perplexity",
    "ratio",
    "bits/byte",
    "tokens",
    "seconds",
    "tokens/s",
)
_COMPARED = ("KL", "same-top")
_MOST_NAME = 48  # characters of a model's name


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model. Sizes in bytes, times in seconds."""

    model: str
    weight_bytes: int
    """Of all tensors in the checkpoint, with what quantised ones need beside them."""
    weights: int
    """How many numbers the model has, however they are stored."""
    bytes_per_weight: float
    perplexity: float
    """Per token; to be compared only between models that make the same tokens."""
    ratio: float | None
    """Perplexity over that of the first model; None with other tokens."""
    same_tokens: bool
    """Whether the text is the same tokens as for the first model."""
    divergence: float | None
    """Of its predictions from the first model's: the mean Kullback-Leibler divergence, in nats per
    token. None for the first, with other words, and where nobody asked."""
    same_top: float | None
    """The share of tokens for which the same word is on top as in the first model."""
    bits_per_byte: float | None
    """Bits of loss per byte of the text that is scored, whatever the tokens; None where the
    tokenizer does not tell which bytes a token stands for."""
    tokens_scored: int
    text_tokens: int
    text_bytes_scored: int | None
    windows: int
    windows_per_pass: int
    passes: int
    seconds: float
    """Of the passes over the text; loading is not among them."""
    tokens_per_second: float
    bytes_read: int
    memory_limit: int
    peak_rss_bytes: int
    peak_since_load_bytes: int
    device: str
    """Where the model computed. What follows is of a device alone."""
    host_memory_limit: int
    """The process's; `memory_limit` is the device's then."""
    peak_device_bytes: int

    def as_dict(self) -> dict[str, object]:
        """For JSON, which has no infinity."""
        values = asdict(self)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def make_row(
    model: str,
    losses: Losses,
    stats: Stats,
    *,
    weights: int,
    weight_bytes: int,
    text_tokens: int,
    text_bytes: int | None,
) -> ModelResult:
    """Gather the figures; nothing is compared yet."""
    bits = losses.total_nats / math.log(2)
    return ModelResult(
        model=model,
        weight_bytes=weight_bytes,
        weights=weights,
        bytes_per_weight=weight_bytes / weights,
        perplexity=losses.perplexity,
        ratio=None,
        same_tokens=True,
        divergence=None,
        same_top=None,
        bits_per_byte=bits / text_bytes if text_bytes else None,
        tokens_scored=losses.tokens,
        text_tokens=text_tokens,
        text_bytes_scored=text_bytes,
        windows=losses.windows,
        windows_per_pass=losses.windows_per_pass,
        passes=losses.passes,
        seconds=losses.seconds,
        tokens_per_second=losses.tokens / losses.seconds,
        bytes_read=stats.bytes_read,
        memory_limit=stats.memory_limit,
        peak_rss_bytes=stats.peak_rss_bytes,
        peak_since_load_bytes=stats.peak_since_load_bytes,
        device=stats.device,
        host_memory_limit=stats.host_memory_limit,
        peak_device_bytes=stats.peak_device_bytes,
    )


def compared(
    result: ModelResult, first: ModelResult, agreement: Agreement | None, *, same_tokens: bool
) -> ModelResult:
    """The result with its ratio to the first one, and how alike their predictions are."""
    ratio = result.perplexity / first.perplexity if same_tokens else None
    divergence, same_top = (None, None) if agreement is None else agreement
    return replace(
        result, ratio=ratio, same_tokens=same_tokens, divergence=divergence, same_top=same_top
    )


class ResultTable:
    """Written line by line, as models are done."""

    def __init__(self, models: Sequence[str], *, compare: bool) -> None:
        """`compare`: whether predictions are compared as well."""
        self._width = max(len("model"), *(len(_name(model)) for model in models))
        self._compare = compare

    def head(self) -> str:
        """The line with the names of the columns."""
        return self._line("model", (*_COLUMNS, *(_COMPARED if self._compare else ())))

    def line(self, result: ModelResult) -> str:
        """The line of one model."""
        mark = "" if result.same_tokens else "*"
        cells = [
            format_size(result.weight_bytes),
            f"{result.bytes_per_weight:.3f}",
            f"{result.perplexity:.4f}{mark}"
            if result.perplexity < 1e6
            else f"{result.perplexity:.3g}{mark}",
            "-" if result.ratio is None else f"{result.ratio:.4f}",
            "-" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}",
            str(result.tokens_scored),
            f"{result.seconds:.3g}",
            f"{result.tokens_per_second:.3g}",
        ]
        if self._compare:
            apart, same = result.divergence, result.same_top
            cells.append("-" if apart is None else f"{apart:.5f}")
            cells.append("-" if same is None else f"{same:.2%}")
        return self._line(_name(result.model), cells)

    def _line(self, name: str, cells: Sequence[str]) -> str:
        return f"{name:<{self._width}}" + "".join(f"{cell:>11}" for cell in cells) + "\n"


def notes(results: Sequence[ModelResult], *, shortened: bool) -> str:
    """What has to be known to read the table; empty where nothing has."""
    if all(result.same_tokens for result in results):
        return ""
    text = (
        f"* has other tokens than {_name(results[0].model)}: perplexities of different tokenizers "
        "do not compare, bits per byte of text do"
    )
    if shortened:
        text += " (and --max-tokens ends the text elsewhere)"
    return text + ".\n"


def _name(model: str) -> str:
    """The end of a long path says most."""
    return model if len(model) <= _MOST_NAME else "..." + model[3 - _MOST_NAME :]
