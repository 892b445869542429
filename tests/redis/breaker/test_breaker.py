"""A breaker that pods share: what users see of it, on a real server and in real time."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections import Counter
from typing import Any

import pytest
import redis

from seawall import Breaker, CircuitOpen, Guard, RedisStore, subscribe
from seawall.errors import StoreUnavailable
from seawall.events import BreakerChanged, SettingsDiffer, StoreModeChanged
from seawall.models.breaker.probes import CallVerdict
from seawall.policies.breaker import growing, n_of_m, single_probe
from seawall.redis.breaker.wire import InvalidReply, parse_push, parse_replies
from seawall.runtime.layers import FAILED
from tests.redis.breaker.breakers import eventually, names, quiet_world
from tests.redis.support import keys_without_expiry, mutate
from tests.support import let_pass, new_guard

FAILURE, SUCCESS, NONE = CallVerdict.FAILURE, CallVerdict.SUCCESS, CallVerdict.NONE


def fail() -> None:
    """Be a dependency that is down."""
    raise ConnectionError


def work() -> str:
    """Be a dependency that is up."""
    return "done"


async def awork() -> str:
    """Be up, in a coroutine."""
    return "done"


def pod(store: RedisStore, name: str, **options: Any) -> tuple[Breaker, Guard]:
    """Return a pod's breaker, in a guard of its own."""
    options = {"probes": single_probe()} | options
    breaker = Breaker(**options, shared=store, name=name)
    return breaker, new_guard(breaker)


@pytest.fixture
def events():
    """Return the events of this test, as they come."""
    seen: list[Any] = []
    stop = subscribe(seen.append, BreakerChanged, StoreModeChanged, SettingsDiffer)
    yield seen
    stop()


# --- Shared by all pods ---


def test_a_trip_opens_all_pods(new_store):
    """When one pod trips, all refuse, without being asked."""
    name = next(names)
    pods = [pod(new_store(), name, consecutive=2, break_for=60.0) for _ in range(3)]
    for _breaker, guard in pods:
        assert guard.call(work) == "done"
    for _ in range(2):
        pods[0][1].attempt(fail)
    eventually(lambda: all(breaker.state == "open" for breaker, _ in pods))
    for _breaker, guard in pods:
        with pytest.raises(CircuitOpen, match="is open, for another"):
            guard.call(work)


def test_ratios_are_taken_over_all_pods(new_store):
    """No pod alone has enough calls or failures; together they have."""
    name = next(names)
    rule = {"failure_ratio": 0.5, "min_calls": 6, "window": 30.0}
    pods = [pod(new_store(), name, **rule) for _ in range(3)]
    for _breaker, guard in pods:
        guard.call(work)
        guard.attempt(fail)
    eventually(lambda: all(breaker.state == "open" for breaker, _ in pods))


def test_consecutive_failures_are_those_of_one_pod(redis_url, client):
    """Failures in a row count in the pod that sees them; others have rows of their own."""
    with quiet_world(redis_url, client, pods=2) as world:
        first, second = world.add(consecutive=3)
        for one in (first, second):
            one.call(FAILURE)
            one.call(FAILURE)
        world.flush()
        assert (first.state, second.state) == ("closed", "closed")
        first.call(FAILURE)
        world.flush()
        assert (first.state, second.state) == ("open", "open")


def test_consecutive_failures_refuse_here_before_the_store_has_heard(redis_url, client):
    """The pod that has seen them lets no call through while its report is under way."""
    with quiet_world(redis_url, client, pods=2) as world:
        first, second = world.add(consecutive=3, break_for=growing(2.0))
        world.flush()
        answered = first.told()  # under way, and says that it is closed
        assert all(first.call(FAILURE) for _ in range(3))
        assert first.state == "open"
        assert not first.call(SUCCESS)
        first.hear(*answered)
        assert not first.call(SUCCESS)
        world.flush()
        assert (first.state, second.state) == ("open", "open")
        left = first.mirror.retry_after(world.clock.now())
        assert left == second.mirror.retry_after(world.clock.now()) == 2.0
        opens = [
            pod.mirror.snapshot(world.clock.now())["consecutive_opens"] for pod in (first, second)
        ]
        assert opens == [1, 1]


def test_a_trip_that_the_store_never_heard_holds_here(redis_url, client):
    """A pod that has opened goes on as open when its store goes away, and brings that along."""
    with quiet_world(redis_url, client) as world:
        (pod,) = world.add(consecutive=2, break_for=5.0)
        world.flush()
        pod.call(FAILURE)
        pod.call(FAILURE)
        pod.share.lost(None, "gone")
        assert pod.state == "open"
        assert pod.mirror.retry_after(world.clock.now()) == 5.0
        world.flush()
        assert pod.state == "open"
        world.pass_time(5.0)
        assert pod.call(SUCCESS)
        world.flush()
        assert pod.state == "closed"


def test_a_pod_that_made_no_call_learns_the_state(new_store):
    """To look at the state is enough: from then on a pod follows the store."""
    name = next(names)
    (breaker, guard), (idle, idle_guard) = [pod(new_store(), name, consecutive=1) for _ in range(2)]
    guard.attempt(fail)
    eventually(lambda: breaker.state == "open" and idle.state == "open")
    seen = idle_guard.snapshot()["policies"][0]
    assert seen["failure"] == "ConnectionError"
    assert seen["open_for"] >= 0
    refused = idle_guard.attempt(work).error
    assert refused.failure == "ConnectionError"
    assert "the last failure: ConnectionError" in str(refused)


def test_without_a_call_a_snapshot_follows_the_store_too(new_store):
    """Metrics and dashboard read snapshots: they are enough as well."""
    name = next(names)
    (_breaker, guard), (_idle, idle_guard) = [
        pod(new_store(), name, consecutive=1) for _ in range(2)
    ]
    guard.attempt(fail)
    eventually(lambda: idle_guard.snapshot()["policies"][0]["state"] == "open")


def test_pods_that_nobody_calls_probe_as_one(new_store):
    """The store gives one permit: one pod asks, and all are closed when traffic returns."""
    name, asked = next(names), []
    options = {"consecutive": 1, "break_for": 0.2, "probe_every": 0.05}
    pods = [
        pod(new_store(), name, probe=lambda number=number: asked.append(number), **options)
        for number in range(2)
    ]
    for _breaker, guard in pods:
        guard.call(work)
    pods[0][1].attempt(fail)
    eventually(lambda: asked and all(breaker.state == "closed" for breaker, _ in pods), 30.0)
    assert len(asked) == 1


def test_tripped_by_hand_in_all_pods(redis_url, client):
    """`trip()` opens here at once and elsewhere soon, as an ordinary open: probes follow."""
    with quiet_world(redis_url, client, pods=2) as world:
        first, second = world.add(consecutive=3, break_for=growing(2.0))
        world.flush()
        first.breaker.trip()
        assert (first.state, second.state) == ("open", "closed")
        assert not first.call(SUCCESS)
        world.flush()
        assert (first.state, second.state) == ("open", "open")
        for one in (first, second):
            assert one.mirror.retry_after(world.clock.now()) == 2.0
            assert one.mirror.failure == ""
        world.pass_time(2.0)
        assert second.call(SUCCESS)
        world.flush()
        assert (first.state, second.state) == ("closed", "closed")


def test_close_by_hand_forgets_the_counts_of_all_pods(redis_url, client):
    """What was counted before it, in any pod, does not open the breaker after it."""
    with quiet_world(redis_url, client, pods=2) as world:
        first, second = world.add(failure_ratio=0.5, min_calls=4)
        world.flush()
        for one in (first, second):
            one.call(FAILURE)
        world.flush()
        first.breaker.close()
        world.flush()
        for one in (first, second):
            assert one.mirror.snapshot(world.clock.now())["shared_calls"] == 0
            assert one.mirror.snapshot(world.clock.now())["calls"] == 0
        first.call(FAILURE)
        second.call(FAILURE)
        world.flush()
        assert (first.state, second.state) == ("closed", "closed")


@pytest.mark.parametrize("said", ["0x10", "nan", "déjà vu: \n{}"])
def test_what_opened_it_is_told_to_all_pods_as_plain_text(said, redis_url, client):
    """Whatever an error says: it comes out as one short line, and never as a number."""
    with quiet_world(redis_url, client, pods=2) as world:
        first, second = world.add(consecutive=1)
        world.flush()
        ticket = first.enter()
        kind = type(said.split(":")[0], (Exception,), {})
        first.gate.leave(ticket, FAILED, kind(said), world.clock.now())
        world.flush()
        assert second.mirror.failure == first.mirror.failure
        assert second.mirror.failure.startswith(said.split(":")[0])
        assert "\n" not in second.mirror.failure


def test_recovery_closes_all_pods(new_store, events):
    """One probe, in one pod, closes the breaker everywhere; each pod tells of it."""
    name = next(names)
    pods = [pod(new_store(), name, consecutive=1, break_for=0.2) for _ in range(2)]
    for _breaker, guard in pods:
        guard.call(work)
    pods[0][1].attempt(fail)
    eventually(lambda: all(breaker.state == "open" for breaker, _ in pods))
    eventually(lambda: pods[1][1].attempt(work).ok)
    eventually(lambda: all(breaker.state == "closed" for breaker, _ in pods))
    # A change is published after the lock is released, so later than the state is visible.
    eventually(lambda: sum(event.after == "closed" for event in events) == len(pods))
    told = Counter((event.guard, event.after) for event in events)
    for _breaker, guard in pods:
        assert told[guard.name, "open"] == told[guard.name, "closed"] == 1
    opened = {event.guard: event for event in events if event.after == "open"}
    assert opened[pods[0][1].name].reason == "ConnectionError"
    assert opened[pods[1][1].name].reason == ""  # the store opened it, not a call here


def test_breaks_grow_over_all_pods(redis_url, client):
    """How often it opened in a row is known to all, whichever pod's probe failed."""
    with quiet_world(redis_url, client, pods=2) as world:
        pods = world.add(consecutive=1, break_for=growing(1.0))
        for one in pods:
            one.call(SUCCESS)
        lengths = []
        pods[0].call(FAILURE)
        for turn in range(4):
            world.flush()
            lengths.append(pods[0].enter().retry_after)
            world.pass_time(lengths[-1])
            assert pods[turn % 2].call(FAILURE)
        assert lengths == [1.0, 2.0, 4.0, 8.0]


def test_isolated_and_closed_by_hand_in_all_pods(new_store):
    """What is done by hand in one pod holds here at once, and everywhere soon."""
    name = next(names)
    (one, guard), (other, _) = pods = [pod(new_store(), name) for _ in range(2)]
    for _breaker, each in pods:
        each.call(work)
    one.isolate()
    with pytest.raises(CircuitOpen, match="isolated by hand"):
        guard.call(work)
    eventually(lambda: other.state == "isolated")
    other.close()
    assert other.state == "closed"
    eventually(lambda: one.state == "closed")


def test_a_pod_without_calls_can_isolate_all(new_store):
    """What is done by hand reaches the others also from a pod that has made no call yet."""
    name = next(names)
    idle, _ = pod(new_store(), name)
    busy, guard = pod(new_store(), name)
    guard.call(work)
    idle.isolate()
    eventually(lambda: busy.state == "isolated")


def test_probes_made_alone_decide_nothing_for_all(redis_url, client):
    """A probe that a pod allowed itself while the store was away changes nothing afterwards."""
    with quiet_world(redis_url, client, pods=2) as world:
        lonely, other = world.add(consecutive=1, break_for=1.0)
        for one in (lonely, other):
            one.call(SUCCESS)
        lonely.call(FAILURE)
        world.flush()
        world.pass_time(1.0)
        probe = other.enter()
        world.flush()
        lonely.share.lost(None, "cut off")
        own = lonely.enter()
        lonely.flush()
        lonely.leave(own, SUCCESS)
        assert (lonely.state, other.state) == ("half_open", "half_open")
        other.leave(probe, FAILURE)
        world.flush()
        assert (lonely.state, other.state) == ("open", "open")


def test_a_new_pod_asks_before_its_first_call(new_store):
    """A pod that comes in the middle of an outage makes no call."""
    name = next(names)
    first, guard = pod(new_store(), name, consecutive=1, break_for=60.0)
    guard.attempt(fail)
    eventually(lambda: first.state == "open")
    _breaker, late = pod(new_store(), name, consecutive=1, break_for=60.0)
    assert late.attempt(work).reason == "circuit_open"


def test_keys_are_shared_each_by_itself(new_store):
    """Each key has a state of its own, the same in all pods."""
    name = next(names)
    rule = {"consecutive": 1, "break_for": 60.0, "key": lambda host: host}
    (one, guard), (other, across) = [pod(new_store(), name, **rule) for _ in range(2)]
    for each in (guard, across):
        for host in ("a", ("b", 2)):
            assert each.call(lambda host: host, host) == host

    def down(host):
        raise ConnectionError(host)

    guard.attempt(down, "a")
    eventually(lambda: one.state == other.state == "open")
    assert across.attempt(lambda host: host, "a").reason == "circuit_open"
    assert across.call(lambda host: host, ("b", 2)) == ("b", 2)
    with pytest.raises(TypeError, match="cannot be shared between processes"):
        guard.call(lambda host: host, object())


# --- Half-open ---


def half_open(breaker: Breaker, guard: Guard) -> None:
    """Open the breaker, and wait until its break is over."""
    guard.attempt(fail)
    eventually(lambda: breaker.state == "open")
    eventually(lambda: not breaker.model.retry_after(guard.clock.now()))


def test_probes_are_limited_over_sync_and_async_callers(new_store):
    """Fifty callers at once, in threads and tasks of two pods: no more probes than configured."""
    name = next(names)
    rule = {"consecutive": 1, "break_for": 0.1, "probes": n_of_m(2, 2)}
    (one, guard), (_other, across) = [pod(new_store(), name, **rule) for _ in range(2)]
    assert guard.call(work) == across.call(work) == "done"
    half_open(one, guard)

    async def everybody() -> list[Any]:
        go_on, refused = asyncio.Event(), asyncio.Semaphore(0)

        async def offered(each: Guard) -> Any:
            result = await each.aattempt(go_on.wait)
            refused.release()
            return result

        tasks = [asyncio.create_task(offered(each)) for each in (guard, across) * 25]
        for _ in range(len(tasks) - 2):
            await refused.acquire()
        threads = await asyncio.to_thread(lambda: [across.attempt(work) for _ in range(5)])
        go_on.set()
        return [*threads, *[await task for task in tasks]]

    results = asyncio.run(everybody())
    assert sum(result.ok for result in results) == 2
    assert {result.reason for result in results} == {None, "circuit_open"}
    eventually(lambda: one.state == "closed")


def test_a_waiting_call_that_is_cancelled_gives_its_probe_back(store):
    """Whoever is cancelled while the store decides takes no permit away."""
    breaker, guard = pod(store, next(names), consecutive=1, break_for=0.05)
    half_open(breaker, guard)

    async def cancelled() -> None:
        task = asyncio.create_task(guard.acall(awork))
        await let_pass(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def tried() -> bool:
        return (await guard.aattempt(awork)).ok

    async def all_of_it() -> None:
        for _ in range(20):
            await cancelled()
        async with asyncio.timeout(5):
            while not await tried():
                await let_pass(0.005)

    asyncio.run(all_of_it())
    eventually(lambda: breaker.state == "closed")


# --- The store fails ---


@pytest.mark.parametrize("mode", ["local", "open", "closed"])
def test_without_the_store_it_does_as_it_was_told(mode, server, events):
    """When the store is gone each mode is taken, and told; when it is back it heals by itself."""
    with RedisStore(server.url, timeout=0.2) as store:
        breaker, guard = pod(
            store, next(names), consecutive=3, break_for=60.0, on_store_failure=mode
        )
        eventually(lambda: breaker._share.snapshot()["mode"] == "shared" and guard.attempt(work).ok)
        events.clear()  # a store that was late at first is not what this is about
        server.kill()
        eventually(lambda: breaker._share.snapshot()["mode"] == mode)
        for _ in range(3):
            guard.attempt(fail)
        result = guard.attempt(work)
        if mode == "open":
            assert (result.ok, breaker.state) == (True, "closed")
        else:
            assert result.reason == "circuit_open"
        if mode == "closed":
            assert "the store 'redis' does not answer" in str(result.error)
        server.start()
        eventually(lambda: breaker._share.snapshot()["mode"] == "shared")
        state = "open" if mode == "local" else "closed"
        assert breaker.state == state
        told = [(e.before, e.after) for e in events if isinstance(e, StoreModeChanged)]
        away, back = ("shared", mode), (mode, "shared")  # more than once on a busy machine
        assert told == [away, back] * (len(told) // 2)
        assert told


def test_an_open_breaker_stays_open_without_the_store(server):
    """What is left of the break holds, also alone."""
    with RedisStore(server.url, timeout=0.2) as store:
        breaker, guard = pod(store, next(names), consecutive=1, break_for=60.0)
        guard.attempt(fail)
        eventually(lambda: breaker.state == "open")
        server.kill()
        breaker._share.pushed(b"")  # do not wait for the next poll
        eventually(lambda: breaker._share.snapshot()["mode"] == "local")
        assert guard.attempt(work).reason == "circuit_open"


def test_after_the_break_a_lonely_pod_tries_by_itself(redis_url, client):
    """Without the store the break ends all the same, and a probe of this pod closes it there."""
    with quiet_world(redis_url, client) as world:
        (one,) = world.add(consecutive=1, break_for=5.0)
        one.call(FAILURE)
        one.flush()
        one.share.lost(None, "cut off")
        world.pass_time(4.0)
        assert not one.call(SUCCESS)
        world.pass_time(1.0)
        assert one.call(SUCCESS)
        assert one.state == "closed"


@pytest.mark.parametrize("how", ["flushall", "script flush"])
def test_a_store_that_forgets_is_told(how, server):
    """After FLUSHALL an open breaker is open, and after SCRIPT FLUSH nothing happens at all."""
    with RedisStore(server.url, timeout=2.0) as store, server.client() as client:
        breaker, guard = pod(store, next(names), consecutive=1, break_for=60.0)
        other, across = pod(store, breaker.name, consecutive=1, break_for=60.0)
        across.call(work)
        guard.attempt(fail)
        eventually(lambda: breaker.state == other.state == "open")
        client.execute_command(*how.split())
        late, guard_of_late = pod(store, breaker.name, consecutive=1, break_for=60.0)
        eventually(lambda: client.dbsize() > 0)
        assert guard_of_late.attempt(work).reason == "circuit_open"
        assert breaker.state == other.state == late.state == "open"
        other.close()
        eventually(lambda: breaker.state == late.state == "closed")
        assert guard.call(work) == "done"


def recovers_from_a_failover(redis_url: str, client: redis.Redis) -> None:
    """Fail if a replica that lagged behind, once it is the master, leaves pods stuck."""
    with quiet_world(redis_url, client, pods=2) as world:
        pods = world.add(consecutive=1, break_for=5.0)
        for one in pods:
            one.call(SUCCESS)
        key = pods[0].mirror.keys[0]
        older = client.dump(key)
        pods[0].call(FAILURE)
        world.flush()
        client.restore(key, 0, older, replace=True)
        world.flush()
        assert [one.state for one in pods] == ["open", "open"]
        assert client.hget(key, "state") == b"open"
        world.pass_time(5.0)
        assert pods[1].call(SUCCESS)
        world.flush()
        assert [one.state for one in pods] == ["closed", "closed"]


def test_a_store_that_went_back_in_time_is_told(redis_url, client):
    """After a failover to a replica that lagged behind, what pods know is what holds."""
    recovers_from_a_failover(redis_url, client)


def test_without_noticing_it_pods_and_store_would_not_agree_again(redis_url, client, monkeypatch):
    """If the store did not see that it knows less than a pod, they would ignore each other."""
    mutate(
        monkeypatch, "breaker", "(told.lineage == at.lineage and told.epoch > at.epoch)", "false"
    )
    with pytest.raises(AssertionError):
        recovers_from_a_failover(redis_url, client)


@pytest.mark.parametrize("jump", [-7200, -3, 3, 7200])
def test_a_server_clock_that_jumps_never_shortens_the_break(jump, redis_url, client):
    """Whatever the server's clock does, no pod that knows of the break ends it early, or never."""
    with quiet_world(redis_url, client, pods=2) as world:
        pods = world.add(consecutive=1, break_for=5.0)
        for one in pods:
            one.call(SUCCESS)
        pods[0].call(FAILURE)
        world.flush()
        world.frozen.advance(jump * 1_000_000)
        for _ in range(4):
            world.flush()
            assert not any(one.call(SUCCESS) for one in pods)
            world.pass_time(1.0)
        for _ in range(20):
            world.pass_time(1.0)
            world.flush()
            if pods[1].call(SUCCESS):
                break
        world.flush()
        assert [one.state for one in pods] == ["closed", "closed"]


def test_a_closed_store_is_a_store_that_is_away(store):
    """After the store was closed the breaker goes on by its own calls."""
    breaker, guard = pod(store, next(names), consecutive=2)
    guard.call(work)
    store.close()
    guard.attempt(fail)
    guard.attempt(fail)
    assert breaker.state == "open"
    assert breaker._share.snapshot()["mode"] == "local"


def test_a_store_that_was_never_there(server):
    """A pod that starts while the store is away works, by its own calls."""
    server.kill()
    with RedisStore(server.url, timeout=0.2) as store:
        breaker, guard = pod(store, next(names), consecutive=1)
        assert guard.call(work) == "done"
        guard.attempt(fail)
        assert breaker.state == "open"


def test_evidence_of_a_lonely_pod_is_brought(redis_url, client):
    """A pod that opened by its own counts while it was cut off brings them along."""
    with quiet_world(redis_url, client, pods=2) as world:
        lonely, other = world.add(failure_ratio=0.5, window=30.0, min_calls=4)
        for one in (lonely, other):
            one.call(SUCCESS)
        world.flush()
        lonely.share.lost(None, "cut off")
        for _ in range(4):
            lonely.call(FAILURE)
        assert (lonely.state, other.state) == ("open", "closed")
        world.flush()
        assert (lonely.state, other.state) == ("open", "open")


def test_a_lonely_pod_without_enough_evidence_comes_back(redis_url, client):
    """Where the others know better, a pod that opened alone closes again, and says why."""
    with quiet_world(redis_url, client, pods=2) as world:
        lonely, other = world.add(failure_ratio=0.5, window=30.0, min_calls=4)
        for _ in range(20):
            other.call(SUCCESS)
        lonely.call(SUCCESS)
        world.flush()
        lonely.share.lost(None, "cut off")
        for _ in range(4):
            lonely.call(FAILURE)
        assert lonely.state == "open"
        world.flush()
        assert (lonely.state, other.state) == ("closed", "closed")


# --- What comes back may be anything ---


@pytest.mark.parametrize(
    "reply",
    [
        None,
        b"OK",
        [],
        [[]],
        [[b"l", b"1", b"closed", b"0", b"0", b"", b"0", b"", [], []]],
        [[b"l", b"one", b"closed", b"0", b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[b"l", b"1", b"ajar", b"0", b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[b"l", b"1", b"open", b"-5", b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[b"l", b"1", b"open", b"9" * 40, b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[1, b"1", b"open", b"5", b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[b"\xff", b"1", b"open", b"5", b"0", b"", b"0", b"", [], [], [0, 0, 0]]],
        [[b"l", b"1", b"open", b"5", b"0", b"", b"0", b"", 7, [], [0, 0, 0]]],
        [[b"l", b"1", b"open", b"5", b"0", b"", b"0", b"", [], [], [b"x", 0, 0]]],
        [[b"l", b"1", b"open", b"5", b"0", b"", b"-1", b"", [], [], [0, 0, 0]]],
        [[b"l", b"1", b"open", b"5", b"0", b"", b"0", b"\xff", [], [], [0, 0, 0]]],
    ],
)
def test_an_answer_that_makes_no_sense_is_no_answer(reply):
    """Whatever the store answers, it is understood or the store counts as away."""
    try:
        (understood,) = parse_replies(reply, 1)
    except StoreUnavailable:
        return
    assert isinstance(understood, InvalidReply)


@pytest.mark.parametrize(
    "message",
    [
        b"{",
        b"[]",
        b"7",
        b"\xff",
        b"[" * 4000,
        b"x" * 5000,
        b'["t","l","1","ajar","0","0","","0",""]',
        b'[1,"l","1","open","0","0","","0",""]',
        b'["t","l","1","open",null,"0","","0",""]',
        b'["t",3,"1","open","0","0","","0",""]',
        b'["t","l","1","open","0","0","","0",["x"]]',
    ],
)
def test_a_push_that_makes_no_sense_only_makes_it_poll(message, redis_url, client):
    """Whatever is pushed, nothing breaks, and the store is asked."""
    assert parse_push(message) is None
    with quiet_world(redis_url, client) as world:
        (one,) = world.add(consecutive=1)
        one.call(SUCCESS)
        one.mirror.polled_at = 1e9
        one.share.pushed(message)
        assert one.mirror.polled_at < 0


# --- Settings, telemetry, life ---


def test_settings_that_differ_are_told(new_store, events):
    """Pods that do not agree on the settings hear of each other."""
    name = next(names)
    _first, guard = pod(new_store(), name, consecutive=2)
    guard.call(work)
    _second, other = pod(new_store(), name, consecutive=3, break_for=growing(5.0))
    other.call(work)
    eventually(lambda: any(isinstance(event, SettingsDiffer) for event in events))
    told = next(event for event in events if isinstance(event, SettingsDiffer))
    assert told.shared_name == name
    assert {"consecutive=2" in told.own, "consecutive=2" in told.other} == {True, False}


def test_update_reaches_the_store(redis_url, client):
    """Changed settings hold from the next report on; the state is kept."""
    with quiet_world(redis_url, client, pods=2) as world:
        pods = world.add(failure_ratio=0.5, window=10.0, min_calls=10)
        for one in pods:
            one.call(FAILURE)
        world.flush()
        for one in pods:
            one.breaker.update(min_calls=3)
        pods[0].call(FAILURE)
        world.flush()
        assert pods[1].state == "open"
        with pytest.raises(ValueError, match="windows of up to 10000 calls"):
            pods[0].breaker.update(window_calls=10_001)
        assert pods[0].breaker.settings.window == 10.0


def test_every_key_expires(redis_url, client):
    """Nothing that a breaker keeps in the store stays for ever."""
    with quiet_world(redis_url, client, pods=2) as world:
        for rule in (
            {"failure_ratio": 0.5, "window_calls": 4, "slow_after": 0.5, "slow_ratio": 1.0},
            {"failure_ratio": 0.5, "window": 10.0, "min_calls": 2},
            {"consecutive": 1, "quorum": 2},
        ):
            world.begin()
            one, other = world.add(**rule)
            ticket = one.enter()
            world.pass_time(0.5)
            one.flush(notice=True)
            one.leave(ticket, FAILURE)
            one.flush()
            one.call(FAILURE)
            other.call(FAILURE)
            world.flush()
            world.pass_time(60.0)
            one.enter()
            assert client.keys(f"{one.store._core.prefix}:*")
            assert not keys_without_expiry(client, f"{one.store._core.prefix}:")
            one.breaker.isolate()
            one.flush()
            assert not keys_without_expiry(client, f"{one.store._core.prefix}:")


def test_snapshot_shows_both_sides(redis_url, client):
    """The snapshot has the calls of this pod, those of all, and how the store is doing."""
    with quiet_world(redis_url, client, pods=2) as world:
        one, other = world.add(failure_ratio=0.5, window=10.0, min_calls=10)
        one.call(SUCCESS)
        other.call(FAILURE)
        world.flush()
        seen = one.guard.snapshot()["policies"][0]
        assert (seen["calls"], seen["shared_calls"], seen["shared_failures"]) == (1, 2, 1)
        assert seen["store_mode"] == "shared"
        assert seen["shared"] == {
            "name": world.name,
            "store": "redis",
            "mode": "shared",
            "quorum": None,
        }
        assert "shared=<RedisStore" in repr(one.breaker)


def test_the_closed_breaker_asks_nobody(store, monkeypatch):
    """Once it is known to be closed, a call makes no round trip, and neither does an open one."""
    breaker, guard = pod(store, next(names), consecutive=1, break_for=60.0)
    guard.call(work)
    assert breaker.model.calm

    def forbidden(*_args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(store._core, "ask", forbidden)
    for _ in range(100):
        guard.call(work)
    guard.attempt(fail)
    eventually(lambda: breaker.state == "open")
    assert guard.attempt(work).reason == "circuit_open"


def test_a_breaker_that_is_gone_is_forgotten(store):
    """A breaker that nobody uses any more leaves no job behind."""
    jobs = len(store._core._background._handles)
    breaker, guard = pod(store, next(names))
    guard.call(work)
    assert len(store._core._background._handles) > jobs
    guard.close()
    del breaker, guard

    def is_gone() -> bool:
        gc.collect()
        return len(store._core._background._handles) == jobs

    eventually(is_gone)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_is_another_pod_and_counts_once(store):
    """What the parent has counted is not told by the child; what the child counts is."""
    breaker, guard = pod(store, next(names), failure_ratio=1.0, window=30.0, min_calls=1000)
    for _ in range(5):
        guard.call(work)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for _ in range(3):
                guard.call(work)
            eventually(lambda: breaker.model.snapshot(0.0)["shared_calls"] >= 8)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    eventually(lambda: breaker.model.snapshot(0.0)["shared_calls"] >= 8)
    assert breaker.model.snapshot(0.0)["shared_calls"] == 8


def test_calls_that_hang_open_it_though_nothing_else_comes(store):
    """Calls still running count as slow without anybody asking: the background looks."""
    breaker, guard = pod(store, next(names), slow_after=0.05, slow_ratio=1.0, min_calls=2)
    go_on = threading.Event()
    callers = [threading.Thread(target=guard.call, args=(go_on.wait,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    eventually(lambda: breaker.state == "open")
    go_on.set()
    for caller in callers:
        caller.join()


def test_a_block_is_held_as_a_call_is(store):
    """`with guard.hold()` and `async with` ask the store where a call would."""
    breaker, guard = pod(store, next(names), consecutive=1, break_for=0.05)
    with guard.hold():
        pass
    half_open(breaker, guard)

    async def block() -> None:
        async with guard.hold():
            pass

    asyncio.run(block())
    eventually(lambda: breaker.state == "closed")


def test_shadow_and_off_never_refuse(store):
    """In shadow mode it is counted what would be refused; off, the store is not even asked."""
    breaker, guard = pod(store, next(names), consecutive=1, break_for=60.0, mode="shadow")
    guard.attempt(fail)
    eventually(lambda: breaker.state == "open")
    assert guard.call(work) == "done"
    breaker.update(mode="off")
    assert guard.call(work) == "done"


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"name": "x"}, TypeError, "write shared=store too"),
        ({"quorum": 2}, TypeError, "write shared=store too"),
        ({"on_store_failure": "open"}, TypeError, "write shared=store too"),
        ({"shared": "redis://"}, TypeError, "pass a store, such as RedisStore"),
        ({"shared": RedisStore, "name": "x"}, TypeError, "pass a store, such as RedisStore"),
        ({"shared": "STORE"}, TypeError, "under which name"),
        ({"shared": "STORE", "name": ""}, TypeError, "under which name"),
        ({"shared": "STORE", "name": "x", "quorum": 0}, ValueError, "1 or more"),
        ({"shared": "STORE", "name": "x", "on_store_failure": "?"}, ValueError, "'local'"),
        ({"shared": "STORE", "name": "x", "window_calls": 10**5}, ValueError, "up to 10000"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong, error, says, store):
    """What cannot work is refused at once, with a word on what can."""
    given = {name: store if value == "STORE" else value for name, value in wrong.items()}
    with pytest.raises(error, match=says):
        Breaker(**given)
