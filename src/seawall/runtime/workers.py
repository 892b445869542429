"""Threads for blocking work: capped, daemonic, and honest about work that nobody waits for.

A pool of the standard library joins its threads when the interpreter exits, so one hung call
would keep the process alive; and it queues without bound. This one does neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context, copy_context
from queue import SimpleQueue
from threading import RLock, Thread
from typing import Any
from weakref import finalize

from seawall.runtime.call import Abandoned, job_var
from seawall.runtime.mutex import survives_fork


class Job:
    """One piece of blocking work. Exactly one of its caller and its worker sees it to the end."""

    __slots__ = (
        "_abandoned",
        "_args",
        "_context",
        "_done",
        "_error",
        "_function",
        "_kwargs",
        "_lock",
        "_state",
        "_value",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        done: Callable[[], object],
    ) -> None:
        """Wrap `function(*args, **kwargs)`, with a copy of the caller's context variables.

        `done()` is called from the worker thread when it has ended.
        """
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

    def run(self) -> bool:
        """Do the work, in a worker thread; False if it was withdrawn before it began."""
        with self._lock:
            if self._state != "queued":
                return False
            self._state = "running"
        try:
            self._value = self._context.run(self._function, *self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        with self._lock:
            wanted = self._state == "running"
            self._state = "done"
        return True if wanted else self._forget()

    def _forget(self) -> bool:
        self._value = self._error = None
        return True

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._state == "abandoned"

    def finished(self) -> None:
        """Tell whoever waits, after the worker is free again."""
        self._abandoned.stopped()
        self._done()

    def give_up(self) -> Abandoned | bool:
        """Stop waiting. Return the work if it runs on, False if it never began, True if done."""
        with self._lock:
            if self._state == "queued":
                self._state = "withdrawn"
                return False
            if self._state == "running":
                self._state = "abandoned"
                return self._abandoned
            return True

    def result(self) -> Any:
        """Return the value or raise the error of work that is done."""
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error


class _Counts:
    """What a pool and its threads share; the threads must not keep the pool alive."""

    def __init__(self) -> None:
        # Reentrant: a coroutine that the collector closes may give up on its job at any moment.
        self.lock = RLock()
        self.taken = 0
        self.threads = 0
        self.abandoned = 0

    def freed(self) -> None:
        with self.lock:
            self.taken -= 1

    def came_back(self) -> None:
        with self.lock:
            self.abandoned -= 1


class WorkerPool:
    """At most `size` threads, and at most `queue` jobs that wait for one."""

    def __init__(self, size: int, queue: int, name: str) -> None:
        """Start no thread yet: they come as they are needed, and end with the pool."""
        self.size = size
        self.queue = queue
        self._name = name
        self._begin()
        survives_fork(self)

    def _begin(self) -> None:
        self._counts = _Counts()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._finalizer = finalize(self, _stop, self._jobs, self.size)
        self._finalizer.atexit = False

    @property
    def in_use(self) -> int:
        """How many threads work now, for somebody or abandoned."""
        return min(self._counts.taken, self.size)

    @property
    def queued(self) -> int:
        """How many jobs wait for a thread now."""
        return max(0, self._counts.taken - self.size)

    @property
    def abandoned(self) -> int:
        """How many threads work though nobody waits for them."""
        return self._counts.abandoned

    def submit(self, job: Job) -> bool:
        """Take the job, or return False at once if all threads and places are taken."""
        counts = self._counts
        with counts.lock:
            if counts.taken >= self.size + self.queue:
                return False
            counts.taken += 1
            grow = counts.threads < min(self.size, counts.taken)
            counts.threads += grow
            name = f"seawall-{self._name}-{counts.threads}"
        self._jobs.put(job)
        if grow:
            Thread(target=_work, args=(self._jobs, counts), name=name, daemon=True).start()
        return True

    def give_up(self, job: Job) -> Abandoned | bool:
        """Stop waiting for `job`: as `Job.give_up`, and count what runs on."""
        left = job.give_up()
        if left is False:
            self._counts.freed()
        elif isinstance(left, Abandoned):
            with self._counts.lock:
                self._counts.abandoned += 1
            left.when_stopped(self._counts.came_back)
        return left

    def _after_fork(self) -> None:
        """Begin anew in a child process: threads do not survive a fork, nor their jobs."""
        self._finalizer.detach()
        self._begin()


def _work(jobs: SimpleQueue[Job | None], counts: _Counts) -> None:
    while (job := jobs.get()) is not None:
        if job.run():
            counts.freed()
            job.finished()
        del job


def _stop(jobs: SimpleQueue[Job | None], size: int) -> None:
    for _ in range(size):
        jobs.put(None)
