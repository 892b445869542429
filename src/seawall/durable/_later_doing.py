"""A stored call as it is done: by its guard without fallbacks, in the context it was stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from seawall.executors import IoPool
from seawall.guard import Guard
from seawall.runtime.mutex import survives_fork
from seawall.runtime.plan import Plan

INSTEAD: Final = frozenset({"cache", "fallback"})
"""Policies that may answer for the call: to the worker that would look as if it were done."""


class WithoutFallbacks(Guard):
    """The same guard with all its state, where a failure is a failure."""

    def __init__(self, guard: Guard) -> None:
        """Share the state of `guard`."""
        vars(self).update(vars(guard))
        self.bounds = [b for b in guard.bounds if b.policy.kind not in INSTEAD]
        self._plan = Plan(self, self.bounds)
        survives_fork(self)


class Given:
    """A scope with a value; none without."""

    def __init__(self, scope: Callable[[str], Any], value: str | None) -> None:
        """Have `scope(value)` inside, unless there is no value."""
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
    """Call a plain function in a thread, and await what it returns if that can be awaited."""
    from inspect import isawaitable

    (said,) = await threads.arun(lambda: (function(*args, **kwargs),))
    # A plain function may return what an async one gave it: it is not done before that.
    if isawaitable(said):
        await said
