"""What is written for people holds together: a short README, links that lead somewhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.promises.pages.test_readme import PAGES, README

if TYPE_CHECKING:
    from pathlib import Path

ROOT = README.parent
EXAMPLES = [ROOT / "examples" / name for name in ("README.md", "RESULTS.md", "THEORIES.md")]
ALL = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ERRORS.md", *EXAMPLES]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!\w+://)([^)\s]*)\)")
_FILE = re.compile(r"(?<![\w./])(?:tests|docs|examples|hooks|\.ci)/[\w./-]*\w\.\w+")
_ROOM_FILE = re.compile(r"`([a-z_]+/[a-z_/]+\.py)`")
_TARGET = re.compile(r"`make (\w+)`")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """What a link to a heading of it may end in."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short() -> None:
    """Two screens and a half; more belongs into docs/."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 220


@pytest.mark.parametrize("page", ALL, ids=ids)
def test_links(page: Path) -> None:
    """Relative ones lead to a file that is there, and to a heading that it has."""
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    """Nobody finds one otherwise."""
    linked = set(_LINK.findall(README.read_text(encoding="utf-8")))
    wanted = {ids(page) for page in ALL if page != README}
    assert wanted <= linked


@pytest.mark.parametrize("page", ALL, ids=ids)
def test_files_and_targets_that_are_named(page: Path) -> None:
    """A file and a target of make are there under the name that stands in a text."""
    text = page.read_text(encoding="utf-8")
    missing = [name for name in _FILE.findall(text) if not (ROOT / name).exists()]
    missing += [
        name
        for name in _ROOM_FILE.findall(text)
        if not ((ROOT / "pipeload" / name).exists() or (ROOT / name).exists())
    ]
    assert not missing
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    assert set(_TARGET.findall(text)) <= set(targets)


def test_how_many_model_types_are_exact() -> None:
    """The figures are those of the table, wherever they stand."""
    rows = [
        line.split("\t")
        for line in (ROOT / "tests/tools/model_types/coverage.tsv").read_text().splitlines()
    ]
    results = [row[2] for row in rows]
    exact, refused = results.count("exact"), results.count("refused")
    generate = sum(row[2] == "exact" and "generate" in row[4] for row in rows)
    limits = (ROOT / "docs" / "limits-and-memory.md").read_text(encoding="utf-8")
    words = " ".join(limits.split())
    assert f"Of {exact + refused} types that plain can run so, {exact} give equal outputs" in words
    assert f"among them all {generate} that generate, {refused} are refused" in words
    trust = (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    assert f"| {exact} of {exact + refused} equal, {refused} refused |" in trust
