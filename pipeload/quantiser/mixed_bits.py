"""`--size`: as many bits for each Linear as all of them can have within a size.

[Note: what an error costs] Of each Linear, some rows are made into each form, and the squared
errors of their weights counted: each column by the mean square of its input, each row by that of
the loss's gradient at its output. Measured on SmolLM2: without gradients, or by a rule of thumb for
kinds of Linears, mixed bits are no better than the same for all.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn

from pipeload._sizes import counted, format_size, parse_size
from pipeload.budget.limit_errors import making_too_large
from pipeload.entry.smallest_limit import smallest_limit
from pipeload.errors import MemoryLimitError, OptionError, UnsupportedModelError
from pipeload.formats.integers.rounding import GROUPS, error_of_rows
from pipeload.hf.expert_modules import find_experts
from pipeload.quantiser.bit_budget import Option, spend
from pipeload.quantiser.calibration import load_floats, windows_of
from pipeload.quantiser.calibration_text import WINDOW
from pipeload.quantiser.forms import IntegerForm
from pipeload.quantiser.kept_gradients import GRADIENTS_FILE, KeptGradients
from pipeload.quantiser.output_gradients import OutputGradients, working_bytes
from pipeload.quantiser.resumable_shards import BITS_FILE
from pipeload.quantiser.tensor import read_weight, rows_of
from pipeload.ring.crossing_trial import try_crossing
from pipeload.system.memory import parse_limit
from pipeload.weights.row_cuts import RowRange
from pipeload_hooks import find_decoder_blocks

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.calibration_text import CalibrationText
    from pipeload.quantiser.folder import Progress
    from pipeload.quantiser.options import Choice
    from pipeload.quantiser.resumable_shards import Output
    from pipeload.quantiser.tensor import Reading
    from pipeload_hooks import Block

_TOKENS: Final = 2048
"""Whose gradients are taken, of those that are read."""
_LEAST_TOKENS: Final = 2
_ITEMS: Final = 1 << 20
"""Of a weight at once, on the way back."""
_RANGES, _RANGE_ROWS = 8, 64
"""What is tried of each Linear: so many ranges of so many rows, as many as are packed together."""


class Shared(NamedTuple):
    """What is to share a size."""

    linears: Mapping[str, nn.Linear]
    """By path."""
    entries: Mapping[str, TensorEntry]
    """The stored weights of these, and of others that gradients pass through; by path."""
    blocks: Sequence[Block]
    """Where all of `linears` are."""
    other_bytes: int
    """All that is stored beside the weights of `linears`."""


def shared_by(pending: PendingLoad, choice: Choice) -> Shared:
    """What of a model is to share a size.

    Raises:
        UnsupportedModelError: there is something that nobody knows the worth of.
    """
    model = pending.model
    if choice.experts or next(find_experts(model), None) is not None:
        raise _unknown(model, "has experts, and how much each of them matters is not known.")
    linears = {path: choice.linears[stored] for stored, path in choice.paths.items()}
    blocks = find_decoder_blocks(model)
    inside = tuple(f"{block.name}." for block in blocks)
    if outside := [path for path in linears if not path.startswith(inside)]:
        raise _unknown(model, f"has {outside[0]!r} in no block of what generates.")
    entries, tied = pending.checkpoint.entries, model.all_tied_weights_keys or {}
    stored = {name: entries[source] for source, name in pending.plain_parameters().items()}
    of_linears = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weight = f"{path}.weight"
            found = stored.get(tied.get(weight, weight))
            if found is None:
                raise _unknown(model, f"does not store {path!r} as it holds it.")
            of_linears[path] = found
    crossing = try_crossing(model, [block.name for block in blocks])
    if crossing is not None and crossing[0] is not None:
        made_in = blocks[crossing[0].made_in].name
        raise _unknown(model, f"uses what {made_in!r} makes elsewhere than in its output.")
    other_bytes = sum(entry.nbytes for entry in entries.values())
    other_bytes -= sum(entries[name].nbytes for name in choice.paths)
    if (head := choice.head) is not None:
        source = entries[head.source]
        other_bytes -= 0 if head.is_tied else source.nbytes
        rows, columns = source.shape
        other_bytes += head.form.stored_bytes(rows, columns, source.dtype)
    return Shared(linears, of_linears, blocks, other_bytes)


def _unknown(model: nn.Module, why: str) -> UnsupportedModelError:
    """Nobody knows what errors cost there."""
    return UnsupportedModelError(
        f"bits cannot be shared out among the Linears of {type(model).__name__}: it {why} Leave "
        "--size out."
    )


class MixedBits:
    """Finds which form each Linear gets. The choice is kept in the folder that is made."""

    def __init__(self, size: int | str, shared: Shared, *, gptq: bool) -> None:
        """`size`: of all that is stored; `gptq`: as the form of int4 has it.

        Raises:
            OptionError: it means nothing, or is too small for any choice.
        """
        self.size = size = parse_size(size, name="size")
        self.shared, self._room = shared, size - shared.other_bytes
        self._forms = _forms(gptq=gptq)
        least = sum(min(self._sizes(path)) for path in shared.linears)
        if least > self._room:
            smallest = least + shared.other_bytes
            raise OptionError(
                f"size={format_size(size)} is too small: with the fewest bits everywhere the "
                f"weights take {format_size(smallest)}, and {format_size(shared.other_bytes)} of "
                f"that are not Linears or stay floats. Give at least {smallest} bytes."
            )

    def _fitting(self, path: str) -> list[int]:
        """Numbers of the forms that the Linear at `path` can have."""
        module = self.shared.linears[path]
        return [number for number, form in enumerate(self._forms) if form.fits(module)]

    def _sizes(self, path: str) -> list[int]:
        """What it takes in each of them."""
        entry = self.shared.entries[path]
        rows, columns = entry.shape
        return [
            self._forms[number].stored_bytes(rows, columns, entry.dtype)
            for number in self._fitting(path)
        ]

    def choose(
        self,
        output: Output,
        mean_squares: Mapping[str, torch.Tensor],
        gradients: Callable[[Reading], Mapping[str, torch.Tensor]],
        reading: Reading,
    ) -> dict[str, IntegerForm]:
        """The form of each Linear, by path.

        Args:
            output: the folder that is made; a choice that it has is taken.
            mean_squares: of the inputs of each Linear, fp32 of [columns].
            gradients: finds sums of squares of those at its outputs, fp32 of [rows].
            reading: weights from the files.
        """
        chosen = output.read_json(BITS_FILE)
        if chosen is None:
            weights, options = gradients(reading), {}
            for path in self.shared.linears:
                rows = weights.get(path)
                if rows is None:  # it has not run
                    rows = torch.zeros(self.shared.entries[path].shape[0])
                losses = self._losses(path, mean_squares[path], rows, reading)
                options[path] = list(map(Option, self._sizes(path), losses))
            places = spend(options, self._room)
            assert places is not None  # noqa: S101 - the smallest fit, as was seen first
            chosen = {path: self._fitting(path)[place] for path, place in places.items()}
            output.write_bytes(BITS_FILE, [json.dumps(chosen).encode()])
        output.delete(GRADIENTS_FILE)
        return {path: self._forms[number] for path, number in chosen.items()}

    def describe(self, chosen: Mapping[str, IntegerForm]) -> str:
        """For the card: which share of the weights has which form."""
        counts: Counter[str] = Counter()
        for path, form in chosen.items():
            counts[form.short] += self.shared.linears[path].weight.numel()
        shares = (f"{name} {count / counts.total():.0%}" for name, count in counts.most_common())
        return f"{', '.join(shares)}, to stay within {format_size(self.size)}"

    def _losses(
        self, path: str, columns: torch.Tensor, rows: torch.Tensor, reading: Reading
    ) -> list[float]:
        """What errors of each form cost, see [Note: what an error costs]; columns and rows weigh.

        Raises:
            CheckpointError: a value is not finite.
            UnsupportedModelError: what it is given, or the loss's gradient, is not.
            ReadError: it could not be read.
        """
        if not bool(columns.isfinite().all() and rows.isfinite().all()):
            raise UnsupportedModelError(
                f"inputs of {path!r}, or gradients at its outputs, are too large for a number, so "
                "nobody knows how much it matters. Leave --size out, or give another text."
            )
        forms = [self._forms[number].integers(columns) for number in self._fitting(path)]
        entry = self.shared.entries[path]
        losses, tried = [0.0] * len(forms), 0.0
        for start, stop in _sample(entry.shape[0]):
            at = start
            for weight in read_weight(rows_of(entry, start, stop), reading):
                weigh = rows[at : (at := at + len(weight))]
                tried += float(weigh.sum())
                for place, form in enumerate(forms):
                    errors = error_of_rows(weight, form.rounding(weight), columns)
                    losses[place] += float(errors @ weigh)
        share = float(rows.sum()) / tried if tried else 0.0
        return [loss * share for loss in losses]


def _forms(*, gptq: bool) -> list[IntegerForm]:
    four = [
        IntegerForm(4, group=group, zero_points="search", calibrated=True, gptq=gptq)
        for group in GROUPS
    ]
    return [*four, IntegerForm(8, group=0, zero_points="search", calibrated=True)]


def _sample(rows: int) -> Iterator[RowRange]:
    """Some ranges of rows, spread over all of them; all, where there are few."""
    if rows <= _RANGES * _RANGE_ROWS:
        yield RowRange(0, rows)
        return
    for number in range(_RANGES):
        start = rows * number // _RANGES // _RANGE_ROWS * _RANGE_ROWS
        yield RowRange(start, start + _RANGE_ROWS)


def find_gradients(
    pretrained: str | os.PathLike[str],
    text: CalibrationText,
    shared: Shared,
    output: Output,
    reading: Reading,
    *,
    memory_limit: int | str,
    advance: Progress | None,
    **kwargs: Any,
) -> dict[str, torch.Tensor]:
    """Have the float model read some of the text, and go back: see `OutputGradients`.

    A run that was killed is gone on with, behind the last block that it went back through.

    Args:
        pretrained: a folder or a hub id.
        text: to be read.
        shared: what shares a size.
        output: the folder for what is kept meanwhile.
        reading: weights from the files.
        memory_limit: what the process may hold.
        advance: called with blocks that have been gone back through, and all that will be.
        **kwargs: for the library's `from_pretrained`.

    Returns:
        Sums of squares at the outputs of each Linear, fp32 of [rows], by path.

    Raises:
        UnsupportedModelError: its blocks cannot be run by themselves.
        MemoryLimitError: the limit is too small; says the smallest that works.
        PipeloadError: what passes raise.
    """
    kept = KeptGradients(output)
    if kept.whole:
        return kept.by_path
    model, batch = _load(pretrained, shared.blocks, memory_limit, **kwargs)
    windows = windows_of(text, pretrained, model, **kwargs)
    if windows.shape[1] < _LEAST_TOKENS:
        raise OptionError(
            f"the text {text.name!r} makes {counted(windows.shape[1], 'token')}, and a loss takes "
            f"{_LEAST_TOKENS}. Give a longer text, or more calibration_tokens."
        )
    windows = windows[: max(1, _TOKENS // windows.shape[1])]
    blocks = [model.get_submodule(block.name) for block in shared.blocks]
    few = reading._replace(items=min(reading.items, _ITEMS))
    kept.begin(len(windows), batch, len(blocks), model.dtype)
    found = OutputGradients(model, blocks, shared.entries, few, kept)

    def step() -> None:
        if advance is not None:
            advance(kept.blocks_done, kept.blocks)

    with torch.inference_mode(mode=False):
        for ids in windows.split(batch)[kept.blocks_done // len(blocks) :]:
            found.add(ids.clone(), step)
    del model, blocks, found
    gc.collect()  # its memory is needed for what comes now
    return kept.by_path


def check_limit(
    pretrained: str | os.PathLike[str], shared: Shared, memory_limit: int | str, **kwargs: Any
) -> None:
    """See, before anything is read, that the limit is large enough for gradients of a window.

    Raises:
        MemoryLimitError: it is not; says the smallest that works.
        PipeloadError: as `pipeload.from_pretrained`.
    """
    limit = parse_limit(memory_limit)
    options = {"dtype": "auto", "tokens": WINDOW, **kwargs}
    least = smallest_limit(pretrained, **options) + _beside(shared.blocks, 1)
    if limit < least:
        raise making_too_large(limit, least, "finding gradients", "")


def _beside(blocks: Sequence[Block], windows: int) -> int:
    """What the largest block's backward takes, in bytes."""
    inside = [[m for m in block.module.modules() if isinstance(m, nn.Linear)] for block in blocks]
    return max(working_bytes(linears, windows * WINDOW) for linears in inside)


def _load(
    pretrained: str | os.PathLike[str],
    blocks: Sequence[Block],
    memory_limit: int | str,
    **kwargs: Any,
) -> tuple[Any, int]:
    """The streamed model, and how many windows at once leave room for it within the limit."""
    limit = parse_limit(memory_limit)
    batch = _TOKENS // WINDOW
    while True:
        beside = _beside(blocks, batch)
        try:
            options = {"tokens": WINDOW, "batch": batch, **kwargs}
            return load_floats(pretrained, memory_limit=max(1, limit - beside), **options), batch
        except MemoryLimitError as error:
            if batch == 1:
                least = error.smallest_limit + beside
                raise making_too_large(limit, least, "finding gradients", "") from error
        batch //= 2
