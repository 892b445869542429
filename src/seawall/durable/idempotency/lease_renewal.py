"""Renewal of leases during work, and database writes that cancellation does not interrupt.

In an event loop each lease has a timer. Blocking callers share one thread, which exists while there
are leases to renew (and for a third of a lease after that): a call costs one entry in a dict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Condition, Thread
from typing import Any, Final, TypeVar

from seawall._failures import described
from seawall._forks import survives_fork
from seawall.clock import SYSTEM
from seawall.context import deadline_var
from seawall.models.idempotency import KeyClaim
from seawall.runtime.driver import sleep_async

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Seconds that a cancelled request waits for the database."""


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end and return its result; a cancellation takes effect after that."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _wind_up(task)
        raise
    return task.result()


async def _wind_up(task: asyncio.Future[Any]) -> None:
    """Wait for the task with a time limit, until cancelled again; retrieve its exception."""
    try:
        await asyncio.wait([task], timeout=PATIENCE)
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()


class LeaseRenewal:
    """Renews a lease every third of its duration, until it is stopped or lost."""

    __slots__ = ("_asking", "_lease", "_loop", "_renew", "_stopped", "_task", "_timer")

    def __init__(self, lease: float, renew: Callable[[], Awaitable[bool]]) -> None:
        """Call `renew()` in this loop; False means that the lease was lost."""
        self._lease = lease
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._asking = self._stopped = False
        # Most handlers end before that: they cost a timer, but no task.
        self._timer = self._loop.call_later(lease / 3, self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        # for this task alone: a stream that started in time may outlast its deadline
        deadline_var.set(None)
        while not self._stopped:
            nap = self._lease / 3
            self._asking = True
            try:
                if not await self._renew():
                    return
            except Exception as error:  # noqa: BLE001 - from any driver; logged
                nap = self._lease / 12  # the database is unreachable: it may be back in time
                log = logging.getLogger("seawall")
                log.error("a lease could not be renewed: %s", described(error))  # noqa: TRY400 - see there
            finally:
                self._asking = False
            if not self._stopped:
                await sleep_async(nap)

    def end(self) -> None:
        """Stop renewing, where nothing can be awaited: in a coroutine that is being closed.

        That may happen in any thread, or after the loop has ended, so the task is not cancelled: it
        notices when it wakes up.
        """
        self._stopped = True
        self._timer.cancel()

    async def stop(self) -> None:
        """Stop renewing; a renewal that is running is finished."""
        self.end()
        task = self._task
        if task is not None and not task.done():
            if not self._asking:
                task.cancel()
            await _wind_up(task)


@asynccontextmanager
async def akeeping(renew: Callable[[], Awaitable[bool]], lease: float) -> AsyncIterator[None]:
    """Call `renew` every third of a lease, until it returns False or the block ends."""
    renewal = LeaseRenewal(lease, renew)
    try:
        yield
    finally:
        # Wait for it, so that no renewal is running when the claim is completed.
        await renewal.stop()


class LeaseKeeper:
    """Renews the leases of blocking callers."""

    def __init__(
        self, lease: float, renew: Callable[[KeyClaim], bool], lost: Callable[[], None]
    ) -> None:
        """Call `renew(claim)` every third of a lease; if that returns False, call `lost()`."""
        self._every = lease / 3
        self._renew = renew
        self._lost = lost
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._changed = Condition()
        # All entries have the same interval, so the first entry is the next one due.
        self._kept: dict[object, tuple[float, KeyClaim]] = {}
        self._thread: Thread | None = None

    @contextmanager
    def keeping(self, claim: KeyClaim) -> Iterator[None]:
        """Renew the lease of `claim` while the block runs."""
        token = object()
        with self._changed:
            self._kept[token] = (SYSTEM.now() + self._every, claim)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="idempotency leases", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._kept.pop(token, None)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            token, claim = due
            good = True
            try:
                good = self._renew(claim)
            except Exception as error:  # noqa: BLE001 - from any driver; logged
                # The database may be back next time: a lease lasts three intervals.
                log = logging.getLogger("seawall")
                log.error("a lease could not be renewed: %s", described(error))  # noqa: TRY400 - see there
            with self._changed:
                # If its block has ended meanwhile, the claim was completed, and False means
                # nothing.
                if self._kept.pop(token, None) is None:
                    continue
                if good:
                    self._kept[token] = (SYSTEM.now() + self._every, claim)
            if not good:
                self._lost()

    def _next(self) -> tuple[object, KeyClaim] | None:
        """Wait until an entry is due; return None, which ends the thread, if there are none."""
        with self._changed:
            while self._kept:
                token, (at, claim) = next(iter(self._kept.items()))
                rest = at - SYSTEM.now()
                if rest <= 0:
                    return token, claim
                self._changed.wait(rest)
            self._thread = None
            return None
