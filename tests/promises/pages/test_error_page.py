"""ERRORS.md lists every message with its cure, and is what the code says."""

from __future__ import annotations

import pytest

from pipeload import OptionError
from tests.support.error_sites import CLASSES, find_sites
from tests.support.error_text import Module, Scope
from tests.support.raised import UNREACHED, Raised, missing
from tests.tools.error_page import ELSEWHERE, PAGE, entries, page, split

SITES = find_sites()


def test_the_page_is_what_the_code_says() -> None:
    """If not: `python -m tests.tools.error_page`."""
    assert PAGE.read_text(encoding="utf-8") == page(SITES)


@pytest.mark.parametrize("kind", sorted(CLASSES))
def test_every_message_says_what_to_do(kind: str) -> None:
    """An instruction, or what works instead, in the message itself."""
    found = entries(SITES).get(kind, [])
    assert found, f"nothing raises {kind}"
    assert [entry.what for entry in found if not entry.cure] == []


def test_exemptions_are_needed() -> None:
    """Each is a part of a message that is there."""
    messages = [site.message for site in SITES]
    stale = [p for p in (*ELSEWHERE, *UNREACHED) if not any(p in m for m in messages)]
    assert stale == []


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        ("<name> is wrong.", ""),
        ("<name> was passed. It cannot be used.", ""),
        ("<name> is wrong: it takes all. Leave it out.", "Leave it out."),
        ("<name> is missing: pip install <name>", "pip install <name>"),
        ("<name> is pickled. If you trust it, convert it.", "If you trust it, convert it."),
        ("the load failed; load it again.", "load it again."),
    ],
)
def test_what_counts_as_a_cure(message: str, cure: str) -> None:
    """A clause that begins with an instruction; not any second sentence."""
    assert split(message)[1] == cure


def test_messages_as_the_code_makes_them() -> None:
    """Names, values given once, choices and calls, as a reader can use them."""
    source = """
WAY = "Use it."
def f(path, names, size, short):
    what = f"{path!r} of {len(names)}"
    g(f"{what}, {format_size(size)}, {', '.join(names)}, {'a' if short else 'b'}. {WAY}")
"""
    module = Module("x.py", source)
    call = next(c for c in module.calls if ast_name(c) == "g")
    text = Scope(module, call, {}).text(call.args[0])
    assert text == "'<path>' of <number of names>, <size>, <names>, a / b. Use it."


def ast_name(call: object) -> str:
    return getattr(getattr(call, "func", None), "id", "")


def test_a_message_made_by_a_helper_is_found_where_it_is_called() -> None:
    """`malformed` and its like are no places themselves."""
    found = [site for site in SITES if "cannot be used: it is not a regular file" in site.message]
    rooms = ["pipeload/checkpoint/gguf.py", "pipeload/checkpoint/headers.py"]
    assert sorted(site.file for site in found) == rooms
    assert found[0].kind == "CheckpointError"


def test_a_raised_error_is_noted_where_it_is_made(request: pytest.FixtureRequest) -> None:
    """What `--every-error` goes by: without the error its place is missing, with it, it is not."""
    from pipeload._sizes import parse_size

    def wanted(places: set[tuple[str, int]]) -> bool:
        return any("has the unknown unit" in site.message for site in missing(places))

    plugin = next(p for p in request.config.pluginmanager.get_plugins() if isinstance(p, Raised))
    before = set(plugin.places)
    plugin.places.clear()
    assert wanted(plugin.places)
    with pytest.raises(OptionError, match="unknown unit"):
        parse_size("2XB")
    assert not wanted(plugin.places)
    plugin.places |= before
