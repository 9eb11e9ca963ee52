"""`pipeload chat`: a conversation in a terminal, whose keys and values go on from turn to turn."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING

import torch

import pipeload
from pipeload.cli.asked import NO_MODELS, load_asked, with_seed
from pipeload.cli.conversation import Conversation
from pipeload.cli.exit_status import interrupt_taken
from pipeload.cli.load_model import check_model
from pipeload.cli.log_lines import log, silence_libraries
from pipeload.cli.prompt import is_text
from pipeload.cli.run_report import describe_plan
from pipeload.entry.texts import load_tokenizer
from pipeload.errors import OptionError, PipeloadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeload.cli.asked import Arguments

_HELP = "/reset begins anew, /save FILE keeps the conversation, /exit or Ctrl-D ends."


def chat(asked: Arguments, *, debug: bool) -> None:
    """Answer line by line until the input ends. `asked.prompt` is not looked at.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option. What is wrong
            with one turn alone is told, and the conversation goes on without it.
    """
    silence_libraries(debug=debug)
    check_model(asked.model, files=True)
    if asked.draft not in NO_MODELS:
        check_model(asked.draft, files=True)
    tokenizer = load_tokenizer(asked.model)
    if not tokenizer.chat_template:
        raise OptionError(
            f"the tokenizer of {asked.model!r} has no chat template, so it knows no turns. Use a "
            "model that is made for conversations, or pipeload run."
        )
    asked = with_seed(asked)
    model = load_asked(asked, asked.model)
    if asked.seed is not None:
        torch.manual_seed(asked.seed)
    log.info("%s", describe_plan(pipeload.handle(model).plan))
    log.info("%s", _HELP)
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is no text is told, line by line
        sys.stdin.reconfigure(errors="surrogateescape")
    conversation = Conversation(model, tokenizer, asked)
    conversation.go_on()
    while (line := _read_line()) is not None:
        with _told(debug=debug):
            _take(line.strip(), conversation)


@contextlib.contextmanager
def _told(*, debug: bool) -> Iterator[None]:
    """Tell what is wrong in one line, and go on."""
    try:
        yield
    except PipeloadError as error:
        if debug:
            raise
        log.error("error: %s", error)


def _take(line: str, conversation: Conversation) -> None:
    if not is_text(line):
        raise OptionError("that line is no text in UTF-8. Give one that is.")
    command, _, rest = line.partition(" ")
    if command == "/reset":
        conversation.reset()
        conversation.write()
        log.info("the conversation begins anew")
    elif command == "/save":
        conversation.save(rest.strip())
    elif command.startswith("/"):
        raise OptionError(f"there is no {command!r}. Use /reset, /save FILE or /exit.")
    elif line:
        conversation.ask(line)


def _read_line() -> str | None:
    """What is typed next; None at the end of the input, and for /exit."""
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # lines can be edited then
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not terminal:
                raise
            interrupt_taken()
            log.info("\n%s", _HELP)
            continue
        return None if line.strip() == "/exit" else line
