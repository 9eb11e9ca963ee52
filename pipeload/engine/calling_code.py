"""Who uses a tensor: it sees only what their call came down to."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import FrameType

MERGING = (("merge", "unmerge"), ("merge_adapter", "unmerge_adapter"))
"""Methods of an adapter's layer, and of the module around the whole model. The second of each pair
tells such a module from one that merges something else."""
_OURS = ("pipeload", "pipeload_hooks")
# Where packages are; torch may lie elsewhere than the rest.
_PACKAGES = (sysconfig.get_path("purelib"), str(Path(torch.__file__).parent.parent))
# Of the standard library, between a package's functions.
_BETWEEN = frozenset({"contextlib", "copy", "functools", "pickle", "typing_extensions"})


def name_call(function: Callable[..., Any]) -> str:
    """`function` as it is written, and which function of a library has come to it, if one has.

    Only the packages that called it in turn are gone through: the last one, and torch.
    """
    written = _written(function)
    package, outermost = "torch", None
    frame = _first_of_others()
    while frame is not None:
        name = _package_of(frame)
        if name not in _BETWEEN:
            if name != "torch" and package not in {"torch", name}:
                break
            if not frame.f_code.co_filename.startswith(_PACKAGES):
                break
            package, outermost = (package if name == "torch" else name), frame
        frame = frame.f_back
    if outermost is None:
        return written
    return f"{_package_of(outermost)}'s {outermost.f_code.co_name}()"


def has_all(value: object, names: Collection[str]) -> bool:
    """Whether its class has all these methods."""
    # Not itself: an adapter's model hands on what it does not know to the model inside.
    return all(callable(getattr(type(value), name, None)) for name in names)


def called_by_adapter() -> bool:
    """Whether a method of an adapter led to this call."""
    frame = _first_of_others()
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        if names[:1] == ("self",) and any(
            has_all(frame.f_locals.get("self"), pair) for pair in MERGING
        ):
            return True
        frame = frame.f_back
    return False


def makes_parameter() -> bool:
    """Whether it is the constructor of a parameter that made this call."""
    frame = _first_of_others()
    return frame is not None and frame.f_code is nn.Parameter.__new__.__code__


def _first_of_others() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way
    while frame is not None and _package_of(frame) in _OURS:
        frame = frame.f_back
    return frame


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _written(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", str(function))
    attribute = getattr(getattr(function, "__self__", None), "__name__", name)
    if name == "__get__":
        return f".{attribute}"
    return f"assigning .{attribute}" if name == "__set__" else f"{name}()"
