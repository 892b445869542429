"""A lease that is renewed in the background, for as long as its owner works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Event, Thread


@asynccontextmanager
async def akeeping(renew: Callable[[], Awaitable[bool]], every: float) -> AsyncIterator[None]:
    """Call `renew` each `every` seconds, until it says no or the block is left."""

    async def keep() -> None:
        good = True
        while good:
            await asyncio.sleep(every)  # noqa: TID251 - the loop's own time, virtual or not
            # A database that does not answer may do so next time: the lease is three times that.
            with suppress(Exception):
                good = await renew()

    task = asyncio.get_running_loop().create_task(keep())
    try:
        yield
    finally:
        task.cancel()
        # Waited for, so that no renewal is under way when the claim is completed.
        await asyncio.wait([task])


@contextmanager
def keeping(renew: Callable[[], bool], every: float) -> Iterator[None]:
    """Do the same in a thread."""
    over = Event()

    def keep() -> None:
        good = True
        while good and not over.wait(every):
            with suppress(Exception):
                good = renew()

    thread = Thread(target=keep, name="idempotency lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
