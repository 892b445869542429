"""A pool where things come at the wrong moment, hang, or are used as they should not be."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from seawall import TimedOut, current_deadline, deadline
from seawall.clock import VirtualClock
from seawall.errors import PoolExhausted
from seawall.models.histogram import LatencyWindow
from seawall.resources.pool.closing import Closing
from seawall.resources.pool.lending import Lending
from seawall.resources.pool.pool import Pool
from seawall.testing import run_virtual, virtual_time
from tests.support import let_pass

PATIENCE = 150.0


class Wire:
    """A resource that knows whether it is open."""

    made: list[Wire]
    goodbye = 0.0

    def __init__(self) -> None:
        self.open = True
        type(self).made.append(self)

    async def aclose(self) -> None:
        await let_pass(self.goodbye)
        self.open = False


class PlainWire:
    """The same without a loop."""

    made: list[PlainWire]

    def __init__(self) -> None:
        self.open = True
        type(self).made.append(self)

    def close(self) -> None:
        assert self.open
        self.open = False


@pytest.fixture(autouse=True)
def _forget_wires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wire, "goodbye", 0.0)
    Wire.made = []
    PlainWire.made = []


async def connect() -> Wire:
    """Connect, with a turn of the loop in between."""
    await let_pass(0.0)
    return Wire()


def apool_of(size: int, **options: Any) -> Pool[Wire]:
    return Pool(options.pop("connect", connect), name="wires", max_size=size, **options)


def pool_of(size: int, **options: Any) -> Pool[PlainWire]:
    return Pool(options.pop("connect", PlainWire), name="wires", max_size=size, **options)


def open_wires() -> int:
    return sum(wire.open for wire in (*Wire.made, *PlainWire.made))


async def hold(pool: Pool[Wire], seconds: float) -> None:
    async with pool.borrow():
        await let_pass(seconds)


async def use_all(pool: Pool[Wire], count: int) -> None:
    await asyncio.gather(*(hold(pool, 0.25) for _ in range(count)))


# Unfit resources


def test_nobody_waits_for_the_goodbye_of_an_unfit_resource_while_slots_are_free():
    """It is closed on the side, and the borrower gets another one at once."""

    async def main() -> None:
        Wire.goodbye = 99.0
        bad: set[Wire] = set()
        pool = apool_of(10, validate=lambda wire: wire not in bad)
        async with pool.borrow() as wire:
            bad.add(wire)
        await hold(pool, 0.0)
        assert asyncio.get_running_loop().time() == 0.0
        assert (pool.snapshot()["closing"], pool._stock.idle, pool.in_use) == (1, 1, 1)
        await use_all(pool, 9)
        assert (len(Wire.made), pool._stock.size) == (10, 10)

    run_virtual(main())


def test_a_fit_one_among_unfit_ones_is_found_without_waiting():
    """All of the pool's size lie idle, and one of them is good."""

    async def main() -> None:
        Wire.goodbye = 99.0
        pool = apool_of(3, validate=lambda wire: wire is Wire.made[0])
        await use_all(pool, 3)
        async with pool.borrow() as wire:
            assert wire is Wire.made[0]
        assert asyncio.get_running_loop().time() == 0.25
        assert len(Wire.made) == 3

    run_virtual(main())


def test_a_borrower_of_another_loop_evicts_no_more_than_one():
    """It needs room for one resource, however many slots are free."""
    pool = apool_of(4)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(use_all(pool, 4), loop).result(PATIENCE)
        asyncio.run(hold(pool, 0.0))
        assert pool._stock.causes["evicted"] == 1
    finally:
        asyncio.run_coroutine_threadsafe(pool.aclose(), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


@pytest.mark.parametrize("size", [20, 40])
def test_a_hung_validate_takes_its_time_once_for_each_borrower(size: int):
    """After it, the other idle ones are not asked: a new one is connected, or a refusal comes."""

    async def main() -> float:
        hung = False

        async def validate(_wire: Wire) -> bool:
            if hung:
                await let_pass(3600.0)
            return True

        pool = apool_of(size, validate=validate, connect_timeout=5.0, checkout_timeout=1.0)
        await use_all(pool, 20)
        hung = True
        loop = asyncio.get_running_loop()
        began = loop.time()
        await hold(pool, 0.0)
        assert pool.snapshot()["timed_out"] == 1
        assert await pool.aclose()
        return loop.time() - began

    assert run_virtual(main()) == 5.0


def test_slow_validates_share_the_time_of_one_connect():
    """Each answers "no" just in time, and all together they take no longer than one may."""

    async def main() -> None:
        async def validate(_wire: Wire) -> bool:
            await let_pass(2.0)
            return False

        Wire.goodbye = 0.25
        pool = apool_of(20, validate=validate, connect_timeout=5.0, checkout_timeout=1.0)
        await use_all(pool, 20)
        began = asyncio.get_running_loop().time()
        await hold(pool, 0.0)
        # 5 s of validating, and up to the time of a checkout for a goodbye.
        assert asyncio.get_running_loop().time() - began <= 6.0
        assert pool._stock.size <= 20

    run_virtual(main())


def test_without_the_bound_each_idle_resource_takes_its_time(monkeypatch: pytest.MonkeyPatch):
    """Go on asking after the first that hung, and one borrower waits for all of them."""
    monkeypatch.setattr(
        "seawall.resources.pool.lending._Search.doubt",
        property(lambda _: None, _ignore),
        raising=True,
    )
    with pytest.raises(AssertionError):
        test_a_hung_validate_takes_its_time_once_for_each_borrower(20)


def _ignore(_visit: Any, _doubt: str | None) -> None:
    pass


def test_a_deadline_holds_while_a_borrower_waits_for_a_goodbye():
    """It is counted from now, not from when the borrower came."""

    async def main() -> None:
        Wire.goodbye = 2.0
        pool = apool_of(1, validate=lambda _wire: False, checkout_timeout=9.0, close_timeout=9.0)
        first = asyncio.create_task(hold(pool, 4.0))
        await let_pass(1.0)
        with deadline(5.5):  # 3 s for a slot, 2 s for the goodbye
            await hold(pool, 0.0)
        await first

    run_virtual(main())


def test_a_borrower_closes_one_of_many_that_are_too_old():
    """A plain close takes the time of who comes by: not that of all who idled."""
    with virtual_time() as clock:

        def close(wire: PlainWire) -> None:
            wire.open = False
            clock.advance(0.5)

        pool = pool_of(9, idle_timeout=10.0, close=close)
        leases = [pool.borrow() for _ in range(8)]
        for lease in leases:
            lease.__enter__()
        for lease in leases:
            lease.__exit__(None, None, None)
        clock.advance(10.0)
        lease = pool.borrow()
        lease.__enter__()
        assert clock.now() == 10.5
        lease.__exit__(None, None, None)
        assert clock.now() == 11.0
        assert pool.snapshot()["closed"] == {"idle": 2}


def test_a_snapshot_closes_nothing():
    """To read is not to act."""
    with virtual_time() as clock:
        pool = pool_of(3, idle_timeout=10.0)
        with pool.borrow():
            pass
        clock.advance(99.0)
        assert (pool.snapshot()["idle"], open_wires()) == (1, 1)
        assert pool.reap() == 1


# Threads


@pytest.fixture
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_many_switches")
def test_a_snapshot_can_be_taken_while_threads_borrow():
    """What comes back in the middle of it is left out, or listed, and nothing breaks."""
    pool: Pool[dict[str, int]] = Pool(dict, name="busy", max_size=20)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with pool.borrow():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            shown = pool.snapshot()
            assert all(listed["seconds"] >= 0 for listed in shown["borrowers"])
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE)


def test_a_resource_that_comes_back_while_its_listing_is_made_does_no_harm():
    """The instant since when it is out is read once."""
    with virtual_time():
        pool = pool_of(2)
        lease = pool.borrow()
        lease.__enter__()
        borrowed = pool._stock.borrowed

        def meanwhile() -> Any:
            found = borrowed()
            lease.__exit__(None, None, None)
            return found

        pool._stock.borrowed = meanwhile  # type: ignore[method-assign]
        assert pool.snapshot()["borrowers"][0]["seconds"] == 0.0


def _close_in_the_middle_of_a_return(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a pool when a borrower has decided to keep its resource, and not laid it down yet."""
    pool = pool_of(2)
    if method == "take_back":
        with pool.borrow():
            pass  # from now on nobody looks whether there are too many
    lay_down = Lending.put_idle
    answers: list[bool] = []
    closer = threading.Thread(target=lambda: answers.append(pool.close(timeout=PATIENCE)))

    def late(lending: Lending, resource: Any, now: float, borrower: Any) -> None:
        closer.start()
        while not (pool._stock._emptied or answers):
            pass
        lay_down(lending, resource, now, borrower)

    with pool.borrow():
        monkeypatch.setattr(Lending, "put_idle", late)
    closer.join(PATIENCE)
    assert answers == [True]
    assert (open_wires(), pool.in_use) == (0, 0)


@pytest.mark.parametrize("method", ["take_back", "_keep_or_close"])
def test_a_return_that_races_the_end_of_the_pool_is_closed(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    """close() sees it, and waits no longer than it takes."""
    _close_in_the_middle_of_a_return(method, monkeypatch)


def _collect_inside_a_section(patience: float) -> bool:
    """End a block in a section of one thread, a closing in another; tell whether both go on."""
    pool = apool_of(4)
    loop = asyncio.new_event_loop()
    task = loop.create_task(hold(pool, 3600.0))
    loop.run_until_complete(let_pass(0.01))
    borrowed, inside, closing = threading.Event(), threading.Event(), threading.Event()
    slot_back = Closing._slot_back

    def collector() -> None:
        borrowed.wait(PATIENCE)
        with pool.slots.mutex:
            inside.set()
            closing.wait(0.05)  # with one lock the other thread does not come that far
            task.get_coro().close()  # type: ignore[union-attr]

    def slow_slot_back(one: Closing) -> None:
        closing.set()
        pool.slots.attention = True  # as if somebody waited
        slot_back(one)

    async def fail() -> None:
        lease = pool.borrow()
        async with lease:
            borrowed.set()
            inside.wait(PATIENCE)
            lease.discard()
        while not closing.is_set():
            await let_pass(0.0)

    threads = [
        threading.Thread(target=collector, daemon=True),
        threading.Thread(target=lambda: asyncio.run(fail()), daemon=True),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Closing, "_slot_back", slow_slot_back)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    return not any(thread.is_alive() for thread in threads)


def test_a_coroutine_collected_inside_a_section_cannot_block_another_thread():
    """The resources and the slots have one lock: nobody holds the one and wants the other."""
    assert _collect_inside_a_section(PATIENCE)


# Beginning, end, and size


def test_a_smaller_pool_closes_no_more_than_it_must():
    """What is being closed does not count once more among what is too many."""

    async def main() -> None:
        Wire.goodbye = 0.5
        pool = apool_of(10)
        holding = asyncio.create_task(use_all(pool, 10))
        await let_pass(0.125)
        pool.update(max_size=8)
        await holding
        await let_pass(1.0)
        assert pool.snapshot()["closed"] == {"surplus": 2}
        assert (pool._stock.idle, open_wires()) == (8, 8)

    run_virtual(main())


def test_a_pool_that_cannot_be_filled_leaves_nothing_open():
    """`with pool:` closes what it had connected, and raises what connect raised."""

    def third_fails() -> PlainWire:
        if len(PlainWire.made) == 2:
            raise ConnectionError
        return PlainWire()

    async def athird_fails() -> Wire:
        if len(Wire.made) == 2:
            raise ConnectionError
        return await connect()

    with pytest.raises(ConnectionError), pool_of(5, min_size=3, connect=third_fails):
        pass
    assert (len(PlainWire.made), open_wires()) == (2, 0)

    async def main() -> None:
        async with apool_of(5, min_size=3, connect=athird_fails):
            pass

    with pytest.raises(ConnectionError):
        run_virtual(main())
    assert (len(Wire.made), open_wires()) == (2, 0)


def test_to_fill_with_an_async_connect_says_what_to_write():
    """`fill` cannot await it."""
    with pytest.raises(TypeError, match=r"connect is async: write `await pool.afill\(\)`"):
        apool_of(2, min_size=1).fill()


@pytest.mark.parametrize("what", ["closing", "substitute"])
def test_a_plain_close_in_a_loop_sees_what_is_only_on_the_side(what: str):
    """A closing, or a substitute, can only end in the loop that close() would block."""

    async def main() -> None:
        Wire.goodbye = 0.5
        pool = apool_of(1, when_exhausted="degrade", degraded=connect)
        lease, other = pool.borrow(), pool.borrow()
        await lease.__aenter__()
        if what == "substitute":
            await other.__aenter__()
        lease.discard()
        await lease.__aexit__(None, None, None)
        await let_pass(1.0 if what == "substitute" else 0.0)
        with pytest.raises(RuntimeError, match=r"write `await pool.aclose\(\)`"):
            pool.close()
        await other.__aexit__(None, None, None)
        assert await pool.aclose()

    run_virtual(main())


def test_a_loop_that_stands_still_holds_a_slot_for_a_bounded_time():
    """What cannot be closed there counts as failed after twice the time of a closing."""
    clock = VirtualClock()
    pool = apool_of(1, close_timeout=2.0, when_exhausted="fail", clock=clock)
    stopped = asyncio.new_event_loop()
    stopped.run_until_complete(hold(pool, 0.0))

    async def main() -> None:
        waiting = asyncio.create_task(hold(pool, 0.0))
        await let_pass(0.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        clock.advance(3.75)
        with pytest.raises(PoolExhausted):
            await hold(pool, 0.0)
        clock.advance(0.25)
        await hold(pool, 0.0)
        assert pool.snapshot()["close_failed"] == 1
        assert await pool.aclose()

    asyncio.run(main())
    stopped.run_until_complete(let_pass(0.0))  # it goes on after all, and closes what is its own
    assert open_wires() == 0
    assert pool.snapshot()["close_failed"] == 1
    stopped.close()


# Connecting


def test_a_connection_that_is_finished_as_its_borrower_is_cancelled_is_closed():
    """A task made it; nobody took it; it is not lost."""

    async def main() -> None:
        borrower: list[asyncio.Task[None]] = []

        def start() -> asyncio.Task[Wire]:
            making = asyncio.ensure_future(connect())
            making.add_done_callback(lambda _: borrower[0].cancel())
            return making

        pool = apool_of(1, connect=start)
        borrower.append(asyncio.create_task(hold(pool, 0.0)))
        with pytest.raises(asyncio.CancelledError):
            await borrower[0]
        assert len(Wire.made) == 1
        assert await pool.aclose()
        assert (open_wires(), pool.in_use) == (0, 0)
        assert pool.snapshot()["closed"] == {"cancelled": 1}

    run_virtual(main())


def test_a_connect_that_fails_is_told_from_one_that_is_no_longer_wanted():
    """A cancellation is no failure of the other side; nor is a deadline that had passed."""

    async def main() -> None:
        async def never() -> Wire:
            await let_pass(3600.0)
            raise AssertionError

        pool = apool_of(2, connect=never, connect_timeout=2.0)
        task = asyncio.create_task(hold(pool, 0.0))
        await let_pass(1.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert pool.snapshot()["connect_failed"] == 0
        with pytest.raises(TimedOut):
            await hold(pool, 0.0)
        assert pool.snapshot()["connect_failed"] == 1

    run_virtual(main())


def test_a_plain_connect_is_told_its_time_in_a_task_too():
    """Nobody can stop it there either."""
    left: list[float] = []

    def plain() -> PlainWire:
        known = current_deadline()
        assert known is not None
        left.append(known.remaining())
        return PlainWire()

    async def main() -> None:
        async with pool_of(1, connect=plain, connect_timeout=3.0).borrow():
            assert current_deadline() is None

    run_virtual(main())
    assert left == [3.0]


# The time of a borrower


def test_a_plain_block_that_takes_too_long_spoils_its_resource():
    """Nobody could stop it; it is counted, and the resource closed, as in a task."""
    with virtual_time() as clock:
        pool = pool_of(1, read_timeout=1.0, reusable=KeyError)
        with pool.borrow() as wire:
            clock.advance(1.0)
        assert not wire.open

        def slow() -> None:
            clock.advance(5.0)
            raise KeyError

        with pytest.raises(KeyError), pool.borrow():
            slow()
        shown = pool.snapshot()
        assert (shown["timed_out"], shown["closed"], shown["idle"]) == (2, {"late": 2}, 0)


def _rows(pool: Pool[PlainWire]) -> Iterator[int]:
    with pool.borrow():
        yield 1
        yield 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_generators_that_borrow_leave_no_deadline_behind(order: tuple[int, ...]):
    """In whatever order they end: their consumer's own deadline is back."""
    with virtual_time(), deadline(60.0):
        own = current_deadline()
        assert own is not None
        pool = pool_of(3, read_timeout=5.0)
        generators = [_rows(pool) for _ in range(3)]
        for generator in generators:
            next(generator)
        for number in order:
            generators[number].close()  # type: ignore[attr-defined]
        known = current_deadline()
        assert known is not None
        assert known.at == own.at


def test_a_deadline_that_is_over_does_not_come_back():
    """A scope of the consumer may bring it back; the next borrower does not mind it."""
    with virtual_time() as clock:
        pool = pool_of(3, read_timeout=5.0)
        generator = _rows(pool)
        next(generator)
        with deadline(60.0):
            generator.close()  # type: ignore[attr-defined]
        clock.advance(1.0)
        with pool.borrow():
            known = current_deadline()
            assert known is not None
            assert known.remaining() == 5.0
        assert current_deadline() is None


def test_a_lost_lease_leaves_no_deadline_behind():
    """The collector ends what nobody else will."""
    with virtual_time():
        pool = pool_of(3, read_timeout=5.0)
        pool.borrow().__enter__()
        gc.collect()
        assert current_deadline() is None


# Settings and counts


def test_shorter_lives_hold_for_what_exists():
    """Idle ones end within the new limits, counted from the change; so do borrowed ones."""
    with virtual_time() as clock:
        pool = pool_of(3)
        with pool.borrow():
            with pool.borrow():
                pass
            pool.update(idle_timeout=10.0)
            clock.advance(9.0)
            assert pool.reap() == 0
            clock.advance(1.0)
            assert pool.reap() == 1
            pool.update(max_lifetime=20.0)
            clock.advance(20.0)
        assert pool.snapshot()["closed"] == {"idle": 1, "lifetime": 1}


def test_lost_substitutes_are_closed_while_all_else_is_in_use():
    """They take no slot, so they need none to be closed."""
    pool = pool_of(1, when_exhausted="degrade", degraded=PlainWire)
    with pool.borrow():
        for _ in range(50):
            pool.borrow().__enter__()
        assert pool.reap() <= 2
        assert not pool._stock.lost
        assert (open_wires(), pool.in_use) == (1, 1)


def test_reap_counts_its_own(monkeypatch: pytest.MonkeyPatch):
    """What others close at the same time is theirs."""
    with virtual_time() as clock:
        pool = pool_of(3, idle_timeout=10.0)
        with pool.borrow(), pool.borrow():
            pass
        clock.advance(10.0)
        retire = pool._stock.retire

        def meanwhile(*args: Any, **options: Any) -> Any:
            pool._stock.causes["failed"] += 1
            return retire(*args, **options)

        monkeypatch.setattr(pool._stock, "retire", meanwhile)
        assert pool.reap() == 2


def test_a_refusal_costs_little_where_many_borrow(monkeypatch: pytest.MonkeyPatch):
    """The median is not read again for each, and places are looked up for the longest only."""
    with virtual_time():
        pool = pool_of(50, when_exhausted="fail")
        leases = [pool.borrow() for _ in range(50)]
        for lease in leases:
            lease.__enter__()
        reads: list[float] = []
        read = LatencyWindow.quantile

        def counted(window: LatencyWindow, p: float, now: float) -> float | None:
            reads.append(now)
            return read(window, p, now)

        monkeypatch.setattr(LatencyWindow, "quantile", counted)
        for _ in range(50):
            with pytest.raises(PoolExhausted), pool.borrow():
                pass
        assert len(reads) == 1


def test_a_pool_tells_its_name_and_who_waits():
    """`waiting` is the number that the snapshot tells, too."""

    async def main() -> None:
        pool = apool_of(1)
        tasks = [asyncio.create_task(hold(pool, 0.5)) for _ in range(2)]
        await let_pass(0.25)
        shown = pool.snapshot()
        assert (shown["name"], shown["waiting"], pool.waiting) == ("wires", 1, 1)
        await asyncio.gather(*tasks)
        assert pool.waiting == 0

    run_virtual(main())
