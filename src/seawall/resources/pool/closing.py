"""Closing of a resource: in the background, in its own loop, once, and within a bounded time."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from seawall._failures import described
from seawall.context import deadline_var
from seawall.models.contention import drop
from seawall.runtime.process import running_loop

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Task, TimerHandle

    from seawall.resources.pool.stock import Resource, Stock


class Closing:
    """A resource that is being closed, and the slot that it still takes.

    A plain `close` is called in place. An async one runs in a task of the resource's own loop. It
    is cancelled after `close_timeout` seconds; after the same time again, or if its loop does not
    run, it is no longer waited for.
    """

    def __init__(self, stock: Stock, resource: Resource, *, slot: bool, owned: bool) -> None:
        """Take over a slot, if there is one; with `owned`, keep it until its owner claims it."""
        self.resource = resource
        self.loop = resource.loop
        self.done = False
        self.begun = stock.now()
        self._wake: Callable[[], bool] | None = None
        self._stock = stock
        self.has_slot = slot
        self._owned = owned
        self._task: Task[None] | None = None
        self._timer: TimerHandle | None = None
        self._starts = iter((True,))  # one token: it starts only once
        self._over = False  # whether `finish` is due; it is called again if a signal interrupted it

    def begin(self) -> None:
        """Close in place, or schedule it in the loop that the resource belongs to."""
        if self.loop is None or self.loop is running_loop():
            self._start()
            return
        try:
            self.loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self.finish()  # that loop is closed, so nothing can run in it

    def look(self) -> None:
        """Resume after a signal's interruption; give up on a loop that is closed or not running."""
        if self._over:
            self.finish()
        elif self.loop is None:
            self._start()
        if self.loop is None or self.loop.is_running():
            return
        if self.loop.is_closed():
            self.finish()
        elif self._stock.now() - self.begun >= 2 * self._stock.close_timeout:
            self._failed(TimeoutError("its event loop does not run"))
            self.finish()

    def _start(self) -> None:
        mine = False
        try:
            for _ in self._starts:
                mine = True
                break
            if not mine:
                return
            # The borrower's deadline must not apply to the closing.
            context = copy_context()
            context.run(deadline_var.set, None)
            result = context.run(self._stock.close, self.resource)
            if hasattr(result, "__await__"):
                loop = running_loop()
                if loop is None:
                    drop(result)
                    raise TypeError("close is async: borrow with `async with` here")  # noqa: TRY301
                self.loop = loop
                self._task = task = loop.create_task(_wait_for(result), context=context)
                self._timer = loop.call_later(self._stock.close_timeout, self._expire, loop, task)
                task.add_done_callback(self._ended)
        except Exception as error:  # noqa: BLE001 - must not fail an unrelated borrower
            self._failed(error)
        finally:
            if mine and self._task is None:
                self._over = True
                self.finish()

    def _expire(self, loop: AbstractEventLoop, task: Task[None]) -> None:
        self._failed(TimeoutError(f"not closed within {self._stock.close_timeout:g} s"))
        task.cancel()
        self._timer = loop.call_later(self._stock.close_timeout, self.finish)

    def _ended(self, task: Task[None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
        self.finish()

    def _failed(self, error: BaseException) -> None:
        if self.done:
            return
        import logging

        self._stock.close_failed += 1
        message = "pool %r: closing a resource failed: %s"
        logging.getLogger("seawall").warning(message, self._stock.name, described(error))

    def finish(self) -> None:
        """Finish the closing; safe at any moment, and idempotent."""
        self._stock.mutex.do(self._finish)

    def _finish(self) -> None:
        if not self.done:
            if self._owned:
                self.done = True
                if self._wake is not None and not self._wake():
                    self._slot_back()
            elif self.has_slot:
                self._slot_back()
            self.done = True
        self._stock.closed(self)

    def _slot_back(self) -> None:
        slots, slot = self._stock.slots, _SLOT
        free = slots.free
        # These two lines make no call, so no signal handler can run between them.
        self._owned = self.has_slot = False
        free += slot
        if slots.attention:
            slots.attend()

    def adopt(self) -> None:
        """Take over a slot that its owner will claim. Call under the lock."""
        self.has_slot = self._owned = True

    def wakes(self, wake: Callable[[], bool]) -> bool:
        """Call `wake()` once at the end; return True if it is already over and will not call."""
        with self._stock.mutex:
            self._wake = wake
            return self.done

    def disown(self) -> None:
        """Give up the claim to the slot: it becomes free when the closing is over."""
        self._stock.mutex.do(self._disown)

    def _disown(self) -> None:
        self._wake = None
        if self._owned and self.done:
            self._slot_back()
        self._owned = False


_SLOT = (None,)


async def _wait_for(result: Any) -> None:
    await result
