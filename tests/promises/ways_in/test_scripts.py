"""`python -m pipeload script.py`: scripts as users write them do what they do under plain Python.

The scripts lie in `tests/scripts`; they know nothing of pipeload, but for the one that shows which
of its models are streamed.
"""

from __future__ import annotations

import functools
import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from typer.testing import CliRunner

from pipeload.cli.commands import app
from pipeload.entry import script as entry_script
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.conftest import TinyCheckpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROOT = SCRIPTS.parent.parent
# Under a second where nothing heavy is imported; reached only by a test that fails.
WAIT_SECONDS = 300
SPARE_BYTES = 60_000_000
"""What pipelines and batches take beside; a fifth of the model's weights."""


class Done(NamedTuple):
    status: int
    out: bytes
    err: str

    @property
    def line(self) -> str:
        """All that went to stderr, which is one line."""
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1, self.err
        return self.err[:-1]


def environment(**more: str) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    imports = os.pathsep.join([str(ROOT), str(ROOT / "hooks"), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": imports, **more}


def python(*arguments: object, cwd: Path = SCRIPTS, warm: bool = False, **more: str) -> Done:
    """`warm`: by a process that has imported the libraries before."""
    done = subprocess.run(
        [*(warm_python() if warm else [sys.executable]), *map(str, arguments)],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    return Done(done.returncode, done.stdout, done.stderr.decode())


def streamed(*arguments: object, cwd: Path = SCRIPTS, warm: bool = False, **more: str) -> Done:
    return python("-m", "pipeload", *arguments, cwd=cwd, warm=warm, **more)


# -- scripts with a model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refusal(smollm2_bf16: Path) -> Done:
    """What a script ends with whose model needs more."""
    return streamed(
        "--memory-limit",
        "1MB",
        "streamed.py",
        smollm2_bf16,
        warm=True,
        HF_HUB_DISABLE_PROGRESS_BARS="1",
    )


@pytest.fixture(scope="module")
def limit(refusal: Done) -> int:
    """One at which a good part of the model is streamed: what the refusal says, and a little."""
    smallest = re.search(r"smallest limit that works here is (\d+) bytes", refusal.err)
    assert smallest is not None, refusal.err
    return int(smallest[1]) + SPARE_BYTES


@pytest.mark.slow
def test_a_limit_that_is_too_small(refusal: Done) -> None:
    """One line, with the script's own line, and no traceback."""
    assert refusal.status == 1
    assert refusal.line.startswith("error: memory_limit=1000000 bytes (1.00 MB) is too small.")
    assert "at once (--tokens, --batch) lower it" in refusal.line
    script = SCRIPTS / "streamed.py"
    lines = script.read_text().splitlines()
    called = next(n for n, line in enumerate(lines, start=1) if line.startswith('show("auto"'))
    assert refusal.line.endswith(f"({script}, line {called})")


COMMANDS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "generate": ("generate.py", (), 0),
    "chat": ("chat.py", (), 0),
    "evaluation": ("evaluate.py", ("--batch", "2", "--memory-limit", "mine"), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few(COMMANDS, ["generate"]))
def test_an_unmodified_script(name: str, smollm2_bf16: Path, limit: int, tmp_path: Path) -> None:
    """The same bytes on stdout and the same exit status, from whatever folder it is called."""
    script, arguments, status = COMMANDS[name]
    words = (SCRIPTS / script, smollm2_bf16, *arguments)
    plain = python(*words, cwd=tmp_path, warm=True)
    assert plain.status == status, plain.err
    assert plain.out
    got = streamed("--memory-limit", limit, *words, cwd=tmp_path)
    assert (got.status, got.out.decode()) == (status, plain.out.decode()), got.err
    assert list(tmp_path.iterdir()) == []


ALL_STREAMED = "auto True True\npipeline True True\nthread True True\n"


@pytest.mark.slow
def test_the_models_are_streamed(smollm2_bf16: Path, limit: int) -> None:
    """With that limit, wherever a script loads them."""
    got = streamed(f"--memory-limit={limit}", "streamed.py", smollm2_bf16, warm=True)
    assert got.out.decode() == ALL_STREAMED, got.err


_OPTIONS = """
import pipeload, sys, torch
from transformers import AutoModelForCausalLM
for attempt in range(2):
    try:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    except pipeload.OptionError as error:
        print(error)
    else:
        plan = model.pipeload.plan
        print(plan.memory_limit, plan.readers, plan.io_mode)
        print(pipeload.entry.api._enclosing().hint)
        del model
        break
"""


@pytest.mark.sweep
def test_by_the_environment(tiny: TinyCheckpoint) -> None:
    """Importing pipeload is enough where PIPELOAD_MEMORY_LIMIT is set; options may be there, too.

    They hold for what is not typed; one that means nothing is named at every load, and none is
    plain.
    """
    folder = tiny("llama")
    named = functools.partial(
        python, PIPELOAD_TOKENS="40", PIPELOAD_READERS="3", PIPELOAD_BATCH=" 2 "
    )
    got = named("-c", _OPTIONS, folder, PIPELOAD_MEMORY_LIMIT="40GB")
    assert got.out.decode().endswith("PassHint(tokens=40, batch=2)\n"), got
    assert got.out.startswith(b"40000000000 3 ")
    words = ("--tokens", "30", "--stats", "-c", _OPTIONS, folder)
    got = named("-m", "pipeload", *words, PIPELOAD_MEMORY_LIMIT="3GB")
    assert got.out.decode().endswith("PassHint(tokens=30, batch=2)\n"), got
    assert "LlamaForCausalLM\nmemory limit    3.00 GB\n" in got.err
    got = python("-c", _OPTIONS, folder, PIPELOAD_MEMORY_LIMIT="40GB", PIPELOAD_IO_MODE="quick")
    said = "the environment variable PIPELOAD_IO_MODE: io_mode='quick' is unknown. Choose one of"
    assert [line.startswith(said) for line in got.out.decode().splitlines()] == [True, True], got


# -- what a script sees ----------------------------------------------------------------------------


def as_plain(*words: object, cwd: Path = SCRIPTS) -> tuple[Done, Done]:
    """What each says; the second without the line that there was no model, if all went well."""
    plain, got = python(*words, cwd=cwd), streamed("--memory-limit", "4GB", *words, cwd=cwd)
    return plain, without_note(got) if plain.status == 0 else got


def without_note(done: Done) -> Done:
    *before, note = done.err.splitlines(keepends=True)
    assert note.startswith("pipeload: no model was streamed in this process.")
    return done._replace(err="".join(before))


def test_where_a_script_finds_itself(tmp_path: Path) -> None:
    """Name, file, arguments and path are Python's own; no heavy library is imported yet."""
    (tmp_path / "link.py").symlink_to(SCRIPTS / "where.py")
    for path in ("where.py", SCRIPTS / "where.py", "../scripts/where.py", tmp_path / "link.py"):
        plain, got = as_plain(path, "--tokens", "3", "-m", "--help")
        assert plain.status == 0
        assert got == plain
        assert plain.out.endswith(b"[]\n")


def test_a_module() -> None:
    """With -m, what follows the module's name is the module's."""
    plain, got = as_plain("-m", "where", "--tokens", "3", "--help")
    assert plain.status == 0
    assert got == plain
    assert without_note(streamed("-mwhere", "--tokens", "3", "--help")) == plain


def test_code(tmp_path: Path) -> None:
    """That is typed, or comes by standard input."""
    code = "import sys; print(__name__, sys.argv, sys.path[0], sorted(globals()))"
    for words in (["-c", code], [f"-c{code}"], ["-c", "raise LookupError('its own')"]):
        plain, got = as_plain(*words, "--tokens", "3", cwd=tmp_path)
        assert got == plain
    done = [
        subprocess.run(
            [sys.executable, *words, "-", "--tokens", "3"],
            cwd=tmp_path,
            env=environment(),
            input=code,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in ([], ["-m", "pipeload"])
    ]
    assert done[0] == done[1] != ""


def test_what_else_python_runs(tmp_path: Path) -> None:
    """A folder and an archive, which come first on the path, and a compiled file."""
    folder = tmp_path / "folder"
    folder.mkdir()
    code = "import sys, beside\nprint(__name__, sys.argv, sys.path[0], beside.VALUE)\n"
    (folder / "__main__.py").write_text(code)
    (folder / "beside.py").write_text("VALUE = 5\n")
    with zipfile.ZipFile(tmp_path / "archive.pyz", "w") as archive:
        for file in ("__main__.py", "beside.py"):
            archive.write(folder / file, file)
    compiled = py_compile.compile(str(SCRIPTS / "where.py"), str(tmp_path / "where.pyc"))
    for name in ("folder", "archive.pyz", compiled):
        plain, got = as_plain(name, "argument", cwd=tmp_path)
        assert plain.status == 0, plain.err
        assert got == plain


def test_processes_that_start_anew() -> None:
    """They find the script's functions again."""
    plain, got = as_plain("spread.py")
    assert (
        plain.out == b"[(0, 'spread.py'), (1, 'spread.py'), (4, 'spread.py'), (9, 'spread.py')]\n"
    )
    assert got == plain


def test_an_error_of_the_scripts_own() -> None:
    """The traceback is the script's, without ours."""
    plain, got = as_plain("where.py", "raise")
    assert plain.status == 1
    assert "LookupError: the script's own" in plain.err
    assert got == plain


def test_a_script_that_cannot_be_compiled(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("x = (1\n")
    plain, got = as_plain("broken.py", cwd=tmp_path)
    assert "SyntaxError" in plain.err
    assert got == plain


def test_ctrl_c() -> None:
    """The script ends as Python's own: by the signal."""
    ends = []
    for words in (["where.py", "wait"], ["-m", "pipeload", "where.py", "wait"]):
        # A shell's background job ignores SIGINT, and so would what it starts.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            child = subprocess.Popen(
                [sys.executable, *words],
                cwd=SCRIPTS,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        with child:
            assert child.stdout is not None
            while "waiting" not in child.stdout.readline():
                assert child.poll() is None
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=WAIT_SECONDS)
        lines = err.splitlines()  # which of the script's lines it was is a matter of time
        ends.append((child.returncode, lines[:1], lines[1].split(",")[0], lines[-1]))
    assert ends[0] == ends[1]
    assert ends[0][0] == -signal.SIGINT
    assert ends[0][-1] == "KeyboardInterrupt"


# -- the command line ------------------------------------------------------------------------------

WRONG: dict[str, tuple[Sequence[str], int, str]] = {
    "no file": (["absent.py"], 2, "there is no file 'absent.py'"),
    "no script": (["--memory-limit", "1GB"], 2, "name a script, a module with -m, or code with"),
    "no code": (["--stats", "-c"], 2, "-c needs code"),
    "no module": (["-m"], 2, "-m needs the name of a module"),
    "an unknown module": (["-m", "no_such.module"], 1, "No module named 'no_such.module'"),
    "a module below one": (["-m", "where.inner"], 1, "No module named 'where.inner'"),
    "no limit": (["--memory-limit", "4XB", "where.py"], 2, "--memory-limit='4XB'"),
    "no share": (["--memory-limit=150%", "where.py"], 2, "--memory-limit='150%'"),
    "no number": (["--tokens", "0", "where.py"], 2, "'0' must be a whole number of at least 1"),
    "an unknown option": (
        ["--fast", "where.py"],
        2,
        "--fast where.py. See python -m pipeload --help.",
    ),
    "a file that cannot be read": (["/proc/self/mem"], 2, "cannot read '/proc/self/mem'"),
    "a limit without a value": (["--memory-limit"], 2, "--memory-limit: expected one argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and a status that a shell can tell from a script's own."""
    words, status, message = WRONG[name]
    monkeypatch.chdir(SCRIPTS)
    for attribute in ("argv", "path", "excepthook", "meta_path"):
        value = getattr(sys, attribute)
        monkeypatch.setattr(sys, attribute, list(value) if isinstance(value, list) else value)
    monkeypatch.syspath_prepend("replaced")
    monkeypatch.setattr(entry_script, "stream_when_imported", lambda *_args, **_options: None)
    monkeypatch.setattr("pipeload.entry.script_end.ScriptEnd.follow", lambda _self: None)
    with pytest.raises(SystemExit) as end:
        entry_script.run(words)
    assert end.value.code == status
    out, err = capsys.readouterr()
    done = Done(status, out.encode(), err)
    assert done.line.startswith("error: ")
    assert message in done.line


def test_as_a_child_says_it() -> None:
    """The same through the interpreter."""
    got = streamed("absent.py")
    assert (got.status, got.out) == (2, b"")
    assert "there is no file 'absent.py'" in got.line
    assert "unknown unit" in streamed("--memory-limit", "4XB", "where.py").line


def test_options_reach_the_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before the script are ours, those after it are its own."""
    words = (
        "--memory-limit 2GB --tokens=40 --batch 2 --io-mode buffered --readers 3 --pressure auto "
        "--exact-inputs --stats --device cuda:1 --host-memory-limit 8GB"
    )
    options, target = entry_script._parse([*words.split(), str(SCRIPTS), "--tokens", "9"])
    assert vars(options) == {
        "memory_limit": "2GB",
        "tokens": 40,
        "batch": 2,
        "io_mode": "buffered",
        "readers": 3,
        "pressure": "auto",
        "exact_inputs": True,
        "device": "cuda:1",
        "host_memory_limit": "8GB",
        "stats": True,
    }
    assert target == ("path", str(SCRIPTS), ["--tokens", "9"])
    monkeypatch.chdir(SCRIPTS)
    assert entry_script._parse(["--", "where.py", "-x"])[1] == ("path", "where.py", ["-x"])
    assert entry_script._parse(["-m", "json.tool", "-m"])[1] == ("-m", "json.tool", ["-m"])
    assert entry_script._parse(["--stats", "-", "-x"])[1] == ("-", "-", ["-x"])
    assert entry_script._parse(["where.py"])[0].memory_limit == "auto"


def test_help_tells_about_scripts() -> None:
    """Both helps name the command."""
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    assert "python -m pipeload --memory-limit 2GB script.py ..." in shown
    assert b"script.py" in streamed("--memory-limit", "1GB", "--help").out
