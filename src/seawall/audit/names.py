"""The meaning of names in one file, as far as that file alone tells it.

A value is described by the path from which it came. `get` after `from requests import get` is
`requests.get`; the method of a session is `requests.Session().get`, wherever the session was kept:
in a name, in an attribute of `self`, as the target of `with`, or returned by a function of the
file. Names that the file itself defines begin with a dot.

Promises:
- Nothing is imported or run.
- A name that can mean two things means nothing: `resolve` returns None.
- Any tree is read, in time proportional to its size: no recursion over the tree.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from seawall.audit.syntax import is_none, names_in

DEEPEST: Final = 30  # maximum number of steps from a name to what it stands for

FunctionNode: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension: TypeAlias = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
ScopeNode: TypeAlias = ast.Module | FunctionNode | ast.Lambda | ast.ClassDef | Comprehension

_ENTERING: Final = frozenset({"enter_context", "enter_async_context"})
_UNWRAPPED: Final = frozenset({"contextlib.closing", "contextlib.aclosing"})
_PARTIAL: Final = frozenset({"functools.partial", "functools.partialmethod"})


class Binding(NamedTuple):
    """One way in which a name gets its value, and the scope in which that is to be read.

    `value` is a path (an import), an expression, a definition, or None if it is not known.
    """

    value: str | ast.expr | FunctionNode | ast.ClassDef | None
    scope: Scope
    is_type: bool = False  # whether `value` is an annotation: the name holds an instance of it


class Scope:
    """The names of a module, class, function or comprehension."""

    def __init__(self, node: ScopeNode, parent: Scope | None) -> None:
        self.node = node
        self.parent = parent
        self.names: dict[str, list[Binding]] = {}
        self.attributes: dict[str, list[Binding]] = {}  # what methods assign to `self`
        self.elsewhere: set[str] = set()  # names declared `global` or `nonlocal`
        self.returns: list[ast.expr] = []

    def bind(self, name: str, binding: Binding) -> None:
        """Add a binding of `name`."""
        self.home(name).names.setdefault(name, []).append(binding)

    def home(self, name: str) -> Scope:
        """Return the scope to which an assignment of `name` in this one belongs."""
        scope = self
        if name in self.elsewhere:  # the nearest scope that has it, else the module
            while scope.parent is not None and (scope is self or name not in scope.names):
                scope = scope.parent
        while isinstance(scope.node, Comprehension) and scope.parent is not None:
            scope = scope.parent
        return scope

    def lookup(self, name: str) -> list[Binding]:
        """Return the bindings of `name` that are visible here."""
        scope: Scope | None = self
        while scope is not None:
            # The names of a class are not visible in its methods.
            if name in scope.names and (scope is self or not isinstance(scope.node, ast.ClassDef)):
                return scope.names[name]
            scope = scope.parent
        return []


class Value(NamedTuple):
    """What an expression stands for."""

    path: str
    origin: ast.Call | None = None  # the call that made it, or the object of this attribute
    bound: ast.Call | None = None  # the `partial(...)` that already holds some of its arguments
    function: FunctionNode | None = None  # the definition, if it is a function of this file
    members: Scope | None = None  # its scope, if it is a class of this file or an instance


class Names:
    """The names of one parsed file, and the place of each node in its tree."""

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.scopes: dict[ast.AST, Scope] = {}
        self.calls: list[ast.Call] = []
        self.loops: list[ast.For | ast.AsyncFor | ast.While] = []
        self.functions: list[FunctionNode] = []
        self._place: dict[ast.AST, Scope] = {}
        self._known: dict[ast.AST, Value | None] = {}
        self._read(tree)

    # Reading the tree

    def _read(self, tree: ast.Module) -> None:
        top = Scope(tree, None)
        self.scopes[tree] = top
        todo: list[tuple[ast.AST, Scope]] = [(tree, top)]
        while todo:
            node, scope = todo.pop()
            self._bind(node, scope)
            children = []
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                children.append((child, self._scope_of_child(node, child, scope)))
            todo.extend(reversed(children))

    def _scope_of_child(self, node: ast.AST, child: ast.AST, scope: Scope) -> Scope:
        """Return the scope in which `child` is evaluated; decorators and bases belong outside."""
        inner = self.scopes.get(node)
        if inner is None or isinstance(node, ast.Module):
            return scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            outside = isinstance(child, ast.expr)  # decorators and the returned type
            return scope if outside else inner
        if isinstance(node, ast.ClassDef):
            return inner if isinstance(child, ast.stmt) else scope
        return inner

    def _bind(self, node: ast.AST, scope: Scope) -> None:  # noqa: C901, PLR0912 - one case for each kind of node
        match node:
            case ast.Call():
                self._place[node] = scope
                self.calls.append(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope.bind(node.name, Binding(node, scope))
                self.functions.append(node)
                self._open(node, scope)
            case ast.ClassDef():
                scope.bind(node.name, Binding(node, scope))
                self._open(node, scope)
            case (
                ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp()
            ):
                self._open(node, scope)
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value, scope)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, node.value, scope)
                else:
                    self._assign(node.target, node.annotation, scope, is_type=True)
            case ast.NamedExpr():
                self._assign(node.target, node.value, scope)
            case ast.AugAssign():
                self._assign(node.target, None, scope)
            case ast.withitem() if node.optional_vars is not None:
                self._assign(node.optional_vars, node.context_expr, scope)
            case ast.For() | ast.AsyncFor():
                self.loops.append(node)
                self._assign(node.target, None, scope)
            case ast.comprehension():
                for name in sorted(names_in(node.target)):
                    scope.names.setdefault(name, []).append(Binding(None, scope))
            case ast.While():
                self.loops.append(node)
            case ast.Import():
                for alias in node.names:
                    path = alias.name if alias.asname else alias.name.partition(".")[0]
                    scope.bind(alias.asname or path, Binding(path, scope))
            case ast.ImportFrom():
                prefix = "." * node.level + (node.module or "")
                for alias in node.names:
                    path = f"{prefix}.{alias.name}" if node.module else f"{prefix}{alias.name}"
                    scope.bind(alias.asname or alias.name, Binding(path, scope))
            case ast.Global() | ast.Nonlocal():
                scope.elsewhere.update(node.names)
            case ast.Return() if node.value is not None:
                scope.returns.append(node.value)
            case ast.ExceptHandler() if node.name:
                scope.bind(node.name, Binding(None, scope))
            case ast.MatchAs() | ast.MatchStar() if node.name:
                scope.bind(node.name, Binding(None, scope))

    def _open(self, node: ScopeNode, outer: Scope) -> None:
        inner = self.scopes[node] = Scope(node, outer)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return
        arguments = node.args
        listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for number, argument in enumerate(listed):
            if number == 0 and isinstance(outer.node, ast.ClassDef):
                inner.names[argument.arg] = [Binding(outer.node, inner, is_type=True)]
            elif argument.annotation is not None:
                inner.names[argument.arg] = [Binding(argument.annotation, outer, is_type=True)]
            else:
                inner.names[argument.arg] = [Binding(None, inner)]
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                inner.names[rest.arg] = [Binding(None, inner)]

    def _assign(
        self, target: ast.expr, value: ast.expr | None, scope: Scope, *, is_type: bool = False
    ) -> None:
        if isinstance(target, ast.Name):
            scope.bind(target.id, Binding(value, scope, is_type))
        elif isinstance(target, ast.Attribute):
            members = self._class_of_self(target.value, scope)
            if members is not None:
                binding = Binding(value, scope, is_type)
                members.attributes.setdefault(target.attr, []).append(binding)
        elif isinstance(target, (ast.Tuple, ast.List)):
            values: list[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = list(value.elts)
            for one, its_value in zip(target.elts, values, strict=True):
                self._assign(one, its_value, scope)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, None, scope)

    def _class_of_self(self, node: ast.expr, scope: Scope) -> Scope | None:
        if not isinstance(node, ast.Name):
            return None
        for binding in scope.lookup(node.id):
            if binding.is_type and isinstance(binding.value, ast.ClassDef):
                return self.scopes.get(binding.value)
        return None

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around `node`, innermost first."""
        above = self.parents.get(node)
        while above is not None:
            yield above
            above = self.parents.get(above)

    def function_of(self, node: ast.AST) -> FunctionNode | ast.Lambda | None:
        """Return the function in whose body `node` stands; a decorator stands outside of it."""
        below = node
        for above in self.ancestors(node):
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if not isinstance(below, (ast.expr, ast.arguments)):
                    return above
            elif isinstance(above, ast.Lambda):
                return above
            below = above
        return None

    def qualified_name(self, node: ast.AST) -> str:
        """Return the names of the classes and functions around `node`, joined by dots."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        around = [one.name for one in self.ancestors(node) if isinstance(one, kinds)]
        return ".".join(reversed(around))

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the scope in which the expression `node` is evaluated."""
        for one in (node, *self.ancestors(node)):
            if one in self._place:
                return self._place[one]
            if one in self.scopes and one is not node:
                return self.scopes[one]
        return next(iter(self.scopes.values()))

    # Meaning

    def called(self, call: ast.Call) -> Value | None:
        """Return what `call` calls."""
        return self.resolve(call.func, self._place[call])

    def path(self, node: ast.expr, scope: Scope | None = None) -> str:
        """Return the path of `node`, empty if it is unknown."""
        value = self.resolve(node, scope or self.scope_of(node))
        return value.path if value is not None else ""

    def resolve(self, node: ast.expr, scope: Scope, depth: int = 0) -> Value | None:
        """Return what `node` stands for in `scope`, or None."""
        if node in self._known:
            return self._known[node]
        if depth > DEEPEST:
            return None
        self._known[node] = None  # a name that is made of itself is unknown
        value = self._known[node] = self._resolve(node, scope, depth + 1)
        return value

    def _resolve(self, node: ast.expr, scope: Scope, depth: int) -> Value | None:
        match node:
            case ast.Name():
                return self._agreed(scope.lookup(node.id), depth)
            case ast.Attribute():
                return self._attribute(node, scope, depth)
            case ast.Call():
                return self._result(node, scope, depth)
            case ast.Await(value=inner) | ast.NamedExpr(value=inner):
                return self.resolve(inner, scope, depth)
            case ast.IfExp():
                return self._agreed([Binding(node.body, scope), Binding(node.orelse, scope)], depth)
        return None

    def _attribute(self, node: ast.Attribute, scope: Scope, depth: int) -> Value | None:
        base = self.resolve(node.value, scope, depth)
        if base is None:
            return None
        if base.members is not None:
            members = base.members
            bindings = members.attributes.get(node.attr, []) + members.names.get(node.attr, [])
            return self._agreed(bindings, depth)
        return Value(f"{base.path}.{node.attr}", base.origin)

    def _result(self, node: ast.Call, scope: Scope, depth: int) -> Value | None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _ENTERING and node.args:
            return self.resolve(node.args[0], scope, depth)
        function = self.resolve(node.func, scope, depth)
        if function is None:
            return None
        if function.path in _UNWRAPPED and node.args:
            return self.resolve(node.args[0], scope, depth)
        if function.path in _PARTIAL and node.args:
            inner = self.resolve(node.args[0], scope, depth)
            return inner and inner._replace(bound=node)
        if function.function is not None:
            its_scope = self.scopes[function.function]
            returned = [Binding(value, its_scope) for value in its_scope.returns]
            return self._agreed(returned, depth)
        return Value(f"{function.path}()", node, members=function.members)

    def _agreed(self, bindings: list[Binding], depth: int) -> Value | None:
        """Return the value that all bindings have; those that bind None do not count."""
        found: Value | None = None
        for binding in bindings:
            if isinstance(binding.value, ast.Constant) and binding.value.value is None:
                continue
            value = self._bound(binding, depth)
            if value is None or (found is not None and found.path != value.path):
                return None
            if found is None or found.origin is None:
                found = value
        return found

    def _bound(self, binding: Binding, depth: int) -> Value | None:
        match binding.value:
            case None:
                return None
            case str(path):
                return Value(path)
            case ast.ClassDef(name=name) as definition:
                path = f".{name}()" if binding.is_type else f".{name}"
                return Value(path, members=self.scopes.get(definition))
            case ast.FunctionDef() | ast.AsyncFunctionDef() as function:
                return self._function(function, depth)
            case annotation if binding.is_type:
                return self._instance(annotation, binding.scope, depth)
            case expression:
                return self.resolve(expression, binding.scope, depth)

    def _function(self, function: FunctionNode, depth: int) -> Value | None:
        """Return a function of this file; of a property, what it returns."""
        decorators = {getattr(one, "id", "") for one in function.decorator_list}
        if decorators & {"property", "cached_property"}:
            scope = self.scopes[function]
            return self._agreed([Binding(one, scope) for one in scope.returns], depth + 1)
        return Value(f".{function.name}", function=function)

    def _instance(self, annotation: ast.expr, scope: Scope, depth: int) -> Value | None:
        """Return an instance of the annotated type; of `T | None` and `Optional[T]`, one of T."""
        kind: ast.expr | None = annotation
        while kind is not None and not isinstance(kind, (ast.Name, ast.Attribute)):
            kind = self._unwrapped(kind, scope, depth)
        value = None if kind is None else self.resolve(kind, scope, depth)
        if value is None or value.function is not None:
            return None
        return Value(f"{value.path}()", members=value.members)

    def _unwrapped(self, annotation: ast.expr, scope: Scope, depth: int) -> ast.expr | None:
        """Return what is annotated, without quotes and without the None that it may be."""
        match annotation:
            case ast.Constant(value=str(text)):
                try:
                    return ast.parse(text, mode="eval").body
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    return None
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                known = [one for one in (left, right) if not is_none(one)]
                return known[0] if len(known) == 1 else None
            case ast.Subscript(value=outer, slice=inner):
                value = self.resolve(outer, scope, depth)
                return inner if value is not None and value.path == "typing.Optional" else None
        return None
