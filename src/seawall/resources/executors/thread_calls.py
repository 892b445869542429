"""One call of an executor, from its caller to a worker thread (or process) and back.

Waiting, deadlines and giving up are implemented in `runtime/threads.py`. This module adds calls
that refuse themselves in time, threads that can be closed, and processes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CoroutineType
from typing import Any, Literal, NoReturn, cast

from seawall.clock import Clock
from seawall.context import seconds_left
from seawall.errors import BulkheadFull, DeadlineExceeded, Rejected
from seawall.resources.executors.messages import ProcessCall
from seawall.resources.executors.processes import WorkerProcesses
from seawall.runtime.call import Abandoned, job_var, mark_withdrawn
from seawall.runtime.driver import CallbackWaiter
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Host
from seawall.runtime.stats import Stats, service_time
from seawall.runtime.threads import ThreadDriver
from seawall.runtime.workers import ThreadJob, WorkerPool


class ExecutorHost:
    """Stand-in for a guard, for an executor that is not part of one."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.name = name
        self.clock = clock
        self.stats = Stats(clock.now())
        self.typical = service_time(cast("Host", self))


class ClosableThreads(WorkerPool):
    """Threads that can be closed: first for new work, then for all."""

    def __init__(self, size: int, queue: int, name: str) -> None:
        super().__init__(size, queue, name)
        self.state: Literal["open", "closing", "closed"] = "open"

    @property
    def idle(self) -> bool:
        """Whether no work runs or waits."""
        return not self._shared.taken

    def submit(self, job: ThreadJob) -> bool:
        """Accept the job as any pool does, unless it is closing."""
        with self._shared.lock:
            return self.state == "open" and super().submit(job)

    def shut(self, state: Literal["closing", "closed"]) -> None:
        """Stop accepting jobs; once "closed", queued jobs refuse themselves when they start."""
        with self._shared.lock:
            if self.state != "closed":
                self.state = state

    def refuse_queued(self) -> None:
        """Start queued jobs here, so that their callers are refused even if all threads hang."""
        shared = self._shared
        while True:
            with shared.lock:
                if not shared.jobs:
                    return
                job = shared.jobs.popleft()
            if job.run():
                shared.freed()
                job.finished()
                shared.wake_if_idle()

    def until_idle(self, until: float) -> CallbackWaiter:
        """Return a waiter for the end of all work; it claims whether that has come."""
        shared = self._shared

        def join(wake: Callable[[], bool]) -> None:
            shared.idle_wakes.append(wake)
            shared.wake_if_idle()

        def leave(wake: Callable[[], bool]) -> None:
            try:
                shared.idle_wakes.remove(wake)
            except ValueError:
                pass  # another thread has woken it

        return CallbackWaiter(join, leave=leave, result=lambda: self.idle, until=until)


class ExecutorCall(ThreadDriver):
    """One call, run by one of the threads of an executor."""

    whose = "executor"
    worker = "worker"
    pool: ClosableThreads

    def __init__(
        self, host: ExecutorHost, threads: ClosableThreads, policy: str, item: ProcessCall
    ) -> None:
        super().__init__(cast("Host", host), threads, policy, host.typical)
        self._item = item

    def run(self) -> Any:
        """Run the call, blocking this thread."""
        self._check_deadline()
        return self._run_sync(self._work, (), {})

    async def arun(self) -> Any:
        """Run the call, suspending this task."""
        self._check_deadline()
        return await self._run_async(self._work, (), {})

    def _work(self) -> Any:
        if self.pool.state == "closed":
            self._refuse(Rejected(f"executor {self.host.name!r} was closed before it began"))
        self._check_deadline()
        stats, clock = self.host.stats, self.host.clock
        began = clock.now()
        try:
            value = self._carry_out()
        except BaseException as error:
            if self._wanted():
                self._count_failure(error)
            raise
        if self._wanted():
            now = clock.now()
            stats.samples.append(now - began)
            if now >= stats.due:
                stats.fold(now)
        return value

    def _carry_out(self) -> Any:
        item = self._item
        value = item.function(*item.args, **item.kwargs)
        if type(value) is CoroutineType:
            value.close()
            raise TypeError(f"{item} returned a coroutine: await that in the event loop instead")
        return value

    def _wanted(self) -> bool:
        """Return whether the caller still waits; if it gave up, that was counted already."""
        job = job_var.get()
        return job is None or not job.given_up

    def _count_failure(self, error: BaseException) -> None:
        self.host.stats.fail(error, self.host.clock.now())

    def _check_deadline(self) -> None:
        left = seconds_left()
        if left is not None and left <= 0:
            message = f"executor {self.host.name!r}: the deadline passed before it began"
            self._refuse(DeadlineExceeded(message))

    def _refuse(self, error: Rejected) -> NoReturn:
        error.guard, error.policy = self.host.name, self.policy
        count_refusal(self.host, self.policy, error.reason)
        try:
            raise error
        finally:
            del error  # break the reference cycle between the exception and this frame

    def full(self) -> BulkheadFull:
        """Return the refusal when nothing is free; raise another one when the pool is closed."""
        if self.pool.state != "open":
            self._refuse(Rejected(f"executor {self.host.name!r} is closed"))
        return super().full()

    def late(self, seconds: float, *, began: bool) -> BaseException:
        """Return the error for a deadline that passed while the call ran or waited; count it."""
        error = super().late(seconds, began=began)
        if began:
            self.host.stats.timed_out += 1
            self.host.stats.fail(error, self.host.clock.now())
        return error

    def _give_up(self, job: ThreadJob, error: BaseException) -> None:
        left = self.pool.give_up(job)
        if left is not True:
            self.host.stats.cancelled += 1
        self._left_running(left, error)


class ProcessExecutorCall(ExecutorCall):
    """One call, run by one of the processes of an executor; the thread only waits for it."""

    def __init__(
        self,
        host: ExecutorHost,
        threads: ClosableThreads,
        policy: str,
        item: ProcessCall,
        processes: WorkerProcesses,
    ) -> None:
        super().__init__(host, threads, policy, item)
        self._processes = processes

    def _carry_out(self) -> Any:
        return self._processes.carry_out(self._item)

    def _count_failure(self, error: BaseException) -> None:
        if isinstance(error, Rejected) and not self._item.sent:
            count_refusal(self.host, self.policy, error.reason)
        else:
            super()._count_failure(error)

    def late(self, seconds: float, *, began: bool) -> BaseException:
        """Return the error; a call that was given to no process has not started."""
        return super().late(seconds, began=began and self._processes.give_up(self._item))

    def _left_running(self, left: object, error: BaseException) -> None:
        if left is True:
            return
        if isinstance(left, Abandoned) and self._processes.give_up(self._item):
            left.attach(error)  # until the process has ended
        else:
            mark_withdrawn(error)
