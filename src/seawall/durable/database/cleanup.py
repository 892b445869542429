"""Removal of expired rows in batches, each a short transaction, within a time limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, Protocol

from seawall import _checks as check
from seawall._failures import described
from seawall.clock import current_clock
from seawall.context import deadline_var
from seawall.durable.database.connections import NamedQuery
from seawall.runtime.abandon import end
from seawall.runtime.driver import Steps, sleep_async

LARGEST: Final = 100_000
"""Maximum rows of a batch."""


def cleaning_steps(batch: int, within: float, *removals: NamedQuery) -> Steps[int]:
    """Run removals of up to `batch` rows each for about `within` seconds; return how many are gone.

    They run one after another: the next starts when one has found less than a batch.
    """
    check.count("batch", batch, maximum=LARGEST)
    clock = current_clock()
    until = clock.now() + check.seconds("within", within)
    left, total = list(removals), 0
    while True:
        rows = yield left[0].of_batch(batch).alone
        total += len(rows)
        if len(rows) < batch:
            del left[0]
        if not left or clock.now() >= until:
            return total


class SupportsCleanup(Protocol):
    """A store with expired rows: `Idempotency`, `Inbox`, `Outbox`..."""

    async def acleanup(self) -> int:
        """Remove expired rows."""
        ...


def cleaning(*stores: SupportsCleanup, every: float = 60.0) -> AbstractAsyncContextManager[None]:
    """Clean up `stores` every `every` seconds while the block runs.

    For the lifespan of an app, or around the main loop of a consumer. Several processes may do it
    for one database. A failure is logged, and retried the next time.
    """
    for store in stores:
        if not callable(getattr(store, "acleanup", None)):
            raise TypeError(f"{store!r}: pass what has `acleanup`: an Idempotency, an Inbox...")
    return _cleaning(stores, check.seconds("every", every))


@asynccontextmanager
async def _cleaning(stores: tuple[SupportsCleanup, ...], pause: float) -> AsyncIterator[None]:
    task = asyncio.get_running_loop().create_task(clean_forever(stores, pause))
    try:
        yield
    finally:
        await end([task])


async def clean_forever(stores: Sequence[SupportsCleanup], every: float) -> None:
    """Clean up `stores` every `every` seconds; for a task of its own."""
    deadline_var.set(None)  # affects this task alone
    while True:
        await sleep_async(every)
        for store in stores:
            try:
                await store.acleanup()
            except Exception as error:  # noqa: BLE001 - from any driver; logged and retried
                log = logging.getLogger("seawall")
                log.error("%r could not be cleaned up: %s", store, described(error))  # noqa: TRY400 - see there
