"""`pipeload bench --compare`: contenders take turns under one limit, and the table says who won."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from pipeload.bench import compare, contender
from pipeload.bench.compare import Setting
from pipeload.errors import OptionError, PipeloadError
from tests.support.commands import invoke

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

LIMIT = 1 << 30


def interpreter(folder: Path, name: str, *answers: dict[str, Any] | int) -> str:
    """A program that gives these answers in turn, the last for ever; an int is its exit status."""
    said = [
        f"echo 'what went wrong' >&2; exit {one}"
        if isinstance(one, int)
        else f"echo '{json.dumps(one)}'"
        for one in answers
    ]
    count, file = folder / f"{name}.count", folder / name
    cases = "".join(f"{number}) {text};;\n" for number, text in enumerate(said))
    file.write_text(
        f"#!/bin/sh\necho x >>{count}\nn=$(($(wc -l <{count}) - 1))\n"
        f"[ $n -lt {len(said)} ] || n={len(said) - 1}\ncase $n in\n{cases}esac\n"
    )
    file.chmod(0o755)
    return str(file)


def timed(step: float, **more: Any) -> dict[str, Any]:
    """What a contender prints."""
    told = {"first": 10 * step, "step": step, "peak": 10**8, "read": 5e6, "versions": {"it": "7"}}
    return told | more


def setting(folder: Path, *ways: str, **more: Any) -> Setting:
    options: dict[str, Any] = {"pythons": {}, "gguf": None, "new_tokens": 2, "rounds": 3}
    return Setting(model=str(folder), ways=ways, **options | more)


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without root."""

    @contextlib.contextmanager
    def refused(_limit: int) -> Iterator[None]:
        raise PermissionError
        yield

    monkeypatch.setattr(compare, "memory_group", refused)


def test_ratios_are_taken_within_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of medians: one round in which everything was slow changes nothing."""
    own = [timed(1.0), timed(9.0), timed(2.0)]
    others = [timed(3.0, read=None, peak=None), timed(27.0), timed(6.0)]
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "own", *own))
    pythons = {"plain": interpreter(tmp_path, "plain", *others)}
    ours, theirs = compare.compare(setting(tmp_path, "plain", pythons=pythons), [LIMIT])
    assert (ours.way, ours.step, ours.over_pipeload) == ("pipeload", 2.0, 1.0)
    assert (theirs.way, theirs.step, theirs.over_pipeload) == ("plain", 6.0, 3.0)
    assert theirs.first_over_pipeload == 3.0
    assert (theirs.read, theirs.peak, theirs.versions) == (5e6, 10**8, {"it": "7"})
    printed = capsys.readouterr().out
    assert [line.split()[2] for line in printed.splitlines()[1:3]] == ["pipeload", "plain"]
    assert "the limit binds only pipeload" in printed


def test_who_cannot_run_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That says what to do, or how it ended."""
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "own", timed(1.0)))
    pythons = {
        "plain": interpreter(tmp_path, "plain", 3),
        "accelerate": interpreter(tmp_path, "accelerate", 137),
        "airllm": interpreter(tmp_path, "airllm", {"missing": "airllm"}),
    }
    given = setting(tmp_path, *compare.CONTENDERS, pythons=pythons)
    notes = {row.way: (row.step, row.note) for row in compare.compare(given, [LIMIT])}
    assert notes == {
        "pipeload": (1.0, ""),
        "plain": (None, "what went wrong"),
        "accelerate": (None, "killed for memory"),
        "airllm": (
            None,
            "not installed: pip install airllm, or name its interpreter with --python",
        ),
        **dict.fromkeys(
            compare.LLAMA_CPP, (None, "needs a GGUF file of the same model: --gguf FILE")
        ),
    }


def test_accelerate_has_its_best_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are tried, that with which it decodes fastest."""
    tried: list[dict[str, Any] | int] = [timed(4.0), timed(1.5), 137, timed(2.0)]
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "own", timed(1.0)))
    pythons = {"accelerate": interpreter(tmp_path, "accelerate", *tried)}
    rows = compare.compare(setting(tmp_path, "accelerate", pythons=pythons), [LIMIT])
    assert rows[1].note == "max_memory 35%"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs, but for pipeload itself, without which nothing can be compared."""
    file = tmp_path / "file"
    file.touch()
    cases = {
        "is no contender. Name some of plain": setting(tmp_path, "torch"),
        "cannot be run. Check": setting(tmp_path, "plain", pythons={"plain": str(file)}),
        "there is no file 'x.gguf'": setting(tmp_path, "llama.cpp", gguf="x.gguf"),
        "is no folder, which others": setting(file, "plain"),
        "is named twice in --compare": setting(tmp_path, "plain", "plain"),
        "by tokens after the first": setting(tmp_path, "plain", new_tokens=1),
    }
    for words, given in cases.items():
        with pytest.raises(OptionError, match=words):
            compare.compare(given, [LIMIT])
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "own", 1))
    with pytest.raises(PipeloadError, match="pipeload did not run: what went wrong"):
        compare.compare(setting(tmp_path, "plain"), [LIMIT])


def test_a_contender_that_is_not_there_says_so(tmp_path: Path) -> None:
    """In place of a traceback of its interpreter."""
    job = {"way": "airllm", "model": str(tmp_path), "tokens": 2}
    assert contender.run(job) == {"missing": "airllm"}


@pytest.mark.parametrize("way", compare.LLAMA_CPP)
def test_llama_cpp_as_it_is_or_mapped(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a limit it is not to copy its weights; beside it, its defaults are its best."""
    settings = MagicMock(load_mode=-1, no_extra_bufts=False, n_batch=2048)
    library = MagicMock(CommonParams=lambda: settings)
    library.Server.return_value.handle_completions = lambda _asked, came: [came("") for _ in "abc"]
    monkeypatch.setitem(sys.modules, "xllamacpp", library)
    job, clock = {"way": way, "gguf": "x.gguf", "threads": 2, "tokens": 3}, contender.Clock()
    contender._llama_cpp(job, clock)
    assert len(clock.times) == 4
    told = settings.load_mode, settings.no_extra_bufts, settings.n_batch
    mapped = library.llama_load_mode.LLAMA_LOAD_MODE_MMAP
    assert told == ((mapped, True, 64) if way == "llama.cpp" else (-1, False, 2048))


@pytest.mark.parametrize("way", ["pipeload", "plain", "accelerate"])
def test_a_contender_is_timed(way: str, tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Loading counts for the first token, and each of the others is a step."""
    job = {"way": way, "model": str(tiny("llama")), "tokens": 3, "limit": 1 << 40}
    told = contender.run(job | {"scratch": str(tmp_path), "share": 10**9})
    assert told["first"] > told["step"] > 0
    assert told["peak"] > 10**7
    assert told["read"] is not None
    assert "torch" in told["versions"]


@pytest.mark.slow
@pytest.mark.sweep
def test_plain_and_pipeload(tiny: TinyCheckpoint) -> None:
    """Both really run, by the command as it is typed."""
    shape = ("--memory-limit", "2GB", "--rounds", 1, "--new-tokens", 2)
    done = invoke("bench", tiny("llama"), *shape, "--compare", "plain", "--json")
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["way"] for row in rows] == ["pipeload", "plain"]
    assert all(row["step"] > 0 and row["first"] > 0 and row["peak"] > 10**7 for row in rows)
    assert all("transformers" in row["versions"] for row in rows)
