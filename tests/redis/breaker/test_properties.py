"""What must hold of a breaker that pods share, on random histories; and what its safeguards do.

Each property drives three pods on one server, and fails without its safeguard in the script.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import redis
from hypothesis import given, settings

from seawall import CircuitOpen
from seawall.models.breaker.probes import CallVerdict
from seawall.policies.breaker import n_of_m, ramp, single_probe
from seawall.redis.breaker.mirror import GrantedProbe
from tests.redis.breaker.breakers import Pod, World, quiet_world
from tests.redis.support import mutate
from tests.support import SEEDS, falsified

SUCCESS, FAILURE, NONE = CallVerdict.SUCCESS, CallVerdict.FAILURE, CallVerdict.NONE
EXAMPLES = settings(max_examples=40)
PROBES = (single_probe(), n_of_m(1, 2), n_of_m(2, 3))


@pytest.fixture(scope="module")
def world(redis_url):
    """Return three pods on one server, whose clock stands still; each history begins anew."""
    with redis.Redis.from_url(redis_url) as client, quiet_world(redis_url, client, 3) as made:
        yield made


def without(monkeypatch: Any, before: str, after: str) -> None:
    """Take a safeguard out of the script."""
    mutate(monkeypatch, "breaker", before, after)


class History:
    """A random history of three pods."""

    def __init__(self, world: World, seed: int, **options: Any) -> None:
        world.begin()
        self.world = world
        self.rng = Random(seed)
        self.options = {"consecutive": 1, "break_for": 2.0, "probe_timeout": 6.0, **options}
        self.pods = world.add(**self.options)
        self.flying: list[tuple[Pod, Any]] = []

    def step(
        self, verdicts: tuple[CallVerdict, ...] = tuple(CallVerdict), longest: int = 6
    ) -> None:
        """Let a pod do something, or time pass; some pods hear of it, others do not yet."""
        pod = self.rng.choice(self.pods)
        action = self.rng.choice(("enter", "enter", "leave", "wait", "flush"))
        if action == "enter":
            ticket = pod.enter()
            if not isinstance(ticket, CircuitOpen):
                self.flying.append((pod, ticket))
        elif action == "leave" and self.flying:
            pod, ticket = self.flying.pop(self.rng.randrange(len(self.flying)))
            pod.leave(ticket, self.rng.choice(verdicts))
            if self.rng.random() < 0.7:
                pod.flush()
        elif action == "wait":
            self.world.pass_time(self.rng.randint(1, longest) / 4)
        else:
            pod.flush(poll=True)

    @property
    def probes(self) -> int:
        """How many probes of the present trial are in flight, in all pods together."""
        epochs = [pod.mirror._epoch for pod in self.pods]
        newest = max(epochs)
        return sum(
            isinstance(ticket, GrantedProbe)
            and pod.mirror._epoch == newest
            and ticket.generation == pod.mirror.generation
            for pod, ticket in self.flying
        )


# --- Half-open in flight <= probes, in all pods together ---


def no_more_probes_than_configured(world: World, seed: int) -> None:
    """Fail if at any moment more probes of one trial are in flight than there may be."""
    history = History(world, seed, probes=PROBES[seed % 3])
    for _ in range(40):
        history.step((FAILURE, NONE, SUCCESS), longest=4)
        assert history.probes <= history.options["probes"].m


@EXAMPLES
@given(seed=SEEDS)
def test_half_open_in_flight_is_bounded_over_all_pods(world, seed):
    """No more probes than configured are in flight, in all pods together."""
    no_more_probes_than_configured(world, seed)


def test_without_counting_what_is_out_there_are_too_many_probes(world, monkeypatch):
    """If the store did not count the probes that are out, the pods would make too many."""
    without(monkeypatch, "redis.call('ZCARD', b.probes) + at.passed", "at.passed")
    assert falsified(lambda seed: no_more_probes_than_configured(world, seed), SEEDS)


# --- What belongs to an older epoch changes nothing ---


def the_past_changes_nothing(world: World, seed: int) -> None:
    """Fail if what was counted before a change of state trips the breaker after it."""
    rng = Random(seed)
    world.begin()
    early, late, other = world.add(failure_ratio=0.5, window=100.0, min_calls=4, break_for=1.0)
    for pod in world.pods:
        assert pod.call(SUCCESS)
    for _ in range(rng.randint(3, 6)):
        late.call(FAILURE)  # counted, and not told yet
    early.breaker.isolate()
    early.flush()
    early.breaker.close()
    early.flush()
    late.flush(poll=True)
    other.flush(poll=True)
    assert early.state == late.state == other.state == "closed"


@EXAMPLES
@given(seed=SEEDS)
def test_an_older_epoch_changes_nothing(world, seed):
    """Counts of an older epoch that a pod tells late are ignored."""
    the_past_changes_nothing(world, seed)


def test_without_the_epoch_old_counts_trip(world, monkeypatch):
    """If the store did not compare epochs, late counts would trip a breaker just closed."""
    without(monkeypatch, "told.lineage == at.lineage and told.epoch == at.epoch", "true")
    assert falsified(lambda seed: the_past_changes_nothing(world, seed), SEEDS)


# --- A cancelled probe returns its permit ---


def no_permit_is_lost(world: World, seed: int) -> None:
    """Fail if after cancelled and unused probes there is not room for all of them again."""
    rng = Random(seed)
    history = History(world, seed, probes=PROBES[seed % 3])
    pods, room = history.pods, history.options["probes"].m
    for pod in pods:
        pod.call(SUCCESS)
    pods[0].call(FAILURE)
    world.flush()
    world.pass_time(2.0)
    for _ in range(rng.randint(1, 4)):
        out = [(pod, pod.enter()) for pod in rng.choices(pods, k=room)]
        assert not any(isinstance(ticket, CircuitOpen) for _, ticket in out)
        assert isinstance(rng.choice(pods).enter(), CircuitOpen)
        for pod, ticket in out:
            rng.choice((pod.unused, lambda own, pod=pod: pod.leave(own, NONE)))(ticket)
            pod.flush()


@EXAMPLES
@given(seed=SEEDS)
def test_a_cancelled_probe_returns_its_permit_to_all(world, seed):
    """What a pod gives back, any pod can take."""
    no_permit_is_lost(world, seed)


def test_without_giving_it_back_the_permit_is_lost(world, monkeypatch):
    """If a probe without a verdict stayed out, there would be no room for the next."""
    without(monkeypatch, "  redis.call('ZREM', b.probes, named(id, stage))\n", "")
    assert falsified(lambda seed: no_permit_is_lost(world, seed), SEEDS)


# --- Never stuck half-open ---


def never_stuck(world: World, seed: int) -> None:
    """Fail if pods that die with a probe keep the others from ever trying again."""
    history = History(world, seed, probes=(*PROBES, ramp((0.5,), step=1.0))[seed % 4])
    for _ in range(30):
        history.step((FAILURE, NONE), longest=4)
    survivor = history.rng.choice(history.pods)  # the others are killed, whatever they hold
    for _ in range(40):
        survivor.flush(poll=True)
        if survivor.call(SUCCESS) and survivor.state == "closed":
            break
        world.pass_time(1.0)
        survivor.flush(poll=True)
    assert survivor.state == "closed"


@EXAMPLES
@given(seed=SEEDS)
def test_never_stuck_half_open(world, seed):
    """A pod that dies with a probe does not keep the breaker half-open."""
    never_stuck(world, seed)


def test_without_giving_up_hung_probes_it_is_stuck(world, monkeypatch):
    """If probes did not expire, one dead pod would be enough."""
    without(monkeypatch, "redis.call('ZRANGEBYSCORE', b.probes, range[1], range[2])", "{}")
    assert falsified(lambda seed: never_stuck(world, seed), SEEDS)


# --- One bad pod cannot trip a quorum ---


def a_bad_pod_is_outvoted(world: World, seed: int) -> None:
    """Fail if the failures of one pod open the breaker of all, where two have to agree."""
    rng = Random(seed)
    world.begin()
    rule = rng.choice(({"consecutive": 2}, {"failure_ratio": 0.5, "window": 10.0, "min_calls": 2}))
    bad, *good = world.add(**rule, quorum=2)
    for _ in range(rng.randint(5, 15)):
        bad.call(FAILURE)
        for pod in good:
            pod.call(SUCCESS)
        rng.choice(world.pods).flush(notice=True, poll=True)
        world.pass_time(rng.randint(0, 8) / 4)
    world.flush()
    assert [pod.state for pod in world.pods] == ["closed"] * 3


@EXAMPLES
@given(seed=SEEDS)
def test_one_bad_pod_cannot_trip_a_quorum(world, seed):
    """One pod that fails alone never opens the breaker of the others."""
    a_bad_pod_is_outvoted(world, seed)


def test_without_counting_votes_one_bad_pod_trips(world, monkeypatch):
    """If one vote were enough, a bad pod would stop all."""
    without(monkeypatch, "redis.call('ZCARD', b.votes) >= settings.quorum", "vote")
    assert falsified(lambda seed: a_bad_pod_is_outvoted(world, seed), SEEDS)


def a_vote_is_withdrawn(world: World, seed: int) -> None:
    """Fail if pods that were bad at different times are counted as if it were at once."""
    rng = Random(seed)
    world.begin()
    pods = world.add(failure_ratio=0.5, window=10.0, min_calls=2, quorum=2)
    for pod in rng.sample(pods, 3):
        for _ in range(2):
            assert pod.call(FAILURE)
        pod.flush()
        for _ in range(3):
            assert pod.call(SUCCESS)
        pod.flush(notice=True)
    assert [pod.state for pod in pods] == ["closed"] * 3


@settings(max_examples=10)
@given(seed=SEEDS)
def test_a_vote_is_withdrawn_when_the_pod_is_fine_again(world, seed):
    """Pods that have recovered do not count towards the quorum."""
    a_vote_is_withdrawn(world, seed)


def test_without_withdrawal_old_votes_trip(world, monkeypatch):
    """If votes stayed, troubles of yesterday would add up."""
    without(monkeypatch, "redis.call('ZREM', b.votes, b.told.pod)", "")
    assert falsified(lambda seed: a_vote_is_withdrawn(world, seed), SEEDS)


def test_enough_votes_trip(world):
    """When as many pods as the quorum are bad, the breaker opens in all."""
    world.begin()
    pods = world.add(consecutive=2, quorum=2)
    for pod in pods[:2]:
        pod.call(FAILURE)
        pod.call(FAILURE)
    world.flush()
    assert [pod.state for pod in pods] == ["open"] * 3


def test_a_vote_expires_with_the_window(world):
    """A pod that has voted and says nothing more is forgotten with its window."""
    world.begin()
    first, second, _third = world.add(failure_ratio=0.5, window=10.0, min_calls=2, quorum=2)
    for pod in (first, second):
        pod.call(SUCCESS)
        world.pass_time(10.0)
        pod.call(FAILURE)
        pod.call(FAILURE)
        pod.flush()
    world.flush()
    assert second.state == "closed"
