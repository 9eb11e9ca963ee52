"""Parameters that hold their values at times: what sites, tables and experts have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from pipeload_hooks import Binding


class Evictable:
    """Parameters of a module, and how they are used from outside while they are evicted."""

    def __init__(self, binding: Binding) -> None:
        """`binding` puts values into them and takes them out."""
        self._binding = binding

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that may be evicted, by name."""
        return self._binding.parameters

    def arm(self) -> None:
        """Have it seen from now on how parameters are used from outside."""
        self._binding.arm()

    def disarm(self) -> None:
        """Have nothing seen any more, and nothing changed."""
        self._binding.disarm()
