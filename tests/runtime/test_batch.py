"""Batches: each item has its result, in order, with a bounded number at once."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Batch,
    Breaker,
    Bulkhead,
    BulkheadFull,
    CircuitOpen,
    DeadlineExceeded,
    Fallback,
    Guard,
    Retry,
    ThreadBulkhead,
    Timeout,
    deadline,
    degradations,
    static,
)
from seawall.context import current_tenant, tenant
from seawall.limits import aimd
from seawall.resources import CpuPool, IoPool
from seawall.runtime.batch import Room, _Schedule
from seawall.testing import ScriptedService, hang, run_virtual, slow
from tests.support import examples

WAIT = 150


class Gauge:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


def fussy(item: int) -> int:
    """Fail on every third item."""
    if item % 3 == 2:
        raise ValueError(item)
    return item * 10


async def afussy(item: int) -> int:
    """Do the same, the later items first."""
    await ScriptedService(slow(100.0 - item)).acall()
    return fussy(item)


def mapped(guard: Guard, kind: str, items: Any, **options: Any) -> Batch[int, int]:
    """Make a batch, in either way."""
    if kind == "sync":
        return guard.map(fussy, items, **options)
    return run_virtual(guard.amap(afussy, items, **options))


BOTH = pytest.mark.parametrize("kind", ["sync", "async"])


# --- What a batch tells ---


@BOTH
def test_each_item_has_its_own_end_in_order(kind):
    """One that fails stops no other."""
    batch = mapped(Guard("vendor", Bulkhead(20)), kind, range(6))
    assert batch.ok == [(0, 0), (1, 10), (3, 30), (4, 40)]
    assert [(item, str(error)) for item, error in batch.failed] == [(2, "2"), (5, "5")]
    assert batch.degraded == []
    assert [(item, result.ok) for item, result in batch] == [(n, n % 3 != 2) for n in range(6)]
    assert repr(batch) == "<Batch of 6: 4 ok, 0 degraded, 2 failed>"


@BOTH
def test_degraded_items_are_not_taken_for_real_ones(kind):
    """They are apart, with source and cause; `unwrap` has all answers."""
    guard = Guard("vendor", Fallback(static(-1)), Bulkhead(20))
    with degradations() as seen:
        batch = mapped(guard, kind, range(3))
    assert batch.ok == [(0, 0), (1, 10)]
    ((item, result),) = batch.degraded
    assert (item, result.value, result.source) == (2, -1, "static")
    assert isinstance(result.cause, ValueError)
    assert batch.failed == []
    assert batch.unwrap() == [0, 10, -1]
    assert [less.source for less in seen] == ["static"]


@BOTH
def test_unwrap_raises_all_errors_together(kind):
    """As a group, which `except*` takes apart."""
    batch = mapped(Guard("vendor", Bulkhead(20)), kind, range(6))
    with pytest.raises(ExceptionGroup, match="2 of 6 items failed") as caught:
        batch.unwrap()
    assert [str(error) for error in caught.value.exceptions] == ["2", "5"]


@BOTH
def test_a_batch_of_nothing_is_empty(kind):
    """No item, no result, no error."""
    batch = mapped(Guard("vendor", Bulkhead(2)), kind, [])
    assert (len(batch), batch.unwrap()) == (0, [])


@given(st.lists(st.integers(0, 40), max_size=25), st.integers(1, 7), st.booleans())
@examples(40)
def test_every_item_is_in_exactly_one_group_in_order(items, concurrency, lesser):
    """Whatever fails, however many at once, in threads and in tasks."""
    policies = [Fallback(static(-1))] if lesser else [Timeout(1e9, sync="cooperative")]
    guard = Guard("vendor", *policies)
    try:
        for kind in ("sync", "async"):
            batch = mapped(guard, kind, iter(items), concurrency=concurrency)
            bad = [item for item in items if item % 3 == 2]
            assert batch.items == items
            assert batch.ok == [(item, item * 10) for item in items if item % 3 != 2]
            assert [item for item, _ in batch.failed] == ([] if lesser else bad)
            assert [item for item, _ in batch.degraded] == (bad if lesser else [])
    finally:
        guard.close()


# --- How many at once ---


@pytest.mark.parametrize(
    ("policies", "most"),
    [
        ([Bulkhead(2)], 2),
        ([Bulkhead(4), Bulkhead(3)], 3),
        ([AdaptiveLimit(aimd(slow_after=9.0, initial=2, minimum=2, maximum=2))], 2),
        ([Bulkhead(100)], 10),
        ([Timeout(1e9)], 10),
    ],
)
def test_items_fit_the_guard_unless_told_otherwise(policies, most):
    """Twenty items through a bulkhead of two are not refused: two are under way at a time."""

    async def main():
        gauge = Gauge()

        async def work(item: int) -> int:
            with gauge:
                await ScriptedService(slow(1.0)).acall()
            return item

        batch = await Guard("vendor", *policies).amap(work, range(20))
        return batch.unwrap(), gauge.most

    assert run_virtual(main()) == ([*range(20)], most)


def test_items_fit_a_thread_bulkhead():
    """Twenty items through two threads of a guard, from a thread and from a task."""
    guard = Guard("vendor", ThreadBulkhead(2, max_queue=0))
    gauge = Gauge()

    def work(item: int) -> int:
        with gauge:
            return item

    assert guard.map(work, range(20)).unwrap() == [*range(20)]
    assert run_virtual(guard.amap(work, range(20))).unwrap() == [*range(20)]
    assert gauge.most <= 2


def test_threads_work_at_once():
    """As many as asked for, and no more: each waits until all are there."""
    guard = Guard("vendor", Timeout(1e9, sync="cooperative"))
    gauge = Gauge()
    barrier = threading.Barrier(3)

    def work(item: int) -> int:
        with gauge:
            barrier.wait(WAIT)
        return item

    assert guard.map(work, range(9), concurrency=3).unwrap() == [*range(9)]
    assert gauge.most == 3


def test_more_at_once_than_a_bulkhead_takes_are_refused():
    """Who asks for more gets what the guard says."""

    async def main():
        work = ScriptedService(slow(1.0, times=None)).acall
        return await Guard("vendor", Bulkhead(2)).amap(lambda _: work(), range(5), concurrency=5)

    batch = run_virtual(main())
    assert [type(error) for _, error in batch.failed] == [BulkheadFull] * 3


def test_one_at_a_time_stays_in_the_thread():
    """No thread is started for it."""
    guard = Guard("vendor", Bulkhead(1))
    batch = guard.map(lambda _: threading.get_ident(), range(3))
    assert {value for _, value in batch.ok} == {threading.get_ident()}


@BOTH
def test_items_are_taken_as_there_is_room(kind):
    """A source is never read further than the items that are under way."""
    taken = done = 0
    behind: list[int] = []

    def source() -> Iterator[int]:
        nonlocal taken
        for item in range(20):
            taken += 1
            behind.append(taken - done)
            yield item

    def work(item: int) -> int:
        nonlocal done
        done += 1
        return item

    async def awork(item: int) -> int:
        await ScriptedService(slow(1.0)).acall()
        return work(item)

    guard = Guard("vendor", Bulkhead(3))
    if kind == "sync":
        batch = guard.map(work, source())
    else:
        batch = run_virtual(guard.amap(awork, source()))
    assert batch.unwrap() == [*range(20)]
    assert max(behind) <= 3


def test_the_context_goes_along_and_does_not_leak():
    """Each item has a copy of its own."""

    async def main():
        async def work(item: int) -> Any:
            with tenant(f"{current_tenant()} {item}"):
                await ScriptedService(slow(1.0)).acall()
                return current_tenant()

        guard = Guard("vendor", Bulkhead(2))
        with tenant("acme"):
            threads = guard.map(lambda _: current_tenant(), range(3))
            return threads.unwrap(), (await guard.amap(work, range(3))).unwrap()

    assert run_virtual(main()) == (["acme"] * 3, ["acme 0", "acme 1", "acme 2"])


def test_items_that_the_deadline_leaves_no_time_for_never_begin():
    """They are refused by the guard, each."""

    async def main():
        begun: list[int] = []

        async def work(item: int) -> None:
            begun.append(item)
            await ScriptedService(slow(1.0)).acall()

        guard = Guard("vendor", Bulkhead(2))
        with deadline(1.5):
            batch = await guard.amap(work, range(8))
        return begun, [type(error) for _, error in batch.failed]

    begun, errors = run_virtual(main())
    assert begun == [0, 1, 2, 3]
    assert errors[-4:] == [DeadlineExceeded] * 4


# --- What ends a batch ---


def test_a_cancelled_batch_cancels_and_awaits_its_items():
    """Every slot is free when the cancellation comes out, and nothing begins after it."""

    async def main():
        bulkhead = Bulkhead(3)
        guard = Guard("vendor", bulkhead)
        begun: list[int] = []
        ended: list[int] = []

        async def work(item: int) -> None:
            begun.append(item)
            try:
                await ScriptedService(hang()).acall()
            finally:
                await ScriptedService(slow(1.0)).acall()
                ended.append(item)

        task = asyncio.ensure_future(guard.amap(work, range(10)))
        await ScriptedService(slow(1.0)).acall()
        assert bulkhead.in_flight == 3
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), begun, ended, bulkhead.in_flight, len(asyncio.all_tasks())

    assert run_virtual(main()) == (True, [0, 1, 2], [0, 1, 2], 0, 1)


def test_a_batch_that_is_cancelled_twice_still_leaves_nothing_behind():
    """Items clean up undisturbed, and are waited for, however impatient the caller is."""

    async def main():
        bulkhead = Bulkhead(2)
        cleaned: list[int] = []

        async def work(item: int) -> None:
            try:
                await ScriptedService(hang()).acall()
            except asyncio.CancelledError:
                await ScriptedService(slow(5.0)).acall()
                cleaned.append(item)
                raise

        task = asyncio.ensure_future(Guard("vendor", bulkhead).amap(work, range(4)))
        for _ in range(3):
            await ScriptedService(slow(1.0)).acall()
            task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), cleaned, bulkhead.in_flight, len(asyncio.all_tasks())

    assert run_virtual(main()) == (True, [0, 1], 0, 1)


@pytest.mark.parametrize("how", ["raised", "cancelled"])
def test_an_item_that_is_cancelled_by_its_own_function_fails_alone(how: str) -> None:
    """The caller of the batch was not cancelled: the other items are answered."""

    async def main() -> tuple[Batch[int, int], int, int]:
        bulkhead = Bulkhead(2)
        guard = Guard("vendor", bulkhead)

        async def work(item: int) -> int:
            await ScriptedService(slow(1.0)).acall()
            if item == 1 and how == "raised":
                raise asyncio.CancelledError
            if item == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await ScriptedService(hang()).acall()
            return item

        batch = await guard.amap(work, range(6))
        return batch, bulkhead.in_flight, len(asyncio.all_tasks())

    batch, in_flight, tasks = run_virtual(main())
    assert [item for item, _ in batch.ok] == [0, 2, 3, 4, 5]
    ((item, error),) = batch.failed
    assert (item, type(error)) == (1, CancelledError)
    assert batch.results[1].elapsed == 1.0
    assert (in_flight, tasks) == (0, 1)
    with pytest.raises(ExceptionGroup):
        batch.unwrap()


# --- Async sources ---


def test_items_of_an_async_source_are_taken_as_there_is_room() -> None:
    """In one task, while items run, and never more than may be held back."""

    async def main() -> tuple[Batch[int, int], int, set[object]]:
        guard = Guard("vendor", Bulkhead(3))
        under_way = Gauge()
        tasks: set[object] = set()
        most = taken = done = 0

        async def source() -> AsyncIterator[int]:
            nonlocal taken, most
            for item in range(20):
                tasks.add(asyncio.current_task())
                await ScriptedService(slow(0.125)).acall()
                taken += 1
                most = max(most, taken - done)
                yield item

        async def work(item: int) -> int:
            nonlocal done
            with under_way:
                await ScriptedService(slow(1.0)).acall()
            done += 1
            return fussy(item)

        batch = await guard.amap(work, source())
        assert under_way.most == 3
        return batch, most, tasks

    batch, most, tasks = run_virtual(main())
    assert batch.items == [*range(20)]
    assert batch.ok == [(n, n * 10) for n in range(20) if n % 3 != 2]
    assert len(batch.failed) == 6
    assert most <= 4
    assert len(tasks) == 1


def test_a_family_and_an_executor_take_async_sources_too() -> None:
    """Also where an item is held back because its key is full."""

    async def source() -> AsyncIterator[int]:
        for item in (0, 0, 1, 0, 1):
            yield item

    async def work(item: int) -> int:
        await ScriptedService(slow(1.0)).acall()
        return item

    async def main() -> None:
        hosts = Guard.family("host", lambda _host: [Bulkhead(1)])
        assert (await hosts.amap(work, source())).unwrap() == [0, 0, 1, 0, 1]
        with IoPool("io", workers=2) as pool:
            assert (await pool.amap(fussy, source())).unwrap() == [0, 0, 10, 0, 10]

    run_virtual(main())


@pytest.mark.parametrize("ends", ["raises", "is cancelled"])
def test_an_async_source_that_fails_ends_the_batch_and_leaves_nothing(ends: str) -> None:
    """Its error comes out when all items have stopped; a cancelled batch ends its source."""

    async def main() -> tuple[int, int, list[str]]:
        bulkhead = Bulkhead(3)
        closed: list[str] = []

        async def source() -> AsyncIterator[int]:
            try:
                yield 1
                await ScriptedService(slow(1.0)).acall()
                if ends == "raises":
                    raise ZeroDivisionError
                await ScriptedService(hang()).acall()
            finally:
                closed.append("closed")

        task = asyncio.ensure_future(
            Guard("vendor", bulkhead).amap(ScriptedService(hang()).acall, source())
        )
        await ScriptedService(slow(2.0)).acall()
        task.cancel()
        with pytest.raises(ZeroDivisionError if ends == "raises" else asyncio.CancelledError):
            await task
        return bulkhead.in_flight, len(asyncio.all_tasks()), closed

    assert run_virtual(main()) == (0, 1, ["closed"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_exit_in_a_thread_ends_the_batch(error, concurrency):
    """What has not begun never does; what runs in other threads ends by itself, and then leaves."""
    bulkhead = Bulkhead(10)
    begun: list[int] = []
    go_on = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise error
        if concurrency > 1:
            assert go_on.wait(WAIT)

    with pytest.raises(error):
        Guard("vendor", bulkhead).map(work, range(50), concurrency=concurrency)
    assert sorted(begun) == [0, 1]
    assert bulkhead.in_flight == concurrency - 1
    go_on.set()
    _wait_until(lambda: not bulkhead.in_flight)


def test_an_item_that_was_given_up_is_not_retried():
    """A thread whose batch has ended makes no further attempt."""
    tried: list[int] = []
    go_on = threading.Event()

    def work(item: int) -> None:
        tried.append(item)
        if item == 1:
            raise KeyboardInterrupt
        assert go_on.wait(WAIT)
        raise ConnectionError

    guard = Guard("vendor", Retry(on=ConnectionError, backoff=0.0, attempts=5))
    with pytest.raises(KeyboardInterrupt):
        guard.map(work, range(2), concurrency=2)
    go_on.set()
    _wait_until(lambda: not _map_threads())
    assert sorted(tried) == [0, 1]


def _map_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "seawall-map-" in thread.name]


def _wait_until(true: Any) -> None:
    done = threading.Event()
    for _ in range(WAIT * 100):
        if true():
            return
        done.wait(0.01)
    pytest.fail("it never came true")


@BOTH
def test_an_error_of_the_source_ends_the_batch(kind):
    """It is raised as it is, and nothing is left running."""
    bulkhead = Bulkhead(2)

    def source() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        mapped(Guard("vendor", bulkhead), kind, source())
    _wait_until(lambda: not bulkhead.in_flight)


def test_threads_end_with_their_batch():
    """No thread is left idle, also if somebody keeps the error that ended it."""
    guard = Guard("vendor", Bulkhead(4))
    guard.map(fussy, range(8))
    _wait_until(lambda: not _map_threads())
    with pytest.raises(ZeroDivisionError) as caught:
        guard.map(fussy, (1 // (3 - n) for n in range(8)))
    _wait_until(lambda: not _map_threads())
    assert caught.value.__traceback__ is not None


def test_an_async_function_is_refused_by_map():
    """It says what to write instead."""
    with pytest.raises(TypeError, match="amap"):
        Guard("vendor", Bulkhead(1)).map(afussy, [1])  # type: ignore[arg-type]


def test_a_batch_in_a_batch_has_threads_of_its_own():
    """They cannot starve each other."""
    outer = Guard("outer", Bulkhead(2))
    inner = Guard("inner", Bulkhead(8))
    batch = outer.map(lambda n: inner.map(fussy, [n, n + 1]).ok, [0, 3, 6])
    assert batch.unwrap() == [[(n, n * 10), (n + 1, n * 10 + 10)] for n in (0, 3, 6)]


def test_retries_of_an_item_are_its_own():
    """A batch is retried item by item."""
    tried: list[int] = []

    def work(item: int) -> int:
        tried.append(item)
        if tried.count(item) < 2:
            raise ConnectionError
        return item

    guard = Guard("vendor", Retry(on=ConnectionError, backoff=0.0), Bulkhead(3))
    batch = guard.map(work, range(5))
    assert batch.unwrap() == [*range(5)]
    assert [result.attempts for result in batch.results] == [2] * 5


# --- Families ---


def _host(item: tuple[str, int]) -> str:
    return item[0]


async def _read(item: tuple[str, int]) -> int:
    await ScriptedService(slow(1.0)).acall()
    if item[0] == "dead":
        raise ConnectionError
    return item[1]


def test_items_of_a_family_go_by_the_guard_of_their_key():
    """A dead key fails by itself: the others are answered, in order."""
    hosts = Guard.family("host", lambda _host: [Breaker(consecutive=2), Bulkhead(2)])
    items = [(host, n) for n in range(5) for host in ("a", "dead", "b")]
    batch = run_virtual(hosts.amap(_read, items, by=_host))
    assert batch.items == items
    assert [item for item, _ in batch.ok] == [item for item in items if item[0] != "dead"]
    assert [type(error) for _, error in batch.failed][-3:] == [CircuitOpen] * 3
    assert len(hosts) == 3


def test_items_of_a_key_that_is_full_wait_and_those_of_others_go_first():
    """Twenty items of one key are not refused by its bulkhead of two, nor hold up another key."""

    async def main():
        hosts = Guard.family("host", lambda _host: [Bulkhead(2)])
        gauges = {"a": Gauge(), "b": Gauge()}
        ended: list[str] = []

        async def work(item: tuple[str, int]) -> int:
            with gauges[item[0]]:
                await ScriptedService(slow(1.0)).acall()
            ended.append(item[0])
            return item[1]

        items = [*(("a", n) for n in range(6)), ("b", 6), *(("a", n) for n in range(7, 20))]
        batch = await hosts.amap(work, items, by=_host, concurrency=8)
        return batch.unwrap(), gauges["a"].most, ended.index("b")

    assert run_virtual(main()) == ([*range(20)], 2, 2)


def test_a_bulkhead_that_keys_share_is_not_overrun():
    """Its bound holds for all of them together."""

    async def main():
        shared = Bulkhead(2)
        hosts = Guard.family("host", lambda _host: [shared])
        work = ScriptedService(slow(1.0, times=None)).acall
        return await hosts.amap(work, range(10))

    assert len(run_virtual(main()).ok) == 10


def test_a_family_maps_in_threads_too():
    """The key is the item itself unless `by` says otherwise."""
    hosts = Guard.family("host", lambda _host: [Bulkhead(1)])
    assert hosts.map(fussy, [0, 1, 0, 2, 0]).ok == [(0, 0), (1, 10), (0, 0), (0, 0)]
    assert set(hosts.guards()) == {0, 1, 2}
    assert hosts.map(fussy, [3, 4], by=str, concurrency=2).unwrap() == [30, 40]


def test_a_batch_of_more_keys_than_a_family_keeps_refuses_none_of_its_items() -> None:
    """Keys of items under way or held back are kept, the others come and go."""

    async def main(most: int) -> tuple[int, int, int]:
        hosts = Guard.family(f"host {most}", lambda _host: [Bulkhead(1)], max_keys=most)
        inside: Counter[int] = Counter()
        overrun = 0

        async def work(item: tuple[int, int]) -> int:
            nonlocal overrun
            inside[item[0]] += 1
            overrun += inside[item[0]] > 1
            await ScriptedService(slow(1.0 + item[1] % 3)).acall()
            inside[item[0]] -= 1
            return item[1]

        chance = Random(most)
        items = [(chance.randrange(40), n) for n in range(300)]
        batch = await hosts.amap(work, items, by=lambda item: item[0])
        assert batch.unwrap() == [*range(300)]
        kept = [member.calls.under_way for member in hosts._members.values()]
        assert not any(kept)
        assert hosts.overflowed == 0 or most < 20
        return len(hosts), 0 if hosts.overflowed else overrun, hosts.evicted

    for most in (1, 2, 5, 20):
        keys, overrun, evicted = run_virtual(main(most))
        assert keys == most
        assert overrun == 0
        assert evicted


def test_a_batch_in_threads_of_more_keys_than_a_family_keeps_works_too() -> None:
    """Each item is called under the guard in whose bulkhead there was room for it."""
    hosts = Guard.family("host", lambda _host: [Bulkhead(1)], max_keys=2)
    items = [n % 9 for n in range(200)]
    assert hosts.map(abs, items).unwrap() == items
    assert len(hosts) == 2


@pytest.mark.parametrize("ends", ["by", "source"])
def test_a_batch_that_ends_early_keeps_no_key(ends: str) -> None:
    """What was held back for it may be forgotten again."""

    def source() -> Iterator[int]:
        yield from (1, 1, 1, 2)
        if ends == "source":
            raise ZeroDivisionError
        yield 0

    async def main() -> list[int]:
        hosts = Guard.family("host", lambda _host: [Bulkhead(1)])
        with pytest.raises(ZeroDivisionError):
            await hosts.amap(ScriptedService(hang()).acall, source(), by=lambda n: 6 // n)
        return [len(member.calls.under_way) for member in hosts._members.values()]

    assert run_virtual(main()) == [0, 0]


def test_a_key_that_cannot_be_found_ends_the_batch():
    """It is an error of whoever wrote `by`, not of the call."""
    hosts = Guard.family("host", lambda _host: [Bulkhead(1)])
    with pytest.raises(ZeroDivisionError):
        hosts.map(fussy, [1, 0, 1], by=lambda n: 1 // n)


@given(
    st.lists(st.sampled_from("abc"), max_size=30),
    st.integers(1, 6),
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3)),
    st.randoms(use_true_random=False),
)
def test_a_schedule_keeps_its_bounds_and_forgets_no_item(keys, concurrency, limits, rng):
    """Whoever ends when: never too many of a gate, nor in all, and each item begins once."""

    def room(key: str) -> Room:
        return Room(key, str, [(ord(key), limits[key])] if key in limits else [])

    schedule = _Schedule(keys, concurrency, room)
    begun: list[int] = []
    running: list[int] = []
    while True:
        while (number := schedule.begin()) is not None:
            begun.append(number)
            running.append(number)
        assert len(running) <= concurrency
        for key, limit in limits.items():
            assert sum(schedule.items[number] == key for number in running) <= limit
        assert len(schedule.items) - len(begun) <= concurrency
        if not running:
            break
        schedule.ended(running.pop(rng.randrange(len(running))))
    assert sorted(begun) == [*range(len(keys))]
    assert schedule.items == keys


# --- Pools ---


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_twenty_items_through_a_pool_of_two_are_all_done(kind):
    """A pool is asked for no more at once than it has workers."""
    pool = IoPool("files", workers=2, max_queue=0)
    try:
        if kind == "sync":
            batch = pool.map(fussy, range(20))
        else:
            batch = run_virtual(pool.amap(fussy, range(20)))
    finally:
        pool.close()
    assert [item for item, _ in batch.ok] == [n for n in range(20) if n % 3 != 2]
    assert {type(error) for _, error in batch.failed} == {ValueError}
    assert pool.snapshot()["rejected"] == 0


def test_processes_take_a_batch_too():
    """The pool's own way, and under a guard."""
    with CpuPool("cpu", workers=2) as cpu:
        assert cpu.map(math.isqrt, [n * n for n in range(20)]).unwrap() == [*range(20)]
        bad = cpu.map(math.isqrt, [4, -1])
        assert (bad.ok, [type(error) for _, error in bad.failed]) == ([(4, 2)], [ValueError])
        guard = Guard("squares", Fallback(static(0)), Bulkhead(cpu.workers))
        batch = guard.map(partial(cpu.run, math.isqrt), [9, -1, 16])
        assert batch.unwrap() == [3, 0, 4]

        async def main() -> Any:
            return await guard.amap(partial(cpu.arun, math.isqrt), [9, -1, 16])

        assert asyncio.run(main()).unwrap() == [3, 0, 4]


def test_a_refused_item_of_a_pool_was_not_attempted():
    """The result says so."""
    pool = IoPool("files", workers=1)
    pool.close()
    batch = pool.map(fussy, [1])
    ((_, result),) = batch
    assert (result.attempts, result.reason) == (0, "rejected")


def test_an_error_of_an_item_goes_with_its_batch():
    """Nothing but the batch keeps it alive."""

    class Lost(Exception):
        count = 0

        def __init__(self) -> None:
            super().__init__()
            Lost.count += 1

        def __del__(self) -> None:
            Lost.count -= 1

    def work(_item: int) -> None:
        raise Lost

    gc.disable()
    try:
        batch = Guard("vendor", Bulkhead(2)).map(work, range(4))
        assert len(batch.failed) == 4
        del batch
        _wait_until(lambda: not Lost.count)
    finally:
        gc.enable()
