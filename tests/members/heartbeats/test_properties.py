"""Heartbeats: what holds for every history, and for peers of different speed in one group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.clock import VirtualClock
from seawall.events import subscribe
from seawall.members import (
    Heartbeats,
    MemberChanged,
    OwnPause,
    fixed_timeout,
    phi_accrual,
    quantile_timeout,
)
from seawall.members import heartbeats as module
from seawall.models.detection.gossip import MemberState
from seawall.models.detection.peer import Peer
from seawall.runtime.driver import sleep_async
from seawall.testing import run_virtual
from tests.support import SEEDS, falsified, quarters

PEERS = ("a", "b", "c")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("heartbeat"), st.sampled_from(PEERS)),
        st.tuples(st.just("wait"), quarters(16, 1)),
        st.tuples(st.just("evaluate"), st.none()),
        st.tuples(st.just("watch"), st.sampled_from(PEERS)),
        st.tuples(st.just("leave"), st.sampled_from(PEERS)),
        st.tuples(st.just("forget"), st.sampled_from(PEERS)),
        st.tuples(st.just("pause"), quarters(40, 21)),
        st.tuples(st.just("restart"), st.none()),
    ),
    min_size=10,
    max_size=120,
)


class History:
    """A group that lives through steps, and what it has said about it."""

    def __init__(self, steps: list[tuple[str, Any]]) -> None:
        self.clock = VirtualClock()
        self.beats = Heartbeats(
            "group", detector=fixed_timeout(3.0), confirm_after=2.0, max_peers=2, clock=self.clock
        )
        self.changes: list[tuple[float, MemberChanged]] = []
        self.pauses: list[tuple[float, float]] = []
        self.forgotten: list[tuple[int, str]] = []  # with the number of changes before it
        self.known: set[str] = set()
        self.beats.subscribe(lambda change: self.changes.append((self.clock.now(), change)))
        end = subscribe(
            lambda event: self.pauses.append((self.clock.now(), event.seconds)), OwnPause
        )
        for step in steps:
            self._do(*step)
        end()

    def _do(self, what: str, value: Any) -> None:
        if what in {"wait", "pause"}:
            self.clock.advance(value)
            if what == "pause":
                self.beats.evaluate()
        elif what == "evaluate":
            self.beats.evaluate()
        elif what == "restart":
            self.beats.start()
        elif what == "watch":
            try:
                self.beats.watch(value)
            except ValueError:
                assert len(self.beats.members) == 2
        else:
            getattr(self.beats, what)(value)
        members = set(self.beats.members)
        # Forgotten by request, or to make room for another after it had left.
        self.forgotten += [(len(self.changes), gone) for gone in self.known - members]
        self.known = members
        assert len(members) <= 2


def check_changes(steps: list[tuple[str, Any]]) -> None:
    """Each change begins where the last one of that peer ended, and each suspicion ends once."""
    history = History(steps)
    state: dict[str, str] = defaultdict(lambda: "unknown")
    since: dict[str, float] = {}
    ends: Counter[str] = Counter()
    begun = 0
    forgotten = history.forgotten
    for index, (now, change) in enumerate(history.changes):
        while forgotten and forgotten[0][0] <= index:  # silent where the peer had left before
            _forget(forgotten.pop(0)[1], state, since)
        peer = change.member
        assert change.before != change.after
        assert change.before == state[peer]
        assert change.reason
        if peer in since:
            assert change.duration == pytest.approx(now - since[peer])
        begun += change.after == "suspected"
        if change.before == "suspected":
            ends[change.after] += 1
        state[peer], since[peer] = change.after, now
    for _, peer in forgotten:
        _forget(peer, state, since)
    members = history.beats.members
    for name, view in members.items():
        assert view.state == state[name]
    open_now = sum(view.state is MemberState.SUSPECTED for view in members.values())
    assert set(ends) <= {"alive", "confirmed", "left"}
    assert begun == sum(ends.values()) + open_now
    group = history.beats.group
    assert (group.counts["suspicions"], group.counts["cleared"]) == (begun, ends["alive"])
    assert group.counts["confirmed"] == ends["confirmed"]
    assert group.counts["left"] == sum(change.after == "left" for _, change in history.changes)
    assert group.counts["own_pauses"] == len(history.pauses)


def _forget(peer: str, *tables: dict[str, Any]) -> None:
    for table in tables:
        table.pop(peer, None)


def check_calm(steps: list[tuple[str, Any]]) -> None:
    """Assert that no peer is suspected or confirmed for the length of an own pause."""
    history = History(steps)
    for began, seconds in history.pauses:
        for now, change in history.changes:
            if began <= now < began + seconds:
                assert change.after not in {"suspected", "confirmed"}


@given(STEPS)
def test_each_suspicion_ends_once_and_counts_add_up(steps: list[tuple[str, Any]]) -> None:
    """No transition is to the state that the peer is in, none is left out, none comes twice."""
    check_changes(steps)


@given(STEPS)
def test_nobody_is_accused_after_an_own_pause(steps: list[tuple[str, Any]]) -> None:
    """In any history, whichever peers were heard or added during the pause."""
    check_calm(steps)


def test_the_properties_fail_without_their_safeguards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated confirmations, and a pause that is not excused, are found."""
    evaluate = Peer.evaluate

    def forgetful(peer: Peer, now: float, confirm_after: float) -> Any:
        change = evaluate(peer, now, confirm_after)
        if change is not None and change.after is MemberState.CONFIRMED:
            peer.state = MemberState.SUSPECTED
        return change

    monkeypatch.setattr(Peer, "evaluate", forgetful)
    assert falsified(check_changes, STEPS)
    monkeypatch.setattr(Peer, "evaluate", evaluate)
    monkeypatch.setattr(
        Heartbeats, "_calm_until", property(lambda _: 0.0, lambda *_: None), raising=False
    )
    assert falsified(check_calm, STEPS)


# A fast and a slow peer in one group

EVERY = 1.0
STEP = EVERY / 4
QUICK, SLOW = 0.010, 0.300
CASES = {
    "quantile of round trips": quantile_timeout(),
    "phi accrual": None,
}


class Pair:
    """Two peers that answer probes after 10 and 300 ms, with jitter, until they are killed."""

    def __init__(self, seed: int, detector: Any) -> None:
        self.rng = Random(seed)
        self.killed: set[str] = set()
        self.beats = Heartbeats(
            "pair", every=EVERY, timeout=5.0, detector=detector, confirm_after=3.0, rng=self.rng
        )
        self.changes: list[MemberChanged] = []
        self.beats.subscribe(self.changes.append)
        self.beats.watch("quick", lambda: self.answer("quick", QUICK))
        self.beats.watch("slow", lambda: self.answer("slow", SLOW))

    async def answer(self, peer: str, seconds: float) -> None:
        """Answer after about that time: mostly a little later, rarely twice as late."""
        await sleep_async(seconds * self.rng.lognormvariate(0.0, 0.25))
        if peer in self.killed:
            await sleep_async(1e6)


def bound(pair: Pair, peer: str) -> float:
    """Return for how long a killed peer may go unnoticed: a probe, its own limit, and a step."""
    detector = pair.beats._peers[peer].detector
    asked = EVERY * (1 + module.JITTER)
    limit = getattr(detector, "limit", None)
    if limit is not None:
        return asked + limit + STEP
    silence = 0.0
    now = pair.beats._peers[peer].heartbeat_at
    while not detector.suspected(now + silence):
        silence += 0.01
    return max(silence, asked) + STEP + 0.01


@pytest.mark.parametrize("detector", CASES.values(), ids=CASES)
@settings(max_examples=max(3, settings().max_examples // 30))
@given(SEEDS)
def test_a_quick_and_a_slow_peer_are_never_suspected_and_found_when_killed(
    detector: Any, seed: int
) -> None:
    """Twenty minutes without a suspicion; then each is found within the bound of its own pace."""

    async def main() -> dict[str, float]:
        pair = Pair(seed, detector)
        found = {}
        async with pair.beats:
            await sleep_async(1200)
            assert [change.after for change in pair.changes] == ["alive", "alive"]
            pair.changes.clear()
            for peer in ("quick", "slow"):
                pair.killed = {peer}
                clock = pair.beats._clock
                killed_at, most = clock.now(), bound(pair, peer)
                heartbeat_at = pair.beats._peers[peer].heartbeat_at
                await sleep_async(most + 3.0 + STEP)
                suspected, confirmed = pair.changes
                assert (suspected.member, suspected.after) == (peer, "suspected")
                assert (confirmed.member, confirmed.after) == (peer, "confirmed")
                assert confirmed.duration <= 3.0 + STEP
                found[peer] = pair.beats.members[peer].since - confirmed.duration - heartbeat_at
                assert found[peer] <= most
                assert killed_at - heartbeat_at <= EVERY * 1.2 + 1.0
                pair.killed = set()
                await sleep_async(30)
                assert [change.after for change in pair.changes][2:] == ["alive"]
                pair.changes.clear()
        return found

    run_virtual(main())


def test_one_timeout_for_both_peers_would_be_wrong_for_one_of_them() -> None:
    """What finds the quick one as soon accuses the slow one all the time."""

    async def main() -> int:
        pair = Pair(1, fixed_timeout(1.2 + 0.1))
        async with pair.beats:
            await sleep_async(1200)
        return pair.beats.group.counts["suspicions"]

    assert run_virtual(main()) > 0


SENDERS: dict[str, Callable[[], Any]] = {
    "phi accrual": lambda: phi_accrual(first_interval=0.3),
    "quantile of intervals": quantile_timeout,
}


@pytest.mark.parametrize("make", SENDERS.values(), ids=SENDERS)
@settings(max_examples=max(2, settings().max_examples // 50))
@given(SEEDS)
def test_peers_that_send_every_10_and_300_ms_are_never_suspected_and_found(
    make: Callable[[], Any], seed: int
) -> None:
    """The same for heartbeats that arrive: a minute without a suspicion, then each bound."""

    async def main() -> None:
        rng = Random(seed)
        beats = Heartbeats("pair", every=0.1, detector=make(), confirm_after=1.0, rng=rng)
        changes: list[MemberChanged] = []
        beats.subscribe(changes.append)
        clock = beats._clock
        due = {"quick": 0.0, "slow": 0.0}
        for peer in due:
            beats.watch(peer)

        async def send(seconds: float, dead: str = "") -> None:
            until = clock.now() + seconds
            while (now := clock.now()) < until:
                peer = min(due, key=lambda name: due[name])
                if due[peer] > now:
                    await sleep_async(due[peer] - now)
                if peer != dead:
                    beats.heartbeat(peer)
                pace = QUICK if peer == "quick" else SLOW
                due[peer] = clock.now() + pace * rng.uniform(0.5, 1.5)

        async with beats:
            await send(60)
            assert [change.after for change in changes] == ["alive", "alive"]
            for peer in due:
                changes.clear()
                detector, heartbeat_at = (
                    beats._peers[peer].detector,
                    beats._peers[peer].heartbeat_at,
                )
                most = 0.0
                while not detector.suspected(heartbeat_at + most):
                    most += 0.001
                await send(most + 0.026 + 0.1, dead=peer)
                assert [(change.member, change.after) for change in changes] == [
                    (peer, "suspected")
                ]
                assert beats.members[peer].since - heartbeat_at <= most + 0.026
                await send(1)

    run_virtual(main())
