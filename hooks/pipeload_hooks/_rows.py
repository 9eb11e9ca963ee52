"""Has the rows of a lookup table made real just before they are looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pipeload_hooks._ids import attach_ids

if TYPE_CHECKING:
    import torch
    from torch import nn
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
    return attach_ids(module, 0, source.rows_wanted, source.rows_done)
