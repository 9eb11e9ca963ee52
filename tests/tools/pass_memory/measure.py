"""One model type: what a pass of it is estimated to take, and what it takes.

The model is that of the coverage run, plain, with the same inputs made larger. A pass is measured
in a process of its own, forked once the model has run with small inputs: what is measured are
tensors and workspaces, not the libraries' code.
"""

from __future__ import annotations

import copy
import gc
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests.tools.model_types.check import PlainError, _cast, _make, _run, _told, randomize
from tests.tools.model_types.classes import classes_of
from tests.tools.model_types.run import in_child
from tests.tools.pass_memory.inputs import growths
from tests.tools.pass_memory.peaks import (
    Measured,
    estimate_forward,
    measure_forward,
    measure_generate,
    size_forward,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tests.tools.pass_memory.inputs import Grow

LEAST = 60_000_000
_WANTED = 150_000_000
"""Bytes of a pass that tell tensors from noise, and those that are aimed at."""
_MOST_ROWS = 1 << 17
_SECONDS = 45
_SEARCH_SECONDS = 150
_AS_IT_IS = "not made larger"
_LONGEST_PASS = 12.0
_THREADS = 2
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
    old: Sequence[Line] = (),
) -> list[Line]:
    """Measure one type.

    Args:
        model_type: which.
        say: is told what is being done, before it is done.
        halves: in bf16, too.
        quick: one forward alone.
        kept: a folder for what was found out, and from which it is taken if it is there.
        old: lines of another run: forwards in them are not measured, but estimated anew.
    """
    say("plain: search")
    file = kept / f"{model_type}.pt" if kept is not None else None
    if file is not None and file.exists():
        sized = torch.load(file, weights_only=False)  # from this very run, before
    else:
        # In a process of its own: models that are tried leave holes in its heap.
        sized, stages, ended = in_child(partial(_searched, model_type), _SEARCH_SECONDS)
        sized = sized or f"not measured: {stages[-1]}: {ended}"
    if isinstance(sized, str):
        return [empty(model_type, "", sized)]
    about = (model_type, sized.cls.__name__)
    if sized.cls.forward is torch.nn.Module.forward:
        return [empty(*about, "generates alone: its parts are types of their own")]
    say("measure")
    model = _built(sized)
    lines = _Trial(model, sized, (*about, "fp32"), old).lines(say, quick=quick)
    if halves:
        name, dtype = _HALVES
        torch.nn.Module.to(model, dtype)
        cast = sized._replace(inputs=[_cast(value, dtype) for value in sized.inputs])
        lines += _Trial(model, cast, (*about, name), old).lines(say, quick=quick)
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


def _searched(model_type: str, say: Callable[[str], None]) -> _Sized | str:
    """The model of the coverage run, and its inputs, not sized yet; or why there is none."""
    try:
        model, inputs = _found(model_type, say)
    except PlainError as error:
        return f"plain cannot: {error}"[:200]
    return _Sized(type(model), model.config, inputs, {})


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
        except PlainError as error:  # noqa: PERF203 - the next class may do
            reasons.append(str(error)[:180])
    raise PlainError(" ".join(" | ".join(reasons).split()) or "no class of its own")


def _built(sized: _Sized) -> Any:
    torch.manual_seed(0)
    model = sized.cls(sized.config).eval()
    randomize(model)
    _run(model, sized.inputs[0])
    return model


def empty(model_type: str, class_name: str, note: str) -> Line:
    """A line of a type that was not measured."""
    return Line(model_type, class_name, "", "", "", "", "", "", "", note)


def _fill(meta: torch.nn.Module, model: torch.nn.Module) -> None:
    """Buffers have their values by the time of a pass, whatever a skeleton has."""
    for name, value in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(meta.get_submodule(owner), leaf, value.clone())


class _Trial:
    """A model in one dtype."""

    def __init__(
        self, model: Any, sized: _Sized, about: tuple[str, str, str], old: Sequence[Line] = ()
    ) -> None:
        self._model, self._sized, self._about = model, sized, about
        self._old = [one for one in old if one.use == "forward" and one[:3] == about]
        with torch.device("meta"):
            self._meta = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
        _fill(self._meta, model)

    def lines(self, say: Callable[[str], None], *, quick: bool) -> list[Line]:
        """Every kind of pass with every kind of inputs, or one."""
        found: list[Line] = []
        can_generate = getattr(self._model, "can_generate", lambda: False)()
        for index, given in enumerate(self._sized.inputs[: 1 if quick else None]):
            say(f"measure {'+'.join(given)}")
            if index not in self._sized.growth:
                self._sized.growth[index] = self._growth(given)
            name, times = self._sized.growth[index]
            measured = self._forked(self._work(index, given))
            found += [self._line(one, name) for one in measured]
            if can_generate and not (quick or index) and measured and times > 1:
                say("measure generate")
                found += [self._line(one, name) for one in self._generated(given, name, times)]
                often = max(1, min(24, int(_LONGEST_PASS / max(0.01, measured[0].seconds))))
                short = self._generated(given, "rows", times * often)
                found += [self._line(one, "rows") for one in short if one.use == "decode"]
        return found or [empty(*self._about[:2], "not measured")]

    def _work(self, index: int, given: dict[str, Any]) -> Callable[..., list[Measured]]:
        name, times = self._sized.growth[index]
        grow = dict(growths(given)).get(name)
        larger = given if grow is None else grow(given, times)
        if index < len(self._old):
            sizes = int(self._old[index].first), int(self._old[index].second)
            return partial(estimate_forward, given=larger, sizes=sizes)
        return partial(measure_forward, given=larger, small=given)

    def _line(self, one: Measured, name: str) -> Line:
        most = max(one.first, one.second)
        ratio = f"{one.estimate / most:.2f}" if one.estimate is not None and most > 0 else ""
        notes = [name, one.note, "small" if most < LEAST else ""]
        estimate = "" if one.estimate is None else str(one.estimate)
        sizes = (estimate, str(one.first), str(one.second))
        note = "; ".join(filter(None, notes))
        return Line(*self._about, one.use, one.inputs, *sizes, ratio, note)

    def _growth(self, given: dict[str, Any]) -> tuple[str, int]:
        """The first way of growth that leads to a pass of the wanted size, or to the largest."""
        best, most = (_AS_IT_IS, 1), 0
        for name, grow in growths(given):
            if not _runs(self._model, grow(given, 2)):
                continue
            times, size = self._grown(given, grow)
            if size > most:
                best, most = (name, times), size
            if size >= LEAST:
                break
        return best

    def _grown(self, given: dict[str, Any], grow: Grow) -> tuple[int, int]:
        times, kept = 8, (1, 0)
        while times <= _MOST_ROWS:
            work = partial(size_forward, given=grow(given, times), small=given)
            measured = self._forked(work)
            if not measured:
                break
            first, seconds = measured[0].first, measured[0].seconds
            kept = (times, first)
            if first >= LEAST or seconds > _LONGEST_PASS / 2:
                break
            factor = 16 if first < 3_000_000 else max(2, _WANTED // first)
            times *= min(factor, max(2, int(_LONGEST_PASS / max(seconds, 1e-3))))
        return kept

    def _generated(self, given: dict[str, Any], name: str, times: int) -> list[Measured]:
        given = {k: v for k, v in given.items() if not k.startswith("decoder_")}
        grow = dict(growths(given)).get(name)
        if grow is None:
            return []
        work = partial(measure_generate, given=grow(given, times), small=given)
        return self._forked(work)

    def _forked(self, work: Callable[..., list[Measured]]) -> list[Measured]:
        def measure(say: Callable[[str], None]) -> list[Measured]:
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
