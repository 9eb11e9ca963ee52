"""What a block gave, taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from pipeload.errors import UnsupportedOperationError
from pipeload.ring.trees import put_together, read_bytes, sizes_in, take_apart, write_bytes


def there_and_back(output: Any, given: dict[str, Any]) -> Any:
    """As another rank gets it."""
    text, tensors = take_apart(output, given)
    sizes = sizes_in(text)
    room = torch.empty(sum(size.nbytes for size in sizes), dtype=torch.uint8)
    write_bytes(tensors, room)
    return put_together(text, given, read_bytes(sizes, room))


def test_trees() -> None:
    """Tuples, lists, dicts and plain values, and what was handed on, in their order."""
    cache = object()
    ones = torch.ones(2, 3, dtype=torch.bfloat16)
    output = (ones, [None, 3, "a", 0.1], {"x": torch.arange(4)}, OrderedDict(y=True), cache)
    got = there_and_back(output, {"cache": cache})
    assert torch.equal(got[0], ones)
    assert got[0].dtype == torch.bfloat16
    assert got[1] == [None, 3, "a", 0.1]
    assert torch.equal(got[2]["x"], torch.arange(4))
    assert got[3] == OrderedDict(y=True)
    assert type(got[3]) is OrderedDict
    assert got[4] is cache


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).t(),
        torch.randn(4, 6, 2)[:, ::2],
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.tensor([True, False]),
        torch.randn(2, 3, dtype=torch.complex64),
    ],
)
def test_tensors_lie_in_memory_as_they_did(tensor: torch.Tensor) -> None:
    """Kernels may choose by strides, so these are kept."""
    (before, got) = there_and_back((torch.zeros(1, dtype=torch.bool), tensor), {})
    assert before.dtype == torch.bool
    assert torch.equal(got, tensor)
    if not tensor.is_contiguous() and tensor.numel() == tensor.untyped_storage().size():
        assert got.stride() == tensor.stride()


def test_the_description_makes_nothing_else() -> None:
    """A type that is not named here cannot be sent."""
    with pytest.raises(UnsupportedOperationError, match="a block gave a object, which cannot be"):
        take_apart((object(),), {})
