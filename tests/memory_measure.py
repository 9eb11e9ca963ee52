"""One model type: what a pass of it is estimated to take, and what it takes.

The model is that of the coverage run, plain, with the same inputs made larger. A pass is measured
in a process of its own, forked once the model has run with small inputs: what is measured are
tensors and workspaces, not the libraries' code.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload._memory import peak_rss_bytes, return_freed_memory, rss_bytes
from pipeload._pass_needs import PassNeeds
from tests.coverage_check import PlainError, _cast, _make, _run, _seed, _told, randomize
from tests.coverage_classes import classes_of
from tests.coverage_run import in_child
from tests.memory_inputs import growths, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.memory_inputs import Grow

LEAST = 40_000_000
_WANTED = 110_000_000
"""Bytes of a pass that tell tensors from noise, and those that are aimed at."""
_MOST_ROWS = 1 << 17
_SECONDS = 45
_LONGEST_PASS = 12.0
_THREADS = 2
_NEW_TOKENS = 3
_HALVES = ("bf16", torch.bfloat16)


class Line(NamedTuple):
    """What came out for one pass. Sizes in bytes, empty where there is none."""

    model_type: str
    class_name: str
    dtype: str
    use: str
    """"forward", or of `generate`: "prompt", "decode", "encoder"."""
    inputs: str
    estimate: str
    first: str
    second: str
    """Peaks above what was held before: of a first pass, and of an equal one after it."""
    ratio: str
    """The estimate by the larger of the two."""
    note: str


def lines_of(
    model_type: str,
    say: Callable[[str], None] = lambda _: None,
    *,
    halves: bool = False,
    quick: bool = False,
    kept: Path | None = None,
) -> list[Line]:
    """Measure one type.

    Args:
        model_type: which.
        say: is told what is being done, before it is done.
        halves: in bf16, too.
        quick: one forward alone.
        kept: a folder for what was found out, and from which it is taken if it is there.
    """
    say("plain: class")
    file = kept / f"{model_type}.pt" if kept is not None else None
    try:
        if file is not None and file.exists():
            sized = torch.load(file, weights_only=False)  # from this very run, before
            model = _built(sized)
        else:
            model, inputs = _found(model_type, say)
            sized = _Sized(type(model), model.config, inputs, {})
    except PlainError as error:
        return [_empty(model_type, "", f"plain cannot: {error}"[:200])]
    about = (model_type, type(model).__name__)
    if type(model).forward is torch.nn.Module.forward:
        return [_empty(*about, "generates alone: its parts are types of their own")]
    lines = _Trial(model, sized, *about, "fp32").lines(say, quick=quick)
    if halves:
        name, dtype = _HALVES
        torch.nn.Module.to(model, dtype)
        cast = sized._replace(inputs=[_cast(value, dtype) for value in sized.inputs])
        lines += _Trial(model, cast, *about, name).lines(say, quick=quick)
    if file is not None:
        torch.save(sized, file)
    return lines


class _Sized(NamedTuple):
    """What was found out about a type: another run needs no search."""

    cls: Any
    config: Any
    inputs: list[dict[str, Any]]
    growth: dict[int, tuple[str, int]]
    """By the number of an input, how it is made larger, and how often."""


def _found(model_type: str, say: Callable[[str], None]) -> tuple[Any, list[dict[str, Any]]]:
    """The model of the coverage run, and its inputs.

    Raises:
        PlainError: the library itself cannot.
    """
    reasons: list[str] = []
    try:
        classes = classes_of(model_type)
    except Exception as error:
        raise PlainError(_told(error)) from error
    for cls in classes:
        try:
            return _make(model_type, cls, say)
        except PlainError as error:
            reasons.append(str(error)[:180])
    raise PlainError(" ".join(" | ".join(reasons).split()) or "no class of its own")


def _built(sized: _Sized) -> Any:
    torch.manual_seed(0)
    model = sized.cls(sized.config).eval()
    randomize(model)
    _run(model, sized.inputs[0])
    return model


def _empty(model_type: str, class_name: str, note: str) -> Line:
    return Line(model_type, class_name, "", "", "", "", "", "", "", note)


class _Measured(NamedTuple):
    """One pass, in bytes; `seconds` of its first run."""

    use: str
    inputs: str
    estimate: int | None
    first: int
    second: int
    seconds: float
    note: str = ""


class _Trial:
    """A model in one dtype."""

    def __init__(
        self, model: Any, sized: _Sized, model_type: str, name: str, dtype: str
    ) -> None:
        self._model, self._sized = model, sized
        self._about = (model_type, name, dtype)
        with torch.device("meta"):
            self._meta = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()

    def lines(self, say: Callable[[str], None], *, quick: bool) -> list[Line]:
        """Every kind of pass with every kind of inputs, or one."""
        found: list[Line] = []
        can_generate = getattr(self._model, "can_generate", lambda: False)()
        for index, given in enumerate(self._sized.inputs):
            say(f"measure {'+'.join(given)}")
            name, times, measured = self._forward(index, given)
            found += [self._line(one, name) for one in measured]
            if quick:
                break
            if can_generate and not index and measured and times > 1:
                say("measure generate")
                found += [self._line(one, name) for one in self._generated(given, name, times)]
                often = max(1, min(24, int(_LONGEST_PASS / max(0.01, measured[0].seconds))))
                short = self._generated(given, "rows", times * often)
                found += [self._line(one, "rows") for one in short if one.use == "decode"]
        return found

    def _line(self, one: _Measured, name: str) -> Line:
        most = max(one.first, one.second)
        ratio = f"{one.estimate / most:.2f}" if one.estimate is not None and most > 0 else ""
        notes = [name, one.note, "small" if most < LEAST else ""]
        estimate = "" if one.estimate is None else str(one.estimate)
        sizes = (estimate, str(one.first), str(one.second))
        note = "; ".join(filter(None, notes))
        return Line(*self._about, one.use, one.inputs, *sizes, ratio, note)

    def _forward(self, index: int, given: dict[str, Any]) -> tuple[str, int, list[_Measured]]:
        """The first way of growth that leads to a pass of the wanted size, or to the largest."""
        ways = dict(growths(given))
        if index in self._sized.growth:
            name, times = self._sized.growth[index]
            larger = ways[name](given, times) if name in ways else given
            work = partial(_measure_forward, given=larger, small=given)
            return name, times, self._forked(work)
        best: tuple[str, int, list[_Measured]] = ("not made larger", 1, [])
        for name, grow in ways.items():
            if not _runs(self._model, grow(given, 2)):
                continue
            times, measured = self._grown(given, grow)
            if measured and (not best[2] or measured[0].first > best[2][0].first):
                best = (name, times, measured)
            if measured and measured[0].first >= LEAST:
                break
        if not best[2]:
            best = (*best[:2], self._forked(partial(_measure_forward, given=given, small=given)))
        self._sized.growth[index] = best[:2]
        return best

    def _grown(self, given: dict[str, Any], grow: Grow) -> tuple[int, list[_Measured]]:
        times, kept = 8, (0, list[_Measured]())
        while times <= _MOST_ROWS:
            larger = grow(given, times)
            measured = self._forked(partial(_measure_forward, given=larger, small=given))
            if not measured:
                break
            kept = (times, measured)
            first, seconds = measured[0].first, measured[0].seconds
            if first >= LEAST or seconds > _LONGEST_PASS / 2:
                break
            factor = 16 if first < 3_000_000 else max(2, _WANTED // first)
            times *= min(factor, max(2, int(_LONGEST_PASS / max(seconds, 1e-3))))
        return kept

    def _generated(self, given: dict[str, Any], name: str, times: int) -> list[_Measured]:
        given = {k: v for k, v in given.items() if not k.startswith("decoder_")}
        grow = dict(growths(given)).get(name)
        if grow is None:
            return []
        work = partial(_measure_generate, given=grow(given, times), small=given)
        return self._forked(work)

    def _forked(self, work: Callable[..., list[_Measured]]) -> list[_Measured]:
        def measure(say: Callable[[str], None]) -> list[_Measured]:
            torch.set_num_threads(_THREADS)
            gc.freeze()  # what is collected below is what the passes leave
            try:
                return work(self._model, self._meta)
            except Exception as error:
                say(_told(error, where=True))
                raise

        found, _stages, _ended = in_child(measure, _SECONDS)
        return found or []


def _runs(model: Any, given: dict[str, Any]) -> bool:
    try:
        _run(model, given)
    except Exception:
        return False
    return True


class _Peak:
    """Measures what is taken above what is held now."""

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = rss_bytes()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew

    def bytes(self) -> int:
        return peak_rss_bytes() - self._before


def _estimate(meta: Any, needs: PassNeeds | None, args: Any, given: Any) -> tuple[int | None, str]:
    try:
        needs = needs or PassNeeds(meta, meta.config, products=lambda _: 0)
        return needs.for_pass(args, given), ""
    except Exception as error:
        return None, f"estimate: {_told(error, where=True)}"


def _measure_forward(
    model: Any, meta: Any, given: dict[str, Any], small: dict[str, Any]
) -> list[_Measured]:
    """Two equal passes, without a gradient."""
    return_freed_memory()
    _run(model, small)
    found: list[int] = []
    seconds = 0.0
    for _ in range(2):
        mine = copy.deepcopy(given)
        _seed()
        peak = _Peak()
        started = time.monotonic()
        with torch.no_grad():
            output = model(**mine)
        found.append(peak.bytes())
        seconds = seconds or time.monotonic() - started
        del output, mine
        if found[0] < LEAST // 8 or seconds > _LONGEST_PASS:
            found.append(found[0])
            break
    estimate, note = _estimate(meta, None, (), copy.deepcopy(given))
    return [_Measured("forward", shapes_of(given), estimate, found[0], found[1], seconds, note)]


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
        estimate, note = _estimate(None, self._needs, args, kwargs)
        self._now = (shapes_of({**dict(enumerate(args)), **kwargs}), estimate, note, _Peak())

    def _after(self, *_: object) -> None:
        if self._now is not None:
            shapes, estimate, note, peak = self._now
            self.passes.append((shapes, estimate, peak.bytes(), note))


def _measure_generate(
    model: Any, meta: Any, given: dict[str, Any], small: dict[str, Any]
) -> list[_Measured]:
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
        _Measured(use, one[0], one[1], one[2], other[2], 0.0, one[3]) for use, one, other in pairs
    ]
