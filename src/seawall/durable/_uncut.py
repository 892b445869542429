"""Database writes that cancellation does not interrupt, and leases renewed during work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from seawall._failures import described
from seawall.context import deadline_var
from seawall.runtime.runners import sleep_async

T = TypeVar("T")

PATIENCE: Final = 5.0
"""Seconds that a cancelled request waits for the database."""


async def uncut(work: Coroutine[Any, Any, T]) -> T:
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


class Renewal:
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
