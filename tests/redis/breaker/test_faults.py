"""A breaker that pods share, where something goes wrong: answers that do not come, or say nothing.

Each case is a regression test, or shows what happens without the safeguard.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from seawall import Breaker, CircuitOpen, Guard, RedisStore
from seawall.errors import StoreUnavailable
from seawall.models.breaker.probes import CallVerdict
from seawall.models.breaker.report import BreakerReport
from seawall.models.breaker.state import BreakerRefusal
from seawall.policies.breaker import n_of_m, ramp, single_probe
from seawall.redis.breaker import share as breaker_share
from seawall.redis.breaker.mirror import (
    MOST_LOST,
    MOST_SETTLED,
    BreakerMirror,
    GrantedProbe,
    PendingReports,
)
from seawall.redis.breaker.share import SharedBreakers
from seawall.redis.breaker.wire import InvalidReply
from seawall.redis.store import StoreCore
from seawall.runtime.layers import Wait
from tests.redis.breaker.breakers import Pod, World, eventually, names, quiet_world
from tests.redis.support import mutate
from tests.support import new_guard

FAILURE, SUCCESS, NONE = CallVerdict.FAILURE, CallVerdict.SUCCESS, CallVerdict.NONE


@pytest.fixture(scope="module")
def world(redis_url):
    """Return three pods on one server, whose clock stands still; each test begins anew."""
    with redis.Redis.from_url(redis_url) as client, quiet_world(redis_url, client, 3) as made:
        yield made


@pytest.fixture
def pods(world):
    """Return a function that makes three pods, to all of which the breaker is known."""

    def make(**options: Any) -> list[Pod]:
        world.begin()
        made = world.add(**options)
        for one in made:
            assert one.call(SUCCESS)
        world.flush()
        return made

    return make


def fail(*_args: Any) -> None:
    """Be a dependency that is down."""
    raise ConnectionError


def work(*_args: Any) -> str:
    """Be a dependency that is up."""
    return "done"


def shared(store: RedisStore, name: str, **options: Any) -> tuple[Breaker, Guard]:
    """Return a breaker in a guard of its own."""
    options = {"probes": single_probe()} | options
    breaker = Breaker(**options, shared=store, name=name)
    return breaker, new_guard(breaker)


def no_answer(pod: Pod) -> Any:
    """Offer a call whose question is never answered, and perhaps never arrives."""
    try:
        pod.gate.enter(pod.clock.now())
    except Wait as wait:
        admission: Any = wait.waiter
    pod.asked = admission._id
    return admission._answer()  # nothing was published, so nothing was answered


def ask_late(pod: Pod) -> None:
    """Let the question of a call that was given up arrive after all."""
    mirror = pod.mirror
    keys, args = pod.share._questions.pack([(mirror, pod.asked)])
    pod.store._core.call("breaker", keys, args)


def broken(made: list[Pod], world: World, seconds: float = 1.0) -> None:
    """Open the breaker of all pods, and let the break pass."""
    made[0].call(FAILURE)
    world.flush()
    assert {one.state for one in made} == {"open"}
    world.pass_time(seconds)


# --- An answer that does not come ---


def one_late_answer(pods: Callable[..., list[Pod]], world: World) -> tuple[Pod, int]:
    """Return a pod that missed an answer, and how many calls it then lets through."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    other, unlucky = made[0], made[1]
    probe = other.enter()
    assert isinstance(probe, GrantedProbe)
    unlucky.flush(poll=True)
    passed = 0
    for _ in range(10):
        answer = no_answer(unlucky) if unlucky.mirror.away is None else unlucky.enter()
        if not isinstance(answer, (CircuitOpen, BreakerRefusal)):
            unlucky.leave(answer, SUCCESS)
            passed += 1
    return unlucky, passed


@pytest.mark.parametrize("state", ["half_open", "open"])
def test_one_late_answer_lets_nothing_through(state, pods, world):
    """A pod that misses an answer while the breaker is not closed refuses, and stays with it."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    if state == "half_open":
        assert isinstance(made[0].enter(), GrantedProbe)
        made[1].flush(poll=True)
    assert made[1].state == state
    refusal = no_answer(made[1])
    assert (refusal.reason, made[1].mirror.away) == ("probing", None)
    assert made[1].share.snapshot()["mode"] == "shared"


def test_without_staying_one_late_answer_floods(pods, world, monkeypatch):
    """If it left the store at once, a trial of its own would close it for this pod."""
    assert one_late_answer(pods, world)[1] == 0
    monkeypatch.setattr(BreakerMirror, "follow_on", lambda *_args: None)
    assert one_late_answer(pods, world)[1] == 10


def test_a_missed_answer_is_not_asked_for_by_every_call(pods, world):
    """For a moment after it calls are refused at once, open or half-open."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    made[1].share.full_for = 0.5
    no_answer(made[1])
    made[1].store._core.ask, asked = None, made[1].store._core.ask
    try:
        assert isinstance(made[1].enter(), CircuitOpen)
    finally:
        made[1].store._core.ask = asked
    world.pass_time(0.5)
    assert made[1].call(SUCCESS)


def test_away_for_sure_it_tries_carefully(pods, world):
    """A pod that has its probes out when the store goes away makes no more until they end."""
    made = pods(consecutive=1, break_for=1.0, probes=n_of_m(2, 2), probe_timeout=30.0)
    broken(made, world)
    out = [made[0].enter() for _ in range(2)]
    made[0].share.store_changed(up=False, cause="cut off")
    assert isinstance(made[0].enter(), CircuitOpen)
    made[0].leave(out[0], SUCCESS)
    assert isinstance(made[0].enter(), CircuitOpen)
    world.pass_time(30.0)  # the other one hangs
    own = [made[0].enter() for _ in range(3)]
    assert [isinstance(one, CircuitOpen) for one in own] == [False, False, True]


@pytest.mark.parametrize("how", ["lost", "abandoned", "granted, then lost"])
def test_a_probe_whose_grant_is_lost_is_free_again(how, pods, world, client):
    """Whoever gets no answer gives back what may have been granted, whichever arrives first."""
    made = pods(consecutive=1, break_for=1.0, probe_timeout=60.0, on_store_failure="closed")
    broken(made, world)
    one, other = made[0], made[1]
    if how == "abandoned":
        try:
            one.gate.enter(one.clock.now())
        except Wait as wait:
            one.asked = wait.waiter._id
            wait.waiter.abandon()
    else:
        no_answer(one)
    if how == "granted, then lost":
        ask_late(one)
        assert client.zcard(one.mirror.keys[1]) == 1
        one.flush()
    else:
        one.flush()  # before the question, which is on its way
        ask_late(one)
    assert client.zcard(one.mirror.keys[1]) == 0
    assert other.call(SUCCESS)
    other.flush()
    assert other.state == "closed"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("  if redis.call('ZSCORE', b.gone, id) then\n    return ''\n  end\n", ""),
        ("if verdict == 'none' or verdict == 'lost' then", "if verdict == 'none' then"),
    ],
)
def test_without_giving_it_back_nobody_may_try(before, after, pods, world, monkeypatch):
    """If a lost grant were not given up, or not remembered, all pods would wait for it."""
    mutate(monkeypatch, "breaker", before, after)
    made = pods(consecutive=1, break_for=1.0, probe_timeout=60.0, on_store_failure="closed")
    broken(made, world)
    no_answer(made[0])
    if after:
        ask_late(made[0])
        made[0].flush()
    else:
        made[0].flush()
        ask_late(made[0])
    assert not made[1].call(SUCCESS)


def test_what_was_given_up_is_forgotten_again(pods, world, client):
    """Probes that nobody wants are remembered for seconds, and not more than a thousand."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    gone = made[0].mirror.keys[6]
    for number in range(5):
        for probe in range(240):
            made[0].mirror.report_lost(f"x-{number}-{probe}")
        made[0].flush()
    assert client.zcard(gone) == 1000
    world.pass_time(11.0)
    made[0].mirror.report_lost("y")
    made[0].flush()
    assert client.zrange(gone, 0, -1) == [b"y"]
    assert client.pttl(gone) > 0


def test_lost_probes_leave_room_for_results():
    """However many probes are lost, how others ended can still be told."""
    pending = PendingReports()
    for number in range(2 * MOST_SETTLED):
        pending.settle(f"lost-{number}", "lost")
    assert len(pending._settled) == MOST_LOST
    pending.settle("lost-1", "success")
    pending.settle("probe", "success")
    assert (pending._settled["lost-1"], pending._settled["probe"]) == ("lost", "success")


def test_a_grant_that_nobody_waits_for_is_given_back_in_any_case(pods, world, client):
    """Also where so many were given up that no more are noted: then by what the store granted."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    for number in range(MOST_LOST):
        made[0].mirror.report_lost(f"x-{number}")
    try:
        made[0].gate.enter(made[0].clock.now())
    except Wait as wait:
        waiter = wait.waiter
    answered = threading.Event()
    waiter.publish(lambda: answered.set() or True)
    assert answered.wait(30)
    assert client.zcard(made[0].mirror.keys[1]) == 1
    waiter.abandon()
    made[0].flush()
    assert client.zcard(made[0].mirror.keys[1]) == 0


def test_a_probe_of_an_earlier_stage_counts_when_it_ends(pods, world):
    """Probes are known by their id, in whichever stage of a ramp they began."""
    made = pods(consecutive=1, break_for=1.0, probes=ramp((0.5, 0.75), step=1.0))
    broken(made, world)
    early = made[0].enter()
    assert isinstance(made[1].enter(), CircuitOpen)
    assert made[1].call(SUCCESS)
    made[1].flush()
    world.pass_time(1.0)
    made[1].enter()  # the next stage
    made[0].leave(early, FAILURE)
    made[0].flush()
    assert made[0].state == "open"


def test_a_reply_lost_after_the_effect_is_made_up_for(pods, world):
    """Results, trips and votes are told until they are heard, and count once."""
    made = pods(consecutive=1, break_for=1.0, probes=n_of_m(2, 3))
    made[0].call(FAILURE)
    made[0].lose_reply()
    assert (made[0].state, made[1].state) == ("open", "closed")
    world.flush()
    assert {one.state for one in made} == {"open"}
    world.pass_time(1.0)
    made[1].call(SUCCESS)
    made[1].lose_reply()
    world.flush()
    assert {one.state for one in made} == {"half_open"}, "one success was counted twice"
    made[2].call(SUCCESS)
    world.flush()
    assert {one.state for one in made} == {"closed"}


def a_vote_that_was_not_heard(pods: Callable[..., list[Pod]], world: World) -> list[str]:
    """Return the states after the exchange with which a pod voted went wrong."""
    made = pods(consecutive=2, quorum=2)
    for _ in range(2):
        made[0].call(FAILURE)
    message = made[0].share.pack([made[0].mirror])  # never arrives
    made[0].share._not_answered(message)
    for _ in range(2):
        made[1].call(FAILURE)
    world.flush()
    return [one.state for one in made]


def test_a_vote_that_was_not_heard_is_told_again(pods, world, monkeypatch):
    """The vote counts, though the first message was lost; without telling it again it would not."""
    assert a_vote_that_was_not_heard(pods, world) == ["open"] * 3
    monkeypatch.setattr(PendingReports, "retry", lambda *_args: None)
    assert a_vote_that_was_not_heard(pods, world) == ["closed"] * 3


def test_an_exchange_that_is_cancelled_is_not_forgotten(pods, monkeypatch):
    """If the job is stopped in the middle, what it told is told again at the end."""
    made = pods(consecutive=2, quorum=2)
    for _ in range(2):
        made[0].call(FAILURE)

    async def stopped(*_args: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(made[0].store._core, "acall", stopped, raising=False)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made[0].share.exchange([made[0].mirror]))
    assert made[0].mirror.dirty


def test_exchanges_that_overlap_do_not_mix_up_what_they_told(pods, world):
    """The answer to a poll says nothing about a result that was told after it."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    probe = made[0].enter()
    poll = made[0].told()
    made[0].leave(probe, SUCCESS)
    result = made[0].share.pack([made[0].mirror])  # gets lost
    made[0].hear(*poll)
    made[0].share._not_answered(result)
    world.flush()
    assert {one.state for one in made} == {"closed"}


def registered(store: RedisStore) -> int:
    """Return how many more jobs there are after many threads have made the first call at once."""
    before = len(store._core._background._handles)
    breaker, guard = shared(store, next(names))
    barrier = threading.Barrier(8)

    def first() -> None:
        barrier.wait()
        guard.attempt(work)

    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert breaker.state == "closed"
    return len(store._core._background._handles) - before


def test_threads_that_make_the_first_call_register_once(new_store):
    """However many threads come first, there is one job and one announcement."""
    for _ in range(5):
        store = new_store()
        assert registered(store) == 2
        store.close()


def test_without_taking_turns_they_would_register_more_than_once(new_store, monkeypatch):
    """If each that finds nothing registers, there is a job for each."""
    started = StoreCore.start
    barrier = threading.Barrier(8)

    def begin(self: SharedBreakers) -> None:
        if self._job is None:
            barrier.wait(5)
            started(self.store)
            self._register()

    monkeypatch.setattr(SharedBreakers, "begin", begin)
    assert registered(new_store()) > 2


def test_a_store_that_is_closed_is_not_begun(new_store):
    """A breaker whose store was closed before the first call goes by its own calls."""
    store = new_store()
    breaker, guard = shared(store, next(names), consecutive=1)
    store.close()
    assert guard.call(work) == "done"
    guard.attempt(fail)
    assert breaker.state == "open"


# --- An answer that says nothing ---


def answer_with(monkeypatch: Any, store: RedisStore, spoil: Callable[[Any], Any]) -> None:
    """Let the store answer exchanges with something else."""
    real = store._core.acall

    async def acall(script: str, *args: Any, **options: Any) -> Any:
        reply = await real(script, *args, **options)
        return spoil(reply) if script == "breaker" else reply

    monkeypatch.setattr(store._core, "acall", acall, raising=False)


def exchanged(pod: Pod, mirrors: list[Any] | None = None) -> None:
    """Let the background of a pod tell the store, in the store's own loop."""

    async def job() -> None:
        await pod.share.exchange(mirrors or [pod.mirror])

    done = threading.Event()
    pod.store._core._background.submit(
        lambda: asyncio.ensure_future(job()).add_done_callback(lambda _task: done.set())
    )
    assert done.wait(30)


def test_an_answer_that_never_makes_sense_does_not_disable_it(pods, monkeypatch):
    """Where the store says nothing of use of a breaker, the pod goes by its own calls."""
    one, _other, _third = pods(consecutive=2)
    one.call(FAILURE)
    one.call(FAILURE)
    answer_with(monkeypatch, one.store, lambda reply: [reply[0][:-1]])
    exchanged(one)
    assert (one.mirror.away, one.state) == ("local", "open")
    assert one.share.snapshot()["mode"] == "local"
    assert not one.call(SUCCESS)
    monkeypatch.undo()
    exchanged(one)
    assert one.mirror.away is None
    assert one.share.snapshot()["mode"] == "shared"
    assert not one.mirror.suspect


def keyed(world: World) -> tuple[Pod, list[Any]]:
    """Return a pod with a breaker of three keys, all known."""
    world.begin()
    pod = Pod(world.stores[0], world.clock, world.name, consecutive=2, key=lambda key: key)
    world.pods = [pod]
    models = [pod.breaker._model_for(key) for key in "abc"]
    exchanged(pod, models)
    return pod, models


def test_one_answer_that_makes_no_sense_is_no_harm_to_others(world, monkeypatch):
    """Of several breakers in one message, the others take in what was said to them."""
    pod, models = keyed(world)
    answer_with(monkeypatch, pod.store, lambda reply: [reply[0], b"?", reply[2]])
    exchanged(pod, models)
    assert [model.away for model in models] == [None, "local", None]


def test_one_breaker_on_which_the_script_fails_is_found(world, client):
    """If the script fails for all, they are asked for one at a time, and it is taken apart."""
    pod, models = keyed(world)
    key = models[1].keys[0]
    client.delete(key)
    client.set(key, "no hash")
    exchanged(pod, models)
    assert [model.away for model in models] == [None, "local", None]
    assert pod.store.up
    for model in models:  # it is asked for alone, and less often
        model.polled_at = 100.0
    assert not pod.share._is_due(models[1], 100.5)
    assert pod.share._is_due(models[1], 101.5)
    client.delete(key)
    exchanged(pod, [models[1]])
    assert models[1].away is None


def test_a_state_that_does_not_exist_is_put_right(pods, world, client):
    """What somebody else wrote into the store's memory is replaced by what pods know."""
    one, other, _third = pods(consecutive=1, break_for=60.0)
    one.call(FAILURE)
    world.flush()
    client.hset(one.mirror.keys[0], "state", "ajar")
    world.flush()
    assert client.hget(one.mirror.keys[0], "state") == b"open"
    client.hset(one.mirror.keys[0], "epoch", "first")
    world.flush()
    assert (one.state, other.state) == ("open", "open")


@pytest.mark.parametrize("epoch", [2**52, 2**60, int("9" * 400)])
def test_numbers_out_of_range_are_not_taken(epoch, pods):
    """A push with an epoch that nobody could count up to changes nothing."""
    one, _other, _third = pods(consecutive=1)
    push = json.dumps(["", one.mirror._lineage, str(epoch + 1), "closed", "0", "0", "", "0", ""])
    known = one.mirror._epoch
    one.share.pushed(push.encode())
    assert one.mirror._epoch == known


def test_an_epoch_near_the_end_begins_again(pods, world, client):
    """What a hostile push may say is counted on from, or begun again: all pods agree soon."""
    made = pods(consecutive=1, break_for=5.0)
    push = json.dumps(["", made[0].mirror._lineage, str(2**52), "closed", "0", "0", "", "0", ""])
    made[0].share.pushed(push.encode())
    assert made[0].mirror._epoch == 2**52
    world.flush()
    assert int(client.hget(made[0].mirror.keys[0], "epoch")) < 10
    made[1].call(FAILURE)
    world.flush()
    assert {one.state for one in made} == {"open"}


# --- The store goes away, and comes back ---


@pytest.mark.parametrize("mode", ["open", "closed"])
def test_calls_in_flight_when_the_store_goes_away_are_not_counted(mode, pods, world, client):
    """Where a pod was told not to judge alone, it does not: not by calls admitted before either."""
    made = pods(consecutive=2, on_store_failure=mode)
    flying = [made[0].enter() for _ in range(2)]
    made[0].share.lost(None, "cut off")
    for ticket in flying:
        made[0].leave(ticket, FAILURE)
    assert made[0].state == "closed"
    assert isinstance(made[0].enter(), CircuitOpen) is (mode == "closed")
    client.delete(*made[0].mirror.keys)  # restarted, without its memory
    world.flush()
    assert {one.state for one in made} == {"closed"}


def test_alone_calls_in_flight_count(pods):
    """A pod that goes by its own calls counts those that were admitted before as well."""
    made = pods(consecutive=2)
    flying = [made[0].enter() for _ in range(2)]
    made[0].share.lost(None, "cut off")
    for ticket in flying:
        made[0].leave(ticket, FAILURE)
    assert made[0].state == "open"


def test_a_trip_that_was_not_heard_holds_alone(pods):
    """A pod that had tripped when the store went away stays open by itself."""
    made = pods(consecutive=1)
    made[0].call(FAILURE)
    made[0].share.lost(None, "cut off")
    assert made[0].state == "open"


def test_an_answer_of_before_the_outage_does_not_end_it(pods, monkeypatch):
    """What the store said before it went away is not taken for a sign that it is back."""
    made = pods(consecutive=1, quorum=2)
    made[0].call(FAILURE)
    under_way = made[0].told()
    monkeypatch.setattr(made[0].store._core.health, "up", False)
    made[0].share.store_changed(up=False, cause="cut off")
    made[0].hear(*under_way)
    assert made[0].mirror.away == "local"
    assert made[0].mirror.dirty


@pytest.mark.parametrize("mode", ["local", "open", "closed"])
def test_isolated_holds_without_the_store(mode, pods):
    """What was isolated by hand, before the store went away or after, lets nothing through."""
    made = pods(on_store_failure=mode)
    made[0].breaker.isolate()
    made[0].flush()
    made[0].share.lost(None, "cut off")
    assert "isolated by hand" in str(made[0].enter())
    made[0].breaker.close()
    made[0].breaker.isolate()
    assert "isolated by hand" in str(made[0].enter())


def test_evidence_is_told_once(pods, world):
    """Calls that were told before the store went away are not told again with the evidence."""
    for window in ({"window": 100.0}, {"window_calls": 50}):
        made = pods(failure_ratio=0.5, min_calls=10, **window)
        for _ in range(9):
            made[1].call(SUCCESS)
        made[1].flush()
        for _ in range(8):
            made[0].call(FAILURE)
        world.flush()
        assert made[0].mirror._totals == (20, 8, 0)
        made[0].share.lost(None, "cut off")
        for _ in range(2):
            made[0].call(FAILURE)
        assert made[0].state == "open"
        made[0].lose_reply()
        world.flush()
        assert made[0].mirror._totals[1] in (9, 10)
        assert {one.state for one in made} == {"closed"}


def forgotten(pods: Callable[..., list[Pod]], world: World, client: Any, state: str) -> list[str]:
    """Let the store forget all, and a new pod come first; return what they know afterwards."""
    made = pods(consecutive=1, break_for=600.0)
    if state == "isolated":
        made[0].breaker.isolate()
    elif state == "open":
        made[0].call(FAILURE)
    made[0].flush()
    made[1].flush(poll=True)
    client.delete(*made[0].mirror.keys)
    new = Pod(world.stores[2], world.clock, world.name, consecutive=1, break_for=600.0)
    assert new.call(SUCCESS)
    world.pods = [made[2], made[0], made[1], new]  # the first of them may not have heard of it
    world.flush()
    made[2].guard.close()
    return [one.state for one in world.pods]


@pytest.mark.parametrize("state", ["closed", "open", "isolated"])
def test_a_new_pod_that_comes_first_after_a_loss_decides_nothing(state, pods, world, client):
    """After FLUSHALL pods that know it to be broken are believed, not one that knows nothing."""
    assert forgotten(pods, world, client, state) == [state] * 4


def test_without_doubt_a_new_pod_would_close_it(pods, world, client, monkeypatch):
    """If the first word held, a new pod would let all calls through, isolated or not."""
    mutate(monkeypatch, "breaker", "    or knows_better(told, at)\n", "")
    assert forgotten(pods, world, client, "isolated") == ["closed"] * 4


def test_that_it_was_begun_anew_is_pushed(pods, world, client):
    """Pods that believed the first one hear that another knew better."""
    made = pods(consecutive=1, break_for=600.0)
    made[0].breaker.isolate()
    made[0].flush()
    epoch = made[0].mirror._epoch
    client.delete(*made[0].mirror.keys)
    made[2].mirror.__init__(made[2].share, made[2].breaker.settings, None, "", made[2].mirror.keys)
    assert made[2].call(SUCCESS)
    client.hset(made[2].mirror.keys[0], "epoch", epoch + 1)  # by chance the same number
    with client.pubsub() as ears:
        ears.subscribe(made[0].store._core.channel("breaker", world.name))
        ears.get_message(timeout=5)
        made[0].flush(poll=True)
        pushed = ears.get_message(timeout=5)
    assert json.loads(pushed["data"])[3] == "isolated"


def test_doubt_ends(pods, world, client):
    """A breaker that was begun seconds ago is what the store says, not what a pod remembers."""
    for ends in ("time", "a command", "a change", "a clock set back"):
        made = pods(consecutive=1, break_for=0.25)
        made[0].breaker.isolate()
        made[0].flush()
        client.delete(*made[0].mirror.keys)
        new = Pod(world.stores[2], world.clock, world.name, consecutive=1, break_for=0.25)
        assert new.call(SUCCESS)
        if ends == "time":
            world.pass_time(2.0)
        elif ends == "a command":
            new.breaker.close()
            new.flush()
        elif ends == "a change":
            new.call(FAILURE)
            new.flush()
            world.pass_time(0.25)
            assert new.call(SUCCESS)
            new.flush()
        else:
            world.frozen.advance(-3_600_000_000)
        made[0].flush(poll=True)
        assert made[0].state == "closed", ends
        new.guard.close()


def test_a_pod_that_lags_behind_does_not_know_better(pods, world, client):
    """Who knows an older state than the one that told the store is not believed."""
    made = pods(consecutive=1, break_for=600.0)
    made[0].call(FAILURE)
    world.flush()
    made[0].breaker.close()
    made[0].flush()
    assert (made[0].state, made[1].state) == ("closed", "open")
    client.delete(*made[0].mirror.keys)
    made[0].flush(poll=True)
    made[1].flush(poll=True)
    assert (made[0].state, made[1].state) == ("closed", "closed")


# --- By hand ---


def test_a_new_pod_that_closes_it_lets_calls_through(new_store):
    """After close() in a pod that was never asked, the next call passes."""
    store, name = new_store(), next(names)
    first, guard = shared(store, name, consecutive=1, break_for=60.0)
    guard.attempt(fail)
    eventually(lambda: first.state == "open")
    late, new = shared(new_store(), name, consecutive=1, break_for=60.0)
    late.close()
    assert new.call(work) == "done"
    eventually(lambda: first.state == "closed")


def test_close_holds_while_an_answer_says_otherwise(pods, world):
    """A call that asked before close() and is answered after it goes by close()."""
    made = pods(consecutive=1, break_for=600.0)
    broken(made, world, 0.0)
    new = Pod(world.stores[2], world.clock, world.name, consecutive=1, break_for=600.0)
    new.breaker.close()
    reply = new.store._core.call("breaker", *new.share._questions.pack([(new.mirror, "id")]))
    ((standing, granted),) = new.share._questions.unpack(reply, [(new.mirror, "id")])
    assert standing.state.value == "open"
    assert new.share.answered(new.mirror, standing, granted) == new.mirror.generation
    new.guard.close()


@pytest.mark.parametrize(
    "rule",
    [
        {"consecutive": 1},
        {"consecutive": 1, "quorum": 1},
        {"failure_ratio": 0.1, "min_calls": 1, "quorum": 1},
    ],
)
def test_close_holds_though_a_trip_is_under_way(rule, pods, world):
    """What was counted before close() does not open it again afterwards."""
    made = pods(**rule, break_for=60.0)
    made[0].call(FAILURE)
    under_way = made[0].told()
    made[0].breaker.close()
    made[0].hear(*under_way)
    for _ in range(2):
        world.flush()
        assert {one.state for one in made} == {"closed"}


def test_close_withdraws_a_vote(pods, client):
    """After close() a vote that was told counts no more, also if it was closed all along."""
    made = pods(consecutive=1, quorum=2)
    made[0].call(FAILURE)
    made[0].flush()
    assert client.zcard(made[0].mirror.keys[5]) == 1
    made[0].breaker.close()
    made[0].flush()
    assert client.zcard(made[0].mirror.keys[5]) == 0


def a_command_told_twice(pods: Callable[..., list[Pod]], world: World) -> list[str]:
    """Return the states after an order whose reply was lost is told again, undone meanwhile."""
    made = pods()
    made[0].breaker.isolate()
    made[0].lose_reply()
    made[1].flush(poll=True)
    assert made[1].state == "isolated"
    made[1].breaker.close()
    made[1].flush()
    world.flush()
    return [one.state for one in made]


def test_a_command_is_done_once(pods, world, monkeypatch):
    """An order that is told again is not done again; without its id it would undo another's."""
    assert a_command_told_twice(pods, world) == ["closed"] * 3
    mutate(monkeypatch, "breaker", "if known == order then", "if false then")
    assert a_command_told_twice(pods, world) == ["isolated"] * 3


def test_only_the_latest_commands_are_remembered(pods, client):
    """However often it is closed and isolated, the store keeps a few ids."""
    made = pods()
    for _ in range(10):
        made[0].breaker.isolate()
        made[0].flush()
        made[0].breaker.close()
        made[0].flush()
    assert len(client.hget(made[0].mirror.keys[0], "orders").split()) == 8


# --- Votes, polls, processes ---


def test_a_bad_pod_does_not_hammer_the_store(pods, world, monkeypatch):
    """Under a quorum a pod tells when it changes its mind, and again now and then."""
    made = pods(consecutive=2, quorum=2)
    hurried: list[float] = []
    monkeypatch.setattr(made[0].share, "soon", lambda: hurried.append(world.clock.now()))
    told = 0
    for _ in range(200):
        made[0].call(FAILURE)
        told += made[0].mirror.dirty
        made[0].flush(notice=True)
        world.pass_time(0.25)
    assert len(hurried) == 1
    assert told == 5  # in 50 s: a vote holds for 30, and is renewed after 10


def test_a_trip_is_told_at_once_and_not_again_and_again(pods, monkeypatch):
    """While the answer is under way, more failures are no news."""
    made = pods(consecutive=1)
    hurried: list[int] = []
    monkeypatch.setattr(made[0].share, "soon", lambda: hurried.append(1))
    for _ in range(100):
        made[0].call(FAILURE)
    assert len(hurried) == 1


def test_a_failure_can_be_what_withdraws_a_vote(pods, client):
    """A pod that is fine again says so, also if it notices when a call fails."""
    made = pods(failure_ratio=0.5, window=30.0, min_calls=2, quorum=2)
    for _ in range(2):
        made[0].call(FAILURE)
    made[0].flush()
    votes = made[0].mirror.keys[5]
    assert client.zcard(votes) == 1
    for _ in range(10):
        made[0].call(SUCCESS)
    made[0].call(FAILURE)
    made[0].flush()
    assert client.zcard(votes) == 0


def a_vote_and_a_clock_set_back(pods: Callable[..., list[Pod]], world: World) -> str:
    """Return the state if one pod votes, long after another did by a clock that was wrong."""
    made = pods(consecutive=2, quorum=2)
    for _ in range(2):
        made[0].call(FAILURE)
    made[0].flush()
    world.frozen.advance(-3_600_000_000)
    world.pass_time(600.0)
    for _ in range(2):
        made[1].call(FAILURE)
    made[1].flush()
    return made[1].state


def test_a_vote_from_the_future_does_not_count(pods, world, monkeypatch):
    """A clock set back does not let a dead pod vote for an hour; without the rule it would."""
    assert a_vote_and_a_clock_set_back(pods, world) == "closed"
    rule = (
        "redis.call('ZREMRANGEBYSCORE', b.votes, '(' .. text(now + 2 * settings.vote_for), '+inf')"
    )
    mutate(monkeypatch, "breaker", rule, "")
    assert a_vote_and_a_clock_set_back(pods, world) == "open"


def test_a_key_in_use_is_asked_for_as_often_as_any(world, monkeypatch):
    """Only keys that nobody uses are polled less often: a lost push is noticed within a second."""
    pod, models = keyed(world)
    times: list[float] = []

    async def exchange(_mirrors: Any) -> None:
        times.append(now)

    monkeypatch.setattr(pod.share, "exchange", exchange)
    loop = SimpleNamespace(time=lambda: now)
    monkeypatch.setattr(breaker_share, "get_running_loop", lambda: loop)
    for model in models:
        model.polled_at = 0.0
    pod.guard.call(work, "a")
    for quarter in range(1, 24):
        now = quarter / 4
        asyncio.run(pod.share.run())
        pod.guard.call(work, "a")
    assert times == [1.0, 2.0, 3.0, 4.0, 5.0]
    now = 10.0
    asyncio.run(pod.share.run())
    assert models[1].polled_at == 10.0
    monkeypatch.setattr(breaker_share, "POLL_IDLE", 0.5)
    assert pod.share._is_due(models[1], 10.5)


def test_a_child_process_does_not_tell_what_runs_in_its_parent(pods, world):
    """Calls that were running at the fork are slow in the parent only."""
    made = pods(slow_after=0.5, slow_ratio=0.5, min_calls=2)
    flying = [made[0].enter() for _ in range(10)]
    made[0].mirror.after_fork()
    for ticket in flying[:5]:
        made[0].leave(ticket, FAILURE)
    made[0].call(SUCCESS)
    world.pass_time(1.0)
    made[0].flush(notice=True)
    assert made[0].mirror._totals == (4, 0, 0)
    assert made[0].state == "closed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_isolated_hears_when_that_is_over(store):
    """A child that refuses all calls still follows the others."""
    breaker, guard = shared(store, next(names))
    guard.call(work)
    breaker.isolate()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert guard.attempt(work).reason == "circuit_open"
            os.write(ready[1], b"x")
            eventually(lambda: guard.attempt(work).ok, 10.0)
            status = 0
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    breaker.close()
    assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *go):
        os.close(end)


# --- Clocks that jump ---


def a_probe_from_the_future(pods: Callable[..., list[Pod]], world: World) -> bool:
    """Tell whether others may try, if a pod died with a probe and the clock was set back."""
    made = pods(consecutive=1, break_for=1.0, probe_timeout=6.0)
    broken(made, world)
    assert isinstance(made[0].enter(), GrantedProbe)
    world.frozen.advance(-3_600_000_000)
    for _ in range(20):
        world.pass_time(1.0)
        made[1].flush(poll=True)
        if made[1].call(SUCCESS):
            return True
    return False


def test_a_clock_set_back_does_not_keep_it_half_open(pods, world, monkeypatch):
    """A probe from the future has failed; if it were waited for, nobody could try for an hour."""
    assert a_probe_from_the_future(pods, world)
    mutate(monkeypatch, "breaker", ", {ahead, '+inf'}", "")
    assert not a_probe_from_the_future(pods, world)


def a_break_and_a_clock_set_back(pods: Callable[..., list[Pod]], world: World) -> bool:
    """Tell whether it is tried again soon after the break, if the clock is set back in it."""
    made = pods(consecutive=1, break_for=5.0)
    broken(made, world, 0.0)
    world.frozen.advance(-7_200_000_000)
    for _ in range(20):
        world.pass_time(1.0)
        world.flush()
        if made[1].call(SUCCESS):
            return True
    return False


def test_a_clock_set_back_does_not_keep_it_open(pods, world, monkeypatch):
    """A break of which more is left than it had begins again; else it would last for hours."""
    assert a_break_and_a_clock_set_back(pods, world)
    mutate(monkeypatch, "breaker", "if rest > 2 * at[length] then", "if false then")
    assert not a_break_and_a_clock_set_back(pods, world)


def changed_by_a_message(pods: Callable[..., list[Pod]], world: World) -> str:
    """Return the state after one message that closes the breaker and reports failures."""
    made = pods(failure_ratio=0.5, window=100.0, min_calls=2, break_for=60.0)
    for _ in range(3):
        made[0].call(FAILURE)
    sent = made[0].share.pack([made[0].mirror])
    made[1].breaker.isolate()
    made[1].flush()
    made[0].flush(poll=True)
    message = json.loads(sent.args[2]) | {
        "command": "close",
        "order": "another",
        "lineage": made[0].mirror._lineage,
        "epoch": made[0].mirror._epoch,
    }
    made[0].store._core.call("breaker", sent.keys, [*sent.args[:2], json.dumps(message)])
    world.flush()
    return made[0].state


def test_what_comes_with_a_command_is_of_before_it(pods, world, monkeypatch):
    """Counts in the message that closes the breaker do not open it again; unfenced they would."""
    assert changed_by_a_message(pods, world) == "closed"
    mutate(monkeypatch, "breaker", "  b.present = false\n", "")
    assert changed_by_a_message(pods, world) == "open"


def told_by_a_child(pods: Callable[..., list[Pod]]) -> int:
    """Return how many calls a child tells of, if its parent had not told of five yet."""
    made = pods(failure_ratio=1.0, window=30.0, min_calls=1000)
    for _ in range(5):
        made[0].call(SUCCESS)
    made[0].mirror.after_fork()
    made[0].call(SUCCESS)
    made[0].flush()
    return int(made[0].mirror._totals[0]) - 3


def test_what_the_parent_counted_is_not_told_by_the_child(pods, monkeypatch):
    """A child leaves out what its parent will tell; if it did not, it would be told twice."""
    assert told_by_a_child(pods) == 1
    forked = BreakerMirror.after_fork

    def keeping(self: BreakerMirror) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(BreakerReport, "take", lambda _self: [])
            forked(self)

    monkeypatch.setattr(BreakerMirror, "after_fork", keeping)
    assert told_by_a_child(pods) == 6


def call_of_a_new_pod(pods: Callable[..., list[Pod]], world: World) -> bool:
    """Tell whether a pod that is new calls in the middle of an outage."""
    made = pods(consecutive=1, break_for=60.0)
    broken(made, world, 0.0)
    new = Pod(world.stores[2], world.clock, world.name, consecutive=1, break_for=60.0)
    try:
        return new.call(SUCCESS)
    finally:
        new.guard.close()


def test_without_asking_first_a_new_pod_disturbs_an_outage(pods, world, monkeypatch):
    """A new pod asks before its first call; if it took itself to be closed, it would call."""
    assert not call_of_a_new_pod(pods, world)
    made = BreakerMirror.__init__

    def knowing(self: BreakerMirror, *args: Any) -> None:
        made(self, *args)
        self._known = True
        self._count_in(self._window)

    monkeypatch.setattr(BreakerMirror, "__init__", knowing)
    assert call_of_a_new_pod(pods, world)


def test_a_key_that_was_forgotten_here_is_as_the_others_left_it(new_store):
    """A key for which this pod had no room is asked for when it comes back."""
    name = next(names)
    rule = {"consecutive": 1, "break_for": 60.0, "key": lambda key: key}
    small, guard = shared(new_store(), name, max_keys=1, **rule)
    other, across = shared(new_store(), name, **rule)
    for each in ("a", "b"):
        assert guard.call(work, each) == "done"
    assert list(small.models()) == ["b"]
    across.call(work, "a")
    across.attempt(fail, "a")
    eventually(lambda: not other.models()["a"].dirty)  # the store has heard that it is open
    assert other.state == "open"
    assert guard.attempt(work, "a").reason == "circuit_open"


def test_probes_that_were_given_to_others_are_not_taken(pods, world):
    """An answer with the id of another probe makes no sense, and grants nothing."""
    made = pods(consecutive=1, break_for=1.0)
    broken(made, world)
    questions = made[0].share._questions
    reply = made[0].store._core.call("breaker", *questions.pack([(made[0].mirror, "mine")]))
    assert questions.unpack(reply, [(made[0].mirror, "mine")])[0][1] == "mine"
    assert isinstance(questions.unpack(reply, [(made[0].mirror, "yours")])[0], InvalidReply)
    with pytest.raises(StoreUnavailable):
        questions.unpack([], [(made[0].mirror, "mine")])
