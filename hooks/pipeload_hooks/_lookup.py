"""Tells for which modules the ids given to forward are exactly the rows of the weight it reads.

[Note: judged by the code] Libraries derive from nn.Embedding for two purposes: to scale or
normalise what is looked up, and to compute other ids first (positions). No attribute tells them
apart, so the syntax tree of forward is read. It must hand its one argument, untouched, to
`super().forward`, and look at the weight only for its dtype, device or shape. Whatever the rule
does not know counts as "no": such a table stays in memory.
"""

from __future__ import annotations

import ast
import inspect
from types import CodeType, FunctionType

from torch import nn

_METADATA = frozenset({"dtype", "device", "shape"})
# Scopes of their own, where a name may mean something else, and what binds names other than by a
# plain assignment.
_UNKNOWN = (
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.DictComp,
    ast.ExceptHandler,
    ast.FunctionDef,
    ast.GeneratorExp,
    ast.Global,
    ast.Import,
    ast.ImportFrom,
    ast.Lambda,
    ast.ListComp,
    ast.Match,
    ast.Nonlocal,
    ast.SetComp,
)
# Functions that reach every name of a scope without naming it.
_REACHING = frozenset({"eval", "exec", "globals", "locals", "vars"})


def takes_ids(module: nn.Module) -> bool:
    """Whether the ids given to `module` are the rows of `module.weight` that it reads, and all.

    False when unsure.
    """
    cls = type(module)
    if (
        not isinstance(module, nn.Embedding)
        or module.max_norm is not None  # changes the rows in place
        or "weight" not in module._parameters
        or hasattr(cls, "weight")  # a property that computes it
        or "forward" in vars(module)  # replaced on this object alone
        or cls.__call__ is not nn.Module.__call__
    ):
        return False
    used: set[str] = set()
    for owner in cls.__mro__:
        if owner is nn.Embedding:
            # Methods and properties may read the weight behind the rule's back.
            return not any(hasattr(cls, name) for name in used)
        forward = vars(owner).get("forward")
        if forward is not None:
            names = _used_by(forward, owner)
            if names is None:
                return False
            used |= names
    return False


def attributes_used(forward: ast.FunctionDef) -> frozenset[str] | None:
    """Names of the attributes of self that `forward` uses beside the weight's metadata.

    None if it may read other rows than those its argument names.
    """
    arguments = forward.args
    if (
        forward.decorator_list
        or len(arguments.args) != 2
        or any((arguments.posonlyargs, arguments.kwonlyargs, arguments.defaults))
        or any((arguments.vararg, arguments.kwarg))
    ):
        return None
    rule = _Rule(forward)
    rule.generic_visit(forward)
    return frozenset(rule.used) if rule.holds and rule.looked_up else None


class _Rule(ast.NodeVisitor):
    """Goes through the body of a forward and clears `holds` at the first thing unknown."""

    def __init__(self, forward: ast.FunctionDef) -> None:
        self._me, self._ids = (argument.arg for argument in forward.args.args)
        self.holds = True
        self.looked_up = False
        self.used: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _UNKNOWN):
            self.holds = False
        super().visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if self._looks_up(node):
            self.looked_up = True
        else:
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for operand in (node.left, *node.comparators):
            if not self._is(operand, self._ids):
                self.visit(operand)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        loaded = isinstance(node.ctx, ast.Load)
        of_ids = self._is(node.value, self._ids)
        if loaded and node.attr in _METADATA and (of_ids or self._is_weight(node.value)):
            return
        if loaded and self._is(node.value, self._me) and node.attr != "weight":
            self.used.add(node.attr)
            return
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        # What is allowed of these was passed over above.
        if node.id in {self._me, self._ids, "super", "__class__"} | _REACHING:
            self.holds = False

    def _looks_up(self, node: ast.Call) -> bool:
        """Whether it is `super().forward(ids)`."""
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(func=ast.Name(id="super"), args=[], keywords=[]), attr="forward"
                ),
                args=[argument],
                keywords=[],
            ):
                return self._is(argument, self._ids)
        return False

    def _is_weight(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == "weight"
            and self._is(node.value, self._me)
        )

    @staticmethod
    def _is(node: ast.expr, name: str) -> bool:
        return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _used_by(forward: object, owner: type) -> frozenset[str] | None:
    """`attributes_used` of a method as it stands in `owner`, from its source."""
    if not isinstance(forward, FunctionType) or not _super_starts_at(forward, owner):
        return None
    try:
        # A class around it takes the indentation as it is.
        source = f"class _:\n{inspect.getsource(forward)}"
        tree = ast.parse(source)
        compiled = compile(source, "<source>", "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError):
        return None
    match tree.body:
        case [ast.ClassDef(body=[ast.FunctionDef() as node])] if _same(forward, compiled):
            return attributes_used(node)
    return None


def _super_starts_at(forward: FunctionType, owner: type) -> bool:
    """Whether `super()` in it means what follows `owner`, and it has no other closure."""
    cells = forward.__closure__ or ()
    return forward.__code__.co_freevars == ("__class__",) and cells[0].cell_contents is owner


def _same(forward: FunctionType, compiled: CodeType) -> bool:
    """Whether the source is what runs: the file may have changed since it was loaded.

    Told by names and constants, not by bytecode, which depends on the rest of the file (a method of
    an imported module is called by other instructions).
    """
    codes = [compiled]
    for _ in range(2):  # the module holds the class, the class the function
        codes = [inner for code in codes for inner in code.co_consts if isinstance(inner, CodeType)]
    found = [_content(code) for code in codes if code.co_name == "forward"]
    return found == [_content(forward.__code__)]


def _content(code: CodeType) -> tuple[object, ...]:
    return code.co_names, code.co_varnames, code.co_consts
