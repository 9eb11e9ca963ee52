"""What was said so far, as text and as tokens, and the cache that the next turn goes on from."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pipeload
from pipeload._sizes import counted
from pipeload.budget.usage_trial import CACHES
from pipeload.checkpoint.fingerprint import fingerprint
from pipeload.cli.answer import Answer
from pipeload.cli.asked import generate_answer
from pipeload.cli.conversation_file import ConversationFile, Talk, cannot_keep
from pipeload.cli.exit_status import interrupt_taken
from pipeload.cli.load_model import adapter_files
from pipeload.cli.log_lines import log
from pipeload.cli.progress_bar import first_pass
from pipeload.entry.texts import check_tokens
from pipeload.errors import OptionError
from pipeload.hf.cache_layers import keeps_pairs
from pipeload.serving.answer_text import end_tokens
from pipeload.serving.encoding import apply_template

if TYPE_CHECKING:
    from pipeload.cli.asked import Arguments
    from pipeload.cli.cooling import Cooling

Message = dict[str, str]
_BEFORE = "\n"
"""What joins with nothing that follows, mostly."""


class Conversation:
    """What was said, as text and as tokens, and the model's cache of it.

    Without a chat template there are no turns: what is said is one text, which goes on.
    """

    def __init__(self, model: Any, tokenizer: Any, asked: Arguments) -> None:
        self._model, self._tokenizer, self._asked = model, tokenizer, asked
        self._one_text = not (asked.chat_template and tokenizer.chat_template)
        self._read = 0
        """Tokens of the conversation that was read last."""
        self._unanswered: str | None = None
        self._file: ConversationFile | None = None
        if asked.session is not None:
            self._file = ConversationFile(asked.session, _whose(model, asked.model))
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self._asked.system
        self.messages: list[Message] = (
            [] if system is None else [{"role": "system", "content": system}]
        )
        self._forget()

    def _forget(self) -> None:
        self._cache: Any = None
        self._text = ""
        """What `_ids` are the tokens of."""
        self._ids = torch.empty((1, 0), dtype=torch.long)

    def go_on(self) -> None:
        """Take up the conversation that the file holds, if there is one.

        Raises:
            PipeloadError: it is not this model's, damaged, or begins with another system message;
                or none could be kept there, or of this model.
        """
        talk = None
        if self._file is not None:
            if not keeps_pairs(self._model.config):
                raise cannot_keep()
            self._file.check()
            talk = self._file.load(self._model.device, most_tokens=self._asked.tokens or 0)
        if talk is None:
            return
        if talk.one_text != self._one_text:
            how, cure = ("without", "Pass") if talk.one_text else ("with", "Leave out")
            raise OptionError(
                f"the conversation in {str(self._asked.session)!r} was begun {how} a chat "
                f"template. {cure} --no-chat-template, or name another file."
            )
        begun = talk.messages[: len(self.messages)]
        if self.messages and begun != self.messages:
            raise OptionError(
                f"the conversation in {str(self._asked.session)!r} begins with another system "
                "message. Leave --system out, or name another file."
            )
        self.messages, self._cache = talk.messages, talk.cache
        self._text, self._ids = talk.text, talk.ids
        log.info("%s in the conversation", counted(self._ids.shape[1], "token"))

    def write(self) -> None:
        """Have the file hold it, if there is one; a second Ctrl-C ends that.

        Raises:
            OptionError: it cannot.
        """
        if self._file is None:
            return
        talk = Talk(self.messages, self._text, self._ids, self._cache, self._one_text)
        try:
            self._file.save(talk)
        except KeyboardInterrupt:  # it was meant for the answer, which is there
            interrupt_taken()
            log.info("the conversation is still being written; once more leaves it")
            self._file.save(talk)

    def ask(self, line: str) -> None:
        """Answer a line on stdout; Ctrl-C ends the answer, and what came of it stays.

        Raises:
            PipeloadError: it cannot be answered; the conversation is as it was before.
        """
        with first_pass(self._model) as shown:
            answer = Answer(
                self._tokenizer, self._model, write=True, stops=(), on_first_token=shown.stop
            )
            try:
                self.turn(line, answer)
            except KeyboardInterrupt:
                interrupt_taken()
                answer.end()
                log.info("stopped")
                self._say(answer)
        tokens = max(self._ids.shape[1], self._read)
        log.info("%s in the conversation", counted(tokens, "token"))
        self.write()

    def turn(self, line: str, answer: Answer, cooling: Cooling | None = None) -> None:
        """Give `answer` what the model says to a line.

        Raises:
            PipeloadError: it cannot be answered; the conversation is as it was before.
        """
        self._unanswered = None
        text = self._render([*self.messages, {"role": "user", "content": line}])
        ids = self._tokens_of(text)
        check_tokens(self._asked.model, self._model, int(ids.max()))
        self._check_length(ids.shape[1])
        self._read, self._unanswered = ids.shape[1], line
        try:
            output = self._generate(ids, answer, cooling)
            self._keep(text, answer.text, output)
        except BaseException:
            self._forget()  # some layers may have the latest token already
            raise
        self._say(answer)

    def stopped(self, answer: Answer) -> None:
        """Keep what came of an answer that was interrupted; its keys and values are gone."""
        self._say(answer)
        self.write()

    def _say(self, answer: Answer) -> None:
        """What was asked last is answered, once: an interrupt may come behind it."""
        line, self._unanswered = self._unanswered, None
        if line is not None:
            self.messages += [
                {"role": "user", "content": line},
                {"role": "assistant", "content": answer.text},
            ]

    def save(self, file: str) -> None:
        """Write the messages as JSON.

        Raises:
            OptionError: there is no name, or the file cannot be written.
        """
        if not file:
            raise OptionError("/save needs the name of a file. Use /save FILE.")
        try:
            text = json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"
            Path(file).expanduser().write_text(text, encoding="utf-8")
        except (OSError, RuntimeError, ValueError) as error:  # no home, or no path at all
            cause = getattr(error, "strerror", None) or str(error).rstrip(".")
            raise OptionError(
                f"cannot write the conversation to {file!r}: {cause}. Name another file."
            ) from error
        log.info("saved to %s", file)

    def _render(self, messages: list[Message]) -> str:
        if self._one_text:
            return "".join(message["content"] for message in messages)
        cure = "Leave --system out, or use another model."
        text: str = apply_template(self._tokenizer, messages, cure, tokenize=False)
        return text

    def _tokens_of(self, text: str) -> torch.Tensor:
        """Those of before, as they were made, and of what has come; all anew if it says otherwise.

        A template may leave out what a model has thought in earlier turns.
        """
        if self._cache is None or not text.startswith(self._text):
            self._forget()
        new = text[len(self._text) :]
        if self._one_text and not self._text:
            made = self._encode(new, special=True)  # a template writes what a text begins with
        elif self._one_text:
            # Alone it may get a space in front: so behind a new line, which is taken off again.
            before, both = self._encode(_BEFORE), self._encode(_BEFORE + new)
            same = torch.equal(both[: len(before)], before)
            made = both[len(before) :] if same else self._encode(new)
        else:
            made = self._encode(new)
        return torch.cat([self._ids, made[None]], dim=1)

    def _encode(self, text: str, *, special: bool = False) -> torch.Tensor:
        ids = self._tokenizer(text, add_special_tokens=special, return_tensors="pt")["input_ids"]
        tokens: torch.Tensor = ids[0].to(torch.long)
        return tokens

    def _check_length(self, tokens: int) -> None:
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and tokens >= positions:
            raise OptionError(
                f"the conversation has {tokens} tokens, and the model was made for {positions} "
                "positions. Use /reset, or another --session, to begin anew."
            )

    def _generate(self, ids: torch.Tensor, answer: Answer, cooling: Cooling | None) -> Any:
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        more: dict[str, Any] = {"return_dict_in_generate": True}
        if self._cache is not None:
            told = inspect.signature(self._model.forward).parameters
            more[next(name for name in CACHES if name in told)] = self._cache
        return generate_answer(
            self._model, self._tokenizer, inputs, answer, self._asked, more=more, cooling=cooling
        )

    def _keep(self, text: str, answer: str, output: Any) -> None:
        ids = output.sequences.to("cpu")
        if ids[0, -1].item() in end_tokens(self._model):  # the template writes it
            ids = ids[:, :-1]
        caches = (output.get(name) for name in CACHES)
        self._cache = next((cache for cache in caches if cache is not None), None)
        self._ids, self._text = ids, text + answer


def _whose(model: Any, typed: str) -> str:
    """What tells the model whose keys and values are kept: its files, settings and dtype."""
    told = model.config.to_dict()
    for name in ("transformers_version", "_name_or_path"):
        told.pop(name, None)
    files = pipeload.handle(model).session.files
    settings = json.dumps(told, sort_keys=True, default=str)
    digest = fingerprint(files, beside=adapter_files(typed), told=settings)
    return f"{digest} {model.dtype}"
