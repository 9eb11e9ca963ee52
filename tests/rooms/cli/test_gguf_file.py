"""A GGUF file on the command line: run, plan, and what is said of one that cannot be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import transformers

from tests.support.commands import answer, invoke
from tests.support.commands import loud_libraries as loud_libraries  # noqa: PLC0414 - a fixture
from tests.support.gguf_models import load_plain_gguf
from tests.support.models import skip_or_fail

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("gguf")
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def path() -> Path:
    """SmolLM2's, with a tokenizer of its own in it."""
    from pipeload.demo.model import _find_gguf
    from pipeload.errors import PipeloadError

    try:
        return _find_gguf()
    except PipeloadError as error:
        skip_or_fail(f"no SmolLM2: {error}", required_by="PIPELOAD_REQUIRE_MODELS")


@pytest.mark.slow
@pytest.mark.sweep
def test_run_and_plan(path: Path) -> None:
    """The answer is a plain model's, and the plan that of the same load."""
    options = ("--memory-limit", "20GB", "--dtype", "bf16")
    figures = answer(path, PROMPT, *options, "--max-new-tokens", "6", "--no-chat-template")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    plain = load_plain_gguf(path, dtype="bfloat16")
    made = plain.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
    wanted = tokenizer.decode(made[inputs["input_ids"].shape[1] :])
    assert figures["text"].strip() == wanted.strip()
    assert figures["model"] == str(path)
    shown = invoke("plan", path, *options, "--json", "--disk-rate", "1G")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["memory_limit"] == 20 * 10**9


@pytest.mark.parametrize("command", ["run", "plan", "eval"])
def test_a_file_that_is_none(command: str, tmp_path: Path) -> None:
    """One line says what is wrong with it."""
    broken = tmp_path / "model.gguf"
    broken.write_bytes(b"GGUF\3\0\0\0")
    text = tmp_path / "text.txt"
    text.write_text("a text")
    more = {"run": ("hello",), "plan": ("--memory-limit", "1GB"), "eval": ("--text", text)}
    result = invoke(command, broken, *more[command])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "is truncated" in result.stderr
    assert str(broken) in result.stderr


def test_a_folder_that_holds_a_file(tmp_path: Path) -> None:
    """It is the file that has to be named."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    result = invoke("run", tmp_path, "hello")
    assert result.exit_code == 1
    assert f"so it holds no model. Name its file '{tmp_path / 'model.gguf'}'." in result.stderr


def test_what_takes_no_files(tmp_path: Path) -> None:
    """Quantising begins with a folder of floats."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    result = invoke("quantize", file, tmp_path / "made", "--method", "int4")
    assert "is a file. Name the folder" in result.stderr
