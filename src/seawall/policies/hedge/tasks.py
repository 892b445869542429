"""Hedge of async calls: the first copy in the caller's own task, the others in separate tasks.

A call that is answered before its delay costs a place in a queue, but neither a task nor a timer.
When another copy wins, the first is cancelled as a timeout would cancel it: with `task.cancel()`
and, so that no other cancellation is swallowed, the count of `task.cancelling()` noted before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import running_task
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.context import deadline_var, live_scope
from seawall.policies.hedge.policy import HedgeAccount
from seawall.policies.hedge.race import Race
from seawall.policies.timeout.async_flow import ExpiryQueue
from seawall.runtime.driver import wait_async
from seawall.runtime.layers import Driver, Host, Kind

if TYPE_CHECKING:
    from seawall.policies.hedge.policy import HedgeBound

LOST: Final = "seawall: another copy was faster"
"""Message of the cancellation of a first copy that lost."""


class _Queue(ExpiryQueue):
    """Running calls of one hedge in one loop. All have the same delay, so they are in order."""

    def put(self, copies: TaskCopies) -> None:
        at = self._clock.now() + self.seconds
        self.pending[copies] = at
        if self.timer is None:
            self.arm(at)

    def _expire(self, holder: TaskCopies, due: float) -> None:
        try:
            holder.late(due - self.seconds)
        except Exception as error:  # noqa: BLE001 - reported; the calls continue without a copy
            message = "seawall: a copy of a slow call could not be started"
            self.loop.call_exception_handler({"message": message, "exception": error})


class TaskHedge(Driver):
    """Runs the inner layers, and after the delay once more."""

    def __init__(self, bound: HedgeBound) -> None:
        self.bound = bound
        self._queues: dict[asyncio.AbstractEventLoop, _Queue] = {}
        survives_fork(self)

    def _after_fork(self) -> None:
        """Forget the loops of the parent process."""
        self._queues = {}

    def queue(self, loop: asyncio.AbstractEventLoop, delay: float) -> _Queue:
        """Return the queue for calls of that loop. A different delay needs a new queue."""
        queue = self._queues.get(loop)
        if queue is None or queue.seconds != delay:
            for other in [known for known in list(self._queues) if known.is_closed()]:
                self._queues.pop(other, None)
            queue = self._queues[loop] = _Queue(loop, self.bound.host.clock, delay)
        return queue

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        """Return a function that runs `inner`, in copies if it is slow."""
        bound = self.bound

        async def hedged(*args: Any, **kwargs: Any) -> Any:
            delay = bound.begin(host)
            if delay is None:
                return await inner(*args, **kwargs)
            copies = TaskCopies(self, inner, args, kwargs, delay)
            try:
                value = await inner(*args, **kwargs)
            except BaseException as error:
                copies.stop_copying()
                if copies.race is None:
                    raise
                failure = error
            else:
                copies.stop_copying()
                if copies.race is None:
                    return value
                return await copies.first_returned(copies.race, value)
            try:
                return await copies.first_failed(copies.race, failure)
            finally:
                del failure

        budget = bound.policy.budget
        if budget is None or not bound.reports_to_budget:
            return hedged

        async def accounted(*args: Any, **kwargs: Any) -> Any:
            with HedgeAccount(budget, host.clock):
                return await hedged(*args, **kwargs)

        return accounted


class TaskCopies:
    """The copies of one call: the first one in this task, and tasks for the others."""

    def __init__(
        self,
        driver: TaskHedge,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        delay: float,
    ) -> None:
        """Start the delay of a call whose first copy begins now."""
        self._bound = driver.bound
        self._inner = inner
        self._args = args
        self._kwargs = kwargs
        self._context = copy_context()
        self._task = task = running_task()
        self._cancelling = task.cancelling()
        self._first_runs = True
        self._stopped_first = False
        self.race: Race | None = None  # created with the second copy; None while there is only one
        self._queue = queue = driver.queue(task.get_loop(), delay)
        queue.put(self)

    def stop_copying(self) -> None:
        """Start no more copies."""
        self._queue.pending.pop(self, None)

    def late(self, began: float) -> None:
        """Start another copy, if that is permitted. The last one began at `began`."""
        queue = self._queue
        race = Race(self._bound, began) if self.race is None else self.race
        number = race.grow(self._left())
        if not number:
            return
        if self.race is None:
            self.race = race
            self._tasks: dict[int, asyncio.Task[None]] = {}
        under_way = race.running
        copy = self._copy(race, number)
        try:
            # A task factory need not accept a context or a name, and asyncio passes both on.
            task = self._context.copy().run(queue.loop.create_task, copy)
            task.set_name(f"{self._bound.host.name}: copy {number}")
        except BaseException:
            copy.close()
            race.not_started(number, "task")
            raise
        self._tasks[number] = task

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.pop(number, None)
            if not task.cancelled():
                task.exception()  # retrieve it, so that asyncio does not warn
            race.ended(number)

        task.add_done_callback(ended)
        self._bound.count_copy(under_way, race.began)
        if race.may_grow():
            queue.put(self)

    def _left(self) -> float | None:
        """Return the seconds until the deadline of this call, if known."""
        held = live_scope(self._context.get(deadline_var))
        return None if held is None else held[0] - held[1].now()

    async def _copy(self, race: Race, number: int) -> None:
        try:
            value = await self._inner(*self._args, **self._kwargs)
        except Exception as error:  # noqa: BLE001 - raised in the caller, if no copy returns
            race.failed(error)
            return
        except GeneratorExit:
            raise  # the loop and the caller are gone
        except BaseException as error:
            if not race.record_exit(error):
                raise  # it was cancelled by us, or there is no waiter any more
            self._cancel(besides=number)
            return
        if race.returned(number, value):
            self._cancel(besides=number)
        else:
            await self._dispose(value)

    def _cancel(self, besides: int = 0) -> None:
        """Cancel all copies but one."""
        self.stop_copying()
        for number, task in list(self._tasks.items()):
            if number != besides:
                task.cancel(LOST)
        if self._first_runs and not self._stopped_first:
            self._stopped_first = True
            self._task.cancel(LOST)

    async def _dispose(self, value: Any) -> None:
        disposal = self._bound.dispose(value)
        if hasattr(disposal, "__await__"):
            try:
                await disposal
            except Exception as error:  # noqa: BLE001 - logged: the call has its answer
                log_failure("guard %r: dispose failed", self._bound.host.name, error=error)

    async def first_returned(self, race: Race, value: Any) -> Any:
        """Return the value of the first copy, or of the one that was faster."""
        self._first_runs = False
        if self._stopped_first:
            self._task.uncancel()
        won = race.returned(1, value)
        race.ended(1)
        try:
            if won:
                self._cancel()
            else:
                await self._dispose(value)  # it returned in spite of the cancellation
        except BaseException as stopped:  # noqa: BLE001 - raised when all copies have ended
            return await self._stop(race, stopped)
        return await self._answer(race)

    async def first_failed(self, race: Race, error: BaseException) -> Any:
        """Return the value of another copy, or raise."""
        self._first_runs = False
        foreign = isinstance(error, asyncio.CancelledError)
        if self._stopped_first:
            alone = self._task.uncancel() <= self._cancelling
            foreign = foreign and not alone
        try:
            if foreign or not isinstance(error, (Exception, asyncio.CancelledError)):
                race.ended(1)
                race.close()
                return await self._stop(race, error)
            if self._stopped_first:
                # Record that it took at least this long. Otherwise slow calls would seem to get
                # rarer.
                host = self._bound.host
                host.stats.cut_off(host.clock.now() - race.began)
            else:
                race.failed(error)
            race.ended(1)
        finally:
            del error  # Break the reference cycle between the exception and this frame.
        try:
            await wait_async(race.decision(), self._bound.host.clock)
        except BaseException as stopped:  # noqa: BLE001 - raised when all copies have ended
            race.close()
            return await self._stop(race, stopped)
        return await self._answer(race)

    async def _answer(self, race: Race) -> Any:
        """Return the winning value, or raise, when all copies have ended."""
        try:
            while race.running:
                await wait_async(race.end_of_all(), self._bound.host.clock)
        except BaseException as stopped:  # noqa: BLE001 - raised when all copies have ended
            return await self._stop(race, stopped)
        if not race.winner:
            failure = race.take_failure()
            try:
                raise failure
            finally:
                del failure
        value, race.value = race.value, None
        return value

    async def _stop(self, race: Race, error: BaseException) -> Any:
        """Stop all copies and raise `error`: the call itself was stopped."""
        try:
            if not isinstance(error, asyncio.CancelledError):
                # There is no time to wait: the coroutine is being closed, or the process ends.
                self._let_go(race)
                raise error
            self._cancel()
            while race.running:
                try:
                    await wait_async(race.end_of_all(), self._bound.host.clock)
                except asyncio.CancelledError:
                    self._cancel()
                except BaseException:
                    self._let_go(race)
                    raise
            if race.winner:
                await self._dispose(race.value)
            raise error
        finally:
            del error

    def _let_go(self, race: Race) -> None:
        """Let the copies be cancelled in their own loop, from whatever thread this is."""

        def cancel() -> None:
            self._cancel()
            if race.winner:
                task = self._queue.loop.create_task(self._dispose(race.value))
                self._tasks[0] = task
                task.add_done_callback(lambda _: self._tasks.pop(0))

        try:
            self._queue.loop.call_soon_threadsafe(cancel)
        except RuntimeError:
            pass  # the loop is closed, and its tasks with it
