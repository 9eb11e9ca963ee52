"""Does something as soon as a module has been imported, and nothing as long as it is not."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` once the module `name` has run: now if it has, else when it is first imported."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        act()
    else:
        sys.meta_path.insert(0, _Finder(name, act))


class _Finder(MetaPathFinder):
    """Finds one module, as the import system does, and follows its execution."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            # On the object: the module keeps a loader of its own kind, and its source.
            vars(spec.loader)["exec_module"] = self._followed(spec.loader)
        return spec

    def _followed(self, loader: Loader) -> Callable[[ModuleType], None]:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act()
            # Not before: where that raises, the import has failed, and the next one tries again.
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        return exec_module
