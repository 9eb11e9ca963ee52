"""Every place in the product that makes a PipeloadError, with its message, from the syntax trees.

A function that returns an error, such as `malformed`, is no place; each call of it is one, with the
arguments in the message. What is only known at run time becomes `<name>`.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from pipeload import errors
from tests.support.error_text import Module, Scope

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (ROOT / "pipeload", ROOT / "hooks" / "pipeload_hooks")
CLASSES = set(errors.__all__)
# Kinds of their own inside the product, which users meet as their bases.
INTERNAL_CLASSES = {
    "NothingToStreamError": "UnsupportedModelError",
    "PassMemoryLimitError": "MemoryLimitError",
}

_DEEPEST = 8
# Files and names of functions that return an error, and those functions.
_Factories = dict[tuple[str, str], "_Factory"]


@dataclass(frozen=True)
class Site:
    """One place that makes an error."""

    file: str
    """Relative to the repository, with slashes."""
    first: int
    last: int
    """Lines of the call, both included."""
    kind: str
    """The class of the error, as users know it."""
    message: str


@dataclass(frozen=True)
class _Factory:
    """A function that returns an error."""

    node: ast.FunctionDef
    module: Module
    made: ast.Call

    def names(self) -> list[str]:
        arguments = self.node.args
        names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return names[1:] if names[:1] == ["self"] else names

    def defaults(self) -> dict[str, ast.expr]:
        arguments = self.node.args
        plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        given = dict(zip(plain[::-1], arguments.defaults[::-1], strict=False))
        only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return given | {a.arg: value for a, value in only if value is not None}


def find_sites() -> list[Site]:
    """All of them, by file and line."""
    return list(_sites())


@functools.cache  # to read all files takes seconds
def _sites() -> tuple[Site, ...]:
    files = chain.from_iterable(sorted(folder.rglob("*.py")) for folder in PRODUCT)
    modules = [Module(f.relative_to(ROOT).as_posix(), f.read_text(encoding="utf-8")) for f in files]
    finder = _Finder(modules)
    sites = chain.from_iterable(finder.sites_in(module) for module in modules)
    return tuple(sorted(sites, key=lambda site: (site.file, site.first, site.message)))


class _Finder:
    """Knows every function that returns an error."""

    def __init__(self, modules: list[Module]) -> None:
        self._factories: dict[tuple[str, str], _Factory] = {}
        before = -1
        while len(self._factories) > before:  # a factory may call one that was not found before
            before = len(self._factories)
            for module in modules:
                for function in module.functions:
                    if made := self._returned(function, module):
                        found = _Factory(function, module, made)
                        self._factories[module.path, function.name] = found

    def sites_in(self, module: Module) -> list[Site]:
        """Those of one file."""
        sites = []
        for call in module.calls:
            around = module.functions_around(call)
            inside = around and (module.path, around[0].name) in self._factories
            if inside or not self._makes_error(call, module):
                continue
            last = call.end_lineno or call.lineno
            for texts in _given(around, module):
                kind, message = self._describe(call, module, texts, 0)
                sites.append(Site(module.path, call.lineno, last, kind, message))
        return list(dict.fromkeys(sites))

    def _returned(self, function: ast.FunctionDef, module: Module) -> ast.Call | None:
        """The call whose error the function returns."""
        if function.returns is None or not ast.unparse(function.returns).endswith("Error"):
            return None
        calls = (n.value for n in ast.walk(function) if isinstance(n, ast.Return))
        for call in calls:
            if isinstance(call, ast.Call) and self._makes_error(call, module):
                return call if module.functions_around(call)[0] is function else None
        return None

    def _makes_error(self, call: ast.Call, module: Module) -> bool:
        known = _name(call) in CLASSES | INTERNAL_CLASSES.keys()
        return known or self._factory_of(call, module) is not None

    def _factory_of(self, call: ast.Call, module: Module) -> _Factory | None:
        """By its plain name, here or imported, as a method, or through its module's name."""
        name, path = _name(call), module.path
        if isinstance(call.func, ast.Attribute):
            owner, name = ast.unparse(call.func.value), call.func.attr
            package, module_name = module.imported.get(owner, ("", owner))
            path = path if owner == "self" else f"{package.removesuffix('.py')}/{module_name}.py"
        elif name in module.imported:
            path, name = module.imported[name]
        return self._factories.get((path, name))

    def _describe(
        self, call: ast.Call, module: Module, known: dict[str, str], depth: int
    ) -> tuple[str, str]:
        """Class and message of the error that a call makes."""
        name = _name(call)
        scope = Scope(module, call, known)
        if name in CLASSES | INTERNAL_CLASSES.keys():
            return INTERNAL_CLASSES.get(name, name), scope.text(call.args[0])
        factory = self._factory_of(call, module)
        assert factory is not None
        assert depth < _DEEPEST, f"{module.path}:{call.lineno}: factories call each other"
        own = Scope(factory.module, factory.made, {})
        texts = {key: own.text(value) for key, value in factory.defaults().items()}
        texts |= {key: scope.text(v) for key, v in zip(factory.names(), call.args, strict=False)}
        texts |= {word.arg: scope.text(word.value) for word in call.keywords if word.arg}
        if factory.module is module:  # a nested one sees the caller's names, too
            texts = known | texts
        return self._describe(factory.made, factory.module, texts, depth + 1)


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _given(around: list[ast.FunctionDef], module: Module) -> list[dict[str, str]]:
    """What is known where an error is made inside a function that another one returns.

    One set of names for each call of the outermost function that gives it texts.
    """
    if len(around) < 2:
        return [{}]
    names = [argument.arg for argument in around[-1].args.args]
    texts = [
        {n: a.value for n, a in zip(names, call.args, strict=False) if isinstance(a, ast.Constant)}
        for call in module.calls
        if _name(call) == around[-1].name
    ]
    return [{n: v for n, v in t.items() if isinstance(v, str)} for t in texts if t] or [{}]
