"""Run a Hugging Face model that is larger than memory: layers stream from disk, exactly."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipeload.entry import everywhere
from pipeload.errors import (
    CheckpointChangedError,
    CheckpointError,
    GroupError,
    MemoryLimitError,
    OptionError,
    PipeloadError,
    ReadError,
    UnsupportedModelError,
    UnsupportedOperationError,
)
from pipeload.system import on_import

if TYPE_CHECKING:
    from typing import Any

    from pipeload.budget.plan import Plan
    from pipeload.engine.handle import Handle
    from pipeload.engine.stats import Stats
    from pipeload.entry.api import from_pretrained, handle, plan, streaming, wrap
    from pipeload.entry.many import generate_many
    from pipeload.entry.smallest_limit import smallest_limit
    from pipeload.quantiser.convert import convert
    from pipeload.quantiser.quantise import quantize

__version__ = "0.1.0"
__all__ = [
    "CheckpointChangedError",
    "CheckpointError",
    "GroupError",
    "Handle",
    "MemoryLimitError",
    "OptionError",
    "PipeloadError",
    "Plan",
    "ReadError",
    "Stats",
    "UnsupportedModelError",
    "UnsupportedOperationError",
    "convert",
    "from_pretrained",
    "generate_many",
    "handle",
    "plan",
    "quantize",
    "smallest_limit",
    "streaming",
    "wrap",
]

# Loaded when first asked for: importing pipeload imports neither torch nor transformers.
_HOMES = {
    "Handle": "pipeload.engine.handle",
    "Plan": "pipeload.budget.plan",
    "Stats": "pipeload.engine.stats",
    "convert": "pipeload.quantiser.convert",
    "from_pretrained": "pipeload.entry.api",
    "generate_many": "pipeload.entry.many",
    "handle": "pipeload.entry.api",
    "plan": "pipeload.entry.api",
    "quantize": "pipeload.quantiser.quantise",
    "smallest_limit": "pipeload.entry.smallest_limit",
    "streaming": "pipeload.entry.api",
    "wrap": "pipeload.entry.api",
}


def _register_quantizer() -> None:
    import pipeload.formats.integers.quantizer  # noqa: F401 - registers


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeload' has no attribute {name!r}")
    import importlib
    import sys

    home = _HOMES[name]
    room = home.startswith("pipeload.entry.")
    # Not where it has been done: pages of libraries that are given back are read again.
    first = ("pipeload.entry.api" if room else home) not in sys.modules
    if first and (room or home.startswith("pipeload.quantiser.")):
        _import_torch()
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def _import_torch() -> None:
    """Import torch by itself, and give back what only that needed: the peak of the rest is lower.

    Starting it reads some 70 MB of its libraries; importing the models then needs 110 MB more. How
    many kernels torch keeps is said now: it asks once, when it first multiplies.
    """
    import torch  # noqa: F401

    from pipeload.system.library_pages import lower_floor
    from pipeload.system.memory import keep_few_kernels

    keep_few_kernels()
    lower_floor()


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext pipeload` in a notebook: adds `%pipeload 4GB`."""
    _import_torch()
    from pipeload.entry import notebook

    notebook.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext pipeload` in a notebook: models are loaded plainly from then on."""
    from pipeload.entry import notebook

    notebook.unload(shell)


# Then plain `from_pretrained` loads what `quantize` has made.
on_import.when_imported("transformers.quantizers.auto", _register_quantizer)

# "auto" is what the variable says; it is read, and refused if it means nothing, when a model loads.
if os.environ.get("PIPELOAD_MEMORY_LIMIT"):
    everywhere.stream_when_imported("auto")
