"""`pipeload run --draft`: the same answer in fewer passes, whoever guesses."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.rooms.cli.test_commands import plain_answer
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.rooms.cli.test_mistakes import assert_one_line
from tests.support.commands import answer, invoke, save_tokenizer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture

if TYPE_CHECKING:
    from pathlib import Path

TALK = "Write."
BARE = ("--no-chat-template", "--max-new-tokens", 12)


@pytest.fixture
def twin(talker: Path, tmp_path: Path) -> Path:
    """Another folder of the same model: all its guesses are right."""
    folder = tmp_path / "twin"
    shutil.copytree(talker, folder)
    return folder


def test_a_model_that_guesses(talker: Path, twin: Path) -> None:
    """Each pass keeps several tokens, and all are counted and shown."""
    alone = answer(talker, TALK, *BARE)
    figures = answer(talker, TALK, *BARE, "--draft", twin)
    assert figures["text"] == alone["text"] == plain_answer(talker, TALK, 12)
    assert figures["new_tokens"] == alone["new_tokens"] == 12
    assert figures["passes"] < alone["passes"]
    assert figures["tokens_per_pass"] > 1 == alone["tokens_per_pass"]


def test_shown_as_they_come(talker: Path, twin: Path) -> None:
    """Several at once, as one by one."""
    shown = [invoke("run", talker, TALK, *BARE, *more) for more in ((), ("--draft", twin))]
    assert shown[0].stdout == shown[1].stdout
    assert f"drafts by {twin}" in shown[1].stderr


@pytest.mark.parametrize("draft", ["lookup", "off"])
def test_no_model(talker: Path, draft: str) -> None:
    """Tokens are looked up in the text, or nobody guesses."""
    assert answer(talker, TALK, *BARE, "--draft", draft)["text"] == plain_answer(talker, TALK, 12)


def test_sampling(talker: Path, twin: Path) -> None:
    """The seed gives the same answer again."""
    options = (*BARE, "--draft", twin, "--seed", 5, "--temperature", 0.8)
    first, again = (answer(talker, TALK, *options) for _ in range(2))
    assert first["text"] == again["text"]


def test_a_draft_of_other_tokens(talker: Path, twin: Path) -> None:
    """It is refused before it is loaded."""
    save_tokenizer(twin, words=100)
    result = invoke("run", talker, TALK, *BARE, "--draft", twin)
    assert_one_line(result, 1, "has other tokens than")


def test_a_draft_that_is_not_there(talker: Path) -> None:
    result = invoke("run", talker, TALK, *BARE, "--draft", "./nowhere")
    assert_one_line(result, 1, "there is no folder './nowhere'")
