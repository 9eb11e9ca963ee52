"""What `pipeload run` and `chat` were asked for, and the model and the answer that come of it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pipeload.cli.load_model import load_with
from pipeload.cli.log_lines import log
from pipeload.entry.drafting import AUTO, LOOKUP
from pipeload.serving.answer_text import StopAt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from pipeload.cli.answer import Answer
    from pipeload.cli.cooling import Cooling


OFF: Final = "off"
NO_MODELS: Final = frozenset({OFF, LOOKUP, AUTO})
"""What `--draft` takes beside a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What was typed behind the command."""

    model: str
    prompt: str
    memory_limit: str
    device: str = "cpu"
    host_memory_limit: str | None = None
    max_new_tokens: int
    tokens: int | None = None
    """The longest sequence to keep memory free for; None is what can come of the prompt."""
    system: str | None = None
    dtype: str = "auto"
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    draft: str = OFF
    session: Path | None = None
    """The file that a conversation is kept in."""
    io_mode: str = "auto"
    trace: Path | None = None
    exact_inputs: bool = False
    ranks: int | str | None = None
    max_temperature: float | None = None
    """In degrees Celsius."""
    chat_template: bool = True
    json: bool = False

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn, and not the likeliest taken."""
        asked = (self.seed, self.temperature or None, self.top_p, self.top_k)
        return any(value is not None for value in asked)


def with_seed(asked: Arguments, draw: Callable[[int], int] = secrets.randbelow) -> Arguments:
    """The same with a seed where tokens are drawn: one that is told, if none was given.

    `draw`: a number below another.
    """
    if not asked.samples or asked.seed is not None:
        return asked
    seed = draw(1 << 32)
    log.info("sampling, as --seed %d does again", seed)
    return replace(asked, seed=seed)


def load_asked(asked: Arguments, model: str) -> Any:
    """A model under the limit, and with the options, that were asked for."""
    more: dict[str, Any] = {}
    if model == asked.model:
        more = {"draft": asked.draft} if asked.ranks is None else {"ranks": asked.ranks}
    return load_with(model, asked, tokens=asked.tokens, exact_inputs=asked.exact_inputs, **more)


def generate_answer(
    model: Any,
    tokenizer: Any,
    inputs: dict[str, torch.Tensor],
    answer: Answer,
    asked: Arguments,
    *,
    more: dict[str, Any],
    cooling: Cooling | None = None,
) -> Any:
    """Have the library generate as it was asked for; `more` are further arguments of it.

    Returns what it gives. Where it samples, the caller has set the seed.
    """
    settings = {"repetition_penalty": asked.repetition_penalty, **more}
    if asked.samples:
        settings |= {name: getattr(asked, name) for name in ("temperature", "top_p", "top_k")}
    criteria: list[Any] = [] if cooling is None else [cooling]
    if asked.stop:
        prompt_tokens = inputs["input_ids"].shape[1]
        criteria.append(StopAt(tokenizer, asked.stop, prompt_tokens=prompt_tokens))
    settings["stopping_criteria"] = criteria or None
    return model.generate(
        **{name: values.to(model.device) for name, values in inputs.items()},
        **{name: value for name, value in settings.items() if value is not None},
        max_new_tokens=asked.max_new_tokens,
        do_sample=asked.samples,
        streamer=answer,
    )
