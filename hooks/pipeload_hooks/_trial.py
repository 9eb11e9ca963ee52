"""Runs a model without weights, and counts the memory that it would take with them on a CPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from pipeload_hooks._answers import (
    constant,
    for_sizes,
    for_values,
    if_known,
    mixed,
    tensors_in,
    without_values,
)
from pipeload_hooks._kernels import attend, beside
from pipeload_hooks._live_bytes import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

MOST_OPERATIONS = 50_000
"""Of one trial. Some models look at each of thousands of pictures by itself."""


class TooLongError(RuntimeError):
    """A trial had more operations than it may."""


class Trial(NamedTuple):
    """What a run would take. In bytes."""

    peak: int
    """The most at once."""
    kept: int
    """What is there when it is over: the result, and caches."""
    kernels: int = 0
    """Convolutions of different sizes: a kernel is compiled for each."""
    output: Any = None
    """What the model gave; sizes alone."""
    weights: int = 0
    """Parameters that were used."""
    error: Exception | None = None
    """What ended the run before it was over: it would take this much, and maybe more."""


class Repeated(NamedTuple):
    """Blocks of a list that are not there; those that are stand for them."""

    blocks: Sequence[nn.Module]
    """Those that are there."""
    missing: Sequence[int]
    """For each of these, how many that are not there it stands for."""


def try_out(run: Callable[[], Any], repeated: Iterable[Repeated] = (), *, frames: int = 0) -> Trial:
    """Count the memory of `run()`, whose weights and larger inputs are on the meta device.

    What was there before is not counted. A run that raises is counted up to there: torch does so
    where it has to know a value, and the model may, whatever it is.

    Args:
        run: calls the model.
        repeated: blocks that stand for more of their kind.
        frames: what each word is taken to become, where the model itself says how many; 0: what it
            says then is not known.
    """
    ledger = Ledger()
    counting = _Counting(ledger, frames)
    handles: list[RemovableHandle] = []
    try:
        for one in repeated:
            handles += _repeat(ledger, one)
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.random.fork_rng(devices=()),
            _Calls(ledger),
            counting,
        ):
            output = run()
            kernels, weights = len(ledger.kernels), len(counting.weights)
            return Trial(ledger.peak, ledger.kept, kernels, output, weights)
    except Exception as error:
        weights = len(counting.weights)
        return Trial(ledger.peak, 0, weights=weights, error=error.with_traceback(None))
    finally:
        for handle in handles:
            handle.remove()


def _repeat(ledger: Ledger, repeated: Repeated) -> Iterable[RemovableHandle]:
    """Have what is left behind from one block to the next counted for all that are not there."""
    seen: dict[int, tuple[int, int]] = {}
    ends: list[int] = []
    last = len(repeated.blocks) - 1

    def ended(index: int, *_: object) -> None:
        start = ends[-1] if ends else ledger.began
        ends.append(ledger.live)
        seen[index] = max(0, ledger.live - start), ledger.since - start
        if index == last:
            missing = enumerate(repeated.missing)
            ledger.repeat([(often, *seen[one]) for one, often in missing if one in seen])
            seen.clear()
            ends.clear()

    for index, block in enumerate(repeated.blocks):
        yield block.register_forward_pre_hook(lambda *_: ledger.begin())
        yield block.register_forward_hook(partial(ended, index))


def _first(args: Sequence[Any]) -> Any:
    return args[0] if args else None


def _is_place(index: Any) -> bool:
    """Whether it is a known number, in a tensor."""
    known = isinstance(index, Tensor) and not index.is_meta
    return known and not index.dim() and index.dtype is torch.long


_FROM_NUMBERS = (torch.tensor, torch.as_tensor)
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class _Calls(TorchFunctionMode):
    """Answers for the kernel that a CPU has for attention: without it scores are written out.

    And for tensors of given numbers, which are known.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            return attend(self._ledger, *args, **kwargs)
        if func in _FROM_NUMBERS and "device" in kwargs and not isinstance(_first(args), Tensor):
            kwargs = {**kwargs, "device": "cpu"}  # the numbers are not looked at for another
        if func is Tensor.__getitem__ and _is_place(args[1]):
            # It may be of an expert that nothing goes to: all that may be chosen is said to be.
            args = args[0], min(int(args[1]), len(args[0]) - 1)
        if getattr(func, "__name__", "") in _RECURRENT:  # which want their first state beside it
            with _disable_current_modes():
                args, kwargs = tree_map(without_values, (args, kwargs))
        return func(*args, **kwargs)


_LENGTHS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.repeat_interleave.Tensor,
)


class _Counting(TorchDispatchMode):
    """Runs every operation for its sizes, or for its values where these are small and known."""

    def __init__(self, ledger: Ledger, frames: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._left = MOST_OPERATIONS
        self._frames, self._words = frames, 0
        self.weights: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TooLongError(f"A trial of more than {MOST_OPERATIONS} operations.")
        kwargs = dict(kwargs or {})
        given = tensors_in((args, kwargs))
        if func is torch.ops.aten.embedding.default:
            self._words = max((self._words, *given[1].shape[-1:]))
        self.weights.update(id(tensor) for tensor in given if isinstance(tensor, nn.Parameter))
        output = self._run(func, args, kwargs, given)
        made = tensors_in(output)
        if func is torch.ops.aten.convolution.default:
            self._ledger.kernels.add((given[0].shape, given[1].shape))
        self._ledger.enter(made, given, beside(func, args, made))
        return output

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
        unknown = [tensor for tensor in given if self._ledger.is_unknown(tensor)]
        real = bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta
        if func._schema.is_mutable and real and (unknown or self._ledger.stands_for_many(args[0])):
            self._ledger.forget(args[0])
            return args[0]
        if not unknown:
            output = constant(func, args, kwargs, given)
            return for_values(func, args, kwargs, given) if output is None else output
        if self._frames and func in _LENGTHS and given[0].dtype is torch.long:
            return self._length(func, given[0])
        if all(tensor.is_meta for tensor in given):
            return for_sizes(func, args, kwargs)
        if func.is_view and real:  # it shares what is not known
            return func(*args, **kwargs)
        return mixed(func, *tree_map(partial(if_known, unknown), (args, kwargs)))

    def _length(self, func: Any, asked: Tensor) -> Any:
        """How long the longest is that is made of words, or which of them each frame is of."""
        if func is torch.ops.aten.repeat_interleave.Tensor:
            return asked.new_empty(self._frames * asked.numel(), device="meta")
        return self._frames * self._words
