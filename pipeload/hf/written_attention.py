"""Private parts of transformers: attention that its models write out, and where it is called.

Seen in 5.24.0. Each file of a model has a function of its own for it, of which many are the same.
Those that are known by their code are computed head by head where a model streams: see [Note:
scores head by head] in the lower layer's _head_by_head.py.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import sys
import textwrap
import threading
import weakref
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module

from pipeload.budget.attention_memory import Scores, few_scores
from pipeload.hf.marks import attention_of
from pipeload.hf.patched_name import Patch
from pipeload.weights.trial_thread import tried_apart
from pipeload_hooks import attend_head_by_head, is_watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME, _REPEAT = "eager_attention_forward", "repeat_kv"
_SINKS = {"b8de226491f8ac12": False, "ee73229d3ecfc9d0": True}
"""Functions that are known, by a digest of their code: whether they have sinks."""
_HALF = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_TRIED = ((5, 33, 65, 64), (3, 130, 200, 96))
"""Heads, rows, columns and width of products that are tried."""
_OURS = "pipeload_hooks"
_DIMENSIONS = 4

_served = weakref.WeakSet[nn.Module]()
"""Modules of models that stream whose attention is computed here."""
_seen = weakref.WeakSet[nn.Module]()
"""Copies of modules of which somebody may look at the probabilities."""
_patches: dict[str, Patch] = {}
_originals: dict[Any, Callable[..., Any]] = {}
"""What stands in the place of a function of the library's, and that."""
_lock = threading.Lock()


def serve(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Have attention of `model` computed head by head where it is written out and known.

    Yields what undoes that, which holds no model.
    """
    modules = _modules(model)
    for name in {_owner(module) for module in modules}:
        patch = _patch(name)
        yield patch.uninstall
        patch.install()
    references = [weakref.ref(module) for module in modules]
    yield partial(_forget, references)
    _served.update(modules)


class WrittenAttention:
    """How attention of a model computes once it is served: an `AttentionInUse`. Holds no model."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`dtype` is that of its activations."""
        self._modules = [weakref.ref(module) for module in _modules(model)]
        self._all = len(self._modules) == sum(map(_writes_attention, model.modules()))
        self._dtype = dtype

    def kept(self) -> Scores:
        """How many scores are there at once, as things stand."""
        modules = [module for reference in self._modules if (module := reference()) is not None]
        if not modules or not self._all or torch.is_autocast_enabled("cpu") or is_watched():
            return Scores.COPIED
        if not any(map(_is_chosen, modules)):
            return Scores.COPIED
        if any(_trains(module) or _casts(module, self._dtype) for module in modules):
            return Scores.COPIED
        apart = products_are_by_head(self._dtype) and not any(map(_is_observed, modules))
        return Scores.OF_A_HEAD if apart else Scores.ONCE

    @contextlib.contextmanager
    def tried(self, copied: nn.Module) -> Iterator[None]:
        """Inside, a copy of the model without weights computes as the model itself."""
        with contextlib.ExitStack() as undo:
            kept = self.kept()
            if kept is Scores.COPIED:
                yield
                return
            if kept is Scores.ONCE:
                _seen.update(copied.modules())
                undo.callback(_seen.difference_update, list(copied.modules()))
            for step in serve(copied):
                undo.callback(step)
            yield


def _forget(references: list[weakref.ref[nn.Module]]) -> None:
    for reference in references:
        if (module := reference()) is not None:
            _served.discard(module)


def _patch(name: str) -> Patch:
    with _lock:
        if name not in _patches:
            owner = sys.modules[name]
            original = getattr(owner, _NAME)
            replacement = _replacement(original)
            _originals[replacement] = original
            _patches[name] = Patch(owner, _NAME, replacement)
        return _patches[name]


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    sinks = _SINKS[_digest(original)]

    @functools.wraps(original)
    def attend(  # noqa: PLR0917 - the library's own arguments
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        fits = module in _served and _fits(query, key, value, attention_mask)
        if fits and not (dropout and module.training) and not _casts(module, query.dtype):
            repeat = vars(sys.modules[original.__module__])[_REPEAT]
            groups = module.num_key_value_groups
            apart = products_are_by_head(query.dtype) and not _is_observed(module)
            return attend_head_by_head(
                query,
                repeat(key, groups),
                repeat(value, groups),
                partial(_probabilities, module if sinks else None, attention_mask, scaling),
                sinks=sinks,
                apart=apart and not kwargs.get("output_attentions"),
            )
        result: tuple[Tensor, Tensor | None] = original(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
        return result

    return attend


def _casts(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether scores become another dtype beside the module's sinks, if it has any."""
    sinks = getattr(module, "sinks", None)
    return sinks is not None and sinks.dtype is not dtype


def _is_chosen(module: nn.Module) -> bool:
    """Whether what it writes out is what it computes by."""
    return attention_of(getattr(module, "config", None)) == "eager"


def _trains(module: nn.Module) -> bool:
    """Whether it may drop some of its probabilities."""
    return module.training and bool(getattr(module, "attention_dropout", 0))


def _probabilities(  # noqa: PLR0917 - the last three are those that the lower layer gives
    module: Any, mask: Tensor | None, scaling: float, scores: Tensor, sequence: int, head: int
) -> Tensor:
    """Make probabilities of one head's scores: step by step what the library does with all."""
    made = scores * scaling
    if mask is not None:
        made = made + mask[sequence % mask.shape[0], head % mask.shape[1]]
    if module is None:
        return functional.softmax(made, dim=-1, dtype=torch.float32).to(scores.dtype)
    sink = module.sinks.reshape(-1, 1)[head].expand(made.shape[0], 1)
    made = torch.cat([made, sink], dim=-1)
    made = made - made.max(dim=-1, keepdim=True).values
    return functional.softmax(made, dim=-1, dtype=made.dtype)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether a call is one of those that are computed here, and worth it."""
    tensors = [query, key, value] if mask is None else [query, key, value, mask]
    if not all(
        type(tensor) is Tensor
        and tensor.dim() == _DIMENSIONS
        and tensor.dtype is query.dtype
        and tensor.device.type in {"cpu", "meta"}
        for tensor in tensors
    ):
        return False
    batch, heads, rows, _ = query.shape
    columns = key.shape[2]
    if mask is not None and (
        mask.shape[2:] != (rows, columns)
        or mask.shape[0] not in {1, batch}
        or mask.shape[1] not in {1, heads}
    ):
        return False
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return not (
        few_scores(batch * heads * rows * columns)
        or trained
        or torch.is_autocast_enabled("cpu")
        or (is_watched() and not query.is_meta)
    )


def _modules(model: nn.Module) -> list[nn.Module]:
    """List the parts of a model whose attention is known."""
    return [module for module in model.modules() if _writes_attention(module) and _known(module)]


def _writes_attention(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and _NAME in code.co_names


def _known(module: nn.Module) -> bool:
    function = inspect.unwrap(type(module).forward).__globals__.get(_NAME)
    original = _originals.get(function, function)
    if not isinstance(original, FunctionType) or hasattr(original, "__wrapped__"):
        return False  # somebody else's
    fits = isinstance(getattr(module, "num_key_value_groups", None), int)
    digest = _digest(original)
    return fits and digest in _SINKS


def _owner(module: nn.Module) -> str:
    """Name the Python module whose function an attention module calls."""
    return str(inspect.unwrap(type(module).forward).__globals__["__name__"])


def _is_observed(module: nn.Module) -> bool:
    """Whether anybody may look at the probabilities that it gives beside its output."""
    if module in _seen:
        return True
    every = torch_module._global_forward_hooks
    hooks = (*every.values(), *module._forward_hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_OURS) for hook in hooks)


@functools.lru_cache(maxsize=256)
def _digest(function: Callable[..., Any]) -> str:
    """What tells functions of the same code: names of types, comments and blanks apart."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    if not isinstance(node, ast.FunctionDef):
        return ""
    node.returns = None
    for argument in ast.walk(node):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    if ast.get_docstring(node) is not None:
        del node.body[0]
    return hashlib.sha256("".join(ast.unparse(node).split()).encode()).hexdigest()[:16]


def products_are_by_head(dtype: torch.dtype) -> bool:
    """Whether torch multiplies one head after the other here, so that one alone has its bits."""
    supported = getattr(torch.ops.mkldnn, _HALF.get(dtype, ""), None)
    if supported is None or supported():
        return False
    return _are_by_head(dtype, torch.get_num_threads())


@functools.lru_cache(maxsize=16)
def _are_by_head(dtype: torch.dtype, threads: int) -> bool:
    return tried_apart(threads, _try, dtype)


def _try(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for heads, rows, columns, width in _TRIED:
            sizes = (1, rows, heads, width), (1, heads, columns, width)
            query, key = (
                torch.randn(size, generator=generator, device="cpu").to(dtype) for size in sizes
            )
            scores = torch.matmul(query.transpose(1, 2), key.transpose(2, 3))
            output = torch.matmul(scores, key)
            for head in range(heads):
                one = torch.mm(query[0, :, head], key[0, head].T)
                if not torch.equal(one, scores[0, head]):
                    return False
                if not torch.equal(torch.mm(one, key[0, head]), output[0, head]):
                    return False
    return True
