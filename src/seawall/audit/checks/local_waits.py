"""Waits inside a machine that need no timeout, since something else ends them."""

from __future__ import annotations

import ast
import re
from typing import Final

from seawall.audit.source import SourceFile
from seawall.audit.syntax import own_calls, texts_in, words_in

_COMMANDS: Final = re.compile(
    r"(^|/)(cli|commands?|scripts?(-[^/]*)?|tools|bin|dev|ci)/|(^|/)(cli|__main__|manage)\.py$"
)
"""Files of commands that somebody runs and watches: a child process may take its time there."""

_QUICK: Final = frozenset(
    {"chmod", "chown", "hostname", "id", "ln", "mkdir", "uname", "which", "whoami"}
    | {"--version", "version", "-V"}
)
"""Programs, and what is asked of them, that end at once."""

_WATCHING: Final = re.compile(r"watch|worker|listen|consum|monitor|_loop|thread")
_ENDED: Final = re.compile(r"\b(kill|terminate|timer|alarm)\b")


def ends_by_itself(source: SourceFile, call: ast.Call, path: str) -> bool:
    """Return whether a wait for a thread, a lock or a child process needs no timeout."""
    if path.startswith("subprocess."):
        return _child_ends(source, call, path)
    return _is_worker_loop(source, call, path) or is_fresh_lock(source, call)


def is_fresh_lock(source: SourceFile, call: ast.Call) -> bool:
    """Return whether a lock is acquired that the same function has just made."""
    value = source.names.called(call)
    return (
        value is not None
        and value.path.endswith("Lock().acquire")
        and value.origin is not None
        and source.names.function_of(value.origin) is source.names.function_of(call) is not None
    )


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
    if _COMMANDS.search(source.path) or _QUICK & texts_in(call):
        return True
    function = source.names.function_of(call)
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    if _ENDED.search(words_in(function)):
        return True
    value = source.names.called(call)
    if value is None or not path.endswith(".wait"):
        return False
    return any(
        (other := source.names.called(one)) is not None
        and other.origin is value.origin
        and other.path.endswith(".communicate")
        for one in own_calls(function.body)
    )
