"""Has the rows of a lookup table made real just before they are looked up."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class RowSource(Protocol):
    """Makes rows of a table real while its module runs."""

    def rows_wanted(self, ids: torch.Tensor) -> None:
        """Return once the module's weight holds the rows `ids` (any shape). May read the disk.

        Ids that name no row are left to the module. May be called again before `rows_done`.
        """

    def rows_done(self) -> None:
        """The module has run. Must do nothing when no rows were wanted."""


def attach_rows(module: nn.Module, source: RowSource) -> tuple[RemovableHandle, ...]:
    """Have `source` called around every call of `module`, for which `takes_ids` must hold.

    `rows_done` also runs when the forward raises an Exception, but not for a KeyboardInterrupt:
    torch skips its hooks then, so the source must recover by itself at the next `rows_wanted`.
    """
    name = list(inspect.signature(type(module).forward).parameters)[1]
    wanted: list[tuple[torch.Tensor, int] | None] = [None]

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wanted[0] = None
        ids = args[0] if args else kwargs.get(name)
        if isinstance(ids, torch.Tensor):
            source.rows_wanted(ids)
            wanted[0] = (ids, version_of(ids))

    def leave(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> object:
        before, wanted[0] = wanted[0], None
        ids = args[0] if args else kwargs.get(name)
        try:
            if output is None or not isinstance(ids, torch.Tensor):
                return None
            if before is not None and before[0] is ids and before[1] == version_of(ids):
                return None
            # Another pre-hook, run after ours, has put other ids in their place.
            source.rows_wanted(ids)
            return module.forward(*args, **kwargs)
        finally:
            source.rows_done()

    return (
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
        # First, too: no other hook may see what was looked up with the wrong rows.
        module.register_forward_hook(leave, prepend=True, with_kwargs=True, always_call=True),
    )


def version_of(ids: torch.Tensor) -> int:
    """Rises with every change in place; inference tensors do not count theirs."""
    return 0 if ids.is_inference() else ids._version
