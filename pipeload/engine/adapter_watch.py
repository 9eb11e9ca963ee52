"""Adapters that others put on a streamed model, before it is streamed or later.

They are known by what they do, not by their classes: modules that are put into the tree, around a
part of it, or that can merge something into weights and take it out again.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from pipeload.engine.calling_code import MERGING, has_all
from pipeload.engine.guarded_methods import take_off
from pipeload.engine.teardown import Undo
from pipeload.errors import UnsupportedOperationError
from pipeload_hooks import TreeWatch, is_placeholder

if TYPE_CHECKING:
    from torch import nn

    from pipeload.engine.own_weights import OwnWeights

_ALL_AT_ONCE = "merge_and_unload"


class Adapters:
    """Refuses merging, and what was made of weights while they were on disk."""

    def __init__(self, model: nn.Module, weights: OwnWeights) -> None:
        """Of a `model` that streams. Nothing is done before `watch`."""
        self.present = False
        """Whether there may be any: what a pass reads then depends on which are active."""
        self._unchecked = True
        self._model = weakref.ref(model)
        self._own = weights.own
        self._undo = Undo()
        self._tree: TreeWatch | None = None

    def watch(self, root: nn.Module) -> None:
        """Look at `root`, and from now on at whatever is added to the model, which is inside."""
        for module in root.modules():
            self._meet(module)
        if (model := self._model()) is not None:
            self._tree = TreeWatch(model, self._grown)

    def check(self) -> None:
        """Look at what is new since the last time. To be called before a pass.

        Raises:
            UnsupportedOperationError: it was computed from weights that were on disk.
        """
        model = self._model()
        if not (self.present and self._unchecked) or model is None:
            return
        for name, parameter in model.named_parameters():
            if id(parameter) not in self._own and _has_nan(parameter):
                raise UnsupportedOperationError(
                    f"{name!r} is NaN: it was computed from a weight that is on disk. Load values "
                    "for it (a saved adapter's), or delete the adapter, call handle.remove() "
                    "(pipeload.handle(model).remove()), make it on the plain model, then stream "
                    "that with pipeload.wrap(model)."
                )
        self._unchecked = False

    def remove(self) -> None:
        """Allow everything again. May be called again."""
        if self._tree is not None:
            self._tree.close()
        self._undo()

    def _grown(self, module: nn.Module, inside: bool) -> None:
        if inside:
            self.present = self._unchecked = True
        self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        names = [name for pair in MERGING for name in pair if has_all(module, pair)]
        if not names:
            return
        self.present = True
        if has_all(module, (_ALL_AT_ONCE,)):
            names.append(_ALL_AT_ONCE)
        for name in names:
            self._undo.push(partial(take_off, weakref.ref(module), name))
            object.__setattr__(module, name, partial(_refuse_merging, name))


def _has_nan(parameter: nn.Parameter) -> bool:
    if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
        return False
    if is_placeholder(parameter):
        return False  # of another model that streams, which is a part of this one
    return bool(parameter.detach().amax().isnan())  # takes no memory, unlike isnan().any()


def _refuse_merging(name: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise UnsupportedOperationError(
        f"{name}() would change weights that are on disk. Call handle.remove() first to get the "
        "plain model back (pipeload.handle(model).remove()) and merge there; what was merged is "
        "streamed again with pipeload.wrap(model, spill_dir=FOLDER)."
    )
