"""`--draft`: tokens that something small guesses, and one pass of the model checks.

Speculative decoding (Leviathan, Kalman and Matias, Fast Inference from Transformers via Speculative
Decoding, 2023) is transformers' own; where the disk is what a pass waits for, it divides that wait
by the tokens that each pass keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pipeload.cli.log_lines import log
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

OFF: Final = "off"
LOOKUP: Final = "lookup"
_LOOKED_UP = 10
"""Tokens that followed the latest ones where these stood before: the library's usual number."""


def draft_settings(
    draft: str, tokenizer: Any, target: str, load: Callable[[str], Any]
) -> dict[str, Any]:
    """What `generate` is to be given for a draft.

    Args:
        draft: a model's folder or name, `LOOKUP`, or `OFF`.
        tokenizer: the target's.
        target: the name of the model that checks.
        load: loads the draft, under the limit that both share.

    Raises:
        OptionError: the draft has other tokens than the target.
        PipeloadError: it cannot be loaded.
    """
    if draft == OFF:
        return {}
    if draft == LOOKUP:
        return {"prompt_lookup_num_tokens": _LOOKED_UP}
    theirs, ours = load_tokenizer(draft).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        raise OptionError(
            f"the draft {draft!r} has other tokens than {target!r} ({len(theirs)} and {len(ours)} "
            "are known to them). Use a model of the same family, such as the model's own copy by "
            "`pipeload quantize`."
        )
    model = load(draft)
    log.info("drafts by %s", draft)
    return {"assistant_model": model}
