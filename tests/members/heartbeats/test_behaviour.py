"""Heartbeats: how peers go from state to state, on virtual time."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from seawall import registry
from seawall.clock import SYSTEM, VirtualClock
from seawall.events import subscribe
from seawall.members import (
    Heartbeats,
    MemberChanged,
    MemberState,
    OwnPause,
    fixed_timeout,
    phi_accrual,
    quantile_timeout,
)
from seawall.members import heartbeats as module
from seawall.runtime.driver import sleep_async
from seawall.testing import run_virtual
from tests.support import nobody_else

STEP = 0.25


class Watched:
    """Heartbeats on a clock of the test's own, and the changes that it has published."""

    def __init__(self, **settings: Any) -> None:
        self.clock = VirtualClock()
        settings = {"detector": fixed_timeout(3.0), "confirm_after": 4.0, **settings}
        self.beats = Heartbeats("orders", clock=self.clock, **settings).start()
        self.changes: list[MemberChanged] = []
        self.beats.subscribe(self.changes.append)

    def run(self, seconds: float, *sending: str, every: float = 1.0) -> None:
        """Let time pass in small steps; each peer in `sending` sends a heartbeat `every` second."""
        steps = round(seconds / STEP)
        for step in range(1, steps + 1):
            self.clock.advance(STEP)
            if step % round(every / STEP) == 0:
                for peer in sending:
                    self.beats.heartbeat(peer)
            self.beats.evaluate()

    @property
    def path(self) -> list[str]:
        return [change.after for change in self.changes]

    def state(self, peer: str = "a") -> MemberState:
        view = self.beats.get(peer)
        assert view is not None
        return view.state


def test_a_peer_is_alive_suspected_and_confirmed_with_reason_level_and_duration() -> None:
    """Each transition says why, how sure it is, and how long the state before has lasted."""
    watched = Watched()
    watched.beats.watch("a", address="10.0.0.1")
    assert watched.state() is MemberState.UNKNOWN
    watched.run(5, "a")
    watched.run(10)
    assert watched.path == ["alive", "suspected", "confirmed"]
    first, second, third = watched.changes
    assert (first.before, first.reason, first.duration) == (
        "unknown",
        "heard for the first time",
        1,
    )
    assert (second.reason, second.level, second.duration) == ("silent for 3 s", 1.0, 7.0)
    assert (third.before, third.reason, third.duration) == ("suspected", "suspected for 4 s", 4.0)
    counts = watched.beats.snapshot()["counts"]
    assert (counts["suspicions"], counts["cleared"], counts["confirmed"]) == (1, 0, 1)
    assert counts["detection_times"]["sum"] == 7.0  # since the last sign of life


def test_a_suspected_peer_that_is_heard_is_cleared() -> None:
    """It counts as a false suspicion, and its silence starts at 0 again."""
    watched = Watched()
    watched.beats.watch("a")
    watched.run(2, "a")
    watched.run(4)
    assert watched.beats.alive == ["a"]  # suspected is present
    watched.run(20, "a")
    assert watched.path == ["alive", "suspected", "alive"]
    assert watched.changes[-1].reason == "heard again"
    assert watched.changes[-1].level >= watched.changes[-2].level >= 1.0  # before it was heard
    assert watched.beats.snapshot()["counts"]["false_suspect_rate"] == 1.0


def test_a_confirmed_peer_that_is_heard_is_alive_again() -> None:
    """It is as any other from then on."""
    watched = Watched()
    watched.beats.watch("a")
    watched.run(2, "a")
    watched.run(10)
    assert watched.beats.alive == []
    watched.run(2, "a")
    watched.run(10)
    assert watched.path == ["alive", "suspected", "confirmed", "alive", "suspected", "confirmed"]


def test_a_peer_that_is_never_heard_is_suspected_and_confirmed() -> None:
    """Completeness holds for peers that were dead from the beginning."""
    watched = Watched()
    watched.beats.watch("a")
    watched.run(2.75)
    assert watched.state() is MemberState.UNKNOWN
    watched.run(5)
    assert watched.path == ["suspected", "confirmed"]
    assert watched.changes[0].reason == "never heard for 3 s"


@pytest.mark.parametrize("detector", [phi_accrual(), quantile_timeout()])
def test_the_time_until_a_peer_is_first_heard_is_not_learned(detector: Any) -> None:
    """A peer that was slow to start is judged by its own intervals, and not by the start."""
    slow, quick = Watched(detector=detector), Watched(detector=detector)
    slow.beats.watch("a")
    slow.run(1.5)
    quick.beats.watch("a")
    quick.beats.heartbeat("a")
    slow.beats.heartbeat("a")
    for watched in (slow, quick):
        watched.run(10, "a")
        watched.clock.advance(1.5)
    views = [watched.beats.members["a"] for watched in (slow, quick)]
    assert views[0].level == pytest.approx(views[1].level, rel=1e-9)


def test_a_peer_that_left_is_silent_for_good_and_its_late_heartbeats_do_not_count() -> None:
    """A peer that left is not suspected; only `watch` expects it again."""
    watched = Watched()
    beats = watched.beats
    beats.watch("a")
    watched.run(2, "a")
    assert beats.leave("a", "shutting down")
    assert not beats.leave("a")
    assert not beats.heartbeat("a")
    watched.run(20)
    assert watched.path == ["alive", "left"]
    assert watched.changes[-1].reason == "shutting down"
    assert beats.alive == []
    beats.watch("a")
    watched.run(2, "a")
    assert watched.path == ["alive", "left", "unknown", "alive"]
    assert beats.snapshot()["counts"]["left"] == 1


def test_a_suspected_peer_that_is_forgotten_has_left() -> None:
    """Its suspicion ends, and subscribers hear of it."""
    watched = Watched()
    watched.beats.watch("a")
    watched.run(4)
    assert watched.beats.forget("a")
    assert not watched.beats.forget("a")
    assert watched.path == ["suspected", "left"]
    assert watched.changes[-1].reason == "forgotten"
    assert watched.beats.members == {}


def test_heartbeats_of_unwatched_names_are_ignored_and_counted() -> None:
    """Senders of heartbeats cannot fill the memory with names."""
    watched = Watched()
    for number in range(100):
        assert not watched.beats.heartbeat(f"stranger-{number}")
    assert watched.beats.members == {}
    assert watched.beats.snapshot()["messages"] == {"sent": 0, "received": 0, "refused": 100}


def test_the_number_of_peers_is_bounded_and_the_longest_gone_gives_way() -> None:
    """A peer that is present is never dropped for another."""
    watched = Watched(max_peers=3)
    beats = watched.beats
    for peer in ("a", "b", "c"):
        beats.watch(peer)
    with pytest.raises(ValueError, match="forget"):
        beats.watch("d")
    watched.run(5, "a")
    beats.leave("b")
    watched.run(20, "a")
    assert watched.state("c") is MemberState.CONFIRMED
    beats.watch("d")  # b left before c was confirmed
    assert sorted(beats.members) == ["a", "c", "d"]
    beats.watch("e")
    assert sorted(beats.members) == ["a", "d", "e"]
    assert watched.changes[-1].after == "left"


def test_watching_again_takes_new_settings_and_keeps_the_state() -> None:
    """Neither a change nor a repetition is a transition."""
    watched = Watched()
    beats = watched.beats
    beats.watch("a")
    watched.run(2, "a")
    beats.watch("a", detector=fixed_timeout(10.0), address="10.0.0.9")
    watched.run(9)
    assert watched.path == ["alive"]
    assert beats.members["a"].address == "10.0.0.9"
    watched.run(2)
    assert watched.path == ["alive", "suspected"]


def test_each_peer_is_judged_by_its_own_detector() -> None:
    """Three seconds are long for one peer, and nothing for another."""
    watched = Watched()
    watched.beats.watch("quick", detector=fixed_timeout(1.0))
    watched.beats.watch("slow", detector=fixed_timeout(60.0))
    watched.run(3)
    assert watched.state("quick") is MemberState.SUSPECTED
    assert watched.state("slow") is MemberState.UNKNOWN


# The pause of this process itself


def test_own_pause_suspects_and_confirms_nobody_for_as_long_again() -> None:
    """What comes in after the pause counts first; then everything is as before."""
    watched = Watched()
    pauses: list[OwnPause] = []
    end = subscribe(pauses.append, OwnPause)
    for peer in ("a", "b"):
        watched.beats.watch(peer)
    watched.run(5, "a", "b")
    watched.run(3.5, "a")
    assert watched.state("b") is MemberState.SUSPECTED
    watched.changes.clear()
    watched.clock.advance(6.0)  # stopped
    watched.beats.evaluate()
    watched.run(5.75)
    assert watched.changes == []  # a has been silent for 12 s, and b suspected for longer than 4
    watched.run(0.5)
    assert {change.member: change.after for change in watched.changes} == {
        "a": "suspected",
        "b": "confirmed",
    }
    end()
    assert [pause.seconds for pause in pauses] == [6.0]
    counts = watched.beats.snapshot()["counts"]
    assert (counts["own_pauses"], counts["paused_seconds"]) == (1, 6.0)


def test_without_the_rule_for_own_pauses_everybody_would_be_suspected() -> None:
    """The test above needs the rule: a pause that is not noticed accuses all."""
    watched = Watched(pause_after=1000.0)
    watched.beats.watch("a")
    watched.run(5, "a")
    watched.clock.advance(6.0)
    watched.beats.evaluate()
    assert watched.path == ["alive", "suspected"]


def test_peers_heard_after_an_own_pause_are_never_accused() -> None:
    """Neither for the silence that the pause itself was, nor afterwards."""
    watched = Watched()
    watched.beats.watch("a")
    watched.run(5, "a")
    watched.clock.advance(6.0)
    watched.run(60, "a")
    assert watched.path == ["alive"]


@pytest.mark.parametrize("gap", [4.75, 5.0])
def test_a_shorter_gap_is_no_pause(gap: float) -> None:
    """The limit itself is not one either."""
    watched = Watched(detector=fixed_timeout(30.0))
    watched.beats.watch("a")
    watched.run(1, "a")
    watched.clock.advance(gap)
    watched.beats.evaluate()
    assert watched.beats.group.counts["own_pauses"] == 0


def held_up(seconds: float, *, is_dead: bool = False, always: bool = False) -> list[str]:
    """Return what becomes of a peer that sends every second while something blocks the loop."""

    async def main() -> list[str]:
        beats = Heartbeats("orders")
        path: list[str] = []
        beats.subscribe(lambda change: path.append(change.after))
        beats.watch("a")

        async def send() -> None:
            while True:
                beats.heartbeat("a")
                await sleep_async(1.0)

        async with beats:
            sending = asyncio.create_task(send())
            await sleep_async(20.1)
            if is_dead:
                sending.cancel()
            for _ in range(100 if always else 1):
                beats._clock.sleep(seconds)  # blocks the loop
                await sleep_async(0.01)
            await sleep_async(10)
            sending.cancel()
        assert beats.group.counts["own_pauses"] == (seconds > 5)
        return path

    return run_virtual(main())


@pytest.mark.parametrize("seconds", [1.0, 2.6, 3.5, 4.9, 6.0])
def test_a_loop_that_was_held_up_accuses_nobody(seconds: float) -> None:
    """Also if that was too short for a pause: what came in meanwhile has not been read."""
    assert held_up(seconds) == ["alive"]


def test_without_the_excuse_a_loop_that_was_held_up_accuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above needs it."""
    monkeypatch.setattr(module, "EXCUSED", 1000)
    assert held_up(3.5) == ["alive", "suspected", "alive"]


def test_a_loop_that_is_always_late_finds_failures() -> None:
    """The excuse holds once, not for ever."""
    assert held_up(2.0, is_dead=True, always=True) == ["alive", "suspected", "confirmed"]


# Publication


def test_changes_are_published_in_order_and_not_under_the_lock() -> None:
    """A subscriber may call back; what it causes is published after what caused it."""
    watched = Watched()
    beats, seen = watched.beats, []
    other_thread_got_in = threading.Event()

    def subscriber(change: MemberChanged) -> None:
        seen.append((change.member, change.after))
        if change.after == "suspected":
            beats.heartbeat(change.member)
        thread = threading.Thread(target=lambda: (beats.members, other_thread_got_in.set()))
        thread.start()
        thread.join(30)

    beats.subscribe(subscriber)
    second: list[tuple[str, str]] = []
    beats.subscribe(lambda change: second.append((change.member, change.after)))
    beats.watch("a")
    watched.run(4)
    assert other_thread_got_in.is_set()
    assert seen == second == [("a", "suspected"), ("a", "alive")]


def test_a_subscriber_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Others hear of the change, and the peer is in its state."""
    watched = Watched()
    watched.beats.subscribe(lambda _change: 1 / 0)
    watched.beats.watch("a")
    watched.run(4)
    assert watched.path == ["suspected"]
    assert "a subscriber of the group" in caplog.text


@pytest.mark.parametrize("is_listener", [False, True])
def test_a_subscriber_that_raises_a_cancellation_does_not_end_the_watch(
    *, is_listener: bool
) -> None:
    """As `task.result()` of a cancelled task does; peers are judged as before."""

    def ask_a_cancelled_task(_change: object) -> None:
        raise asyncio.CancelledError

    async def main() -> list[str]:
        beats = Heartbeats("g", every=1.0, confirm_after=5.0)
        end = (subscribe if is_listener else beats.subscribe)(ask_a_cancelled_task)
        beats.watch("a")
        async with beats:
            await sleep_async(60)
        end()
        return [str(view.state) for view in beats.members.values()]

    assert run_virtual(main()) == ["confirmed"]


def test_a_subscriber_that_exits_does_not_end_a_watch_in_a_thread() -> None:
    """`sys.exit()` ends the program only in its main thread; in another it is logged."""
    heard: list[str] = []
    watched = Watched()
    watched.beats.subscribe(lambda _change: sys.exit())
    watched.beats.subscribe(lambda change: heard.append(change.after))
    watched.beats.watch("a")
    thread = threading.Thread(target=watched.run, args=(4,))
    thread.start()
    thread.join()
    assert heard == ["suspected"]
    watched.beats.watch("b")
    with pytest.raises(SystemExit):
        watched.run(4)


# What is shown


def test_a_snapshot_has_the_worst_first_and_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page and metrics read all of a group from here."""
    nobody_else(monkeypatch)
    watched = Watched(confirm_after=1.0)
    beats = watched.beats
    for peer in ("dead", "gone", "well"):
        beats.watch(peer)
    beats.leave("gone")
    watched.run(5, "well")
    beats.watch("new")
    beats.watch("late", detector=fixed_timeout(0.5))
    watched.run(0.75, "well", every=0.25)
    shown = beats.snapshot()
    assert [(one["name"], one["state"]) for one in shown["members"]] == [
        ("dead", "confirmed"),
        ("late", "suspected"),
        ("new", "unknown"),
        ("well", "alive"),
        ("gone", "left"),
    ]
    assert (shown["kind"], shown["own"], shown["health_score"]) == ("heartbeats", "", None)
    assert shown["round_trip"] is None
    assert shown["bytes"] == {"sent": 0, "received": 0}
    listed = registry.snapshot()["members"]
    assert [one["counts"]["suspicions"] for one in listed if one["name"] == "orders"] == [2]
    assert "5 peers, 2 present" in repr(beats)


# Probes, in a loop of virtual time


def virtual(main: Callable[[], Awaitable[None]], seed: int = 1) -> None:
    run_virtual(main(), seed=seed)  # type: ignore[arg-type]


def test_probes_keep_peers_alive_and_their_round_trips_are_measured() -> None:
    """Each peer is asked about once in `every`, at instants of its own."""
    asked: dict[str, list[float]] = {"a": [], "b": []}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        beats = Heartbeats("orders", every=2.0, rng=Random(1))

        async def probe(name: str, seconds: float) -> None:
            asked[name].append(loop.time())
            await sleep_async(seconds)

        beats.watch("a", lambda: probe("a", 0.01))
        beats.watch("b", lambda: probe("b", 0.3))
        async with beats:
            await sleep_async(200)
            assert beats.alive == ["a", "b"]
            members = beats.members
            assert members["a"].round_trip == pytest.approx(0.01)
            assert members["b"].round_trip == pytest.approx(0.3)
            trips = beats.snapshot()["round_trip"]
            assert trips["p99"] == pytest.approx(0.3, rel=0.1)
        assert beats.group.counts["suspicions"] == 0
        count = len(asked["a"])
        await sleep_async(10)
        assert len(asked["a"]) == count  # no longer

    virtual(main)
    assert asked["a"][0] != asked["b"][0]
    for instants in asked.values():
        assert 90 <= len(instants) <= 110
        pauses = [after - before for before, after in pairwise(instants)]
        assert min(pauses) >= 1.6 - 1e-9
        assert max(pauses) <= 2.4 + 1e-9
        assert max(pauses) - min(pauses) > 0.4


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ConnectionRefusedError("refused"), "ConnectionRefusedError: refused"),
        (False, "the probe returned False"),
        (None, "no answer within 0.5 s"),
    ],
)
def test_a_probe_that_fails_leads_to_suspicion_and_says_why(answer: Any, reason: str) -> None:
    """An error, False and a timeout all count as failures, with different reasons."""

    async def probe() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer if answer is False else await sleep_async(1000)

    async def main() -> None:
        beats = Heartbeats("orders", timeout=0.5, confirm_after=2.0)
        changes: list[MemberChanged] = []
        beats.subscribe(changes.append)
        beats.watch("a", probe)
        async with beats:
            await sleep_async(10)
        assert [change.after for change in changes] == ["suspected", "confirmed"]
        assert all(change.reason.endswith(reason) for change in changes)

    virtual(main)


def test_a_probe_that_was_cancelled_inside_is_asked_again() -> None:
    """What a library cancelled in there is a failure of the probe, and no end of probing."""
    answers: list[type[BaseException] | None] = [asyncio.CancelledError] * 3

    async def probe() -> None:
        answer = answers.pop() if answers else None
        if answer is not None:
            raise answer

    async def main() -> None:
        beats = Heartbeats("orders")
        beats.watch("a", probe)
        async with beats:
            await sleep_async(10)
            view = beats.get("a")
            assert view is not None
            assert (view.state, answers) == (MemberState.ALIVE, [])

    virtual(main)


def test_a_peer_that_nobody_asked_is_not_suspected() -> None:
    """While all places are taken by probes that hang, the others are not accused for it."""
    hanging = module.AT_ONCE

    async def main() -> None:
        beats = Heartbeats("orders", timeout=100.0, rng=Random(3))
        for number in range(hanging):
            beats.watch(f"hanging-{number}", lambda: sleep_async(1000))
        async with beats:
            await sleep_async(5)
            beats.watch("waiting", lambda: sleep_async(0))
            await sleep_async(60)
            view = beats.get("waiting")
            assert view is not None
            assert view.state is MemberState.UNKNOWN
            assert view.level > view.threshold
            states = {view.state for name, view in beats.members.items() if name != "waiting"}
            assert states == {MemberState.CONFIRMED}
            await sleep_async(60)  # their probes have timed out
            view = beats.get("waiting")
            assert view is not None
            assert view.state is MemberState.ALIVE

    virtual(main)


def test_a_peer_that_is_forgotten_or_left_is_not_asked_any_more() -> None:
    """A probe under way does not bring it back."""
    asked: list[str] = []

    async def main() -> None:
        both = asyncio.Event()
        beats = Heartbeats("orders", rng=Random(5))

        def probing(name: str) -> Callable[[], Awaitable[None]]:
            async def probe() -> None:
                asked.append(name)
                if len(asked) == 2:
                    both.set()
                await sleep_async(0.5)

            return probe

        for name in ("forgotten", "left"):
            beats.watch(name, probing(name))
        async with beats:
            await both.wait()
            beats.forget("forgotten")
            beats.leave("left")
            asked.clear()
            await sleep_async(20)
            assert asked == []
            assert beats.get("forgotten") is None
            assert beats.alive == []
            beats.watch("left", probing("left"))
            await sleep_async(5)
            assert beats.alive == ["left"]

    virtual(main)


def test_an_answer_that_comes_after_a_peer_left_does_not_count() -> None:
    """It was asked before it was forgotten, had left, or was to be asked in another way."""

    async def main() -> None:
        answer, asked = asyncio.Event(), []

        async def probe() -> None:
            asked.append(1)
            await answer.wait()

        async def other() -> None:
            await sleep_async(1000)

        beats = Heartbeats("orders", timeout=2.0, rng=Random(5))
        changes: list[str] = []
        beats.subscribe(lambda change: changes.append(f"{change.member} {change.after}"))
        for name in ("forgotten", "left", "changed"):
            beats.watch(name, probe)
        async with beats:
            await sleep_async(1.1)
            assert len(asked) == 3
            beats.forget("forgotten")
            beats.leave("left")
            beats.watch("changed", other)
            answer.set()
            for _ in range(10):
                await sleep_async(0)
        assert changes == ["forgotten left", "left left"]
        assert beats.snapshot()["round_trip"] is None

    virtual(main)


def test_plain_functions_are_asked_in_threads_and_may_return_awaitables() -> None:
    """The loop is never blocked by a probe."""
    threads: set[str] = set()

    def probe() -> Awaitable[None]:
        threads.add(threading.current_thread().name)
        return sleep_async(0)

    async def main() -> None:
        beats = Heartbeats("orders")
        beats.watch("a", probe)
        async with beats:
            await sleep_async(5)
            assert beats.alive == ["a"]

    virtual(main)
    assert threads
    assert "MainThread" not in threads


def test_a_plain_probe_that_hangs_is_not_called_beside_itself() -> None:
    """It costs one thread; its peer is suspected, others are not."""
    release, calls = threading.Event(), []

    def hang() -> None:
        calls.append(1)
        release.wait(60)

    async def main() -> None:
        beats = Heartbeats("orders", confirm_after=1000.0)
        beats.watch("hanging", hang)
        beats.watch("well", lambda: None)
        async with beats:
            await sleep_async(30)
            view = beats.get("hanging")
            assert view is not None
            assert view.state is MemberState.SUSPECTED
            well = beats.get("well")
            assert well is not None
            assert well.state is MemberState.ALIVE
            assert beats.group.counts["suspicions"] == 1

    try:
        run_virtual(main(), patience=0.05)
    finally:
        release.set()
    assert calls == [1]


def test_a_plain_probe_that_waits_for_a_thread_accuses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While probes that hang have all threads, the peers of the others were not asked."""
    monkeypatch.setattr(module, "THREADS", 2)
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    async def main() -> None:
        beats = Heartbeats("orders", confirm_after=1000.0)
        beats.watch("hanging-1", hang)
        beats.watch("hanging-2", hang)
        async with beats:
            await sleep_async(5)
            beats.watch("waiting", lambda: None)
            await sleep_async(30)
            states = {name: view.state for name, view in beats.members.items()}
            assert states == {
                "hanging-1": MemberState.SUSPECTED,
                "hanging-2": MemberState.SUSPECTED,
                "waiting": MemberState.UNKNOWN,
            }

    try:
        run_virtual(main(), patience=0.05)
    finally:
        release.set()


# Running


def test_an_evaluation_that_fails_is_logged_and_not_the_last(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake in a detector must not end the watch."""
    evaluate, failures = Heartbeats.evaluate, [LookupError("mistake")]

    def fail_once(beats: Heartbeats) -> None:
        if failures:
            raise failures.pop()
        evaluate(beats)

    monkeypatch.setattr(Heartbeats, "evaluate", fail_once)

    async def main() -> None:
        beats = Heartbeats("orders", detector=fixed_timeout(3.0))
        beats.watch("a")
        async with beats:
            await sleep_async(5)
        assert beats.group.counts["suspicions"] == 1

    virtual(main)
    assert "mistake" in caplog.text


def test_heartbeats_run_in_one_place_only() -> None:
    """A second start in the other way says what to do."""

    async def main() -> None:
        beats = Heartbeats("orders")
        async with beats:
            with pytest.raises(RuntimeError, match="already"):
                await beats.__aenter__()
            with pytest.raises(RuntimeError, match="already"):
                beats.start()
        async with beats:
            pass

    virtual(main)
    beats = Heartbeats("orders", clock=SYSTEM)
    with beats:
        assert beats.start() is beats

        async def enter() -> None:
            async with beats:
                pass

        with pytest.raises(RuntimeError, match="close"):
            asyncio.run(enter())


def test_a_second_run_gives_each_peer_its_full_patience() -> None:
    """The time between two runs counts as silence of no peer."""

    async def main() -> None:
        beats = Heartbeats("orders", detector=fixed_timeout(3.0), confirm_after=4.0)
        path: list[str] = []
        beats.subscribe(lambda change: path.append(f"{change.member} {change.after}"))
        beats.watch("alive")
        beats.watch("suspected")
        async with beats:
            await sleep_async(2)
            beats.heartbeat("alive")
            await sleep_async(2)
        assert path == ["alive alive", "suspected suspected"]
        await sleep_async(100)
        async with beats:
            await sleep_async(2)
            assert len(path) == 2
            beats.heartbeat("suspected")
            beats.heartbeat("alive")
            await sleep_async(2)
        assert path[2:] == ["suspected alive"]
        assert beats.group.counts["own_pauses"] == 0

    virtual(main)


def running(beats: Heartbeats) -> threading.Thread:
    """Return the thread that watches, which runs."""
    assert beats._background is not None
    thread = beats._background.thread
    assert thread is not None
    assert thread.is_alive()
    return thread


def test_a_background_thread_judges_and_ends_with_close() -> None:
    """For programs without an event loop."""
    suspected, heard = threading.Event(), threading.Event()
    beats = Heartbeats("orders", every=0.05, detector=fixed_timeout(0.2), clock=SYSTEM)

    def note(change: MemberChanged) -> None:
        (suspected if change.after == "suspected" else heard).set()

    beats.subscribe(note)
    beats.watch("a")
    with beats:
        thread = running(beats)
        assert suspected.wait(60)
        beats.heartbeat("a")
        assert heard.wait(60)
    assert not thread.is_alive()
    suspected.clear()
    beats.start()  # once more
    thread = running(beats)
    beats.heartbeat("a")  # on a slow machine it is suspected already
    assert suspected.wait(60)
    beats.close()
    beats.close()
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_is_at_rest_and_can_start() -> None:
    """The parent's thread does not come along, nor does a lock that it held."""
    beats = Heartbeats("orders", every=0.05, detector=fixed_timeout(0.2), clock=SYSTEM)
    beats.watch("a")
    with beats, beats._mutex:
        child = os.fork()
        if child == 0:
            try:
                suspected = threading.Event()
                if beats._background is not None or threading.active_count() != 1:
                    os._exit(2)
                beats.heartbeat("a")
                beats.subscribe(
                    lambda change: suspected.set() if change.after == "suspected" else None
                )
                with beats:
                    os._exit(0 if suspected.wait(60) else 3)
            finally:
                os._exit(4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
