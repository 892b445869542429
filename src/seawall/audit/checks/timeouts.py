"""Calls that wait: without a bound (SW101 to SW103), or inside `async def` (SW401)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

from seawall.audit.coverage import Coverage
from seawall.audit.findings import Finding
from seawall.audit.libraries import WaitingCall
from seawall.audit.names import FunctionNode, Scope, Value
from seawall.audit.source import SourceFile
from seawall.audit.syntax import (
    code_of,
    has_unpacking,
    is_none,
    keywords_of,
    names_in,
    own_calls,
    texts_in,
    words_in,
)

OUR_TRANSPORTS: Final = ("seawall.clients.",)
_ADAPTER_METHOD: Final = ".init_poolmanager"
"""The method of an adapter of `requests` that makes its pool."""
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})
_CARRIERS: Final = frozenset({"transport", "connector", "http_client", "mounts"})
_SOCKET_LIBRARIES: Final = frozenset(
    {"urllib", "http.client", "httplib2", "smtplib", "ftplib", "poplib", "imaplib", "socket"}
    | {"telnetlib", "nntplib", "xmlrpc"}
)
"""Libraries that follow `socket.setdefaulttimeout`."""

_COMMANDS: Final = re.compile(
    r"(^|/)(cli|commands?|scripts?(-[^/]*)?|tools|bin|dev|ci)/|(^|/)(cli|__main__|manage)\.py$"
)
"""Files of commands that somebody runs and watches: a child process may take its time there."""

_QUICK: Final = frozenset(
    {"chmod", "chown", "hostname", "id", "ln", "mkdir", "uname", "which", "whoami"}
    | {"--version", "version", "-V", "--help", "rev-parse"}
)
"""Programs, and what is asked of them, that end at once."""

_OWN_TIMEOUT: Final = re.compile(r"(^|\s)(timeout(\s|$)|--timeout\b|--max-time\b)")
"""What ends a child process in time by itself: `timeout 60 COMMAND`, `curl --max-time 5`."""
_WATCHING: Final = re.compile(r"watch|worker|listen|consum|monitor|_loop|thread")
_ENDED: Final = re.compile(r"\b(kill|terminate|timer|alarm)\b")


def check(source: SourceFile) -> Iterator[Finding]:
    """Yield the waits without a bound."""
    yield from _Timeouts(source).findings()


_Given: TypeAlias = Literal["bounded", "refused", "absent"]
"""What a call says about its timeout: it may have one, it has none (`timeout=None`), or nothing."""


class _Timeouts:
    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._names = source.names
        self._coverage = Coverage(source)
        self._uses = _Uses(source)
        self._default_set = any(
            self._source.called(call) == "socket.setdefaulttimeout" for call in self._names.calls
        )

    def findings(self) -> Iterator[Finding]:
        for call in self._names.calls:
            value = self._names.called(call)
            if value is None:
                continue
            if value.function is not None:
                yield from self._of_wrapper(call, value.function)
                continue
            path = self._source.libraries.canonical(value.path)
            wait = self._source.libraries.timeouts.get(path)
            if wait is not None:
                yield from self._of_wait(call, value, wait)
                continue
            wait = self._source.libraries.waits.get(path)
            if wait is not None and not _ends_by_itself(self._source, call, path):
                yield from self._of_wait(call, value, wait, rule="SW103")

    def _of_wait(
        self, call: ast.Call, value: Value, wait: WaitingCall, rule: str | None = None
    ) -> Iterator[Finding]:
        given = self._given(call, wait, value)
        if given == "bounded" or (wait.kind == "bounded" and given != "refused"):
            return
        if self._set_elsewhere(call, value, wait) or self._coverage.covers(call):
            return
        what = self._source.libraries.canonical(value.path)
        if given == "refused":
            rule = rule or "SW101"
            message = f"{what}(...) waits without a limit"
        else:
            rule = rule or ("SW102" if wait.kind == "long" else "SW101")
            message = f"{what}(...) has no timeout: it waits {wait.waits}"
        yield self._source.finding(rule, call, message, wait.write)

    def _of_wrapper(self, call: ast.Call, function: FunctionNode) -> Iterator[Finding]:
        """Report a call of a function that passes its own timeout on, where none is given.

        If nobody in this file gives one, the mistake is in the function, and is reported there.
        """
        for inner in self._uses.passing.get(function, []):
            value = self._names.called(inner.call)
            wait = value and self._source.libraries.timeouts.get(
                self._source.libraries.canonical(value.path)
            )
            if value is None or wait is None or wait.kind == "bounded":
                continue
            if self._passed(call, function, inner.argument) or self._coverage.covers(call):
                continue
            if self._coverage.covers(inner.call):
                continue
            rule = "SW102" if wait.kind == "long" else "SW101"
            callers = self._uses.callers.get(function, [])
            if any(self._passed(one, function, inner.argument) for one in callers):
                message = (
                    f"{function.name}(...) passes its timeout on to {value.path}, and is called"
                    f" without one: it waits {wait.waits}"
                )
                yield self._source.finding(rule, call, message, f"{function.name}(..., timeout=10)")
            elif call is callers[0]:
                message = (
                    f"{value.path}(...) gets no timeout from any caller of {function.name} in this"
                    f" file: it waits {wait.waits}"
                )
                yield self._source.finding(rule, inner.call, message, wait.write)
            return

    def _passed(self, call: ast.Call, function: FunctionNode, argument: str) -> bool:
        if any(key.arg in {argument, None, "timeout"} for key in call.keywords):
            return True
        if any(isinstance(one, ast.Starred) for one in call.args):
            return True
        listed = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if listed and listed[0] in {"self", "cls"}:
            listed = listed[1:]
        return argument in listed and len(call.args) > listed.index(argument)

    # What the call itself says

    def _given(self, call: ast.Call, wait: WaitingCall, value: Value) -> _Given:
        scope = self._names.scope_of(call)
        parts = [call] if value.bound is None else [call, value.bound]
        verdict: _Given = "absent"
        for part in parts:
            arguments = part.args if part is call else part.args[1:]
            if any(isinstance(one, ast.Starred) for one in arguments):
                return "bounded"
            if wait.position is not None and len(arguments) > wait.position:
                verdict = self._worth(arguments[wait.position], wait, scope)
            for keyword in part.keywords:
                if keyword.arg in wait.keywords:
                    verdict = self._worth(keyword.value, wait, scope)
                elif keyword.arg in wait.unless or self._is_ours(keyword, scope):
                    return "bounded"
                elif keyword.arg is None:
                    verdict = self._unpacked(keyword.value, wait, scope) or verdict
            if verdict != "absent":
                return verdict
        if wait.address is not None and not self._address_is_plain(call, wait, scope):
            return "bounded"
        return "absent"

    def _worth(self, node: ast.expr, wait: WaitingCall, scope: Scope) -> _Given:
        constant = self._constant(node, scope)
        if constant is None:
            return "bounded"
        if constant.value is None or (wait.zero and constant.value == 0):
            return "refused"
        return "bounded"

    def _constant(self, node: ast.expr, scope: Scope) -> ast.Constant | None:
        """Return the constant that `node` is, or that a name is bound to everywhere."""
        if isinstance(node, ast.Constant):
            return node
        if not isinstance(node, ast.Name):
            return None
        values = [binding.value for binding in scope.lookup(node.id)]
        constants = [value for value in values if isinstance(value, ast.Constant)]
        if not values or len(constants) < len(values):
            return None
        return constants[0] if len({repr(one.value) for one in constants}) == 1 else None

    def _unpacked(self, node: ast.expr, wait: WaitingCall, scope: Scope) -> _Given | None:
        """Return what `**node` says: of a dict of this file, whether it has a timeout."""
        keys = self._uses.keys_of(node, scope)
        return "bounded" if keys is None or keys & {*wait.keywords, *wait.unless} else None

    def _is_ours(self, keyword: ast.keyword, scope: Scope) -> bool:
        if keyword.arg not in _CARRIERS:
            return False
        path = self._source.path_of(keyword.value, scope)
        # A transport of the user's own may have a timeout, too.
        return path.startswith(OUR_TRANSPORTS) or not path.startswith(("httpx.", "aiohttp."))

    def _address_is_plain(self, call: ast.Call, wait: WaitingCall, scope: Scope) -> bool:
        """Return whether the connection string is known, is of a server, and has no timeout."""
        if wait.address is None or len(call.args) <= wait.address:
            named = {key.arg for key in call.keywords}
            return None not in named and not named & {"dsn", "url", "conninfo", "uri"}
        node = call.args[wait.address]
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(one.value) for one in node.values if isinstance(one, ast.Constant))
        else:
            constant = self._constant(node, scope)
            if constant is None or not isinstance(constant.value, str):
                return False
            text = constant.value
        known = not wait.schemes or text.startswith(wait.schemes)
        return known and "timeout" not in text.lower()

    # What the rest of the file says

    def _set_elsewhere(self, call: ast.Call, value: Value, wait: WaitingCall) -> bool:
        if wait.library in _SOCKET_LIBRARIES and self._default_set:
            return True
        made = value.origin or call
        if wait.library == "socket" and {"AF_UNIX", "SOCK_DGRAM"} & _last_names(made):
            return True  # connects at once, or not at all
        if wait.library in {"socket", "asyncio"} and _LOOPBACK & texts_in(call):
            return True
        if wait.set_by and self._uses.configures(made, wait.set_by):
            return True
        if wait.library == "urllib3" and self._names.qualified_name(call).endswith(_ADAPTER_METHOD):
            return True  # each request of the adapter brings its timeout
        used = [one for name, one in self._uses.methods.get(call, ()) if name in wait.through]
        wanted = {*wait.keywords, "timeout", None}
        return bool(used) and all(
            any(keyword.arg in wanted for keyword in one.keywords) or self._coverage.covers(one)
            for one in used
        )


class _PassingOn(NamedTuple):
    call: ast.Call
    argument: str


class _Uses:
    """How the clients, dicts and functions of a file are used in the rest of it."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._names = source.names
        self.methods: dict[ast.Call, list[tuple[str, ast.Call]]] = {}  # of what a call returns
        self.callers: dict[FunctionNode, list[ast.Call]] = {}  # of functions of this file
        self.passing: dict[FunctionNode, list[_PassingOn]] = {}  # their timeout, None by default
        for call in self._names.calls:
            value = self._names.called(call)
            self._note_passing(call)
            if value is None:
                continue
            if value.origin is not None and isinstance(call.func, ast.Attribute):
                self.methods.setdefault(value.origin, []).append((call.func.attr, call))
            if value.function is not None:
                self.callers.setdefault(value.function, []).append(call)
        self._assigned = self._assigned_attributes()

    def configures(self, made: ast.Call, names: tuple[str, ...]) -> bool:
        """Return whether a method or attribute of what `made` returns sets a timeout."""
        if any(name in names for name in self._assigned.get(made, ())):
            return True
        return any(
            method in names and not self._is_plain_mount(method, call)
            for method, call in self.methods.get(made, ())
            if method not in {"request", "send"}
        )

    def _is_plain_mount(self, method: str, call: ast.Call) -> bool:
        """Return whether an adapter of `requests` itself is mounted, which sets no timeout."""
        if method != "mount" or len(call.args) < 2:  # noqa: PLR2004 - prefix and adapter
            return False
        path = self._source.path_of(call.args[1], self._names.scope_of(call))
        return path in {"requests.adapters.HTTPAdapter()", "requests.HTTPAdapter()"}

    def keys_of(self, node: ast.expr, scope: Scope) -> set[str] | None:
        """Return the keys of a dict that is made in this file, or None if they are unknown."""
        if isinstance(node, ast.Name):
            keys: set[str] = set()
            bindings = scope.lookup(node.id)
            if not bindings:
                return None
            for binding in bindings:
                if not isinstance(binding.value, ast.expr) or binding.is_type:
                    return None
                found = _literal_keys(binding.value)
                if found is None:
                    return None
                keys |= found
            return None if self._is_changed(node.id, scope) else keys
        return _literal_keys(node)

    def _is_changed(self, name: str, scope: Scope) -> bool:
        """Return whether keys are added to the dict `name` in its function."""
        for node in ast.walk(scope.node):
            match node:
                case ast.Subscript(value=ast.Name(id=found), ctx=ast.Store()) if found == name:
                    return True
                case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr=method)) if (
                    found == name and method in {"update", "setdefault"}
                ):
                    return True
        return False

    def _note_passing(self, call: ast.Call) -> None:
        if not call.keywords:
            return
        function = self._names.function_of(call)
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        given = [key for key in call.keywords if key.arg == "timeout" or key.arg is None]
        for keyword in given:
            name = keyword.value.id if isinstance(keyword.value, ast.Name) else ""
            rest = function.args.kwarg
            only = len(given) == 1
            passes_rest = keyword.arg is None and rest is not None and rest.arg == name
            if (passes_rest and only and not self._sets_timeout(function, name)) or (
                keyword.arg == "timeout" and _defaults_to_none(function, name)
            ):
                noted = _PassingOn(call, "timeout" if passes_rest else name)
                self.passing.setdefault(function, []).append(noted)

    def _sets_timeout(self, function: FunctionNode, name: str) -> bool:
        """Return whether the function itself changes its `**kwargs`, or passes them elsewhere."""
        uses = (one for one in ast.walk(function) if isinstance(one, ast.Name) and one.id == name)
        return len(list(uses)) > 1

    def _assigned_attributes(self) -> dict[ast.Call, set[str]]:
        found: dict[ast.Call, set[str]] = {}
        for node in self._names.parents:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                value = self._names.resolve(node.value, self._names.scope_of(node))
                if value is not None and value.origin is not None:
                    found.setdefault(value.origin, set()).add(node.attr)
        return found


def _defaults_to_none(function: FunctionNode, name: str) -> bool:
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = list(
        zip(reversed(listed), reversed(arguments.defaults), strict=False)
    )
    pairs += list(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    names = (one for one in ast.walk(function) if isinstance(one, ast.Name) and one.id == name)
    rebound = any(isinstance(one.ctx, ast.Store) for one in names)
    return not rebound and any(one.arg == name and is_none(default) for one, default in pairs)


def _last_names(call: ast.Call) -> set[str]:
    """Return the arguments of a call that are names, without their modules."""
    named = (one for one in call.args if isinstance(one, (ast.Attribute, ast.Name)))
    return {one.attr if isinstance(one, ast.Attribute) else one.id for one in named}


def _literal_keys(node: ast.expr) -> set[str] | None:
    """Return the keys of `{...}` or `dict(...)`, or None if it is neither or has unknown ones."""
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) for key in node.keys):
            return None
        return {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    plain = isinstance(node, ast.Call) and code_of(node.func) == "dict" and not node.args
    if not isinstance(node, ast.Call) or not plain or has_unpacking(node):
        return None
    return set(keywords_of(node))


# Waits inside a machine that need no timeout, since something else ends them


def _ends_by_itself(source: SourceFile, call: ast.Call, path: str) -> bool:
    """Return whether a wait for a thread, a lock or a child process needs no timeout."""
    if path.startswith("subprocess."):
        return _child_ends(source, call, path)
    return _is_worker_loop(source, call, path) or _is_ready(source, call)


def _is_ready(source: SourceFile, call: ast.Call) -> bool:
    """Return whether what is waited for is surely there: a new lock, or items in a queue."""
    return _is_fresh_lock(source, call) or _has_items(source, call)


def _is_fresh_lock(source: SourceFile, call: ast.Call) -> bool:
    """Return whether a lock is acquired that the same function has just made."""
    value = source.names.called(call)
    return (
        value is not None
        and value.path.endswith("Lock().acquire")
        and value.origin is not None
        and source.names.function_of(value.origin) is source.names.function_of(call) is not None
    )


def _has_items(source: SourceFile, call: ast.Call) -> bool:
    """Return whether `call` takes from a queue that has just been seen to have items."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "get":
        return False
    queue = code_of(call.func.value)
    signs = {f"not {queue}.empty()", f"{queue}.qsize()", f"{queue}.queue"}
    below: ast.AST = call
    for above in source.names.ancestors(call):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(above, ast.If) and below in above.body:
            seen = (code_of(one) for one in ast.walk(above.test) if isinstance(one, ast.expr))
            if not signs.isdisjoint(seen):
                return True
        below = above
    return False


def _is_worker_loop(source: SourceFile, call: ast.Call, path: str) -> bool:
    """Return whether a thread is there to wait: `while ...: items.get()`, or by its name."""
    if not path.endswith((".get", ".wait")):
        return False
    function = source.names.function_of(call)
    if _WATCHING.search(getattr(function, "name", "")):
        return True
    for above in source.names.ancestors(call):
        if above is function:
            return False
        if isinstance(above, (ast.While, ast.For)):
            return True
    return False


def _child_ends(source: SourceFile, call: ast.Call, path: str) -> bool:
    """Return whether a child process is watched, quick, ended by a timer, or has ended before."""
    value = source.names.called(call)
    made = call if value is None or value.origin is None else value.origin
    if _COMMANDS.search(source.path) or _is_quick(made) or _has_own_timeout(source, made):
        return True
    function = source.names.function_of(call)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    if _ENDED.search(words_in(function)):
        return True
    if value is None or not path.endswith(".wait"):
        return False
    return any(
        (other := source.names.called(one)) is not None
        and other.origin is value.origin
        and other.path.endswith(".communicate")
        for one in own_calls(function.body)
    )


def _is_quick(call: ast.Call) -> bool:
    """Return whether a child process ends at once: `["git", "--version"]` or `"git --version"`."""
    texts = texts_in(call)
    match call.args:
        case [ast.Constant(value=str(command)), *_] if len(command.split()) == 2:  # noqa: PLR2004 - program and question
            texts.add(command.split()[1])
    return bool(_QUICK & texts)


def _has_own_timeout(source: SourceFile, call: ast.Call) -> bool:
    """Return whether the command of a child process, as far as it is known, has a timeout."""
    scope = source.names.scope_of(call)
    parts = call.args[:1]
    for name in sorted({name for part in parts for name in names_in(part)}):
        values = (binding.value for binding in scope.lookup(name))
        parts += [value for value in values if isinstance(value, ast.expr)]
    return any(_OWN_TIMEOUT.search(text) for part in parts for text in texts_in(part))


# Waits in an event loop


def check_blocking(source: SourceFile) -> Iterator[Finding]:
    """Yield the calls that stop the event loop, made in `async def` or just below it."""
    names = source.names
    for call in names.calls:
        function = names.function_of(call)
        path = source.called(call)
        instead = source.libraries.blocking.get(path) if path else None
        if not instead or isinstance(names.parents.get(call), ast.Await):
            continue
        quick = _is_immediate(call) or _is_ready(source, call)
        if isinstance(function, ast.AsyncFunctionDef) and not quick:
            message = f"{path}(...) blocks the event loop in async def {function.name}"
            yield source.finding("SW401", call, message, instead)


def _is_immediate(call: ast.Call) -> bool:
    """Return whether the call is asked not to wait."""
    return any(
        keyword.arg == "mock_response"
        or (keyword.arg in {"block", "blocking"} and code_of(keyword.value) == "False")
        for keyword in call.keywords
    )
