"""`pipeload run`: one prompt, the answer as it comes, and what it took."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

import pipeload
from pipeload._checkpoint import lacking
from pipeload._cli_output import first_pass, log, silence_libraries
from pipeload._cli_report import Figures, count, describe_plan
from pipeload.errors import CheckpointError, OptionError, PipeloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was typed."""

    model: str
    prompt: str
    memory_limit: str
    device: str = "cpu"
    host_memory_limit: str | None = None
    max_new_tokens: int
    system: str | None = None
    dtype: str = "auto"
    seed: int | None = None
    io_mode: str = "auto"
    chat_template: bool = True
    json: bool = False


def run(request: Request, *, debug: bool) -> None:
    """Print the answer to stdout and, unless quiet, the statistics to stderr.

    Raises:
        PipeloadError: something is wrong with the model, the limit or an option.
    """
    silence_libraries(debug=debug)
    check_model(request.model)
    tokenizer = load_tokenizer(request.model)
    inputs = _encode(tokenizer, request)
    prompt_tokens = int(inputs["input_ids"].shape[1])
    started = time.perf_counter()
    model = _load(request, tokens=prompt_tokens + request.max_new_tokens)
    plan = pipeload.handle(model).plan
    log.info("%s", describe_plan(plan))
    loaded = time.perf_counter()
    with first_pass(model) as shown:
        answer = _Answer(tokenizer, model, write=not request.json, on_first_token=shown.stop)
        _generate(model, inputs, answer, request)
    figures = count(
        pipeload.handle(model),
        answer.first_stats,
        prompt_tokens=prompt_tokens,
        new_tokens=answer.tokens,
        load_seconds=loaded - started,
        first_token_seconds=answer.first_token_at - loaded,
        later_seconds=answer.last_token_at - answer.first_token_at,
    )
    _report(request, answer.text, figures)


def load_tokenizer(model: str) -> Any:
    """The model's tokenizer.

    Raises:
        CheckpointError: the model has no tokenizer.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # the library raises nearly anything here
        raise CheckpointError(
            f"{model!r} has no tokenizer that can be loaded ({first_line(error)}). It is needed to "
            "make tokens of text: put tokenizer.json and its like beside the weights."
        ) from error


def check_model(model: str) -> None:
    """Refuse what is no model before anything is loaded, or asked of the hub in vain.

    Raises:
        OptionError: there is no such folder or hub model.
        CheckpointError: the folder holds no model, or its configuration cannot be read.
    """
    path = Path(model)
    if path.is_dir():
        if (path / "config.json").exists():
            with explained(model):
                transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
        elif not (path / "adapter_config.json").exists():
            raise CheckpointError(
                f"folder {model!r} has no config.json, so it holds no model. Check the path."
            )
        return
    if path.exists():
        raise OptionError(f"{model!r} is a file. Name the folder that holds config.json.")
    if model.startswith((".", "/", "~")) or model.endswith(("/", os.sep)) or model.count("/") > 1:
        raise OptionError(f"there is no folder {model!r}. Check the path.")
    log.info("no folder %r here: asking the model hub", model)
    try:
        transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # as above
        raise OptionError(
            f"{model!r} is no folder here, and the hub gave no model: {first_line(error)}. Check "
            "the name."
        ) from error


@contextlib.contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn what the library raises while it loads `model` into one line.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    try:
        yield
    except PipeloadError:
        raise
    except Exception as error:  # a configuration can make the library raise nearly anything
        raise CheckpointError(
            f"cannot load {model!r}: {first_line(error)}. Check the checkpoint; --debug shows "
            "where it failed."
        ) from error


def first_line(error: BaseException) -> str:
    """What a message says in its first line, or in two where the first only announces."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    said = isinstance(error, (OSError, ValueError, ImportError))  # others say little by themselves
    return (text if said else f"{kind}: {text}").rstrip(" .:!")


def _encode(tokenizer: Any, request: Request) -> dict[str, torch.Tensor]:
    if request.chat_template and tokenizer.chat_template:
        messages = [{"role": "user", "content": request.prompt}]
        if request.system is not None:
            messages.insert(0, {"role": "system", "content": request.system})
        encoded = _apply_template(tokenizer, messages)
    elif request.system is not None:
        raise OptionError(
            "--system was given, but the model's tokenizer has no chat template to put it in. "
            "Leave it out."
        )
    else:
        encoded = tokenizer(request.prompt, return_tensors="pt")
    if encoded["input_ids"].shape[1] == 0:
        raise OptionError("the tokenizer makes no token of this prompt. Give another one.")
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def _apply_template(tokenizer: Any, messages: list[dict[str, str]]) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:  # a template is a program
        raise OptionError(
            f"the model's chat template does not take this ({first_line(error)}). Leave --system "
            "out, or pass --no-chat-template."
        ) from error


def _load(request: Request, *, tokens: int) -> Any:
    return load_whole(
        request.model,
        memory_limit=request.memory_limit,
        device=request.device,
        host_memory_limit=request.host_memory_limit,
        tokens=tokens,
        io_mode=request.io_mode,
        dtype=DTYPES[request.dtype],
    )


def load_whole(model: str, **options: Any) -> Any:
    """A streamed model all of whose weights are in its checkpoint.

    Raises:
        CheckpointError: some are not. The library only warns of those, and makes them up.
    """
    with explained(model):
        loaded, report = pipeload.from_pretrained(
            model, trust_remote_code=False, output_loading_info=True, **options
        )
    if missing := sorted(report["missing_keys"]):
        loaded.pipeload.remove()
        raise lacking(model, missing)
    return loaded


def _generate(
    model: Any, inputs: dict[str, torch.Tensor], answer: _Answer, request: Request
) -> None:
    if request.seed is not None:
        torch.manual_seed(request.seed)
    model.generate(
        **{name: values.to(model.device) for name, values in inputs.items()},
        max_new_tokens=request.max_new_tokens,
        do_sample=request.seed is not None,
        streamer=answer,
    )


class _Answer(transformers.TextStreamer):
    """Writes text as soon as its words are complete, and notes when tokens come."""

    def __init__(
        self, tokenizer: Any, model: Any, *, write: bool, on_first_token: Callable[[], None]
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.tokens = 0
        self.first_token_at = self.last_token_at = 0.0
        self._handle = pipeload.handle(model)
        self.first_stats = self._handle.stats()
        self._write = write
        self._on_first_token = on_first_token
        self._parts: list[str] = []
        self._prompt_seen = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self.last_token_at = time.perf_counter()
            self.tokens += 1
            if self.tokens == 1:
                self.first_token_at = self.last_token_at
                self.first_stats = self._handle.stats()
                self._on_first_token()
        self._prompt_seen = True
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._parts.append(text)
        if self._write:
            sys.stdout.write(text + ("\n" if stream_end else ""))
            sys.stdout.flush()


def _report(request: Request, text: str, figures: Figures) -> None:
    if request.json:
        result = {"model": request.model, "text": text, **figures.as_dict()}
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        log.info("%s", "\n" + figures.table())
