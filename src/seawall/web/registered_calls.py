"""Calling what a user registered (a check, a warm-up step) without ever blocking the event loop."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, Final

from seawall._redaction import printable
from seawall.errors import BulkheadFull
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from seawall.executors import IoPool

MOST_TEXT: Final = 200
"""So many characters of what a check, or an error, says are kept."""

LOOPS: Final = 8
"""So many event loops more may ask for the same at once: they wait for its thread."""


class Doing:
    """A function to be called in the loop if it is async, else in a thread of its own.

    A plain function may return an awaitable: that is awaited in the loop.
    """

    def __init__(self, name: str, function: Callable[[], Any], wanted: str) -> None:
        """Be called `name`; `wanted` tells what to pass instead of something else."""
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"{name}: {function!r} cannot be called: pass {wanted}")
        kind = kind_of(function)
        if kind not in {"sync", "async"}:
            raise TypeError(f"{name}: {function!r} is a generator: pass {wanted}")
        self.name = name
        self.function = function
        self._context = copy_context()
        # One thread each: what hangs, hangs alone; and a second is never started beside it.
        self._pool = _thread(name) if kind == "sync" else None

    @property
    def hung(self) -> int:
        """How many threads run on though nobody waits for them: 0 or 1."""
        return 0 if self._pool is None else self._pool.pool.abandoned

    def context(self) -> Context:
        """Return that of where it was registered: a deadline of whoever asks is not its own."""
        return self._context.copy()

    async def __call__(self) -> Any:
        """Call it and return its result."""
        if self._pool is None:
            return await self.function()
        if self.hung:
            raise BulkheadFull(f"{self.name}: its last run still hangs in a thread")
        (result,) = await self._pool.arun(_boxed, self.function)
        return await result if hasattr(result, "__await__") else result


def _thread(name: str) -> IoPool:
    from seawall.executors import IoPool

    return IoPool(name, workers=1, max_queue=LOOPS)


def _boxed(function: Callable[[], Any]) -> tuple[Any]:
    """Return the result inside of a tuple: it may be an awaitable, for the loop to await."""
    return (function(),)


def legible(text: str) -> str:
    """Return `text` in printable characters, and not too long."""
    return printable(text, MOST_TEXT)
