"""ERRORS.md: every error that pipeload raises on purpose, with its cure, from the code itself.

python -m tests.tools.error_page            # write it
python -m tests.tools.error_page --check    # exit status 1 if it is not what the code says
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from pipeload import errors
from tests.support.error_sites import ROOT, Site, find_sites

PAGE = ROOT / "ERRORS.md"

_VERBS = (
    "Add", "Ask", "Call", "Change", "Check", "Choose", "Convert", "Delete", "Download", "Give",
    "Have", "Install", "Leave", "Let", "Load", "Make", "Move", "Name", "Pass", "Put", "Quantise",
    "Raise", "Restore", "Run", "Set", "Take", "Try", "Use", "Wait", "Wrap",
)  # fmt: skip
_WAYS = (
    rf"(?:{'|'.join(_VERBS)})\b",
    # After a colon or semicolon, or a condition, it begins in lower case.
    rf"(?:(?:If|For|To|With) [^,.:]+[,:] )?(?:{'|'.join(map(str.lower, _VERBS))}) ",
    r"pip install ",
    # The error holds the values that work.
    r"The smallest limit that works here is ",
    r"What fits: ",
    r"A limit of <wanted> bytes ",
    r"--memory-limit <smallest limit> is enough",
    r"<smallest> bytes \(<smallest>\) work now",
    r"handle\.remove\(\) brings ",
    r"must be a whole number ",
    r"do not trust this checkpoint",
)
_CURE = re.compile(rf"(?:^|(?<=[.:;?>] )|(?<=:\n))(?:{'|'.join(_WAYS)})")
_MUST = re.compile(r"must be a whole number |do not trust this checkpoint")

# Messages whose cure stands elsewhere: a part of each, and where it is.
ELSEWHERE = {
    "it is not a safetensors file. <advice>": "`_MISTAKEN_FOR` in "
    "`pipeload/checkpoint/headers.py`, one for each format",
    "the environment variable <variable>: <error>": "the same value given as the option",
    "the environment variable PIPELOAD_MEMORY_LIMIT: <error>": "the same value given as "
    "`memory_limit=`",
    "tensor '<name>': <error>": "the same said of a file, in this list",
}

_NO_CURE = ""


class Entry(NamedTuple):
    """One message."""

    what: str
    cure: str
    """Empty where there is none."""
    files: tuple[str, ...]


def split(message: str) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    for part, place in ELSEWHERE.items():
        if part in message:
            return message, f"See {place}."
    found = _CURE.search(message)
    if found is None:
        found = _MUST.search(message)
        return (message, message[found.start() :]) if found else (message, _NO_CURE)
    return message[: found.start()].rstrip(" :;\n"), message[found.start() :]


def entries(sites: list[Site]) -> dict[str, list[Entry]]:
    """By class of error; places with the same message are one entry."""
    places: dict[tuple[str, str], set[str]] = defaultdict(set)
    for site in sites:
        places[site.kind, site.message].add(site.file)
    found: dict[str, list[Entry]] = defaultdict(list)
    for (kind, message), files in places.items():
        found[kind].append(Entry(*split(message), tuple(sorted(files))))
    return {kind: sorted(found[kind], key=lambda e: e.what.lower()) for kind in sorted(found)}


def page(sites: list[Site]) -> str:
    """The text of ERRORS.md."""
    found = entries(sites)
    count = sum(map(len, found.values()))
    parts = [
        "# Errors",
        f"The {count} messages of the errors that pipeload raises on purpose, each with its cure. "
        "What stands in `<angle brackets>` is filled in, and ` / ` parts alternatives. All classes "
        "are in `pipeload` and under `pipeload.PipeloadError`. On the command line a message is "
        "one line after `error:`, and `--debug` shows where it came from.",
        "Made from the code by `python -m tests.tools.error_page`.",
    ]
    for kind, messages in found.items():
        parts.append(f"## {kind}")
        parts.append(_summary(kind))
        parts.extend(_item(entry) for entry in messages)
    return "\n\n".join(parts) + "\n"


def _summary(kind: str) -> str:
    made = getattr(errors, kind)
    bases = [b.__name__ for b in made.__mro__ if b.__module__ == "builtins"]
    bases = [name for name in bases if name not in {"Exception", "BaseException", "object"}]
    also = f" Also {'an' if bases[0] == 'OSError' else 'a'} `{bases[0]}`." if bases else ""
    return (made.__doc__ or "").strip().splitlines()[0] + also


def _item(entry: Entry) -> str:
    files = ", ".join(f"`{file}`" for file in entry.files)
    cure = entry.cure
    if not cure.startswith(("pip ", "handle.")):
        cure = cure[:1].upper() + cure[1:]
    return f"**{_escape(entry.what)}**  \n{_escape(cure)}  \n<sub>{files}</sub>"


def _escape(text: str) -> str:
    """As Markdown shows it: placeholders are no tags, underscores no emphasis."""
    text = " ".join(text.split())
    pieces = re.split(r"(`[^`]*`)", text)  # code stays as it is
    for index in range(0, len(pieces), 2):
        pieces[index] = re.sub(r"([<*_\[\]])", r"\\\1", pieces[index])
    return "".join(pieces)


def main(words: list[str]) -> int:
    text = page(find_sites())
    if words == ["--check"]:
        return int(not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text)
    Path(PAGE).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
