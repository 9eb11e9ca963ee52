"""`python -m pipeload script.py ...` streams a script's models; with a command, `pipeload ...`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def command() -> None:
    """Entry of the `pipeload` command."""
    _import_cli().main()


def _import_cli() -> ModuleType:
    try:
        from pipeload.cli import commands
    except KeyboardInterrupt:
        sys.exit(130)
    return commands


# Of the command itself, not of a script that would follow.
_OPTIONS = ("-h", "--help", "--version", "--install-completion", "--show-completion")


def main() -> None:
    """Choose by what was typed first: one of the commands, or a script and options before it."""
    # As for the commands: OpenMP looks at this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    commands = _import_cli()
    words = sys.argv[1:]
    if not words or words[0] in {*commands.command_names(), *_OPTIONS}:
        commands.main()
    else:
        from pipeload.entry.script import run

        run(words)


if __name__ == "__main__":
    main()
