"""One model type: a random checkpoint, loaded plainly and streamed, compared to the last bit."""

from __future__ import annotations

import contextlib
import copy
import random
import shutil
import tempfile
import traceback
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch

import pipeload
from pipeload.budget import cut, expert_banks, residency
from pipeload.budget.shared_limit import ACCOUNTANT, Accountant
from tests.support.measuring import steady
from tests.tools.model_types.classes import classes_of
from tests.tools.model_types.configs import RECIPES, config_for, is_small, tiny_config
from tests.tools.model_types.inputs import candidates
from tests.tools.model_types.outputs import difference_of, tensors_of
from tests.tools.model_types.repairs import repaired
from tests.tools.model_types.special_inputs import save_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FLOOR_BYTES = 8_000_000_000
_NEW_TOKENS = 6
_TESTED_INPUTS = 2
_MOST_REPAIRS = 24
_TOKENS = 4096
"""What passes keep memory free for: sounds have that many positions."""
EXACT, REFUSED, WRONG, FAILED, PLAIN, NO_CLASS = (
    "exact",
    "refused",
    "wrong",
    "failed",
    "plain cannot",
    "no class",
)
"""Equal to the last bit; refused by name; not equal; another error while streaming; not to be
compared, as the library itself cannot; no class of its own."""
HALF_WAY = "plain: second dtype"
"""The stage before which fp32 was found to be exact."""


class Row(NamedTuple):
    """What came out for one type."""

    model_type: str
    class_name: str
    result: str
    dtypes: str
    """What was compared, such as "fp32 fp16"."""
    uses: str
    """Inputs that were compared, "generate" where that was, units that were streamed, and "experts"
    where these were read one by one."""
    reason: str


class PlainError(Exception):
    """The library itself cannot."""


class WrongError(Exception):
    """Streamed output is not plain output."""


@contextlib.contextmanager
def tiny_planning() -> Iterator[None]:
    """Plans of tiny models look like those of large ones: all but vectors is worth streaming."""
    with (
        steady(_FLOOR_BYTES),
        mock.patch.object(Accountant, "other_bytes", return_value=_FLOOR_BYTES),
        mock.patch.object(cut, "CHUNKS", (1 << 14,)),
        mock.patch.object(cut, "_TABLE_BYTES", 1 << 12),
        mock.patch.object(expert_banks, "_BANK_BYTES", 1),
        mock.patch.object(residency, "_TINY_BYTES", 256),
    ):
        yield


def half_of(model_type: str) -> tuple[str, torch.dtype, bool]:
    """The type's second dtype: its name, and whether the file has it already or fp32."""
    options = (
        ("bf16", torch.bfloat16, True),
        ("fp16", torch.float16, False),
        ("bf16", torch.bfloat16, False),
    )
    return options[zlib.crc32(model_type.encode()) % len(options)]


def check(
    model_type: str, say: Callable[[str], None] = lambda _stage: None, *, fast: bool = False
) -> Row:
    """Try one type.

    Args:
        model_type: which.
        say: is told what is being done, before it is done.
        fast: in fp32 alone, and at the smallest limit alone.
    """
    trial = _Trial(model_type, say, fast=fast)
    folder = Path(tempfile.mkdtemp(prefix="coverage-"))
    try:
        trial.run(folder)
    except ModuleNotFoundError as error:
        return trial.row(NO_CLASS, _told(error))
    except PlainError as error:
        return trial.row(PLAIN, str(error))
    except WrongError as error:
        return trial.row(WRONG, str(error))
    except pipeload.UnsupportedModelError as error:
        return trial.row(REFUSED, str(error))
    except Exception as error:
        return trial.row(FAILED, _told(error, where=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial.row(EXACT if trial.cls is not None else NO_CLASS)


class _Trial:
    """One type on its way through."""

    def __init__(self, model_type: str, say: Callable[[str], None], *, fast: bool) -> None:
        self.model_type = model_type
        self._fast = fast
        self.say = say
        self.cls: Any = None
        self._dtypes: list[str] = []
        self._uses: list[str] = []

    def row(self, result: str, reason: str = "") -> Row:
        """What came out so far."""
        name = self.cls.__name__ if self.cls is not None else ""
        uses = " ".join(dict.fromkeys(self._uses))
        reason = " ".join(reason.split())[:400]
        return Row(self.model_type, name, result, " ".join(self._dtypes), uses, reason)

    def run(self, folder: Path) -> None:
        """Compare in fp32, then in the type's second dtype where the library can."""
        self.say("plain: class")
        try:
            classes = classes_of(self.model_type)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            raise PlainError(f"class: {_told(error)}") from error
        if not classes:
            return
        model, inputs = self._first_that_runs(classes)
        self._save(model, folder / "fp32")
        self._compare(folder / "fp32", torch.float32, inputs)
        self._dtypes.append("fp32")
        if self._fast:
            return
        self.say(HALF_WAY)
        name, dtype, stored = half_of(self.model_type)
        source = folder / (name if stored else "fp32")
        if stored:
            torch.nn.Module.to(model, dtype)
            self._save(model, source)
        del model
        halves = [{k: _cast(v, dtype) for k, v in given.items()} for given in inputs]
        try:
            self._compare(source, dtype, halves)
            self._dtypes.append(name)
        except PlainError:
            self._dtypes.append(f"({name})")  # no kernel for it, or its numbers overflow

    def _first_that_runs(self, classes: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
        reasons: list[str] = []
        for cls in classes:
            self.cls = cls
            try:
                return _make(self.model_type, cls, self.say)
            except PlainError as error:
                reasons.append(f"{cls.__name__}: {error}")
        raise PlainError(" | ".join(reason[:180] for reason in reasons))

    def _save(self, model: Any, folder: Path) -> None:
        self.say("plain: save")
        try:
            model.save_pretrained(folder, max_shard_size="200KB")
            save_beside(model, folder)
        except Exception as error:
            raise PlainError(f"save: {_told(error)}") from error

    def _compare(self, folder: Path, dtype: torch.dtype, inputs: list[dict[str, Any]]) -> None:
        """Compare at the smallest limit and between it and where everything fits."""
        try:
            torch.manual_seed(3)
            plain: Any = self.cls.from_pretrained(folder, dtype=dtype).eval()
            wanted = self._wanted(plain, inputs, dtype)
        except PlainError:
            raise
        except Exception as error:
            raise PlainError(f"{dtype}: {_told(error)}") from error
        self.say(f"streamed: plan {dtype}")
        options: dict[str, Any] = {"auto_class": self.cls, "dtype": dtype, "tokens": _TOKENS}
        nbytes = sum(p.numel() * p.element_size() for p in plain.parameters())
        with tiny_planning():
            smallest = pipeload.smallest_limit(folder, **options)
            limits = {"smallest": smallest, "middle": smallest + nbytes // 2}
            for name, limit in list(limits.items())[: 1 if self._fast else None]:
                self.say(f"streamed: load {dtype} {name}")
                ACCOUNTANT.forget_all()
                torch.manual_seed(3)
                model: Any = pipeload.from_pretrained(folder, memory_limit=limit, **options)
                if name == "smallest":
                    units = sum(u.streamed_bytes > 0 for u in model.pipeload.plan.units)
                    self._uses.append(f"{units} units")
                for use in wanted:
                    self.say(f"streamed: {use.name} {dtype} {name}")
                    for turn in ("first", "second"):
                        difference = difference_of(tensors_of(use.run(model)), use.expected)
                        if difference:
                            _blame_plain(self.cls, folder, dtype, use)
                            raise WrongError(f"{use.name} {dtype} {name} {turn}: {difference}")
                    self._uses.append(use.name)
                if model.pipeload.stats().expert_misses:
                    self._uses.append("experts")
                del model

    def _wanted(self, plain: Any, inputs: list[dict[str, Any]], dtype: torch.dtype) -> list[_Use]:
        """What the plain model gives for each use."""
        found: list[_Use] = []
        for name, run in _uses(plain, inputs):
            self.say(f"plain: {name} {dtype}")
            try:
                expected, again = tensors_of(run(plain)), tensors_of(run(plain))
            except Exception:
                if name == "generate":
                    continue
                raise
            _check_plain(f"{name} {dtype}", expected, again)
            found.append(_Use(name, run, expected))
        return found


class _Use(NamedTuple):
    name: str
    run: Callable[[Any], Any]
    expected: dict[str, torch.Tensor]


def _check_plain(
    name: str, expected: dict[str, torch.Tensor], again: dict[str, torch.Tensor]
) -> None:
    if any(t.is_floating_point() and t.isnan().any() for t in expected.values()):
        raise PlainError(f"{name}: NaN")
    if difference_of(again, expected):
        raise PlainError(f"{name}: two runs differ")


def _make(
    model_type: str, cls: Any, say: Callable[[str], None]
) -> tuple[Any, list[dict[str, Any]]]:
    """A random model of the first recipe that runs, and inputs with which it does."""
    reasons: list[str] = []
    tried: list[dict[str, Any]] = []
    failed: list[list[str]] = []
    for recipe in RECIPES:
        try:
            say(f"plain: config {recipe}")
            config = config_for(cls, tiny_config(model_type, recipe))
            if config.to_dict() in tried:
                continue
            tried.append(config.to_dict())
            if not is_small(cls, config):
                reasons.append(f"{recipe}: too large")
                continue
            say(f"plain: build {recipe}")
            torch.manual_seed(0)
            model = cls(config).eval()
            randomize(model)
            say(f"plain: run {recipe}")
            found, errors = _inputs(model)
        except Exception as error:
            reasons.append(f"{recipe}: {_told(error)}")
            continue
        if found:
            return model, found
        reasons += [f"run: {error}" for error in errors[:2]]
        if errors in failed and recipe not in {"sections", "filled", "stages"}:
            break  # sizes are not what it fails for
        failed.append(errors)
    # The first reason is about the sizes that were wanted.
    raise PlainError("; ".join(dict.fromkeys(reasons)))


def _inputs(model: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """Inputs that it runs with, and why it does not with others."""
    torch.manual_seed(1)
    found: list[dict[str, Any]] = []
    seen: set[tuple[str, ...]] = set()
    errors: dict[str, None] = {}
    for given, tensors in _tried(model, errors, seen):
        if any(t.is_floating_point() and t.isnan().any() for t in tensors.values()):
            errors["NaN"] = None
        elif tensors:
            seen.add(tuple(given))
            found.append(given)
        if len(found) == _TESTED_INPUTS:
            break
    return found, list(errors) or ["no inputs"]


def _tried(
    model: Any, errors: dict[str, None], done: set[tuple[str, ...]]
) -> Iterator[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Inputs that do not fail, and what they give; others are put right by what their error says.

    Args:
        model: which.
        errors: is told of those that fail.
        done: names of inputs that need no more.
    """
    repairs = _MOST_REPAIRS
    for first in candidates(model):
        waiting = [first]
        while waiting:
            given = waiting.pop(0)
            if tuple(given) in done:
                break
            try:
                tensors = tensors_of(_run(model, given))
            except Exception as error:
                errors[_told(error)] = None
                if repairs:
                    repairs -= 1
                    waiting += repaired(given, str(error))
                continue
            yield given, tensors


def randomize(model: torch.nn.Module) -> None:
    """Make every parameter and saved buffer unlike every other; see the one of `models`."""
    generator = torch.Generator().manual_seed(7)
    saved = model.state_dict(keep_vars=True)
    names = {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, tensor in saved.items():
            if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
                continue
            if not tensor.numel():
                continue
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
            first = tensor.flatten()[0].item()
            constant = bool((tensor == first).all())
            if name not in names:
                if constant:  # the statistics of a norm: variances must stay positive
                    tensor.add_((0.1 * noise.abs()).to(tensor.dtype))
            elif tensor.ndim > 1 and not constant:
                tensor.copy_(noise * tensor[0].numel() ** -0.5)
            elif constant and abs(first) < 1e3:
                tensor.copy_(first + 0.1 * noise)
            else:
                tensor.copy_(tensor.nan_to_num(0, 1, -1) + 0.01 * noise)


def _blame_plain(cls: Any, folder: Path, dtype: torch.dtype, use: _Use) -> None:
    """Raise PlainError if another plain model of the same file differs as well."""
    torch.manual_seed(3)
    other = cls.from_pretrained(folder, dtype=dtype).eval()
    if difference_of(tensors_of(use.run(other)), use.expected):
        raise PlainError("two plain models differ")


def _uses(model: Any, inputs: list[dict[str, Any]]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    for given in inputs:
        yield "+".join(given), partial(_run, given=given)
    can: Any = getattr(model, "can_generate", lambda: False)
    if can():
        given = {k: v for k, v in inputs[0].items() if not k.startswith("decoder_")}
        yield "generate", partial(_generate, given=given)


def _run(model: Any, given: dict[str, Any]) -> Any:
    _seed()
    # A few are several models in one, which generate alone.
    run = model.generate if type(model).forward is torch.nn.Module.forward else model
    with torch.no_grad():
        return run(**copy.deepcopy(given))


def _generate(model: Any, given: dict[str, Any]) -> Any:
    _seed()
    return model.generate(**copy.deepcopy(given), max_new_tokens=_NEW_TOKENS, do_sample=False)


def _seed() -> None:
    import numpy as np

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # what the library's models use


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, dict):
        return {name: _cast(item, dtype) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cast(item, dtype) for item in value)
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _told(error: BaseException, *, where: bool = False) -> str:
    text = f"{type(error).__name__}: {str(error).strip()[:200]}"
    if where:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        text += " @ " + " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    return text
