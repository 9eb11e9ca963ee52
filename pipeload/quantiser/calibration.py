"""Collects how large the inputs of Linears and experts are, by column, while the model streams.

[Note: importance] The float model reads a text once, within the memory limit, and a hook before
each Linear adds up the squares of what comes in: one fp32 number for each column, some 5 MB for 7
billion weights. Each expert has numbers of its own, of the rows that were sent to it; one that has
seen too few of them is made as if nothing was known. That the inputs are the float model's, not
those of what was quantised before, was measured to do as well; so tensors are made one by one
afterwards, in any order, with nothing but these numbers beside them. After each pass they are
written beside what is made, so that a killed run goes on behind it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import json
import logging
import platform
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from pipeload.checkpoint.writer import Tensor, make_header
from pipeload.entry.api import from_pretrained
from pipeload.errors import MemoryLimitError
from pipeload.quantiser import expert_inputs
from pipeload.quantiser.calibration_text import WINDOW
from pipeload.quantiser.forms import Inputs
from pipeload.quantiser.input_products import InputProducts
from pipeload.quantiser.resumable_shards import SUMS_FILE
from pipeload.quantiser.tensor import bytes_of
from pipeload.weights.arena import DTYPE_CODES

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from pipeload.quantiser.calibration_text import CalibrationText
    from pipeload.quantiser.experts import Experts
    from pipeload.quantiser.resumable_shards import Output

    Advance = Callable[[int, int], None]

LEAST_ROWS = 32
"""That an expert must have seen: the mean squares of fewer say more of the text than of it."""
_SQUARED_ITEMS = 1 << 18  # at once, in fp32
_KEY = "done"
_FORMAT = 1  # of the file: one of another is not gone on with
_OF_THE_TOKENIZER = {"revision", "subfolder", "cache_dir", "token", "local_files_only"}
_log = logging.getLogger("pipeload")


class Importances(NamedTuple):
    """What is known of the inputs of Linears and experts."""

    mean_squares: dict[str, torch.Tensor]
    """fp32 of [columns] by the path of the Linear; of [experts, columns] by the name of a matrix of
    experts, nothing but 0 for those that have seen too few rows."""
    read: str
    """How that was found, for people."""
    few_rows: int = 0
    """Experts that have seen too few rows."""
    products: Callable[[str], list[torch.Tensor]] | None = None
    """Sums of products of each two inputs of the Linear at a path: see `InputProducts.of`."""

    def of(self, path: str) -> Inputs | None:
        """What is known of those of the Linear at `path`."""
        found = self.mean_squares.get(path)
        products = None if self.products is None else partial(self.products, path)
        return None if found is None else Inputs(found, products)


class Sums:
    """Sums of squared inputs, of Linears and experts; in a file once a pass is over."""

    def __init__(
        self,
        output: Output,
        request: Mapping[str, Any],
        columns: Mapping[str, int],
        experts: Sequence[Experts],
        *,
        products: bool,
    ) -> None:
        """Go on with what the same request has left in the folder, or begin with nothing.

        Args:
            output: the folder that is made.
            request: what its file has to belong to; JSON.
            columns: of each Linear, by its path.
            experts: the modules whose experts are quantised.
            products: whether those of each two inputs of a Linear are wanted as well.
        """
        self._output = output
        self._products = InputProducts(output, columns) if products else None
        self._digest = hashlib.sha256(
            json.dumps([_FORMAT, request], sort_keys=True).encode()
        ).hexdigest()
        self.linears, self.experts = list(columns), experts
        sizes: dict[str, tuple[int, ...]] = {path: (count,) for path, count in columns.items()}
        for one in experts:
            sizes[one.path] = (one.shape.experts,)  # rows that each has seen
            for weight, place in zip(one.weights, one.shape.places, strict=True):
                sizes[weight.name] = (one.shape.experts, place.columns)
        # Filled: memory that zeros do not take before they are added to is not seen by the plan.
        self.by_path = {name: torch.empty(size).fill_(0) for name, size in sizes.items()}
        self.windows_done = self.windows = self.tokens = 0
        """Of the text: those in the sums, and all; 0 as long as that is not known."""
        self._read(output.folder / SUMS_FILE)

    def add(self, path: str, inputs: torch.Tensor) -> None:
        """Add rows of input, [..., columns], of the Linear at `path`."""
        _add(self.by_path[path], inputs)
        if self._products is not None:
            self._products.add(path, inputs)

    def begin(self) -> None:
        """Begin a pass over what is left of the text."""
        if self._products is not None:
            self._products.begin(self.windows_done)

    def add_expert(self, one: Experts, index: int, expert: int, rows: torch.Tensor) -> None:
        """Add rows of input, [..., columns], of one of the two matrices of an expert."""
        if not index:
            self.by_path[one.path][expert] += len(rows)
        _add(self.by_path[one.weights[index].name][expert], rows)

    @property
    def whole(self) -> bool:
        """Whether all of the text is in it."""
        return 0 < self.windows == self.windows_done

    def write(self, windows_done: int) -> None:
        """Keep what was added; so many windows of the text are in it.

        Raises:
            OptionError: the disk is full, or cannot be written to.
        """
        if self._products is not None:
            self._products.end()
        self.windows_done = windows_done
        done = torch.tensor([windows_done, self.windows, self.tokens])
        named = {f"sums.{path}": sums for path, sums in self.by_path.items()} | {_KEY: done}
        header = make_header(
            Tensor(name, DTYPE_CODES[one.dtype], tuple(one.shape), one.nbytes)
            for name, one in named.items()
        )
        content = map(bytes_of, named.values())  # as they are: experts' may be large
        self._output.write_bytes(SUMS_FILE, [self._digest.encode(), header, *content])

    def mean_squares(self) -> Importances:
        """What all of the text tells. The sums of experts are divided where they are, for good."""
        found = {path: self.by_path[path] / self.tokens for path in self.linears}
        few_rows = 0
        for one in self.experts:
            rows = self.by_path[one.path]
            few_rows += int((few := rows < LEAST_ROWS).sum())
            for weight in one.weights:
                sums = self.by_path[weight.name]
                found[weight.name] = sums.div_(rows.clamp(min=1)[:, None])
                sums[few] = 0
        of = None
        if (products := self._products) is not None:
            products.finish()
            of = partial(products.of, windows_done=self.windows_done)
        return Importances(found, "", few_rows, of)

    def _read(self, file: Path) -> None:
        try:
            with file.open("rb") as opened:
                mine = opened.read(len(self._digest)) == self._digest.encode()
                content = opened.read() if mine else b""
            found = load(content)
        except (OSError, SafetensorError):
            return
        self.windows_done, self.windows, self.tokens = found.pop(_KEY).tolist()
        self.by_path = {name.removeprefix("sums."): sums for name, sums in found.items()}


def _add(sums: torch.Tensor, inputs: torch.Tensor) -> None:
    """Add squares of rows, a few at a time: as fp32 they take more memory."""
    columns = inputs.shape[-1]
    for rows in inputs.reshape(-1, columns).split(max(1, _SQUARED_ITEMS // columns)):
        sums += rows.float().square().sum(0)


def collect(
    pretrained: str | os.PathLike[str],
    text: CalibrationText,
    sums: Sums,
    *,
    memory_limit: int | str,
    advance: Advance | None,
    **kwargs: Any,
) -> Importances:
    """Have the model read what is left of the text.

    Args:
        pretrained: a folder or a hub id.
        text: to be read.
        sums: where it was, and what was found before.
        memory_limit: what the process may hold.
        advance: called with Linears that have run, and all that will.
        **kwargs: for the library's `from_pretrained`.

    Raises:
        PipeloadError: as `pipeload.from_pretrained` and its passes, and as `text.windows`.
    """
    if not sums.whole:
        if sums.experts:  # their inputs are told apart by the order that this one has them in
            kwargs = {**kwargs, "experts_implementation": "grouped_mm"}
        model = load_floats(pretrained, memory_limit=memory_limit, tokens=WINDOW, **kwargs)
        windows = windows_of(text, pretrained, model, **kwargs)
        sums.windows, sums.tokens = len(windows), windows.numel()
        _log.info("calibrating: %d tokens of %s", sums.tokens, text.name)
        _read(model, windows, sums, advance)
        del model
        gc.collect()  # its memory is needed for what comes now
    return sums.mean_squares()._replace(read=text.describe(sums.tokens))


def windows_of(
    text: CalibrationText, pretrained: str | os.PathLike[str], model: Any, **kwargs: Any
) -> torch.Tensor:
    """What `text.windows` gives, of options for `from_pretrained`. Raises what that does."""
    own = {name: kwargs[name] for name in _OF_THE_TOKENIZER & kwargs.keys()}
    return text.windows(str(pretrained), model, **own)


def load_floats(pretrained: str | os.PathLike[str], **options: Any) -> Any:
    """The streamed float model, in fp32 where products in bf16 take several times as long.

    Raises:
        PipeloadError: as `pipeload.from_pretrained`.
    """
    if not _fast_bf16():
        with contextlib.suppress(MemoryLimitError):
            return from_pretrained(pretrained, **{**options, "dtype": torch.float32})
    return from_pretrained(pretrained, **{"dtype": "auto", **options})


def _fast_bf16() -> bool:
    """Whether the processor multiplies bf16 by itself: x86 without AVX512-BF16 does not."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return True
    return torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 - has no other name


@torch.no_grad()
def _read(model: Any, windows: torch.Tensor, sums: Sums, advance: Advance | None) -> None:
    count, done = len(windows), sums.windows_done
    batch = _batch(model, windows[done:])
    passes = -(-(count - done) // batch)
    steps, total = 0, passes * len(sums.linears)

    def listen(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal steps
            sums.add(path, args[0] if args else kwargs["input"])
            steps += 1
            if advance is not None:
                advance(min(steps, total), total)

        return before

    with contextlib.ExitStack() as hooks:
        for one in sums.experts:
            seen = partial(sums.add_expert, one)
            module = model.get_submodule(one.path)
            hooks.enter_context(expert_inputs.listen(module, one.shape.experts, seen))
        for path in sums.linears:
            module = model.get_submodule(path)
            hook = module.register_forward_pre_hook(listen(path), with_kwargs=True)
            hooks.callback(hook.remove)
        for start in range(done, count, batch):
            some = windows[start : start + batch]
            sums.begin()
            model(**_arguments(model, some))
            sums.write(start + len(some))


def _batch(model: Any, windows: torch.Tensor) -> int:
    """How many windows one pass takes: a pass reads all weights, so as many as the limit holds."""
    batch = len(windows)
    while batch > 1:
        shaped = torch.empty((batch, windows.shape[1]), dtype=torch.int64, device="meta")
        if model.pipeload.pass_bytes(**_arguments(model, shaped)) is not None:
            break
        batch = -(-batch // 2)
    return batch


def _arguments(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """Of a pass without a cache whose logits nobody wants."""
    arguments = {"input_ids": ids, "use_cache": False, "logits_to_keep": 1}
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in arguments.items() if name in known}
