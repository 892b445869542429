"""Periodic queries of stores and databases, so that reading a snapshot never waits for them.

Promises:
- Each query has a timeout, and few run concurrently.
- A failing query hides no other, and the last known answer is kept, with its age.
- A cancelled refresh ends immediately and leaves nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall._failures import described

if TYPE_CHECKING:
    import asyncio

AT_ONCE: Final = 8
"""Maximum number of concurrent queries."""


async def arefresh(*things: Any, timeout: float = 5.0) -> int:  # noqa: ASYNC109 - the timeout of each query
    """Query the state of `things`, by default everything that can be queried.

    That is queues in a store, outboxes, jobs and deferred calls; unless named, not those of a
    closed `Database`. Each query has `timeout` seconds. Returns the number of answers; failures are
    reported by `snapshot()`.
    """
    import asyncio

    seconds = check.seconds("timeout", timeout)
    known = [(thing, entry) for thing, entry in registry.entered() if entry.ask is not None]
    for thing in things:
        if not any(thing is one for one, _ in known):
            raise TypeError(
                f"arefresh({thing!r}): pass an Outbox, Jobs, DeferredCalls or PriorityQueue"
            )
    few = asyncio.Semaphore(AT_ONCE)

    async def ask(thing: Any, entry: registry.RegistryEntry) -> bool:
        try:
            async with few, asyncio.timeout(seconds):
                await getattr(thing, str(entry.ask))()
        except TimeoutError:
            entry.error = f"no answer within {seconds:g} s"
        except Exception as error:  # noqa: BLE001 - the others must be queried all the same
            entry.error = described(error)
        return entry.error is None

    async with asyncio.TaskGroup() as group:
        asked = [
            group.create_task(ask(thing, entry))
            for thing, entry in known
            if (any(thing is one for one in things) if things else not _is_over(thing))
        ]
    return sum(task.result() for task in asked)


def _is_over(thing: Any) -> bool:
    """Return whether its database was closed: a query would connect to it anew."""
    database = getattr(thing, "database", None)
    return database is not None and bool(database.closed)


class Refresher:
    """Queries periodically, in the running event loop: `async with Refresher(every=15.0):`.

    The outbox of a running `Dispatcher` is known without it.
    """

    def __init__(self, every: float = 15.0, *, timeout: float = 5.0) -> None:
        """Query immediately, then each time `every` seconds after the last answers."""
        self.every = check.seconds("every", every)
        self.timeout = check.seconds("timeout", timeout)
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Refresher every {self.every:g} s: {'off' if self._task is None else 'on'}>"

    async def __aenter__(self) -> Self:
        import asyncio

        if self._task is not None:
            raise RuntimeError(f"{self!r} is on already: make another Refresher")
        self._task = asyncio.create_task(self._forever())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop querying. Idempotent."""
        from seawall.runtime.abandon import end

        task, self._task = self._task, None
        if task is not None:
            await end([task])

    async def _forever(self) -> None:
        import asyncio

        while True:
            await arefresh(timeout=self.timeout)
            await asyncio.sleep(self.every)  # noqa: TID251 - uses the loop's own time, virtual or not
