"""What Pool does, one behaviour at a time; the rules that hold always are in another file."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from seawall import DeadlineExceeded, TimedOut, current_deadline, deadline, subscribe
from seawall.clock import VirtualClock
from seawall.errors import PoolExhausted
from seawall.events import CallDegraded, CallRejected, ResourceLeaked, SettingsChanged
from seawall.resources.pool.borrowed import Borrowed
from seawall.resources.pool.pool import Pool
from seawall.testing import run_virtual, virtual_time
from tests.support import let_pass


class Wire:
    """A resource that knows whether it is open."""

    made: list[Wire]

    def __init__(self) -> None:
        self.open = True
        type(self).made.append(self)

    def close(self) -> None:
        assert self.open
        self.open = False


@pytest.fixture(autouse=True)
def _forget_wires() -> None:
    Wire.made = []


async def connect() -> Wire:
    """Connect, with a turn of the loop in between."""
    await let_pass(0.0)
    return Wire()


def open_wires() -> int:
    return sum(wire.open for wire in Wire.made)


def pool_of(size: int = 1, **options: Any) -> Pool[Wire]:
    return Pool(options.pop("connect", Wire), name="wires", max_size=size, **options)


def apool_of(size: int = 1, **options: Any) -> Pool[Wire]:
    return pool_of(size, **{"connect": connect, **options})


def listen(*types: Any) -> tuple[list[Any], Callable[[], None]]:
    heard: list[Any] = []
    return heard, subscribe(heard.append, *types)


async def hold(pool: Pool[Wire], seconds: float) -> None:
    async with pool.borrow():
        await let_pass(seconds)


# Lending


def test_a_resource_is_lent_again():
    """What comes back in order is kept for the next borrower."""
    pool = pool_of()
    with pool.borrow() as first:
        assert pool.in_use == 1
    with pool.borrow() as second:
        assert second is first
    assert len(Wire.made) == 1
    assert pool.in_use == 0


def test_an_async_resource_is_lent_again():
    """The same with an async connect."""

    async def main() -> None:
        pool = apool_of()
        async with pool.borrow() as first:
            pass
        async with pool.borrow() as second:
            assert second is first

    run_virtual(main())
    assert len(Wire.made) == 1


def test_the_warmest_is_lent_first():
    """Of several idle ones the one used last is lent, so that the others can age out."""
    pool = pool_of(3)
    with pool.borrow() as cold, pool.borrow() as warm:
        pass  # the inner one comes back first
    with pool.borrow() as lent:
        assert lent is cold
        with pool.borrow() as other:
            assert other is warm


def test_a_function_that_returns_an_awaitable_can_connect():
    """A lambda around an async client is as good as an async def."""

    async def main() -> None:
        pool = apool_of(connect=lambda: connect())  # noqa: PLW0108 - what users write
        async with pool.borrow() as wire:
            assert isinstance(wire, Wire)
        assert pool._stock.stacks[asyncio.get_running_loop()]

    run_virtual(main())


def test_a_plain_connect_serves_tasks_and_threads():
    """What a plain function made belongs to no loop."""
    pool = pool_of()
    with pool.borrow() as first:
        pass

    async def main() -> None:
        async with pool.borrow() as second:
            assert second is first

    run_virtual(main())


def test_an_async_connect_needs_async_with():
    """The message says what to write, and the slot is not lost."""
    pool = apool_of()
    for _ in range(2):
        with pytest.raises(TypeError, match="connect is async: write `async with`"), pool.borrow():
            pass
    assert pool.in_use == 0


def test_a_lease_is_for_one_block():
    """A second use raises, and so does discarding what is not borrowed."""
    pool = pool_of()
    lease = pool.borrow()
    with pytest.raises(RuntimeError, match="inside the block"):
        lease.discard()
    with lease:
        pass
    with pytest.raises(RuntimeError, match=r"write pool.borrow\(\) for each block"), lease:
        pass

    async def main() -> None:
        async with lease:
            pass

    with pytest.raises(RuntimeError, match=r"write pool.borrow\(\) for each block"):
        run_virtual(main())


def test_borrowing_needs_a_task():
    """Without a task nobody could tell whether the borrower was cancelled."""
    step = apool_of().borrow().__aenter__()
    with pytest.raises(RuntimeError, match="inside a task"):
        step.send(None)


def test_reprs_tell_the_state():
    """Pool and lease say what is in use."""
    pool = pool_of(2)
    lease = pool.borrow()
    assert repr(lease) == "<Borrowed of pool 'wires': free>"
    with lease:
        assert repr(pool) == "<Pool 'wires': 1 of 2 in use>"
        assert repr(lease) == "<Borrowed of pool 'wires': borrowed>"


# When all are in use


def test_borrowers_wait_in_order():
    """Who waits longest is served first, and the wait is counted."""
    served: list[int] = []

    async def main() -> dict[str, Any]:
        pool = apool_of(max_waiting=3, checkout_timeout=10.0)

        async def one(number: int) -> None:
            async with pool.borrow():
                served.append(number)
                await let_pass(1.0)

        await asyncio.gather(*(one(number) for number in range(4)))
        return pool.snapshot()

    snapshot = run_virtual(main())
    assert served == [0, 1, 2, 3]
    assert (snapshot["created"], snapshot["borrowed"], snapshot["wait"]["count"]) == (1, 4, 3)


def test_waiting_ends_in_a_refusal_that_names_the_longest_borrower():
    """It says how long it waited, who holds a resource, and when to ask again."""

    async def main() -> PoolExhausted:
        pool = apool_of(checkout_timeout=0.5)
        await hold(pool, 0.25)
        task = asyncio.create_task(hold(pool, 2.0))
        await let_pass(0.25)
        with pytest.raises(PoolExhausted) as caught:
            await hold(pool, 0.0)
        assert asyncio.get_running_loop().time() == 1.0
        await task
        return caught.value

    error = run_virtual(main())
    line = inspect.getsourcelines(hold)[1] + 1
    text = str(error)
    assert text.startswith(
        "pool 'wires': no free resource of 1: waited 0.5 s; the longest borrower, for 0.75 s, is "
    )
    assert text.endswith(f"test_behaviour.py:{line} in hold")
    assert error.retry_after == pytest.approx(0.25, rel=0.05)
    assert (error.guard, error.policy) == ("wires", "pool")


def test_the_queue_is_bounded():
    """Who finds no place to wait is refused at once; the bound is `max_size` unless given."""

    async def main() -> None:
        pool = apool_of(checkout_timeout=10.0)
        tasks = [asyncio.create_task(hold(pool, 1.0)) for _ in range(2)]
        await let_pass(0.5)
        with pytest.raises(PoolExhausted, match="and no room to wait"):
            await hold(pool, 0.0)
        await asyncio.gather(*tasks)

    run_virtual(main())


def test_fail_refuses_at_once():
    """Nobody waits, and the refusal is counted and told."""
    heard, stop = listen(CallRejected)
    pool = pool_of(when_exhausted="fail")
    with (
        pool.borrow(),
        pytest.raises(PoolExhausted, match="all are in use"),
        pool.borrow(),
    ):
        pass
    stop()
    assert pool.snapshot()["rejected"] == 1
    assert [(event.guard, event.policy, event.reason) for event in heard] == [
        ("wires", "pool", "pool_exhausted")
    ]


def test_degrade_lends_a_substitute_for_one_use():
    """It comes on top of the pool's size, and is closed and never pooled."""
    heard, stop = listen(CallDegraded)
    pool = pool_of(when_exhausted="degrade", degraded=Wire)
    with pool.borrow() as own:
        with pool.borrow() as substitute:
            assert substitute is not own
            assert pool.snapshot()["in_flight"] == 2
        assert not substitute.open
    stop()
    with pool.borrow() as again:
        assert again is own
    snapshot = pool.snapshot()
    assert (snapshot["degraded"], snapshot["closed"]) == (1, {"substitute": 1})
    assert [event.reason for event in heard] == ["pool_exhausted"]


def test_an_async_substitute_is_awaited():
    """`degraded` may be async, and it may fail without harm to the pool."""

    async def broken() -> Wire:
        raise ConnectionError

    async def main() -> None:
        pool = apool_of(when_exhausted="degrade", degraded=connect)
        failing = apool_of(when_exhausted="degrade", degraded=broken)
        async with pool.borrow(), pool.borrow() as wire:
            assert wire.open
        async with failing.borrow():
            with pytest.raises(ConnectionError):
                await hold(failing, 0.0)
        assert (failing._stock.substitutes, pool._stock.substitutes) == (set(), set())

    run_virtual(main())


def test_a_deadline_ends_the_wait():
    """The nearer of checkout timeout and deadline counts."""

    async def main() -> None:
        pool = apool_of(checkout_timeout=10.0)
        task = asyncio.create_task(hold(pool, 5.0))
        await let_pass(1.0)
        with deadline(1.0), pytest.raises(DeadlineExceeded, match="passed while waiting"):
            await hold(pool, 0.0)
        assert asyncio.get_running_loop().time() == 2.0
        await task

    run_virtual(main())


def test_nothing_is_lent_after_the_deadline():
    """Expired work never starts, idle resource or not."""
    with virtual_time() as clock:
        pool = pool_of()
        with pool.borrow():
            pass
        with deadline(1.0):
            with pool.borrow():
                pass
            clock.advance(1.0)
            with pytest.raises(DeadlineExceeded), pool.borrow():
                pass
        assert pool.in_use == 0


# Connecting


def test_connecting_is_limited_in_time():
    """An async connect is cancelled; the slot comes back."""

    async def never() -> Wire:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def main() -> dict[str, Any]:
        pool = apool_of(connect=never, connect_timeout=2.0)
        with pytest.raises(TimedOut, match="connect took more than 2 s") as caught:
            await hold(pool, 0.0)
        assert (caught.value.guard, caught.value.seconds) == ("wires", 2.0)
        with deadline(1.0), pytest.raises(TimedOut):
            await hold(pool, 0.0)
        assert asyncio.get_running_loop().time() == 3.0
        assert pool.in_use == 0
        return pool.snapshot()

    snapshot = run_virtual(main())
    assert (snapshot["timed_out"], snapshot["connect_failed"]) == (2, 2)


def test_a_plain_connect_is_told_its_time():
    """Nobody can stop it, but it can read the deadline."""
    left: list[float] = []

    def plain() -> Wire:
        known = current_deadline()
        assert known is not None
        left.append(known.remaining())
        return Wire()

    with virtual_time():
        pool = pool_of(connect=plain, connect_timeout=2.0)
        with pool.borrow():
            assert current_deadline() is None
    assert left == [2.0]


def test_without_limits_a_connect_may_take_for_ever():
    """None means no limit in time, for connecting, idling and living."""

    async def slow() -> Wire:
        assert current_deadline() is None
        await let_pass(1000.0)
        return Wire()

    options = {"connect_timeout": None, "idle_timeout": None, "max_lifetime": None}

    async def main() -> None:
        pool = apool_of(connect=slow, **options)
        await hold(pool, 0.0)
        await let_pass(1e6)
        await hold(pool, 0.0)

    run_virtual(main())
    with pool_of(**options).borrow():
        pass
    assert len(Wire.made) == 2


def test_an_error_of_connect_passes_through():
    """It is the borrower's to handle, and takes no slot."""

    def broken() -> Wire:
        raise ConnectionError("refused")

    pool = pool_of(connect=broken)
    for _ in range(3):
        with pytest.raises(ConnectionError, match="refused"), pool.borrow():
            pass
    assert (pool.in_use, pool._stock.size) == (0, 0)


# Validation


@pytest.mark.parametrize("way", ["plain", "async", "raising", "late"])
def test_an_invalid_resource_is_replaced(way: str):
    """What does not pass is closed, and another one connected."""

    async def check(_wire: Wire) -> bool:
        await let_pass(99.0 if way == "late" else 0.0)
        if way == "raising":
            raise ConnectionError
        return False

    async def main() -> dict[str, Any]:
        pool = apool_of(validate=(lambda _wire: False) if way == "plain" else check)
        async with pool.borrow() as first:
            pass
        async with pool.borrow() as second:
            assert second is not first
            assert not first.open
        return pool.snapshot()

    snapshot = run_virtual(main())
    assert snapshot["closed"] == {"invalid": 1}
    assert snapshot["timed_out"] == (way == "late")


def test_a_valid_resource_is_lent():
    """Each borrow but the first asks once."""
    asked: list[Wire] = []

    def check(wire: Wire) -> bool:
        asked.append(wire)
        return True

    pool = pool_of(validate=check)
    for _ in range(3):
        with pool.borrow():
            pass
    assert asked == [Wire.made[0]] * 2


def test_a_deadline_that_passes_before_validation_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    """The resource stays, and the slot comes back."""
    with virtual_time() as clock:
        pool = pool_of(validate=lambda _wire: True)
        with pool.borrow():
            pass
        lend = pool._stock.lend

        def slow_lend(loop: Any, borrower: Any) -> None:
            clock.advance(1.0)
            lend(loop, borrower)

        monkeypatch.setattr(pool._stock, "lend", slow_lend)
        with deadline(1.0), pytest.raises(DeadlineExceeded), pool.borrow():
            pass
        assert (pool.in_use, pool._stock.idle) == (0, 1)


# Age


def test_idle_resources_are_closed_in_passing():
    """Borrowers that come by close what nobody used for too long, one each; `reap` closes all."""
    with virtual_time() as clock:
        pool = pool_of(3, idle_timeout=10.0)
        with pool.borrow(), pool.borrow(), pool.borrow():
            pass
        clock.advance(9.0)
        with pool.borrow():
            pass
        clock.advance(1.0)
        for left in (2, 1, 1):
            with pool.borrow():
                pass
            assert open_wires() == left
        assert pool.snapshot()["closed"] == {"idle": 2}
        with pool.borrow(), pool.borrow():
            pass
        clock.advance(10.0)
        assert pool.reap() == 2
        assert pool.reap() == 0
        assert open_wires() == 0


def test_a_resource_found_too_old_is_replaced():
    """The borrower that finds it closes it, and connects within the size of the pool."""

    async def main() -> None:
        closing: list[int] = []

        async def close(wire: Wire) -> None:
            closing.append(open_wires())
            await let_pass(0.5)
            wire.close()

        pool = apool_of(idle_timeout=10.0, close=close)
        await hold(pool, 0.0)
        await let_pass(10.0)
        before = asyncio.get_running_loop().time()
        await hold(pool, 0.0)
        assert asyncio.get_running_loop().time() == before + 0.5
        assert (closing, open_wires()) == ([1], 1)

    run_virtual(main())


def test_a_few_stay_whatever_their_idle_time():
    """`min_size` are kept, and lent, though they idled for long."""
    with virtual_time() as clock:
        pool = pool_of(3, min_size=1, idle_timeout=10.0)
        with pool.borrow(), pool.borrow():
            pass
        clock.advance(20.0)
        assert pool.reap() == 1
        with pool.borrow() as wire:
            assert wire in Wire.made[:2]


def test_lifetimes_are_bounded_and_spread():
    """None lives longer than `max_lifetime`, and those made together do not end together."""
    with virtual_time() as clock:
        pool = pool_of(8, idle_timeout=None, max_lifetime=100.0, rng=Random(7))
        leases = [pool.borrow() for _ in range(8)]
        for lease in leases:
            lease.__enter__()
        for lease in leases:
            lease.__exit__(None, None, None)
        clock.advance(90.0)
        alive = []
        for _ in range(11):
            pool.reap()
            alive.append(open_wires())
            clock.advance(1.0)
        assert alive[0] == 8
        assert alive[-1] == 0
        assert len(set(alive)) > 3
        assert pool.snapshot()["closed"] == {"lifetime": 8}


def test_a_borrower_that_outlives_its_resource_does_not_bring_it_back():
    """A resource that got too old while it was out is closed."""
    with virtual_time() as clock:
        pool = pool_of(max_lifetime=10.0)
        with pool.borrow() as wire:
            clock.advance(10.0)
        assert not wire.open
        assert pool.snapshot()["closed"] == {"lifetime": 1}


# Dirty resources


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (KeyError(), "failed"),
        (TimeoutError(), "failed"),
        (KeyboardInterrupt(), "cancelled"),
        (GeneratorExit(), "cancelled"),
        (asyncio.CancelledError(), "cancelled"),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_after_an_error_the_resource_is_closed(error: BaseException, cause: str):
    """Whatever the error, nobody knows in which state it left the resource."""
    pool = pool_of()
    with pytest.raises(type(error)), pool.borrow() as wire:
        raise error
    assert not wire.open
    assert pool.snapshot()["closed"] == {cause: 1}
    assert pool.in_use == 0


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (KeyError(), True),
        (ValueError(), True),
        (TypeError(), False),
        (TimeoutError(), False),
        (KeyboardInterrupt(), False),
        (ExceptionGroup("", [KeyError(), ValueError()]), True),
        (ExceptionGroup("", [KeyError(), TypeError()]), False),
    ],
    ids=repr,
)
def test_some_errors_do_no_harm_to_the_resource(error: BaseException, *, kept: bool):
    """Those that `reusable` names; a group if all its leaves are."""
    pool = pool_of(reusable=(LookupError, ValueError))
    with pytest.raises(type(error)), pool.borrow() as wire:
        raise error
    assert wire.open is kept


def test_a_timeout_always_does_harm():
    """Even where every error is called reusable: a reply may still be on its way."""
    pool = pool_of(reusable=Exception)
    for error in (
        TimeoutError(),
        TimedOut(),
        ExceptionGroup("", [ExceptionGroup("", [TimedOut()])]),
    ):
        with pytest.raises(type(error)), pool.borrow() as wire:
            raise error
        assert not wire.open


def test_a_borrower_can_discard_by_hand():
    """A block that knows better than its end tells has the resource closed."""
    pool = pool_of()
    lease = pool.borrow()
    with lease as wire:
        lease.discard()
    assert not wire.open
    assert pool.snapshot()["closed"] == {"discarded": 1}


# The time of a borrower


def test_a_borrower_is_stopped_when_its_time_is_over():
    """It raises TimedOut, and the resource is closed."""

    async def main() -> dict[str, Any]:
        pool = apool_of(read_timeout=2.0)
        with pytest.raises(TimedOut, match="borrower took more than 2 s"):
            await hold(pool, 99.0)
        assert asyncio.get_running_loop().time() == 2.0
        await hold(pool, 1.0)
        return pool.snapshot()

    snapshot = run_virtual(main())
    assert (snapshot["timed_out"], snapshot["closed"]) == (1, {"cancelled": 1})


def test_a_cancellation_from_elsewhere_is_no_timeout():
    """It passes through as it is."""

    async def main() -> None:
        pool = apool_of(read_timeout=2.0)
        task = asyncio.create_task(hold(pool, 99.0))
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())


def test_a_plain_borrower_is_told_its_time():
    """Its block has a deadline, and the one outside is back at the end."""
    with virtual_time():
        pool = pool_of(read_timeout=2.0)
        with deadline(9.0):
            with pool.borrow():
                known = current_deadline()
                assert known is not None
                assert known.remaining() == 2.0
            known = current_deadline()
            assert known is not None
            assert known.remaining() == 9.0


# Closing


def test_closing_is_done_on_the_side():
    """The borrower goes on at once; the slot is free when the resource is really closed."""

    async def main() -> None:
        async def close(wire: Wire) -> None:
            await let_pass(0.5)
            wire.close()

        pool = apool_of(close=close)
        lease = pool.borrow()
        async with lease:
            lease.discard()
        loop = asyncio.get_running_loop()
        assert loop.time() == 0.0
        assert (pool.in_use, pool.snapshot()["closing"]) == (1, 1)
        await hold(pool, 0.0)
        assert loop.time() == 0.5

    run_virtual(main())


def test_a_closing_knows_nothing_of_the_borrowers_deadline():
    """A guard inside `close` would refuse, if it did."""
    seen: list[object] = []
    pool = pool_of(close=lambda _wire: seen.append(current_deadline()))
    lease = pool.borrow()
    with deadline(1.0), lease:
        lease.discard()
    assert seen == [None]


@pytest.mark.parametrize("way", ["plain", "async", "hung", "stubborn"])
def test_a_closing_that_fails_harms_nobody(way: str, caplog: pytest.LogCaptureFixture):
    """It is logged and counted; the slot comes free in a bounded time."""

    async def slow(_wire: Wire) -> None:
        if way == "async":
            raise OSError("gone")
        while True:
            try:
                await let_pass(30.0)
                break
            except asyncio.CancelledError:
                if way == "hung":
                    raise

    def plain(_wire: Wire) -> None:
        raise OSError("gone")

    async def main() -> float:
        close = plain if way == "plain" else slow
        pool = apool_of(close=close, close_timeout=2.0, checkout_timeout=9.0)
        lease = pool.borrow()
        async with lease:
            lease.discard()
        await hold(pool, 0.0)
        assert pool.snapshot()["close_failed"] == 1
        waited = asyncio.get_running_loop().time()
        await let_pass(60.0)
        return waited

    waited = run_virtual(main())
    assert waited == {"plain": 0.0, "async": 0.0, "hung": 2.0, "stubborn": 4.0}[way]
    assert "pool 'wires': closing a resource failed" in caplog.text


def test_an_async_close_cannot_be_done_by_a_plain_borrower(caplog: pytest.LogCaptureFixture):
    """It is logged with what to do; nothing is left un-awaited."""

    async def close(_wire: Wire) -> None:
        raise AssertionError

    pool = pool_of(close=close)
    lease = pool.borrow()
    with lease:
        lease.discard()
    assert "close is async" in caplog.text
    assert pool.in_use == 0


def test_a_plain_resource_can_have_an_async_close():
    """In an event loop it is closed there."""

    async def main() -> None:
        async def close(wire: Wire) -> None:
            await let_pass(1.0)
            wire.close()

        pool = pool_of(close=close)
        await hold(pool, 0.0)
        assert await pool.aclose()
        assert open_wires() == 0

    run_virtual(main())


def test_without_close_the_resources_own_method_is_called():
    """An async resource's `aclose` comes first; what has no method is dropped."""
    called: list[str] = []

    class Client:
        async def aclose(self) -> None:
            called.append("aclose")

        def close(self) -> None:
            called.append("close")

    async def make() -> Client:
        return Client()

    async def main() -> None:
        for connect in (make, Client, object):
            pool: Pool[Any] = Pool(connect, name="clients", max_size=1)
            async with pool.borrow():
                pass
            assert await pool.aclose()

    run_virtual(main())
    assert called == ["aclose", "close"]


# The pool's own beginning and end


def test_a_pool_is_filled_and_closed_by_with():
    """`min_size` are connected at the beginning, and all closed at the end."""
    with pool_of(3, min_size=2) as pool:
        assert (open_wires(), pool._stock.idle, pool.in_use) == (2, 2, 0)
        pool.fill()
        assert open_wires() == 2
    assert open_wires() == 0

    async def main() -> None:
        async with apool_of(3, min_size=2) as pool:
            assert (open_wires(), pool._stock.idle, pool.in_use) == (2, 2, 0)
        assert open_wires() == 0

    run_virtual(main())


def test_a_pool_that_cannot_be_filled_says_so():
    """The error of connect passes through, and no slot is lost."""
    wires = [Wire()]
    pool = pool_of(3, min_size=2, connect=wires.pop)
    with pytest.raises(IndexError):
        pool.fill()
    assert (pool.in_use, pool._stock.idle) == (0, 1)


def test_two_who_fill_a_pool_do_not_fill_it_twice():
    """Who finds that others were faster gives its slot back."""

    async def slow() -> Wire:
        await let_pass(1.0)
        return Wire()

    async def main() -> None:
        pool = apool_of(3, connect=slow, min_size=2)
        await asyncio.gather(*(pool.afill() for _ in range(3)))
        assert (open_wires(), pool._stock.idle, pool.in_use) == (2, 2, 0)
        assert len(pool.slots.free) == 3

    run_virtual(main())


def test_a_filler_that_is_overtaken_gives_its_slot_back(monkeypatch: pytest.MonkeyPatch):
    """Another thread may connect between its look and its turn."""
    pool = pool_of(3, min_size=2)
    monkeypatch.setattr(pool._stock, "reserve", lambda _most: None)
    pool.fill()
    assert (pool.in_use, len(pool.slots.free)) == (0, 3)


def test_closing_waits_for_borrowers():
    """Who borrowed may finish; who waits or comes later is refused."""

    async def main() -> None:
        pool = apool_of(2, checkout_timeout=9.0)
        tasks = [asyncio.create_task(hold(pool, 2.0)) for _ in range(3)]
        await let_pass(1.0)
        assert await pool.aclose()
        assert asyncio.get_running_loop().time() == 2.0
        assert open_wires() == 0
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(result) for result in results] == ["None", "None", "pool 'wires' is closed"]
        with pytest.raises(PoolExhausted, match="is closed"):
            await hold(pool, 0.0)
        assert await pool.aclose()

    run_virtual(main())


def test_closing_does_not_wait_for_ever():
    """After its time it closes what is borrowed, and says so; nothing is closed twice."""

    async def main() -> None:
        pool = apool_of(2)
        task = asyncio.create_task(hold(pool, 30.0))
        await let_pass(1.0)
        assert not await pool.aclose(timeout=3.0)
        assert asyncio.get_running_loop().time() == 4.0
        assert open_wires() == 0
        await task
        assert pool.in_use == 0
        assert await pool.aclose()

    run_virtual(main())


def test_who_connects_while_the_pool_closes_gets_nothing():
    """The new resource is closed, or never lent."""

    async def slow() -> Wire:
        await let_pass(2.0)
        return Wire()

    async def main() -> None:
        pool = apool_of(connect=slow)
        task = asyncio.create_task(hold(pool, 0.0))
        await let_pass(1.0)
        assert await pool.aclose()
        with pytest.raises(PoolExhausted, match="is closed"):
            await task
        assert (open_wires(), pool.in_use) == (0, 0)

    run_virtual(main())


def test_a_plain_close_closes_a_plain_pool():
    """It waits in its thread, on the pool's clock."""
    with virtual_time() as clock:
        pool = pool_of()
        lease = pool.borrow()
        lease.__enter__()
        assert not pool.close(timeout=3.0)
        assert clock.now() == 3.0
        lease.__exit__(None, None, None)
        assert (open_wires(), pool.in_use) == (0, 0)


def test_a_plain_close_in_the_loop_of_its_resources_says_what_to_write():
    """It would wait for the very loop that it stops."""

    async def main() -> None:
        pool = apool_of()
        await hold(pool, 0.0)
        with pytest.raises(RuntimeError, match=r"write `await pool.aclose\(\)`"):
            pool.close()
        assert await pool.aclose()

    run_virtual(main())


# Leaks


def test_a_leak_is_reported_once_with_the_line_that_borrowed(caplog: pytest.LogCaptureFixture):
    """Whoever comes by reports it: another borrower, `reap`, or a snapshot."""
    heard, stop = listen(ResourceLeaked)
    with virtual_time() as clock:
        pool = pool_of(2, leak_after=10.0)
        lease = pool.borrow()
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        lease.__enter__()
        clock.advance(9.0)
        pool.reap()
        assert heard == []
        clock.advance(1.0)
        with pool.borrow():
            pass
        pool.reap()
        (listed,) = pool.snapshot()["borrowers"]
        lease.__exit__(None, None, None)
    stop()
    place = f"{__file__}:{line} in {inspect.currentframe().f_code.co_name}"  # type: ignore[union-attr]
    assert [event.fields() for event in heard] == [
        {"guard": "wires", "borrowed_at": place, "seconds": 10.0}
    ]
    assert listed == {"borrowed_at": place, "seconds": 10.0}
    assert f"borrowed at {place} is out for 10 s" in caplog.text
    assert pool.snapshot()["leaked"] == 1


def test_a_lease_that_is_lost_gives_its_resource_back():
    """The garbage collector frees the slot; the next borrower closes the resource and tells."""
    heard, stop = listen(ResourceLeaked)
    pool = pool_of(when_exhausted="fail")
    lease = pool.borrow()
    lost = lease.__enter__()
    del lease
    gc.collect()
    assert (pool.in_use, lost.open, heard) == (0, True, [])
    with pool.borrow() as wire:
        assert wire is not lost
    stop()
    assert not lost.open
    assert [event.guard for event in heard] == ["wires"]
    assert pool.snapshot()["closed"] == {"leaked": 1}


def test_without_a_look_at_lost_leases_the_slot_is_gone(monkeypatch: pytest.MonkeyPatch):
    """Let a lease die in silence, and its slot never comes back."""
    monkeypatch.setattr(Borrowed, "__del__", lambda _lease: None)
    pool = pool_of(when_exhausted="fail")
    pool.borrow().__enter__()
    gc.collect()
    with pytest.raises(PoolExhausted), pool.borrow():
        pass


def test_a_lost_substitute_is_closed_too():
    """It takes no slot, so none comes back."""
    # On a clock of its own: a long collection would let the pool look for itself in passing.
    pool = pool_of(when_exhausted="degrade", degraded=Wire, clock=VirtualClock())
    with pool.borrow():
        lease = pool.borrow()
        lease.__enter__()
        del lease
        gc.collect()
    assert pool.reap() == 1
    assert len(pool.slots.free) == 1
    assert open_wires() == 1


def test_a_coroutine_that_is_thrown_away_gives_its_resource_back():
    """The block is left as by a cancellation."""

    async def main() -> None:
        pool = apool_of()
        work = hold(pool, 99.0)
        step = asyncio.current_task()
        assert step is not None
        await hold(pool, 0.0)
        work.send(None)
        assert pool.in_use == 1
        work.close()
        assert pool.in_use == 0
        assert pool.snapshot()["closed"] == {"cancelled": 1}

    run_virtual(main())


# Settings


def test_settings_change_at_run_time():
    """A smaller pool closes what is too many, as it comes back; a larger one lends more."""
    heard, stop = listen(SettingsChanged)
    pool = pool_of(3, when_exhausted="fail")
    with pool.borrow(), pool.borrow():
        with pool.borrow():
            pass
        pool.update(max_size=1)
        assert open_wires() == 2
    assert open_wires() == 1
    assert pool.snapshot()["closed"] == {"surplus": 2}
    pool.update(max_size=2)
    with pool.borrow(), pool.borrow():
        assert open_wires() == 2
    stop()
    assert [event.changes for event in heard] == [{"max_size": 1}, {"max_size": 2}]


def test_bad_settings_change_nothing():
    """The message says what to write."""
    pool = pool_of(2)
    with pytest.raises(ValueError, match="max_size=0: write 1 or more"):
        pool.update(checkout_timeout=9.0, max_size=0)
    with pytest.raises(TypeError, match=r"Pool.update\(size\): it takes max_size, min_size"):
        pool.update(size=3)
    with pytest.raises(TypeError, match=r"Pool.update\(\): it takes"):
        pool.update()
    with pytest.raises(ValueError, match="pass degraded="):
        pool.update(when_exhausted="degrade")
    assert (pool.settings.max_size, pool.settings.checkout_timeout) == (2, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "Pool(name=''): write a name, such as 'database'"),
        ({"name": 3}, "Pool(name=3): write a name, such as 'database'"),
        ({"connect": 3}, "connect=3: pass a function"),
        ({"close": 3}, "close=3: pass a function"),
        ({"validate": True}, "validate=True: pass a function"),
        ({"degraded": 3}, "degraded=3: pass a function"),
        ({"max_size": 0}, "max_size=0: write 1 or more"),
        ({"max_size": 10**7}, "max_size=10000000: write 1000000 or less"),
        ({"min_size": 2}, "min_size=2: write at most max_size, 1"),
        ({"connect_timeout": 0}, "connect_timeout=0: write finite seconds, more than 0"),
        ({"read_timeout": -1}, "read_timeout=-1: write finite seconds"),
        ({"idle_timeout": 0}, "idle_timeout=0: write finite seconds"),
        ({"checkout_timeout": 0}, "checkout_timeout=0: write finite seconds"),
        ({"close_timeout": 0}, "close_timeout=0: write finite seconds"),
        ({"max_lifetime": 0}, "max_lifetime=0: write finite seconds"),
        ({"leak_after": 0}, "leak_after=0: write finite seconds"),
        ({"when_exhausted": "panic"}, "when_exhausted='panic': write one of 'wait', 'fail'"),
        ({"when_exhausted": "degrade"}, "pass degraded="),
        ({"max_waiting": 0}, "max_waiting=0: write 1 or more"),
        ({"order": "best"}, "order='best': write one of"),
        ({"reusable": ValueError()}, "write classes of errors, such as reusable=ValueError"),
        ({"reusable": (KeyboardInterrupt,)}, "write classes of errors"),
        ({"rng": Random}, "pass a random.Random"),
        ({"clock": VirtualClock}, "pass a clock"),
    ],
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], message: str):
    """Each message says what to write instead."""
    arguments = {"connect": Wire, "name": "wires", "max_size": 1, **options}
    with pytest.raises((TypeError, ValueError)) as caught:
        Pool(arguments.pop("connect"), **arguments)
    assert message in str(caught.value)


# Figures


def test_advice_follows_littles_law():
    """Ten borrows a second of 0.4 s each keep four in use, and need six."""

    async def main() -> list[Any]:
        pool = apool_of(10)
        before = pool.advice()
        tasks = []
        for _ in range(100):
            tasks.append(asyncio.create_task(hold(pool, 0.4)))
            await let_pass(0.1)
        await asyncio.gather(*tasks)
        return [before, pool.advice()]

    before, after = run_virtual(main())
    assert (before.size, before.use_time) == (10, None)
    assert str(before).startswith("too little is known: 0 borrows lately")
    assert after.size == 6
    assert after.throughput == pytest.approx(10.0, rel=0.05)
    assert after.use_time == pytest.approx(0.4)
    assert str(after).endswith("max_size=10 is enough, and could be lowered")


def test_a_snapshot_tells_what_there_is():
    """Counts, times and borrowers, by the names that the page gives."""
    with virtual_time() as clock:
        pool = pool_of(2)
        with pool.borrow():
            clock.advance(0.5)
        with pool.borrow():
            clock.advance(0.25)
            snapshot = pool.snapshot()
    assert [snapshot[name] for name in ("limit", "in_flight", "idle", "closing", "waiting")] == [
        2,
        1,
        0,
        0,
        0,
    ]
    assert (snapshot["borrowed"], snapshot["created"]) == (1, 1)
    assert snapshot["use"]["p50"] == pytest.approx(0.5, rel=0.05)
    assert [borrower["seconds"] for borrower in snapshot["borrowers"]] == [0.25]
