"""A pool among threads, event loops and processes."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from seawall.errors import PoolExhausted
from seawall.resources.pool.pool import Pool
from seawall.resources.pool.stock import Stock
from seawall.testing import run_virtual
from tests.support import let_pass, settled

PATIENCE = 150.0


class Wire:
    """A resource that notes the loop it was made in, and who uses it."""

    def __init__(self) -> None:
        self.loop = asyncio._get_running_loop()
        self.open = True
        self.lock = threading.Lock()

    def close(self) -> None:
        assert self.open
        self.open = False


async def connect() -> Wire:
    """Connect in the current loop."""
    return Wire()


@contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


def do_in(loop: asyncio.AbstractEventLoop, work: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)


async def borrow(pool: Pool[Wire]) -> Wire:
    async with pool.borrow() as wire:
        assert wire.open
        assert wire.loop is asyncio.get_running_loop()
        return wire


def run_threads(count: int, work: Any) -> None:
    """Run `work(number)` in so many threads; raise what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


def test_threads_share_a_pool():
    """No resource is in two hands, never are there more than `max_size`, and nobody is lost."""
    made: list[Wire] = []

    def make() -> Wire:
        wire = Wire()
        made.append(wire)
        assert sum(wire.open for wire in made) <= 3
        return wire

    options: dict[str, Any] = {"checkout_timeout": PATIENCE, "max_waiting": 100}
    pool: Pool[Wire] = Pool(make, name="shared", max_size=3, **options)

    def work(number: int) -> None:
        for cycle in range(200):
            lease = pool.borrow()
            with lease as wire:
                assert wire.lock.acquire(blocking=False)
                wire.lock.release()
                if (cycle + number) % 7 == 0:
                    lease.discard()

    run_threads(8, work)
    snapshot = pool.snapshot()
    assert (snapshot["borrowed"], snapshot["in_flight"], pool.in_use) == (1600, 0, 0)
    assert len(pool.slots.free) == 3
    assert pool._stock.size == pool._stock.idle == sum(wire.open for wire in made)
    assert snapshot["created"] - snapshot["closed"]["discarded"] == pool._stock.idle
    assert pool.close()
    assert not any(wire.open for wire in made)


def test_loops_share_a_pool_but_no_resource():
    """Tasks of several loops compete for the same few slots; each gets one of its own loop."""
    made: list[Wire] = []
    most: Counter[str] = Counter()
    counting = threading.Lock()

    async def make() -> Wire:
        await asyncio.get_running_loop().run_in_executor(None, int)
        wire = Wire()
        with counting:
            made.append(wire)
            alive = sum(wire.open and not wire.loop.is_closed() for wire in made)
            most["open"] = max(most["open"], alive)
        return wire

    options: dict[str, Any] = {"checkout_timeout": PATIENCE, "max_waiting": 1000}
    pool: Pool[Wire] = Pool(make, name="loops", max_size=3, **options)

    def work(_number: int) -> None:
        async def main() -> None:
            for _ in range(10):
                await asyncio.gather(*(borrow(pool) for _ in range(5)))

        asyncio.run(main())

    run_threads(3, work)
    assert most["open"] <= 3
    assert pool.in_use == 0
    assert pool.snapshot()["borrowed"] == 150


def test_an_idle_resource_of_another_loop_is_closed_there():
    """It makes room for one of this loop, which waits until it is closed."""
    closed_in: list[Any] = []

    async def close(wire: Wire) -> None:
        closed_in.append(asyncio.get_running_loop())
        wire.close()

    pool: Pool[Wire] = Pool(connect, name="loops", max_size=1, close=close)
    with loop_in_a_thread() as first, loop_in_a_thread() as second:
        theirs = do_in(first, borrow(pool))
        ours = do_in(second, borrow(pool))
        assert (theirs.open, ours.open) == (False, True)
        assert closed_in == [first]
        assert do_in(second, borrow(pool)) is ours
        assert pool.snapshot()["closed"] == {"evicted": 1}
        assert pool.close()  # from a third thread
    assert closed_in == [first, second]
    assert not ours.open


def test_resources_of_a_closed_loop_are_forgotten():
    """A program may call asyncio.run() several times with the same pool."""
    pool: Pool[Wire] = Pool(connect, name="runs", max_size=1, when_exhausted="fail")
    wires = [run_virtual(borrow(pool)) for _ in range(3)]
    assert len(set(wires)) == 3
    assert pool.snapshot()["closed"] == {"loop closed": 3}
    assert (pool._stock.size, pool.in_use) == (0, 0)


def test_without_stacks_for_each_loop_a_resource_goes_astray(monkeypatch: pytest.MonkeyPatch):
    """Keep all idle resources together, and one loop gets another's."""
    monkeypatch.setattr(Stock, "belongs_to", lambda *_: None)
    pool: Pool[Wire] = Pool(connect, name="astray", max_size=1)
    run_virtual(borrow(pool))
    with pytest.raises(AssertionError):
        run_virtual(borrow(pool))


def test_a_loop_that_is_closed_in_mid_use_takes_no_slot_with_it():
    """Neither a borrower nor a closing that it leaves behind holds one for ever."""

    async def hang(_wire: Wire) -> None:
        await asyncio.get_running_loop().create_future()

    pool: Pool[Wire] = Pool(connect, name="cut", max_size=2, close=hang, when_exhausted="fail")
    begun = threading.Event()

    async def stay() -> None:
        async with pool.borrow():
            begun.set()
            await asyncio.get_running_loop().create_future()

    async def spoil() -> None:
        lease = pool.borrow()
        async with lease:
            lease.discard()

    loop = asyncio.new_event_loop()
    task = loop.create_task(stay())
    loop.run_until_complete(spoil())
    assert pool.in_use == 2
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    for closing in pool._stock.closing.values():
        closing._task._log_destroy_pending = False  # type: ignore[union-attr]
    del task, closing, loop
    gc.collect()
    assert run_virtual(borrow(pool)).open
    assert pool.in_use == 0


async def borrow_from(kind: str) -> float:
    """Borrow while another loop has the only resource; return how long that took.

    That loop does not run any more, and is closed a second later, or never.
    """
    options: dict[str, Any] = {"checkout_timeout": 20, "close_timeout": 2, "max_waiting": 5}
    pool: Pool[Wire] = Pool(connect, name="left", max_size=1, **options)
    loop, here = asyncio.new_event_loop(), asyncio.get_running_loop()
    run_threads(1, lambda _: loop.run_until_complete(borrow(pool)))
    began = here.time()
    try:
        if kind != "stands still":
            here.call_later(1.0, loop.close)
        task = asyncio.ensure_future(borrow(pool))
        if kind == "another waits for it":
            first, task = task, asyncio.ensure_future(borrow(pool))
            here.call_later(0.1, first.cancel)
        await task
        assert pool.in_use == 0
        return here.time() - began
    finally:
        loop.close()


KINDS = {"waits for it": 1.25, "another waits for it": 1.25, "stands still": 4.0}


@pytest.mark.parametrize("kind", KINDS)
def test_who_waits_for_a_loop_that_ends_goes_on_soon(kind: str):
    """It had a resource to close, and nobody says that it never will."""
    took = run_virtual(borrow_from(kind))
    assert KINDS[kind] - 0.26 <= took <= KINDS[kind] + 0.51


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_look_around_it_waits_to_the_end(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Ablation: wake up, and see nothing."""
    monkeypatch.setattr(Stock, "forget_closed_loops", lambda _: 0)
    with pytest.raises(PoolExhausted, match="waited 20 s"):
        run_virtual(borrow_from(kind))


@pytest.mark.parametrize("awaited", [True, False], ids=["async connect", "plain connect"])
def test_a_closing_that_begins_while_one_waits_is_looked_after(*, awaited: bool):
    """Its loop ends before it is over; who waits had come before there was anything to see."""
    goes_on, ended = threading.Event(), threading.Event()

    async def slowly() -> Wire:
        await asyncio.to_thread(goes_on.wait, PATIENCE)
        return Wire()

    async def hang(_wire: Wire) -> None:
        await asyncio.get_running_loop().create_future()

    options: dict[str, Any] = {"checkout_timeout": PATIENCE, "max_waiting": 5, "close": hang}
    made: Any = slowly if awaited else Wire
    pool: Pool[Wire] = Pool(made, name="late", max_size=1, **options)

    async def fail() -> None:
        async with pool.borrow():
            await asyncio.to_thread(goes_on.wait, PATIENCE)
            raise ValueError("spoilt")

    def other(_number: int) -> None:
        loop = asyncio.new_event_loop()
        with pytest.raises(ValueError, match="spoilt"):
            loop.run_until_complete(fail())
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        ended.set()

    async def wait() -> None:
        borrowing = asyncio.ensure_future(borrow_any(pool))
        while not pool.slots.waiting:
            await let_pass(0.001)
        goes_on.set()
        await borrowing

    thread = threading.Thread(target=other, args=(0,))
    thread.start()
    while not pool.in_use:
        pass
    asyncio.run(asyncio.wait_for(wait(), PATIENCE / 2))
    thread.join(PATIENCE)
    assert ended.is_set()
    gc.collect()


async def borrow_any(pool: Pool[Wire]) -> None:
    async with pool.borrow():
        pass


def test_who_looks_around_keeps_its_place():
    """Of two who wait for long, the first is served first."""
    pool: Pool[Wire] = Pool(connect, name="places", max_size=2, checkout_timeout=20, max_waiting=5)
    loop = asyncio.new_event_loop()
    task = loop.create_task(_keep(pool, (stop := asyncio.Event())))
    loop.run_until_complete(let_pass(0.0))
    served: list[int] = []

    async def one(number: int) -> None:
        async with pool.borrow():
            served.append(number)

    async def main() -> None:
        async with pool.borrow():
            waiting = []
            for number in range(3):
                waiting.append(asyncio.ensure_future(one(number)))
                await let_pass(0.3)
            await let_pass(5.0)
        await asyncio.gather(*waiting)

    run_virtual(main())
    assert served == [0, 1, 2]
    stop.set()
    loop.run_until_complete(task)
    loop.close()
    assert pool.in_use == 0


async def _keep(pool: Pool[Wire], stop: asyncio.Event) -> None:
    async with pool.borrow():
        await stop.wait()


def test_a_waiter_of_one_thread_is_served_by_another():
    """A thread that waits gets the resource that another thread's block gives back."""
    pool: Pool[Wire] = Pool(Wire, name="hand", max_size=1, checkout_timeout=PATIENCE)
    got: list[Wire] = []

    def wait() -> None:
        with pool.borrow() as wire:
            got.append(wire)

    waiter = threading.Thread(target=wait)
    with pool.borrow() as wire:
        waiter.start()
        while not pool.slots.waiting:
            pass
    waiter.join(PATIENCE)
    assert got == [wire]


def test_a_task_waits_for_a_resource_of_a_thread():
    """Threads and tasks share a plain pool, and wake each other."""
    pool: Pool[Wire] = Pool(Wire, name="mixed", max_size=1, checkout_timeout=PATIENCE)

    async def wait() -> Wire:
        async with pool.borrow() as wire:
            return wire

    with loop_in_a_thread() as loop:
        with pool.borrow() as wire:
            waiting = asyncio.run_coroutine_threadsafe(wait(), loop)
            while not pool.slots.waiting:
                pass
        assert waiting.result(PATIENCE) is wire


def test_a_waiter_whose_loop_is_closed_is_passed_over():
    """The slot goes to the next."""
    pool: Pool[Wire] = Pool(Wire, name="gone", max_size=1, max_waiting=5)
    lease = pool.borrow()
    lease.__enter__()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        async with pool.borrow():
            pass

    task = loop.create_task(wait())
    loop.run_until_complete(let_pass(0.0))
    assert pool.slots.waiting == 1
    loop.close()
    lease.__exit__(None, None, None)
    assert pool.in_use == 0
    task._log_destroy_pending = False  # type: ignore[attr-defined]


# The garbage collector


def test_a_lease_collected_inside_a_section_gives_back_later():
    """The collector may come while the pool's own locks are held, and must not block on them."""
    pool: Pool[Wire] = Pool(Wire, name="collected", max_size=1)
    lease = pool.borrow()
    lease.__enter__()
    with pool._stock.mutex, pool.slots.mutex:
        del lease
        gc.collect()
    settled(pool.slots.mutex)
    assert pool.in_use == 0
    with pool.borrow():
        pass
    assert pool.snapshot()["closed"] == {"leaked": 1}


# Processes


def _in_a_child(work: Any) -> int:
    """Do `work` in a forked child; return 0 if it returned True."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _child_of_a_pool_in_use() -> int:
    pool: Pool[Wire] = Pool(Wire, name="forked", max_size=2, when_exhausted="fail")
    with pool.borrow(), pool.borrow() as idle:
        pass
    lease = pool.borrow()
    borrowed = lease.__enter__()

    def child() -> bool:
        with pool.borrow() as first, pool.borrow() as second:
            fresh = not {first, second} & {idle, borrowed}
        lease.__exit__(KeyError, KeyError(), None)  # as the block that was forked would end
        with pool.borrow() as third, pool.borrow() as fourth:
            fresh = fresh and {third, fourth} == {first, second}
            try:
                with pool.borrow():
                    return False
            except PoolExhausted:
                pass
        return fresh and idle.open and borrowed.open

    code = _in_a_child(child)
    lease.__exit__(None, None, None)
    with pool.borrow() as again:
        assert again is borrowed
    return code


def test_a_child_process_uses_none_of_its_parents_resources():
    """It forgets them without closing them: the parent goes on using them."""
    assert _child_of_a_pool_in_use() == 0


def test_without_forgetting_the_child_uses_its_parents(monkeypatch: pytest.MonkeyPatch):
    """Know nothing of forks, and the child talks on its parent's connection."""
    monkeypatch.setattr(Stock, "_after_fork", lambda _stock: None)
    assert _child_of_a_pool_in_use() != 0
