"""Single operations of a trial: what they give where values are not there.

[Note: what is computed] Activations and weights are on the meta device and have no values. What
depends on neither is computed, as long as it is small: masks, positions, the sizes of pictures.
Models look at such values to decide what they do next. All else runs for its shapes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MOST_COMPUTED = 1 << 17
"""Elements of the largest tensor that is computed."""


class UnknownValueError(ValueError):
    """A model asked for a number that there is none of without weights."""


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def for_sizes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
    raise UnknownValueError("A number that depends on weights is not known without them.")


def _nonzero(_func: Any, given: Tensor) -> Tensor:
    """As many as there can be; of what was found in a picture, one in every line."""
    if given.dim() == 1 and given.numel() <= MOST_COMPUTED:
        return torch.arange(given.numel()).unsqueeze(1)
    picture = given.dtype is torch.bool and given.dim() == 2 and given.numel()
    many = max(given.shape) if picture or _is_chosen(given) else given.numel()
    return given.new_empty((many, given.dim()), dtype=torch.long)


def _is_chosen(given: Tensor) -> bool:
    """Whether it tells which words go to an expert: a word has fewer choices than there are.

    It is a part of what tells so of all experts then. None gets a word twice.
    """
    if given.dtype is not torch.long or given.dim() != 2 or not given.numel():
        return False
    experts = given.untyped_storage().nbytes() // given.nbytes
    return min(given.shape) < experts


def _index(func: Any, given: Tensor, indices: Sequence[Tensor | None], *others: Any) -> Any:
    return func(given, _numbers(indices), *others)


def _grouped(
    _func: Any, given: Tensor, weights: Tensor, *_: Any, out_dtype: Any = None, **__: Any
) -> Tensor:
    """Rows by the matrices of their experts; torch knows the sizes in bf16 alone."""
    return given.new_empty((*given.shape[:-1], weights.shape[-1]), dtype=out_dtype)


def _convolution(func: Any, given: Tensor, weight: Tensor, *others: Any) -> Tensor:
    """On a CPU the channels of a result lie where they lie in the input, or in the weights."""
    made: Tensor = func(given, weight, *others)
    orders = (suggest_memory_format(one) for one in (given, weight))
    last = made.dim() == 4 and torch.channels_last in orders
    return torch.empty_like(made, memory_format=torch.channels_last) if last else made


_ANSWERS: Mapping[str, Callable[..., Any]] = {
    "aten::all": _all,
    "aten::_is_all_true": _all,
    "aten::any": _any,
    "aten::convolution": _convolution,
    "aten::eq": _same,
    "aten::_local_scalar_dense": _flag,
    "aten::nonzero": _nonzero,
    "aten::index": _index,
    "aten::index_put": _index,
    "aten::index_put_": _index,
    "aten::_grouped_mm": _grouped,
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


def mixed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What is real among the arguments is only looked at where the result's size depends on it."""
    if func._schema.name in _INDEXING:
        args = (args[0], _numbers(args[1]), *args[2:])
    args, kwargs = tree_map(without_values, (args, kwargs))
    return for_sizes(func, args, kwargs)


def _numbers(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices of which none is a mask. One without values picks all that it can."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        else:
            many = index.numel() if index.is_meta else _picked(index)
            found += [torch.empty(many, dtype=torch.long, device="meta")] * index.dim()
    return found


def _picked(mask: Tensor) -> int:
    """How many a mask picks. It may be a small one, shown many times."""
    times = 1
    for place in range(mask.dim()):
        if mask.stride(place) == 0 and mask.shape[place] > 1:
            times *= mask.shape[place]
            mask = mask.narrow(place, 0, 1)
    return times * int(torch.count_nonzero(mask))


def without_values(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_meta:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def if_known(unknown: Sequence[Tensor], value: Any) -> Any:
    return without_values(value) if any(value is one for one in unknown) else value


def constant(func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
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


def for_values(func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[Tensor]) -> Any:
    if func._schema.name == "aten::_to_copy" and _only_moves(args[0], **kwargs):
        return args[0]  # it is there already
    here = kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs
    if func.is_view:
        return func(*args, **here)
    if not given or any(tensor.numel() > MOST_COMPUTED for tensor in given) or _grows(func, given):
        there, sizes = tree_map(without_values, (args, kwargs))
        if "device" in sizes or not given:
            sizes = sizes | {"device": torch.device("meta")}
        try:
            output = func(*there, **sizes)
        except Exception:
            return func(*args, **here)
        if any(tensor.numel() > MOST_COMPUTED for tensor in tensors_in(output)):
            return output
    try:
        return func(*args, **here)
    except NotImplementedError:  # on a CPU the model would have given it another type
        return mixed(func, args, kwargs)


def _only_moves(given: Tensor, *, device: Any = None, dtype: Any = None, **others: Any) -> bool:
    """Whether all that is wanted is for a tensor to go where those without values are."""
    there = device is not None and torch.device(device).type == "meta"
    return there and dtype in {None, given.dtype} and others.get("memory_format") is None


def _grows(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether the result may be larger than anything that is computed."""
    return (
        math.prod(max(1, tensor.numel()) for tensor in given) > MOST_COMPUTED
        or "repeat" in func.name()
    )
