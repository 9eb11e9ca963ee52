"""Tells when modules are put into a tree of modules, or around a part of it, as adapters are.

torch calls its registration hooks in the whole process. One of them is registered, once, and stays:
taking it off while another thread builds a module could end that thread's walk over the hooks.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_lock = threading.RLock()
"""Re-entrant: a tree may be collected, and its watch closed, by the thread that holds it."""
_watches: tuple[TreeWatch, ...] | None = None
"""None before the first one; replaced, never changed: other threads go through it."""


class TreeWatch:
    """Watches the tree below a module, which it holds weakly, until that is gone or `close`."""

    def __init__(self, root: nn.Module, grown: Callable[[nn.Module, bool], None]) -> None:
        """Call `grown(module, inside)` for modules that are new.

        `inside`: it has come into the tree. Else it was given `root` or a part of the tree to hold;
        it is not complete then, since that happens in constructors, and may come into the tree
        later. `grown` is a method, held weakly: what it belongs to may hold weights, and they
        would outlive `root` until the collector runs once more.
        """
        self._inside: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._around: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
        self._grown = weakref.WeakMethod(grown)
        self._root = weakref.ref(root)
        for module in root.modules():
            self._inside[id(module)] = module
        _add(self)
        self._end = weakref.finalize(root, self.close)
        self._end.atexit = False

    def close(self) -> None:
        """Watch no more. May be called again."""
        global _watches  # noqa: PLW0603 - torch's hooks are global, too
        self._end.detach()
        with _lock:
            _watches = tuple(watch for watch in _watches or () if watch is not self)

    def saw(self, parent: nn.Module, child: nn.Module) -> None:
        """`child` is about to become one of `parent`'s children."""
        known, held = self._knows(parent), self._knows(child)
        if known and not held:
            for module in child.modules():
                if not self._knows(module):
                    self._inside[id(module)] = module
                    self._tell(module, inside=True)
        elif not known and (held or self._around.get(id(child)) is child):
            if isinstance(parent, _CONTAINERS):
                return  # libraries make such lists in every pass, to go through a part of another
            if not held or child is self._root():
                self._around[id(parent)] = parent
            self._tell(parent, inside=False)

    def _tell(self, module: nn.Module, *, inside: bool) -> None:
        if (grown := self._grown()) is not None:
            grown(module, inside)

    def _knows(self, module: nn.Module) -> bool:
        return self._inside.get(id(module)) is module


def _add(watch: TreeWatch) -> None:
    global _watches  # noqa: PLW0603 - torch's hooks are global, too
    with _lock:
        if _watches is None:
            register_module_module_registration_hook(_registered)
        _watches = (*(_watches or ()), watch)


def _registered(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    if child is not None:
        for watch in _watches or ():
            watch.saw(parent, child)
