"""How well a streamed model predicts a text: the loss of every token, window by window."""

from __future__ import annotations

import inspect
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from pipeload.errors import PipeloadError
from pipeload.evaluate.text_windows import choose_batch, groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.engine.handle import Handle
    from pipeload.evaluate.text_windows import Window

# A streamed pass costs the same for more tokens, but not for ever: with this many, computing takes
# longer than reading on any processor, and a larger batch only takes memory.
_MOST_TOKENS = 8192
# Logits that are in fp32 at once, beside as many logarithms.
_MOST_LOGITS = 1 << 21


@dataclass(frozen=True, slots=True)
class Losses:
    """What was found, and what it took."""

    nats: torch.Tensor
    """fp32, `[tokens]`: minus the logarithm of each token's probability; NaN if not scored."""
    windows: int
    passes: int
    windows_per_pass: int
    """Of the largest pass."""
    seconds: float

    @property
    def scored(self) -> torch.Tensor:
        """bool, `[tokens]`: which were scored."""
        return ~self.nats.isnan()

    @property
    def tokens(self) -> int:
        """How many were scored."""
        return int(self.scored.sum())

    @property
    def total_nats(self) -> float:
        """Of all scored tokens, added up in fp64."""
        return float(self.nats[self.scored].double().sum())

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss; infinite where that has no floating-point number."""
        try:
            return math.exp(self.total_nats / self.tokens)
        except OverflowError:
            return math.inf


@torch.no_grad()
def measure(
    model: Any,
    handle: Handle,
    ids: torch.Tensor,
    windows: Sequence[Window],
    *,
    batch: int | None,
    pass_begins: Callable[[int, int], None],
    predicted: Callable[[Window, torch.Tensor], None] | None = None,
) -> Losses:
    """Run the model over all windows.

    Args:
        model: a causal language model that is streamed; losses are computed on its device.
        handle: its handle.
        ids: the text, int64, `[tokens]`; on the CPU.
        windows: which of its tokens are seen and which are scored.
        batch: windows per pass; when None, as many as make the least streaming within the limit.
        pass_begins: called with the tokens scored so far and those that the pass will score.
        predicted: called with each window and the logits that its scored tokens had before them,
            `[scored, words]`.

    Raises:
        MemoryLimitError: a pass does not fit.
        PipeloadError: a loss is no number, or infinite.
    """
    nats = torch.full(ids.shape, math.nan, dtype=torch.float32)
    started = time.perf_counter()
    passes = largest = done = 0
    for group in groups(windows):
        size = batch or _batch_for(model, handle, group)
        for start in range(0, len(group), size):
            part = group[start : start + size]
            coming = sum(window.scored for window in part)
            pass_begins(done, coming)
            _score(model, ids, part, nats, predicted)
            passes, largest = passes + 1, max(largest, len(part))
            done += coming
    return Losses(nats, len(windows), passes, largest, time.perf_counter() - started)


def tokens_to_hint(
    needs: PassNeeds, forward: Callable[..., Any], windows: Sequence[Window], batch: int
) -> int:
    """The `tokens=` that keeps memory free for every pass of `measure`, logits and all.

    A hint is about `generate`, which wants the last position's logits alone: so it is a longer one.

    Args:
        needs: of the model.
        forward: what its class calls so.
        windows: that are to run.
        batch: windows per pass.
    """
    most = max(
        needs.for_pass((), _shaped(forward, group, min(batch, len(group))))
        for group in groups(windows)
    )
    longest = max(window.tokens for window in windows)
    return max(longest, needs.longest_tokens(most, batch) + 1)


def _batch_for(model: Any, handle: Handle, group: Sequence[Window]) -> int:
    def bytes_streamed(batch: int) -> int | None:
        return handle.pass_bytes(**_shaped(model.forward, group, batch))

    return choose_batch(len(group), _MOST_TOKENS // group[0].tokens, bytes_streamed)


def _shaped(forward: Callable[..., Any], group: Sequence[Window], batch: int) -> dict[str, Any]:
    """Arguments of a pass over `batch` windows like those of the group, without values."""
    ids = torch.empty((batch, group[0].tokens), dtype=torch.int64, device="meta")
    return _arguments(forward, ids, group[0].scored)


def _score(
    model: Any,
    ids: torch.Tensor,
    part: Sequence[Window],
    nats: torch.Tensor,
    predicted: Callable[[Window, torch.Tensor], None] | None,
) -> None:
    """One pass; fills in the losses of its windows."""
    kept = part[0].scored
    batch = torch.stack([ids[window.begin : window.end] for window in part]).to(model.device)
    logits = model(**_arguments(model.forward, batch, kept)).logits
    step = max(1, _MOST_LOGITS // logits.shape[-1])
    for row, seen, window in zip(logits, batch, part, strict=True):
        # The last position's are for the token after the window.
        for before, wanted, into in zip(
            row[-kept - 1 : -1].split(step),
            seen[-kept:].split(step),
            nats[window.first : window.end].split(step),
            strict=True,
        ):
            into.copy_(cross_entropy(before.float(), wanted, reduction="none"))
        _check(nats, window)
        if predicted is not None:
            predicted(window, row[-kept - 1 : -1])


def _arguments(forward: Callable[..., Any], ids: torch.Tensor, kept: int) -> dict[str, Any]:
    """Of a pass that gives logits for the last `kept + 1` positions of each row, or for more."""
    arguments = {"input_ids": ids, "use_cache": False, "logits_to_keep": kept + 1}
    known = inspect.signature(forward).parameters
    return {name: value for name, value in arguments.items() if name in known}


def _check(nats: torch.Tensor, window: Window) -> None:
    found = nats[window.first : window.end]
    if not bool(found.isfinite().all()):
        index = window.first + int((~found.isfinite()).nonzero()[0])
        raise PipeloadError(
            f"the loss of token {index} is {float(nats[index])}, so the text has no perplexity. "
            "With dtype fp16, numbers may have become too large: try --dtype fp32."
        )
