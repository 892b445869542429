"""A store that has forgotten everything, or its scripts; and callers who are cancelled."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from itertools import count
from secrets import token_hex
from typing import Any

import pytest

from seawall import (
    Breaker,
    CircuitOpen,
    Guard,
    RateLimit,
    RateLimited,
    RedisStore,
    subscribe,
)
from seawall.errors import JobLost, LeaseLost, StoreUnavailable, UnknownJob
from seawall.events import StoreModeChanged
from seawall.leases import Lease
from seawall.policies.breaker import n_of_m, single_probe
from seawall.redis import PriorityQueue
from seawall.redis.limits.wire import LimitTerms
from tests.redis.faults import Site
from tests.redis.support import eventually

_serial = count()


@pytest.fixture
def new_pod(site: Site) -> Iterator[Callable[..., RedisStore]]:
    """Return a function that makes stores which share everything, with a generous timeout."""
    prefix = f"lost-{token_hex(4)}"
    made: list[RedisStore] = []

    def make(timeout: float = 2.0) -> RedisStore:
        made.append(RedisStore(site.url, prefix=prefix, timeout=timeout))
        return made[-1]

    yield make
    site.proxy.heal()
    for store in made:
        store.close()


@pytest.fixture
def modes() -> Iterator[list[StoreModeChanged]]:
    """Return every change of mode that is told."""
    told: list[StoreModeChanged] = []
    stop = subscribe(told.append, StoreModeChanged)
    yield told
    stop()


def guard_with(policy: Any) -> Guard:
    """Return a guard of that policy alone."""
    return Guard(f"lost-{next(_serial)}", policy)


def fail() -> None:
    """Be a guarded function that fails."""
    raise ValueError


def ended(guard: Guard, function: Callable[[], Any] = int) -> str:
    """Call once; return what became of it."""
    try:
        guard.call(function)
    except (ValueError, RateLimited, CircuitOpen) as error:
        return type(error).__name__
    return "done"


def flush(site: Site) -> None:
    """Let the store forget everything."""
    with site.admin() as admin:
        admin.flushall()


# --- SCRIPT FLUSH ---


def test_forgotten_scripts_are_noticed_by_nobody(site: Site, new_pod, modes):
    """After SCRIPT FLUSH every policy goes on, in the same call, and nothing is told."""
    store = new_pod()
    exact = guard_with(RateLimit("1000/s", shared=store, name="a"))
    leased = guard_with(RateLimit("1000/s", shared=store, name="b", sharing="leased", batch=1))
    breaker = guard_with(Breaker(shared=store, name="c"))
    queue = PriorityQueue(store, "d")
    lease = Lease(store, "e")
    with site.admin() as admin:
        for turn in range(5):
            assert ended(exact) == ended(leased) == ended(breaker) == "done"
            queue.push(turn)
            (claim,) = queue.claim()
            queue.ack(claim)
            with lease:
                admin.script_flush()
    assert store.up
    assert modes == []


# --- FLUSHALL ---


@pytest.mark.parametrize("sharing", ["exact", "leased"])
def test_a_limit_that_was_forgotten_starts_afresh(site: Site, new_pod, modes, sharing: str):
    """After FLUSHALL the limit is full again, in every pod that is not told otherwise yet."""
    one, two = (
        guard_with(RateLimit("5/m", burst=5, shared=new_pod(), name="x", sharing=sharing))
        for _ in range(2)
    )
    while ended(one) == "done":
        pass
    assert ended(two) == "RateLimited"
    flush(site)
    fresh = guard_with(RateLimit("5/m", burst=5, shared=new_pod(), name="x", sharing=sharing))
    assert [ended(fresh) for _ in range(6)] == ["done"] * 5 + ["RateLimited"]
    assert modes == []


def test_what_was_reserved_and_forgotten_is_settled_without_error(site: Site, new_pod):
    """A reservation that the store no longer knows gives nothing back."""
    store = new_pod()
    limit = RateLimit("5/h", burst=5, shared=store, name="x")
    reservation = limit.reserve()
    flush(site)
    reservation.cancel()
    other = RateLimit("5/h", burst=5, shared=new_pod(), name="x")
    eventually(lambda: other.peek().left == 5)
    store.close()
    assert other.peek().left == 5


@pytest.mark.parametrize("state", ["closed", "open", "half_open"])
def test_a_breaker_that_was_forgotten_is_not_stuck(site: Site, new_pod, modes, state: str):
    """After FLUSHALL all pods agree again, a break ends, and a good dependency closes it."""
    policies = [
        Breaker(consecutive=2, break_for=0.3, probes=n_of_m(2, 2), shared=new_pod(), name="x")
        for _ in range(2)
    ]
    guards = [guard_with(policy) for policy in policies]
    for guard in guards:
        ended(guard)
    if state != "closed":
        eventually(lambda: ended(guards[0], fail) and policies[0].state == "open")
        eventually(lambda: policies[1].state == "open")
    if state == "half_open":
        eventually(lambda: ended(guards[0]) and policies[0].state == "half_open")
    flush(site)
    eventually(lambda: all(ended(guard) == "done" for guard in guards), 5.0)
    eventually(lambda: all(policy.state == "closed" for policy in policies), 5.0)
    # It breaks as before.
    eventually(lambda: ended(guards[1], fail) and policies[1].state == "open")
    eventually(lambda: policies[0].state == "open", 3.0)
    assert modes == []


def test_a_probe_that_was_forgotten_does_not_keep_a_breaker_half_open(site: Site, new_pod):
    """A probe that is out while the store forgets is settled for nothing, and others go on."""
    policy = Breaker(
        consecutive=1, break_for=0.05, probes=single_probe(), shared=new_pod(), name="x"
    )
    guard = guard_with(policy)
    go, inside = threading.Event(), threading.Event()

    def probe() -> None:
        inside.set()
        go.wait(10)

    eventually(lambda: ended(guard, fail) and policy.state == "open")

    def try_probe() -> None:
        while not inside.is_set():
            ended(guard, probe)

    thread = threading.Thread(target=try_probe)
    thread.start()
    assert inside.wait(10)
    flush(site)
    go.set()
    thread.join(10)
    eventually(lambda: ended(guard) == "done" and policy.state == "closed", 5.0)


def test_a_queue_says_what_it_has_lost(site: Site, new_pod):
    """After FLUSHALL claims and jobs are unknown, loudly; and new ones are welcome."""
    queue = PriorityQueue(new_pod(), "x")
    kept, other = queue.push("one"), queue.push("two")
    (claim,) = queue.claim()
    flush(site)
    with pytest.raises(JobLost, match="unknown"):
        queue.ack(claim)
    with pytest.raises(JobLost):
        queue.heartbeat(claim)
    for id_ in (kept, other):
        with pytest.raises(UnknownJob):
            queue.join(id_, 1.0)
    assert queue.claim() == []
    again = queue.push("three")
    (claim,) = queue.claim()
    queue.ack(claim, "done")
    assert queue.join(again, 1.0) == "done"


def test_a_lease_that_was_forgotten_is_lost_and_its_token_stays_behind(site: Site, new_pod):
    """After FLUSHALL the holder is told, and whoever comes next has a higher token."""
    lost: list[Lease] = []
    lease = Lease(new_pod(), "x", ttl=0.6, on_lost=lost.append)
    token = lease.acquire(1.0)
    flush(site)
    eventually(lambda: lost == [lease], 3.0)
    assert not lease.held
    with pytest.raises(LeaseLost):
        lease.check()
    other = Lease(new_pod(), "x")
    assert other.acquire(2.0) > token
    other.release()


# --- Cancelled callers ---


async def scattered(
    work: Callable[[int], Any], rng: random.Random, callers: int, turns: int
) -> list[object]:
    """Call again and again, and cancel most at a random moment; return what came of the rest."""
    came: list[object] = []

    async def one(number: int) -> None:
        task = asyncio.ensure_future(work(number))
        if rng.random() < 0.7:
            if rng.random() < 0.5:
                for _ in range(rng.randrange(10)):
                    await asyncio.sleep(0)  # noqa: TID251 - lets others run
            else:
                await asyncio.sleep(rng.random() * 0.004)  # noqa: TID251 - into the reply
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, asyncio.CancelledError):
            came.append(result)

    async def caller(place: int) -> None:
        for turn in range(turns):
            await one(place * turns + turn)

    await asyncio.gather(*(caller(place) for place in range(callers)))
    await asyncio.sleep(0.2)  # noqa: TID251 - what is under way is answered: a loop that ends cuts it
    return came


def cancelled_limit(site: Site, new_pod: Any, seed: int) -> tuple[int, int]:
    """Let callers of an exact limit be cancelled; return what was used, and what is missing."""
    site.proxy.dribble = 5
    store = new_pod()
    limit = RateLimit("10000/h", algorithm="fixed_window", shared=store, name="x")
    guard = guard_with(limit)

    async def nothing(number: int) -> int:
        return number

    async def main() -> list[object]:
        return await scattered(lambda n: guard.acall(nothing, n), random.Random(seed), 20, 50)

    came = asyncio.run(main())
    assert all(isinstance(number, int) for number in came), came
    assert len(set(came)) == len(came)
    site.proxy.heal()
    eventually(lambda: not store._core._send_queue)  # closing alone would not wait for so many
    store.close()
    other = RateLimit("10000/h", algorithm="fixed_window", shared=new_pod(), name="x")
    return len(came), 10_000 - other.peek().left


@pytest.mark.parametrize("seed", range(2))
def test_a_cancelled_caller_of_a_limit_uses_nothing(site: Site, new_pod, monkeypatch, seed: int):
    """Each answer is the caller's own, and what was granted to those who left is given back."""
    used, missing = cancelled_limit(site, new_pod, seed)
    assert used == missing
    monkeypatch.setattr(LimitTerms, "give_back", lambda *_args: None)  # the safeguard away
    flush(site)
    used, missing = cancelled_limit(site, new_pod, seed)
    assert used < missing


def test_cancelled_probes_leave_the_breaker_free(site: Site, new_pod):
    """However often probes are cancelled, never more are out than allowed, and none is kept."""
    site.proxy.dribble = 50
    policy = Breaker(consecutive=1, break_for=0.01, probes=n_of_m(3, 5), shared=new_pod(), name="x")
    guard = guard_with(policy)
    out = most = 0

    async def probe() -> None:
        nonlocal out, most
        out += 1
        most = max(most, out)
        try:
            await asyncio.sleep(0.5)  # noqa: TID251 - it is cancelled before
        finally:
            out -= 1

    async def call(_number: int) -> None:
        await guard.acall(probe)

    async def main() -> None:
        while policy.state != "open":
            with pytest.raises((ValueError, CircuitOpen)):
                await guard.acall(_afail)
            await asyncio.sleep(0.005)  # noqa: TID251 - the store is told
        await asyncio.sleep(0.02)  # noqa: TID251 - the break is over
        await asyncio.gather(
            *(_cancel_soon(call, random.Random(n)) for n in range(300)), return_exceptions=True
        )

    asyncio.run(main())
    assert 1 <= most <= 5
    eventually(lambda: ended(guard) == "done" and policy.state == "closed", 5.0)


async def _afail() -> None:
    raise ValueError


async def _cancel_soon(call: Callable[[int], Any], rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 0.2)  # noqa: TID251 - not all at once
    task = asyncio.ensure_future(call(0))
    await asyncio.sleep(rng.random() * 0.02)  # noqa: TID251 - into the question, or the probe
    task.cancel()
    (came,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(came, (asyncio.CancelledError, CircuitOpen)), came


def test_a_cancelled_claim_is_nobody_elses(site: Site, new_pod):
    """Each claim has its own payload, none is handed out twice, and cancelled ones come back."""
    site.proxy.dribble = 100
    queue = PriorityQueue(new_pod(), "x")
    jobs = {queue.push({"number": number}): number for number in range(200)}
    done: list[str] = []

    async def work(_number: int) -> None:
        for claim in await queue.aclaim(lease=30.0):
            assert claim.payload == {"number": jobs[claim.id]}
            done.append(claim.id)

    async def main() -> list[object]:
        return await scattered(work, random.Random(7), 10, 30)

    came = asyncio.run(main())
    assert [one for one in came if one is not None] == []
    assert len(done) == len(set(done))

    def rest() -> bool:
        done.extend(claim.id for claim in queue.claim(50))
        return len(done) >= len(jobs)

    eventually(rest, 5.0)
    assert sorted(done) == sorted(jobs)


def test_a_cancelled_wait_for_a_lease_leaves_it_free(site: Site, new_pod):
    """Who is cancelled while it asks does not keep the lease until it expires."""
    site.proxy.dribble = 5
    store = new_pod()
    tokens: list[int] = []

    async def work(_number: int) -> None:
        lease = Lease(store, "x", ttl=30.0)
        try:
            tokens.append(await lease.aacquire(5.0))
        finally:
            await lease.arelease()

    async def main() -> list[object]:
        return await scattered(work, random.Random(3), 5, 10)

    came = asyncio.run(main())
    assert [one for one in came if one is not None] == []
    assert tokens == sorted(set(tokens))
    lease = Lease(new_pod(), "x")
    lease.acquire(5.0)
    lease.release()


@pytest.mark.usefixtures("no_collection")
def test_nonsense_instead_of_an_answer_is_an_unavailable_store(site: Site, new_pod):
    """A queue and a lease say so as well, whatever comes back."""
    from tests.redis.faults import NONSENSE

    store = new_pod(0.1)
    queue, lease = PriorityQueue(store, "x"), Lease(store, "y")
    queue.push(1)
    for reply in NONSENSE:
        store._core.health.after_fork()  # it was found to be down by the reply before
        site.proxy.mangle = lambda _data, reply=reply: reply
        for call in (queue.claim, queue.snapshot, lambda: queue.push(2), lease.try_acquire):
            with pytest.raises(StoreUnavailable):
                call()
    site.proxy.sever()
    site.proxy.heal()
