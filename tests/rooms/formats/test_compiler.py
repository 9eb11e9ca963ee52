"""Compiled libraries are kept in the user's cache, and taken from there if they can be trusted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeload.formats import compiler
from pipeload.formats.compiler import compile_library

if TYPE_CHECKING:
    from collections.abc import Callable

PORTABLE = "repack.c"
KERNELS = sorted(
    file for file in Path(compiler.__file__).parent.rglob("*.c") if file.name != PORTABLE
)

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a header beside it, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    lines = ("int supported(void) { return 1; }", "int answer(void) { return ANSWER; }", "")
    (folder / "one.c").write_text("\n".join(('#include "answer.h"', *lines)))
    return folder / "one.c"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by what is compiled."""
    found: list[str] = []
    run: Callable[..., None] = compiler._run

    def note(*command: str) -> None:
        found.append(command[-1])
        run(*command)

    monkeypatch.setattr(compiler, "_run", note)
    return found


def answer(source: Path) -> int:
    library = compile_library(source)
    assert library is not None
    found: int = library.answer()
    return found


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "pipeload" / "kernels").iterdir())


def test_compiled_once(source: Path, tmp_path: Path, compiled: list[str]) -> None:
    """By the next process, that is; nobody else can write what is kept."""
    assert [answer(source), answer(source)] == [42, 42]
    assert len(compiled) == 2  # compiled, and linked
    (file,) = kept(tmp_path)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o022 == 0


def test_what_is_made_of_something_else(
    source: Path, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header, the compiler or its options: the older library goes, that of others stays."""
    other = shutil.copy(source, source.with_name("two-parts.c"))
    assert [answer(source), answer(Path(other))] == [42, 42]
    source.with_name("answer.h").write_text("#define ANSWER 43\n")
    assert answer(source) == 43
    assert len(kept(tmp_path)) == 2
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "-DANY"))
    assert answer(source) == 43
    assert len(compiled) == 8
    assert [file.name.rpartition("-")[0] for file in kept(tmp_path)] == [
        "source-one",
        "source-two-parts",
    ]


@pytest.mark.parametrize("spoil", ["text", "cut", "link", "writable", "folder", "above"])
def test_what_cannot_be_trusted(
    spoil: str, source: Path, tmp_path: Path, compiled: list[str]
) -> None:
    """It is compiled again, and put right where that can be."""
    assert answer(source) == 42
    (file,) = kept(tmp_path)
    # A copy: what a process has loaded must not change under it.
    other = Path(shutil.copy(file, tmp_path / "other.so"))
    file.unlink()
    if spoil == "text":
        file.write_text("no library")
    elif spoil == "cut":
        file.write_bytes(other.read_bytes()[:100])
    elif spoil == "link":
        file.symlink_to(other)
    else:
        shutil.copy(other, file)
        spoilt = {"writable": file, "folder": file.parent, "above": file.parents[1]}[spoil]
        spoilt.chmod(0o777)
    assert answer(source) == 42
    assert len(compiled) == 4
    assert answer(source) == 42
    assert len(compiled) == (6 if spoil in {"folder", "above"} else 4)


def test_where_nothing_can_be_kept(
    source: Path, tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process compiles for itself, as it does where nobody knows a home."""
    (tmp_path / "cache").write_text("a file")
    assert [answer(source), answer(source)] == [42, 42]
    monkeypatch.setattr(compiler, "user_cache", lambda: Path("~no such user").expanduser())
    assert answer(source) == 42
    monkeypatch.delattr(os, "geteuid")
    assert answer(source) == 42
    assert len(compiled) == 8


def test_a_compiler_that_says_no_version(
    source: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept of it: another one could go by its name."""
    other = source.with_name("other")
    does = f'test "$1" = --version || exec {compiler.compiler()} "$@"'
    other.write_text(f"#!/bin/sh\n{does}\nexit 2\n")
    other.chmod(0o755)
    monkeypatch.setenv("CC", str(other))
    assert [answer(source), answer(source)] == [42, 42]
    assert len(compiled) == 4


def test_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is not taken: what computes would depend on what ran before."""
    assert answer(source) == 42
    monkeypatch.setenv("CC", "/nonexistent")
    assert compile_library(source) is None


def test_a_compiler_that_fails(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told from none: once, by what it says of the error."""
    monkeypatch.setattr(compiler, "_failed", set())
    source.write_text("int one(void)\n{\n    return no_such_name;\n}\n")
    for _ in range(2):
        assert compile_library(source) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "the C compiler failed: " in record.message
    assert "one.c:3" in record.message
    assert "no_such_name" in record.message


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo first >&2; echo second >&2; exit 1", "failed: first. "),
        ("exit 3", "other ended with 3. "),
        ("kill -9 $$", "other ended with -9. "),
        ("exit 0", "kernel.so: cannot open shared object"),
    ],
)
def test_what_a_compiler_says_that_fails(
    script: str,
    said: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Something else, nothing, or that all went well."""
    monkeypatch.setattr(compiler, "_failed", set())
    other = source.with_name("other")
    other.write_text(f"#!/bin/sh\n{script}\n")
    other.chmod(0o755)
    monkeypatch.setenv("CC", str(other))
    assert compile_library(source) is None
    assert said in caplog.text


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_processor_of_another_kind(
    file: Path, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels for x86 compile there, and say that they cannot run: nothing has failed."""
    assert source.exists()
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "-U__x86_64__"))
    assert compile_library(file) is None
    assert not caplog.records


def test_a_processor_that_lacks_something(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Then nothing has failed."""
    source.write_text("int supported(void) { return 0; }\n")
    assert compile_library(source) is None
    assert not caplog.records
