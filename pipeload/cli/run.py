"""`pipeload run`: one prompt, the answer as it comes, and what it took."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pipeload
from pipeload._sizes import counted
from pipeload._text_tables import as_text
from pipeload.cli.answer import Answer
from pipeload.cli.asked import NO_MODELS, generate_answer, load_asked, with_seed
from pipeload.cli.conversation import Conversation
from pipeload.cli.conversation_file import tokens_kept
from pipeload.cli.cooling import Cooling
from pipeload.cli.draft import draft_settings
from pipeload.cli.load_model import check_model, traced
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.progress_bar import first_pass
from pipeload.cli.prompt import encode
from pipeload.cli.run_report import count, describe_plan
from pipeload.entry.texts import check_tokens, load_tokenizer
from pipeload.errors import OptionError
from pipeload.ring.joining import rank_here

if TYPE_CHECKING:
    from pipeload.cli.asked import Arguments


def run(asked: Arguments, *, debug: bool) -> None:
    """Print the answer to stdout and, unless quiet, the statistics to stderr.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option.
    """
    silence_libraries(debug=debug)
    with contextlib.ExitStack() as stack:
        if rank := rank_here(asked.ranks):
            if asked.trace is not None:  # the others may write into the same folder
                asked = replace(asked, trace=Path(f"{asked.trace}.rank{rank}"))
            nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
        _run(asked)


def _run(asked: Arguments) -> None:
    check_model(asked.model, files=True)
    cooling = None if asked.max_temperature is None else Cooling(asked.max_temperature)
    if asked.draft not in NO_MODELS:
        check_model(asked.draft, files=True)
    tokenizer = load_tokenizer(asked.model)
    inputs = encode(tokenizer, asked.prompt, system=asked.system, chat_template=asked.chat_template)
    prompt_tokens = int(inputs["input_ids"].shape[1])
    started = time.perf_counter()
    given = prompt_tokens + (tokens_kept(asked.session, tokenizer) if asked.session else 0)
    asked = replace(asked, tokens=asked.tokens or given + asked.max_new_tokens)
    asked, model = _load(asked)
    guesses = draft_settings(asked, model, partial(load_asked, replace(asked, dtype="auto")))
    check_tokens(asked.model, model, int(inputs["input_ids"].max()))
    beyond = _warn_of_positions(model, given, asked.max_new_tokens)
    log.info("%s", describe_plan(pipeload.handle(model).plan))
    talk = _taken_up(model, tokenizer, asked)
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
            if talk is None:
                generate_answer(
                    model, tokenizer, inputs, answer, asked, more=guesses, cooling=cooling
                )
            else:
                talk.turn(asked.prompt, answer, cooling)
        except KeyboardInterrupt:  # what came until then is worth its figures
            if answer.tokens:
                answer.end()
                if talk is not None:
                    talk.stopped(answer)
                _report(asked, answer, prompt_tokens, loaded - started, loaded, cooling=cooling)
            raise
        except IndexError as error:
            if not beyond:
                raise
            raise OptionError(
                f"the model cannot go on behind its {beyond} positions. Give a shorter prompt, or "
                f"ask for fewer tokens: --max-new-tokens {max(1, beyond - given)}."
            ) from error
    if talk is not None:
        talk.write()
    _report(asked, answer, prompt_tokens, loaded - started, loaded, cooling=cooling)


def _taken_up(model: Any, tokenizer: Any, asked: Arguments) -> Conversation | None:
    """The conversation that the prompt goes on with; None where none is kept."""
    if asked.session is None:
        return None
    talk = Conversation(model, tokenizer, asked)
    talk.go_on()
    return talk


def _load(asked: Arguments) -> tuple[Arguments, Any]:
    """The model, and what was asked for with the seed that its tokens are drawn with."""
    if asked.ranks is None:
        asked = with_seed(asked)
        return asked, load_asked(asked, asked.model)
    torch.seed()
    model = load_asked(asked, asked.model)
    # Its ranks draw the same numbers from here on: those of rank 0.
    return with_seed(asked, lambda most: int(torch.randint(most, ()))), model


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
