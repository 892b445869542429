"""Calls of user functions (health checks, warm-up steps) that never block the event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

from seawall._redaction import printable
from seawall.errors import BulkheadFull
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from seawall.resources.executors.executors import IoPool

MOST_TEXT: Final = 200
"""Maximum number of characters that are kept of the text of a check or an exception."""

LOOPS: Final = 8
"""Number of further event loops that may wait for the same thread concurrently."""


class RegisteredCall:
    """A function that is called in the loop if it is async, else in its own thread.

    A plain function may return an awaitable: that is awaited in the loop.
    """

    def __init__(self, name: str, function: Callable[[], Any], wanted: str) -> None:
        """Validate `function`; `wanted` says in an error message what to pass instead."""
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"{name}: {function!r} cannot be called: pass {wanted}")
        kind = kind_of(function)
        if kind not in {"sync", "async"}:
            raise TypeError(f"{name}: {function!r} is a generator: pass {wanted}")
        self.name = name
        self.function = function
        self.context = copy_context()
        """The context of registration: the deadline of a caller must not apply."""
        # One thread each, so that a hanging call affects no other; and no second one in parallel.
        self._pool: IoPool | None = None
        if kind == "sync":
            from seawall.resources.executors.executors import IoPool

            self._pool = IoPool(name, workers=1, max_queue=LOOPS)

    @property
    def hung(self) -> int:
        """Number of threads that still run although no caller waits for them: 0 or 1."""
        return 0 if self._pool is None else self._pool.pool.abandoned

    async def __call__(self) -> Any:
        """Call the function and return its result."""
        if self._pool is None:
            return await self.function()
        if self.hung:
            raise BulkheadFull(f"{self.name}: its last run still hangs in a thread")
        (result,) = await self._pool.arun(_boxed, self.function)
        return await result if hasattr(result, "__await__") else result


def _boxed(function: Callable[[], Any]) -> tuple[Any]:
    """Return the result inside a tuple: it may be an awaitable, for the loop to await."""
    return (function(),)


def legible(text: str) -> str:
    """Return `text` in printable characters, truncated."""
    return printable(text, MOST_TEXT)
