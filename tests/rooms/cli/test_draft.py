"""`pipeload run --draft`: the same answer in fewer passes, whoever guesses."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload.budget.usage_trial import CACHES
from pipeload.cli import conversation
from pipeload.cli.asked import Arguments, generate_answer
from pipeload.cli.draft import draft_settings
from pipeload.entry import drafting
from pipeload.entry.draft_control import DraftControl
from pipeload.errors import OptionError
from tests.rooms.cli.test_commands import plain_answer
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.rooms.cli.test_mistakes import assert_one_line
from tests.support.commands import answer, invoke, save_tokenizer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain
from tests.support.talking import repeat_answers

if TYPE_CHECKING:
    from pathlib import Path

TALK = "Write."
BARE = ("--no-chat-template", "--max-new-tokens", 12)


class Always(DraftControl):
    """Four guesses for each pass, from the first on."""

    pays = knows_alone = True

    def count(self, room: int) -> int:
        return max(0, min(4, room))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are used though the whole model fits, and nothing is timed."""
    monkeypatch.setattr(drafting, "DraftControl", Always)
    monkeypatch.setattr(drafting, "_LEAST_ROOM", 0)
    monkeypatch.setattr(drafting.Drafting, "is_wanted", lambda _self, _model: True)
    monkeypatch.setattr(drafting.Drafting, "_may_come", lambda _self, _model: True)


@pytest.fixture
def twin(talker: Path, tmp_path: Path) -> Path:
    """Another folder of the same model: all its guesses are right."""
    folder = tmp_path / "twin"
    shutil.copytree(talker, folder)
    return folder


@pytest.mark.usefixtures("always")
def test_a_model_that_guesses(talker: Path, twin: Path) -> None:
    """Each pass keeps several tokens, and all are counted and shown."""
    alone = answer(talker, TALK, *BARE)
    figures = answer(talker, TALK, *BARE, "--draft", twin)
    assert figures["text"] == alone["text"] == plain_answer(talker, TALK, 12)
    assert figures["new_tokens"] == alone["new_tokens"] == 12
    assert figures["passes"] < alone["passes"]
    assert figures["tokens_per_pass"] > 1 == alone["tokens_per_pass"]


@pytest.mark.usefixtures("always")
def test_shown_as_they_come(talker: Path, twin: Path) -> None:
    """Several at once, as one by one; an end is found among several, too."""
    more: list[tuple[object, ...]] = [(), ("--draft", twin)]
    shown = [invoke("run", talker, TALK, *BARE, *draft) for draft in more]
    assert shown[0].stdout == shown[1].stdout
    assert f"drafts by {twin}" in shown[1].stderr
    stop = shown[0].stdout[4:6]
    ended = [invoke("run", talker, TALK, *BARE, *draft, "--stop", stop) for draft in more]
    assert ended[0].stdout == ended[1].stdout != shown[0].stdout


@pytest.mark.parametrize("draft", ["lookup", "off"])
@pytest.mark.usefixtures("always")
def test_no_model(talker: Path, draft: str) -> None:
    """Tokens are looked up in the text, or nobody guesses."""
    assert answer(talker, TALK, *BARE, "--draft", draft)["text"] == plain_answer(talker, TALK, 12)


def test_none_is_found(talker: Path) -> None:
    """Which is a line with the command that makes one; the answer comes without."""
    shown = invoke("run", talker, TALK, *BARE, "--draft", "auto")
    assert shown.stdout.strip() == plain_answer(talker, TALK, 12).strip()
    said = [line for line in shown.stderr.splitlines() if "pipeload quantize" in line]
    assert len(said) == 1
    assert f"no draft of {talker.name} was found" in said[0]


@pytest.mark.usefixtures("always")
def test_sampling(talker: Path, twin: Path) -> None:
    """The seed gives the same answer again."""
    options = (*BARE, "--draft", twin, "--seed", 5, "--temperature", 0.8)
    first, again = (answer(talker, TALK, *options) for _ in range(2))
    assert first["text"] == again["text"]


@pytest.mark.usefixtures("always")
def test_a_conversation(
    talker: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turn may be guessed; later ones go on from its cache, as without."""
    going_on = tmp_path / "going-on"
    repeat_answers(shutil.copytree(talker, going_on))
    asked = ("chat", going_on, "--max-new-tokens", 8, "--tokens", 200)
    lines = "Hi\nMore\nAgain\n/exit\n"
    held: list[list[int]] = []

    def watched(*args: Any, more: dict[str, Any], **options: Any) -> Any:
        cache = next((more[name] for name in CACHES if name in more), None)
        held[-1].append(0 if cache is None else cache.get_seq_length())
        return generate_answer(*args, more=more, **options)

    monkeypatch.setattr(conversation, "generate_answer", watched)
    shown = []
    for more in ((), ("--draft", twin), ("--draft", "lookup")):
        held.append([])
        shown.append(invoke(*asked, *more, stdin=lines))
    assert [one.exit_code for one in shown] == [0, 0, 0], shown[1].output
    assert shown[0].stdout == shown[1].stdout == shown[2].stdout
    assert held[0] == held[1] == held[2]
    assert 0 == held[0][0] < held[0][1] < held[0][2]
    assert f"drafts by {twin}" in shown[1].stderr
    kept = invoke(*asked, "--session", twin / "talk", "--draft", "lookup")
    assert kept.exit_code == 2
    assert "--session goes with no --draft" in " ".join(kept.stderr.split())


def test_a_draft_of_other_tokens(talker: Path, twin: Path) -> None:
    """It is refused before it is loaded."""
    save_tokenizer(twin, words=100)
    result = invoke("run", talker, TALK, *BARE, "--draft", twin)
    assert_one_line(result, 1, "has other tokens than")


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_draft_that_is_not_there(talker: Path, command: str) -> None:
    prompt = (TALK,) if command == "run" else ()
    result = invoke(command, talker, *prompt, "--max-new-tokens", 12, "--draft", "./nowhere")
    assert_one_line(result, 1, "there is no folder './nowhere'")


def test_on_ranks(talker: Path) -> None:
    """All guess the same number of tokens, so those are the library's; none is looked for."""
    model = load_plain(talker)

    def settings(draft: str) -> dict[str, Any]:
        asked = Arguments(
            model=str(talker),
            prompt="",
            memory_limit="auto",
            max_new_tokens=1,
            ranks=2,
            draft=draft,
        )
        return draft_settings(asked, model, pipeload.from_pretrained)

    assert settings("off") == {}
    assert settings("lookup") == {"prompt_lookup_num_tokens": 10}
    assert list(settings(str(talker))) == ["assistant_model"]
    with pytest.raises(OptionError, match="--draft auto goes with no --ranks"):
        settings("auto")
