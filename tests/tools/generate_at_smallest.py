#!/usr/bin/env python3
"""Every type that generates does so at its own smallest limit: the same tokens, none refused.

    python tests/tools/generate_at_smallest.py
    python tests/tools/generate_at_smallest.py --types t5,whisper --hint 64
    python tests/tools/generate_at_smallest.py --shard 0/2 --table /tmp/first.tsv

The models are those of the coverage run, with as many positions as the hint asks for; texts are as
long as the hint lets them be, pictures and sounds of the size that the configuration names. Each
type runs in a process of its own. Beside what is measured, what each pass is estimated to take is
held against the hint's: models are so small here that a limit has room for more than it promises.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import pipeload
from pipeload.budget.cut import NothingToStreamError
from pipeload.budget.pass_needs import PassNeeds, PassShape
from tests.tools.model_types import configs
from tests.tools.model_types.check import EXACT, PlainError, _make, _seed, _told
from tests.tools.model_types.classes import classes_of
from tests.tools.model_types.outputs import difference_of, tensors_of
from tests.tools.model_types.run import in_child
from tests.tools.model_types.run import read_table as coverage
from tests.tools.model_types.special_inputs import save_beside
from tests.tools.pass_memory.inputs import _TEXTS, _longer, shapes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SECONDS = 240
HINT = 256
NEW_TOKENS = 4
SPARE_BYTES = 2_000_000
"""Over the smallest limit: a process holds a little more now, a little less then."""
_NEAR = 1.01
"""Estimates of one pass on two ways differ by less: two small tensors more, or two less."""
OK, REFUSED, OVER, DIFFERS, FAILED, PLAIN, NEVER = (
    "ok",
    "refused",
    "over",
    "differs",
    "failed",
    "plain cannot",
    "does not generate",
)
"""Equal and within; a pass was refused; one was estimated over what the hint promises, or took the
process over its limit; other tokens; another error; nothing to compare with, or to stream; no such
method."""
_COVERAGE = Path(__file__).parent / "model_types" / "coverage.tsv"


class Row(NamedTuple):
    """What came out for one type."""

    model_type: str
    class_name: str
    result: str
    inputs: str
    share: str
    """The largest pass's estimate by the hint's."""
    reason: str


def main() -> int:
    """Run all; 1 if any type does not generate at its smallest limit."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--types", default="", help="separated by commas; all when empty")
    arguments.add_argument("--shard", default="0/1", help="which part of the types, of how many")
    arguments.add_argument("--hint", type=int, default=HINT, help="tokens that are promised")
    arguments.add_argument("--table", type=Path, help="rows go there; what it has is not run again")
    arguments.add_argument("--seconds", type=int, default=SECONDS, help="for one type")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    part, parts = map(int, given.shard.split("/"))
    wanted = [name for name in given.types.split(",") if name] or exact_types()
    rows = read_table(given.table)
    for model_type in wanted[part::parts]:
        if model_type in rows:
            continue
        started = time.monotonic()
        rows[model_type] = row = generate_in_child(model_type, given.hint, given.seconds)
        if given.table is not None:
            with given.table.open("a") as table:
                table.write("\t".join(row) + "\n")
        seconds = time.monotonic() - started
        told = f"{row.share} {row.inputs[:100]} {row.reason[:300]}"
        print(f"{seconds:5.1f} s {row.result:14} {model_type}: {told}", flush=True)
    counts = Counter(row.result for row in rows.values())
    print(f"{len(rows)} types: {', '.join(f'{n} {result}' for result, n in counts.most_common())}")
    return int(any(row.result not in {OK, PLAIN, NEVER} for row in rows.values()))


def exact_types() -> list[str]:
    """Types that streamed exactly in the coverage run."""
    return [name for name, row in coverage(_COVERAGE).items() if row.result == EXACT]


def read_table(path: Path | None) -> dict[str, Row]:
    """Rows by type; empty where there is no such file."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = (Row(*line.split("\t")) for line in lines if line.count("\t") == len(Row._fields) - 1)
    return {row.model_type: row for row in rows}


def generate_in_child(model_type: str, hint: int = HINT, seconds: float = SECONDS) -> Row:
    """`generate_at_smallest` in a forked process."""
    row, stages, ended = in_child(partial(generate_at_smallest, model_type, hint), seconds)
    if isinstance(row, Row):
        return row
    result = PLAIN if stages[-1].startswith("plain") else FAILED
    return Row(model_type, "", result, "", "", f"{stages[-1]}: {ended}")


def generate_at_smallest(
    model_type: str, hint: int = HINT, say: Callable[[str], None] = lambda _: None
) -> Row:
    """Try one type, with `hint` tokens promised. `say` is told what is being done."""
    folder = Path(tempfile.mkdtemp(prefix="smallest-"))
    try:
        classes = [cls for cls in classes_of(model_type) if cls.can_generate()]
        if not classes:
            return Row(model_type, "", NEVER, "", "", "")
        with mock.patch.object(configs, "_POSITIONS", 2 * hint):
            model, inputs = _first_that_runs(model_type, classes, say)
        return _at_smallest(model, inputs, hint, folder, say)._replace(model_type=model_type)
    except PlainError as error:
        return Row(model_type, "", PLAIN, "", "", " ".join(str(error).split())[:400])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _first_that_runs(
    model_type: str, classes: Sequence[Any], say: Callable[[str], None]
) -> tuple[Any, list[dict[str, Any]]]:
    reasons: list[str] = []
    for cls in classes:
        try:
            model, inputs = _make(model_type, cls, say)
        except PlainError as error:
            reasons.append(f"{cls.__name__}: {error}"[:180])
            continue
        told = model.generation_config
        if getattr(model.config, "is_encoder_decoder", False):
            told.decoder_start_token_id = told.decoder_start_token_id or 0
        return model, inputs
    raise PlainError(" | ".join(reasons))


class _Use(NamedTuple):
    given: dict[str, Any]
    wanted: dict[str, torch.Tensor]


def _uses(model: Any, inputs: Sequence[Mapping[str, Any]], hint: int) -> list[_Use]:
    """Inputs that are as large as the hint allows, as far as the model takes them."""
    found: list[_Use] = []
    errors: list[str] = []
    for first in inputs:
        given = {name: v for name, v in first.items() if not name.startswith("decoder_")}
        for chosen in (_longer(given, hint - NEW_TOKENS), given):
            if chosen is None:
                continue
            try:
                found.append(_Use(chosen, tensors_of(_generate(model, chosen))))
                break
            except Exception as error:
                errors.append(_told(error))
    if not found:
        raise PlainError("; ".join(dict.fromkeys(errors)))
    return found


def _size(given: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences at once, and tokens of each."""
    texts = [given[name] for name in _TEXTS if name in given and given[name].dim() > 1]
    return max((t.shape[0] for t in texts), default=1), max((t.shape[1] for t in texts), default=1)


def _generate(model: Any, given: Mapping[str, Any]) -> Any:
    _seed()
    return model.generate(**copy.deepcopy(dict(given)), max_new_tokens=NEW_TOKENS, do_sample=False)


def _at_smallest(
    model: Any,
    inputs: Sequence[Mapping[str, Any]],
    hint: int,
    folder: Path,
    say: Callable[[str], None],
) -> Row:
    cls, beams = type(model), model.generation_config.num_beams or 1
    say("plain: save")
    model.save_pretrained(folder, max_shard_size="200KB")
    save_beside(model, folder)
    say("plain: generate")
    del model
    torch.manual_seed(3)
    uses = _uses(cls.from_pretrained(folder).eval(), inputs, hint)
    say("streamed: load")
    sizes = [_size(use.given) for use in uses]
    tokens = max(hint, *(most + NEW_TOKENS for _, most in sizes))  # a picture may take more
    watch = _Watch(PassShape(tokens, beams * max(rows for rows, _ in sizes)))
    shapes = " and ".join(shapes_of(use.given) for use in uses)

    def row(result: str, reason: str = "") -> Row:
        reason = " ".join(reason.split())
        return Row("", cls.__name__, result, shapes, watch.share, reason)

    try:
        options: dict[str, Any] = {"auto_class": cls, "tokens": tokens, "batch": watch.shape.batch}
        limit = pipeload.smallest_limit(folder, **options) + SPARE_BYTES
        torch.manual_seed(3)
        streamed = pipeload.from_pretrained(folder, memory_limit=limit, **options)
        with mock.patch.object(PassNeeds, "for_pass", watch.for_pass()):
            for use in uses:
                say(f"streamed: generate {shapes_of(use.given)}")
                difference = difference_of(tensors_of(_generate(streamed, use.given)), use.wanted)
                if difference:
                    return row(DIFFERS, difference)
    except NothingToStreamError as error:  # of models so small
        raise PlainError(str(error)) from error
    except pipeload.MemoryLimitError as error:
        return row(REFUSED, str(error))
    except Exception as error:
        return row(FAILED, _told(error, where=True))
    peak = streamed.pipeload.stats().peak_since_load_bytes
    if watch.over or peak > limit:
        return row(OVER, f"{watch.over} (hint: {watch.promised}); peak {peak}, limit {limit}")
    return row(OK)


class _Watch:
    """What passes are estimated to take, and what was promised."""

    def __init__(self, shape: PassShape) -> None:
        self.shape = shape
        self.promised = 0
        self.most = 0
        self.over = ""
        """The largest pass, if it takes more than was promised."""

    @property
    def share(self) -> str:
        return f"{self.most / self.promised:.2f}" if self.promised else ""

    def for_pass(self) -> Callable[..., int]:
        """A stand-in for `PassNeeds.for_pass`, which looks on."""
        estimate = PassNeeds.for_pass

        def look(
            needs: PassNeeds,
            args: Sequence[Any],
            kwargs: Mapping[str, Any],
            module: torch.nn.Module | None = None,
        ) -> int:
            found = estimate(needs, args, kwargs, module)
            self.promised = self.promised or needs.for_shape(self.shape)
            if found > self.most:
                self.most = found
                if found > _NEAR * self.promised:
                    self.over = (
                        f"{found} bytes for {shapes_of({**dict(enumerate(args)), **kwargs})}"
                    )
            return found

        return look


if __name__ == "__main__":
    sys.exit(main())
