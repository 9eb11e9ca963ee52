"""What users do wrong on the command line is told in one line, never by a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pipeload.cli import commands, exit_status
from pipeload.cli.commands import app
from pipeload.cli.exit_status import Commands
from pipeload.cli.prompt import read_prompt
from tests.rooms.quantiser.test_quantise import Full
from tests.support.commands import invoke, save_tokenizer
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.models import save_random
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "w3 w4"
WEIGHING = ("run", "eval", "quantize")
BOTH = ("run", "eval")  # what needs a tokenizer
ALL = ("run", "plan", "eval", "quantize")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer; tests copy it."""
    folder = tmp_path_factory.mktemp("good")
    save_random("llama", folder, "bf16", seed=3)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("w3 w4 w5 w6 w7")
    return file


def assert_one_line(result: Any, status: int, message: str) -> None:
    """On stderr alone, with the status; a SystemExit, nothing else, ended the command."""
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.endswith("\n")
    assert message in result.stderr


def words_of(command: str, model: object, tmp_path: Path) -> list[object]:
    """A command line that would do, were the model one."""
    file = tmp_path / "text.txt"
    file.write_text("w3 w4 w5 w6 w7")
    rest: dict[str, list[object]] = {
        "run": [PROMPT, "--max-new-tokens", 1, "-q"],
        "plan": ["--disk-rate", "1GB", "--json"],
        "eval": ["--text", file, "-q"],
        "quantize": [tmp_path / "target", "-q"],
        "bench": ["--memory-limit", "1GB", "--json"],
    }
    return [command, model, *rest[command]]


# -- folders that hold no usable model -------------------------------------------------------------


class Mistake(NamedTuple):
    """Something wrong with a folder."""

    make: Callable[[Path], object]
    message: str
    commands: Sequence[str] = ALL


def put(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return make


def configure(**values: object) -> Callable[[Path], object]:
    """Change config.json; None takes a key out."""

    def make(folder: Path) -> None:
        file = folder / "config.json"
        found = json.loads(file.read_text()) | values
        file.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return make


def cut_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 10_000)


def drop_a_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})


def make_unreadable(folder: Path) -> None:
    """As root could not be kept out by permissions, a folder stands where a file should."""
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


FOLDERS = {
    "no config.json": Mistake(remove("config.json"), "has no config.json"),
    "config.json is no JSON": Mistake(put("config.json", b"{"), "not a valid JSON"),
    "config.json is binary": Mistake(put("config.json", b"\xff\xfe\0"), "not a valid JSON"),
    "config.json is a list": Mistake(put("config.json", b"[]"), "Unrecognized model"),
    "config.json is a folder": Mistake(make_unreadable, "Unrecognized model"),
    "config.json is empty": Mistake(put("config.json", b"{}"), "Unrecognized model"),
    "no model_type": Mistake(
        configure(model_type=None, architectures=None), "Should have a `model_type` key"
    ),
    "an unknown model_type": Mistake(configure(model_type="nonsense"), "nonsense"),
    "a model of another kind": Mistake(configure(model_type="clip"), "cannot "),
    "a size that is a word": Mistake(configure(hidden_size="big"), "'hidden_size'"),
    "sizes that do not fit": Mistake(configure(hidden_size=100, head_dim=None), "(100)"),
    "no heads": Mistake(configure(num_attention_heads=0), "ZeroDivisionError"),
    "an unknown activation": Mistake(configure(hidden_act="nonsense"), "KeyError: 'nonsense'"),
    "an unknown dtype": Mistake(configure(dtype="nonsense"), "nonsense"),
    "an unknown quantisation": Mistake(
        configure(quantization_config={"quant_method": "nonsense"}), "quantised by 'nonsense'"
    ),
    "a quantisation that is a word": Mistake(configure(quantization_config="x"), "cannot load"),
    "a tensor is missing": Mistake(
        drop_a_tensor, "lacks 'model.layers.1.mlp.up_proj.weight', and", WEIGHING
    ),
    "layers without weights": Mistake(
        configure(num_hidden_layers=40), "input_layernorm.weight' and", WEIGHING
    ),
    "no weights": Mistake(remove("model.safetensors"), "no safetensors checkpoint"),
    "weights cut short": Mistake(cut_weights, "truncated"),
    "weights that are none": Mistake(put("model.safetensors", b"no weights"), "header"),
    "empty weights": Mistake(put("model.safetensors", b""), "truncated: got 0 bytes"),
    "an index that is none": Mistake(
        lambda f: (remove("model.safetensors")(f), put("model.safetensors.index.json", b"{")(f)),
        "its JSON is not valid",
    ),
    "no tokenizer": Mistake(
        remove("tokenizer.json", "tokenizer_config.json"), "has no tokenizer", BOTH
    ),
    "a broken tokenizer": Mistake(put("tokenizer.json", b"{"), "has no tokenizer", BOTH),
    "a tokenizer that is a list": Mistake(
        put("tokenizer_config.json", b"[]"), "has no tokenizer", BOTH
    ),
    "a template that refuses": Mistake(
        put("chat_template.jinja", b"{{ raise_exception('no system') }}"), ": no system", ("run",)
    ),
    "a template that is none": Mistake(
        put("chat_template.jinja", b"{% for"), "chat template does not take this", ("run",)
    ),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [(command, name) for name, mistake in FOLDERS.items() for command in mistake.commands],
)
def test_a_folder_without_a_usable_model(
    command: str, name: str, good: Path, tmp_path: Path
) -> None:
    """One line, exit status 1, and nothing written."""
    folder = shutil.copytree(good, tmp_path / "model")
    FOLDERS[name].make(folder)
    assert_one_line(invoke(*words_of(command, folder, tmp_path)), 1, FOLDERS[name].message)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("command", [*ALL, "bench"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./missing", "there is no folder './missing'"),
        ("no-such-model", "no folder here, and the hub gave no model"),
        (str(ROOT / "pyproject.toml"), "is a file"),
        (str(ROOT / "tests"), "has no config.json"),
    ],
)
def test_no_folder_at_all(command: str, model: str, message: str, tmp_path: Path) -> None:
    """Nor a hub model."""
    assert_one_line(invoke(*words_of(command, model, tmp_path)), 1, message)
    assert not (tmp_path / "target").exists()


def test_a_config_without_architectures_is_no_mistake(good: Path, tmp_path: Path) -> None:
    """The model type says enough."""
    folder = shutil.copytree(good, tmp_path / "model")
    configure(architectures=None)(folder)
    assert invoke(*words_of("plan", folder, tmp_path)).exit_code == 0


# -- words that mean nothing -----------------------------------------------------------------------

USAGE: dict[str, tuple[list[str], str]] = {
    "run: limit": (["run", "x", "y", "--memory-limit", "2XB"], "has the unknown unit"),
    "run: no limit": (["run", "x", "y", "--memory-limit", ""], "--memory-limit='' is not a size"),
    "run: share": (["run", "x", "y", "--memory-limit", "0%"], "is no percentage"),
    "run: tokens": (["run", "x", "y", "--max-new-tokens", "0"], "'--max-new-tokens'"),
    "run: dtype": (["run", "x", "y", "--dtype", "int3"], "'--dtype'"),
    **{
        f"{name}: ranks": ([name, "x", "--ranks", "2"], "No such option: --ranks. Several machines")
        for name in ("chat", "serve")
    },
    "run: option": (["run", "x", "y", "--fast"], "No such option: --fast"),
    "run: no model": (["run"], "Missing argument"),
    "run: system": (["run", "x", "y", "--system", "s", "--no-chat-template"], "--system needs"),
    "run: empty prompt": (["run", "x", " "], "the prompt is empty"),
    "run: no letters": (["run", "x", "caf\udce9"], "no text in UTF-8"),
    "plan: machine": (["plan", "x", "--machine", "8GB"], "'8GB' is no LIMIT@RATE"),
    "plan: its limit": (["plan", "x", "--machine", "8@b"], "--machine="),
    "run: ranks": (["run", "x", "y", "--ranks", "0"], "'0' is neither"),
    "plan: rate": (["plan", "x", "--disk-rate", "fast"], "--disk-rate='fast' is not a size"),
    "plan: limit": (["plan", "x", "--memory-limit", "-1GB"], "--memory-limit='-1GB'"),
    "eval: no text": (["eval", "x"], "Missing option '--text'"),
    "eval: window": (["eval", "x", "--text", "y", "--window", "1"], "'--window'"),
    "bench: limit": (["bench", "x", "--memory-limit", "much"], "--memory-limit='much'"),
    "bench: interpreter": (["bench", "x", "--python", "airllm"], "'airllm' is no NAME=PATH"),
    "bench: of no contender": (["bench", "x", "--gguf", "y"], "name some in --compare"),
    "bench: on a device": (["bench", "x", "--compare", "plain", "--device", "cuda"], "drop --dev"),
    "bench: rounds": (["bench", "x", "--rounds", "none"], "'--rounds'"),
    "quantize: method": (["quantize", "x", "y", "--method", "int2"], "'--method'"),
    "quantize: no target": (["quantize", "x"], "Missing argument"),
    "demo: limit": (["demo", "--memory-limit", "1 apple"], "unknown unit"),
    "no command": (["stream"], "No such command 'stream'"),
}


@pytest.mark.parametrize("name", USAGE)
def test_words_that_mean_nothing(name: str) -> None:
    """One line that names the command's help; exit status 2, and no model was looked at."""
    words, message = USAGE[name]
    result = invoke(*words)
    assert_one_line(result, 2, message)
    assert result.stderr.endswith("--help.\n")


def test_a_command_that_is_misspelt() -> None:
    """The question ends as one."""
    result = invoke("rnu")
    assert_one_line(result, 2, "Did you mean 'run'? See ")


def test_a_value_that_is_none_of_those() -> None:
    """Without the kind of error that a library puts before it."""
    result = invoke("quantize", "x", "y", "--method", "int2")
    assert_one_line(result, 2, "'--method': 'int2' is not one of")


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no object for it then."""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(typer.BadParameter, match=r"standard input is closed\. Type the prompt"):
        read_prompt("-")


def test_help_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`pipeload --help > FILE` on a full disk."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Commands, "get_help", fail)
    monkeypatch.setattr(exit_status, "_drop_output", lambda: None)
    with pytest.raises(SystemExit) as caught:
        app(["--help"], prog_name="pipeload")
    assert caught.value.code == 1
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 79, 80])
def test_help_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every option's name is there to be typed."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(app, "rich_markup_mode", app.rich_markup_mode)
    monkeypatch.setattr(sys, "argv", ["pipeload", "run", "--help"])
    with pytest.raises(SystemExit):
        commands.main()
    shown = capsys.readouterr().out
    assert "--repetition-penalty" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_prompt_from_a_file_that_is_no_text() -> None:
    """Standard input may be anything."""
    result = CliRunner().invoke(app, ["run", "x"], input=b"caf\xe9")
    assert_one_line(result, 2, "no text in UTF-8")


def test_no_words_show_the_help() -> None:
    """That is what a newcomer types."""
    result = invoke()
    assert result.exit_code == 2
    assert "Usage:" in result.output
    assert "quantize" in result.output


# -- texts and targets -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the text"),
        (b"", "is empty"),
        (b"caf\xe9", "no text in UTF-8"),
        (b"w3\0w4", "zero byte"),
        (b"w3", "fewer than 2 tokens"),
    ],
)
def test_texts(good: Path, tmp_path: Path, content: bytes | None, message: str) -> None:
    """Missing, or not what can be read as text."""
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    assert_one_line(invoke("eval", good, "--text", file, "-q"), 1, message)


def test_a_folder_as_text(good: Path, tmp_path: Path) -> None:
    """It exists, and is no file."""
    assert_one_line(invoke("eval", good, "--text", tmp_path, "-q"), 1, "cannot read the text")


def test_a_target_that_is_there(good: Path, tmp_path: Path) -> None:
    """It is kept."""
    (tmp_path / "mine").write_text("mine")
    words = ("quantize", good, tmp_path / "mine", "-q")
    assert_one_line(invoke(*words), 1, "is there already")
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_target_inside_a_file(good: Path, tmp_path: Path) -> None:
    """No folder can be made there."""
    (tmp_path / "file").write_text("mine")
    assert_one_line(invoke("quantize", good, tmp_path / "file" / "x", "-q"), 1, "file")


def test_a_disk_that_is_full(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the call that writes."""
    Full(monkeypatch)
    words = ("quantize", good, tmp_path / "new", "--max-shard-size", "300KB", "-q")
    assert_one_line(invoke(*words), 1, "the disk is full")


def test_a_place_where_nobody_may_write(good: Path) -> None:
    """Not even root."""
    assert_one_line(invoke("quantize", good, "/proc/new", "-q"), 1, "cannot be written to")


@pytest.mark.slow
def test_a_full_disk_behind_the_output(good: Path, tmp_path: Path) -> None:
    """`pipeload plan ... > FILE` on a full disk."""
    command = [*warm_python(), "-m", "pipeload", *map(str, words_of("plan", good, tmp_path))]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert done.stderr.count("\n") == 1
