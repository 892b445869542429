"""Helpers to execute a stored call: its guard without fallbacks, and its original context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from seawall._forks import survives_fork
from seawall.guard import Guard
from seawall.resources.executors.executors import IoPool
from seawall.runtime.plan import Plan

INSTEAD: Final = frozenset({"cache", "fallback"})
"""Policies that may answer instead of the call: the worker would take that for success."""


class WithoutFallbacks(Guard):
    """The same guard with the same state, but without policies that hide a failure."""

    def __init__(self, guard: Guard) -> None:
        """Share the state of `guard`."""
        vars(self).update(vars(guard))
        self.bounds = [b for b in guard.bounds if b.policy.kind not in INSTEAD]
        self._plan = Plan(self, self.bounds)
        survives_fork(self)


class Given:
    """A context manager that enters a scope if there is a value for it, and else does nothing."""

    def __init__(self, scope: Callable[[str], Any], value: str | None) -> None:
        """Enter `scope(value)`, unless the value is None."""
        self._scope = None if value is None else scope(value)

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(*exc)


async def called_in_thread(
    threads: IoPool, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Call a plain function in a thread; await its result if that is awaitable."""
    from inspect import isawaitable

    (said,) = await threads.arun(lambda: (function(*args, **kwargs),))
    # A plain function may return the awaitable of an async one: the call ends with that.
    if isawaitable(said):
        await said
