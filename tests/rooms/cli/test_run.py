"""`pipeload run` and `pipeload plan`: how an answer is drawn and ended, what people are told."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pipeload.bench import measure
from pipeload.bench.report import legend
from pipeload.checkpoint.file_reads import FileSet
from pipeload.cli.answer import Answer
from pipeload.engine.stats import work_rows
from pipeload.errors import ReadError
from pipeload.serving.answer_text import Cut, StopAt
from tests.promises.ways_in.test_notebook import STATS
from tests.rooms.cli.test_commands import PROMPT, plain_answer
from tests.rooms.cli.test_commands import talker as talker  # noqa: PLC0414 - a fixture
from tests.rooms.cli.test_mistakes import assert_one_line
from tests.rooms.cli.test_on_a_device import sample
from tests.support.commands import ROOT, answer, invoke, save_tokenizer, start
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import save_random
from tests.support.streaming import load_streamed, smallest_limit, steady_floor
from tests.support.talking import add_letters

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

TALK = "Write."  # to which the random model answers letters
BARE = ("--no-chat-template", "--max-new-tokens", 12)


# -- how tokens are chosen -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [["--temperature", 0.05], ["--top-p", 0.6], ["--top-k", 3], ["--top-k", 1]]
)
def test_options_of_sampling_change_the_answer(talker: Path, options: list[object]) -> None:
    """Each by itself: another text than with the seed alone, the same each time."""
    first, again = (answer(talker, TALK, *BARE, *options, "--seed", 5) for _ in range(2))
    assert first["text"] == again["text"]
    assert first["text"] != answer(talker, TALK, *BARE, "--seed", 5)["text"]
    if options == ["--top-k", 1]:
        assert first["text"] == plain_answer(talker, TALK, 12)


def test_sampling_without_a_seed_says_one(talker: Path) -> None:
    """With it the answer comes again."""
    shown = invoke("run", talker, TALK, *BARE, "--temperature", 1.5)
    seed = shown.stderr.split("as --seed ")[1].split()[0]
    again = answer(talker, TALK, *BARE, "--temperature", 1.5, "--seed", seed)
    assert shown.stdout == again["text"] + "\n"
    assert again["seed"] == int(seed)


def test_temperature_zero_is_greedy(talker: Path) -> None:
    """As everywhere; no seed is drawn."""
    figures = answer(talker, TALK, *BARE, "--temperature", 0)
    assert (figures["text"], figures["seed"]) == (plain_answer(talker, TALK, 12), None)


def test_a_repetition_penalty_changes_the_greedy_answer(talker: Path) -> None:
    """It is the library's own, and samples nothing."""
    figures = answer(talker, TALK, *BARE, "--repetition-penalty", 3)
    assert figures["seed"] is None
    assert figures["text"] != plain_answer(talker, TALK, 12)


def test_tokens_are_what_memory_is_kept_free_for(talker: Path) -> None:
    """The smallest limit follows; by default it is what prompt and answer may come to."""

    def smallest(*options: object) -> int:
        words = ("run", talker, PROMPT, *BARE, "--memory-limit", "1MB", *options)
        return int(invoke(*words).stderr.split("works here is ")[1].split()[0])

    with steady_floor():
        alike = smallest("--tokens", len(PROMPT) + 12)
        assert smallest() == alike < smallest("--tokens", 5000)


# -- where an answer ends --------------------------------------------------------------------------


def test_a_stop_ends_the_answer_before_it(talker: Path) -> None:
    """On the screen and in JSON, and no tokens are made after it."""
    whole = plain_answer(talker, TALK, 12)
    stop = whole[4:6]
    options = (*BARE, "--stop", "never there", "--stop", stop)
    wanted = whole[: whole.index(stop)]
    assert invoke("run", talker, TALK, *options, "-q").stdout == wanted + "\n"
    figures = answer(talker, TALK, *options)
    assert figures["text"] == wanted
    assert figures["new_tokens"] < 12


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_stops_are_found_however_text_comes(pieces: list[str], stops: list[str]) -> None:
    """Also across pieces; nothing is shown that would have to be taken back."""
    cut = Cut(stops)
    shown = [cut.add(piece, end=False) for piece in pieces]
    text = "".join(pieces)
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    end = min(found)[1] if found else len(text)
    assert text[:end].startswith("".join(shown))
    assert "".join(shown) + cut.add("", end=True) == text[:end]


@pytest.mark.parametrize(
    ("text", "held"),
    [
        pytest.param("f(x)[0]=1;//+-+-", "", id="no spaces"),
        pytest.param("a b\nc d ", "", id="lines"),
        pytest.param("na\u00efve \u20ac \U0001f600", "\N{REPLACEMENT CHARACTER}", id="many bytes"),
    ],
)
def test_an_answer_is_shown_as_it_comes(
    talker: Path, capsys: pytest.CaptureFixture[str], text: str, held: str
) -> None:
    """All but a character that is not whole yet; nothing is shown that changes later."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)
    ids = tokenizer(text)["input_ids"]
    shown = Answer(tokenizer, load_streamed(talker), write=True, stops=(), on_first_token=print)
    shown.put(torch.tensor([[5, 6, 7]]))
    capsys.readouterr()
    for count in range(1, len(ids) + 1):
        shown.put(torch.tensor([ids[count - 1]]))
        assert shown.text == tokenizer.decode(ids[:count]).rstrip(held)
    shown.end()
    assert capsys.readouterr().out == "\n" + text + "\n"
    assert shown.tokens == len(ids)


def test_bytes_that_never_make_a_character_are_shown(talker: Path) -> None:
    """A model that goes on so for ever must not seem to say nothing."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)
    start = tokenizer("\u20ac")["input_ids"][0]  # the first of three bytes
    shown = Answer(tokenizer, load_streamed(talker), write=False, stops=(), on_first_token=print)
    for token in [5, *[start] * 9]:
        shown.put(torch.tensor([token]))
    assert shown.text == "\N{REPLACEMENT CHARACTER}" * 6


@pytest.mark.parametrize("text", ["I do n't , you ' re .", "no space at all .", "a ' b n't' x 've"])
def test_spaces_that_a_tokenizer_takes_away_are_not_shown(talker: Path, text: str) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
        talker,
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )
    ids = tokenizer(text)["input_ids"]
    wanted = tokenizer.decode(ids)
    assert wanted != text
    shown = Answer(tokenizer, load_streamed(talker), write=False, stops=(), on_first_token=print)
    for token in [5, *ids]:
        shown.put(torch.tensor([token]))
        assert wanted.startswith(shown.text)
    shown.end()
    assert shown.text == wanted


def test_a_stop_inside_the_prompt_is_none(talker: Path) -> None:
    """Only what was answered counts."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)
    ids = tokenizer("stop here and go on", return_tensors="pt")["input_ids"]
    assert not StopAt(tokenizer, ["stop"], prompt_tokens=4)(ids, None).item()
    assert StopAt(tokenizer, ["stop"], prompt_tokens=0)(ids[:, :5], None).item()


def test_a_stop_that_comes_with_many_tokens(talker: Path) -> None:
    """A pass of guessed ones brings several; a request that is begun again is seen whole."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(talker)
    words = "go on stop " + "and go on " * 8
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    stop = StopAt(tokenizer, ["stop"], prompt_tokens=0)
    assert not stop(ids[:, :1], None).item()
    assert stop(ids, None).item()
    assert not stop(ids[:, :1], None).item()
    assert stop(ids, None).item()


@pytest.mark.slow
def test_statistics_after_control_c(talker: Path) -> None:
    """What came until then is shown with its figures; the status is still that of SIGINT."""
    process = start("run", talker, PROMPT, "--max-new-tokens", 20_000)
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.endswith("\n")
    for figure in ("peak memory", "tokens/s", "bottleneck"):
        assert figure in errors
    assert "Traceback" not in errors


def test_an_empty_answer_is_said(talker: Path) -> None:
    """Tokens without text are no failure of ours, but look like one."""
    shown = invoke("run", talker, PROMPT, "--no-chat-template", "--max-new-tokens", 1)
    assert (shown.exit_code, shown.stdout) == (0, "\n")
    assert "the answer is empty: 1 token came" in shown.stderr
    assert "empty" not in invoke("run", talker, TALK, *BARE).stderr


# -- prompts and models ----------------------------------------------------------------------------


def test_prompt_from_a_file(talker: Path, tmp_path: Path) -> None:
    """`@FILE` is its text, `@@` a prompt that begins with @."""
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    wanted = answer(talker, PROMPT, *BARE)["text"]
    assert answer(talker, f"@{file}", *BARE)["text"] == wanted
    assert answer(talker, "@@you", *BARE)["prompt_tokens"] == len("@you")


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read the file"), (b"caf\xe9", "no text in UTF-8"), (b" \n", "is empty")],
)
def test_files_that_hold_no_prompt(tmp_path: Path, content: bytes | None, message: str) -> None:
    """Told before any model is looked at."""
    file = tmp_path / "prompt"
    if content is not None:
        file.write_bytes(content)
    assert_one_line(invoke("run", "x", f"@{file}"), 2, message)


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_slash_at_the_end(talker: Path, command: str) -> None:
    """As shells complete it; a folder that is not there is not asked for on the hub."""
    prompt = [PROMPT, *BARE] if command == "run" else []
    assert invoke(command, f"{talker}/", *prompt).exit_code == 0
    refused = invoke(command, "missing/", *prompt)
    assert_one_line(refused, 1, "there is no folder 'missing/'")


def test_more_than_the_models_positions(talker: Path, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A word of warning where the model goes on, one line where it cannot."""
    config = json.loads((talker / "config.json").read_text())
    positions = config.get("max_position_embeddings", 2048)
    folder = shutil.copytree(talker, tmp_path / "llama")
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    shown = invoke("run", folder, PROMPT, *BARE)
    assert shown.exit_code == 0
    assert "made for 16 positions: the prompt has 14 tokens" in shown.stderr
    assert positions > 100
    assert "positions" not in invoke("run", talker, PROMPT, *BARE).stderr
    gpt2 = Path(shutil.copytree(tiny("gpt2"), tmp_path / "gpt2"))
    add_letters(gpt2)
    long = PROMPT * (240 // len(PROMPT))  # a token for each letter
    result = invoke("run", gpt2, long, "--no-chat-template", "--max-new-tokens", 600, "-q")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the model cannot go on behind its 256 positions")
    assert result.stderr.count("\n") == 1


def test_another_models_tokenizer(tmp_path: Path) -> None:
    """A token that the model does not know is told in one line."""
    save_random("llama", tmp_path, "bf16", seed=3)
    save_tokenizer(tmp_path, words=600)
    assert_one_line(invoke("run", tmp_path, "w599", "-q"), 1, "is another model's")


# -- sizes, limits and plans -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["run", PROMPT], "(--max-new-tokens, --tokens)"),
        (["plan"], "(--tokens, --batch)"),
        (["eval", "--text", "TEXT"], "(--window, --batch)"),
        pytest.param(["bench"], "", marks=pytest.mark.slow),
    ],
)
def test_a_refusal_names_options_that_are_there(
    talker: Path, tmp_path: Path, command: list[str], options: str
) -> None:
    """Not those of the function that the command calls."""
    text = tmp_path / "text"
    text.write_text("some text to be predicted")
    words = [str(text) if word == "TEXT" else word for word in command[1:]]
    result = invoke(command[0], talker, *words, "--memory-limit", "1MB")
    assert result.exit_code == 1
    assert "tokens=" not in result.stderr
    assert options in result.stderr
    if not options:
        assert "--tokens" not in result.stderr


@pytest.mark.parametrize("command", ["run", "plan", "bench"])
def test_a_limit_without_its_unit(command: str) -> None:
    """What was meant is asked back."""
    words = [command, "x", *(["hi"] if command == "run" else []), "--memory-limit", "4"]
    assert_one_line(invoke(*words), 2, 'is 4 bytes (did you mean "4GB"?)')


def test_sizes_as_people_type_them(talker: Path) -> None:
    """A letter alone, and an exponent."""
    for text, nbytes in (("40G", 40 * 10**9), ("4e10", 4 * 10**10)):
        shown = invoke("plan", talker, "--memory-limit", text, "--json", "--disk-rate", "1G")
        figures = json.loads(shown.stdout)
        assert figures["memory_limit"] == nbytes
        assert figures["disk_bytes_per_second"] == 10**9


def test_several_limits_make_a_table(talker: Path) -> None:
    """A line each; one that is too small says what would do; as JSON the same figures."""
    with steady_floor():
        least = smallest_limit(talker, dtype="auto")
        limits = [("--memory-limit", n) for n in ("1MB", least + 200_000, "900GB")]
        words = [word for pair in limits for word in pair]
        shown = invoke("plan", talker, *words, "--disk-rate", "1MB")
        found = json.loads(invoke("plan", talker, *words, "--disk-rate", "1MB", "--json").stdout)
    head, small, middle, large, *_ = shown.stdout.splitlines()
    assert head.split() == ["limit", "resident", "read/token", "s/token", "smallest"]
    assert "too small" in small
    assert float(middle.split()[-3]) > 0
    assert large.split()[-3] == "-"
    assert "1.00 MB/s (as given)" in shown.stdout
    assert [plan["too_small"] for plan in found["plans"]] == [True, False, False]
    assert found["plans"][0]["smallest_limit"] == pytest.approx(least, rel=0.01)
    assert found["plans"][1]["bytes_per_pass"] > 0 == found["plans"][2]["bytes_per_pass"]


def test_no_limit_of_several_is_enough(talker: Path) -> None:
    """Then it is the error it always was."""
    refused = invoke("plan", talker, "--memory-limit", "1MB", "--memory-limit", "2MB")
    assert_one_line(refused, 1, "memory_limit=2000000 bytes")


def test_a_plan_in_which_all_fits_says_so(talker: Path) -> None:
    """What is left over is no smallest piece."""
    table = invoke("plan", talker, "--memory-limit", "40GB", "--disk-rate", "1GB").stdout
    unused = next(line for line in table.splitlines() if line.startswith("unused"))
    assert "all weights fit" in unused
    with steady_floor():
        limit = smallest_limit(talker, dtype="auto") + 100_000
        table = invoke("plan", talker, "--memory-limit", limit, "--disk-rate", "1GB").stdout
    assert "smaller than the smallest piece" in table


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("io_mode", ["direct", "uncached", "buffered", "mapped"])
def test_what_may_come_from_the_page_cache_is_not_called_disk(io_mode: str) -> None:
    """A rate above any disk's would be a riddle."""
    rows = {row.name: row.value for row in work_rows(dataclasses.replace(STATS, io_mode=io_mode))}
    past = io_mode in {"direct", "uncached"}
    assert ("read from disk" in rows) == ("waited for disk" in rows) == past
    assert past or "page cache" in rows["read"]


def test_the_benchmark_explains_itself() -> None:
    """What the columns are; above 1 only where that is shown."""
    row = measure._row([sample()])
    assert "rho = T*/T" in legend([row])
    low, high = (dataclasses.replace(row, rho=rho, rho_busy=0.9) for rho in (1.0, 1.2))
    assert "rho above 1" not in legend([low])
    assert "rho above 1" in legend([low, high])


def test_too_many_open_files_are_named_as_that(tmp_path: Path) -> None:
    """The cure is the shell's limit, not the path; nothing stays open."""
    resource = pytest.importorskip("resource")
    files = [tmp_path / f"{number}" for number in range(40)]
    for file in files:
        file.write_bytes(b"x")
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 10, hard))
    try:
        with pytest.raises(ReadError, match=r"all 40 files .* `ulimit -n 104`"):
            FileSet(files, "buffered")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    FileSet(files, "buffered").close()


# -- completion ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "found"), [("pipeload qu", "quantize"), ("pipeload run --temp", "--temperature")]
)
def test_the_shell_completes_commands_and_options(typed: str, found: str) -> None:
    """Without loading torch, as `--help`."""
    done = subprocess.run(
        [sys.executable, "-m", "pipeload"],
        env=os.environ
        | {
            "_PIPELOAD_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(typed.count(" ")),
        },
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert found in done.stdout.split()


def test_a_trace(talker: Path, tmp_path: Path) -> None:
    """Of a run, and of a batch."""
    file, requests = tmp_path / "trace.json", tmp_path / "requests.jsonl"
    assert answer(talker, "x", "--max-new-tokens", 2, "--trace", file)["text"] is not None
    first = json.loads(file.read_text())
    body = {"prompt": "x", "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    requests.write_text(json.dumps(line))
    done = invoke("batch", talker, requests, tmp_path / "results", "--trace", file)
    assert done.exit_code == 0, done.output
    for events in (first, json.loads(file.read_text())):
        assert events[0]["name"] == "thread_name"
