"""`pipeload run`: one prompt, the answer as it comes, and what it took."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pipeload
from pipeload._sizes import counted
from pipeload._text_tables import as_text
from pipeload.cli.answer import Answer
from pipeload.cli.cooling import Cooling
from pipeload.cli.draft import LOOKUP, OFF, draft_settings
from pipeload.cli.load_model import (
    check_model,
    load_with,
    traced,
)
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.progress_bar import first_pass
from pipeload.cli.prompt import encode
from pipeload.cli.run_report import count, describe_plan
from pipeload.entry.texts import check_tokens, load_tokenizer
from pipeload.errors import OptionError
from pipeload.ring.joining import wanted_size
from pipeload.serving.answer_text import StopAt

if TYPE_CHECKING:
    from collections.abc import Callable


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
    """The file that a chat is kept in."""
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


def run(asked: Arguments, *, debug: bool) -> None:
    """Print the answer to stdout and, unless quiet, the statistics to stderr.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option.
    """
    silence_libraries(debug=debug)
    with contextlib.ExitStack() as stack:
        if rank := _rank(asked.ranks):
            if asked.trace is not None:  # the others may write into the same folder
                asked = replace(asked, trace=Path(f"{asked.trace}.rank{rank}"))
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        _run(asked)


def _rank(ranks: int | str | None) -> int:
    """This process's place among those that share the model; 0 where it has it for itself.

    Raises:
        OptionError: as for `wanted_size`.
    """
    return int(os.environ["RANK"]) if wanted_size(ranks) > 1 else 0


def _run(asked: Arguments) -> None:
    check_model(asked.model, files=True)
    cooling = None if asked.max_temperature is None else Cooling(asked.max_temperature)
    if asked.draft not in {OFF, LOOKUP}:
        check_model(asked.draft, files=True)
    tokenizer = load_tokenizer(asked.model)
    inputs = encode(tokenizer, asked.prompt, system=asked.system, chat_template=asked.chat_template)
    prompt_tokens = int(inputs["input_ids"].shape[1])
    if asked.ranks is None:
        asked = with_seed(asked)
    else:
        torch.seed()
    started = time.perf_counter()
    asked = replace(asked, tokens=asked.tokens or prompt_tokens + asked.max_new_tokens)
    model = load_asked(asked, asked.model)
    if asked.ranks is not None:  # its ranks draw the same numbers from here on: those of rank 0
        asked = with_seed(asked, lambda most: int(torch.randint(most, ())))
    guesses = draft_settings(
        asked.draft, tokenizer, asked.model, partial(load_asked, replace(asked, dtype="auto"))
    )
    check_tokens(asked.model, model, int(inputs["input_ids"].max()))
    beyond = _warn_of_positions(model, prompt_tokens, asked.max_new_tokens)
    log.info("%s", describe_plan(pipeload.handle(model).plan))
    loaded = time.perf_counter()
    with traced(model, asked.trace), first_pass(model) as shown:
        answer = Answer(
            tokenizer,
            model,
            write=not asked.json,
            stops=asked.stop,
            on_first_token=shown.stop,
        )
        if asked.seed is not None:
            torch.manual_seed(asked.seed)
        try:
            generate_answer(model, tokenizer, inputs, answer, asked, more=guesses, cooling=cooling)
        except KeyboardInterrupt:  # what came until then is worth its figures
            if answer.tokens:
                answer.end()
                _report(asked, answer, prompt_tokens, loaded - started, loaded, cooling=cooling)
            raise
        except IndexError as error:
            if not beyond:
                raise
            raise OptionError(
                f"the model cannot go on behind its {beyond} positions. Give a shorter prompt, or "
                f"ask for fewer tokens: --max-new-tokens {max(1, beyond - prompt_tokens)}."
            ) from error
    _report(asked, answer, prompt_tokens, loaded - started, loaded, cooling=cooling)


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
    return load_with(
        model,
        asked,
        tokens=asked.tokens,
        exact_inputs=asked.exact_inputs,
        **({} if asked.ranks is None or model != asked.model else {"ranks": asked.ranks}),
    )


def _warn_of_positions(model: Any, prompt_tokens: int, new_tokens: int) -> int:
    """How many positions the model was made for, if the answer may go beyond; else 0."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions < prompt_tokens + new_tokens:
        return 0
    log.warning(
        "the model was made for %d positions: the prompt has %s, the answer may take %d more, and "
        "what lies beyond is likely to be wrong",
        positions,
        counted(prompt_tokens, "token"),
        new_tokens,
    )
    return positions


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


def _report(
    asked: Arguments,
    answer: Answer,
    prompt_tokens: int,
    load_seconds: float,
    loaded: float,
    *,
    cooling: Cooling | None,
) -> None:
    """`loaded`: when, by the clock that the answer looks at."""
    figures = count(
        answer.handle,
        answer.first_stats,
        prompt_tokens=prompt_tokens,
        new_tokens=answer.tokens,
        load_seconds=load_seconds,
        first_token_seconds=answer.first_token_at - loaded,
        later_seconds=answer.last_token_at - answer.first_token_at,
    )
    if asked.json:
        result: dict[str, object] = {"model": asked.model, "text": answer.text, "seed": asked.seed}
        result |= figures.as_dict() | ({} if cooling is None else cooling.as_dict())
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
        return
    if not answer.text.strip():
        came = counted(answer.tokens, "token")
        log.warning("the answer is empty: %s came, and no text before the end", came)
    log.info("%s", "\n" + figures.table())
    if cooling is not None:
        log.info("%s", as_text(cooling.rows()))
