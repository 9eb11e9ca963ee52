"""Passes of a model in this process, measured: what each takes above what was held before it."""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import TopPLogitsWarper

import pipeload.hf.cache_layers  # noqa: F401 - caches are read by it
from pipeload.budget.pass_needs import PassNeeds
from pipeload.system.memory import peak_rss_bytes, return_freed_memory, rss_bytes
from tests.tools.model_types.check import _run, _seed, _told
from tests.tools.pass_memory.inputs import shapes_of

_NEW_TOKENS = 3
_REPEATED_SECONDS = 0.3
_TOP_P = 0.9
_LARGE = 1024
"""Rows and columns of a product that is computed as large ones are."""


class Measured(NamedTuple):
    """One pass, in bytes, and the one after it; `seconds` of the processor. 0: was not run."""

    use: str
    inputs: str
    estimate: int | None
    first: int
    second: int
    seconds: float
    note: str = ""

    @property
    def estimated(self) -> bool:
        """Whether somebody tried to, with or without success."""
        return self.estimate is not None or bool(self.note)


class _Peak:
    """Measures what is taken above what is held now."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = rss_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew

    def bytes(self) -> int:
        return peak_rss_bytes() - self._before


def _multiply() -> None:
    """Have the library make the buffers that it keeps for all large products: 8 MB with AVX-512."""
    ones = torch.ones(_LARGE, _LARGE)
    torch.mm(ones, ones)


def _sample(output: Any) -> None:
    """Draw the next words, as `generate` does once a pass is over: it is estimated with that."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor) and logits.dim() == 3:
        scores = logits[:, -1].to(torch.float32, copy=True)
        scores = TopPLogitsWarper(_TOP_P)(torch.empty(0), scores)
        torch.multinomial(nn.functional.softmax(scores, dim=-1), 1)


def _estimate(needs: PassNeeds, args: Any, given: Any) -> tuple[int | None, str]:
    try:
        return needs.for_pass(args, given), ""
    except Exception as error:
        return None, f"estimate: {_told(error, where=True)}"


def measure_forward(
    model: Any, meta: Any, given: dict[str, Any], small: dict[str, Any], least: int = 0
) -> list[Measured]:
    """Equal passes, without a gradient; of what generates, with what it makes of their logits.

    One, which is not estimated, where it takes under `least`. A long one is not repeated: of 185
    types the second pass took 2 % more than the first at most, and over 1 % more for three.
    """
    return_freed_memory()
    _run(model, small)
    _multiply()
    generates = getattr(model, "can_generate", bool)()
    found: list[int] = []
    started = time.process_time()
    while len(found) < 2:
        mine = copy.deepcopy(given)
        _seed()
        peak = _Peak()
        with torch.no_grad():
            output = model(**mine)
            if generates:
                _sample(output)
        found.append(peak.bytes())
        del output, mine
        seconds = time.process_time() - started
        if found[0] < least:
            return [Measured("forward", "", None, found[0], 0, seconds)]
        if seconds > _REPEATED_SECONDS:
            found.append(0)
    return estimate_forward(model, meta, given, small, (found[0], found[1]), seconds)


def estimate_forward(
    _: Any,
    meta: Any,
    given: dict[str, Any],
    small: dict[str, Any],
    sizes: tuple[int, int],
    seconds: float = 0.0,
) -> list[Measured]:
    """What was measured, beside what is estimated: after a small pass, as it was measured.

    What the first pass of all leaves in a model is there by then.
    """
    needs = PassNeeds(meta, meta.config, products=lambda _: 0)
    _estimate(needs, (), copy.deepcopy(small))
    estimate, note = _estimate(needs, (), copy.deepcopy(given))
    return [Measured("forward", shapes_of(given), estimate, *sizes, seconds, note)]


class _Watch:
    """Measures every pass of a module while something calls it."""

    def __init__(self, module: Any, use: str, needs: PassNeeds) -> None:
        self.use, self._needs = use, needs
        self.passes: list[tuple[str, int | None, int, str]] = []
        self._now: tuple[str, int | None, str, _Peak] | None = None
        self.hooks = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def _before(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        estimate, note = _estimate(self._needs, args, kwargs)
        self._now = (shapes_of({**dict(enumerate(args)), **kwargs}), estimate, note, _Peak())

    def _after(self, *_: object) -> None:
        if self._now is not None:
            shapes, estimate, note, peak = self._now
            self.passes.append((shapes, estimate, peak.bytes(), note))


def measure_generate(
    model: Any, meta: Any, given: dict[str, Any], small: dict[str, Any]
) -> list[Measured]:
    """The passes of `generate`: the prompt's in two calls of it, and two decoding ones."""
    return_freed_memory()
    options = {"max_new_tokens": _NEW_TOKENS, "do_sample": False}
    _seed()
    model.generate(**copy.deepcopy(small), **options)
    needs = PassNeeds(meta, meta.config, products=lambda _: 0)
    model.generation_config.eos_token_id = None
    watch = _Watch(model, "prompt", needs)
    ends: list[int] = []
    for _ in range(2):
        _seed()
        model.generate(**copy.deepcopy(given), **options)
        ends.append(len(watch.passes))
    first, passes = ends[0], watch.passes
    if not first:
        return []
    pairs = [("prompt", passes[0], passes[first])]
    if first > 2:
        pairs.append(("decode", passes[1], passes[2]))
    return [
        Measured(use, one[0], one[1], one[2], other[2], 0.0, one[3]) for use, one, other in pairs
    ]
