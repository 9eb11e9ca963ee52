"""What torch's kernels for CPUs take beside the tensors that go in and come out. In bytes.

Measured; the names are torch's own. What is not here takes next to nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeload_hooks._live_bytes import Ledger

_COLOURS = 3  # so few channels are read as they lie
_ATTENTION_OPTIONS = ("attn_mask", "dropout_p", "is_causal")
_INDEX = 8  # bytes of one number of a place
_SUM = 4  # bytes of the sum of a row of scores
_HALF = (torch.bfloat16, torch.float16)


def beside(func: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """What an operation holds while it runs, beside its arguments and the tensors it has made."""
    rule = _RULES.get(func._schema.name)
    return rule(args, made) if rule is not None and made else 0


def attend(
    ledger: Ledger, query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> Tensor:
    """`scaled_dot_product_attention` of tensors without values.

    By the fused kernel where a CPU would take it: its result, and the mask as it wants it.
    """
    given = dict(zip(_ATTENTION_OPTIONS, options, strict=False)) | named
    if not _is_fused((query, key, value), given):
        return nn.functional.scaled_dot_product_attention(query, key, value, **given)
    batch, heads, rows, width = query.shape
    made = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    held = batch * heads * rows * _SUM
    mask = given.get("attn_mask")
    if mask is not None and mask.dtype is torch.bool:
        held += mask.numel() * query.element_size()
    if query.dtype in _HALF and torch.cpu._is_amx_tile_supported():  # as its products want them
        held += nbytes_of(key) + nbytes_of(value)
    ledger.enter((), (), held)
    return made


def _is_fused(tensors: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Any]) -> bool:
    query, key, value = tensors
    if not torch.backends.cuda.flash_sdp_enabled():  # on CPUs, too: a model may ask for none
        return False
    if any(t.dim() != 4 or not t.numel() or t.stride(-1) != 1 for t in tensors):
        return False
    if not key.shape[-1] == value.shape[-1] == query.shape[-1]:
        return False
    if not given.get("enable_gqa") and not key.shape[1] == value.shape[1] == query.shape[1]:
        return False
    mask = given.get("attn_mask")
    return not given.get("dropout_p") and (mask is None or mask.dim() in {2, 4})


def nbytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor's elements, as if each had a place of its own."""
    return tensor.numel() * tensor.element_size()


def _convolution(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Input and result are rearranged, unless the channels come last already."""
    given, weight, transposed = args[0], args[1], args[6]
    weights, whole = nbytes_of(weight), nbytes_of(given)
    if given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last):
        orders = 1 if weight[0, 0].numel() == 1 else 2  # channels last, then as the kernel reads
        return 0 if given.is_contiguous() and given.shape[1] > 1 else orders * weights
    moved = whole if given.shape[1] > _COLOURS else 0
    gathered = 0 if given.is_contiguous() else whole
    if 1 < args[8] == given.shape[1] < _block():  # each by itself, and too few for a register
        padded = _block() / given.shape[1]
        return weights + gathered + int(padded * (whole + nbytes_of(made[0])))
    return weights + gathered + max(moved, nbytes_of(made[0])) * (2 if transposed else 1)


def _block() -> int:
    """Channels that a kernel takes at once: as many as a register has numbers of fp32."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _pooled(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Its input one element after the other, in the order in which it lies."""
    given = args[0]
    order = suggest_memory_format(given)
    return 0 if given.is_contiguous(memory_format=order) else nbytes_of(given)


def _copied(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    return 0 if args[0].is_contiguous() else nbytes_of(made[0])


def _products(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """In half precision, what does not lie one matrix after the other is put so."""
    if made[0].dtype not in _HALF:
        return 0
    factors = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    return sum(nbytes_of(factor) for factor in factors if not _is_packed(factor))


def _is_packed(batch: Tensor) -> bool:
    return batch.is_contiguous() or batch.transpose(1, 2).is_contiguous()


def _antialiased(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """It goes along one side, and then the other."""
    given, out = args[0], made[0]
    return math.prod((*given.shape[:-1], out.shape[-1])) * out.element_size()


def _whole(_args: Sequence[Any], made: Sequence[Tensor]) -> int:
    return nbytes_of(made[0])


def _masked(args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Places of what a mask picks."""
    given = args[0]
    masks = [index for index in args[1] if index is not None and index.dtype is torch.bool]
    if len(masks) != 1 or len(args[1]) != 1:
        return 0
    rest = math.prod(given.shape[masks[0].dim() :])
    picked = made[0].numel() // max(1, rest)
    return int(picked) * _INDEX * int(masks[0].dim())


_RULES: Mapping[str, Callable[[Sequence[Any], Sequence[Tensor]], int]] = {
    "aten::convolution": _convolution,
    "aten::native_layer_norm": _copied,
    "aten::native_group_norm": _copied,
    "aten::_softmax": _copied,
    "aten::_safe_softmax": lambda _, made: made[0].numel(),
    "aten::max_pool2d_with_indices": _pooled,
    "aten::bmm": _products,
    "aten::index": _masked,
    "aten::baddbmm": _products,
    "aten::roll": lambda args, made: _whole(args, made) if len(args[1]) > 1 else 0,
    "aten::_upsample_bicubic2d_aa": _antialiased,
    "aten::_upsample_bilinear2d_aa": _antialiased,
}
