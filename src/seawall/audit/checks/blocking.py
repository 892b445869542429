"""Blocking calls inside `async def`: SW401."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from seawall.audit.checks.local_waits import is_fresh_lock
from seawall.audit.findings import Finding
from seawall.audit.source import SourceFile


def check(source: SourceFile) -> Iterator[Finding]:
    """Yield the calls that stop the event loop, made in `async def` or just below it."""
    names = source.names
    for call in names.calls:
        function = names.function_of(call)
        path = source.called(call)
        instead = source.libraries.blocking.get(path) if path else None
        if instead is None or isinstance(names.parents.get(call), ast.Await):
            continue
        if isinstance(function, ast.AsyncFunctionDef) and not (
            _is_immediate(call) or is_fresh_lock(source, call)
        ):
            message = f"{path}(...) blocks the event loop in async def {function.name}"
            yield source.finding("SW401", call, message, instead)


def _is_immediate(call: ast.Call) -> bool:
    """Return whether the call is asked not to wait."""
    return any(
        keyword.arg == "mock_response"
        or (
            keyword.arg in {"block", "blocking"}
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value is False
        )
        for keyword in call.keywords
    )
