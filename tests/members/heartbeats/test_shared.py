"""Heartbeats in a shared store: in memory on virtual time, and on a real server with real pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from seawall.clock import SYSTEM, VirtualClock
from seawall.errors import StoreUnavailable
from seawall.members import Heartbeats, MemberState, fixed_timeout
from seawall.redis.pods import SharedHeartbeats
from seawall.redis.store import RedisStore
from seawall.runtime.driver import sleep_async
from seawall.runtime.store import MEMORY, Sighting
from seawall.testing import FakeStore, run_virtual
from tests.redis.conftest import client, frozen, new_store, redis_url, store
from tests.redis.support import FrozenClock, keys_without_expiry

__all__ = ["client", "frozen", "new_store", "redis_url", "store"]

ROOT: Final = Path(__file__).resolve().parents[3]
PATIENCE: Final = 60.0


class Pods:
    """Members of one group in one process, and what each says of the others."""

    def __init__(self, store: FakeStore, *names: str, **settings: Any) -> None:
        self.store = store
        self.settings = {"confirm_after": 5.0, **settings}
        self.pods: dict[str, Heartbeats] = {}
        self.said: dict[str, list[str]] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> Heartbeats:
        rng = Random(len(self.pods))
        pod = Heartbeats("orders", shared=self.store, own=name, rng=rng, **self.settings)
        self.pods[name] = pod
        said = self.said[name] = []
        pod.subscribe(lambda change: said.append(f"{change.member} {change.after}"))
        return pod

    async def start(self, *names: str) -> None:
        for name in names or list(self.pods):
            await self.pods[name].__aenter__()

    async def stop(self, name: str) -> None:
        await self.pods[name].__aexit__()

    def kill(self, name: str) -> None:
        """End a pod without a goodbye."""
        task, self.pods[name]._task = self.pods[name]._task, None
        assert task is not None
        task.cancel()

    async def end(self) -> None:
        for name in self.pods:
            await self.stop(name)

    def clear(self) -> None:
        for said in self.said.values():
            said.clear()


def test_pods_find_each_other_and_notice_who_leaves_and_who_dies() -> None:
    """Pods need no list of peers: the name of the group is enough."""

    async def main() -> None:
        pods = Pods(FakeStore(), "a", "b", "c", "d")
        await pods.start()
        await sleep_async(60)
        for name, pod in pods.pods.items():
            assert sorted(pod.alive) == sorted(set("abcd") - {name})
            assert pod.group.counts["suspicions"] == 0
            assert pod.snapshot()["own"] == name
        pods.clear()
        await pods.stop("c")
        pods.kill("d")
        await sleep_async(20)
        assert pods.said["a"] == pods.said["b"] == ["c left", "d suspected", "d confirmed"]
        pods.clear()
        await pods.start("c", "d")  # under the same names
        await sleep_async(5)
        assert sorted(pods.said["a"]) == ["c alive", "c unknown", "d alive"]
        assert pods.pods["a"].group.counts["own_pauses"] == 0
        await pods.end()

    run_virtual(main())


def outage(seconds: float) -> list[str]:
    """Return who was accused of what in and after an outage of the store."""

    async def main() -> list[str]:
        store = FakeStore()
        pods = Pods(store, "a", "b", "c")
        await pods.start()
        await sleep_async(20)
        pods.clear()
        store.fail()
        await sleep_async(seconds)
        store.recover()
        await sleep_async(60)
        accused = [*pods.said["a"], *pods.said["b"], *pods.said["c"]]
        pods.clear()
        pods.kill("c")
        await sleep_async(15)
        assert pods.said["a"] == pods.said["b"] == ["c suspected", "c confirmed"]
        await pods.end()
        return accused

    return run_virtual(main())


@pytest.mark.parametrize("seconds", [0.5, 3.0, 10.0, 300.0])
def test_nobody_is_accused_while_the_store_is_away_nor_when_it_is_back(seconds: float) -> None:
    """Who cannot look knows nothing; afterwards, deaths are found as before."""
    assert outage(seconds) == []


@pytest.mark.parametrize("safeguard", ["_judged_at", "_shared_calm_until"])
def test_an_outage_accuses_without_its_safeguards(
    safeguard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence is measured to the last look, and the others have time to write again."""
    if safeguard == "_judged_at":
        monkeypatch.setattr(Heartbeats, safeguard, lambda _beats, _peer, now: now)
    else:
        never = property(lambda _: 0.0, lambda *_: None)
        monkeypatch.setattr(Heartbeats, safeguard, never, raising=False)
    assert any("suspected" in one for one in outage(10.0))


def test_a_second_run_accuses_nobody_before_the_store_answers() -> None:
    """What was known before is no evidence, and there is no new one yet."""

    async def main() -> None:
        shared = FakeStore()
        pods = Pods(shared, "a", "b")
        await pods.start()
        await sleep_async(10)
        await pods.stop("a")
        pods.clear()
        shared.fail()
        await sleep_async(100)
        await pods.start("a")
        await sleep_async(100)
        shared.recover()
        await sleep_async(100)
        assert pods.said["a"] == []
        assert pods.pods["a"].alive == ["b"]
        await pods.end()

    run_virtual(main())


def test_a_question_to_the_store_that_was_cancelled_is_asked_again() -> None:
    """A pod whose client cancelled a call goes on writing, and is not taken for dead."""

    async def main() -> None:
        pods = Pods(FakeStore(), "a", "b")
        await pods.start()
        await sleep_async(10)
        share = pods.pods["a"]._share
        assert share is not None
        beat = share.beat

        async def cancelled(*_args: Any) -> Any:
            share.beat = beat  # type: ignore[method-assign]
            raise asyncio.CancelledError

        share.beat = cancelled  # type: ignore[method-assign]
        pods.clear()
        await sleep_async(100)
        assert pods.said == {"a": [], "b": []}
        await pods.end()

    run_virtual(main())


class SetClock(VirtualClock):
    """A store's clock that the test sets."""

    __slots__ = ("real", "shift")

    def now(self) -> float:
        return self.real.now() + self.shift


@pytest.mark.parametrize("shift", [3600.0, -3600.0, 1.5, -1.5])
def test_nobody_is_accused_because_the_clock_of_the_store_was_set(shift: float) -> None:
    """Only whether a heartbeat is new counts; silence is measured by the clock of this process."""

    async def main() -> None:
        clock = SetClock()
        clock.real, clock.shift = VirtualClock(), 10_000.0
        pods = Pods(FakeStore(clock=clock), "a", "b")
        clock.real = pods.pods["a"]._clock  # type: ignore[assignment]
        await pods.start()
        await sleep_async(20)
        pods.clear()
        clock.shift += shift
        await sleep_async(60)
        assert pods.said == {"a": [], "b": []}
        pods.kill("b")
        await sleep_async(15)
        assert pods.said["a"] == ["b suspected", "b confirmed"]
        await pods.end()

    run_virtual(main())


def test_pods_that_were_gone_long_ago_are_not_watched_and_forgotten_in_the_end() -> None:
    """A newcomer does not report deaths from before its time; who saw one keeps it for an hour."""

    async def main() -> None:
        pods = Pods(FakeStore(), "old", "dead", "gone")
        await pods.start()
        await sleep_async(10)
        pods.kill("dead")
        await pods.stop("gone")
        await sleep_async(30)
        await pods.add("new").__aenter__()
        await sleep_async(10)
        assert pods.pods["new"].alive == ["old"]
        assert list(pods.pods["new"].members) == ["old"]
        assert set(pods.pods["old"].members) == {"dead", "gone", "new"}
        pods.clear()
        await sleep_async(MEMORY)
        assert set(pods.pods["old"].members) == {"new"}
        assert pods.said["old"] == ["dead left"]
        await pods.end()

    run_virtual(main())


def test_the_number_of_pods_is_bounded() -> None:
    """Pods beyond the bound are counted; no known pod is dropped for them."""

    async def main() -> None:
        pods = Pods(FakeStore(), *"abcdef", max_peers=3)
        await pods.start()
        await sleep_async(30)
        for pod in pods.pods.values():
            assert len(pod.alive) == 3
            assert pod.snapshot()["messages"]["refused"] > 0
        await pods.end()

    run_virtual(main())


def test_a_child_process_is_another_member() -> None:
    """A made-up name is made up again; a given one is the user's business."""
    shared = FakeStore()
    made_up, given = Heartbeats("a", shared=shared), Heartbeats("b", shared=shared, own="pod-1")
    before = made_up.own
    for beats in (made_up, given):
        beats._after_fork()
    assert made_up.own
    assert made_up.own != before
    assert given.own == "pod-1"


def test_a_store_that_fails_in_another_way_is_logged_and_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A mistake in a store must not end the watch."""

    async def main() -> None:
        shared = FakeStore()
        pods = Pods(shared, "a", "b")
        await pods.start()
        share: Any = shared._heartbeats("orders")
        beat = share.beat

        async def broken(*_args: Any) -> Sighting:
            raise LookupError("mistake")

        share.beat = broken
        await sleep_async(5)
        share.beat = beat
        await sleep_async(20)
        assert pods.pods["a"].alive == ["b"]
        assert pods.said["a"] == ["b alive"]
        await pods.end()

    run_virtual(main())
    assert "mistake" in caplog.text


# On a real server


def test_a_real_store_keeps_heartbeats_by_its_own_clock(
    frozen: FrozenClock, store: RedisStore, client: Any
) -> None:
    """Heartbeats are dated by the server, expire after an hour, and are bounded in number."""
    share = SharedHeartbeats(store._core, "orders")

    async def main() -> None:
        first = await share.beat("a", 10, 5.0)
        assert [(beat.member, beat.age) for beat in first.beats] == [("a", 0.0)]
        frozen.advance(1_500_000)
        second = await share.beat("b", 10, 5.0)
        assert [(beat.member, beat.age) for beat in second.beats] == [("b", 0.0), ("a", 1.5)]
        assert second.beats[1].stamp == first.beats[0].stamp
        await share.leave("a", 5.0)
        third = await share.beat("b", 10, 5.0)
        assert ([beat.member for beat in third.beats], third.left) == (["b"], ["a"])
        back = await share.beat("a", 10, 5.0)
        assert ({beat.member for beat in back.beats}, back.left) == ({"a", "b"}, [])
        other = await SharedHeartbeats(store._core, "invoices").beat("z", 10, 5.0)
        assert [beat.member for beat in other.beats] == ["z"]
        for number in range(20):
            frozen.advance(1)
            last = await share.beat(f"many-{number}", 5, 5.0)
        assert [beat.member for beat in last.beats] == [f"many-{n}" for n in range(19, 14, -1)]
        frozen.advance(round(MEMORY * 1e6))
        alone = await share.beat("late", 10, 5.0)
        assert [beat.member for beat in alone.beats] == ["late"]

    asyncio.run(main())
    assert not keys_without_expiry(client, store._core.prefix)


@pytest.mark.parametrize(
    "reply",
    [
        None,
        [],
        [b"1"],
        [b"x", [], []],
        [b"5", [b"a"], []],
        [b"5", [b"a", b"x"], []],
        [b"5", [b"a", b"-1"], []],
        [b"5", [b"a", b"nan"], []],
        [b"5", [3, b"1"], []],
        [b"5", [], [7]],
        [b"99999999999999999999", [], []],
    ],
)
def test_an_answer_that_makes_no_sense_is_no_answer(
    reply: Any, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A malformed answer of the store neither clears nor accuses a peer."""

    async def say(*_args: Any) -> Any:
        return reply

    monkeypatch.setattr(store._core, "acall", say)
    with pytest.raises(StoreUnavailable, match="no sense"):
        asyncio.run(SharedHeartbeats(store._core, "orders").beat("a", 10, 5.0))


class Pod:
    """A process that is a member of a group, and what it has reported, line by line."""

    def __init__(self, url: str, prefix: str, name: str) -> None:
        self.reports: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        program = Path(__file__).with_name("pod.py")
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-W", "error", str(program), url, prefix, name],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self.changed:
                self.reports.append(json.loads(line))
                self.changed.notify_all()

    def wait(self, is_reported: Callable[[list[dict[str, Any]]], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: is_reported(self.reports), PATIENCE), self.reports

    def wait_for(self, *expected: str) -> None:
        """Wait until each of `expected` was reported, such as "b alive"."""
        self.wait(lambda reports: set(expected) <= {report.get("change") for report in reports})

    def changes(self) -> list[str]:
        return [report["change"] for report in self.reports if "change" in report]

    def send(self, what: signal.Signals) -> None:
        self._process.send_signal(what)

    def end(self) -> None:
        """Let it exit normally: it says goodbye."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def fleet(url: str, prefix: str, *names: str) -> Iterator[dict[str, Pod]]:
    pods: dict[str, Pod] = {}
    try:
        for name in names:
            pods[name] = Pod(url, prefix, name)
        for name, pod in pods.items():
            pod.wait_for(*(f"{other} alive" for other in names if other != name))
        yield pods
    finally:
        for pod in pods.values():
            pod.close()


@pytest.mark.alone
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_real_pods_notice_each_other_killed_stopped_and_gone(
    redis_url: str, store: RedisStore
) -> None:
    """Three processes and one server: kill -9, SIGSTOP for longer than a pause, and a goodbye."""
    with fleet(redis_url, store._core.prefix, "a", "b", "c", "d") as pods:
        pods["d"].send(signal.SIGKILL)
        for name in "abc":
            pods[name].wait_for("d suspected", "d confirmed")
        pods["c"].send(signal.SIGSTOP)
        for name in "ab":
            pods[name].wait_for("c suspected")
        pods["c"].send(signal.SIGCONT)
        for name in "ab":
            pods[name].wait(
                lambda reports: (
                    [r["change"] for r in reports if "c " in r.get("change", "")][-2:]
                    == ["c suspected", "c alive"]
                )
            )
        pods["c"].wait(lambda reports: any(report.get("paused", 0) > 3.0 for report in reports))
        pods["c"].end()
        for name in "ab":
            pods[name].wait_for("c left")
        accused = [one for one in pods["c"].changes() if one[0] in "ab" and "alive" not in one]
        assert accused == []
        for name in "ab":
            about_c = [one for one in pods[name].changes() if one.startswith("c ")]
            if "c confirmed" in about_c:
                about_c.remove("c confirmed")  # a slow machine: it was stopped for longer
            assert about_c == ["c alive", "c suspected", "c alive", "c left"]


def test_heartbeats_on_a_real_store_run_in_a_loop_and_in_a_thread(
    new_store: Callable[..., RedisStore],
) -> None:
    """One of each kind see each other; leaving is heard at once."""
    settings = {"every": 0.1, "detector": fixed_timeout(30.0), "clock": SYSTEM}
    changed = threading.Condition()
    states: dict[str, str] = {}

    def note(change: Any) -> None:
        with changed:
            states[change.member] = change.after
            changed.notify_all()

    def wait_for(**expected: str) -> None:
        with changed:
            assert changed.wait_for(lambda: expected.items() <= states.items(), PATIENCE), states

    with Heartbeats("orders", shared=new_store(), own="thread", **settings) as in_thread:  # type: ignore[arg-type]
        in_thread.subscribe(note)

        async def main() -> None:
            beats = Heartbeats("orders", shared=new_store(), own="loop", **settings)  # type: ignore[arg-type]
            beats.subscribe(note)
            async with beats:
                await asyncio.to_thread(wait_for, thread="alive", loop="alive")

        asyncio.run(main())
        wait_for(loop="left")
        view = in_thread.get("loop")
        assert view is not None
        assert view.state is MemberState.LEFT
