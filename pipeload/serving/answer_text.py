"""The text of an answer: letters as soon as they are sure, and where it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens more than the longest stop has bytes: where a window of them begins, letters may be cut.
_TOKENS_MORE = 8
_LACKS_BYTES = "\N{REPLACEMENT CHARACTER}"
_MOST_LACKING = 3  # the first bytes of a character, each shown by itself
_LONGEST_CLEANED = 4  # " n't": what tokenizers that clean up take the space from


class TextSoFar:
    """Decodes tokens as they come: gives text as soon as no later token can change it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._line: list[int] = []
        """The tokens of the last line, after one of the line before."""
        self._settled = 0
        """How many letters of what they decode to were given."""

    def add(self, tokens: list[int]) -> str:
        """The letters that these tokens have made sure."""
        self._line += tokens
        text = self._decoded()
        given = self._give(text, self._settled_in(text))
        if text.endswith("\n"):  # decoding the whole again and again would take ever longer
            del self._line[:-1]
            self._settled = len(self._decoded())
        return given

    def end(self) -> str:
        """What is left: no token comes any more."""
        text = self._decoded()
        given = self._give(text, len(text))
        self._line.clear()
        self._settled = 0
        return given

    def _give(self, text: str, settled: int) -> str:
        before, self._settled = self._settled, settled
        return text[before:settled]

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(self._line, skip_special_tokens=True)
        return text

    def _settled_in(self, text: str) -> int:
        """How many letters stay whatever comes: a character may lack bytes, a space may go."""
        whole = text.rstrip(_LACKS_BYTES)
        length = max(len(whole), len(text) - _MOST_LACKING)
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            space = whole.rfind(" ", max(0, length - _LONGEST_CLEANED))
            length = length if space < 0 else space
        return max(self._settled, length)


def end_tokens(model: Any) -> frozenset[int]:
    """The tokens with which its answers end."""
    ends = model.generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])


class StopAt(transformers.StoppingCriteria):
    """Ends the answer when the tokens so far hold one of the texts.

    The library's own criterion first works through the whole vocabulary, in memory that no limit
    was planned with.
    """

    keeps_nothing = True
    """From one call to the next that a request which is begun again would miss."""
    takes_several = True
    """It sees what has come since the last call, not the latest token alone."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], *, prompt_tokens: int) -> None:
        self._tokenizer, self._stops, self._prompt = tokenizer, stops, prompt_tokens
        # Every token is a byte at least.
        self._window = max(len(stop.encode()) for stop in stops) + _TOKENS_MORE
        self._seen = 0
        """Tokens at the last call: a pass of guessed ones brings several."""

    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        """Whether to end each; `ids` is int64, `[answers, tokens]`."""
        length = ids.shape[1]
        before = self._seen if self._seen < length else 0  # begun again
        self._seen = length
        texts = map(self._tokenizer.decode, ids[:, max(self._prompt, before - self._window) :])
        found = [any(stop in text for stop in self._stops) for text in texts]
        return torch.tensor(found, device=ids.device)


class Cut:
    """Lets text through up to the first of some stops, however it is cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._found = False

    def add(self, text: str, *, end: bool) -> str:
        """What can be shown now: not what may turn out to begin a stop, before the `end`."""
        if self._found:
            return ""
        text = self._held + text
        # The one that is whole first: there the answer ends, whatever might have come.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        self._found = bool(found)
        kept = min(found)[1] if found else len(text) - (0 if end else self._begun(text))
        self._held = text[kept:]
        return text[:kept]

    def _begun(self, text: str) -> int:
        """How many of the last letters may begin a stop."""
        longest = max(map(len, self._stops), default=0)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(s.startswith(text[-n:]) for s in self._stops)), 0)
