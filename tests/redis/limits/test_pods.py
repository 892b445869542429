"""Three processes and one vendor that allows 100 a second: shared limits as the vendor sees them.

Each pod asks for more than the limit all by itself, for accounts whose limits are shared in every
way, and for one whose limit is not, to show that without sharing the same is not true. Pods are
killed and started at random, and one is stopped for three seconds. See `pods/logs.py` for how
arrivals, which the vendor logs, are told from decisions, which the limits bound.

No pod decides alone here: without the store's answer these limits refuse, by
`on_store_failure="closed"`, also in a pod that was stopped and whose answer came too late. So the
bounds are exact, in seconds of the store's clock, which is the time of day. How far that has moved
against the monotonic clock of the logs is measured.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final, NamedTuple, Self

import pytest
import redis

from seawall.clock import SYSTEM, epoch_of
from tests.conftest import SEED
from tests.redis.pods.accounts import BURST, RATE
from tests.redis.pods.fleet import Fleet
from tests.redis.pods.logs import Entry, arrived, most_arrived_within, most_within

SHARED: Final = tuple(account for account in BURST if account != "alone")
ROUNDING: Final = 0.001
"""The store's clock may be read in whole milliseconds."""
LOOK: Final = 0.005
MOST: Final = RATE * 6 // 5
"""What a bound may be: a fifth above the limit."""
USED: Final = 0.8
"""So much of the limit must be used, or it would be easy to keep it."""
STEADY: Final = 2.0
"""Whole seconds: a limit may be used up at the beginning of each."""
FROZEN: Final = 3.0


class Story(NamedTuple):
    """What happened, and what the vendor saw."""

    steady: tuple[float, float]
    """From when to when three pods called undisturbed."""
    churned: tuple[float, float]
    """From when to when pods were killed and started."""
    frozen: tuple[float, float]
    """From when to when one of them was stopped."""
    end: float
    second: float
    """Return the least seconds of the logs' clock that were a second of the store's."""
    logs: dict[str, list[Entry]]
    excesses: list[dict[str, Any]]
    modes: list[dict[str, Any]]
    ended: Sequence[int]

    def bound(self, account: str) -> int:
        """Return what is admitted in a second at most: the limit, its burst, the stated excess.

        As it was stated when there were three pods: later some are counted that were killed, so
        that more is stated, but never more than three live.
        """
        before = [r for r in self.excesses if r["at"] < self.churned[0]]
        stated = [r["excess"] for r in before if r["account"] == account]
        return RATE + BURST[account] + max(stated, default=0)


class Clocks:
    """Watches how the time of day moves against the monotonic clock."""

    def __init__(self) -> None:
        self._seen = [self._epoch()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK):
            self._seen.append(self._epoch())

    def _epoch(self) -> float:
        """Return when 1970 began; a thread that is interrupted between two clocks reads too low."""
        return max(epoch_of(SYSTEM) for _ in range(5))

    @property
    def second(self) -> float:
        """The shortest that a second of the time of day can have been, by the monotonic clock."""
        return 1.0 - (max(self._seen) - min(self._seen)) - ROUNDING


@pytest.fixture(scope="module")
def story(redis_url: str) -> Iterator[Story]:
    """Let pods come and go."""
    rng = Random(SEED)
    with Clocks() as clocks, Fleet(redis_url, tuple(BURST), pause=0.005) as fleet:
        fleet.start(3)
        fleet.wait_ready()
        fleet.listen(1.2)  # who divides a limit waits until others must have heard of him
        steady = SYSTEM.now()
        fleet.listen(STEADY)
        churned = SYSTEM.now()
        for _ in range(6):
            fleet.kill(rng.choice(fleet.pods))
            fleet.listen(rng.uniform(0.0, 0.4))
            fleet.start()
            fleet.listen(rng.uniform(0.1, 0.6))
        fleet.wait_ready()
        sleeper = rng.choice(fleet.pods)
        frozen = SYSTEM.now()
        sleeper.send(signal.SIGSTOP)
        fleet.listen(FROZEN)
        thawed = SYSTEM.now()
        sleeper.send(signal.SIGCONT)
        fleet.listen(1.2)
        end = SYSTEM.now()
        logs = {account: fleet.log(account) for account in fleet.accounts}
        told = Story(
            (steady, churned),
            (churned, frozen),
            (frozen, thawed),
            end,
            clocks.second,
            logs,
            fleet.reports("excess"),
            fleet.reports("mode"),
            fleet.end(),
        )
    yield told
    with redis.Redis.from_url(redis_url, socket_timeout=5) as client:
        for key in client.scan_iter(match=f"{fleet.prefix}:*", count=1000):
            client.delete(key)


@pytest.mark.parametrize("account", SHARED)
def test_no_second_holds_more_than_the_stated_bound(story: Story, account: str):
    """Whoever was killed, started or stopped: in no second more was admitted than was said."""
    log = story.logs[account]
    most = most_within(log, story.second)
    raw = most_arrived_within(log, 1.0)
    print(f"{account}: {most} in a second, {raw} by arrival, {story.bound(account)} is the bound")  # noqa: T201
    assert story.bound(account) <= MOST
    assert most <= story.bound(account)


@pytest.mark.parametrize("account", SHARED)
def test_the_limit_is_used(story: Story, account: str):
    """Three pods that want all of it get nearly all of it."""
    begin, _ = story.steady
    used = arrived(story.logs[account], begin, begin + STEADY) / STEADY
    print(f"{account}: {used:.1f}/s")  # noqa: T201
    assert used >= USED * RATE


@pytest.mark.parametrize("account", [account for account in SHARED if account != "split"])
def test_a_pod_that_stands_still_keeps_nothing_from_others(story: Story, account: str):
    """While one pod is stopped, the others use the limit; they are not held to their part of it."""
    begin, _ = story.frozen
    used = arrived(story.logs[account], begin + 1, begin + FROZEN) / (FROZEN - 1)
    print(f"{account}: {used:.1f}/s")  # noqa: T201
    assert used >= USED * RATE


def test_without_sharing_the_limit_is_exceeded(story: Story):
    """Three pods that each keep the limit for themselves exceed it, and it is seen."""
    assert most_within(story.logs["alone"], story.second) > 2 * RATE


def test_the_pods_that_were_left_ended_well(story: Story):
    """Whoever was not killed closes its store and ends, also after it was stopped for long."""
    assert story.ended == [0, 0, 0]


def test_only_who_was_stopped_missed_the_store(story: Story):
    """No pod had to do without the store but for the one that could not hear its answers."""
    assert all(report["at"] >= story.frozen[1] for report in story.modes)
