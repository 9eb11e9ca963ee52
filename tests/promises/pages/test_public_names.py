"""The public surface is what it says it is, and says what everything means."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import pipeload
from pipeload import errors
from pipeload.entry.options import GivenOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_OURS = {"TYPE_CHECKING", "annotations", "load_ipython_extension", "unload_ipython_extension"}
PUBLIC = {name: getattr(pipeload, name) for name in pipeload.__all__}
CLASSES = [value for value in PUBLIC.values() if inspect.isclass(value)]
FUNCTIONS = [value for value in PUBLIC.values() if inspect.isfunction(value)]


def test_every_public_name_is_listed() -> None:
    """What can be seen in the package is in __all__, sorted, and nothing else."""
    found = {
        name
        for name, value in vars(pipeload).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name not in NOT_OURS
    }
    assert found == set(pipeload.__all__)
    assert pipeload.__all__ == sorted(pipeload.__all__)
    assert dir(pipeload) == pipeload.__all__


def test_a_name_that_is_not_there() -> None:
    """The error is the usual one."""
    with pytest.raises(AttributeError, match="module 'pipeload' has no attribute 'stream'"):
        pipeload.stream  # noqa: B018


def test_every_error_is_public() -> None:
    """One tree: whoever catches the root catches all; each is drawn at the head of the file."""
    raised = {value for value in vars(errors).values() if inspect.isclass(value)}
    assert {value.__name__ for value in raised} == set(errors.__all__)
    assert all(PUBLIC[value.__name__] is value for value in raised)
    assert all(issubclass(value, pipeload.PipeloadError) for value in raised)
    assert all(value.__name__ in (errors.__doc__ or "") for value in raised)


@pytest.mark.parametrize("name", pipeload.__all__)
def test_everything_has_a_docstring(name: str) -> None:
    """Classes, their methods and properties, functions."""
    value = PUBLIC[name]
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        undocumented = [
            member
            for member, thing in vars(value).items()
            if not member.startswith("_")
            and (inspect.isfunction(thing) or isinstance(thing, property))
            and not inspect.getdoc(thing)
        ]
        assert undocumented == []


def fields_of(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Each annotated field of a class with the string below it."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = str(following.value.value)
            yield node.target.id, text


@pytest.mark.parametrize("kind", [pipeload.Plan, pipeload.Stats])
def test_every_field_says_what_it_is(kind: type[Any]) -> None:
    """A sentence each, and the records cannot be changed."""
    fields = dict(fields_of(kind))
    assert len(fields) > 5
    assert [name for name, text in fields.items() if len(text) < 10] == []
    assert kind.__dataclass_params__.frozen


def options_of(function: Any) -> dict[str, str]:
    """Each option of a docstring's `Args:` with its text."""
    section = (inspect.getdoc(function) or "").split("Args:\n")[1].split("\n\n")[0]
    options: dict[str, str] = {}
    name = ""
    for line in section.splitlines():
        head, colon, text = line.strip().partition(": ")
        if line.startswith("    ") and line[4] != " " and colon and head.lstrip("*").isidentifier():
            name = head.lstrip("*")
            options[name] = text
        else:
            options[name] += " " + line.strip()
    return options


@pytest.mark.parametrize(
    "function", [pipeload.from_pretrained, pipeload.wrap, pipeload.streaming, pipeload.plan]
)
def test_every_option_is_described(function: Any) -> None:
    """In the docstring, in the order of the signature."""
    parameters = list(inspect.signature(function).parameters)
    described = list(options_of(function))
    assert described == parameters


LACKING = {
    "from_pretrained": {"disk_rate"},
    "wrap": {"draft", "disk_rate", "exact_inputs", "ranks"},
    "streaming": {"draft", "disk_rate", "ranks"},
    "plan": {"pressure", "ranks", "read_timeout"},
}


@pytest.mark.parametrize("name", LACKING)
def test_options_have_one_meaning(name: str) -> None:
    """What is passed on is what is asked for by name, with one default in all functions."""
    known = {field.name: field.default for field in dataclasses.fields(GivenOptions)}
    parameters = inspect.signature(PUBLIC[name]).parameters
    taken = {name: parameters[name].default for name in known if name in parameters}
    assert known.keys() - taken.keys() == LACKING[name]
    assert taken == {name: known[name] for name in taken}


UNITS = {
    "memory_limit": "bytes",
    "tokens": "in tokens",
    "batch": "sequences",
    "readers": "threads",
}


@pytest.mark.parametrize("name", UNITS)
def test_units_are_said(name: str) -> None:
    """A number without a unit is a riddle."""
    assert UNITS[name] in options_of(pipeload.from_pretrained)[name]
    assert "bytes per second" in options_of(pipeload.plan)["disk_rate"].lower()
