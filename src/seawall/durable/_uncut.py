"""What is written to the database is written to its end, and a lease is kept while work goes on."""

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
"""Seconds that a request which was cancelled waits for the database."""


async def uncut(work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` does, which is done to its end; a cancellation counts after that."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await _wind_up(task)
        raise
    return task.result()


async def _wind_up(task: asyncio.Future[Any]) -> None:
    """Wait for it, but not for ever, and not if told once more; what it raises is seen."""
    try:
        await asyncio.wait([task], timeout=PATIENCE)
    finally:
        if not task.done():
            task.cancel()
        elif not task.cancelled():
            task.exception()


class Renewal:
    """Renews a lease every third of it, from the first third on, until it is stopped or lost."""

    __slots__ = ("_asking", "_lease", "_loop", "_renew", "_stopped", "_task", "_timer")

    def __init__(self, lease: float, renew: Callable[[], Awaitable[bool]]) -> None:
        """Ask `renew()` in this loop; False says that the lease is somebody else's."""
        self._lease = lease
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._asking = self._stopped = False
        # Most handlers end before: they pay for a timer, and for no task.
        self._timer = self._loop.call_later(lease / 3, self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())

    async def _run(self) -> None:
        deadline_var.set(None)  # in this task alone: a stream that began in time goes on beyond it
        while not self._stopped:
            nap = self._lease / 3
            self._asking = True
            try:
                if not await self._renew():
                    return
            except Exception as error:  # noqa: BLE001 - of any driver's; told
                nap = self._lease / 12  # the database is away: it may be back in time
                log = logging.getLogger("seawall")
                log.error("a lease could not be renewed: %s", described(error))  # noqa: TRY400 - see there
            finally:
                self._asking = False
            if not self._stopped:
                await sleep_async(nap)

    def end(self) -> None:
        """Renew it no more, where nothing can be awaited: a coroutine that is closed.

        That may be in any thread, or after the loop, so the task is not cancelled: it sees this
        when it wakes up.
        """
        self._stopped = True
        self._timer.cancel()

    async def stop(self) -> None:
        """Renew it no more; what is being asked is asked to its end."""
        self.end()
        task = self._task
        if task is not None and not task.done():
            if not self._asking:
                task.cancel()
            await _wind_up(task)
