"""Clients and guards that live too short, and guards without a timeout: SW501, SW601, SW602."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from seawall.audit.coverage import TIMEOUT
from seawall.audit.findings import Finding
from seawall.audit.names import FunctionNode
from seawall.audit.source import SourceFile
from seawall.audit.syntax import keywords_of, names_in, own, own_calls, words_in

_ONCE: Final = re.compile(
    r"main|run|cli|setup|set_up|teardown|shutdown|close|startup|start|init|create|make|build|get_.*client|get_.*session"
    r"|configure|lifespan|register|install|login|bootstrap|connect|serve|migrate|download|upload"
    r"|update|check|verify|validate|test|demo|example|upgrade|export|import|load|sync",
    re.IGNORECASE,
)
"""Names of functions that run once, or whose purpose is to make something."""

_ROUTES: Final = frozenset(
    {"get", "post", "put", "patch", "delete", "route", "websocket", "api_route", "task", "tool"}
)
_IN_PROCESS: Final = ("httpx.ASGITransport()", "httpx.WSGITransport()", "httpx.MockTransport()")
_KEPT: Final = re.compile(r"cache|fixture|contextmanager|on_event|lifespan|command|singleton")


def check(source: SourceFile) -> Iterator[Finding]:
    """Yield the clients and guards that are made again and again, and guards without a timeout."""
    for call in source.names.calls:
        path = source.called(call)
        if path in source.libraries.clients:
            yield from _client(source, call, path)
        elif path == "seawall.Guard":
            yield from _without_timeout(source, call)
            yield from _guard_per_call(source, call)
        elif path == "seawall.Guard.standard":
            yield from _guard_per_call(source, call)


def _client(source: SourceFile, call: ast.Call, path: str) -> Iterator[Finding]:
    function = source.function_of(call)
    if function is None or not _is_local(source, call, function):
        return
    looped = _loop_around(source, call)
    if _is_for_one_place(call, function) or "cache" in words_in(function):
        return  # another address each time, or asked only once
    transport = keywords_of(call).get("transport")
    if transport is not None and source.path_of(transport) in _IN_PROCESS:
        return  # there is no connection
    if not looped and not _runs_often(function):
        return
    where = "in each turn of the loop" if looped else f"for each call of {function.name}"
    message = f"{path}(...) is made {where}, and thrown away"
    write = (
        f"client = {source.libraries.clients[path]} once, when the application starts (its"
        " lifespan, or a module), and close it when it ends"
    )
    yield source.finding("SW501", call, message, write)


def _is_for_one_place(call: ast.Call, function: FunctionNode) -> bool:
    """Return whether the client is made for an address that differs from call to call."""
    where = [*call.args[:1], *(key.value for key in call.keywords if key.arg == "base_url")]
    changing = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
    for loop in own(function.body, (ast.For, ast.AsyncFor)):
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            changing |= names_in(loop.target)
    return any(names_in(one) & changing for one in where)


def _without_timeout(source: SourceFile, call: ast.Call) -> Iterator[Finding]:
    scope = source.names.scope_of(call)
    policies = [source.names.resolve(argument, scope) for argument in call.args[1:]]
    known = [one.path for one in policies if one is not None and one.path.startswith("seawall.")]
    if len(known) < len(policies) or not policies or f"{TIMEOUT}()" in known:
        return
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    stack = ", ".join(path.removeprefix("seawall.").removesuffix("()") for path in known)
    message = f"Guard({stack}) has no Timeout"
    write = "Timeout(2.0) as the last policy, around each attempt"
    yield source.finding("SW601", call, message, write)


def _guard_per_call(source: SourceFile, call: ast.Call) -> Iterator[Finding]:
    function = source.function_of(call)
    if function is None or not _is_local(source, call, function):
        return
    if not _loop_around(source, call) and (_is_exempt(function) or not _calls_it(source, call)):
        return
    message = f"the guard is made in {function.name}, for each call anew"
    write = "the guard at the top of the module, or get_guard(name, make); Guard.family by key"
    yield source.finding("SW602", call, message, write)


def _calls_it(source: SourceFile, made: ast.Call) -> bool:
    """Return whether the guard is used where it was made."""
    parent = source.names.parents.get(made)
    if isinstance(parent, ast.Attribute) and parent.attr in {"call", "acall", "hold"}:
        return True
    for call in source.names.calls:
        value = source.names.called(call)
        if value is not None and value.origin is made and isinstance(call.func, ast.Attribute):
            return call.func.attr in {"call", "acall", "hold"}
    scope = source.names.scope_of(made)
    decorators = (one for function in source.names.functions for one in function.decorator_list)
    values = (source.names.resolve(one, scope) for one in decorators)
    return any(value is not None and value.origin is made for value in values)


def _is_local(source: SourceFile, call: ast.Call, function: FunctionNode) -> bool:
    """Return whether what `call` makes stays in `function`: not returned, kept or handed on."""
    node: ast.AST = call
    parent = source.names.parents.get(node)
    while isinstance(parent, (ast.Await, ast.IfExp, ast.NamedExpr)):
        node, parent = parent, source.names.parents.get(parent)
    if isinstance(parent, ast.Attribute):
        return True  # used at once: Client().get(...)
    if isinstance(parent, ast.withitem):
        kept = parent.optional_vars
        return kept is None or (isinstance(kept, ast.Name) and _stays(kept.id, function))
    if not isinstance(parent, ast.Assign) or len(parent.targets) > 1:
        return False
    target = parent.targets[0]
    return isinstance(target, ast.Name) and _stays(target.id, function)


def _stays(name: str, function: FunctionNode) -> bool:
    """Return whether a local name is only used: never returned, stored, yielded or declared."""
    for node in own(function.body, (ast.Return, ast.Yield, ast.Assign, ast.Global, ast.Nonlocal)):
        match node:
            case ast.Return(value=value) | ast.Yield(value=value) | ast.Assign(value=value) if (
                value is not None and _hands_on(value, name)
            ):
                return False
            case ast.Global(names=names) | ast.Nonlocal(names=names) if name in names:
                return False
    for call in own_calls(function.body):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(isinstance(one, ast.Name) and one.id == name for one in given):
            return False
    return not _is_closed_over(name, function)


def _hands_on(value: ast.expr, name: str) -> bool:
    """Return whether the value is the name itself, alone or in a tuple, list or dict."""
    if isinstance(value, ast.Name):
        return value.id == name
    if isinstance(value, (ast.Tuple, ast.List, ast.Dict)):
        children = ast.iter_child_nodes(value)
        return any(isinstance(one, ast.Name) and one.id == name for one in children)
    return False


def _is_closed_over(name: str, function: FunctionNode) -> bool:
    """Return whether a function inside of `function` uses the name, perhaps later."""
    for node in ast.walk(function):
        bodies: list[ast.AST] = []
        if isinstance(node, ast.Lambda):
            bodies = [node.body]
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node is not function:
            bodies = [*node.body]
        if any(name in names_in(body) for body in bodies):
            return True
    return False


def _runs_often(function: FunctionNode) -> bool:
    """Return whether a function is surely or probably run for each request."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, ast.Attribute) and target.attr in _ROUTES:
            return True
    return isinstance(function, ast.AsyncFunctionDef) and not _is_exempt(function)


def _is_exempt(function: FunctionNode) -> bool:
    if _ONCE.search(function.name) or function.name.startswith("__"):
        return True
    return any(_KEPT.search(words_in(decorator)) for decorator in function.decorator_list)


def _loop_around(source: SourceFile, call: ast.Call) -> bool:
    below: ast.AST = call
    for above in source.names.ancestors(call):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(above, (ast.For, ast.AsyncFor)) and below is not above.iter:
            return True
        if isinstance(above, ast.While) and below is not above.test:
            # A loop that reconnects makes a new client when the old one is gone.
            return False
        below = above
    return False
