"""How much the outputs of Linears matter: mean squares of the loss's gradient, for each row.

[Note: backward from the disk] A streamed model has no backward: its weights are gone by then. But a
Linear's backward needs nothing but its weight, and a block's nothing but its input. So a few
windows of text go through the streamed model, and what each block was called with is kept, the
hidden states on disk. Then blocks run again, the last one first, by themselves: each streams as
ever, its Linears give their outputs without autograd, and a function of our own stands for them,
whose backward reads the weight from the file, some rows at a time. The backward of a block runs in
a hook, while all else that it holds is still there. That a block by itself gives what it gave in
the model is compared, to the bit; where it does not, the model is refused.

Squares of gradients, times those of errors, are the diagonal of the empirical Fisher matrix, the
usual stand-in for the second derivative of the loss (as in Kim et al., "SqueezeLLM", 2023).
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.module import register_module_forward_pre_hook

from pipeload.errors import UnsupportedModelError, UnsupportedOperationError
from pipeload.quantiser.resumable_shards import HIDDEN_FILE
from pipeload.quantiser.tensor import bytes_of, read_weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from pipeload.checkpoint.headers import TensorEntry
    from pipeload.quantiser.kept_gradients import KeptGradients
    from pipeload.quantiser.tensor import Reading

_LOGIT_BYTES = 48 << 20
"""About what logits of the tokens whose loss is taken, and their gradients, may take."""
_COPIES = 3
"""Of inputs and outputs of a block's Linears, in fp32: what autograd keeps, and its own."""


class _Call(NamedTuple):
    """What a block was called with, but for the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: torch.Tensor
    """On the meta device: its size."""
    start: int
    """Where it lies in the file."""


class OutputGradients:
    """Sums of squared gradients at the outputs of Linears."""

    def __init__(
        self,
        model: Any,
        blocks: Sequence[nn.Module],
        stored: Mapping[str, TensorEntry],
        reading: Reading,
        kept: KeptGradients,
    ) -> None:
        """Nothing has run yet.

        Args:
            model: streamed, of floats.
            blocks: of it, in the order in which they run.
            stored: weights of Linears, by the paths of these.
            reading: those from the files.
            kept: what a run before has found, and where to add; and the folder for hidden states.
        """
        self._model, self._blocks, self._output = model, blocks, kept.output
        self._stored, self._reading, self._kept = stored, reading, kept
        self._last: dict[nn.Module, tuple[Callable[..., Any], RemovableHandle]] = {}
        """The last hook of each Linear."""
        self._calls: list[_Call] = []
        self._live = False
        """Whether autograd records what runs."""
        self._hidden = self._gradient = torch.empty(0)
        """What is now differentiated by, and the loss's gradient at what comes of it."""

    def add(self, ids: torch.Tensor, advance: Callable[[], None]) -> None:
        """Add what a text tells, int64 of [windows, tokens]; `advance` is called for each block.

        Of the first text, blocks that a run before has gone back through are left out.

        Raises:
            UnsupportedModelError: a block by itself gives something else than in the model, or has
                weights that are neither in a Linear nor there as long as it runs.
            OptionError: the disk has no room for hidden states.
            PipeloadError: what passes of the model raise.
        """
        self._output.delete(HIDDEN_FILE)  # of a run that was killed: its room is needed
        try:
            self._add(ids, advance)
        except UnsupportedOperationError as error:  # autograd would record what does not stay
            raise UnsupportedModelError(
                f"{type(self._model).__name__} cannot be gone back through block by block, so "
                "nobody knows how much its Linears matter. Leave --size out."
            ) from error
        finally:
            self._calls.clear()
            self._output.delete(HIDDEN_FILE)

    def _add(self, ids: torch.Tensor, advance: Callable[[], None]) -> None:
        with torch.no_grad(), contextlib.ExitStack() as hooks:
            for undo in self._attach():
                hooks.callback(undo)
            before, kept = dict(self._kept.by_path), self._kept
            self._gradient = self._forward(ids)
            done = kept.blocks_done % len(self._blocks)
            if done:
                kept.by_path, self._gradient, kept.gradient = before, kept.gradient, torch.empty(0)
            del before
            pairs = list(zip(self._blocks, self._calls, strict=True))
            for block, call in pairs[::-1][done:]:
                self._live, hidden = True, self._load(call)
                try:
                    args, kwargs = _called_with(call.args, call.kwargs, hidden)
                    block(*args, **kwargs)
                finally:
                    self._live = False
                kept.write(self._gradient)
                advance()

    # -- a pass, and the loss ----------------------------------------------------------------------

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the model; gives the loss's gradient at what the last block gave."""
        vocabulary = self._model.get_output_embeddings().out_features
        asked = {"input_ids": ids, "use_cache": False}
        kept = torch.arange(ids.shape[1] - 1)
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            most = max(8, _LOGIT_BYTES // (3 * 4 * vocabulary * len(ids)))
            kept = kept[:: -(-len(kept) // most)]
            asked["logits_to_keep"] = kept
        hook = self._blocks[-1].register_forward_hook(self._record)
        # Small weights outside of blocks are copied: they may be gone by the time of backward.
        with torch.autograd.graph.saved_tensors_hooks(_apart, _as_it_is):
            try:
                logits = self._model(**asked).logits
            finally:
                hook.remove()
                self._live = False
        if len(self._calls) != len(self._blocks):
            raise UnsupportedModelError(
                f"{type(self._model).__name__} does not run all of its blocks one after the "
                "other, so nobody knows how much its Linears matter. Leave --size out."
            )
        logits = logits[:, : ids.shape[1] - 1]  # all of them, where none could be left out
        torch.set_grad_enabled(True)
        loss = cross_entropy(
            logits.flatten(0, 1).float(), ids[:, kept + 1].flatten(), reduction="sum"
        )
        del logits
        loss.backward(inputs=[self._hidden])  # no other parameter gets a gradient
        torch.set_grad_enabled(False)
        gradient, self._hidden = self._hidden.grad, torch.empty(0)
        assert gradient is not None  # noqa: S101 - the logits come of nothing else
        return gradient

    def _record(self, _block: nn.Module, _args: object, output: Any) -> Any:
        """From here on, to the logits."""
        self._hidden = _first(output).detach().requires_grad_()
        self._live = True
        torch.set_grad_enabled(True)
        return _with_first(output, self._hidden)

    # -- hooks -------------------------------------------------------------------------------------

    def _attach(self) -> Iterator[Callable[[], None]]:
        for place, block in enumerate(self._blocks):
            yield block.register_forward_pre_hook(self._begin(place), with_kwargs=True).remove
            yield block.register_forward_hook(self._end(place), prepend=True).remove
        # Around all others of a Linear, also those that a change of the plan brings meanwhile.
        yield register_module_forward_pre_hook(self._enter).remove
        yield self._clear
        for path, module in self._model.named_modules():
            if isinstance(module, nn.Linear):
                self._put_last(module, self._leave(path))

    def _begin(self, place: int) -> Callable[..., Any]:
        """Before a block: keep what it is called with; or differentiate by its hidden states."""

        def before(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._live:
                self._hidden = _hidden(args, kwargs).detach().requires_grad_()
                torch.set_grad_enabled(True)
                return _called_with(args, kwargs, self._hidden)
            if len(self._calls) == place:  # not again, where a model runs one more than once
                self._calls.append(self._keep(args, kwargs))
            return None

        return before

    def _end(self, place: int) -> Callable[..., None]:
        """After a block, while its weights are there: its backward."""

        def after(block: nn.Module, _args: object, output: Any) -> None:
            if not self._live:
                return
            torch.set_grad_enabled(False)
            found = _first(output)
            following = self._calls[place + 1 : place + 2]
            if following and not _alike(found, self._load(following[0])):
                raise UnsupportedModelError(
                    f"{type(block).__name__} by itself gives something else than in "
                    f"{type(self._model).__name__}, so nobody knows how much its Linears matter. "
                    "Leave --size out."
                )
            found.backward(self._gradient, inputs=[self._hidden])
            gradient, self._hidden = self._hidden.grad, torch.empty(0)
            assert gradient is not None  # noqa: S101 - its output was made of it
            self._gradient = gradient

        return after

    def _put_last(self, module: nn.Module, leave: Callable[..., Any]) -> None:
        """Have a hook of a Linear run behind all that it has now."""
        if module in self._last:
            self._last[module][1].remove()
        self._last[module] = leave, module.register_forward_hook(leave, with_kwargs=True)

    def _clear(self) -> None:
        for _, last in self._last.values():
            last.remove()
        self._last.clear()

    def _enter(self, module: nn.Module, _args: object) -> None:
        """Before a module: of a Linear, nothing is recorded."""
        if self._live and module in self._last:
            torch.set_grad_enabled(False)
            self._put_last(module, self._last[module][0])

    def _leave(self, path: str) -> Callable[..., torch.Tensor | None]:
        """After a Linear: what stands for it is."""

        def after(
            module: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
        ) -> torch.Tensor | None:
            if not self._live:
                return None
            torch.set_grad_enabled(True)
            stand: Any = _FromDisk  # torch has it without types
            given = args[0] if args else kwargs["input"]
            # In a list: what is given as a tensor, and given back, may not be changed in place.
            made: torch.Tensor = stand.apply(given, [output.detach()], self._back(path))
            return made

        return after

    def _back(self, path: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The backward of a Linear: of the gradient at its output, that at its input."""

        def back(gradient: torch.Tensor) -> torch.Tensor:
            rows = gradient.flatten(0, -2)
            squares = rows.float().square().sum(0)
            found = self._kept.by_path
            found[path] = squares.add_(found.get(path, 0.0))
            entry, start = self._stored[path], 0
            made = rows.new_zeros((len(rows), entry.shape[1]))
            for weight in read_weight(entry, self._reading):
                part = rows[:, start : start + len(weight)]
                made.addmm_(part, weight.to(made.dtype))
                start += len(weight)
            return made.view(*gradient.shape[:-1], -1)

        return back

    # -- hidden states -----------------------------------------------------------------------------

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """What a block is called with; hidden states go to the disk."""
        hidden = _hidden(args, kwargs).contiguous()
        if not self._calls:
            self._output.check_room(hidden.nbytes * len(self._blocks))
        start = sum(call.hidden.nbytes for call in self._calls)
        self._output.write_at(HIDDEN_FILE, start, bytes_of(hidden))
        return _Call(*_called_with(args, kwargs, None), hidden.to("meta"), start)

    def _load(self, call: _Call) -> torch.Tensor:
        with (self._output.folder / HIDDEN_FILE).open("rb") as file:
            file.seek(call.start)
            content = bytearray(file.read(call.hidden.nbytes))
        return torch.frombuffer(content, dtype=call.hidden.dtype).view(call.hidden.shape)


class _FromDisk(torch.autograd.Function):
    """Stands for a Linear whose output is there."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, output: list[torch.Tensor], back: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        ctx.back = back
        return output[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def working_bytes(linears: Iterable[nn.Linear], tokens: int) -> int:
    """About what the backward of a block with these Linears takes, for so many tokens."""
    wide = sum(one.in_features + one.out_features for one in linears)
    return _COPIES * 4 * wide * tokens + _LOGIT_BYTES


def _alike(found: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a block gave the same; what is no number says nothing, and is told of later."""
    return torch.equal(found, before) or not bool(before.isfinite().all())


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.dim() <= 1 else tensor


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _called_with(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: torch.Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same with those hidden states."""
    if args:
        return (hidden, *args[1:]), dict(kwargs)
    return args, {**kwargs, "hidden_states": hidden}


def _first(output: Any) -> torch.Tensor:
    """What goes on to the next block, of what one gave."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def _with_first(output: Any, hidden: torch.Tensor) -> Any:
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])
