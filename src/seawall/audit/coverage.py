"""What is already bounded in time: by a guard, by `asyncio.timeout` and its like, by a wrapper.

A call is covered if it stands inside such a block, inside a function that a guard or a timeout
runs, or as an argument of one. A `Timeout` that is cooperative only sets a deadline that others
read, so it covers no plain function.
"""

from __future__ import annotations

import ast
from typing import Final

from seawall.audit.names import FunctionNode
from seawall.audit.source import SourceFile
from seawall.audit.syntax import is_none, keywords_of

GUARDS: Final = (
    "seawall.Guard()",
    "seawall.Guard.standard()",
    "seawall.Guard.family()",
    "seawall.Family()",
    "seawall.get_guard()",
)
TIMEOUT: Final = "seawall.Timeout"


class Coverage:
    """The functions and blocks of a file that something bounds in time."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._names = source.names
        self._known = source.libraries.bounds
        self._functions: set[FunctionNode] = set()
        self._arguments: set[ast.AST] = set()
        for function in self._names.functions:
            is_async = isinstance(function, ast.AsyncFunctionDef)
            if any(self._bounds(one, is_async=is_async) for one in function.decorator_list):
                self._functions.add(function)
        for call in self._names.calls:
            if self._runs(call):
                self._add_arguments(call)
        self._add_callees()

    def covers(self, node: ast.AST) -> bool:
        """Return whether `node` runs within a bound of time."""
        return any(
            above in self._functions or above in self._arguments or self._is_block(above)
            for above in (node, *self._names.ancestors(node))
        )

    def _add_arguments(self, call: ast.Call) -> None:
        scope = self._names.scope_of(call)
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            self._arguments.add(argument)
            # The functions that it names or calls: `f`, `f(x)`, `[f(x) for x in xs]`.
            called = (node.func for node in ast.walk(argument) if isinstance(node, ast.Call))
            for one in (argument, *called):
                value = self._names.resolve(one, scope)
                if value is not None and value.function is not None:
                    self._functions.add(value.function)

    def _add_callees(self) -> None:
        """Cover private functions of the file that only covered code calls."""
        callers: dict[FunctionNode, list[ast.Call]] = {}
        for call in self._names.calls:
            value = self._names.called(call)
            if value is not None and value.function is not None:
                callers.setdefault(value.function, []).append(call)
        changed = True
        while changed:
            changed = False
            for function, calls in callers.items():
                private = function.name.startswith("_") and function not in self._functions
                if private and all(self.covers(call) for call in calls):
                    self._functions.add(function)
                    changed = True

    def _is_block(self, node: ast.AST) -> bool:
        return isinstance(node, (ast.With, ast.AsyncWith)) and any(
            isinstance(item.context_expr, ast.Call)
            and self._source.called(item.context_expr) in self._known["blocks"]
            and not any(map(is_none, item.context_expr.args[:1]))
            for item in node.items
        )

    def _runs(self, call: ast.Call) -> bool:
        """Return whether `call` runs its arguments within a bound of time."""
        if isinstance(call.func, ast.Attribute) and call.func.attr in {"call", "acall"}:
            return self._bounds(call.func.value, is_async=call.func.attr == "acall")
        path = self._source.called(call)
        if path == "asyncio.wait_for":
            given = call.args[1:] + [key.value for key in call.keywords if key.arg == "timeout"]
            return bool(given) and not is_none(given[0])
        return path in self._known["runners"] and any(key.arg == "timeout" for key in call.keywords)

    def _bounds(self, node: ast.expr, *, is_async: bool) -> bool:
        """Return whether what `node` stands for bounds the calls that it runs or decorates."""
        value = self._names.resolve(node, self._names.scope_of(node))
        if value is None:
            return False
        path = self._source.libraries.canonical(value.path)
        if path.removesuffix("()") in self._known["decorators"]:
            return True
        if not path.startswith("seawall.") or value.origin is None:
            return path.startswith("seawall.") and path.startswith(GUARDS)
        if path.startswith("seawall.Guard.standard()"):
            return is_async or _sync(value.origin) != "cooperative"
        if path.startswith(GUARDS):
            return any(timeouts := self.timeouts_of(value.origin)) and (
                is_async or any(_sync(timeout) != "cooperative" for timeout in timeouts)
            )
        return path == f"{TIMEOUT}()" and (is_async or _sync(value.origin) != "cooperative")

    def timeouts_of(self, guard: ast.Call) -> list[ast.Call]:
        """Return the timeouts of a guard; where a policy is unknown, the guard itself is one."""
        if self._source.called(guard) != "seawall.Guard":
            return [guard]
        found = []
        scope = self._names.scope_of(guard)
        for policy in guard.args[1:]:
            value = self._names.resolve(policy, scope)
            path = "" if value is None else self._source.libraries.canonical(value.path)
            if value is None or not path.startswith("seawall."):
                found.append(guard)
            elif path == f"{TIMEOUT}()" and value.origin is not None:
                found.append(value.origin)
        return found


def _sync(call: ast.Call) -> str | None:
    given = keywords_of(call).get("sync")
    return str(given.value) if isinstance(given, ast.Constant) else None
