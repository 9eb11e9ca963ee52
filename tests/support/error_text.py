"""What the messages in a file say, from its syntax tree.

What is only known at run time becomes `<name>`; a name that is given once, in the function or in
the module, becomes its value.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

# Calls that only change how a value is shown.
_SHOWN_AS_IT_IS = {
    "bool", "first_line", "float", "format_least", "format_size", "int", "list", "map", "max",
    "min", "next", "repr", "set", "show", "show_limit", "sorted", "str", "tuple", "_join", "_quote",
    "_show",
}  # fmt: skip
_DEEPEST = 8


class Module:
    """One file."""

    def __init__(self, path: str, source: str) -> None:
        self.path = path
        """Relative to the repository, with slashes."""
        self.tree = ast.parse(source)
        nodes = list(ast.walk(self.tree))
        self._parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.imported = {
            alias.asname or alias.name: (node.module.replace(".", "/") + ".py", alias.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        """What a name stands for: the file and the name there."""

    def functions_around(self, node: ast.AST) -> list[ast.FunctionDef]:
        """Innermost first."""
        found = []
        while node in self._parents:
            node = self._parents[node]
            if isinstance(node, ast.FunctionDef):
                found.append(node)
        return found


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


@dataclass(frozen=True)
class Scope:
    """What names mean at a node."""

    module: Module
    node: ast.AST
    known: dict[str, str]
    depth: int = 0

    def text(self, value: ast.expr) -> str:
        """What an expression says, with `<names>` for what is not known yet."""
        text = f"<{_words(self._hint(value))}>"
        if isinstance(value, ast.Constant):
            text = str(value.value)
        elif isinstance(value, ast.JoinedStr):
            text = "".join(map(self.text, value.values))
        elif isinstance(value, ast.FormattedValue):
            text = self.text(value.value)
            text = f"'{text}'" if value.conversion == ord("r") else text
        elif isinstance(value, ast.BinOp) and any(map(_is_text, (value.left, value.right))):
            text = self.text(value.left) + self.text(value.right)
        elif isinstance(value, ast.IfExp):
            text = self._either(value)
        elif isinstance(value, ast.Name):
            text = self._name(value.id)
        return text

    def _either(self, value: ast.IfExp) -> str:
        tested = self.known.get(value.test.id) if isinstance(value.test, ast.Name) else None
        if tested is not None and not tested.startswith("<"):
            given = tested not in {"", "0", "False", "None"}
            return self.text(value.body if given else value.orelse)
        first, second = (self.text(part) for part in (value.body, value.orelse))
        if "None" in (first, second):
            return first if second == "None" else second
        return " / ".join((first, second)) if first and second else f"[{first or second}]"

    def _name(self, name: str) -> str:
        if name in self.known:
            return self.known[name]
        if self.depth < _DEEPEST and (value := self._assigned(name)) is not None:
            text = replace(self, depth=self.depth + 1).text(value)
            if not text.startswith("<"):
                return text
        return f"<{_words(name)}>"

    def _assigned(self, name: str) -> ast.expr | None:
        """The value of a name that is given once, in the function or in the module."""
        for place in (*self.module.functions_around(self.node), self.module.tree):
            found = [
                node.value
                for node in ast.walk(place)
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
                for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
                if isinstance(target, ast.Name) and target.id == name
            ]
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _hint(self, value: ast.expr) -> str:
        """A word for an expression: mostly the name of what is in it."""
        inner = _inner(value)
        if inner is not None:
            return self._hint(inner)
        word = "value"
        if isinstance(value, ast.Name):
            word = value.id
        elif isinstance(value, ast.Attribute):
            word = "class" if value.attr == "__name__" else value.attr
        elif isinstance(value, ast.Call):
            word = self._hint_of_call(value)
        elif isinstance(value, (ast.List, ast.Tuple)):
            word = ", ".join(self._hint(element).strip("_") for element in value.elts)
        return word

    def _hint_of_call(self, call: ast.Call) -> str:
        function = call.func
        if isinstance(function, ast.Attribute):
            if function.attr == "get" and call.args:
                return self.text(call.args[0]).strip("<>")
            return function.attr.removeprefix("get_")
        name = ast.unparse(function)
        if name == "len":
            return f"number of {self._hint(call.args[0])}"
        if name == "getattr":
            wanted = self.text(call.args[1]).strip("<>")
            return "function" if wanted == "__name__" else f"value of {wanted}"
        return name


def _inner(value: ast.expr) -> ast.expr | None:
    """The part of an expression that says what it is, where it only changes that part's form."""
    inner = None
    if isinstance(value, (ast.Subscript, ast.Starred)):
        inner = value.value
    elif isinstance(value, ast.BinOp):
        inner = value.right if isinstance(value.left, ast.Constant) else value.left
    elif isinstance(value, ast.BoolOp):
        inner = value.values[0]
    elif isinstance(value, (ast.GeneratorExp, ast.ListComp)):
        inner = value.generators[0].iter
    elif isinstance(value, ast.Call) and value.args and ast.unparse(value.func) in _SHOWN_AS_IT_IS:
        inner = value.args[-1]
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr == "join" and value.args:
            inner = value.args[0]
        elif value.func.attr in {"strip", "rstrip", "replace", "items", "values"}:
            inner = value.func.value
    return inner
