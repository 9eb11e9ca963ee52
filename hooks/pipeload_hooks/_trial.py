"""Runs a model without weights, and counts the memory that it would take with them on a CPU.

[Note: what is computed] Activations and weights are on the meta device and have no values. What
depends on neither is computed, as long as it is small: masks, positions, the sizes of pictures.
Models look at such values to decide what they do next. All else runs for its shapes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from pipeload_hooks._kernels import attend, beside
from pipeload_hooks._ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

MOST_COMPUTED = 1 << 17
"""Elements of the largest tensor that is computed."""


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
    error: Exception | None = None
    """What ended the run before it was over: it would take this much, and maybe more."""


class Repeated(NamedTuple):
    """Blocks of a list that are not there; the last that is stands for them."""

    blocks: Sequence[nn.Module]
    """Those that are there."""
    missing: int


def try_out(run: Callable[[], Any], repeated: Iterable[Repeated] = ()) -> Trial:
    """Count the memory of `run()`, whose weights and larger inputs are on the meta device.

    What was there before is not counted. A run that raises is counted up to there: torch does so
    where it has to know a value, and the model may, whatever it is.
    """
    ledger = Ledger()
    handles: list[RemovableHandle] = []
    try:
        for one in repeated:
            handles += _repeat(ledger, one)
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch.random.fork_rng(devices=()),
            _Attention(ledger),
            _Counting(ledger),
        ):
            output = run()
            return Trial(ledger.peak, ledger.kept, len(ledger.kernels), output)
    except Exception as error:
        return Trial(ledger.peak, 0, error=error.with_traceback(None))
    finally:
        for handle in handles:
            handle.remove()


def _repeat(ledger: Ledger, repeated: Repeated) -> Iterable[RemovableHandle]:
    """Have what is left behind from one block to the next counted for all that are not there."""
    ends: list[int] = []

    def ended(last: bool, *_: object) -> None:
        if last:
            more = ledger.live - ends[-1] if ends else 0
            ledger.repeat(repeated.missing, max(0, more))
            ends.clear()
        else:
            ends.append(ledger.live)

    last = repeated.blocks[-1]
    yield last.register_forward_pre_hook(lambda *_: ledger.begin())
    for block in repeated.blocks:
        yield block.register_forward_hook(partial(ended, block is last))


class _Attention(TorchFunctionMode):
    """Answers for the kernel that a CPU has for attention: without it scores are written out."""

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
        return func(*args, **kwargs)


class _Counting(TorchDispatchMode):
    """Runs every operation for its sizes, or for its values where these are small and known."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = tensors_in((args, kwargs))
        if all(tensor.is_meta for tensor in given) and given:
            output = _for_sizes(func, args, kwargs)
        elif any(tensor.is_meta for tensor in given):
            output = _mixed(func, args, kwargs)
        else:
            output = _for_values(func, args, kwargs, given)
        made = tensors_in(output)
        if func is torch.ops.aten.convolution.default:
            self._ledger.kernels.add((given[0].shape, given[1].shape))
        self._ledger.enter(made, given, beside(func, args, made))
        return output


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested lists and dictionaries."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _for_sizes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    answer = _ANSWERS.get(func._schema.name)
    if answer is not None:
        return answer(func, *args, **kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    return func(*args, **kwargs)


def _all(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Whatever is asked of all values is so: they are finite, and nothing is masked."""
    return torch.ones(func(*args, **kwargs).shape, dtype=torch.bool)


def _any(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(func(*args, **kwargs).shape, dtype=torch.bool)


def _same(func: Any, *args: Any) -> Tensor:
    """A single number is what it is checked to be."""
    made: Tensor = func(*args)
    return made if made.dim() else torch.tensor(True)


def _flag(_func: Any, given: Tensor) -> bool:
    if given.dtype is torch.bool:
        return False
    raise ValueError("A number that depends on weights is not known without them.")


def _nonzero(_func: Any, given: Tensor) -> Tensor:
    """As many as there can be."""
    return given.new_empty((given.numel(), given.dim()), dtype=torch.long)


def _index(func: Any, given: Tensor, indices: Sequence[Tensor | None], *others: Any) -> Any:
    return func(given, _numbers(indices), *others)


def _grouped(
    _func: Any, given: Tensor, weights: Tensor, *_: Any, out_dtype: Any = None, **__: Any
) -> Tensor:
    """Rows by the matrices of their experts; torch knows the sizes in bf16 alone."""
    return given.new_empty((*given.shape[:-1], weights.shape[-1]), dtype=out_dtype)


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "aten::all": _all,
    "aten::any": _any,
    "aten::eq": _same,
    "aten::_local_scalar_dense": _flag,
    "aten::nonzero": _nonzero,
    "aten::index": _index,
    "aten::index_put": _index,
    "aten::index_put_": _index,
    "aten::_grouped_mm": _grouped,
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


def _mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What is real among the arguments is only looked at where the result's size depends on it."""
    if func._schema.name in _INDEXING:
        args = (args[0], _numbers(args[1]), *args[2:])
    if func._schema.is_mutable and not args[0].is_meta:
        return args[0]  # it has no values any more, but nobody could tell
    args, kwargs = tree_map(_without_values, (args, kwargs))
    return _for_sizes(func, args, kwargs)


def _numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices of which none is a mask. One without values picks all that it can."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        elif index.is_meta:
            picked = index.new_empty(index.numel(), dtype=torch.long)
            found += [picked] * index.dim()
        else:
            found += index.nonzero(as_tuple=True)
    return found


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _for_values(func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
    here = kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs
    if not given or any(tensor.numel() > MOST_COMPUTED for tensor in given) or _grows(func, given):
        there, sizes = tree_map(_without_values, (args, kwargs))
        if "device" in sizes or not given:
            sizes = sizes | {"device": torch.device("meta")}
        try:
            output = func(*there, **sizes)
        except Exception:
            return func(*args, **here)
        if any(tensor.numel() > MOST_COMPUTED for tensor in tensors_in(output)):
            return output
    return func(*args, **here)


def _grows(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether the result may be larger than anything that is computed."""
    return (
        math.prod(max(1, tensor.numel()) for tensor in given) > MOST_COMPUTED
        or "repeat" in func.name()
    )
