"""What the code of a module tells of how it uses its experts' parameters."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable


@functools.lru_cache(maxsize=256)
def takes_slices_alone(forward: Callable[..., Any], names: Collection[str]) -> bool:
    """Whether a forward uses the parameters `names` of self only as `self.name[index]`.

    Or compares them to None, or asks for their dtype, device or shape. False when unsure.
    """
    function = inspect.unwrap(forward)
    if not isinstance(function, FunctionType):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    (body,) = tree.body
    if not isinstance(body, ast.FunctionDef) or not body.args.args:
        return False
    me = body.args.args[0].arg
    allowed = {id(node) for parent in ast.walk(body) for node in _allowed_under(parent)}
    sliced = False
    for node in ast.walk(body):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if owner == me:
                if attribute in names:
                    if id(node) not in allowed:
                        return False
                    sliced = True
            case ast.Call(func=ast.Name(id="getattr" | "vars" | "eval" | "exec" | "locals")):
                return False
    return sliced


@functools.lru_cache(maxsize=256)
def views_slices_alone(forward: Callable[..., Any], child: str, names: Collection[str]) -> bool:
    """Whether the code of a Python module uses `names` of a child only as its `forward` does.

    That is as `self.child.name.view(shape)[index]`; the child itself does not. What initialises
    weights does not count. False when unsure.
    """
    function = inspect.unwrap(forward)
    try:
        tree = ast.parse(inspect.getsource(sys.modules[function.__module__]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return False
    passed_over = {id(node) for node in _initialising(tree)}
    sliced = {
        id(stack.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        for stack in [node.value]
        if isinstance(node.slice, ast.Name)
        and isinstance(stack, ast.Call)
        and isinstance(stack.func, ast.Attribute)
        and stack.func.attr == "view"
    }
    used = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names and id(node) not in passed_over
    ]
    return bool(used) and all(
        id(node) in sliced and isinstance(node.value, ast.Attribute) and node.value.attr == child
        for node in used
    )


def _initialising(tree: ast.AST) -> Iterable[ast.AST]:
    """What makes parameters, and gives them their first values."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in {"_init_weights", "__init__"}:
            yield from ast.walk(function)


@functools.lru_cache(maxsize=256)
def names_of_others(module: str, names: Collection[str]) -> bool:
    """Whether the code of a Python module has `other.name` for one of these, of all but self.

    What it does to initialise weights does not count. True when unsure.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError, KeyError):
        return True
    initialising = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name == "_init_weights"
        for node in ast.walk(function)
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in names
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        and id(node) not in initialising
        for node in ast.walk(tree)
    )


def _allowed_under(parent: ast.AST) -> Iterable[ast.expr]:
    match parent:
        case ast.Subscript(value=value, ctx=ast.Load(), slice=ast.Name()):
            yield value
        case ast.Attribute(value=value, attr="dtype" | "device" | "shape"):
            yield value
        case ast.Compare(left=value, ops=[ast.Is() | ast.IsNot()]):
            yield value
