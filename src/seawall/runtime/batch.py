"""Many calls of one function, some at once, and how each of them went.

Promises: items are taken from their source one by one, as there is room; at most `concurrency` are
under way; results are in the order of the items; an item that fails stops no other. Cancellation,
an exit, or an error of the source itself does: what has not begun never begins, tasks are cancelled
and waited for, threads run to the end of what they do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from seawall.errors import Rejected, reason_of
from seawall.runtime.result import Result
from seawall.runtime.workers import Job, WorkerPool

if TYPE_CHECKING:
    from asyncio import Queue, Task

    from seawall.clock import Clock

A = TypeVar("A")
T = TypeVar("T")

CONCURRENCY: Final = 10
"""Calls at once where nothing says otherwise."""


class Batch(Generic[A, T]):
    """What `guard.map(...)` returns: how it went with each item, in order.

    Each item is in exactly one of `ok`, `degraded` and `failed`.
    """

    __slots__ = ("items", "results")

    def __init__(self, items: list[A], results: list[Result[T]]) -> None:
        """Hold `results`, one for each of `items`."""
        self.items = items
        """What the function was called with, in order."""
        self.results = results
        """How it went with each, in the same order."""

    @property
    def ok(self) -> list[tuple[A, T]]:
        """Items and their real answers."""
        return [(item, r.unwrap()) for item, r in self if r.ok and not r.degraded]

    @property
    def degraded(self) -> list[tuple[A, Result[T]]]:
        """Items that got a lesser answer; the result says which, and why."""
        return [(item, result) for item, result in self if result.degraded]

    @property
    def failed(self) -> list[tuple[A, Exception]]:
        """Items without an answer, and their errors."""
        return [(item, result.error) for item, result in self if result.error is not None]

    def unwrap(self) -> list[T]:
        """Return all answers in order, degraded ones too; or raise all errors as a group."""
        errors = [error for _, error in self.failed]
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(self)} items failed", errors)
        return [result.unwrap() for result in self.results]

    def __iter__(self) -> Iterator[tuple[A, Result[T]]]:
        return zip(self.items, self.results, strict=True)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        degraded = sum(result.degraded for result in self.results)
        failed = sum(not result.ok for result in self.results)
        ok = len(self) - degraded - failed
        return f"<Batch of {len(self)}: {ok} ok, {degraded} degraded, {failed} failed>"


def _source(items: Iterable[A]) -> Iterator[A]:
    try:
        return iter(items)
    except TypeError:
        message = f"items={items!r}: pass what to call the function with, such as a list"
        raise TypeError(message) from None


def run_batch(
    attempt: Callable[[A], Result[T]], items: Iterable[A], concurrency: int, name: str
) -> Batch[A, T]:
    """Do `attempt(item)` for each of `items`, in threads of its own; block until all have ended.

    What `attempt` raises ends the batch: an error of the function is in its result.
    """
    source = _source(items)
    given: list[A] = []
    if concurrency == 1:
        results: list[Result[T]] = []
        for item in source:
            given.append(item)
            results.append(attempt(item))
        return Batch(given, results)
    found: dict[int, Result[T]] = {}
    pool = WorkerPool(concurrency, 0, f"{name}-map")
    ended: SimpleQueue[int] = SimpleQueue()
    jobs: dict[int, Job] = {}

    def take() -> None:
        number = ended.get()
        found[number] = jobs.pop(number).result()

    try:
        for number, item in enumerate(source):
            given.append(item)
            jobs[number] = job = Job(attempt, (item,), {}, partial(ended.put, number), name, pool)
            pool.submit(job)
            if len(jobs) >= concurrency:
                take()
        while jobs:
            take()
    finally:
        for job in jobs.values():
            pool.give_up(job)
        pool.stop()
    return Batch(given, [found[number] for number in range(len(given))])


async def arun_batch(
    attempt: Callable[[A], Awaitable[Result[T]]], items: Iterable[A], concurrency: int
) -> Batch[A, T]:
    """Do `await attempt(item)` for each of `items`, each in a task of its own."""
    from asyncio import Queue, ensure_future

    source = _source(items)
    given: list[A] = []
    found: dict[int, Result[T]] = {}
    ended: Queue[Task[Any]] = Queue()
    running: dict[Task[Any], int] = {}

    async def take() -> None:
        task = await ended.get()
        number = running.pop(task)
        found[number] = task.result()

    try:
        for number, item in enumerate(source):
            given.append(item)
            task: Any = ensure_future(attempt(item))
            running[task] = number
            task.add_done_callback(ended.put_nowait)
            if len(running) >= concurrency:
                await take()
        while running:
            await take()
    except BaseException:
        await _stop(running, ended)
        raise
    return Batch(given, [found[number] for number in range(len(given))])


async def _stop(running: dict[Task[Any], int], ended: Queue[Task[Any]]) -> None:
    """Cancel what runs and wait until it has stopped; pass a further cancellation on."""
    from asyncio import CancelledError

    again: BaseException | None = None
    for task in running:
        task.cancel()
    while running:
        try:
            task = await ended.get()
        except CancelledError as error:
            again = error  # they are cancelled already; to do so again would cut their cleaning up
        else:
            running.pop(task, None)
            if not task.cancelled():
                task.exception()  # it is looked at: asyncio need not complain
    if again is not None:
        raise again


def settled(call: Callable[[], T], clock: Clock) -> Result[T]:
    """Make a call that is in no guard, and return how it went."""
    began = clock.now()
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - it is in the result
        return _failed(error, clock.now() - began)
    return _answered(value, clock.now() - began)


async def asettled(call: Callable[[], Awaitable[T]], clock: Clock) -> Result[T]:
    """Do the same with a call that is awaited."""
    began = clock.now()
    try:
        value = await call()
    except Exception as error:  # noqa: BLE001 - it is in the result
        return _failed(error, clock.now() - began)
    return _answered(value, clock.now() - began)


def _answered(value: T, elapsed: float) -> Result[T]:
    return Result(value=value, error=None, level=0, reason=None, attempts=1, elapsed=elapsed)


def _failed(error: Exception, elapsed: float) -> Result[Any]:
    return Result(
        value=None,
        error=error,
        level=0,
        reason=reason_of(error),
        attempts=0 if isinstance(error, Rejected) else 1,
        elapsed=elapsed,
    )
