"""Queues, fan-outs, tasks and threads without a bound: SW301 to SW304."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from seawall.audit.findings import Finding
from seawall.audit.names import FunctionNode
from seawall.audit.source import SourceFile
from seawall.audit.syntax import (
    code_of,
    has_unpacking,
    is_none,
    keywords_of,
    names_in,
    own,
    own_calls,
    words_in,
)

_FAN_OUTS: Final = frozenset({"asyncio.gather", "asyncio.wait", "asyncio.as_completed"})
_TASKS: Final = frozenset({"asyncio.create_task", "asyncio.ensure_future"})
_BOUNDS: Final = re.compile(
    r"semaphore|limiter|\bsem\b|_sem\b|sem_|bulkhead|chunk|batch|islice|max_concurren|acquire"
    r"|throttle|max_workers|\bpool\b"
)
_KEPT_SMALL: Final = re.compile(
    r"qsize|budget|semaphore|\bfull\b|max_?(size|len|items|pending|queue|buffer|depth)"
)
_REGISTERED: Final = re.compile(
    r"listener|handler|callback|hook|subscri(ber|ption)|plugin|middleware|worker|nann(y|ies)|node|peer"
    r"|replica|shard|\bpods\b"
)
"""Names of what is registered, or a member of the cluster: there are not many of them."""
_ENDING: Final = re.compile(
    r"close|stop|shutdown|cancel|kill|terminat|clean|drain|exit|disconnect|teardown|wrap_future|cache"
)
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.GeneratorExp)


def check(source: SourceFile) -> Iterator[Finding]:
    """Yield what can grow without a bound."""
    checks = _Bounds(source)
    for call in source.names.calls:
        path = source.called(call)
        if path in source.libraries.queues:
            yield from checks.queue(call, path)
        elif path in _FAN_OUTS:
            yield from checks.fan_out(call, path)
        elif path in _TASKS or path.endswith("asyncio.TaskGroup().create_task"):
            yield from checks.task(call)
        elif path == "asyncio.to_thread" or path.endswith(".run_in_executor"):
            yield from checks.thread(call, path)
        elif path == "threading.Thread":
            yield from checks.new_thread(call)


class _Bounds:
    def __init__(self, source: SourceFile) -> None:
        self._source = source
        self._names = source.names

    def queue(self, call: ast.Call, path: str) -> Iterator[Finding]:
        if has_unpacking(call):
            return
        name = self._source.libraries.queues[path]
        given = keywords_of(call).get(name, call.args[0] if call.args else None)
        unbounded = isinstance(given, ast.Constant) and given.value in {0, -1, None}
        if given is not None and name and not unbounded:
            return
        if self._holds_few(call) or self._is_kept_small(call):
            return
        usual = path if name else f"{path.partition('.')[0]}.Queue"
        message = f"{path}() grows without a bound"
        write = f"{usual}(maxsize=1000), or a seawall.resources.Channel, which says what overflows"
        yield self._source.finding("SW301", call, message, write)

    def _holds_few(self, call: ast.Call) -> bool:
        """Return whether the queue holds what its own function puts there, or one answer to it."""
        function = self._source.function_of(call)
        parent = self._names.parents.get(call)
        if function is None or not isinstance(parent, (ast.Assign, ast.AnnAssign)):
            return False
        target = parent.targets[0] if isinstance(parent, ast.Assign) else parent.target
        queue = code_of(target)
        for one in own_calls(function.body):
            if not isinstance(one.func, ast.Attribute) or code_of(one.func.value) != queue:
                continue
            if one.func.attr in {"put", "put_nowait"}:
                return True
            if one.func.attr == "get" and self._loop_of(one) is None:
                return isinstance(target, ast.Name)
        return self._has_one_from_each_thread(queue, function)

    def _has_one_from_each_thread(self, queue: str, function: FunctionNode) -> bool:
        """Return whether threads that `function` starts put one answer each into its queue."""
        calls = [one for one in ast.walk(function) if isinstance(one, ast.Call)]
        threads = [one for one in calls if self._source.called(one) == "threading.Thread"]
        targets = {
            code_of(given["target"]) for one in threads if "target" in (given := keywords_of(one))
        }
        puts = [
            one for one in calls if code_of(one.func) in {f"{queue}.put", f"{queue}.put_nowait"}
        ]
        return bool(puts) and all(
            getattr(self._names.function_of(one), "name", "") in targets
            and self._loop_of(one) is None
            for one in puts
        )

    def _is_kept_small(self, call: ast.Call) -> bool:
        """Return whether the class or function around a queue has a bound of its own for it."""
        definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        around = [one for one in self._names.ancestors(call) if isinstance(one, definitions)]
        return bool(around) and bool(_KEPT_SMALL.search(words_in(around[-1])))

    def fan_out(self, call: ast.Call, path: str) -> Iterator[Finding]:
        for argument in call.args:
            items = argument.value if isinstance(argument, ast.Starred) else argument
            if not isinstance(argument, ast.Starred) and path == "asyncio.gather":
                continue
            made = self._comprehension(items, call)
            if made is None or self._is_no_surge(made) or self._is_bounded(made, call):
                continue
            message = f"{path} starts one task for each item, however many there are"
            write = (
                "async with asyncio.Semaphore(20) in each of them, one Bulkhead(20) in their guard,"
                " or a pipeline stage with workers=20"
            )
            yield self._source.finding("SW302", call, message, write)
            return

    def _comprehension(self, node: ast.expr, call: ast.Call) -> ast.expr | None:
        """Return the comprehension that makes the coroutines, if it runs over unknown items."""
        if isinstance(node, ast.Name):
            bindings = self._names.scope_of(call).lookup(node.id)
            values = [one.value for one in bindings if isinstance(one.value, _COMPREHENSIONS)]
            if len(values) != len(bindings) or not values:
                return None
            node = values[0]
        if not isinstance(node, _COMPREHENSIONS):
            return None
        if not any(isinstance(part, ast.Call) for part in ast.walk(node.elt)):
            return None  # the tasks are there already
        targets = {name for one in node.generators for name in names_in(one.target)}
        if _REGISTERED.search(words_in(node.generators[0].iter)):
            return None
        if _ENDING.search(words_in(node.elt)) or self._is_own_work(node.elt, targets, call):
            return None
        return None if _is_small(node.generators[0].iter) else node

    def _is_own_work(self, made: ast.expr, targets: set[str], call: ast.Call) -> bool:
        """Return whether each item does something itself: there are as many as are registered."""
        root: ast.expr = made
        if isinstance(made, ast.Call) and made.args and self._source.called(made) in _TASKS:
            root = made.args[0]
        elif isinstance(made, ast.Call) and code_of(made.func).rpartition(".")[2][:1].isupper():
            return True  # objects, which were made before they are awaited
        while isinstance(root, (ast.Call, ast.Attribute, ast.Await)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if not isinstance(root, ast.Name):
            return False
        if root.id in targets:
            return True
        return any(
            isinstance(binding.value, ast.Call) and names_in(binding.value.func) & targets
            for binding in self._names.scope_of(call).lookup(root.id)
        )

    def _is_no_surge(self, made: ast.expr) -> bool:
        """Return whether what is called never ends, or only joins a batch."""
        return any(_is_endless(one) or _makes_future(one) for one in self._functions_in(made))

    def _functions_in(self, node: ast.expr) -> list[FunctionNode]:
        """Return the functions of this file that `node` calls."""
        called = [self._names.called(one) for one in ast.walk(node) if isinstance(one, ast.Call)]
        return [value.function for value in called if value is not None and value.function]

    def _is_bounded(self, made: ast.expr, call: ast.Call) -> bool:
        """Return whether something limits how many of them run: here, or in what is called."""
        around = [made, self._source.function_of(call) or call, *self._functions_in(made)]
        return any(_BOUNDS.search(words_in(one)) for one in around)

    def task(self, call: ast.Call) -> Iterator[Finding]:
        loop = self._repeating_loop(call)
        if loop is None or not call.args or self._waits_in(call, loop):
            return
        function, work = self._source.function_of(call), call.args[0]
        ending = _ENDING.search(f"{function.name if function else ''} {words_in(work)}")
        if ending or self._is_bounded(call, call):
            return
        if isinstance(work, ast.Call) and self._source.called(work) == "asyncio.sleep":
            return
        if isinstance(loop, ast.For) and self._is_no_surge(work):
            return
        message = "a task is started in each turn of the loop, whether or not others have ended"
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            few = _REGISTERED.search(words_in(loop.iter))
            small = isinstance(loop, ast.For) and (few or _is_small(loop.iter))
            targets = names_in(loop.target)
            if small or self._is_own_work(work, targets, call):
                return
            if isinstance(loop, ast.For) and self._is_for_one(call, targets):
                return
            message = "one task is started for each item, however many there are"
        write = "await semaphore.acquire() before it and release() in the task; or a pipeline stage"
        yield self._source.finding("SW303", call, message, write)

    def _loop_of(self, call: ast.Call) -> ast.For | ast.AsyncFor | ast.While | None:
        for above in self._names.ancestors(call):
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return None
            if isinstance(above, (ast.For, ast.AsyncFor, ast.While)):
                return above
        return None

    def _repeating_loop(self, call: ast.Call) -> ast.For | ast.AsyncFor | ast.While | None:
        """Return the innermost loop around `call` that goes on after it."""
        ended = False
        below: ast.AST = call
        for above in self._names.ancestors(call):
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return None
            following = _from_here_on(below, above)
            if any(isinstance(one, ast.Return) for one in following):
                return None
            ended = ended or any(isinstance(one, ast.Break) for one in following)
            if isinstance(above, (ast.For, ast.AsyncFor, ast.While)):
                if not ended:
                    return above
                ended = False
            below = above
        return None

    def _is_for_one(self, call: ast.Call, targets: set[str]) -> bool:
        """Return whether `call` is made for one of the items only: `if item == "this": ...`."""
        below: ast.AST = call
        for above in self._names.ancestors(call):
            if isinstance(above, ast.For):
                return False
            if isinstance(above, ast.If) and below in above.body and _is_equal(above.test, targets):
                return True
            below = above
        return False

    def _waits_in(self, call: ast.Call, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
        """Return whether each turn waits for tasks, so that they cannot pile up."""
        group = self._names.called(call)
        made = None if group is None else group.origin
        if made is not None and loop in self._names.ancestors(made):
            return True  # a task group of this turn
        parent = self._names.parents.get(call)
        kept = code_of(parent.targets[0]) if isinstance(parent, ast.Assign) else None
        awaited = (one for one in own(loop.body, ast.Await) if isinstance(one, ast.Await))
        if any(code_of(one.value) == kept for one in awaited):
            return True
        waits = {"asyncio.wait", "asyncio.gather", "asyncio.wait_for"}
        return any(self._source.called(one) in waits for one in own_calls(loop.body))

    def thread(self, call: ast.Call, path: str) -> Iterator[Finding]:
        work = call.args
        if path.endswith(".run_in_executor"):
            work = call.args[1:] if call.args and is_none(call.args[0]) else []
        if not work:
            return
        target = self._source.path_of(work[0], self._names.scope_of(call))
        if not self._source.libraries.blocking.get(target) or self._is_bounded(call, call):
            return
        message = f"{target} runs in the default executor, which everything shares"
        write = "seawall.resources.IoPool(10), or ThreadBulkhead(10) in its guard, for this alone"
        yield self._source.finding("SW304", call, message, write)

    def new_thread(self, call: ast.Call) -> Iterator[Finding]:
        loop = self._loop_of(call)
        if not isinstance(loop, ast.While) or self._is_bounded(call, call):
            return
        if not any(getattr(one.func, "attr", "") == "accept" for one in own_calls(loop.body)):
            return
        message = "a thread is started for each connection, without a limit"
        write = "ThreadPoolExecutor(max_workers=50), or an IoPool(50) of seawall.resources"
        yield self._source.finding("SW304", call, message, write)


def _is_endless(function: FunctionNode) -> bool:
    """Return whether a function is a worker: `while True` that nothing leaves."""
    return any(
        isinstance(loop, ast.While)
        and isinstance(loop.test, ast.Constant)
        and bool(loop.test.value)
        and not any(own(loop.body, (ast.Break, ast.Return)))
        for loop in own(function.body, ast.While)
    )


def _makes_future(function: FunctionNode) -> bool:
    """Return whether a function starts nothing itself: it returns a future that others set."""
    return isinstance(function, ast.FunctionDef) and any(
        isinstance(one.func, ast.Attribute) and one.func.attr == "create_future"
        for one in own_calls(function.body)
    )


def _from_here_on(node: ast.AST, parent: ast.AST) -> list[ast.stmt]:
    """Return a statement and those after it in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and node in block:
            return block[block.index(node) :]
    return []


def _is_equal(test: ast.expr, names: set[str]) -> bool:
    """Return whether a test compares one of the names with one value."""
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.Eq):
        return False
    return any(getattr(one, "id", None) in names for one in (test.left, *test.comparators))


def _is_small(node: ast.expr) -> bool:
    """Return whether an iterable is written out here, or has a fixed number of items."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
        return not any(isinstance(child, ast.Starred) for child in ast.iter_child_nodes(node))
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        return node.slice.upper is not None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id == "range":
            return all(isinstance(one, (ast.Constant, ast.Name)) for one in node.args)
        if node.func.id in {"zip", "enumerate"}:
            return any(_is_small(one) for one in node.args)
    # A constant of the module is as long as somebody wrote it.
    return isinstance(node, ast.Name) and node.id.isupper()
