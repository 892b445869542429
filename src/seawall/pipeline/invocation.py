"""How a stage calls its function: behind its timeout and guard, with one value or with a batch.

Promises: every attempt at an item is counted, also those by a guard; none is made at an item that
its source has lost to another process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from seawall._expiry import current_task
from seawall.errors import TimedOut, WorkerDied
from seawall.pipeline.counts import StageCounts
from seawall.pipeline.item import CURRENT, Item
from seawall.pipeline.stage import Stage
from seawall.policies.breaker import Breaker
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.rate_limit import RateLimit
from seawall.policies.retry import Retry
from seawall.policies.timeout import Timeout
from seawall.resources.executors import CpuPool
from seawall.runtime.call import further_attempts
from seawall.runtime.functions import kind_of

LOST: Final = LookupError("the source has lost the item to another process")
"""Why an item ends that its source does not hold any more: it is given back."""
ONE_AFTER_ANOTHER: Final = (Breaker, Bulkhead, RateLimit, Retry, Timeout)
"""Policies that call the function directly, and report each further attempt."""


class ItemLost(BaseException):
    """Raised before a further attempt at an item that its source has lost; guards pass it on."""


class Invocation:
    """The function of a stage with its timeout and its guard around it."""

    def __init__(self, stage: Stage, counts: StageCounts, *, in_memory: bool) -> None:
        guard = stage.guard
        policies = getattr(guard, "policies", () if guard is None else None)
        self.counts_attempts = policies is None or not all(
            isinstance(policy, ONE_AFTER_ANOTHER) for policy in policies
        )
        """Whether `call` counts the first attempt at an item too; else its caller does."""
        self._counts = counts
        self._guard_name = getattr(guard, "name", None)
        self._watches = stage.batch is None and any(
            isinstance(one, Retry) for one in policies or ()
        )
        self.call: Callable[[Any], Awaitable[Any]] = self._bound(stage, in_memory=in_memory)
        """Takes a value; for a stage with `batch=` it takes `BatchMembers`.

        So a retry of the guard calls the function only with those members that are left.
        """

    def _bound(self, stage: Stage, *, in_memory: bool) -> Callable[[Any], Awaitable[Any]]:
        function, pool = stage.function, None if in_memory else stage.pool
        run: Callable[[Any], Any] = function
        if pool is not None:
            run = lambda value: pool.arun(function, value)  # noqa: E731 - as short as it gets
        awaits = pool is not None or kind_of(function) == "async"
        call: Any
        if stage.batch is not None:

            async def call(members: Any) -> None:
                await members.attempt(run, awaits=awaits)

        elif self.counts_attempts or not awaits or pool is not None:

            async def call(value: Any) -> Any:
                if self.counts_attempts and not self._count_attempt():
                    return LOST
                return await run(value) if awaits else run(value)

        else:
            call = function
        if call is not function:
            call.__name__ = call.__qualname__ = stage.name
        if stage.timeout is not None:
            call = Timeout(stage.timeout)(call)
            if isinstance(pool, CpuPool) and pool.kind == "process":
                call = _with_started_process(call, function, pool)
        bound: Callable[[Any], Awaitable[Any]] = call if stage.guard is None else stage.guard(call)
        return bound

    def watch_attempts(self) -> None:
        """Count the further attempts that a retry of the guard makes in this task."""
        if self._watches:
            worker = current_task()

            def count_further(guard: str) -> None:
                # Tasks and threads that the function starts inherit this: they are not watched.
                if guard != self._guard_name or current_task() is not worker:
                    return
                if not self._count_attempt():
                    raise ItemLost

            further_attempts.set(count_further)

    def call_again(self, item: Item) -> Awaitable[Any]:
        """Call the function with an item for which it has failed before."""
        CURRENT.set(item)
        if not self.counts_attempts:
            item.attempts += 1
            self._counts.retries += 1
        return self.call(item.value)

    def _count_attempt(self) -> bool:
        """Count an attempt, unless it is a further one and the source has lost the item."""
        item = CURRENT.get()
        if item.attempts:
            if is_lost(item):
                return False
            self._counts.retries += 1
        item.attempts += 1
        return True


def _with_started_process(
    call: Callable[[Any], Awaitable[Any]], function: Callable[..., Any], pool: CpuPool
) -> Callable[[Any], Awaitable[Any]]:
    """Return `call`, before which a missing process is started: not within its timeout."""
    missing = pool.workers

    async def started(value: Any) -> Any:
        nonlocal missing
        if missing:
            missing -= 1
            await pool.arun(_load, function)
        try:
            return await call(value)
        except (WorkerDied, TimedOut):  # its process is gone
            missing += 1
            raise

    return started


def _load(_function: Callable[..., Any]) -> None:
    """Do nothing, in a process that has imported the function to be called with it."""


def is_lost(item: Item) -> bool:
    """Return whether the source of an item has lost it to another process."""
    holds = getattr(item.source, "holds", None)
    return holds is not None and not holds(item.handle)
