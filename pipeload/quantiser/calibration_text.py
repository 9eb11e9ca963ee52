"""The text that a model reads to tell which inputs are large, cut into windows of tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeload.entry.texts import check_tokens, load_tokenizer, read_text
from pipeload.errors import OptionError

if TYPE_CHECKING:
    import os

BUILTIN = "builtin"
OFF = "off"
TOKENS = 4096
"""Read where nobody says: half of them do as well, four times as many do no better."""
WINDOW = 512
"""The most tokens that are seen at once."""
_BUILTIN_FILE = Path(__file__).with_name("calibration.txt")


class CalibrationText(NamedTuple):
    """What is read, and how much of it."""

    name: str
    """For people: not where on somebody's machine it is."""
    text: str
    most_tokens: int

    @property
    def digest(self) -> str:
        """SHA-256, hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def request(self) -> dict[str, object]:
        """What makes it another text, or another run; JSON."""
        return {"text": self.digest, "tokens": self.most_tokens, "window": WINDOW}

    def describe(self, tokens: int) -> str:
        """For the model card, when so many tokens of it were read."""
        return f"{tokens} tokens of {self.name}, SHA-256 `{self.digest}`"

    def windows(self, pretrained: str, model: Any, **options: Any) -> torch.Tensor:
        """The text as the model's tokenizer reads it: int64 of [windows, tokens], all as long.

        A few of the last tokens may be left out for that. `options` go to the library.

        Raises:
            CheckpointError: there is no tokenizer, or it is another model's.
            OptionError: the text makes no token.
        """
        found = load_tokenizer(pretrained, **options)(self.text, verbose=False)["input_ids"]
        ids = torch.tensor(found[: self.most_tokens], dtype=torch.int64)
        if not len(ids):
            raise OptionError(
                f"the tokenizer of {pretrained!r} makes no token of the text {self.name!r}. Give "
                "another text."
            )
        check_tokens(pretrained, model, int(ids.max()))
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        count = -(-len(ids) // min(WINDOW, positions or WINDOW))
        length = len(ids) // count
        return ids[: count * length].view(count, length)


def find_text(
    calibrate: str | os.PathLike[str] | None, most_tokens: int | None
) -> CalibrationText | None:
    """What is to be read; None if nothing is.

    Args:
        calibrate: a file, "builtin", "off" or None.
        most_tokens: of it; None is `TOKENS`.

    Raises:
        OptionError: the file cannot be read, or no tokens are wanted.
    """
    if calibrate is None or calibrate == OFF:
        if most_tokens is not None:
            raise OptionError(
                f"calibration_tokens={most_tokens} would change nothing without a text. Leave it "
                'out, or give calibrate="builtin" or a file.'
            )
        return None
    most = TOKENS if most_tokens is None else most_tokens
    if most < 1:
        raise OptionError(f"calibration_tokens={most} is no text at all. Give at least 1.")
    if calibrate == BUILTIN:
        return CalibrationText("the text that comes with pipeload", _builtin(), most)
    path = Path(calibrate)
    return CalibrationText(path.name, read_text(path), most)


def _builtin() -> str:
    return _BUILTIN_FILE.read_text(encoding="utf-8")
