"""One model type: what a pass of it is estimated to take, and what it takes.

The model is that of the coverage run, plain, with the same inputs made larger. A pass is measured
in a process of its own, forked once the model has run with small inputs: what is measured are
tensors and workspaces, not the libraries' code.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import resource
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
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


LEAST = 60_000_000
_WANTED = 75_000_000
"""Bytes of a pass that tell tensors from noise, and those that are aimed at."""
_MOST_ROWS = 1 << 17
_FIXED = 2_000_000
"""Bytes that do not depend on the number of rows, and that two sizes may differ by all the same."""
_MOST_FACTOR = 24
_SEARCH_SECONDS = 600
_AS_IT_IS = "not made larger"
_LONGEST_PASS = 20.0
"""Of the processor. What needs longer passes to be large enough is too small to tell."""
_MOST_SECONDS = 90
"""Of the processor, for what is measured in one process; others may want it, too."""
_WAITING_SECONDS = 900
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
    grown: str
    """How the inputs were made larger, and so many times: "rows x 8"."""
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
        found = torch.load(file, weights_only=False)  # from this very run, before
    else:
        with contextlib.suppress(Exception):
            classes_of(model_type)  # both processes want the module
        # In a process of its own: models that are tried leave holes in its heap.
        found, stages, ended = in_child(partial(_searched, model_type), _SEARCH_SECONDS)
        found = found or f"not measured: {stages[-1]}: {ended}"
    if isinstance(found, str):
        return [empty(model_type, "", found)]
    if file is not None and not file.exists():
        torch.save(found, file)
    about = (model_type, found.cls.__name__)
    if found.cls.forward is torch.nn.Module.forward:
        return [empty(*about, "generates alone: its parts are types of their own")]
    say("measure")
    model = _built(found)
    lines = _Trial(model, found.inputs, (*about, "fp32"), old).lines(say, quick=quick)
    if halves:
        name, dtype = _HALVES
        torch.nn.Module.to(model, dtype)
        cast = [_cast(value, dtype) for value in found.inputs]
        lines += _Trial(model, cast, (*about, name), old).lines(say, quick=quick)
    return lines


class _Found(NamedTuple):
    """What was found out about a type: another run needs no search."""

    cls: Any
    config: Any
    inputs: list[dict[str, Any]]


def _searched(model_type: str, say: Callable[[str], None]) -> _Found | str:
    """The model of the coverage run, and its inputs; or why there is none."""
    try:
        model, inputs = _found(model_type, say)
    except PlainError as error:
        return f"plain cannot: {error}"[:200]
    return _Found(type(model), model.config, inputs)


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


def _built(found: _Found) -> Any:
    torch.manual_seed(0)
    model = found.cls(found.config).eval()
    randomize(model)
    _run(model, found.inputs[0])
    return model


def empty(model_type: str, class_name: str, note: str) -> Line:
    """A line of a type that was not measured."""
    return Line(model_type, class_name, "", "", "", "", "", "", "", "", note)


def _fill(meta: torch.nn.Module, model: torch.nn.Module) -> None:
    """Buffers have their values by the time of a pass, whatever a skeleton has."""
    for name, value in model.named_buffers():
        owner, _, leaf = name.rpartition(".")
        setattr(meta.get_submodule(owner), leaf, value.clone())


class _Growth(NamedTuple):
    """How an input is made larger, and how often."""

    name: str
    times: int

    def of(self, given: dict[str, Any]) -> dict[str, Any]:
        grow = dict(growths(given)).get(self.name)
        return given if grow is None else grow(given, self.times)

    def __str__(self) -> str:
        return f"{self.name} x {self.times}"


def _growth_of(line: Line) -> _Growth:
    name, _, times = line.grown.rpartition(" x ")
    return _Growth(name, int(times))


class _Trial:
    """A model in one dtype."""

    def __init__(
        self,
        model: Any,
        inputs: list[dict[str, Any]],
        about: tuple[str, str, str],
        old: Sequence[Line] = (),
    ) -> None:
        self._model, self._inputs, self._about = model, inputs, about
        self._old = [one for one in old if one.use == "forward" and one[:3] == about]
        with torch.device("meta"):
            self._meta = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
        _fill(self._meta, model)

    def lines(self, say: Callable[[str], None], *, quick: bool) -> list[Line]:
        """Every kind of pass with every kind of inputs, or one."""
        found: list[Line] = []
        can_generate = getattr(self._model, "can_generate", lambda: False)()
        for index, given in enumerate(self._inputs[: 1 if quick else None]):
            say(f"measure {'+'.join(given)}")
            if index < len(self._old):
                found.append(self._again(self._old[index], given))
                continue
            growth, measured, why = self._largest(given)
            found += [self._line(one, growth, why) for one in measured]
            if can_generate and not (quick or index) and measured and growth.times > 1:
                say("measure generate")
                found += [self._line(one, growth) for one in self._generated(given, growth)]
                often = max(1, min(24, int(_LONGEST_PASS / max(0.01, measured[0].seconds))))
                rows = _Growth("rows", growth.times * often)
                short = self._generated(given, rows)
                found += [self._line(one, rows) for one in short if one.use == "decode"]
        return found or [empty(*self._about[:2], "not measured")]

    def _again(self, old: Line, given: dict[str, Any]) -> Line:
        growth = _growth_of(old)
        sizes = int(old.first), int(old.second)
        work = partial(estimate_forward, given=growth.of(given), small=given, sizes=sizes)
        again = self._forked(work)
        return self._line(again[0], growth, old.note) if again else old

    def _line(self, one: Measured, growth: _Growth, why: str = "") -> Line:
        most = max(one.first, one.second)
        ratio = f"{one.estimate / most:.2f}" if one.estimate is not None and most > 0 else ""
        estimate = "" if one.estimate is None else str(one.estimate)
        sizes = (estimate, str(one.first), str(one.second))
        note = "; ".join(filter(None, [why, one.note]))
        return Line(*self._about, one.use, one.inputs, *sizes, ratio, str(growth), note)

    def _largest(self, given: dict[str, Any]) -> tuple[_Growth, list[Measured], str]:
        """The first way of growth that leads to a pass of the wanted size, or to the largest."""
        best, most, why = _Growth(_AS_IT_IS, 1), 0, "cannot be made larger"
        for name, grow in growths(given):
            if not _runs(self._model, grow(given, 2)):
                continue
            growth, measured, reason = self._grown(given, name)
            if measured and measured[0].estimated:
                return growth, measured, ""
            if measured and measured[0].first > most:
                best, most, why = growth, measured[0].first, reason
        work = partial(measure_forward, given=best.of(given), small=given)
        return best, self._forked(work), f"too small to tell: {why}"

    def _grown(self, given: dict[str, Any], name: str) -> tuple[_Growth, list[Measured], str]:
        """The first pass of the wanted size, or the largest; and why it is no larger."""
        kept: tuple[_Growth, list[Measured]] = (_Growth(name, 1), [])
        times, before = 8, (0, _FIXED)
        while times <= _MOST_ROWS:
            growth = _Growth(name, times)
            work = partial(measure_forward, given=growth.of(given), small=given, least=LEAST)
            measured = self._forked(work)
            if not measured:
                return *kept, f"{growth} does not run"
            kept = (growth, measured)
            if measured[0].estimated:
                return *kept, ""
            first, seconds = measured[0].first, measured[0].seconds
            in_time = int(times * _LONGEST_PASS / max(seconds, 1e-3))
            if in_time < 2 * times:
                return *kept, f"{growth} takes {seconds:.0f} s"
            wanted = _MOST_FACTOR * times
            if first - before[1] > _FIXED:
                per_row = (first - before[1]) / (times - before[0])
                wanted = min(wanted, times + 1 + int((_WANTED - first) / per_row))
            before = (times, first)
            times = min(wanted, in_time)
        return *kept, f"{kept[0]} is too little"

    def _generated(self, given: dict[str, Any], growth: _Growth) -> list[Measured]:
        given = {k: v for k, v in given.items() if not k.startswith("decoder_")}
        if growth.name not in dict(growths(given)):
            return []
        work = partial(measure_generate, given=growth.of(given), small=given)
        return self._forked(work)

    def _forked(self, work: Callable[..., list[Measured]]) -> list[Measured]:
        def measure(say: Callable[[str], None]) -> list[Measured]:
            resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
            gc.freeze()  # what is collected below is what the passes leave
            try:
                return work(self._model, self._meta)
            except Exception as error:
                say(_told(error, where=True))
                raise

        found, _stages, _ended = in_child(measure, _WAITING_SECONDS)
        return found or []


def _runs(model: Any, given: dict[str, Any]) -> bool:
    try:
        _run(model, given)
    except Exception:
        return False
    return True
