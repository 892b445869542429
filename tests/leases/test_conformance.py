"""What a lease promises, on every store that keeps leases, by every driver."""

from __future__ import annotations

import asyncio
import os
import threading
from random import Random
from typing import Any

import pytest

from seawall import TimedOut, deadline
from seawall.durable import Database, Sqlite
from seawall.errors import LeaseLost, StoreUnavailable
from seawall.leases import Lease
from seawall.leases import lease as leasing
from seawall.leases.lease import ReleaseBell
from tests.leases.harness import LONG, SOON, Hands, Idle, events
from tests.leases.sites import AWAITED, BLOCKING, Site, run
from tests.support import let_pass

__all__ = ["events"]  # a fixture


@pytest.fixture
def by_hand(monkeypatch):
    """Switch off automatic renewal."""
    from seawall.durable.database.leases import DatabaseLease
    from seawall.redis.lease import RedisLease

    for share in (DatabaseLease, RedisLease):
        monkeypatch.setattr(share, "every", lambda _share, _seconds, _job: Idle())


async def eventually(is_so: Any) -> None:
    async with asyncio.timeout(SOON):
        while not is_so():
            await let_pass(0.01)


async def two(site: Site, name: str, **options: Any) -> tuple[Lease, Lease]:
    """Return two leases of one name, of two pods."""
    return (
        Lease(await site.pod(), name, **{"ttl": LONG, **options}),
        Lease(await site.pod(), name, ttl=LONG),
    )


# Holding and waiting


def test_one_holds_it_and_others_do_not(site: Site, events):
    """A second pod is refused while the first holds it, and gets a higher token afterwards."""

    async def scenario():
        one, other = await two(site, "report")
        assert await one.atry_acquire()
        assert one.held
        assert 0 < one.left <= LONG
        assert not await other.atry_acquire()
        with pytest.raises(LeaseLost, match="'report' is not held"):
            other.check()
        one.check()
        first = one.token
        assert await one.arelease()
        assert not one.held
        assert one.token == first
        assert await other.aacquire(0) > first
        assert repr(other) == f"<Lease 'report': held, token {other.token}>"
        assert other.snapshot()["held"]
        assert await other.arelease()
        changes = [(event.held, event.cause) for event in events]
        assert changes == [(True, "acquired"), (False, "released")] * 2

    run(site, scenario)


def test_names_are_apart(site: Site):
    """Leases of other names, whatever is in a name, are not disturbed."""

    async def scenario():
        pod = await site.pod()
        leases = [Lease(pod, name, ttl=LONG) for name in ("a", "A", "a ", "é'\"{};--", "x" * 300)]
        for lease in leases:
            assert await lease.atry_acquire()
        assert all(lease.held for lease in leases)
        for lease in leases:
            assert await lease.arelease()

    run(site, scenario)


def test_a_block_holds_it_and_gives_it_back(site: Site):
    """`async with` takes it and gives it back, also when the block fails."""

    async def scenario():
        lease = Lease(await site.pod(), "block", ttl=LONG)
        async with lease as entered:
            assert entered is lease
            assert lease.held
        assert not lease.held
        with pytest.raises(ZeroDivisionError):
            async with lease:
                raise ZeroDivisionError
        assert await lease.atry_acquire()
        assert await lease.arelease()

    run(site, scenario)


def test_waiting_ends_in_time(site: Site):
    """After the timeout, or at the deadline, a waiting caller hears that others hold the lease."""

    async def scenario():
        one, other = await two(site, "late")
        await one.aacquire()
        with pytest.raises(TimedOut, match="'late' was held by others"):
            await other.aacquire(0)
        with pytest.raises(TimedOut):
            await other.aacquire(0.3)
        with deadline(0.3), pytest.raises(TimedOut):
            await other.aacquire()
        assert await one.arelease()

    run(site, scenario)


def test_a_release_lets_the_next_one_in(site: Site):
    """Long before the lease itself would have ended."""

    async def scenario():
        one, other = await two(site, "next")
        await one.aacquire()
        waiting = asyncio.ensure_future(other.aacquire(SOON))
        await let_pass(0.2)
        assert not waiting.done()
        assert await one.arelease()
        assert await waiting > one.token
        assert await other.arelease()

    run(site, scenario)


def test_a_release_wakes_the_waiters_of_the_same_process_at_once(site: Site, monkeypatch):
    """No poll is needed for them."""
    from seawall.durable.database import leases
    from seawall.redis import lease as lease_module

    monkeypatch.setattr(leases, "LONGEST_POLL", LONG)
    monkeypatch.setattr(lease_module, "LONGEST_POLL", LONG)

    async def scenario():
        pod = await site.pod()
        one, other = (Lease(pod, "near", ttl=10 * LONG) for _ in range(2))
        await one.aacquire()
        waiting = asyncio.ensure_future(other.aacquire(SOON))
        await let_pass(0.2)
        assert await one.arelease()
        await waiting
        assert await other.arelease()

    run(site, scenario)


def test_a_holder_that_is_gone_is_followed_after_its_time(site: Site, monkeypatch):
    """Without a word of it: the lease runs out in the store."""
    monkeypatch.setattr(ReleaseBell, "listen", lambda _bell: None)

    async def scenario():
        one = Lease(await site.pod(), "gone", ttl=0.5)
        other = Lease(await site.pod(), "gone", ttl=LONG, rng=Random(7))
        await one.aacquire()
        one._holding.abandon()  # it is not renewed any more
        assert await other.aacquire(SOON) > one.token
        assert await other.arelease()

    run(site, scenario)


def test_tasks_of_two_pods_compete_and_never_overlap(site: Site, seed):
    """What runs inside is alone, and tokens rise in the order of holding."""
    inside, tokens = [], []

    async def scenario():
        pods = [await site.pod() for _ in range(2)]

        async def compete(number):
            lease = Lease(pods[number % 2], "all", ttl=LONG, rng=Random(seed + number))
            for _ in range(3):
                async with lease:
                    inside.append(number)
                    assert len(inside) == 1
                    tokens.append(lease.token)
                    await let_pass(0)
                    lease.check()
                    inside.remove(number)

        await asyncio.gather(*map(compete, range(4)))
        assert len(tokens) == 12
        assert tokens == sorted(set(tokens))

    run(site, scenario)


def test_one_object_is_one_holder(site: Site):
    """While it is in use it cannot be taken again, not even after it was lost."""

    async def scenario():
        lease = Lease(await site.pod(), "mine", ttl=LONG)
        await lease.aacquire()
        with pytest.raises(RuntimeError, match="need a Lease each"):
            await lease.atry_acquire()
        lease._holding._lose("expired")
        with pytest.raises(RuntimeError, match="even if it was lost"):
            await lease.aacquire()
        assert not await lease.arelease()
        assert await lease.aacquire(SOON)
        assert await lease.arelease()
        assert not await lease.arelease()

    run(site, scenario)


# Time


@pytest.mark.usefixtures("by_hand")
def test_renewing_keeps_it_by_the_stores_clock(site: Site):
    """Each renewal counts from when it was sent; the store lets it last as long."""

    async def scenario():
        hands = Hands()
        one, other = await two(site, "kept", clock=hands)
        await site.freeze_time()
        await one.aacquire()
        for _ in range(3):
            hands.advance(LONG / 2)
            await site.pass_by(LONG / 2)
            await one._holding.renew()
            assert one.left == pytest.approx(LONG * (1 - leasing.DRIFT))
            assert not await other.atry_acquire()
        assert await one.arelease()

    run(site, scenario)


@pytest.mark.usefixtures("by_hand")
def test_it_is_lost_when_the_store_knows_another(site: Site, events):
    """A refused renewal ends it: `on_lost` is called once; the old holder ends nothing."""
    told = []

    async def scenario():
        hands = Hands()
        one, other = await two(site, "taken", clock=hands, on_lost=told.append)
        await site.freeze_time()
        await one.aacquire()
        await site.pass_by(LONG)  # the store's clock ran ahead
        assert await other.atry_acquire()
        assert one.held, "nothing can tell it so far"
        assert other.token > one.token
        hands.advance(LONG / 2)
        await one._holding.renew()
        await one._holding.renew()
        assert not one.held
        assert told == [one]
        assert not await one.arelease()
        assert await other.arelease(), "what the old holder did has not ended the new one"
        assert (events[2].token, events[2].held, events[2].cause) == (one.token, False, "taken")

    run(site, scenario)


@pytest.mark.usefixtures("by_hand")
def test_it_is_held_from_before_the_request_was_sent(site: Site):
    """The time of the answer's way does not count, and a margin is kept for the clocks."""

    async def scenario():
        hands = Hands()
        lease = Lease(await site.pod(), "slow", ttl=LONG, clock=hands)
        ask = lease._share.ask

        def slowly(*args):
            hands.advance(3)
            return ask(*args)

        lease._share.ask = slowly
        await lease.aacquire()
        assert lease.left == pytest.approx(LONG * (1 - leasing.DRIFT) - 3)
        hands.advance(lease.left)
        assert not lease.held

    run(site, scenario)


@pytest.mark.usefixtures("by_hand")
def test_tokens_rise_after_a_clock_that_was_set_back(site: Site):
    """The lease is free after at most one time to live by the new clock."""

    async def scenario():
        one, other = await two(site, "back")
        await site.freeze_time()
        await one.aacquire()
        await site.pass_by(-100_000.0)
        assert not await other.atry_acquire()
        await site.pass_by(LONG)
        assert await other.atry_acquire()
        assert other.token > one.token
        await site.pass_by(-100_000.0)
        assert await other.arelease()
        third = Lease(site._pods[0], "back", ttl=LONG)
        assert await third.aacquire(0) > other.token

    run(site, scenario)


def test_emptying_the_store_takes_no_token_back(site: Site):
    """After all is forgotten the next token is higher still, and the old holder has lost it."""

    async def scenario():
        one, other = await two(site, "flushed")
        await one.aacquire()
        await site.forget_all()
        assert await other.aacquire(0) > one.token
        assert not await one.arelease()
        assert await other.arelease()

    run(site, scenario)


# A store that does not answer


def test_in_an_outage_it_is_held_until_its_time_is_over(site: Site, events):
    """Without a store it lasts for its time to live, no longer; then `on_lost` is called."""
    lost = threading.Event()

    async def scenario():
        pod = await site.pod()
        lease = Lease(pod, "outage", ttl=1.5, on_lost=lambda _lease: lost.set())
        await lease.aacquire()
        async with site.silence():
            assert await asyncio.to_thread(lost.wait, SOON)
            assert not lease.held
            assert events[-1].cause == "expired"
            assert not await lease.arelease()
            with pytest.raises(StoreUnavailable):
                await lease.aacquire(0.2)
        assert await lease.aacquire(SOON)
        assert await lease.arelease()

    run(site, scenario)


def test_a_cancelled_wait_leaves_nothing_behind(site: Site):
    """What the store grants to a caller that has gone is given back at once."""

    async def scenario():
        one, other = await two(site, "cancelled")
        async with Lease(site._pods[0], "warm up", ttl=LONG):
            pass
        async with site.silence():
            waiting = asyncio.ensure_future(one.aacquire())
            await let_pass(0.2)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert waiting.cancelled()
        assert await other.aacquire(SOON)
        assert await other.arelease()

    run(site, scenario)


def test_a_granted_lease_that_was_not_heard_of_locks_nobody_out(site: Site):
    """The question was given up; its own holder, too, gets the lease long before its time ends."""

    async def scenario():
        lease = Lease(await site.pod(), "unheard", ttl=LONG)
        async with Lease(site._pods[0], "warm up", ttl=LONG):
            pass
        async with site.silence():
            with pytest.raises(StoreUnavailable):
                await lease.aacquire(0.2)
        assert await lease.aacquire(SOON)
        assert await lease.arelease()

    run(site, scenario)


def test_a_store_without_tables_is_said_at_once(postgres, valkey, tmp_path):
    """Waiting would not help."""
    site = Site("sqlite", valkey, postgres, tmp_path)

    async def scenario():
        pod = await site.pod()
        await site._sql("DROP TABLE {leases}")
        with pytest.raises(RuntimeError, match=r"there is no table .*leases: run migrate"):
            await Lease(pod, "any").aacquire()
        with pytest.raises(RuntimeError, match="there is no table"):
            await Lease(pod, "any").atry_acquire()

    run(site, scenario)


# Closing


def test_closing_the_store_gives_it_back(site: Site, events):
    """Others need not wait until it runs out, and the holder hears of it."""
    told = []

    async def scenario():
        one, other = await two(site, "closed", on_lost=told.append)
        await one.aacquire()
        await asyncio.to_thread(site._pods[0].close)
        assert told == [one]
        assert not one.held
        assert not await one.arelease()
        assert events[-1].cause == "closed"
        assert await other.aacquire(SOON)
        assert await other.arelease()
        with pytest.raises(StoreUnavailable, match="closed"):
            await one.aacquire()

    run(site, scenario)


def test_closing_wakes_a_waiting_caller(site: Site):
    """It hears of it at once, not when it would have looked again."""

    async def scenario():
        one, other = await two(site, "woken")
        await one.aacquire()
        waiting = asyncio.ensure_future(other.aacquire())
        await let_pass(0.2)
        await asyncio.to_thread(site._pods[1].close)
        with pytest.raises(StoreUnavailable, match="closed"):
            await asyncio.wait_for(waiting, SOON)
        assert await one.arelease()

    run(site, scenario)


# Threads and processes: stores that block


@pytest.mark.parametrize("site", BLOCKING, indirect=True)
def test_threads_compete_and_never_overlap(site: Site, seed):
    """`with lease:` does in threads what `async with` does in tasks."""
    inside, tokens, failed = [], [], []

    async def scenario():
        pods = [await site.pod() for _ in range(2)]

        def compete(number):
            lease = Lease(pods[number % 2], "all", ttl=LONG, rng=Random(seed + number))
            try:
                for _ in range(3):
                    with lease:
                        inside.append(number)
                        assert len(inside) == 1
                        tokens.append(lease.token)
                        lease.check()
                        inside.remove(number)
            except BaseException as error:  # noqa: BLE001 - of a thread
                failed.append(error)

        await asyncio.gather(*(asyncio.to_thread(compete, number) for number in range(4)))
        assert failed == []
        assert len(tokens) == 12
        assert tokens == sorted(set(tokens))

    run(site, scenario)


@pytest.mark.parametrize("site", BLOCKING, indirect=True)
def test_a_thread_waits_no_longer_than_asked(site: Site):
    """While others hold it, and while the store is silent."""

    async def scenario():
        one, other = await two(site, "thread")
        await one.aacquire()
        with pytest.raises(TimedOut):
            await asyncio.to_thread(other.acquire, 0.3)
        assert not await asyncio.to_thread(other.try_acquire)
        async with site.silence():
            with pytest.raises((StoreUnavailable, TimedOut)):
                await asyncio.to_thread(other.acquire, 0.3)
        assert await asyncio.to_thread(one.release)
        assert await asyncio.to_thread(other.acquire, SOON)
        assert await asyncio.to_thread(other.release)

    run(site, scenario)


@pytest.mark.parametrize("site", ["redis", "sqlite"], indirect=True)
def test_a_child_does_not_hold_what_its_parent_holds(site: Site):
    """After a fork the child cannot release or renew it, and may compete for it like anybody."""

    async def scenario():
        lease = Lease(await site.pod(), "forked", ttl=LONG)
        await asyncio.to_thread(lease.acquire)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ok = not lease.held and not lease.release() and not lease.try_acquire()
                code = 0 if ok else 2
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert lease.held
        assert await asyncio.to_thread(lease.release)

    run(site, scenario)


@pytest.mark.parametrize("site", AWAITED, indirect=True)
def test_an_awaited_database_says_how_to_write_it(site: Site):
    """Its leases are awaited too."""

    async def scenario():
        lease = Lease(await site.pod(), "awaited")
        with pytest.raises(TypeError, match="write `async with lease`"):
            lease.acquire()
        with pytest.raises(TypeError, match="aacquire"):
            lease.try_acquire()
        async with lease:
            assert lease.held

    run(site, scenario)


def test_closing_a_database_ends_a_wait_for_its_answer(tmp_path, monkeypatch):
    """A task in another loop waits, and only the closing can tell it that it waits in vain."""
    from seawall.durable.database.leases import DatabaseLease

    asked = threading.Event()

    async def hang(_share, _command):
        asked.set()
        await asyncio.Event().wait()

    async def main():
        database = Database(Sqlite(tmp_path / "leases.db"))
        monkeypatch.setattr(DatabaseLease, "_execute", hang)
        taking = asyncio.create_task(Lease(database, "one").aacquire())
        assert await asyncio.to_thread(asked.wait, SOON)
        await asyncio.to_thread(database.close)
        async with asyncio.timeout(SOON):
            with pytest.raises(StoreUnavailable, match="closed"):
                await taking

    asyncio.run(main())
