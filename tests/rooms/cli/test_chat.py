"""`pipeload chat`: turns that go on from one another's cache, and what can be typed between."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from pipeload.budget.usage_trial import CACHES
from pipeload.cli import conversation as conv
from pipeload.cli import conversation_file
from pipeload.cli.answer import Answer
from pipeload.cli.asked import Arguments
from pipeload.cli.chat import _take
from pipeload.cli.conversation import Conversation
from pipeload.cli.conversation_file import ConversationFile, Talk
from pipeload.errors import CheckpointError, OptionError, PipeloadError
from pipeload.hf.cache_layers import made_cache
from pipeload.weights.read_tensor import read_whole
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.rooms.cli.test_mistakes import assert_one_line
from tests.support.commands import invoke
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain
from tests.support.streaming import load_streamed, logits
from tests.support.talking import TEMPLATE, repeat_answers

if TYPE_CHECKING:
    from pathlib import Path

LINES = ["Write.", "And more?", "Again."]
NEW = 6


def typed(folder: Path, *lines: str, more: tuple[object, ...] = ()) -> Any:
    """What the command makes of lines from standard input."""
    options = ("--max-new-tokens", NEW, *more)
    return invoke("chat", folder, *options, stdin="".join(f"{line}\n" for line in lines))


def plain_talk(folder: Path, lines: list[str], template: str = "<user>{}<answer>") -> list[str]:
    """The library's own, with the cache of each turn passed on to the next one."""
    model, tokenizer = load_plain(folder), tokenizer_of(folder)
    answers: list[str] = []
    kept: dict[str, Any] = {}
    ids = torch.empty((1, 0), dtype=torch.long)
    for line in lines:
        new = tokenizer(template.format(line), return_tensors="pt")["input_ids"]
        ids = torch.cat([ids, new], dim=1)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            **kept,
        )
        made = output.sequences[0, ids.shape[1] :]
        answers.append(tokenizer.decode(made, skip_special_tokens=True))
        ids = output.sequences if made[-1] != 2 else output.sequences[:, :-1]
        name = next(name for name in CACHES if name in output)
        kept = {name: output[name]}
    return answers


def tokenizer_of(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def going_on(talker: Path, tmp_path: Path) -> Path:
    """A model whose template repeats an answer as the text that it came as."""
    folder = tmp_path / "going-on"
    shutil.copytree(talker, folder)
    repeat_answers(folder)
    return folder


def conversation(folder: Path, spare: int = 300_000, **options: Any) -> Conversation:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "tokens": 256} | options
    asked = Arguments(model=str(folder), prompt="", memory_limit="auto", **settings)
    return Conversation(load_streamed(folder, spare=spare), tokenizer_of(folder), asked)


def answers_of(talk: Conversation) -> list[str]:
    return [m["content"] for m in talk.messages if m["role"] == "assistant"]


def test_turns_are_those_of_the_library(going_on: Path) -> None:
    """Streamed at a small limit, each from the cache of the turn before."""
    wanted = plain_talk(going_on, LINES)
    shown = typed(going_on, *LINES)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout == "".join(f"{text}\n" for text in wanted)
    talk = conversation(going_on)
    lengths: list[int] = []
    talk._model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]),
        with_kwargs=True,
    )
    for line in LINES:
        before = talk._ids.shape[1]
        lengths.clear()
        talk.ask(line)
        # No token of an earlier turn is computed again but the last, which nobody has yet.
        assert lengths[0] <= talk._ids.shape[1] - before + 1
        assert before == 0 or lengths[0] < before + len(line)
    assert answers_of(talk) == wanted


def test_a_template_that_says_it_otherwise(talker: Path) -> None:
    """All of the conversation is computed anew, as if it had come at once."""
    talk = conversation(talker)
    for line in LINES[:2]:
        talk.ask(line)
    first, second = answers_of(talk)
    assert "<assistant>" in TEMPLATE.replace("{{ m['role'] }}", "assistant")
    text = f"<user>{LINES[0]}<assistant>{first}<user>{LINES[1]}<answer>"
    tokenizer = tokenizer_of(talker)
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    made = load_plain(talker).generate(ids, max_new_tokens=NEW, do_sample=False)
    assert second == tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_ctrl_c_ends_an_answer_alone(going_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came of it stays, and the next turn is right."""
    talk, put, left = conversation(going_on), Answer.put, [4]

    def interrupted(answer: Answer, value: torch.Tensor) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        put(answer, value)

    monkeypatch.setattr(Answer, "put", interrupted)
    talk.ask(LINES[0])
    (part,) = answers_of(talk)
    whole = plain_talk(going_on, LINES[:1])[0]
    assert whole.startswith(part)
    assert part != whole
    talk.ask(LINES[1])
    ids = talk._tokenizer(
        f"<user>{LINES[0]}<answer>{part}<user>{LINES[1]}<answer>", return_tensors="pt"
    )["input_ids"]
    made = load_plain(going_on).generate(ids, max_new_tokens=NEW, do_sample=False)
    assert answers_of(talk)[1] == talk._tokenizer.decode(
        made[0, ids.shape[1] :], skip_special_tokens=True
    )


def test_what_can_be_typed(going_on: Path, tmp_path: Path) -> None:
    """Saved, begun anew, ended; an empty line is nothing, and a mistake ends nothing."""
    file = tmp_path / "talk.json"
    saves = (f"/save {file}", "/save", f"/save {tmp_path}/no/file", "/save ~nobody/file")
    lines = ("", LINES[0], *saves, "/nonsense")
    shown = typed(going_on, *lines, "/reset", LINES[0], "/exit", LINES[1])
    assert shown.exit_code == 0, shown.output
    first, again = shown.stdout.splitlines()
    assert first == again
    assert json.loads(file.read_text(encoding="utf-8")) == [
        {"role": "user", "content": LINES[0]},
        {"role": "assistant", "content": first},
    ]
    assert "there is no '/nonsense'" in shown.stderr
    assert "/save needs the name of a file" in shown.stderr
    assert shown.stderr.count("cannot write the conversation to") == 2
    with pytest.raises(OptionError, match="no text in UTF-8"):
        _take("no \udcff text", conversation(going_on))


def test_a_turn_that_is_too_long(going_on: Path) -> None:
    """It is left out of the conversation, which goes on as if it had not been."""
    talk = conversation(going_on)
    positions = talk._model.config.max_position_embeddings
    with pytest.raises(OptionError, match=f"made for {positions} positions"):
        talk.ask("x" * positions)
    for line in LINES[:2]:
        talk.ask(line)
    assert answers_of(talk) == plain_talk(going_on, LINES[:2])


def test_a_turn_that_fails(going_on: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever error: the next one computes all of it, on the same model."""
    talk = conversation(going_on)
    talk.ask(LINES[0])
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "put", lambda *_: (_ for _ in ()).throw(PipeloadError("made up")))
        with pytest.raises(PipeloadError, match="made up"):
            talk.ask(LINES[1])
    assert len(talk.messages) == 2
    talk.ask(LINES[1])
    assert len(talk.messages) == 4
    assert torch.equal(logits(talk._model), logits(load_plain(going_on)))


def test_a_system_message(going_on: Path, talker: Path) -> None:
    """It comes first, and stays when the rest goes; a template that has no place for it says so."""
    talk = conversation(talker, system="Be short.")
    talk.ask(LINES[0])
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be short."}]
    tokenizer = tokenizer_of(going_on)
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    talk._tokenizer = tokenizer
    with pytest.raises(OptionError, match="does not take this"):
        talk.ask(LINES[0])


def test_a_model_without_turns(talker: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(talker, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert_one_line(typed(folder, LINES[0]), 1, "has no chat template, so it knows no turns")


def test_a_temperature_of_zero_draws_nothing(going_on: Path) -> None:
    """By itself it is greedy; beside a seed it is refused, as by `run`."""
    assert typed(going_on, LINES[0], more=("--temperature", 0)).stdout == (
        f"{plain_talk(going_on, LINES[:1])[0]}\n"
    )
    refused = typed(going_on, LINES[0], more=("--temperature", 0, "--seed", 1))
    assert_one_line(refused, 2, "--temperature 0 takes the likeliest token always")


def test_a_conversation_that_is_kept(going_on: Path, tmp_path: Path) -> None:
    """Goes on as if it had never been interrupted, and nothing of it is computed again."""
    file = tmp_path / "kept" / "talk.safetensors"
    file.parent.mkdir()
    wanted = plain_talk(going_on, LINES)
    first = typed(going_on, *LINES[:2], more=("--session", file))
    assert first.exit_code == 0, first.output
    assert (file.stat().st_mode & 0o777) == 0o600
    then = typed(going_on, LINES[2], more=("--session", file))
    assert then.exit_code == 0, then.output
    assert first.stdout + then.stdout == "".join(f"{answer}\n" for answer in wanted)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    tokens = re.findall(r"(\d+) tokens in the conversation", first.stderr + then.stderr)
    assert tokens[1] == tokens[2]
    anew = typed(going_on, "/reset", LINES[0], more=("--session", file))
    assert anew.stdout == f"{wanted[0]}\n"


def kept(folder: Path, file: Path, *more: object) -> Any:
    """A turn whose conversation is kept."""
    return typed(folder, "Hi.", more=("--session", file, *more))


def test_a_conversation_that_is_not_this_models(talker: Path, tmp_path: Path) -> None:
    """Or is too long, damaged, or none at all: is refused, and stays as it is."""
    file, other = tmp_path / "talk.safetensors", tmp_path / "other"
    assert kept(talker, file, "--system", "Be kind.").exit_code == 0
    before = file.read_bytes()
    shutil.copytree(talker, other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 9000] = bytes(9000)
    weights.write_bytes(data)
    assert_one_line(kept(other, file, "-q"), 1, "is another model's, or its files have changed")
    dtype = kept(talker, file, "-q", "--dtype", "fp32")
    assert_one_line(dtype, 1, "have changed since, or its dtype")
    system = kept(talker, file, "-q", "--system", "Be rude.")
    assert_one_line(system, 1, "begins with another system message")
    assert_one_line(kept(talker, file, "-q", "--tokens", 20), 1, "memory is kept free for 20")
    assert file.read_bytes() == before
    for damaged, words in (
        (before[:-10], "is no whole conversation that was kept. Delete it if it was one"),
        (
            before.replace(b'\\\\"model\\\\"', b'\\\\"medal\\\\"').replace(b'"model"', b'"medal"'),
            "is damaged",
        ),
        (before.replace(b'"prompt"', b'"pramet"'), "is damaged"),
        (before.replace(b'"0.keys"', b'"9.keys"'), "is damaged"),
        (before.replace(b"<user>Hi.", b"<user>Ho."), "is damaged"),
        (before.replace(b'"messages"', b'"massages"'), "is damaged"),
    ):
        file.write_bytes(damaged)
        assert damaged != before
        assert_one_line(kept(talker, file, "-q"), 1, words)
    weights.rename(file)
    words = "is no whole conversation that was kept. Name another file."
    assert_one_line(kept(talker, file, "-q"), 1, words)


def test_a_conversation_that_cannot_be_kept(talker: Path, tmp_path: Path, tiny: Any) -> None:
    """Is told before anything is answered; nothing half written is left."""
    nowhere = kept(talker, tmp_path / "no" / "talk", "-q")
    assert_one_line(nowhere, 1, "cannot write the conversation")
    assert nowhere.stdout == ""
    asked = Arguments(
        model=str(tiny("mistral")),
        prompt="",
        memory_limit="auto",
        max_new_tokens=NEW,
        session=tmp_path / "talk",
    )
    moving = Conversation(load_streamed(tiny("mistral")), tokenizer_of(talker), asked)
    with pytest.raises(OptionError, match="keeps more of a conversation than keys and values"):
        moving.go_on()
    assert list(tmp_path.iterdir()) == []
    file = ConversationFile(tmp_path / "talk", "x")
    window: Any = load_plain(tiny("mistral"))
    output = window.generate(
        torch.ones(1, 20, dtype=torch.long), max_new_tokens=2, return_dict_in_generate=True
    )
    cache = next(output[name] for name in CACHES if name in output)
    with pytest.raises(OptionError, match="keeps more of a conversation than keys and values"):
        file.save(Talk([], "", torch.empty(1, 0, dtype=torch.long), cache))
    assert list(tmp_path.iterdir()) == []


def test_a_kill_while_it_is_written(talker: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Leaves the one before."""
    file = ConversationFile(tmp_path / "talk", "x")
    ids = torch.tensor([[1, 2]])
    file.save(Talk([], "a", ids, None))

    def struck(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", struck)
    with pytest.raises(KeyboardInterrupt):
        file.save(Talk([], "b", ids, None))
    found = file.load(torch.device("cpu"), most_tokens=9)
    assert found is not None
    assert (found.text, found.cache) == ("a", None)
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]


def test_what_a_killed_process_left(tmp_path: Path) -> None:
    """Goes with the next one that writes, whatever its number; what somebody writes stays."""
    path = tmp_path / "talk"
    others = tmp_path / "talk.download.part"
    others.touch()
    left = [tmp_path / f"talk.{name}.pipeload.part" for name in ("abcd_123", "_writing")]
    for part in left:
        part.write_bytes(b"half")
    with left[-1].open("rb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        ConversationFile(path, "x").save(Talk([], "a", torch.tensor([[1]]), None))
        assert {*tmp_path.iterdir()} == {path, others, left[-1]}


def pairs(tokens: int, layers: int = 3) -> Any:
    """A cache."""
    return made_cache([(torch.ones(1, 2, tokens, 4), torch.ones(1, 2, tokens, 4))] * layers)


@pytest.mark.parametrize(
    ("tokens", "fits"), [(5, True), (4, True), (3, False), (6, False), (0, False)]
)
def test_as_many_as_tokens(tmp_path: Path, tokens: int, *, fits: bool) -> None:
    """There are keys and values for, but for the last one; else the file is damaged."""
    file = ConversationFile(tmp_path / "talk", "x")
    file.save(Talk([], "a", torch.tensor([[1, 2, 3, 4, 5]]), pairs(tokens)))
    if fits:
        found = file.load(torch.device("cpu"), most_tokens=9)
        assert found is not None
        assert found.cache.get_seq_length() == tokens
        return
    with pytest.raises(CheckpointError, match="is damaged"):
        file.load(torch.device("cpu"), most_tokens=9)


@pytest.mark.parametrize(
    "said",
    [
        (["hi"], "a", [1], 0),
        ([], 1, [1], 0),
        ([], "a", ["1"], 0),
        ([], "a", [1], "0"),
        (1, "", 1, 0),
    ],
)
def test_words_of_another_kind(tmp_path: Path, said: Any) -> None:
    """Are damage, too, whatever their digest says."""
    file = ConversationFile(tmp_path / "talk", "x")
    names = ("messages", "text", "ids", "layers")
    told = dict(zip(names, said, strict=True))
    told |= {"model": "x", "prompt": conversation_file._digest(*said)}
    words = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    file._write({"conversation": words})
    with pytest.raises(CheckpointError, match="is damaged"):
        file.load(torch.device("cpu"), most_tokens=9)


def test_one_layer_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is read: of what was copied into the cache, less than two layers stand beside it."""
    file = ConversationFile(tmp_path / "talk", "x")
    file.save(Talk([], "a", torch.tensor([[1, 2, 3, 4, 5]]), pairs(5, layers=6)))
    read: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def reads(entry: Any, files: Any) -> torch.Tensor:
        nonlocal most
        tensor: torch.Tensor = read_whole(entry, files)
        most = max(most, sum(each() is not None for each in read))
        read.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(conversation_file, "read_whole", reads)
    assert file.load(torch.device("cpu"), most_tokens=9) is not None
    assert len(read) == 13
    assert most <= 3


def test_ctrl_c_while_it_is_written(
    going_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does not lose the turn; only a second one does."""
    talk = conversation(going_on, session=tmp_path / "talk")
    talk.go_on()
    sync, left = os.fsync, [1]

    def struck(descriptor: int) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise KeyboardInterrupt
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", struck)
    talk.ask(LINES[0])
    again = conversation(going_on, session=tmp_path / "talk")
    again.go_on()
    assert again.messages == talk.messages != []
    left[0] = 2
    with pytest.raises(KeyboardInterrupt):
        talk.ask(LINES[1])
    assert [each.name for each in tmp_path.glob("talk*")] == ["talk"]


def test_an_adapter_is_another_model(
    going_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As is one with other settings; the library's version does not matter."""
    model = load_streamed(going_on)
    base = conv._whose(model, str(going_on))
    model.config.transformers_version = "0"
    assert conv._whose(model, str(going_on)) == base
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(b"some")
    first = conv._whose(model, str(adapter))
    weights.write_bytes(b"more")
    assert len({base, first, conv._whose(model, str(adapter))}) == 3
    monkeypatch.setattr(model.config, "rope_parameters", {"rope_type": "default", "rope_theta": 7})
    assert conv._whose(model, str(going_on)) != base


@pytest.mark.parametrize("template", ["<user>{}<answer>", "{}"])
def test_run_goes_on(going_on: Path, tmp_path: Path, template: str) -> None:
    """A run is the next turn of what the file holds; without a template, more of one text."""
    more = () if template != "{}" else ("--no-chat-template",)
    wanted, session = plain_talk(going_on, LINES, template), tmp_path / "talk"
    for line, text in zip(LINES, wanted, strict=True):
        options = ("--session", session, "--max-new-tokens", NEW, *more)
        shown = invoke("run", going_on, line, *options)
        assert (shown.exit_code, shown.stdout) == (0, f"{text}\n"), shown.output
    held = session.read_bytes()
    shown = invoke("run", going_on, "More", "--quiet", "--session", session, "--tokens", 9, *more)
    assert_one_line(shown, 1, "memory is kept free for 9")
    assert session.read_bytes() == held


@pytest.mark.parametrize("option", [("--stop", "."), ("--draft", "lookup"), ("--ranks", 2)])
def test_what_no_session_can_keep(talker: Path, tmp_path: Path, option: tuple[object, ...]) -> None:
    """Tokens that are not shown, or that others have."""
    shown = invoke("run", talker, "Hi", "--session", tmp_path / "talk", *option)
    assert shown.exit_code == 2
    assert "--session goes with no" in " ".join(shown.stderr.split())


def test_tokens_of_no_conversation(tmp_path: Path) -> None:
    """None are known of a file that is missing, or no conversation: others say so."""
    path = tmp_path / "talk"
    assert conversation_file.tokens_kept(path, len) == 0
    path.write_text("no conversation")
    assert conversation_file.tokens_kept(path, len) == 0
    ConversationFile(path, "x").save(Talk([], "a", torch.tensor([[1, 2, 3]]), pairs(2)))
    assert conversation_file.tokens_kept(path, len) == 2


def test_tokens_of_a_conversation_without_keys(going_on: Path, tmp_path: Path) -> None:
    """As after Ctrl-C: its words are counted, for all of them are read again."""
    path, tokenizer = tmp_path / "talk", tokenizer_of(going_on)
    said = [{"role": "user", "content": LINES[0]}, {"role": "assistant", "content": LINES[1]}]
    nothing = torch.empty((1, 0), dtype=torch.long)
    ConversationFile(path, "x").save(Talk(said, "", nothing, None))
    counted = sum(len(tokenizer(line)["input_ids"]) for line in LINES[:2])
    assert conversation_file.tokens_kept(path, tokenizer) == counted


def test_run_is_interrupted(
    going_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked, and what came of the answer, is in the file, and can be gone on with."""
    session, put = tmp_path / "talk", Answer.put

    def interrupted(self: Answer, value: torch.Tensor) -> None:
        put(self, value)
        if self.tokens == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Answer, "put", interrupted)
        shown = invoke("run", going_on, LINES[0], "--session", session, "--max-new-tokens", NEW)
    assert shown.exit_code == 130
    device = torch.device("cpu")
    model = load_streamed(going_on)
    talk = ConversationFile(session, conv._whose(model, str(going_on))).load(device, most_tokens=99)
    assert talk is not None
    assert talk.messages[0]["content"] == LINES[0]
    assert talk.cache is None
    assert shown.stdout.startswith(talk.messages[1]["content"])
    shown = invoke("run", going_on, LINES[1], "--session", session, "--max-new-tokens", NEW)
    assert shown.exit_code == 0, shown.output


def test_one_text_or_turns(going_on: Path, tmp_path: Path) -> None:
    """A conversation stays what it was begun as; more of one text is as if it had come at once."""
    session, options = tmp_path / "talk", ("--max-new-tokens", 1, "--quiet")
    kept = ("--session", session, *options)
    assert invoke("run", going_on, "Write.", *kept).exit_code == 0
    other = invoke("run", going_on, "More.", *kept, "--no-chat-template")
    assert_one_line(other, 1, "was begun with a chat template. Leave out --no-chat-template")
    session.unlink()
    assert invoke("run", going_on, "Write.", *kept, "--no-chat-template").exit_code == 0
    other = invoke("run", going_on, "More.", *kept)
    assert_one_line(other, 1, "was begun without a chat template. Pass --no-chat-template")
