"""The options of `from_pretrained`, `wrap`, `streaming` and `plan`, as they were given.

A new one is a field here, its check in `request`, and a parameter of the functions that take it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class GivenOptions:
    """How models are to be streamed, unchecked. `pipeload.from_pretrained` says what each means."""

    memory_limit: int | str = "auto"
    tokens: int = 256
    batch: int = 1
    io_mode: str = "auto"
    readers: int | None = None
    pressure: str = "off"
    read_timeout: float | str | None = "auto"
    device: str | torch.device | None = None
    host_memory_limit: int | str | None = None
    exact_inputs: bool = False
    ranks: int | str | None = None
    draft: str | os.PathLike[str] | None = None
    disk_rate: float | None = None
    """Bytes per second to predict with; `pipeload.plan` alone takes it."""

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Self:
        """Those that are among a function's arguments, which may be its `locals()`."""
        return cls(**{name: arguments[name] for name in OPTIONS if name in arguments})


OPTIONS = tuple(field.name for field in fields(GivenOptions))
