"""Running the inside of a layer in a worker thread, for a waiting thread or task."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from seawall.context import Scope, deadline_scope, deadline_var, end_scope
from seawall.errors import BulkheadFull, DeadlineExceeded, Rejected, TimedOut
from seawall.events import ThreadAbandoned
from seawall.events.bus import emit
from seawall.runtime.call import Abandoned, job_var, mark_withdrawn
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.stats import CachedNumber, service_time
from seawall.runtime.workers import ThreadJob, WorkerPool

if TYPE_CHECKING:
    from asyncio import Future


class ThreadDriver(Driver):
    """Runs what is inside it in a worker thread, with deadline and context variables."""

    whose = "guard"
    worker = "thread"  # what its errors call the host (`whose`) and one of its workers (`worker`)

    def __init__(
        self, host: Host, pool: WorkerPool, policy: str, typical: CachedNumber | None = None
    ) -> None:
        self.host = host
        self.pool = pool
        self.policy = policy
        self.refused = 0
        self._typical = service_time(host) if typical is None else typical

    def limit(self, now: float) -> float | None:
        """Return how many seconds to wait at most, besides the deadline; None means no limit."""
        return None

    def full(self) -> BulkheadFull:
        """Return the refusal for when no thread and no place in the queue is free."""
        pool, name = self.pool, self.host.name
        return BulkheadFull(
            f"{self.whose} {name!r}: all {pool.size} {self.worker}s are busy"
            f" ({pool.abandoned} abandoned) and {pool.queued} calls wait",
            retry_after=self._typical(self.host.clock.now()),
            guard=name,
            policy=self.policy,
        )

    def late(self, seconds: float, *, began: bool) -> BaseException:
        """Return the error for work that did not finish in `seconds`."""
        name = self.host.name
        passed = f"{self.whose} {name!r}: the deadline passed"
        if began:
            message = f"{passed} after {seconds:.3f} s in a {self.worker}"
            return TimedOut(message, guard=name, seconds=seconds)
        message = f"{passed} while waiting for a {self.worker}"
        return DeadlineExceeded(message, guard=name, policy=self.policy)

    def inner_kind(self, kind: Kind) -> Kind:
        """Return "sync": the inside runs in a worker thread, for sync and async callers."""
        return "sync"

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        """Return a function that runs `inner` in a worker thread."""
        if kind == "sync":

            def in_thread(*args: Any, **kwargs: Any) -> Any:
                return self._run_sync(inner, args, kwargs)

            return in_thread

        async def off_loop(*args: Any, **kwargs: Any) -> Any:
            return await self._run_async(inner, args, kwargs)

        return off_loop

    def _times(self, *, in_task: bool) -> tuple[float | None, Scope | None]:
        """Return how long to wait here, and the scope of the deadline inside the thread.

        A Timeout around a task cancels the wait itself. The scope ends with the work, not with a
        Timeout outside of it: abandoned work is under its deadline until it stops.
        """
        clock = self.host.clock
        wait = limit = self.limit(clock.now())
        held = deadline_scope()
        if held is not None:
            left = held[0] - held[1].now()
            limit = left if limit is None else min(limit, left)
            if not in_task or held[3] is True:
                wait = limit
        return wait, None if limit is None else [clock.now() + limit, clock, None, True]

    def _submit(
        self,
        inner: Callable[..., Any],
        args: Any,
        kwargs: Any,
        done: Callable[[], object],
        *,
        in_task: bool,
    ) -> tuple[ThreadJob, float | None]:
        seconds, scope = self._times(in_task=in_task)
        if scope is None:
            job = ThreadJob(inner, args, kwargs, done, self.host.name, self.pool)
        else:

            def ended() -> None:
                end_scope(scope)
                done()

            token = deadline_var.set(scope)
            job = ThreadJob(inner, args, kwargs, ended, self.host.name, self.pool)
            deadline_var.reset(token)
        inside = job_var.get()
        full = self.pool.in_use >= self.pool.size
        # In a thread of the same, full pool, a queued job would wait for the one that waits for it.
        deadlock = full and inside is not None and inside.pool is self.pool
        if deadlock or not self.pool.submit(job):
            self.refused += 1
            error = self.full()
            count_refusal(self.host, self.policy, error.reason)
            raise error
        return job, seconds

    def _run_sync(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        bell = Lock()
        bell.acquire()
        job, seconds = self._submit(inner, args, kwargs, bell.release, in_task=False)
        try:
            rang = self.host.clock.wait(bell, seconds)
        except BaseException as error:
            self._give_up(job, error)
            raise
        if not rang:
            self._raise_late(job, seconds or 0.0)
        return job.result()

    async def _run_async(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from asyncio import get_running_loop

        loop = get_running_loop()
        bell: Future[bool] = loop.create_future()

        def ring(in_time: bool) -> None:  # noqa: FBT001 - called by the loop
            if not bell.done():
                bell.set_result(in_time)

        def done() -> None:
            try:
                loop.call_soon_threadsafe(ring, True)  # noqa: FBT003
            except RuntimeError:
                pass  # the loop is closed: no task waits any more

        job, seconds = self._submit(inner, args, kwargs, done, in_task=True)
        timer = None if seconds is None else loop.call_later(max(0.0, seconds), ring, False)  # noqa: FBT003
        try:
            rang = await bell
        except BaseException as error:
            self._give_up(job, error)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if not rang:
            self._raise_late(job, seconds or 0.0)
        return job.result()

    def _raise_late(self, job: ThreadJob, seconds: float) -> None:
        """Raise, unless the work ended at this very moment."""
        left = self.pool.give_up(job)
        if left is True:
            return
        error = self.late(seconds, began=left is not False)
        if isinstance(error, Rejected):
            count_refusal(self.host, self.policy, error.reason)
        self._left_running(left, error)
        try:
            raise error
        finally:
            del error  # break the reference cycle between the error and this frame

    def _give_up(self, job: ThreadJob, error: BaseException) -> None:
        self._left_running(self.pool.give_up(job), error)

    def _left_running(self, left: object, error: BaseException) -> None:
        if left is False:
            mark_withdrawn(error)
        if not isinstance(left, Abandoned):
            return
        stats = self.host.stats
        stats.abandoned += 1
        emit(ThreadAbandoned, self.host.name, running=self.pool.abandoned)

        def came_back() -> None:
            stats.abandoned -= 1

        left.when_stopped(came_back)
        left.attach(error)
