"""`python -m pipeload --memory-limit 2GB script.py ...`: an unmodified script, its models streamed.

The script finds the interpreter as Python itself would have left it: its own arguments, its folder
first on the path, `__main__` as its name. Nothing is printed that it does not print, but for what
`script_end` says.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.util
import os
import runpy
import sys
import traceback
import zipfile
from functools import partial
from importlib.machinery import BuiltinImporter, PathFinder, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

from pipeload._sizes import parse_share, parse_size
from pipeload.checkpoint.io_mode import IO_MODES
from pipeload.entry.everywhere import stream_when_imported
from pipeload.entry.script_end import ScriptEnd
from pipeload.errors import OptionError, PipeloadError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

_BEHIND: dict[Literal["-m", "-c"], str] = {"-m": "the name of a module", "-c": "code"}


class Program(NamedTuple):
    """What is to be run."""

    kind: Literal["path", "-m", "-c", "-"]
    """A file or folder, a module, code that was typed, or code that comes by standard input."""
    name: str
    """Its path or name, or the code that was typed."""
    arguments: list[str]


def run(words: Sequence[str]) -> None:
    """Run what the command line names, as `__main__`.

    Raises:
        SystemExit: as the script ends; with 2 if the command line is wrong, with 1 after one line
            where pipeload refused something.
    """
    options, program = _parse(words)
    given = {name: value for name, value in vars(options).items() if value is not None}
    end = ScriptEnd(stats=given.pop("stats"))
    stream_when_imported(**given)
    end.follow()

    def show_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        end.failed = True
        _show_error(kind, error, trace)

    sys.excepthook = show_error
    try:
        _RUN[program.kind](program)
    except SystemExit as ended:
        end.failed = ended.code not in {None, 0}
        raise
    except PipeloadError as error:
        end.failed = True
        _end(error)


def _run_code(program: Program) -> None:
    sys.argv = [program.kind, *program.arguments]
    _set_first_path("")
    if program.kind == "-c":
        code = compile(program.name, "<string>", "exec")
        module = _new_main(__loader__=BuiltinImporter)
    else:
        code = compile(sys.stdin.buffer.read(), "<stdin>", "exec")
        module = _new_main(__loader__=BuiltinImporter, __file__="<stdin>", __cached__=None)
    exec(code, vars(module))  # noqa: S102 - the user's own code


def _run_module(program: Program) -> None:
    sys.argv = ["-m", *program.arguments]  # the first becomes the module's file
    _set_first_path(str(Path.cwd()))
    try:
        found = importlib.util.find_spec(program.name) is not None
    except (ModuleNotFoundError, ValueError) as error:
        found = getattr(error, "name", None) not in {program.name, *_parents(program.name)}
    if not found:
        sys.stderr.write(f"error: No module named {program.name!r}\n")
        raise SystemExit(1)
    runpy.run_module(program.name, run_name="__main__", alter_sys=True)


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _run_path(program: Program) -> None:
    sys.argv = [program.name, *program.arguments]
    path = Path(program.name)
    file = str(Path.cwd() / program.name)  # as Python: absolute, but not resolved
    if path.is_dir() or zipfile.is_zipfile(path):
        _run_inside(file)
        return
    _set_first_path(str(path.resolve().parent))
    loader: SourceFileLoader | SourcelessFileLoader
    if path.suffix == ".pyc":
        loader = SourcelessFileLoader("__main__", file)
        code = loader.get_code("__main__")
    else:
        loader = SourceFileLoader("__main__", file)
        code = loader.source_to_code(_read(path), file)
    # No spec: what starts further processes takes `__file__` then.
    module = _new_main(__file__=file, __loader__=loader, __cached__=None)
    exec(code, vars(module))  # type: ignore[arg-type]  # noqa: S102 - the user's own script


def _new_main(**names: object) -> ModuleType:
    """A `__main__` as Python makes one."""
    module = ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __annotations__={}, **names)
    sys.modules["__main__"] = module
    return module


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        sys.stderr.write(f"error: cannot read {str(path)!r}: {error.strerror}\n")
        raise SystemExit(2) from None


def _run_inside(folder: str) -> None:
    """The `__main__` of a folder or an archive."""
    _set_first_path(folder)
    spec = PathFinder.find_spec("__main__", [folder])
    if spec is None or spec.loader is None:
        sys.stderr.write(f"error: there is no __main__ module in {folder!r}\n")
        raise SystemExit(1)
    module = importlib.util.module_from_spec(spec)
    sys.modules["__main__"] = module
    spec.loader.exec_module(module)


def _set_first_path(path: str) -> None:
    """In place of the folder that `python -m pipeload` was called in."""
    if not getattr(sys.flags, "safe_path", False):  # then there is none
        sys.path[:1] = [path]


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, Program]:
    """Pipeload's options, and what stands behind them."""
    parser = _parser()
    count = _count_own(words)
    options = parser.parse_args(words[:count])
    rest = list(words[count:])
    if rest[:1] == ["--"]:
        rest = rest[1:]
    for kind, needs in _BEHIND.items():
        if rest and rest[0].startswith(kind):
            rest[:1] = [rest[0][2:]] if rest[0] != kind else []
            if not rest:
                parser.error(f"{kind} needs {needs}")
            return options, Program(kind, rest[0], rest[1:])
    if not rest:
        parser.error("name a script, a module with -m, or code with -c")
    if rest[0] == "-":
        return options, Program("-", "-", rest[1:])
    if not Path(rest[0]).exists():
        parser.error(
            f"there is no file {rest[0]!r}. For an installed command, name its module: -m MODULE"
        )
    return options, Program("path", rest[0], rest[1:])


def _count_own(words: Sequence[str]) -> int:
    """How many words come before the script: its arguments may look like ours."""
    count = 0
    while count < len(words):
        word = words[count]
        if not word.startswith("-") or word in {"-", "--"} or word.startswith(tuple(_BEHIND)):
            break
        alone = "=" in word or word in {"-h", "--help", "--stats", "--exact-inputs"}
        count += 1 if alone else 2
    return min(count, len(words))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for everything else that is refused."""
        self.exit(2, f"error: {message.rstrip('.')}. See {self.prog} --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pipeload",
        usage="python -m pipeload [options] (script.py | -m MODULE | -c CODE | -) [arguments]",
        description="Run a script whose models are streamed from disk. It needs no change.",
        epilog="An option that is not there is what the environment says: PIPELOAD_TOKENS for "
        "--tokens, and so on.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory-limit",
        default="auto",
        type=_limit,
        help='what the whole process may hold: "2GB", "1.5GiB", "50%%"; "auto" asks '
        "PIPELOAD_MEMORY_LIMIT, then the system",
    )
    parser.add_argument(
        "--device",
        help='where models compute: "cpu", "cuda", "xpu", "mps" or "auto"',
    )
    parser.add_argument(
        "--host-memory-limit",
        type=partial(_limit, name="--host-memory-limit"),
        help="with a device, what the whole process may hold in host memory",
    )
    parser.add_argument(
        "--tokens", type=_count, help="longest sequence to keep memory free for; 256"
    )
    parser.add_argument("--batch", type=_count, help="sequences at once; 1")
    parser.add_argument("--io-mode", choices=IO_MODES)
    parser.add_argument("--readers", type=int, help="threads that read at once")
    parser.add_argument("--pressure", choices=("off", "auto"))
    parser.add_argument(
        "--exact-inputs",
        action="store_true",
        default=None,
        help="round no inputs of packed weights, as a faster kernel would",
    )
    parser.add_argument(
        "--stats", action="store_true", help="say at the end what each model read and took"
    )
    return parser


def _limit(text: str, name: str = "--memory-limit") -> str:
    try:
        if text != "auto":
            parse = parse_share if text.rstrip().endswith("%") else parse_size
            parse(text, name=name)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


_RUN: dict[str, Callable[[Program], None]] = {
    "path": _run_path,
    "-m": _run_module,
    "-c": _run_code,
    "-": _run_code,
}


def _show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """As Python shows it, without the frames through which the script was started."""
    ours = {__file__, str(Path(__file__).parents[1] / "__main__.py")}
    script = trace
    while script is not None:
        file = script.tb_frame.f_code.co_filename
        if file not in ours and not file.startswith("<frozen "):
            break
        script = script.tb_next
    if script is None and not isinstance(error, SyntaxError):
        script = trace  # not the script's error, but one of ours
    sys.__excepthook__(kind, error.with_traceback(script), script)


def _end(error: PipeloadError) -> NoReturn:
    """Say what was refused and where the script asked for it, without the libraries' frames."""
    frames = traceback.extract_tb(error.__traceback__)
    libraries = {Path(os.__file__).parent, Path(__file__).parents[1]}
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(p) for p in libraries)]
    own = [f for f in own if "site-packages" not in f.filename and not f.filename.startswith("<")]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    sys.stdout.flush()
    # What makes a pass smaller, as it is typed here.
    told = str(error).replace("(tokens=, batch=)", "(--tokens, --batch)")
    sys.stderr.write(f"error: {told}{where}\n")
    raise SystemExit(1) from error
