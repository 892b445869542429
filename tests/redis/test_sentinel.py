"""Pods behind Sentinels: whatever happens to the primary, every pod finds its store again."""

from __future__ import annotations

import json
import selectors
from collections.abc import Callable, Iterator
from random import Random
from secrets import token_hex
from typing import Final

import pytest

from seawall.clock import SYSTEM
from tests.redis.pods.fleet import Process
from tests.redis.sentinels import DOWN_AFTER, PATIENCE, Guarded, until
from tests.redis.support import Server

PODS: Final = 8
FAULTS: Final = 20
TIMEOUT: Final = 0.05
WITHIN: Final = 5.0
"""Seconds from the moment a plain client can write to the moment every pod's callers have answers.
"""


class Campaign:
    """Pods as processes, and what they report."""

    def __init__(self, guarded: Guarded, pods: int) -> None:
        self.guarded = guarded
        settings = {"redis": guarded.url, "prefix": f"c-{token_hex(4)}", "timeout": TIMEOUT}
        self.pods = [Process("store_pod", json.dumps(settings)) for _ in range(pods)]
        self._selector = selectors.DefaultSelector()
        for pod in self.pods:
            self._selector.register(pod.output, selectors.EVENT_READ, pod)
        self.worst = 0.0

    def close(self) -> None:
        for pod in self.pods:
            pod.kill()
        self._selector.close()

    def listen(self, seconds: float) -> None:
        """Take in what pods print meanwhile."""
        over = SYSTEM.now() + seconds
        while (left := over - SYSTEM.now()) > 0:
            for key, _ in self._selector.select(left):
                assert key.data.read(), f"a pod has ended: {key.data.errors}"

    def listen_until(self, true: Callable[[], bool], what: str) -> float:
        """Listen until that holds; return when it did."""

        def check() -> bool:
            self.listen(0.02)
            return true()

        return until(check, what)

    def back(self, since: float) -> list[float | None]:
        """Return for each pod how long after `since` all its callers had answers; None: not yet."""
        found: list[float | None] = []
        for pod in self.pods:
            answered = (r["beat"] for r in pod.reports if r.get("store_up") and "beat" in r)
            found.append(next((at - since for at in answered if at >= since), None))
        return found

    def await_all_back(self, since: float, what: str) -> None:
        """Wait until every pod is back, and say how long that took.

        Time counts while the server answers a plain client as soon as pods expect it to: when it
        does not, on a machine that is too busy, it is away once more, and the clock starts again.
        """
        over, again = SYSTEM.now() + PATIENCE, 0
        while None in (took := self.back(since)) and SYSTEM.now() < over:
            self.listen(0.1)
            if not self.guarded.prompt(TIMEOUT):
                since, again = SYSTEM.now(), again + 1
        shown = " ".join("never" if one is None else f"{one:.2f}" for one in took)
        away = f", after the server was away {again} times more" if again else ""
        print(f"{what}: back after {shown} s{away}", flush=True)  # noqa: T201 - progress
        for pod, one in zip(self.pods, took, strict=True):
            assert one is not None, (what, [r for r in pod.reports if "up" in r][-6:])
            self.worst = max(self.worst, one)

    def alarms(self) -> list[int]:
        """Return how often each pod took its store to be down."""
        return [sum(r.get("up") is False for r in pod.reports) for pod in self.pods]


# --- What may happen to a primary. Each returns when a plain client can write again. ---


def killed(campaign: Campaign, primary: Server) -> float:
    """SIGKILL; it comes back as a replica."""
    guarded = campaign.guarded
    primary.kill()
    at = campaign.listen_until(lambda: guarded.writable(primary), "another primary")
    primary.start()
    return at


def frozen(campaign: Campaign, primary: Server) -> float:
    """SIGSTOP until another is primary, then SIGCONT: for a while it takes itself for one."""
    guarded = campaign.guarded
    primary.freeze()
    try:
        at = campaign.listen_until(lambda: guarded.writable(primary), "another primary")
    finally:
        primary.thaw()
    return at


def switched(campaign: Campaign, primary: Server) -> float:
    """Fail over because somebody asked for it."""
    guarded = campaign.guarded
    guarded.fail_over()
    return campaign.listen_until(lambda: guarded.writable(primary), "another primary")


def blinked(campaign: Campaign, primary: Server) -> float:
    """SIGSTOP and SIGCONT before the Sentinels would act: no failover."""
    guarded = campaign.guarded
    primary.freeze()
    campaign.listen(DOWN_AFTER * 0.6)
    primary.thaw()
    return campaign.listen_until(guarded.writable, "the same primary")


FAILOVERS: Final = (killed, frozen, switched)


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    with Guarded() as made:
        yield made


def run_campaign(guarded: Guarded, *, pods: int, failovers: int, seed: int) -> Campaign:
    """Start so many pods at once, and let so many failovers and blinks happen."""
    random = Random(seed)
    campaign = Campaign(guarded, pods)
    try:
        campaign.listen_until(
            lambda: all(any("ready" in r for r in pod.reports) for pod in campaign.pods), "ready"
        )
        began = max(r["at"] for pod in campaign.pods for r in pod.reports if "ready" in r)
        campaign.await_all_back(began, f"{pods} pods started at once")
        print(f"false alarms at the start: {campaign.alarms()}", flush=True)  # noqa: T201
        for number in range(failovers):
            if random.random() < 0.3:
                primary = guarded.primary
                assert primary is not None
                campaign.await_all_back(blinked(campaign, primary), "blinked")
            campaign.listen_until(guarded.settled, "replicas that follow the primary")
            primary = guarded.primary
            assert primary is not None
            fault = FAILOVERS[number % len(FAILOVERS)]
            at = fault(campaign, primary)
            campaign.await_all_back(at, f"{number + 1}: {fault.__name__}")
        print(f"outages seen: {campaign.alarms()}", flush=True)  # noqa: T201
    finally:
        campaign.close()
    return campaign


def test_pods_find_their_store_after_a_failover(guarded: Guarded):
    """Two pods, one failover."""
    run_campaign(guarded, pods=2, failovers=1, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_eight_pods_are_back_soon_after_each_of_twenty_failovers(guarded: Guarded, seed: int):
    """Started at once on few cores; primaries are killed, frozen and thawed, or replaced."""
    campaign = run_campaign(guarded, pods=PODS, failovers=FAULTS, seed=seed)
    print(f"worst: {campaign.worst:.2f} s", flush=True)  # noqa: T201
    assert campaign.worst <= WITHIN
