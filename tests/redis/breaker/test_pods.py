"""Three processes and one vendor that has outages: the shared breaker as the vendor sees it.

Each pod calls the vendor all the time, through two shared breakers, and one that it has for itself
to show that without sharing the same is not true. What is demanded is read from the vendor's log
and from what pods report; see `pods/logs.py` for how arrivals are told from decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import Final, NamedTuple

import pytest
import redis

from seawall.clock import SYSTEM
from tests.conftest import SEED
from tests.redis.pods.accounts import BREAK_FOR, PROBES, SUCCESSES
from tests.redis.pods.fleet import PATIENCE, Fleet, Pod
from tests.redis.pods.logs import Entry, enough, most_within, percentile

TRIPS: Final = 20
SHARED: Final = ("one", "some")
LONG: Final = 0.25
"""Seconds within which an outage must have opened the breaker in all pods, nearly always."""
LONGEST: Final = 1.0
"""And always."""


class Trip(NamedTuple):
    """One outage, as one account saw it."""

    closed_before: dict[str, float]
    """When each pod had closed its breaker, before."""
    began: float
    opened: dict[str, float]
    """When each pod opened it."""
    healed: float
    closed: dict[str, float]
    """When each pod closed it again."""

    def probes(self, log: Sequence[Entry], successes: int) -> list[Entry]:
        """Return what was let through by breakers that were not closed.

        That is, what was asked for when its pod had opened the breaker, or was started in the
        outage, and arrived before the vendor had given the last good answer that closing takes.
        """
        after = [
            entry
            for entry in log
            if self.began <= entry.asked
            and self.opened.get(entry.pod, self.began) <= entry.asked
            and entry.asked < self.closed.get(entry.pod, inf)
        ]
        good = sorted(entry.answered for entry in after if entry.ok)
        return [entry for entry in after if entry.arrived <= good[successes - 1]]


class Story(NamedTuple):
    """All outages of all accounts, and what the vendor saw."""

    trips: dict[str, list[Trip]]
    logs: dict[str, list[Entry]]
    last: dict[str, Trip]
    """One outage more, in which pods were killed and started."""
    last_logs: dict[str, list[Entry]]
    modes: list[dict[str, object]]
    ended: Sequence[int]

    def latencies(self, account: str) -> list[float]:
        """Return for each outage how long it took until the last pod had opened its breaker.

        For "one", from the first failure: ten are enough, and they come at once. The other counts
        all calls since it was closed, so from when as many had failed as it takes.
        """
        found = []
        for trip in self.trips[account]:
            log = [
                entry
                for entry in self.logs[account]
                if entry.asked >= trip.closed_before[entry.pod] and entry.arrived < trip.healed
            ]
            if account == "one":
                since = min(entry.answered for entry in log if not entry.ok)
            else:
                since = enough(log, 0.5, 10)
            found.append(max(trip.opened.values()) - since)
        return found


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("sync", "async", "both"), id="mixed"),
        *(pytest.param((s,), id=s, marks=pytest.mark.slow) for s in ("sync", "async", "both")),
    ],
)
def story(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Story]:
    """Let three pods go through the outages."""
    rng = Random(SEED)
    accounts = tuple(PROBES)
    with Fleet(redis_url, accounts, styles=request.param, pause=0.02, latency=0.01) as fleet:
        fleet.start(3)
        fleet.wait_ready()
        start = SYSTEM.now()
        trips: dict[str, list[Trip]] = {account: [] for account in accounts}
        closed = {account: {pod.name: start for pod in fleet.pods} for account in accounts}
        for _ in range(TRIPS):
            fleet.listen(rng.uniform(0.05, 0.15))  # so many calls go well
            began = _tell_all(fleet, "fail")
            opened = _all_are("open", fleet, began)
            fleet.listen(rng.uniform(0.0, 1.5 * BREAK_FOR))  # probes fail, in some
            healed = _tell_all(fleet, "heal")
            before, closed = closed, _all_are("closed", fleet, healed)
            for a in accounts:
                trips[a].append(Trip(before[a], began, opened[a], healed, closed[a]))
        logs = {account: fleet.log(account) for account in accounts}
        began = _tell_all(fleet, "fail")
        opened = _all_are("open", fleet, began)
        _come_and_go(fleet, rng)
        healed = _tell_all(fleet, "heal")
        _wait_until_all_are_served(fleet, healed)
        last = {a: Trip(closed[a], began, opened[a], healed, {}) for a in accounts}
        last_logs = {account: fleet.log(account) for account in accounts}
        told = Story(trips, logs, last, last_logs, fleet.reports("mode"), fleet.end())
    yield told
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        for key in client.scan_iter(match=f"{fleet.prefix}:*", count=1000):
            client.delete(key)


def _tell_all(fleet: Fleet, word: str) -> float:
    """Let the vendor fail or be well, for all accounts; return when it was told."""
    at = SYSTEM.now()
    for account in fleet.accounts:
        fleet.tell(word, account)
    return at


def _come_and_go(fleet: Fleet, rng: Random) -> None:
    """Kill pods, and start others in their place."""
    for _ in range(3):
        fleet.listen(rng.uniform(0.0, BREAK_FOR))
        fleet.kill(rng.choice(fleet.pods))
        fleet.start()
    fleet.wait_ready()
    fleet.listen(2 * BREAK_FOR)


def _wait_until_all_are_served(fleet: Fleet, since: float) -> None:
    pods = {pod.name for pod in fleet.pods}
    for account in fleet.accounts:
        while {
            entry.pod for entry in fleet.log(account) if entry.ok and entry.asked >= since
        } != pods:
            assert SYSTEM.now() < since + PATIENCE, f"not all pods are served: {account}"
            fleet.listen(0.05)


def _all_are(state: str, fleet: Fleet, since: float) -> dict[str, dict[str, float]]:
    """Wait until all breakers of all pods are; return when each was, for the first time."""

    def all_are() -> bool:
        return all(pod.when(name, state, since) for pod in fleet.pods for name in fleet.accounts)

    fleet.wait(f"all breakers are {state}", all_are)
    return {
        account: {pod.name: _when(pod, account, state, since) for pod in fleet.pods}
        for account in fleet.accounts
    }


def _when(pod: Pod, account: str, state: str, since: float) -> float:
    at = pod.when(account, state, since)
    assert at is not None
    return at


@pytest.mark.parametrize("account", SHARED)
def test_an_outage_opens_the_breaker_in_all_pods(story: Story, account: str):
    """Of 20 outages 19 have opened all pods' breakers within 250 ms, and all within a second."""
    latencies = story.latencies(account)
    shown = sorted(round(1000 * latency) for latency in latencies)
    print(f"{account}: all pods open after {shown} ms")  # noqa: T201
    assert len(latencies) == TRIPS
    assert percentile(latencies, 0.95) <= LONG, shown
    assert max(latencies) <= LONGEST, shown


@pytest.mark.parametrize("account", SHARED)
def test_an_open_breaker_lets_nothing_through(story: Story, account: str):
    """What is asked for while the breaker is open does not reach the vendor, from no pod."""
    for trip in story.trips[account]:
        first = min(
            entry.answered
            for entry in story.logs[account]
            if not entry.ok and trip.began <= entry.answered
        )
        leaks = [
            entry
            for entry in story.logs[account]
            if entry.asked >= trip.opened[entry.pod] and entry.arrived < first + BREAK_FOR
        ]
        assert not leaks


def _most_probes(story: Story, account: str) -> list[int]:
    """Return for each outage the most probes that reached the vendor in one trial.

    Between two trials there is a break, so what falls into the length of one is of one trial.
    """
    log, successes = story.logs[account], SUCCESSES[account]
    return [most_within(trip.probes(log, successes), BREAK_FOR) for trip in story.trips[account]]


def _most_in_the_last(story: Story, account: str) -> int:
    probes = story.last[account].probes(story.last_logs[account], SUCCESSES[account])
    return most_within(probes, BREAK_FOR)


@pytest.mark.parametrize("account", SHARED)
def test_no_more_probes_than_configured_reach_the_vendor(story: Story, account: str):
    """All pods together send one probe where one may be sent, and three of three; never more."""
    most = _most_probes(story, account)
    assert max(most) <= PROBES[account], most
    assert max(most) == PROBES[account]  # three pods want to, so it is not by chance


@pytest.mark.parametrize("account", SHARED)
def test_who_is_started_in_an_outage_knows_of_it(story: Story, account: str):
    """Pods killed in half-open hold no probe for ever, and those started send none beyond it."""
    assert _most_in_the_last(story, account) <= PROBES[account]


def test_without_sharing_who_is_started_in_an_outage_calls(story: Story):
    """A breaker of the pod's own has to learn of the outage by failures."""
    assert _most_in_the_last(story, "one-alone") > 5


def test_without_sharing_more_probes_reach_the_vendor(story: Story):
    """Three pods that each have a breaker of their own send three probes where one may be sent."""
    assert max(_most_probes(story, "one-alone")) > 1


@pytest.mark.parametrize("account", SHARED)
def test_recovery_closes_the_breaker_in_all_pods(story: Story, account: str):
    """When the vendor is well, a trial closes the breaker in all pods, and all call again."""
    for trip, following in zip(story.trips[account], story.trips[account][1:], strict=False):
        closed = trip.closed.values()
        assert max(closed) - min(closed) <= LONGEST
        assert max(closed) - trip.healed <= 2 * BREAK_FOR + LONGEST
        served = {
            entry.pod
            for entry in story.logs[account]
            if trip.closed[entry.pod] <= entry.asked <= following.opened[entry.pod]
        }
        assert served == set(trip.closed)


def test_the_store_was_there_all_the_time(story: Story):
    """No pod had to do without the store, and all ended well: the story is about sharing alone."""
    assert not story.modes
    assert set(story.ended) == {0}
