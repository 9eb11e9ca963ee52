"""The command line in tests: run within this process, or in one of its own."""

from __future__ import annotations

import json
import subprocess
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner

from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.cli.commands import app
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{3 + 37 * number % 500}" for number in range(50)]
"""A text that the tokenizer below has a token for each word of."""


@pytest.fixture(autouse=True)
def loud_libraries() -> Iterator[None]:
    """Undo what a command in this process silenced."""
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the hub's own bars are off by environment
        transformers.logging.enable_progress_bar()


def invoke(*arguments: object, stdin: str | None = None) -> Any:
    """Run a command within this process."""
    ACCOUNTANT.forget_all()  # a command has a process of its own, in which no other model streams
    return CliRunner().invoke(app, [str(a) for a in arguments], input=stdin)


def answer(*arguments: object) -> dict[str, Any]:
    """What `run --json` prints."""
    result = invoke("run", *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def start(*arguments: object) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    # A shell's background job ignores SIGINT, and so would its children.
    code = (
        "import signal, pipeload.cli.commands\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "pipeload.cli.commands.main()"
    )
    return subprocess.Popen(
        [*warm_python(), "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def save_tokenizer(folder: Path, *, words: int = 512, reverse: bool = False) -> None:
    """One token for each word `w3`, `w4`, ...; nothing is put before a text."""
    names = [f"w{number}" for number in range(3, words)]
    ordered = ["<pad>", "<bos>", "<eos>", *(names[::-1] if reverse else names)]
    inner = Tokenizer(WordLevel({n: i for i, n in enumerate(ordered)}, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
