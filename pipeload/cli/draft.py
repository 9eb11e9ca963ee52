"""`--draft` where several machines share a model: tokens that something small guesses.

On one machine `pipeload.from_pretrained(draft=...)` does it, and follows the clock. Ranks have a
clock each, and all have to guess the same: there, the library's own numbers of guesses hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeload.cli.asked import OFF
from pipeload.cli.log_lines import log
from pipeload.entry.draft_search import check_same_tokens
from pipeload.entry.drafting import AUTO, LOOKUP
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeload.cli.asked import Arguments

_LOOKED_UP = 10
"""Tokens that followed the latest ones where these stood before: the library's usual number."""


def draft_settings(asked: Arguments, model: Any, load: Callable[[str], Any]) -> dict[str, Any]:
    """What `generate` is to be given for a draft on ranks.

    Args:
        asked: what was typed.
        model: that checks.
        load: loads the draft, under the limit that both share.

    Raises:
        OptionError: the draft has other tokens than the target, or is to be looked for.
        PipeloadError: it cannot be loaded.
    """
    draft = asked.draft
    if draft == OFF or asked.ranks is None:
        return {}
    if draft == LOOKUP:
        return {"prompt_lookup_num_tokens": _LOOKED_UP}
    if draft == AUTO:
        raise OptionError(
            "--draft auto goes with no --ranks: each would find its own. Name the draft's folder."
        )
    check_same_tokens(draft, asked.model, model)
    made = load(draft)
    log.info("drafts by %s", draft)
    return {"assistant_model": made}
