"""The command line: what it prints where, its exit statuses, and that it starts lightly."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import transformers

import pipeload
from pipeload.bench import measure
from pipeload.cli import plan as cli_plan
from pipeload.cli.prompt import read_prompt
from pipeload.demo import model as demo_model
from pipeload.ring import head_rows
from tests.support.commands import ROOT, answer, invoke, start
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import load_plain, save_random, skip_or_fail
from tests.support.streaming import smallest_limit, steady_floor
from tests.support.talking import add_letters
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

PROMPT = "Say something."


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer of single bytes and a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    save_random("llama", folder, "bf16", seed=11)
    add_letters(folder)
    return folder


def plain_answer(folder: Path, prompt: str, new_tokens: int) -> str:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    model = load_plain(folder)
    output = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    new = output[0, inputs["input_ids"].shape[1] :]
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text


# -- starting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    """Asking for help is quick."""
    code = (
        "import sys, pipeload.cli.commands\n"
        "try: pipeload.cli.commands.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert "pipeload" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_openmp_is_told_to_wait_passively_before_torch_loads(
    tiny: TinyCheckpoint, given: str | None, expected: str
) -> None:
    """libgomp looks at the variable when torch is imported, never again."""
    code = (
        "import os, sys, pipeload.cli.commands\n"
        "class Watch:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch':\n"
        "            print('seen ' + os.environ['OMP_WAIT_POLICY'], flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "pipeload.cli.commands.main()"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    command = [sys.executable, "-c", code, "plan", str(tiny("llama")), "--disk-rate", "1GB"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert f"seen {expected}" in done.stdout


# -- run -----------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_the_rest_to_stderr(talker: Path) -> None:
    """The text is that of plain transformers; statistics do not mix with it."""
    result = invoke("run", talker, PROMPT, "--no-chat-template", "--max-new-tokens", 12)
    assert result.exit_code == 0
    assert result.stdout == plain_answer(talker, PROMPT, 12) + "\n"
    for figure in ("memory limit", "peak memory", "GB/s", "tokens/s", "per pass", "bottleneck"):
        assert figure in result.stderr


def test_quiet_leaves_only_the_text(talker: Path) -> None:
    """--quiet silences stderr altogether."""
    result = invoke("run", talker, PROMPT, "--quiet", "--max-new-tokens", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.endswith("\n")


def test_json_holds_text_and_figures(talker: Path) -> None:
    """One object, raw numbers; the same text as without --json."""
    with steady_floor():
        limit = smallest_limit(talker, dtype="auto", tokens=40) + 200_000
        figures = answer(talker, PROMPT, "--memory-limit", limit, "--max-new-tokens", 5)
        shown = invoke("run", talker, PROMPT, "-q", "--memory-limit", limit, "--max-new-tokens", 5)
    assert shown.stdout == figures["text"] + "\n"
    assert figures["memory_limit"] == limit
    assert figures["new_tokens"] == figures["passes"] == 5
    assert figures["tokens_per_pass"] == 1.0
    assert figures["bytes_per_pass"] > 0
    assert figures["bytes_read"] >= 5 * figures["bytes_per_pass"]
    assert figures["bottleneck"] in {"disk", "compute"}
    numbers = {k for k, v in figures.items() if isinstance(v, (int, float))}
    assert set(figures) - numbers == {
        "model",
        "text",
        "seed",
        "io_mode",
        "bottleneck",
        "device",
    }
    assert all(isinstance(v, int) for k, v in figures.items() if k.endswith("_bytes"))


def test_a_seed_samples_and_repeats(talker: Path) -> None:
    """The same seed gives the same text, another one another; without one it is greedy."""
    texts = [
        answer(talker, PROMPT, "--max-new-tokens", 12, *seed)["text"]
        for seed in (["--seed", 1], ["--seed", 1], ["--seed", 2], [], [])
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4] != texts[0]


@pytest.mark.parametrize("prompt", [[], ["-"]])
def test_prompt_from_standard_input(talker: Path, prompt: list[str]) -> None:
    """A dash or nothing reads it."""
    rest = ("--max-new-tokens", 4, "--quiet")
    piped = invoke("run", talker, *prompt, *rest, stdin=PROMPT)
    assert piped.stdout == invoke("run", talker, PROMPT, *rest).stdout


def test_the_last_line_end_is_no_part_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`echo` and editors add it; what else stands at the end stays."""
    file = tmp_path / "prompt"
    for text, read in (("w3\n", "w3"), ("w3", "w3"), (" w3\n\n", " w3\n")):
        file.write_text(text)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert read_prompt("-") == read_prompt(f"@{file}") == read


def test_chat_template_and_system_message(talker: Path) -> None:
    """The template is used when there is one; --no-chat-template leaves the bare prompt."""

    def tokens(*options: str) -> int:
        return int(answer(talker, PROMPT, "--max-new-tokens", 1, *options)["prompt_tokens"])

    bare = len(PROMPT)
    assert tokens("--no-chat-template") == bare
    assert tokens() == bare + len("<user><answer>")
    assert tokens("--system", "Be brief.") == bare + len("<system>Be brief.<user><answer>")


def test_dtype_is_that_of_memory(talker: Path) -> None:
    """Weights cast to fp32 take more room: not twice, as small ones fill pages anyway."""
    sizes = [
        answer(talker, PROMPT, "--max-new-tokens", 1, "--dtype", dtype)["resident_bytes"]
        for dtype in ("bf16", "fp32")
    ]
    assert sizes[1] > 1.3 * sizes[0]


@pytest.mark.slow
def test_progress_on_a_terminal(talker: Path) -> None:
    """On a terminal a bar counts layers, and is gone before the text."""
    mine, theirs = pty.openpty()
    command = [*warm_python(), "-m", "pipeload", "run", str(talker), PROMPT]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "2"], stdout=subprocess.DEVNULL, stderr=theirs, cwd=ROOT
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(mine, 4096)
        except OSError:  # how a pseudo terminal tells its end
            break
        shown += piece
        if not piece:
            break
    os.close(mine)
    assert process.wait(60) == 0
    assert b"first pass" in shown
    assert b"/6" in shown


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./missing"], "no folder './missing'"),
        (["no-such-model"], "no folder here, and the hub gave no model"),
        ([str(ROOT / "pyproject.toml")], "is a file"),
        ([str(ROOT)], "no config.json"),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_no_such_model(command: str, arguments: list[str], message: str) -> None:
    """One line says what is wrong; exit status 1."""
    result = invoke(command, *arguments, *(["hi", "-q"] if command == "run" else ["--json"]))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_no_tokenizer(tiny: TinyCheckpoint) -> None:
    """Weights alone can be planned, not talked to."""
    result = invoke("run", tiny("llama"), PROMPT)
    assert result.exit_code == 1
    assert "no tokenizer" in result.stderr
    assert invoke("plan", tiny("llama")).exit_code == 0


def test_system_without_a_template(talker: Path, tmp_path: Path) -> None:
    """An option that could not change anything is refused."""
    for file in talker.iterdir():
        if "template" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    result = invoke("run", tmp_path, PROMPT, "--system", "Be brief.")
    assert result.exit_code == 1
    assert "chat template" in result.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_too_small_a_limit_names_one_that_works(talker: Path, command: str) -> None:
    """The error holds the smallest limit, and that one works."""
    with steady_floor():
        refused = invoke(command, talker, *["hi"][: command == "run"], "--memory-limit", "1MB")
        assert refused.exit_code == 1
        smallest = refused.stderr.split("works here is ")[1].split()[0]
        assert answer(talker, "hi", "--memory-limit", smallest)["memory_limit"] == int(smallest)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--memory-limit", "2XB"],
        ["--max-new-tokens", "0"],
        ["--dtype", "int3"],
        ["--io-mode", "fast"],
        ["--no-such-option"],
        ["--system", "x", "--no-chat-template"],
    ],
)
def test_usage_errors(talker: Path, arguments: list[str]) -> None:
    """What cannot be meant is told before anything is loaded; exit status 2."""
    assert invoke("run", talker, PROMPT, *arguments).exit_code == 2


def test_an_empty_prompt_is_a_usage_error(talker: Path) -> None:
    """There is nothing to answer."""
    assert invoke("run", talker, stdin=" \n").exit_code == 2


def test_debug_shows_the_traceback(talker: Path) -> None:
    """With --debug the error comes out as it is."""
    result = invoke("run", talker, PROMPT, "--memory-limit", "1MB", "--debug")
    assert isinstance(result.exception, pipeload.MemoryLimitError)


@pytest.mark.slow
def test_control_c_ends_quietly(talker: Path) -> None:
    """SIGINT in the middle of an answer: exit status 130, no traceback."""
    process = start("run", talker, PROMPT, "--max-new-tokens", 20_000)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()


@pytest.mark.slow
def test_a_closed_pipe_ends_quietly(talker: Path) -> None:
    """`pipeload run ... | head -c 1` is no error to talk about."""
    process = start("run", talker, PROMPT, "--max-new-tokens", 20_000)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.wait(60) == 141
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


# -- plan, demo, bench ---------------------------------------------------------------------------


def test_plan_predicts_from_a_given_rate(talker: Path) -> None:
    """Bytes per token over the rate, and every figure of the table."""
    with steady_floor():
        limit = smallest_limit(talker, dtype="auto") + 100_000
        options = ("--memory-limit", limit, "--disk-rate", "1MB")
        figures = json.loads(invoke("plan", talker, *options, "--json").stdout)
        table = invoke("plan", talker, *options).stdout
    assert figures["units"] == 7  # six blocks and the head
    assert figures["tokens_per_second"] == pytest.approx(1e6 / figures["bytes_per_token"])
    assert figures["disk_rate_measured"] is False
    assert figures["smallest_limit"] <= limit
    for word in ("memory limit", "smallest that works", "7 units", "1.00 MB/s (as given)"):
        assert word in table


def test_plan_measures_the_disk(talker: Path) -> None:
    """Without --disk-rate the checkpoint itself is read for a moment."""
    figures = json.loads(invoke("plan", talker, "--json").stdout)
    assert figures["disk_rate_measured"] is True
    assert figures["disk_bytes_per_second"] > 0


def test_plan_for_several_machines(talker: Path) -> None:
    """What each gets and what it brings, for people and for programs."""
    options = ["plan", talker, "--machine", "4GB@1GB", "--machine", "4GB@1kB"]
    table = invoke(*options).stdout
    assert "computing takes longest" in table
    useless = invoke("plan", talker, "--machine", "4GB@1GB", "--machine", "100MB@1kB").stdout
    assert "no faster with this one" in useless
    assert "reading takes longest" in useless
    figures = json.loads(invoke(*options, "--json").stdout)
    assert len(figures["machines"]) == len(figures["seconds_per_token"]) == 2
    assert {*figures["owners"]} == {0, 1}


def test_plan_for_several_machines_and_rows_of_the_head(
    talker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some for each where that is exact; the owners are those of blocks then."""
    options = ["plan", talker, "--machine", "4GB@1GB", "--machine", "4GB@1GB"]
    monkeypatch.setattr(head_rows, "can_cut_rows", lambda _cut: True)
    table = invoke(*options).stdout
    shared = json.loads(invoke(*options, "--json").stdout)
    (start, middle), (same, stop) = (one["head_rows"] for one in shared["machines"])
    assert 0 == start < middle == same < stop
    assert f"and rows 0:{middle} of the head" in table
    assert f"and rows {middle}:{stop} of the head" in table
    monkeypatch.setattr(head_rows, "can_cut_rows", lambda _cut: False)
    whole = json.loads(invoke(*options, "--json").stdout)
    assert "of the head" not in invoke(*options).stdout
    assert [one["head_rows"] for one in whole["machines"]] == [None, None]
    assert len(whole["owners"]) == len(shared["owners"]) + 1


def test_run_with_ranks_where_there_are_none(talker: Path) -> None:
    """By itself it answers as ever; a number that is not there is refused."""
    words = ["run", talker, "w3 w4", "--max-new-tokens", 2, "-q"]
    plain = invoke(*words).stdout
    assert invoke(*words, "--ranks", "auto").stdout == plain
    refused = invoke(*words, "--ranks", "3")
    assert "ranks=3, and the environment says WORLD_SIZE=1" in refused.stderr


@pytest.mark.sweep
def test_demo_streams_and_knows_the_capital(smollm2_bf16: Path, tmp_path: Path) -> None:
    """The limit it picks holds only a part and is kept, and the answer is right."""
    folder = tmp_path / "smollm2"
    folder.symlink_to(smollm2_bf16)
    check_demo(folder)


@pytest.mark.slow
def test_the_first_demo_keeps_its_limit(tmp_path: Path) -> None:
    """Making the model takes more memory than the limit; that is another process's."""
    try:
        demo_model._find_gguf()
    except pipeload.PipeloadError as error:
        skip_or_fail(str(error), required_by="PIPELOAD_REQUIRE_MODELS")
    check_demo(tmp_path / "smollm2")


@pytest.mark.slow
def test_the_demos_limit_is_no_less_than_the_peak_before(
    smollm2_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may take more while it loads; and a quarter of the model is read all the same."""
    monkeypatch.setattr("pipeload.cli.plan.peak_rss_bytes", lambda: 0)
    least = cli_plan.choose_limit(str(smollm2_bf16), debug=True)
    for peak in (least + 20_000_000, 1 << 40):
        monkeypatch.setattr("pipeload.cli.plan.peak_rss_bytes", lambda peak=peak: peak)
        limit = cli_plan.choose_limit(str(smollm2_bf16), debug=True)
        assert limit > least + 10_000_000
        plan = pipeload.plan(smollm2_bf16, memory_limit=limit, dtype="auto")
        assert plan.bytes_per_pass > 30_000_000


def check_demo(folder: Path) -> None:
    process = start("demo", "--folder", folder, "--json")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    figures = json.loads(output)
    assert "Paris" in figures["text"]
    assert figures["bytes_per_pass"] > 50_000_000
    assert figures["io_mode"] != "buffered"
    assert figures["peak_rss_bytes"] <= figures["memory_limit"]


def test_demo_does_not_replace_a_folder_of_others(tmp_path: Path) -> None:
    """The error of the process that makes the model is this command's."""
    (tmp_path / "own").write_text("not ours")
    result = invoke("demo", "--folder", tmp_path)
    assert result.exit_code == 1
    assert "was not made by pipeload" in result.stderr


def test_bench_hands_its_options_on(talker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command only parses; without a limit it picks one that streams."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(measure, "run", lambda **options: calls.append(options))
    two = ("--memory-limit", "1GB", "--memory-limit", "2GB", "--new-tokens", 3, "--rounds", 1)
    assert invoke("bench", talker, *two, "--json").exit_code == 0
    with steady_floor():
        assert invoke("bench", talker).exit_code == 0
        smallest = smallest_limit(talker, dtype="auto")
    assert calls[0] == {
        "model": str(talker),
        "limits": ["1GB", "2GB"],
        "new_tokens": 3,
        "rounds": 1,
        "as_json": True,
        "device": "cpu",
        "host_memory_limits": [None],
        "progress": None,
    }
    assert calls[1]["progress"] is not None
    assert calls[1]["limits"][0] == pytest.approx(smallest, rel=0.01)
    assert not calls[1]["as_json"]
