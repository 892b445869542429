"""Retries that make an outage worse: SW201 to SW206.

A retry is a decorator or a block of a library (tenacity, backoff, stamina, retrying, retry,
urllib3, Celery, Seawall), or a loop that ends when a `try` succeeds and pauses when it fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from seawall.audit.findings import Finding
from seawall.audit.libraries import Sdk
from seawall.audit.names import FunctionNode, Scope
from seawall.audit.source import SourceFile
from seawall.audit.syntax import (
    Loop,
    code_of,
    has_unpacking,
    is_none,
    keywords_of,
    names_in,
    own,
    own_calls,
    texts_in,
    words_in,
)

_JITTERED: Final = re.compile(
    r"rand|jitter|uniform|gauss|expovariate|wait_combine|wait_chain", re.IGNORECASE
)
_SLEEPS: Final = frozenset(
    {"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep", "gevent.sleep", "eventlet.sleep"}
)
_SERVING: Final = re.compile(
    r"listen|consum|watch|serve|worker|run|loop|subscri|poll|monitor|main|__anext__|forever"
)
"""Names of functions whose purpose is to go on for ever."""
_LEAVING: Final = (ast.Raise, ast.Return, ast.Break)
_ARITHMETIC: Final = frozenset({"min", "max", "int", "float", "pow", "round"})
_EXITS: Final = re.compile(r"\b(exit|_exit|abort)\b")
_DECORATORS: Final = frozenset(
    {"tenacity.retry", "stamina.retry", "retrying.retry", "retry.retry", "retry.api.retry"}
    | {"backoff.on_exception", "backoff.on_predicate"}
)
_FILE_ERRORS: Final = frozenset({"PermissionError", "FileNotFoundError", "FileExistsError"})
_EVERYTHING: Final = frozenset({"Exception", "BaseException"})
_SENDING: Final = re.compile(
    r"(requests|httpx|httpx\.AsyncClient\(\)|httpx\.Client\(\)|requests\.Session\(\)"
    r"|aiohttp\.ClientSession\(\))\.(post|patch|request)"
)

SHORT_PAUSE: Final = 0.25  # seconds up to which a constant pause is that of a poll

WRITE_RETRY: Final = (
    "Retry(on=(ConnectionError, TimeoutError), attempts=3, backoff=0.1, budget=RetryBudget())"
    " of a Guard: full jitter, a stop and a budget"
)
WRITE_ONCE: Final = (
    "Guard(..., idempotent=False), which retries only with an idempotency key; or send the header"
    " Idempotency-Key, the same one in each attempt"
)


Danger: TypeAlias = tuple[str, str, str]
"""A rule, what is wrong, and what to write."""


class RetriedCode(NamedTuple):
    """A retry in the source, and the code that it repeats."""

    name: str  # the library, "seawall" for our own: those do not multiply with each other
    repeated: list[ast.stmt]


def check(source: SourceFile) -> Iterator[Finding]:
    """Yield what is dangerous about the retries of a file."""
    yield from _Retries(source).findings()


class _Retries:
    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._names = source.names
        self._retried: dict[FunctionNode, str] = {}

    def findings(self) -> Iterator[Finding]:
        retries = []
        for call in self._names.calls:
            yield from self._of_call(call)
        for function in self._names.functions:
            for decorator in function.decorator_list:
                name = self._library_retry(decorator)
                if name:
                    self._retried[function] = name
                    retries.append(RetriedCode(name, function.body))
                if isinstance(decorator, (ast.Name, ast.Attribute)):
                    yield from self._of_bare(decorator)
        for loop in self._names.loops:
            found = self._loop(loop)
            if found is not None:
                yield from self._of_loop(loop, found)
                retries.append(RetriedCode("this loop", found.body))
        for retry in retries:
            yield from self._of_repeated(retry)

    # Libraries

    def _library_retry(self, decorator: ast.expr) -> str:
        """Return the name of the library if `decorator` retries what it decorates."""
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        path = self._source.path_of(node)
        if path in _DECORATORS:
            return path
        return "seawall" if self._is_retrying_guard(decorator) else ""

    def _is_retrying_guard(self, decorator: ast.expr) -> bool:
        value = self._names.resolve(decorator, self._names.scope_of(decorator))
        if value is None or value.origin is None:
            return False
        if value.path in {"seawall.Retry()", "seawall.Guard.standard()"}:
            return True
        return value.path == "seawall.Guard()" and any(
            self._source.path_of(policy) == "seawall.Retry()" for policy in value.origin.args[1:]
        )

    def _of_bare(self, decorator: ast.expr) -> Iterator[Finding]:
        """`@retry` without arguments."""
        path = self._source.path_of(decorator)
        if path in {"tenacity.retry", "retrying.retry", "retry.retry"}:
            message = f"@{path} without arguments retries everything, at once, for ever"
            yield self._source.finding("SW201", decorator, message, WRITE_RETRY)

    def _of_call(self, call: ast.Call) -> Iterator[Finding]:
        path = self._source.called(call)
        given = keywords_of(call)
        if has_unpacking(call) or _is_single(given):
            return
        found: Iterator[Danger] = iter(())
        if path in {"tenacity.retry", "tenacity.Retrying"}:
            found = self._of_tenacity(call, given)
        elif path == "backoff.on_exception":
            found = self._of_backoff(call, given)
        elif path == "stamina.retry":
            found = self._of_stamina(given)
        elif path in {"retrying.retry", "retry.retry", "retry.api.retry"}:
            found = self._of_small_libraries(call, path, given)
        elif path == "urllib3.Retry":
            found = self._of_urllib3(given)
        elif path == "seawall.Retry":
            found = self._of_ours(given)
        elif "autoretry_for" in given:
            found = self._of_celery(given)
        for rule, message, write in found:
            yield self._source.finding(rule, call, message, write)

    def _of_tenacity(self, call: ast.Call, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if call.args and "stop" not in given:
            return  # arguments by position are another use: retry(function)
        stop, wait = given.get("stop"), given.get("wait")
        if stop is None or self._source.path_of(stop) == "tenacity.stop_never":
            write = "stop=stop_after_attempt(3) | stop_after_delay(10)"
            yield "SW201", "tenacity retries for ever: there is no stop=", write
        write = "wait=wait_random_exponential(multiplier=0.1, max=10)"
        if wait is None:
            yield "SW202", "tenacity retries at once: there is no wait=", write
        elif self._is_fixed(wait):
            yield "SW202", f"{code_of(wait)} has no jitter", write
        if "retry" not in given:
            write = "retry=retry_if_exception_type((ConnectionError, TimeoutError))"
            yield "SW204", "tenacity retries every Exception: there is no retry=", write
        elif stop is not None and wait is not None:
            yield _without_budget("tenacity")

    def _of_backoff(self, call: ast.Call, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if not {"max_tries", "max_time", "giveup"} & given.keys():
            message = "backoff retries for ever: there is neither max_tries= nor max_time="
            yield "SW201", message, "max_tries=3, max_time=10"
        else:
            yield _without_budget("backoff")
        if is_none(given.get("jitter")):
            yield "SW202", "backoff is set to have no jitter", "jitter=backoff.full_jitter"
        exceptions = call.args[1] if len(call.args) > 1 else given.get("exception")
        if exceptions is not None and names_in(exceptions) & _EVERYTHING and "giveup" not in given:
            write = "backoff.on_exception(backoff.expo, (ConnectionError, TimeoutError), ...)"
            yield "SW204", f"backoff retries {code_of(exceptions)}", write

    def _of_stamina(self, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if is_none(given.get("attempts")) and is_none(given.get("timeout")):
            message = "stamina retries for ever: attempts= and timeout= are None"
            yield "SW201", message, "attempts=3, timeout=10"
        else:
            yield _without_budget("stamina")
        jitter = given.get("wait_jitter")
        if isinstance(jitter, ast.Constant) and jitter.value == 0:
            yield "SW202", "stamina is set to have no jitter", "wait_jitter=1.0"
        if "on" in given and names_in(given["on"]) & _EVERYTHING:
            write = "on=(ConnectionError, TimeoutError)"
            yield "SW204", f"stamina retries {code_of(given['on'])}", write

    def _of_small_libraries(
        self, call: ast.Call, path: str, given: dict[str, ast.expr]
    ) -> Iterator[Danger]:
        stops = {"tries", "stop_max_attempt_number", "stop_max_delay", "stop_func", "stop"}
        if not stops & given.keys() and len(call.args) < 2:  # noqa: PLR2004 - retry(on, tries)
            yield "SW201", f"{path} retries for ever: there is no limit of attempts", WRITE_RETRY
        jitters = {"jitter", "wait_jitter_max", "wait_random_min", "wait_random_max", "wait_func"}
        if not jitters & given.keys():
            yield "SW202", f"{path} retries without jitter", WRITE_RETRY

    def _of_urllib3(self, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if not given or "backoff_jitter" in given:
            return
        if "backoff_factor" in given:
            yield "SW202", "urllib3's Retry has no jitter by default", "backoff_jitter=1.0"
        methods = given.get("allowed_methods", given.get("method_whitelist"))
        if methods is None:
            return
        off = isinstance(methods, ast.Constant) and methods.value in {None, False}
        if off or {"POST", "PATCH"} & texts_in(methods):
            message = "urllib3's Retry sends POST again, whatever became of the first one"
            write = 'allowed_methods={"GET", "HEAD", "PUT", "DELETE"}, or an Idempotency-Key'
            yield "SW205", message, write

    def _of_ours(self, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if "budget" not in given or is_none(given["budget"]):
            message = "Retry(...) has no budget: an outage multiplies the load by its attempts"
            yield "SW203", message, "budget=RetryBudget()"
        backoff = given.get("backoff")
        steady = {"seawall.backoff.constant", "seawall.backoff.linear"}
        if isinstance(backoff, ast.Call) and self._source.called(backoff) in steady:
            yield "SW202", f"{code_of(backoff)} has no jitter", "backoff=0.1, which is full jitter"
        if "on" in given and names_in(given["on"]) & _EVERYTHING:
            message = f"Retry(on={code_of(given['on'])}) retries mistakes in the code too"
            yield "SW204", message, "on=(ConnectionError, TimeoutError)"

    def _of_celery(self, given: dict[str, ast.expr]) -> Iterator[Danger]:
        if is_none(given.get("max_retries")):
            yield "SW201", "the task is retried for ever: max_retries=None", "max_retries=3"
        jitter = given.get("retry_jitter")
        steady = isinstance(jitter, ast.Constant) and jitter.value is False
        if "retry_backoff" not in given or steady:
            message = "the task is retried after a fixed delay, without jitter"
            yield "SW202", message, "retry_backoff=True, retry_backoff_max=600"

    def _is_fixed(self, wait: ast.expr) -> bool:
        """Return whether a wait of tenacity is surely without chance."""
        if not isinstance(wait, (ast.Call, ast.BinOp)) or _JITTERED.search(words_in(wait)):
            return False
        calls = (one for one in ast.walk(wait) if isinstance(one, ast.Call))
        return all(self._source.called(one).startswith("tenacity.wait_") for one in calls)

    # Loops

    def _loop(self, loop: Loop) -> _Loop | None:
        """Return what `loop` is if it repeats a `try` until it succeeds, with pauses."""
        if isinstance(loop, (ast.For, ast.AsyncFor)) and not self._counts(loop.iter):
            return None
        for attempt in own(loop.body, ast.Try):
            assert isinstance(attempt, ast.Try)  # noqa: S101 - by the line before
            succeeds = any(own([*attempt.body, *attempt.orelse], (ast.Return, ast.Break)))
            if not succeeds and not self._follows_and_leaves(loop, attempt):
                continue
            met = (one for one in attempt.handlers if not _is_local(one))
            handlers = [one for one in met if not isinstance(one.body[-1], _LEAVING)]
            sleeps = (one for one in own_calls(loop.body) if self._source.called(one) in _SLEEPS)
            pauses = [one for one in sleeps if not _within(one, attempt.body)]
            calls = any(own(attempt.body, ast.Call))
            if handlers and pauses and calls:
                return _Loop(attempt.body, handlers, pauses)
        return None

    def _counts(self, node: ast.expr) -> bool:
        """Return whether a `for` runs over numbers of attempts and not over items."""
        return isinstance(node, ast.Call) and (
            (isinstance(node.func, ast.Name) and node.func.id == "range")
            or self._source.called(node) in {"itertools.count", "itertools.repeat"}
        )

    def _follows_and_leaves(self, loop: Loop, node: ast.Try) -> bool:
        """Return whether the statement after `node` ends the loop."""
        if node not in loop.body:
            return False
        rest = loop.body[loop.body.index(node) + 1 :]
        leaves = all(
            isinstance(handler.body[-1], (*_LEAVING, ast.Continue)) for handler in node.handlers
        )
        return bool(rest) and leaves and isinstance(rest[-1], (ast.Return, ast.Break))

    def _of_loop(self, loop: Loop, found: _Loop) -> Iterator[Finding]:
        function = self._source.function_of(loop)
        serves = function is not None and _SERVING.search(function.name)
        if _is_endless(loop) and not serves and not self._may_stop(loop, found):
            message = "this loop retries for ever: no handler raises, and nothing counts attempts"
            yield self._source.finding("SW201", loop, message, WRITE_RETRY)
        pause = found.pauses[0]
        scope = self._names.scope_of(pause)
        if pause.args and not _is_poll(pause.args[0]) and self._has_no_chance(pause.args[0], scope):
            message = f"the pause between attempts, {code_of(pause)}, has no jitter"
            write = f"{code_of(pause.func)}(random.uniform(0, {code_of(pause.args[0])}))"
            yield self._source.finding("SW202", pause, message, write)
        for handler in found.handlers:
            everything = handler.type is None or bool(names_in(handler.type) & _EVERYTHING)
            if everything and not any(own(handler.body, _LEAVING)):
                caught = "except:" if handler.type is None else f"except {code_of(handler.type)}:"
                message = f"{caught} in a retry loop retries mistakes in the code too"
                write = "except (ConnectionError, TimeoutError):"
                yield self._source.finding("SW204", handler, message, write)

    def _may_stop(self, loop: Loop, found: _Loop) -> bool:
        body = [one for one in loop.body if not isinstance(one, ast.Try)]
        handled = [statement for handler in found.handlers for statement in handler.body]
        if any(_EXITS.search(words_in(statement)) for statement in handled):
            return True
        return any(own([*body, *handled], _LEAVING))

    def _has_no_chance(self, node: ast.expr, scope: Scope, depth: int = 0) -> bool:
        """Return whether a pause is surely the same for all callers."""
        if _JITTERED.search(words_in(node)):
            return False
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and code_of(part.func) not in _ARITHMETIC:
                return False
            if isinstance(part, ast.Name) and depth < 5:  # noqa: PLR2004 - deep enough
                for binding in scope.lookup(part.id):
                    if isinstance(binding.value, ast.expr) and not binding.is_type:
                        if binding.value is not node and not self._has_no_chance(
                            binding.value, binding.scope, depth + 1
                        ):
                            return False
                    elif binding.value is None and not self._is_plain_name(part.id, scope):
                        return False
        return True

    def _is_plain_name(self, name: str, scope: Scope) -> bool:
        """Return whether `name` is a number that was counted or passed in."""
        for loop in self._names.loops:
            if isinstance(loop, ast.For) and getattr(loop.target, "id", None) == name:
                return self._counts(loop.iter)
        function = scope.node
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            listed = [*function.args.args, *function.args.kwonlyargs]
            if name in {argument.arg for argument in listed}:
                return True
        # Changed in place: delay *= 2
        changes = (one for one in ast.walk(scope.node) if isinstance(one, ast.AugAssign))
        simple = (one for one in changes if isinstance(one.value, (ast.Constant, ast.Name)))
        return any(isinstance(one.target, ast.Name) and one.target.id == name for one in simple)

    # What is repeated

    def _of_repeated(self, retry: RetriedCode) -> Iterator[Finding]:
        keyed = any("idempoten" in words_in(statement) for statement in retry.repeated)
        for node in own_calls(retry.repeated):
            path = self._source.called(node)
            if not keyed and retry.name != "seawall" and self._has_effect(node, path):
                message = f"{path}(...) is sent again by {retry.name}, without an idempotency key"
                yield self._source.finding("SW205", node, message, WRITE_ONCE)
            value = self._names.called(node)
            if value is None:
                continue
            function = value.function
            inner = "" if function is None else self._retried.get(function, "")
            if function is not None and inner and (inner != "seawall" or retry.name != "seawall"):
                message = f"{function.name} retries by {inner}, and is retried by {retry.name}"
                write = "one retry, directly around what fails"
                yield self._source.finding("SW206", node, message, write)
            sdk = self._sdk(path)
            if sdk is not None and not self._is_off(sdk, node, value.origin):
                times = f" up to {sdk.attempts} times" if sdk.attempts else ""
                message = f"{sdk.library} tries{times} by itself, and {retry.name} repeats that"
                yield self._source.finding("SW206", node, message, sdk.off)

    def _has_effect(self, call: ast.Call, path: str) -> bool:
        if path in self._source.libraries.effects:
            return True
        sent = _SENDING.fullmatch(path)
        if sent is None or sent[2] != "request":
            return sent is not None
        return bool(call.args and {"POST", "PATCH"} & texts_in(call.args[0]))

    def _sdk(self, path: str) -> Sdk | None:
        for sdk in self._source.libraries.sdks:
            if path.startswith(tuple(f"{client}." for client in sdk.clients)):
                return sdk
        return None

    def _is_off(self, sdk: Sdk, call: ast.Call, origin: ast.Call | None) -> bool:
        """Return whether the SDK's own retries are set: in its client, or in the call."""
        if origin is None:
            return True  # the client was made elsewhere
        calls = [origin, *(node for node in ast.walk(call) if isinstance(node, ast.Call))]
        return any(keyword.arg in {sdk.keyword, None} for one in calls for keyword in one.keywords)


class _Loop(NamedTuple):
    """A loop that retries."""

    body: list[ast.stmt]
    handlers: list[ast.ExceptHandler]
    pauses: list[ast.Call]


def _without_budget(library: str) -> Danger:
    return "SW203", f"{library} has no budget for the retries of all calls together", WRITE_RETRY


def _is_single(given: dict[str, ast.expr]) -> bool:
    """Return whether there is only one attempt, and so no retry."""
    for name in ("max_tries", "tries", "attempts", "stop_max_attempt_number", "stop"):
        value = given.get(name)
        if isinstance(value, ast.Call) and len(value.args) == 1:
            value = value.args[0]  # stop_after_attempt(1)
        if isinstance(value, ast.Constant) and value.value == 1:
            return True
    return False


def _is_poll(pause: ast.expr) -> bool:
    """Return whether a pause is that of a poll: something is awaited, and nothing has failed."""
    if isinstance(pause, ast.Constant) and isinstance(pause.value, (int, float)):
        return pause.value <= SHORT_PAUSE
    return "poll" in words_in(pause)


def _is_local(handler: ast.ExceptHandler) -> bool:
    """Return whether an empty queue or a file is met, and no dependency that others retry too."""
    if handler.type is None:
        return False
    names = names_in(handler.type)
    return "empty" in words_in(handler.type) or (bool(names) and names <= _FILE_ERRORS)


def _within(node: ast.AST, statements: list[ast.stmt]) -> bool:
    return any(node is one for statement in statements for one in ast.walk(statement))


def _is_endless(loop: Loop) -> bool:
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Constant) and bool(loop.test.value)
    call = loop.iter
    return isinstance(call, ast.Call) and not call.args and code_of(call.func).endswith("count")
