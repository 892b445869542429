"""Many calls of one function, some at once, and how each of them went.

Promises: items are taken from their source one by one, as there is room; at most `concurrency` are
under way, and of one bulkhead as many as it takes; results are in the order of the items; an item
that fails stops no other. Cancellation, an exit, or an error of the source itself does: what has
not begun never begins, tasks are cancelled and waited for, threads run to the end of what they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from seawall._failures import reason_of
from seawall.errors import Rejected
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


class Room(NamedTuple):
    """Whose call an item is, a guard's or an executor's, and what bounds such calls at once."""

    name: str
    gates: Sequence[tuple[int, int]] = ()
    """The identity of each bulkhead, which several guards may share, and how many it lets in."""


class _Schedule(Generic[A]):
    """Which item begins next: `concurrency` are under way at most, of one bulkhead what it takes.

    Items for which one is full are held back while others go first, as many as may be under way.
    """

    def __init__(self, items: Iterable[A], concurrency: int, room: Callable[[A], Room]) -> None:
        self.items: list[A] = []
        """Those that were taken from the source."""
        self._source = _iterator(items)
        self._concurrency = concurrency
        self._room = room
        self._rooms: dict[int, Room] = {}
        self._held: list[int] = []
        self._busy: Counter[int] = Counter()
        self._running = 0

    def begin(self) -> int | None:
        """Return the number of an item to begin now; None if none is left, or has room."""
        if self._running >= self._concurrency:
            return None
        for place, number in enumerate(self._held):
            if self._begins(number):
                del self._held[place]
                return number
        while len(self._held) < self._concurrency:
            number = len(self.items)
            try:
                item = next(self._source)
            except StopIteration:
                return None
            self.items.append(item)
            self._rooms[number] = self._room(item)
            if self._begins(number):
                return number
            self._held.append(number)
        return None

    def _begins(self, number: int) -> bool:
        gates = self._rooms[number].gates
        if any(self._busy[gate] >= limit for gate, limit in gates):
            return False
        self._busy.update(gate for gate, _ in gates)
        self._running += 1
        return True

    def whose(self, number: int) -> str:
        """Return the name of the guard whose call it is."""
        return self._rooms[number].name

    def ended(self, number: int) -> None:
        """Take in that an item has ended."""
        self._busy.subtract(gate for gate, _ in self._rooms.pop(number).gates)
        self._running -= 1

    def batch(self, found: dict[int, Result[T]]) -> Batch[A, T]:
        """Return how it went with all items."""
        return Batch(self.items, [found[number] for number in range(len(self.items))])


def _iterator(items: Iterable[A]) -> Iterator[A]:
    try:
        return iter(items)
    except TypeError:
        message = f"items={items!r}: pass what to call the function with, such as a list"
        raise TypeError(message) from None


def run_batch(
    attempt: Callable[[A], Result[T]],
    items: Iterable[A],
    concurrency: int,
    room: Callable[[A], Room],
) -> Batch[A, T]:
    """Do `attempt(item)` for each of `items`, in threads of its own; block until all have ended.

    What `attempt` raises ends the batch: an error of the function is in its result.
    """
    schedule = _Schedule(items, concurrency, room)
    found: dict[int, Result[T]] = {}
    if concurrency == 1:
        while (number := schedule.begin()) is not None:
            found[number] = attempt(schedule.items[number])
            schedule.ended(number)
        return schedule.batch(found)
    pool = WorkerPool(concurrency, 0, "map")
    ended: SimpleQueue[int] = SimpleQueue()
    jobs: dict[int, Job] = {}
    try:
        while True:
            while (number := schedule.begin()) is not None:
                args, name = (schedule.items[number],), schedule.whose(number)
                job = Job(attempt, args, {}, partial(ended.put, number), name, pool)
                jobs[number] = job
                pool.submit(job)
            if not jobs:
                return schedule.batch(found)
            number = ended.get()
            found[number] = jobs.pop(number).result()
            schedule.ended(number)
    finally:
        for job in jobs.values():
            pool.give_up(job)
        pool.stop()


async def arun_batch(
    attempt: Callable[[A], Awaitable[Result[T]]],
    items: Iterable[A],
    concurrency: int,
    room: Callable[[A], Room],
) -> Batch[A, T]:
    """Do `await attempt(item)` for each of `items`, each in a task of its own."""
    from asyncio import Queue, ensure_future

    schedule = _Schedule(items, concurrency, room)
    found: dict[int, Result[T]] = {}
    ended: Queue[Task[Any]] = Queue()
    running: dict[Task[Any], int] = {}
    try:
        while True:
            while (number := schedule.begin()) is not None:
                task: Any = ensure_future(attempt(schedule.items[number]))
                running[task] = number
                task.add_done_callback(ended.put_nowait)
            if not running:
                return schedule.batch(found)
            task = await ended.get()
            number = running.pop(task)
            found[number] = task.result()
            schedule.ended(number)
    except BaseException:
        await _stop(running, ended)
        raise


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
