"""Private parts of transformers: which modules hold experts of which a call uses only some.

Seen in 5.24.0. Such a module gets ids as its second argument and multiplies with slices of its
parameters: by the library's own functions, or in a loop of its own, which is judged by its code.
One of our own takes the place of the library's where experts are integers.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pipeload.budget.model_parts import ExpertsModule
from pipeload.errors import UnsupportedOperationError
from pipeload.formats.integers.packed_experts import PackedExperts
from pipeload_hooks import (
    COUNTS,
    IDS,
    MARKS,
    names_of_others,
    takes_slices_alone,
    views_slices_alone,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import torch

_SERVED = frozenset({"grouped_mm", "batched_mm", "eager"})
"""Ways to multiply whose use of the weights is known: see the lower layer's _experts.py."""
_STACKED = 3
_ROWS, _CHILD = 2, "mlp"
"""Dimensions where experts lie one below the other, and what holds them then."""
_ROUTED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
)
_IDS = 2  # arguments of forward that stand before ids: self and the rows
_IDS_NAMES = frozenset({"top_k_index", "router_indices"})
_COUNTS = "expert_size"
"""What JetMoE calls how many rows each expert gets: a list, by which rows are in order."""
_OWN_NAME, _FEWEST, _MATRIX = "expert_", 2, 2
_OWN: dict[str, tuple[str, int | None]] = {"selected_experts": (MARKS, 1), "router_mask": (IDS, 2)}
"""Where each expert is a module: what tells who is called, and how many are for one row. In NLLB's
of 5.24 the numbers of a mask are taken for ids: whatever the router says, experts 0 and 1 run."""


def experts_apart(model: nn.Module, outside: Collection[str] | None) -> list[ExpertsModule]:
    """Find those that nobody else uses.

    `outside`: names of parameters that are used while their module does not run; None where that
    could not be tried, as with a loop over experts, which needs values.
    """
    found = find_experts(model)
    if outside is None:
        known = (e for e in found if e.number or e.own or not named_past(model, e))
        return list(known)
    used = frozenset(outside)
    # Of those in a child of its own it is known that they are used while that does not run.
    return [
        e for e in found if e.number or used.isdisjoint(f"{e.name}.{name}" for name in e.parameters)
    ]


def find_experts(model: nn.Module) -> Iterator[ExpertsModule]:
    """Find the modules of which experts can be had one by one."""
    for path, module in model.named_modules():
        ours = isinstance(module, PackedExperts)
        names = (PackedExperts.stacked,) if ours else _stacked(module)
        if ours or (names and _takes_ids(module, names)):
            sweeps = ours or _implementation(module) != "eager"
            config = getattr(module, "config", None) or getattr(model, "config", None)
            told = COUNTS if not ours and _told_by(module) == _COUNTS else IDS
            yield ExpertsModule(path, module, names, sweeps, _routed(config), told_by=told)
        elif (count := _rows_apart(module)) > 1:
            names = tuple(f"{_CHILD}.{name}" for name, _ in module.mlp.named_parameters())
            routed = _routed(getattr(model, "config", None))
            yield ExpertsModule(path, module, names, sweeps=False, routed=routed, number=count)
        elif own := _own_matrices(module):
            told, routed = _OWN[_told_by(module) or ""]
            names = tuple(name for each in own for name in each)
            yield ExpertsModule(path, module, names, False, routed, told_by=told, own=own)


def _rows_apart(module: nn.Module) -> int:
    """How many experts a module has whose child holds them one below the other, as DBRX has them.

    0 where that is not so, or its code uses them, or others', otherwise than slice by slice.
    """
    child = module._modules.get(_CHILD)
    count = getattr(module, "num_experts", 0)
    own = inspect.unwrap(type(module).forward)
    if child is None or not isinstance(count, int) or "forward" in vars(module):
        return 0
    parameters = dict(child.named_parameters())
    names = tuple(parameters)
    fits = all(
        type(p) is nn.Parameter and p.ndim == _ROWS and count > 1 and p.shape[0] % count == 0
        for p in parameters.values()
    )
    if not names or not fits or _told_by(module) not in _IDS_NAMES:
        return 0
    return count if views_slices_alone(own, _CHILD, names) else 0


def _own_matrices(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of the matrices of each expert, where each is a module in a dictionary of them.

    Whichever of these the module calls comes: its code need not be known.
    """
    if not isinstance(module, nn.ModuleDict) or "forward" in vars(module):
        return ()
    experts = [f"{_OWN_NAME}{index}" for index in range(len(module))]
    experts = [name for name in experts if name in module]
    others = (child for name, child in module.items() if name not in experts)
    if len(experts) < _FEWEST or _told_by(module) not in _OWN or any(map(_has_weights, others)):
        return ()
    return tuple(
        tuple(f"{name}.{n}" for n, p in module[name].named_parameters() if p.ndim == _MATRIX)
        for name in experts
    )


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


@contextlib.contextmanager
def experts_in_turn(model: nn.Module) -> Iterator[None]:
    """Inside, those that are modules in a dictionary run one after the other on all rows.

    Their own forward looks at values, which a trial on the meta device has none of.
    """
    kinds = {module: type(module) for module in model.modules() if _own_matrices(module)}
    for module, kind in kinds.items():
        module.__class__ = type(kind.__name__, (kind,), {"forward": _run_all})
    try:
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def _run_all(self: Any, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    for name, child in self.items():
        hidden = child(hidden) if name.startswith(_OWN_NAME) else hidden
    return hidden


def _routed(config: Any) -> int | None:
    """Experts that a row is sent to, as configurations call it."""
    texts = [config, *(getattr(config, part, None) for part in ("text_config", "ffn_config"))]
    found = (getattr(text, name, None) for text in texts for name in _ROUTED)
    return next((count for count in found if isinstance(count, int) and count > 0), None)


def named_past(model: nn.Module, experts: ExpertsModule) -> bool:
    """Whether the code of another module of the model names the parameters of this one."""
    code = {type(module).__module__ for module in model.modules()}
    own = [name for name in code if name.startswith("transformers.models.")]
    return any(names_of_others(name, experts.parameters) for name in own)


def check_implementation(module: nn.Module) -> None:
    """Whether an experts module still multiplies in one of the ways that are served.

    Raises:
        UnsupportedOperationError: it was given another one since it was loaded.
    """
    if _implementation(module) not in _SERVED:
        name = getattr(getattr(module, "config", None), "_experts_implementation", None)
        raise UnsupportedOperationError(
            f"experts of this {type(module).__name__} are read as they are routed to, which is not "
            f"known of the experts implementation {name!r}. Choose one of the library's own: "
            'model.set_experts_implementation("grouped_mm"), "batched_mm" or "eager".'
        )


def _stacked(module: nn.Module) -> tuple[str, ...]:
    """Names of parameters that hold a matrix of each expert."""
    found = [
        (name, parameter)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == _STACKED and parameter.is_floating_point()
    ]
    plain = all(type(parameter) is nn.Parameter for _, parameter in found)
    several = all(parameter.shape[0] > 1 for _, parameter in found)
    return tuple(name for name, _ in found) if found and plain and several else ()


def _takes_ids(module: nn.Module, names: tuple[str, ...]) -> bool:
    kind = type(module)
    forward = kind.forward
    own = inspect.unwrap(forward)
    return (
        "forward" not in vars(module)
        and kind.__call__ is nn.Module.__call__
        and _told_by(module) in _IDS_NAMES | {_COUNTS}
        and (own is forward or _implementation(module) in _SERVED)
        and takes_slices_alone(own, names)
    )


def _told_by(module: nn.Module) -> str | None:
    """The argument that tells which experts a call is sent to, by its name."""
    arguments = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)
    return next(iter(arguments[_IDS : _IDS + 1]), None)


def _implementation(module: nn.Module) -> str:
    """How the library multiplies; "eager" is the loop of the module's own."""
    if inspect.unwrap(type(module).forward) is type(module).forward:
        return "eager"
    name = str(getattr(getattr(module, "config", None), "_experts_implementation", None) or "eager")
    function = ALL_EXPERTS_FUNCTIONS.get(name)
    known = (
        name == "eager" or getattr(function, "__module__", "") == "transformers.integrations.moe"
    )
    return name if known else ""
