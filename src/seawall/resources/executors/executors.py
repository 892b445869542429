"""Executors: CPU-bound work in processes or threads, blocking I/O in threads.

Promises:
- At most `workers` calls run and `max_queue` wait; the next one is refused immediately.
- Threads and tasks of any loop may call.
- Context variables and the deadline are passed on; an expired call is not started.
- A process that dies fails only its own item, and is replaced.
- A call whose caller gave up is stopped if it runs in a process, otherwise counted until it ends.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable
from contextvars import ContextVar
from functools import partial
from math import ceil
from threading import Thread
from typing import Any, ClassVar, Final, Literal, ParamSpec, Self, TypeVar, cast

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import Rejected
from seawall.models.pooling import pool_size
from seawall.resources.executors.messages import ContextValues, ProcessCall
from seawall.resources.executors.processes import WorkerProcesses
from seawall.resources.executors.thread_calls import (
    ClosableThreads,
    ExecutorCall,
    ExecutorHost,
    ProcessExecutorCall,
)
from seawall.runtime.batch import Batch, Room, arun_batch, asettled, run_batch, settled
from seawall.runtime.driver import CallbackWaiter, held_time, wait_async, wait_sync
from seawall.runtime.functions import kind_of
from seawall.runtime.process import usable_cores
from seawall.runtime.result import Result

MOST_WORKERS: Final = 10_000  # a larger number suggests a mistaken unit

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class _Executor:
    """Common part of both executors: running calls, snapshots, and closing."""

    _policy: ClassVar[str]  # its name in refusals and events, besides the executor's own name

    def __init__(self, name: str, workers: int, max_queue: int | None, clock: Clock | None) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'reports'")
        if workers > MOST_WORKERS:
            raise ValueError(
                f"{workers} workers are too many: write at most workers={MOST_WORKERS} (throughput"
                " is in calls a second, latency in seconds each); waiting for more at once is"
                " for async code"
            )
        queue = workers if max_queue is None else check.count("max_queue", max_queue, minimum=0)
        self.name = name
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._host = ExecutorHost(name, self._clock)
        self.pool = ClosableThreads(workers, queue, name)
        self._processes: WorkerProcesses | None = None
        registry.enter(self, "executor", name)

    @property
    def workers(self) -> int:
        """The number of calls that can run concurrently."""
        return self.pool.size

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(*args, **kwargs)` in a worker, and block this thread until it is done."""
        return cast("T", self._new_call(function, args, kwargs).run())

    async def arun(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function(*args, **kwargs)` in a worker, and suspend this task until it is done."""
        call = self._new_call(function, args, kwargs)
        with held_time():
            return cast("T", await call.arun())

    def map(
        self, function: Callable[[A], T], items: Iterable[A], /, *, concurrency: int | None = None
    ) -> Batch[A, T]:
        """Run `function(item)` for each of `items`; block until all are done, return the batch.

        At most `concurrency` items run concurrently, by default as many as there are workers. A
        failing item does not stop the others.
        """
        check.plain_function("function", function, "an async one is awaited as it is")

        def one(item: A) -> Result[T]:
            return settled(partial(self.run, function, item), self._clock)

        room = Room(self.name, one)
        return run_batch(lambda _item: room, items, self._concurrency(concurrency))

    async def amap(
        self,
        function: Callable[[A], T],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        concurrency: int | None = None,
    ) -> Batch[A, T]:
        """Async twin of `map`; if its task is cancelled, all items are."""
        check.plain_function("function", function, "an async one is awaited as it is")

        async def one(item: A) -> Result[T]:
            return await asettled(partial(self.arun, function, item), self._clock)

        room = Room(self.name, one)
        return await arun_batch(lambda _item: room, items, self._concurrency(concurrency))

    def _concurrency(self, given: int | None) -> int:
        return self.workers if given is None else check.count("concurrency", given)

    def snapshot(self) -> dict[str, Any]:
        """Return name, size, use, counts of calls, and the run time of recent calls."""
        known = self._host.stats.snapshot(self._clock.now())
        counts = ("rejected", "succeeded", "failed", "cancelled", "timed_out", "p50", "p95", "p99")
        return {
            "name": self.name,
            "workers": self.pool.size,
            "max_queue": self.pool.queue,
            "in_flight": self.pool.in_use,
            "waiting": self.pool.queued,
            "abandoned": self.pool.abandoned,
            "replaced": 0 if self._processes is None else self._processes.replaced,
            **{name: known[name] for name in counts},
        }

    def close(self, drain: float = 5.0) -> bool:
        """Stop accepting calls, and give pending ones `drain` seconds; return whether all ended.

        After that, queued calls are refused and processes killed; threads cannot be stopped, and
        run on.
        """
        waiter = self._closing(drain)
        try:
            return self.pool.idle if waiter is None else wait_sync(waiter, self._clock)
        finally:
            self._end()

    async def aclose(self, drain: float = 5.0) -> bool:
        """Async twin of `close`."""
        waiter = self._closing(drain)
        try:
            with held_time():
                wait = None if waiter is None else wait_async(waiter, self._clock)
                ended: bool = self.pool.idle if wait is None else await wait
                await wait_async(CallbackWaiter(self._end_in_thread), self._clock)
        except BaseException:
            self._end(kill=True)
            raise
        return ended

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # A block that ended with an error will not read any results.
        self.close() if error is None else self.close(0.0)

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await (self.aclose() if error is None else self.aclose(0.0))

    def _new_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExecutorCall:
        plain = isinstance(function, type) or (callable(function) and kind_of(function) == "sync")
        if not plain:
            raise TypeError(
                f"{function!r}: pass a plain function; an async one is awaited as it is"
            )
        item = ProcessCall(function, args, kwargs)
        if self._processes is None:
            return ExecutorCall(self._host, self.pool, self._policy, item)
        return ProcessExecutorCall(self._host, self.pool, self._policy, item, self._processes)

    def _check_open(self) -> None:
        if self.pool.state != "open":
            raise Rejected(
                f"executor {self.name!r} is closed", guard=self.name, policy=self._policy
            )

    def _closing(self, drain: float) -> CallbackWaiter | None:
        """Stop accepting calls; return a waiter for pending ones, or None if not to wait."""
        seconds = check.seconds("drain", drain, zero=True, infinite=True)
        self.pool.shut("closing")
        if not seconds or self.pool.idle:
            return None
        return self.pool.until_idle(self._clock.now() + seconds)

    def _end(self, *, kill: bool = False) -> None:
        self.pool.shut("closed")
        self.pool.refuse_queued()
        self.pool.stop()
        if self._processes is not None:
            self._processes.stop(kill=kill)

    def _end_in_thread(self, wake: Callable[[], bool]) -> None:
        """Call `_end`, then `wake`, in a separate thread: the loop's threads may all be busy."""

        def run() -> None:
            try:
                self._end()
            finally:
                wake()

        try:
            Thread(target=run, name="seawall-closing", daemon=True).start()
        except RuntimeError:  # the system cannot start more threads
            run()


class CpuPool(_Executor):
    """Runs CPU-bound functions in as many processes (or threads) as there are usable cores."""

    _policy: ClassVar[str] = "cpu_pool"

    def __init__(
        self,
        name: str,
        *,
        workers: int | None = None,
        kind: Literal["process", "thread"] = "process",
        max_queue: int | None = None,
        start: Literal["spawn", "forkserver"] = "spawn",
        context: Iterable[ContextVar[Any]] = (),
        clock: Clock | None = None,
    ) -> None:
        """Use `workers` (default: the usable cores) and a queue of `max_queue` (default: same).

        `kind="thread"` is for functions that release the GIL. `start` is the start method of
        processes. `context` lists the context variables whose values are passed to a process,
        besides Seawall's own; a thread sees all of them.
        """
        size = max(1, ceil(usable_cores())) if workers is None else check.count("workers", workers)
        super().__init__(name, size, max_queue, clock)
        check.choice("kind", kind, ("process", "thread"))
        check.choice("start", start, ("spawn", "forkserver"))
        context_values = ContextValues(context)
        if kind == "process":
            self._processes = WorkerProcesses(
                name, self._policy, start, context_values, self._clock
            )

    @property
    def kind(self) -> Literal["process", "thread"]:
        """Where functions run."""
        return "thread" if self._processes is None else "process"

    def __repr__(self) -> str:
        return (
            f"CpuPool({self.name!r}, workers={self.workers}, kind={self.kind!r},"
            f" max_queue={self.pool.queue})"
        )


class IoPool(_Executor):
    """Runs blocking functions in threads, as many as the traffic needs by Little's law."""

    _policy: ClassVar[str] = "io_pool"

    def __init__(
        self,
        name: str,
        *,
        throughput: float | None = None,
        latency: float | None = None,
        workers: int | None = None,
        max_queue: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Size the pool for `throughput` calls per second of `latency` seconds, or by `workers`.

        Up to `max_queue` calls can wait, by default as many as there are workers.
        """
        sized = throughput is not None and latency is not None
        if (workers is None) is not sized or (throughput is None) is not (latency is None):
            raise TypeError(
                "IoPool: write throughput= (calls a second) and latency= (seconds each), such as"
                " throughput=200, latency=0.05; or workers=, such as workers=15"
            )
        if workers is None:
            size = pool_size(cast("float", throughput), cast("float", latency))
        else:
            size = check.count("workers", workers)
        super().__init__(name, size, max_queue, clock)

    def __repr__(self) -> str:
        return f"IoPool({self.name!r}, workers={self.workers}, max_queue={self.pool.queue})"
