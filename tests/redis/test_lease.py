"""Leases in Redis: the script and the model, and what only this store has.

What a lease promises on every store is in tests/leases/test_conformance.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from itertools import count
from random import Random
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import deadline
from seawall.clock import SYSTEM
from seawall.errors import DeadlineExceeded, LeaseLost, StoreUnavailable, TimedOut
from seawall.leases import lease as leasing
from seawall.leases.lease import Lease, ReleaseBell
from seawall.leases.store import Withdraw
from seawall.models.lease import Busy, LeaseGranted
from seawall.redis import lease as lease_module
from seawall.redis.connections import LoopConnection
from seawall.redis.lease import RedisLease, answer_of
from seawall.redis.store import RedisStore
from tests.leases.harness import COMMANDS, LONG, Hands, Idle, check_agreement, events
from tests.redis.support import keys_without_expiry, mutate
from tests.support import examples, falsified, let_pass

__all__ = ["events"]  # a fixture

SILENT = False
"""A pause ended, and no bell rang."""

SOON = 10.0
"""How long to wait for what must happen."""

_serial = count()


@pytest.fixture
def by_hand(store, monkeypatch):
    """Return a store that renews nothing by itself."""
    monkeypatch.setattr(store._core, "every", lambda _seconds, _job: Idle())
    return store


def eventually(is_so):
    """Wait until it is so."""
    until = SYSTEM.now() + SOON
    while not is_so():
        assert SYSTEM.now() < until
        SYSTEM.sleep(0.005)


# The script and the model


def new_lease(store, frozen):
    """Return a function that answers commands about a new lease by the script."""
    share = RedisLease(store._core, f"n{next(_serial)}")

    def answer(now, command):
        frozen.set(now)
        reply = store._core.call("lease", *share.pack([command]))
        return share.unpack(reply, [command])[0]

    return answer


def test_the_script_does_as_the_model_does(store, frozen, client):
    """The same random history gives the same answers, and no key stays for ever."""

    @examples(500)
    @given(COMMANDS)
    def agree(commands):
        check_agreement(new_lease(store, frozen), commands)

    agree()
    assert keys_without_expiry(client, store._core.prefix) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("over <= now or newer", "over < now or newer"),
        ("number > attempt", "number >= 0"),
        ("math.max(token + 1, now)", "token + 1"),
        ("over > now then", "true then"),
        ("over = math.min(over, now + ttl)", ""),
        ("token == tonumber(ARGV[3]) and over > now", "over > now"),
        ("holder == ARGV[3] and number > attempt", "number > attempt"),
        ("if done or (kept[5] and text(over) ~= kept[5]) then", "if done then"),
        ("    over = 0\n", "    over = now\n"),
        ("holder == ARGV[3] and attempt <=", "attempt <="),
        ("and attempt <= tonumber(ARGV[4])", ""),
    ],
)
def test_a_mistake_in_the_script_is_noticed(store, frozen, monkeypatch, right, wrong):
    """Without any one of its safeguards the script and the model disagree."""
    mutate(monkeypatch, "lease", right, wrong)
    assert falsified(lambda commands: check_agreement(new_lease(store, frozen), commands), COMMANDS)


@pytest.mark.parametrize(
    "reply", [None, 7, b"", [], [1], [1, b"x", b"0"], [2, b"1", b"0"], [1, b"-1", b"0"],
              [1, b"9" * 40, b"0"], [1, b"1", b"0", b"0"], [[], b"1", b"0"]],
)  # fmt: skip
def test_a_reply_that_makes_no_sense_is_a_failure_of_the_store(reply):
    """Nothing is taken from it."""
    with pytest.raises(StoreUnavailable):
        answer_of(reply)


# Holding and waiting


def test_a_block_holds_it_in_threads_and_tasks(store):
    """`with` and `async with` take it and give it back, also when the block fails."""
    lease = Lease(store, "both", ttl=LONG)
    with lease as held:
        assert held is lease
        assert lease.held
    assert not lease.held

    async def scenario():
        async with lease:
            assert lease.held
        with pytest.raises(ZeroDivisionError):
            async with lease:
                raise ZeroDivisionError
        assert await lease.atry_acquire()
        assert await lease.arelease()
        await store.aclose()

    asyncio.run(scenario())


def test_a_release_wakes_who_waits(new_store):
    """The message of the holder is enough: the lease itself would have lasted for a minute."""
    one, two = (Lease(new_store(), "push", ttl=LONG) for _ in range(2))
    one.acquire()
    got = []
    waiter = threading.Thread(target=lambda: got.append(two.acquire(SOON)))
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive()
    token = one.token
    assert one.release()
    waiter.join(SOON)
    assert got
    assert got[0] > token
    two.release()


def test_without_the_message_one_would_wait_for_the_end_of_the_lease(new_store, monkeypatch):
    """It is the bell that wakes: without it nobody looks for a long time."""
    monkeypatch.setattr(ReleaseBell, "listen", lambda _bell: None)
    one, two = (Lease(new_store(timeout=0.4), "no-push", ttl=LONG) for _ in range(2))
    one.acquire()
    waiter = threading.Thread(target=lambda: two.acquire(1.5))
    waiter.start()
    waiter.join(0.1)
    one.release()
    waiter.join(0.4)
    assert waiter.is_alive()
    waiter.join(SOON)  # it asks once more while there is time for an answer
    assert two.release()


def test_tasks_and_threads_compete_and_never_overlap(new_store, seed):
    """Whatever runs inside is alone, and tokens rise in the order of holding."""
    stores = [new_store() for _ in range(2)]
    inside, tokens = [], []

    def work(lease):
        inside.append(lease)
        assert len(inside) == 1
        tokens.append(lease.token)
        lease.check()
        inside.remove(lease)

    def in_threads(number):
        lease = Lease(stores[number % 2], "all", ttl=LONG, rng=Random(seed + number))
        for _ in range(5):
            with lease:
                work(lease)

    async def in_tasks():
        async def one(number):
            lease = Lease(stores[number % 2], "all", ttl=LONG, rng=Random(seed - number))
            for _ in range(5):
                async with lease:
                    work(lease)
                    await let_pass(0)

        await asyncio.gather(*map(one, range(1, 5)))

    threads = [threading.Thread(target=in_threads, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    asyncio.run(in_tasks())
    for thread in threads:
        thread.join(SOON)
    assert len(tokens) == 40
    assert tokens == sorted(set(tokens))


# Losing it


def test_what_is_granted_too_late_is_given_back(new_store, monkeypatch):
    """An answer that comes when the time to live may be over holds nothing, and others get it."""
    hands, store = Hands(), new_store()
    lease = Lease(store, "too-late", ttl=LONG, clock=hands)
    ask = store._core.ask

    def very_slowly(*args):
        hands.advance(LONG)
        return ask(*args)

    monkeypatch.setattr(store._core, "ask", very_slowly)
    assert not lease.try_acquire()
    assert not lease.held
    assert Lease(new_store(), "too-late", ttl=LONG).acquire(SOON)


def test_a_block_that_outlives_its_lease_says_so(store, client):
    """The end of the block raises, unless the block itself has failed."""
    lease = Lease(store, "block", ttl=LONG)

    def lose():
        client.delete(store._core.key("lease", "block"))

    with pytest.raises(LeaseLost, match="before the block was over"), lease:
        lose()
    with pytest.raises(ZeroDivisionError), lease:
        raise ZeroDivisionError(lose())


def test_what_was_not_held_once_is_not_held_again(by_hand, monkeypatch):
    """A renewal whose answer comes too late for its holder does not revive the lease."""
    hands, told = Hands(), []
    lease = Lease(by_hand, "revived", ttl=LONG, clock=hands, on_lost=told.append)
    lease.acquire()
    hands.advance(LONG / 2)
    acall = by_hand._core.acall

    async def late(*args):
        reply = await acall(*args)
        hands.advance(LONG / 2)
        return reply

    monkeypatch.setattr(by_hand._core, "acall", late)
    asyncio.run(lease._holding.renew())
    assert not lease.held
    assert told == [lease]


def check_seen(store):
    """Look at the very moment when a renewal winds it up, just after the end; then once more."""
    hands = Hands()
    lease = Lease(store, f"seen{next(_serial)}", ttl=LONG, clock=hands)
    lease.acquire()
    hands.advance(LONG / 2)
    sent, extend, seen = hands.now(), leasing.LeaseHolding._extend, []

    def look_first(holding, sent):
        hands.advance(LONG / 2)  # now what it had is over, and what is renewed is not
        seen.append(lease.held)
        extend(holding, sent)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leasing.LeaseHolding, "_extend", look_first)
        lease._holding._renewed(sent, LeaseGranted(lease.token))
    assert seen == [False]
    assert not lease.held


def test_whoever_saw_it_lost_never_sees_it_held(by_hand):
    """A look after the end settles it, even if the renewal was faster by a hair."""
    check_seen(by_hand)


def test_unless_the_look_settled_it(by_hand, monkeypatch):
    """Without that the lease would come back to life."""
    forgetful = property(lambda _holding: False, lambda _holding, _seen: None)
    monkeypatch.setattr(leasing.LeaseHolding, "_expired", forgetful, raising=False)
    with pytest.raises(AssertionError):
        check_seen(by_hand)


DRIFTS = st.floats(0, 0.0009)


def check_drift(store, frozen, drift):
    """Let the holder's clock run slower than the server's, and a rival come at the first moment."""
    name, hands = f"drift{next(_serial)}", Hands()
    lease, rival = Lease(store, name, ttl=LONG, clock=hands), Lease(store, name, ttl=LONG)
    lease.acquire()
    hands.advance(LONG * (1 - drift))
    frozen.advance(int(LONG * 1e6))
    assert rival.try_acquire()
    assert not lease.held
    lease.release()
    rival.release()


def test_clocks_that_run_apart_a_little_make_no_two_holders(by_hand, frozen):
    """The holder gives up a thousandth before the store does."""

    @examples(50)
    @given(DRIFTS)
    def never_two(drift):
        check_drift(by_hand, frozen, drift)

    never_two()


def test_without_that_margin_two_would_hold_it(by_hand, frozen, monkeypatch):
    """A clock that runs slower by a hair is enough."""
    monkeypatch.setattr(leasing, "DRIFT", 0.0)
    assert falsified(lambda drift: check_drift(by_hand, frozen, drift), DRIFTS)


def test_a_callback_that_fails_does_no_harm(store, caplog):
    """It is logged; the lease is lost all the same."""
    lease = Lease(store, "broken", ttl=LONG, on_lost=lambda _lease: 1 / 0)
    lease.acquire()
    lease._holding._lose("expired")
    assert not lease.held
    assert "on_lost of lease 'broken' failed" in caplog.text


def test_renewals_go_on_by_themselves(store, frozen, events):
    """The background thread keeps it for many times its time to live."""
    hands = Hands()
    lease = Lease(store, "alive", ttl=LONG, renew_every=0.02, clock=hands)
    rival = Lease(store, "alive", ttl=LONG)
    lease.acquire()
    for _ in range(5):
        frozen.advance(int(LONG * 1e6 / 2))
        hands.advance(LONG / 2)  # from here on a renewal is due
        eventually(lambda: lease.left > LONG * 0.9)
        assert not rival.try_acquire()
    assert lease.release()
    assert [event.cause for event in events] == ["acquired", "released"]


# Requests that nobody waits for any more


def check_cancelled(server, new_store):
    """Give up while the store is silent; tell whether another gets the lease afterwards."""
    store, rival = new_store(url=server.url, timeout=SOON), new_store(url=server.url)
    lease = Lease(store, "cancelled", ttl=LONG)

    async def scenario():
        await store._core.acall("probe", [store._core.key("warm", "up")], [])
        server.freeze()
        waiting = asyncio.ensure_future(lease.aacquire())
        await let_pass(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        server.thaw()
        try:
            await Lease(rival, "cancelled", ttl=LONG).aacquire(1.0)
        except TimedOut:
            return False
        finally:
            await store.aclose()
            await rival.aclose()
        return True

    return asyncio.run(scenario())


def test_a_cancelled_wait_leaves_nothing_behind(server, new_store):
    """What the store grants to somebody who has gone is given back at once."""
    assert check_cancelled(server, new_store)


def keep_unwanted(monkeypatch):
    """Give nothing back that comes too late."""
    monkeypatch.setattr(lease_module.RedisLease, "unwanted", lambda *_: None)


def keep_unheard(monkeypatch):
    """Withdraw nothing that was not answered."""
    post = lease_module.RedisLease.post

    def without_withdrawals(share, command):
        if not isinstance(command, Withdraw):
            post(share, command)

    monkeypatch.setattr(lease_module.RedisLease, "post", without_withdrawals)


def test_unless_it_were_given_back(server, new_store, monkeypatch):
    """Without that the lease would belong to nobody for its whole time."""
    keep_unwanted(monkeypatch)
    keep_unheard(monkeypatch)
    assert not check_cancelled(server, new_store)


def check_loop_that_ends(server, new_store):
    """End the loop while the store is silent; tell whether another gets the lease afterwards."""
    store = new_store(url=server.url, timeout=SOON)
    with Lease(store, "warm up"):
        pass

    async def scenario():
        await store._core.acall("probe", [store._core.key("warm", "up")], [])
        server.freeze()
        waiting = asyncio.ensure_future(Lease(store, "ended", ttl=LONG).aacquire())
        await let_pass(0.1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(scenario())
    server.thaw()
    store.close()
    try:
        Lease(new_store(url=server.url), "ended", ttl=LONG).acquire(1.0)
    except TimedOut:
        return False
    return True


def test_a_loop_that_ends_leaves_nothing_behind(server, new_store):
    """What was asked and not answered is withdrawn, though no answer can be heard any more."""
    assert check_loop_that_ends(server, new_store)


def test_unless_it_were_withdrawn(server, new_store, monkeypatch):
    """Giving back needs an answer, and that comes to nobody."""
    keep_unheard(monkeypatch)
    assert not check_loop_that_ends(server, new_store)


def test_an_answer_that_was_lost_does_not_lock_its_own_holder_out(server, new_store, monkeypatch):
    """The next attempt of the same holder takes over what the one before was granted."""
    keep_unwanted(monkeypatch)
    keep_unheard(monkeypatch)
    lease = Lease(new_store(url=server.url, timeout=0.2), "unheard", ttl=LONG)
    lease._share._store.call("probe", [lease._share._store.key("warm", "up")], [])
    server.freeze()
    with pytest.raises(StoreUnavailable):
        lease.try_acquire()
    server.thaw()
    assert lease.acquire(SOON)
    assert lease.release()


def test_a_release_that_got_lost_is_sent_again(new_store, monkeypatch):
    """One lost packet does not keep others out for the rest of the time to live."""
    one, two = (Lease(new_store(), "packet", ttl=LONG) for _ in range(2))
    exchange, lost = LoopConnection.exchange, []

    async def lose_the_first(link, script, keys, args):
        if args[0] == "release" and not lost:
            lost.append(args)
            raise StoreUnavailable("lost on the way")
        return await exchange(link, script, keys, args)

    monkeypatch.setattr(LoopConnection, "exchange", lose_the_first)
    one.acquire()
    assert one.release(), "it was held until then"
    assert lost
    assert two.acquire(SOON)


# Many at once, and no longer than asked


def test_different_leases_do_not_wait_for_each_other(new_store, monkeypatch):
    """All that are asked for at the same time are under way at the same time."""
    store, together = new_store(timeout=SOON), 20
    answered, run = asyncio.Barrier(together), LoopConnection.run

    async def with_all(*args, **how):
        async with asyncio.timeout(SOON / 2):
            await answered.wait()
        return await run(*args, **how)

    async def scenario():
        leases = [Lease(store, f"many{number}", ttl=LONG) for number in range(together)]
        monkeypatch.setattr(LoopConnection, "run", with_all)
        assert all(await asyncio.gather(*(lease.atry_acquire() for lease in leases)))
        monkeypatch.undo()
        await store.aclose()

    asyncio.run(scenario())


def test_a_silent_store_does_not_make_it_wait_longer_than_asked(server, new_store):
    """The timeout and the deadline bound the question too, in threads and tasks."""
    lease = Lease(new_store(url=server.url, timeout=SOON), "silent", ttl=LONG)
    lease._share._store.call("probe", [lease._share._store.key("warm", "up")], [])
    server.freeze()
    began = SYSTEM.now()
    with pytest.raises(StoreUnavailable):
        lease.acquire(0.05)
    with deadline(0.05), pytest.raises(StoreUnavailable):
        lease.acquire()
    with deadline(0.05), pytest.raises(StoreUnavailable):
        lease.try_acquire()

    async def scenario():
        with pytest.raises(StoreUnavailable):
            await lease.aacquire(0.05)
        with deadline(0.05), pytest.raises(StoreUnavailable):
            await lease.atry_acquire()

    asyncio.run(scenario())
    assert SYSTEM.now() - began < SOON / 2
    server.thaw()


def test_what_is_asked_too_late_is_not_asked_at_all(store, client):
    """A deadline that has passed is no time to take a lease."""
    lease = Lease(store, "expired", ttl=LONG)
    with deadline(0):
        with pytest.raises(DeadlineExceeded, match="'expired': the deadline passed before"):
            lease.acquire()
        with pytest.raises(DeadlineExceeded):
            lease.acquire(0)
        with pytest.raises(DeadlineExceeded):
            lease.try_acquire()
        with pytest.raises(DeadlineExceeded):
            asyncio.run(lease.aacquire())
    assert not client.exists(store._core.key("lease", "expired"))
    assert lease.acquire(0)


def test_the_last_look_leaves_time_for_an_answer(new_store):
    """If that one is cut short all the same, what was known before tells what to raise."""
    hands, store = Hands(), new_store(timeout=0.25)
    lease = Lease(store, "last", ttl=LONG, clock=hands)
    steps = lease._acquiring("sync", 1.0)
    began = hands.now()
    next(steps)
    pause = steps.send(Busy(7, 60_000_000))
    assert pause.until == began + 0.75
    hands.advance(0.75)
    question = steps.send(SILENT)
    assert question.until == began + 1.0
    hands.advance(0.25)
    with pytest.raises(TimedOut, match="held by others for 1 s"):
        steps.send("no answer")


def test_an_outage_to_the_end_is_told_as_such(new_store):
    """Who has heard of a holder and then of nothing for long does not know who holds it."""
    hands = Hands()
    lease = Lease(new_store(timeout=0.25), "outage", ttl=LONG, clock=hands)
    steps = lease._acquiring("sync", 10.0)
    next(steps)
    steps.send(Busy(7, 1_000_000))
    hands.advance(2)
    steps.send(SILENT)
    steps.send("no connection")
    hands.advance(20)
    with pytest.raises(StoreUnavailable, match="no connection"):
        steps.send(SILENT)


# Other processes


HOLDER = dedent("""
    import sys
    from seawall.redis.store import RedisStore
    from seawall.leases.lease import Lease

    store = RedisStore(sys.argv[1], prefix=sys.argv[2], timeout=1.0)
    lease = Lease(store, "stopped", ttl=1.0)
    print(lease.acquire(), flush=True)
    sys.stdin.readline()
    print(lease.held, lease.release(), flush=True)
    store.close()
""")


@pytest.fixture
def holder(redis_url, store):
    """Return another process that holds the lease "stopped"."""
    process = subprocess.Popen(  # noqa: S603 - our own text
        [sys.executable, "-c", HOLDER, redis_url, store._core.prefix],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate()


def test_a_stopped_holder_wakes_up_and_knows(holder, store):
    """Past its time it sees that it does not hold the lease, and a resource refuses its token."""
    old = int(holder.stdout.readline())
    rival = Lease(store, "stopped", ttl=LONG)
    assert not rival.try_acquire()
    holder.send_signal(signal.SIGSTOP)
    new = rival.acquire(SOON)
    holder.send_signal(signal.SIGCONT)
    holder.stdin.write("go on\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "False False\n"
    highest = new  # what a resource has seen
    assert old < highest
    assert rival.held
    assert rival.release(), "nothing of the old holder's was accepted"


def test_a_killed_holder_is_followed_after_its_time(holder, store):
    """Nothing else is needed: the lease runs out on the server."""
    old = int(holder.stdout.readline())
    holder.kill()
    began = SYSTEM.now()
    rival = Lease(store, "stopped", ttl=LONG)
    assert rival.acquire(SOON) > old
    assert SYSTEM.now() - began < 4
    assert rival.release()


def test_closing_gives_all_back_and_drops_nothing(new_store, monkeypatch):
    """Each is released once, and not a second time in vain."""
    store, exchange, sent = new_store(), LoopConnection.exchange, []

    async def count_releases(link, script, keys, args):
        sent.extend(keys if args[:1] == ("release",) else ())
        return await exchange(link, script, keys, args)

    monkeypatch.setattr(LoopConnection, "exchange", count_releases)
    leases = [Lease(store, f"all{number}", ttl=LONG) for number in range(5)]
    for lease in leases:
        lease.acquire()
    store.close()
    assert sorted(sent) == [store._core.key("lease", lease.name) for lease in leases]
    assert store.snapshot()["dropped"] == 0
    other = new_store()
    assert all(Lease(other, lease.name, ttl=LONG).try_acquire() for lease in leases)


def test_closing_tells_all_though_the_store_is_away(server, new_store):
    """No holder goes on believing in a lease that nobody renews."""
    store, told = new_store(url=server.url, timeout=0.5), []
    leases = [Lease(store, f"away{number}", ttl=LONG, on_lost=told.append) for number in range(5)]
    for lease in leases:
        lease.acquire()
    server.kill()
    store.close()
    assert not any(lease.held for lease in leases)
    assert sorted(lease.name for lease in told) == [lease.name for lease in leases]


def test_what_is_granted_when_the_store_was_closed_is_not_held(new_store, events):
    """Nobody would renew it."""
    store = new_store()
    lease = Lease(store, "after", ttl=LONG)
    steps = lease._acquiring("sync", None)
    next(steps)
    store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        steps.send(LeaseGranted(7))
    assert not lease.held
    assert lease.token == 0
    assert not lease.release()
    assert events == []


def test_it_is_given_back_then(server, new_store):
    """Another thread closes the store while a task waits for its answer."""
    store = new_store(url=server.url, timeout=SOON)
    store._core.call("probe", [store._core.key("warm", "up")], [])

    async def scenario():
        await store._core.acall("probe", [store._core.key("warm", "up")], [])
        server.freeze()
        waiting = asyncio.ensure_future(Lease(store, "raced", ttl=LONG).aacquire())
        await let_pass(0.1)
        await asyncio.to_thread(store.close)
        server.thaw()
        with pytest.raises(StoreUnavailable, match="closed"):
            await waiting
        rival = new_store(url=server.url)
        assert await Lease(rival, "raced", ttl=LONG).aacquire(SOON)
        await rival.aclose()

    asyncio.run(scenario())


# Arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ttl": 0}, "ttl=0: write finite seconds"),
        ({"ttl": 1e12}, "ttl=1000000000000.0: write at most 2592000 seconds, 30 days"),
        ({"ttl": 9.0, "renew_every": 5.0}, "at most half of ttl=9.0"),
        ({"on_lost": 3}, "on_lost=3: pass a function"),
        ({"rng": 3}, "rng=3: pass a random.Random"),
        ({"clock": 3}, "clock=3: pass a clock"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    """The message says what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        Lease(RedisStore("redis://localhost"), "name", **options)


def test_bad_names_and_stores_are_refused_at_once():
    """A lease needs a store and a name; a callback that wants to be awaited never would be."""
    store = RedisStore("redis://localhost")
    with pytest.raises(TypeError, match="pass a RedisStore"):
        Lease("redis://localhost", "name")
    with pytest.raises(TypeError, match="write a name"):
        Lease(store, "")

    async def on_lost(lease):
        """Want to be awaited."""

    with pytest.raises(TypeError, match="nothing here would await it"):
        Lease(store, "name", on_lost=on_lost)
    with pytest.raises(ValueError, match="timeout=-1"):
        Lease(store, "name").acquire(-1)
