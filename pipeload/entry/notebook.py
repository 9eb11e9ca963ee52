"""`%load_ext pipeload` and `%pipeload 4GB`: every model that a notebook loads is streamed."""

from __future__ import annotations

from typing import Any

from pipeload.entry import api
from pipeload.errors import PipeloadError
from pipeload.hf.takeover import current_intercept

_USAGE = "%pipeload 4GB streams every model loaded from here on, %pipeload off ends it."


def pipeload(line: str) -> None:
    """Stream every model that is loaded from now on within a memory limit.

    `%pipeload 4GB` sets the limit ("4GiB", "50%" and "auto" work, too), also that of models which
    stream already. `%pipeload off` loads models plainly again; those that stream go on streaming.
    `%pipeload` says what is in force.
    """
    limit = line.strip()
    try:
        if limit == "off":
            api.stream_everywhere(None)
        elif limit:
            api.stream_everywhere(limit)
    except PipeloadError as error:
        print(f"error: {error}")  # noqa: T201 - a notebook shows one line, not a traceback
        return
    print(_state())  # noqa: T201 - the cell's output


def _state() -> str:
    from pipeload._sizes import format_size

    intercept: Any = current_intercept()
    if intercept is None:
        return f"Models are loaded plainly. {_USAGE}"
    limit = intercept.request.options.memory_limit
    return f"Models are streamed within {format_size(limit)} ({limit} bytes) for this process."


def let_go(result: Any) -> None:
    """Cut the traceback of an interrupted cell short; called when a cell has run, and shown it.

    IPython keeps the last one for %debug. Through it, an interrupted `generate()` would hold its
    model and cache within the limit, and a model loaded in its place would find little room.
    Clearing its frames is not enough: they keep their functions, and those what they close over.
    """
    error = result.error_in_exec
    if not isinstance(error, KeyboardInterrupt | PipeloadError):
        return
    while error is not None:
        entry = error.__traceback__
        while entry is not None:
            entry.tb_next, entry = None, entry.tb_next
        error = error.__cause__ or error.__context__


def load(shell: Any) -> None:
    """Add the magic to an IPython shell."""
    shell.register_magic_function(pipeload, "line", "pipeload")
    shell.events.register("post_run_cell", let_go)


def unload(shell: Any) -> None:
    """Take it away again; models are loaded plainly from then on."""
    api.stream_everywhere(None)
    shell.magics_manager.magics["line"].pop("pipeload", None)
    shell.events.unregister("post_run_cell", let_go)
