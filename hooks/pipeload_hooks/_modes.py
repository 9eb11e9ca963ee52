"""Modes of torch functions that are active in a thread while a pass runs there."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class PassMode(TorchFunctionMode):
    """On a thread's stack of modes from `begin` to `discard`, which may be called out of order.

    A pass that died leaves it there: `discard_ended` finds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active = True

    def begin(self) -> None:
        """Put it on this thread's stack of modes."""
        self.active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def discard(self) -> None:
        """End it, and take it off this thread's stack of modes."""
        self.end()
        discard_ended()

    def end(self) -> None:
        """Let everything pass from now on.

        In another thread, where a pass that died may have left it, it stays behind and does nothing
        until `discard_ended` is called there.
        """
        self.active = False


def discard_ended() -> None:
    """Take all modes that have ended off this thread's stack of modes."""
    modes = modes_of_thread()
    ended = [index for index, mode in enumerate(modes) if _has_ended(mode)]
    if not ended:
        return
    for _ in modes[ended[0] :]:
        torch._C._pop_torch_function_stack()
    for mode in modes[ended[0] :]:
        if not _has_ended(mode):
            torch._C._push_on_torch_function_stack(mode)


def modes_of_thread() -> list[object]:
    """All modes of torch functions on this thread's stack, the outermost first."""
    depth = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(index) for index in range(depth)]


def _has_ended(mode: object) -> bool:
    return isinstance(mode, PassMode) and not mode.active
