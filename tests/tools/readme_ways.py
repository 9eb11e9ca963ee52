"""Every snippet and every command of the README and docs/, in every way to have pipeload there.

    python -m tests.tools.readme_ways smollm2

Each in a process of its own: by itself and under `python -m pipeload`, as an installed command and
as a module, each with PIPELOAD_MEMORY_LIMIT set and unset. Takes some minutes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.promises.pages.test_readme import SET, SNIPPETS, commands, make_place, run, run_snippet

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSTALLED = (
    """ -c 'import sys; sys.argv[0] = "pipeload"; from pipeload.cli.commands import main; main()'"""
)
_MODULE = " -m pipeload"


def failures(model: Path) -> Iterator[tuple[str, str]]:
    """What was run and what was wrong with it, or nothing."""
    for command, more in itertools.product((_INSTALLED, _MODULE), ({}, SET)):
        with tempfile.TemporaryDirectory() as folder:
            place = make_place(Path(folder), model, command)
            options = ("-m", "pipeload") if command is _MODULE else ()
            for code, output in SNIPPETS:
                what = f"{more} python {' '.join(options)} <<< {code.splitlines()[0]} ..."
                try:
                    printed = run_snippet(code, place, *options, **more)
                    yield what, "" if printed == output or not output else printed
                except AssertionError as error:
                    yield what, str(error)
            for line, output in commands():
                what = f"{more} {command}: {line}"
                try:
                    printed = run(["bash", "-c", line], place, **more)
                    yield what, "" if printed == output or not output else printed
                except AssertionError as error:
                    yield what, str(error)


def main() -> None:
    """Run all; the exit status tells whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder made by `pipeload demo --folder FOLDER`")
    failed = 0
    for what, wrong in failures(parser.parse_args().model.resolve()):
        failed += bool(wrong)
        print("FAILED" if wrong else "ok", what, wrong, flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
