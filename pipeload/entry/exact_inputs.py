"""Has a model's inputs never rounded, where its user wants none of the faster kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeload.errors import OptionError

if TYPE_CHECKING:
    from pipeload.entry.request import Request
    from pipeload.hf.pending_load import PendingLoad


def keep_inputs_exact(pending: PendingLoad, request: Request, *, lenient: bool) -> None:
    """Have inputs never rounded, if that was asked for. To be called before anything is planned.

    Raises:
        OptionError: they never are; with `lenient`, nothing then.
    """
    if request.exact_inputs and not pending.keep_inputs_exact() and not lenient:
        raise OptionError(
            f"exact_inputs=True, and no weight in {pending.folder!r} is packed in a form whose "
            "inputs may be rounded: they are exact anyway. Leave it out."
        )
