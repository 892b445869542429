"""Many calls of one function, some concurrently, with the result of each.

Promises:
- Items are taken from their source one by one, as capacity frees up.
- At most `concurrency` calls are in progress, and for each bulkhead as many as it admits.
- Results are in the order of the items.
- An item that fails does not stop the others. Cancellation, an exit, or an error of the source
  itself does: items that have not begun never begin, tasks are cancelled and awaited, and threads
  finish their current item.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from seawall._failures import reason_of
from seawall.errors import Rejected
from seawall.runtime.result import Result
from seawall.runtime.workers import ThreadJob, WorkerPool

if TYPE_CHECKING:
    from asyncio import Task

    from seawall.clock import Clock

A = TypeVar("A")
T = TypeVar("T")

CONCURRENCY: Final = 10  # default number of concurrent calls


@dataclass(slots=True, eq=False, repr=False)
class Batch(Generic[A, T]):
    """The return value of `guard.map(...)`: the result of each item, in order.

    Each item is in exactly one of `ok`, `degraded` and `failed`.
    """

    items: list[A]
    """The arguments of the calls, in order."""
    results: list[Result[T]]
    """The result of each item, in the same order."""

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
        """Return all answers in order, including degraded ones; or raise all errors as a group."""
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
    """Where an item is called: a guard or an executor, and the bulkheads that bound it."""

    name: str
    attempt: Callable[[Any], Any]  # errors of the function are in its `Result`
    gates: Sequence[tuple[int, int]] = ()  # the id and the limit of each bulkhead
    release: Callable[[], object] | None = None  # called once at the end, even if it never began


class _Schedule(Generic[A]):
    """Chooses which item begins next; holds back up to `concurrency` whose bulkhead is full."""

    def __init__(self, items: Iterable[A], concurrency: int, room: Callable[[A], Room]) -> None:
        self.items: list[A] = []  # the items taken from the source so far
        try:
            self._source = iter(items)
        except TypeError:
            message = f"items={items!r}: pass what to call the function with, such as a list"
            raise TypeError(message) from None
        self._concurrency = concurrency
        self._room = room
        self._rooms: dict[int, Room] = {}
        self._held: list[int] = []
        self._busy: Counter[int] = Counter()
        self._running = 0

    def begin(self) -> int | None:
        """Return the number of an item to begin now; None if none is left, or none has room."""
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

    @property
    def wants_more(self) -> bool:
        """Whether another item would be taken from the source, if it had one."""
        return max(self._running, len(self._held)) < self._concurrency

    def room_of(self, number: int) -> Room:
        return self._rooms[number]

    def ended(self, number: int) -> None:
        room = self._rooms.pop(number)
        self._busy.subtract(gate for gate, _ in room.gates)
        self._running -= 1
        if room.release is not None:
            room.release()

    def close(self) -> None:
        """Release the rooms of items that are not over: the batch has ended."""
        while self._rooms:
            room = self._rooms.popitem()[1]
            if room.release is not None:
                room.release()

    def batch(self, found: dict[int, Result[T]]) -> Batch[A, T]:
        return Batch(self.items, [found[number] for number in range(len(self.items))])


class _Arrived(Iterator[A]):
    """Items of an async source that have arrived; it can yield again after it was empty."""

    def __init__(self) -> None:
        self.items: deque[A] = deque()

    def __next__(self) -> A:
        if not self.items:
            raise StopIteration
        return self.items.popleft()


def run_batch(room: Callable[[A], Room], items: Iterable[A], concurrency: int) -> Batch[A, Any]:
    """Attempt each item in its room, in the batch's threads; what an attempt raises ends it."""
    schedule = _Schedule(items, concurrency, room)
    try:
        if concurrency > 1:
            return _run_in_threads(schedule, concurrency)
        found: dict[int, Result[Any]] = {}
        while (number := schedule.begin()) is not None:
            found[number] = schedule.room_of(number).attempt(schedule.items[number])
            schedule.ended(number)
        return schedule.batch(found)
    finally:
        schedule.close()


def _run_in_threads(schedule: _Schedule[A], concurrency: int) -> Batch[A, Any]:
    found: dict[int, Result[Any]] = {}
    pool = WorkerPool(concurrency, 0, "map")
    ended: SimpleQueue[int] = SimpleQueue()
    jobs: dict[int, ThreadJob] = {}
    try:
        while True:
            while (number := schedule.begin()) is not None:
                room, done = schedule.room_of(number), partial(ended.put, number)
                job = ThreadJob(room.attempt, (schedule.items[number],), {}, done, room.name, pool)
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
    room: Callable[[A], Room], items: Iterable[A] | AsyncIterable[A], concurrency: int
) -> Batch[A, Any]:
    """Attempt each of `items` in its room, each in its own task."""
    return await _Tasks(room, items, concurrency).run()


class _Tasks(Generic[A]):
    """The tasks of one batch: those of its items, and the one that reads an async source."""

    def __init__(
        self, room: Callable[[A], Room], items: Iterable[A] | AsyncIterable[A], concurrency: int
    ) -> None:
        from asyncio import Event, Queue, get_running_loop

        self._running: dict[Task[Any], tuple[int, float]] = {}  # item number and start; -1: source
        self._loop = get_running_loop()
        self._ended: Queue[Task[Any] | None] = Queue()  # None when an item has arrived
        self._wanted = Event()
        if isinstance(items, AsyncIterable):
            arrived = _Arrived[A]()
            self._schedule = _Schedule(arrived, concurrency, room)
            self._start(self._read(items, arrived), -1)
        else:
            self._schedule = _Schedule(items, concurrency, room)

    async def run(self) -> Batch[A, Any]:
        schedule = self._schedule
        found: dict[int, Result[Any]] = {}
        try:
            while True:
                while (number := schedule.begin()) is not None:
                    self._start(schedule.room_of(number).attempt(schedule.items[number]), number)
                if schedule.wants_more:
                    self._wanted.set()
                if not self._running:
                    return schedule.batch(found)
                task = await self._ended.get()
                if task is None:
                    continue
                number, began = self._running.pop(task)
                if number < 0:
                    task.result()  # raises what the source raised
                    continue
                found[number] = self._result(task, began)
                schedule.ended(number)
        except BaseException:
            await self._stop()
            raise
        finally:
            schedule.close()

    def _start(self, work: Awaitable[Any], number: int) -> None:
        from asyncio import ensure_future

        task: Any = ensure_future(work)
        self._running[task] = number, self._loop.time()
        task.add_done_callback(self._ended.put_nowait)

    async def _read(self, items: AsyncIterable[A], arrived: _Arrived[A]) -> None:
        """Take items from an async source, each when there is room for it."""
        await self._wanted.wait()
        async for item in items:
            arrived.items.append(item)
            self._wanted.clear()
            self._ended.put_nowait(None)
            await self._wanted.wait()

    def _result(self, task: Task[Any], began: float) -> Result[Any]:
        if not task.cancelled():
            result: Result[Any] = task.result()
            return result
        # The batch did not cancel it: its function did, or raised the error of a cancelled task.
        from concurrent.futures import CancelledError

        error = CancelledError("the function raised asyncio.CancelledError; nobody cancelled it")
        return _failed(error, self._loop.time() - began)

    async def _stop(self) -> None:
        """Cancel running tasks and wait until they have stopped; pass on a further cancellation."""
        from asyncio import CancelledError

        running = self._running
        again: BaseException | None = None
        for task in running:
            task.cancel()
        while running:
            try:
                ended = await self._ended.get()
            except CancelledError as error:
                # They are cancelled already; cancelling again would interrupt their cleanup.
                again = error
                continue
            if ended is None:
                continue
            running.pop(ended, None)
            if not ended.cancelled():
                ended.exception()  # retrieve it, so that asyncio does not complain
        if again is not None:
            raise again


def settled(call: Callable[[], T], clock: Clock) -> Result[T]:
    """Make a call outside of any guard and return its `Result`."""
    began = clock.now()
    try:
        value = call()
    except Exception as error:  # noqa: BLE001 - it is in the result
        return _failed(error, clock.now() - began)
    return _answered(value, clock.now() - began)


async def asettled(call: Callable[[], Awaitable[T]], clock: Clock) -> Result[T]:
    """Async twin of `settled`."""
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
