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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from pipeload_hooks._kernels import attend, beside
from pipeload_hooks._ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

MOST_COMPUTED = 1 << 17
"""Elements of the largest tensor that is computed."""


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
            _Calls(ledger),
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
        if func in _FROM_NUMBERS and "device" in kwargs:
            kwargs = {**kwargs, "device": "cpu"}  # the numbers are not looked at for another
        if getattr(func, "__name__", "") in _RECURRENT:  # which want their first state beside it
            with _disable_current_modes():
                args, kwargs = tree_map(_without_values, (args, kwargs))
        return func(*args, **kwargs)


class _Counting(TorchDispatchMode):
    """Runs every operation for its sizes, or for its values where these are small and known."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger
        self._left = MOST_OPERATIONS

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
            output = _constant(func, args, kwargs, given)
            return _for_values(func, args, kwargs, given) if output is None else output
        if all(tensor.is_meta for tensor in given):
            return _for_sizes(func, args, kwargs)
        if func.is_view and real:  # it shares what is not known
            return func(*args, **kwargs)
        return _mixed(func, *tree_map(partial(_if_known, unknown), (args, kwargs)))


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
    """As many as there can be; of what was found in a picture, one in every line."""
    if given.dim() == 1 and given.numel() <= MOST_COMPUTED:
        return torch.arange(given.numel()).unsqueeze(1)
    picture = given.dtype is torch.bool and given.dim() == 2 and given.numel()
    many = max(given.shape) if picture else given.numel()
    return given.new_empty((many, given.dim()), dtype=torch.long)


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


def _if_known(unknown: Sequence[Tensor], value: Any) -> Any:
    return _without_values(value) if any(value is one for one in unknown) else value


def _constant(func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
    """Large, and of one number alone, which stands for all; None where the result is not.

    A mask that hides nothing is known, whatever its size.
    """
    if not given and func._schema.name in _FILLED:
        size, args = torch.Size(args[0]), ([], *args[1:])
    elif given and _is_by_number(func) and all(map(_is_constant, given)):
        size = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    else:
        return None
    if size.numel() <= MOST_COMPUTED:
        return None
    here = {"device": torch.device("cpu")} if "device" in kwargs else {}
    made = func(*tree_map(_one_of, args), **(tree_map(_one_of, kwargs) | here))
    return made.expand(size)


_FILLED = ("aten::ones", "aten::full")
_COPIES = ("aten::clone", "aten::_to_copy")


def _is_by_number(func: Any) -> bool:
    named = func._schema.name in _COPIES or torch.Tag.pointwise in func.tags
    return named and not func._schema.is_mutable and len(func._schema.returns) == 1


def _is_constant(tensor: Tensor) -> bool:
    return not any(
        step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )


def _one_of(value: Any) -> Any:
    return value.as_strided((), ()) if isinstance(value, Tensor) else value


def _for_values(func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
    here = kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs
    if func.is_view:
        return func(*args, **here)
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
