"""Refuses what would read or change weights that are on disk, before anything is half done."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from pipeload.engine.on_disk_tensor import Hide, OnDisk, save_hidden, shows
from pipeload.errors import UnsupportedModelError, UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pipeload.engine.own_weights import OwnWeights
    from pipeload.engine.teardown import Step
    from pipeload.weights.layout import Weight
    from pipeload_hooks import Companion

_WAY_OUT = (
    "Call handle.remove() first to get the plain model back (pipeload.handle(model).remove())"
)


def install(
    model: nn.Module,
    pass_modules: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    weights: OwnWeights,
) -> Iterator[Step]:
    """Guard a streaming model. Yields what takes each guard off again, when it is put on.

    Args:
        model: the model that streams.
        pass_modules: the library's models in it.
        blocks: modules that get their weights before they run.
        weights: those of its parameters that come from the checkpoint.
    """
    refuse_load = _load_guard(weights)
    for module in dict.fromkeys((model, *pass_modules, *blocks)):
        for name, make in _OVERRIDES.items():
            yield from _override(module, name, make)
        yield module.register_load_state_dict_pre_hook(refuse_load).remove
    for module in model.modules():
        # By the owners: every route to a state dict passes through their own.
        mine = weights.hidden_of(module)
        if mine:
            yield module.register_load_state_dict_pre_hook(refuse_load).remove
        if any(weight.guarded for weight in mine):
            yield from _override(module, "_save_to_state_dict", partial(save_hidden, weights))
        elif mine:
            yield module.register_state_dict_post_hook(Hide(weights)).remove


def guard_packed(model: nn.Module, companions: Mapping[str, Sequence[Companion]]) -> Iterator[Step]:
    """Have quantised modules refuse to run while what they compute with is on disk.

    Yields what takes each guard off again, as soon as it is on.
    """
    for name, several in companions.items():
        module = model.get_submodule(name.rpartition(".")[0])
        refuse = partial(_refuse_evicted, name, tuple(several))
        yield module.register_forward_pre_hook(refuse).remove


def _refuse_evicted(
    name: str, companions: Sequence[Companion], _module: nn.Module, _args: object
) -> None:
    if not all(companion.there for companion in companions):
        raise UnsupportedModelError(
            f"the module of the quantised weight {name!r} was called while its block was not "
            "running, so its values are on disk. Call the model itself, or load it without "
            "pipeload."
        )


def _override(
    module: nn.Module, name: str, make: Callable[[weakref.ref[nn.Module]], Any]
) -> Iterator[Step]:
    # Weak: an attribute that holds its own module would keep a forgotten model alive.
    reference = weakref.ref(module)
    yield partial(take_off, reference, name)
    object.__setattr__(module, name, make(reference))


def take_off(reference: weakref.ref[nn.Module], name: str) -> None:
    """Take an instance attribute off a module that may be gone."""
    module = reference()
    if module is not None:
        module.__dict__.pop(name, None)


def _apply(reference: weakref.ref[nn.Module]) -> Callable[..., nn.Module]:
    """What `to`, `cuda`, `half`, `float` and their like come down to.

    Buffers are in memory, and become what plain ones do: `to` casts a bf16 model's fp32 ones.
    """

    def guarded(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = reference()
        if module is None:
            raise ReferenceError("the module is gone")
        for dtype, device in {(p.dtype, p.device) for p in module.parameters()}:
            _refuse_change(fn, torch.empty(0, dtype=dtype, device=device))
        for inner in module.modules() if recurse else (module,):
            for name, buffer in list(inner.named_buffers(recurse=False)):
                setattr(inner, name, fn(buffer))
        return module

    return guarded


def _refuse_change(fn: Callable[[torch.Tensor], torch.Tensor], sample: torch.Tensor) -> None:
    result = fn(sample)
    if result is not sample and (result.dtype, result.device) != (sample.dtype, sample.device):
        raise UnsupportedOperationError(
            f"this would turn {sample.dtype} on {sample.device} into {result.dtype} on "
            f"{result.device}, but the weights are streamed from disk as they are. Pass "
            f"dtype= to pipeload.from_pretrained instead. {_WAY_OUT} if everything fits "
            "in memory."
        )
    if result is not sample:
        raise UnsupportedOperationError(f"this would replace weights that are on disk. {_WAY_OUT}.")


def _refusal(what: str) -> Callable[[weakref.ref[nn.Module]], Callable[..., NoReturn]]:
    def make(_reference: weakref.ref[nn.Module]) -> Callable[..., NoReturn]:
        def refuse(*_args: object, **_kwargs: object) -> NoReturn:
            raise UnsupportedOperationError(f"{what} {_WAY_OUT}.")

        return refuse

    return make


def _resize(reference: weakref.ref[nn.Module]) -> Callable[..., object]:
    """Leaves a table of the size that is asked for as it is, and refuses any other."""

    def guarded(
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> object:
        module: Any = reference()
        table = module.get_input_embeddings()
        rows = table.weight.shape[0]
        wanted = rows if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if wanted != rows:
            # It would copy rows that are on disk, and make new ones from their mean.
            _refusal("resize_token_embeddings() would copy weights that are on disk.")(reference)()
        return table

    return guarded


_OVERRIDES: dict[str, Callable[[weakref.ref[nn.Module]], Any]] = {
    "_apply": _apply,
    "share_memory": _refusal("share_memory() needs all weights in memory."),
    "save_pretrained": _refusal(
        "save_pretrained() would write placeholders instead of weights. The checkpoint on disk is "
        "unchanged: copy it."
    ),
    "resize_token_embeddings": _resize,
    "compile": _refusal("compile() cannot trace weights that come and go."),
    "__deepcopy__": _refusal(
        "A streamed model cannot be copied: its weights are on disk. Load it twice instead."
    ),
    "__reduce_ex__": _refusal("A streamed model cannot be pickled: its weights are on disk."),
}


def _load_guard(weights: OwnWeights) -> Callable[..., None]:
    """Refuses a state dict that would change weights of the checkpoint; adapters may load.

    Saved adapters hold weights of the checkpoint, too, where they adapt embeddings or a head.
    """

    def check(
        module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_rest: object
    ) -> None:
        assigned = metadata.get("assign_to_params_buffers", False)
        for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            weight = weights.own.get(id(parameter))
            given = state.get(name)
            if weight is None or given is None or shows(given, parameter):
                continue
            if not _equal(given, parameter, weight, weights):
                raise UnsupportedOperationError(
                    f"load_state_dict() cannot change the weight {weight.name!r}: it comes from "
                    f"the checkpoint on disk. {_WAY_OUT}."
                )
            # Copying that does nothing, and does not count as a change.
            state[name] = parameter if assigned else OnDisk(parameter, name)

    return check


def _equal(given: object, parameter: nn.Parameter, weight: Weight, weights: OwnWeights) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and given.shape == parameter.shape
        and not given.is_meta
        and weights.readable(weight)
        and torch.equal(given.to(parameter.device, parameter.dtype), weights.read(weight))
    )
