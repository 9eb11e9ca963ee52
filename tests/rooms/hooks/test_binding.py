"""Parameters get their values and give them back, and stay the same objects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeload_hooks import Binding, bind, is_placeholder, placeholder, set_parameter, unbind

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (1000, 1000, 1000)])
def test_a_placeholder_shows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Any shape takes one element of memory, and all of it is NaN."""
    made = placeholder(shape, dtype, CPU)
    assert (made.shape, made.dtype, made.device) == (shape, dtype, CPU)
    assert made.untyped_storage().nbytes() == dtype.itemsize
    assert math.isnan(made.view(-1)[-1].item() if made.numel() < 100 else made[0, 0, 0].item())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_set_parameter(requires_grad: bool) -> None:
    """The parameter at a dotted name is replaced, at any depth."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    made = set_parameter(model, "0.0.bias", torch.tensor([1.0, 2.0]), requires_grad=requires_grad)
    assert model.get_parameter("0.0.bias") is made
    assert made.requires_grad is requires_grad
    assert dict(model.named_parameters()).keys() == {"0.0.weight", "0.0.bias"}
    root = nn.Linear(2, 2)
    assert set_parameter(root, "bias", torch.zeros(2), requires_grad=True) is root.bias


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 2)


@pytest.fixture
def binding(layer: nn.Linear) -> Binding:
    return Binding(dict(layer.named_parameters()))


def views() -> dict[str, torch.Tensor]:
    """What an arena gives, with one tensor more."""
    arena = torch.arange(20, dtype=torch.float32)
    return {"weight": arena[:6].view(2, 3), "bias": arena[6:8], "other": arena[8:]}


def test_bound_parameters_are_the_views(layer: nn.Linear, binding: Binding) -> None:
    """Nothing is copied; the Parameter objects and requires_grad stay."""
    weight, bias = layer.weight, layer.bias
    given = views()
    bind(binding.pair(given))
    assert layer.weight is weight
    assert layer.bias is bias
    assert weight.data_ptr() == given["weight"].data_ptr()
    assert bias.data_ptr() == given["bias"].data_ptr()
    assert weight.requires_grad
    assert weight.is_leaf
    assert not weight.is_inference()
    result = layer(torch.ones(1, 3)).detach()
    assert torch.equal(result, torch.tensor([[0.0 + 1 + 2 + 6, 3.0 + 4 + 5 + 7]]))


def test_unbound_parameters_show(layer: nn.Linear, binding: Binding) -> None:
    """Afterwards every use gives NaN, and shape, dtype and device are as before."""
    pairs = binding.pair(views())
    bind(pairs)
    assert not is_placeholder(layer.weight)
    unbind(pairs)
    assert is_placeholder(layer.weight)
    assert torch.isnan(layer(torch.ones(1, 3))).all()
    assert (layer.weight.shape, layer.weight.dtype) == ((2, 3), torch.float32)


def test_a_part_may_be_bound(layer: nn.Linear, binding: Binding) -> None:
    """What is not among the views stays as it is; evict takes everything."""
    binding.evict()
    bind(binding.pair({"bias": torch.ones(2)}))
    assert layer.bias.tolist() == [1, 1]
    assert torch.isnan(layer.weight).all()
    binding.evict()
    assert torch.isnan(layer.bias).all()


def test_half_a_binding_is_undone(layer: nn.Linear, binding: Binding) -> None:
    """An interrupt between two parameters leaves nothing that unbind does not undo."""
    first, second = binding.pair(views())
    broken = torch.empty(2, dtype=torch.float32, device="meta")
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        bind([first, second._replace(values=broken)])
    unbind([first, second])
    assert all(torch.isnan(parameter).all() for parameter in layer.parameters())


def test_parameters_are_kept_not_their_names(layer: nn.Linear, binding: Binding) -> None:
    """An adapter that moves the layer elsewhere changes nothing."""
    wrapped: Any = nn.Sequential(layer)
    bind(binding.pair(views()))
    assert wrapped[0].weight[0].tolist() == [0, 1, 2]
    assert binding.parameters.keys() == {"weight", "bias"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_grad_mode(layer: nn.Linear, binding: Binding, mode: type) -> None:
    """Bound in one mode, unbound in another."""
    pairs = binding.pair(views())
    with mode():
        bind(pairs)
        layer(torch.ones(1, 3))
    unbind(pairs)
    bind(pairs)
    with mode():
        unbind(pairs)
    assert torch.isnan(layer.weight).all()
