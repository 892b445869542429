"""Thread pool for blocking work: bounded, daemonic, and aware of abandoned work.

A pool of the standard library joins its threads when the interpreter exits, so that one hung call
would keep the process alive; and its queue is unbounded. This one has neither problem.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from threading import Condition, RLock, Thread
from typing import Any, Final
from weakref import WeakSet, finalize

from seawall._forks import survives_fork
from seawall.runtime.call import Abandoned, job_var


class ThreadJob:
    """One piece of blocking work. Exactly one of its caller and its worker finishes it."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        done: Callable[[], object],
        guard: str = "",
        pool: WorkerPool | None = None,
    ) -> None:
        """Wrap `function(*args, **kwargs)`, with a copy of the caller's context variables.

        `done()` is called from the worker thread when it has ended. `guard` is the name of the
        guard whose call it is, `pool` the pool whose thread runs it.
        """
        self.guard = guard
        self.pool = pool
        self._context: Context = copy_context()
        self._context.run(job_var.set, self)
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._done = done
        self._lock = RLock()
        self._state = "queued"
        self._value: Any = None
        self._error: BaseException | None = None
        self._abandoned = Abandoned()
        self.waits = False  # whether the function has not begun: it waits for a slot, for example

    def run(self) -> bool:
        """Do the work, in a worker thread; return False if it was withdrawn before it began."""
        with self._lock:
            if self._state != "queued":
                return False
            self._state = "running"
        try:
            self._value = self._context.run(self._function, *self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        with self._lock:
            if self._state != "running":
                self._value = self._error = None  # no caller will read it
            self._state = "done"
            self._forget()
        return True

    def _forget(self) -> None:
        """Drop references to the work: the context refers to the job, and would keep it alive."""
        self._context = Context()
        self._function, self._args, self._kwargs = _nothing, (), {}

    @property
    def given_up(self) -> bool:
        """Whether its caller no longer waits for it."""
        return self._state == "abandoned"

    def goes_on(self) -> bool:
        """End a wait, in the worker thread; return False if the caller has given up."""
        with self._lock:
            if self._state == "abandoned":
                return False
            self.waits = False
            return True

    def finished(self) -> None:
        """Notify the waiting caller, after the worker is free again."""
        self._abandoned.stopped()
        self._done()

    def give_up(self) -> Abandoned | bool:
        """Stop waiting; return the work if it still runs, False if it never began, True if done."""
        with self._lock:
            if self._state == "queued":
                self._state = "withdrawn"
                self._forget()
                return False
            if self._state == "running":
                self._state = "abandoned"
                # Waiting work will not begin, so it is no attempt.
                self._abandoned.counted = self.waits
                return self._abandoned
            return True

    def result(self) -> Any:
        """Return the value or raise the error of work that is done."""
        error, self._error = self._error, None
        if error is None:
            value, self._value = self._value, None
            return value
        try:
            raise error
        finally:
            del error


def _nothing() -> None:
    pass


class _Shared:
    """State shared by a pool and its threads; the threads must not keep the pool alive."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may close a coroutine that gives up on its job here.
        self.lock = RLock()
        self.ready = Condition(self.lock)
        self.jobs: deque[ThreadJob] = deque()
        self.stopping = False
        self.taken = 0
        self.threads = 0
        self.abandoned = 0
        self.idle_wakes: deque[Callable[[], bool]] = deque()

    def get(self) -> ThreadJob | None:
        with self.ready:
            while not self.jobs:
                if self.stopping:
                    return None
                self.ready.wait()
            return self.jobs.popleft()

    def withdraw(self, job: ThreadJob) -> None:
        with self.lock:
            self.taken -= 1
            if job in self.jobs:
                self.jobs.remove(job)

    def freed(self) -> None:
        with self.lock:
            self.taken -= 1

    def came_back(self) -> None:
        with self.lock:
            self.abandoned -= 1

    def wake_if_idle(self) -> None:
        """Wake the waiters for the end of all work, if it has come."""
        while self.idle_wakes and not self.taken:
            try:
                wake = self.idle_wakes.pop()
            except IndexError:  # another thread was faster
                return
            wake()

    def stop(self) -> None:
        with self.ready:
            self.stopping = True
            self.ready.notify_all()


live_pools: Final[WeakSet[WorkerPool]] = WeakSet()  # for code that looks for threads still at work


class WorkerPool:
    """At most `size` threads, and at most `queue` jobs that wait for one."""

    def __init__(self, size: int, queue: int, name: str) -> None:
        self.size = size
        self.queue = queue
        self.name = name
        self._begin()
        survives_fork(self)
        live_pools.add(self)

    def _begin(self) -> None:
        self._shared = _Shared()
        self._finalizer = finalize(self, self._shared.stop)
        self._finalizer.atexit = False

    @property
    def stopped(self) -> bool:
        """Whether the pool is closed: its threads end as they become idle."""
        return self._shared.stopping

    @property
    def in_use(self) -> int:
        """Number of busy threads, including abandoned ones."""
        return min(self._shared.taken, self.size)

    @property
    def queued(self) -> int:
        """Number of jobs waiting for a thread."""
        return max(0, self._shared.taken - self.size)

    @property
    def abandoned(self) -> int:
        """Number of threads whose caller no longer waits for them."""
        return self._shared.abandoned

    def submit(self, job: ThreadJob) -> bool:
        """Accept the job, or return False if all threads and queue places are taken."""
        shared, jobs = self._shared, self._shared.jobs
        taken = queued = False
        thread: Thread | None = None
        try:
            with shared.lock:
                if shared.taken >= self.size + self.queue:
                    return False
                if shared.threads < min(self.size, shared.taken + 1):
                    name = f"seawall-{self.name}-{shared.threads + 1}"
                    thread = Thread(target=_work, args=(shared,), name=name, daemon=True)
                # No function is called between these lines, so no signal handler can run.
                shared.taken += 1
                shared.threads += thread is not None
                taken = True
            if thread is not None:
                thread.start()
            with shared.lock:
                jobs += (job,)
                queued = True
                shared.ready.notify()
        except BaseException:  # a signal, or the system has no more threads
            with shared.lock:
                if thread is not None and taken and thread.ident is None:
                    shared.threads -= 1
                if taken and not queued:
                    shared.taken -= 1
            if queued:
                self.give_up(job)
            shared.wake_if_idle()
            raise
        return True

    def give_up(self, job: ThreadJob) -> Abandoned | bool:
        """Stop waiting for `job`, as `Job.give_up` does, and count work that is still running."""
        left = job.give_up()
        if left is False:
            self._shared.withdraw(job)
            self._shared.wake_if_idle()
        elif isinstance(left, Abandoned):
            with self._shared.lock:
                self._shared.abandoned += 1
            left.when_stopped(self._shared.came_back)
        return left

    def stop(self) -> None:
        """Let threads end as they become idle."""
        self._shared.stop()

    def _after_fork(self) -> None:
        """Start over in a child process: neither threads nor their jobs survive a fork."""
        self._finalizer.detach()
        self._begin()


def _work(shared: _Shared) -> None:
    while (job := shared.get()) is not None:
        if job.run():
            shared.freed()
            job.finished()
            shared.wake_if_idle()
        del job
