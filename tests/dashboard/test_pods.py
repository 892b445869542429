"""Pods that tell each other their views through a real store: what, how often, until when."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import redis

from seawall import RedisStore
from seawall.clock import SYSTEM
from seawall.dashboard.pods.store_pods import StorePods
from seawall.errors import StoreUnavailable
from seawall.events import BreakerChanged
from seawall.events.bus import emit
from tests.dashboard.pods_support import (
    NEVER,
    NewPod,
    Process,
    Shows,
    names,
    new_pod,
    read,
    tell,
    view,
)
from tests.redis.conftest import client, frozen, new_store, redis_url, store
from tests.redis.support import FrozenClock, eventually, keys_without_expiry

__all__ = ["client", "frozen", "new_pod", "new_store", "redis_url", "store"]

pytestmark = pytest.mark.alone


# Telling and reading


def test_pods_see_each_other(new_pod: NewPod, client: redis.Redis) -> None:
    """Each sees the others and not itself, how old each view is, and can act on none."""
    one, two, three = (new_pod(name) for name in ("one", "two", "three"))
    assert names(one) == ["three", "two"]
    assert names(three) == ["one", "two"]
    (seen, _other) = read(two)
    assert 0 <= seen["age"] < 5
    assert not seen["operable"]
    assert seen["guards"][0]["name"] == "vendor"
    assert not keys_without_expiry(client, one._store.prefix)
    assert "without viewers" in repr(one)
    tell(one)
    assert ": viewed>" in repr(one)


def test_one_that_closes_is_gone_at_once(new_pod: NewPod) -> None:
    """Whether its store is closed or only this; what is closed once more does no harm."""
    one, two, three = (new_pod(name) for name in ("one", "two", "three"))
    two._store.close()()
    assert names(one) == ["three"]
    three.close()
    eventually(lambda: names(one) == [])
    three.close()
    two.close()
    assert three._store.up
    assert "closed" in repr(three)


def test_what_is_being_told_at_the_end_is_told_before_it_leaves(
    new_pod: NewPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the pod would be heard of after it was gone."""
    one, two = new_pod("one"), new_pod("two", every=0.02)
    order: list[str] = []
    acall = two._store.acall

    async def slow(script: str, keys: Any, args: Any, patience: float) -> Any:
        if args[0] == "tell":
            order.append("telling")
            await asyncio.sleep(0.05)  # noqa: TID251 - as a server that is busy
        reply = await acall(script, keys, args, patience)
        order.append(args[0])
        return reply

    monkeypatch.setattr(two._store, "acall", slow)
    read(one)
    two._due = 0.0
    two._handle.soon()
    eventually(lambda: order[-1:] == ["telling"])
    two._store.close()()
    assert order[-2:] == ["tell", "leave"]
    assert names(one) == []


def test_one_that_is_killed_is_told_to_be_gone_and_then_dropped(
    frozen: FrozenClock, new_pod: NewPod
) -> None:
    """By the server's clock: gone after two missed views, dropped after 75 s."""
    one, two = new_pod("one", clock=frozen), new_pod("two", clock=frozen)
    begun = frozen.now_us
    two._every = 1.0
    read(one)
    tell(two)
    tell(two)  # by now it knows that somebody looks
    seen = []
    for seconds in (0, 3, 4, 74, 76):
        frozen.set(begun + seconds * 1_000_000)
        tell(one)
        seen.append(names(one))
    assert seen == [["two"], ["two"], ["(two)"], ["(two)"], []]


def test_a_restarted_pod_replaces_the_one_that_is_gone(
    frozen: FrozenClock, new_pod: NewPod
) -> None:
    """It takes the place of its name; if both live, their processes distinguish them."""
    one = new_pod("one", clock=frozen)
    first = new_pod("web", clock=frozen, pid=1)
    first._every = 1.0
    read(one)
    tell(first)
    tell(first)
    frozen.advance(4_000_000)
    assert names(one) == ["(web)"]
    (gone,) = read(one)
    assert gone["gone"] == pytest.approx(frozen.now_us / 1e6 - 4)
    assert gone["troubles"][0]["what"] == "This pod has not been heard of for 4 s."
    new_pod("web", clock=frozen, pid=2)
    assert names(one) == ["web"]
    tell(first)
    assert names(one) == ["web (1)", "web (2)"]


def test_a_clock_that_is_set_back_lets_nobody_live_for_ever(
    frozen: FrozenClock, new_pod: NewPod
) -> None:
    """Who was heard of in what is now the future is heard of now."""
    one = new_pod("one", clock=frozen)
    new_pod("two", clock=frozen)
    frozen.advance(-3600 * 1_000_000)
    assert [view["age"] for view in read(one)] == [0.0]
    frozen.advance(76_000_000)
    assert names(one) == []


# How often


def test_where_nobody_looks_little_is_told(new_pod: NewPod) -> None:
    """A pod publishes every five seconds; with a viewer every second, and 15 s longer."""
    one = new_pod("one")
    two = new_pod("two")
    two._every = 1.0
    tell(two)
    assert read(one)[0]["every"] == 5.0
    assert SYSTEM.now() + 3 < two._due
    tell(two)
    assert two._has_viewers
    assert two._due < SYSTEM.now() + 1  # though it has told that five seconds may pass
    tell(two)
    assert read(one)[0]["every"] == 1.0


def test_the_mark_of_who_looks_goes_away(new_pod: NewPod, client: redis.Redis) -> None:
    """It expires, and then a pod announces the slower pace before it slows down."""
    one, two = new_pod("one"), new_pod("two")
    two._every = 1.0
    read(one)
    tell(two)
    assert 10_000 < client.pttl(two._keys[2]) <= 15_000
    client.delete(two._keys[2])
    tell(two)
    assert not two._has_viewers
    assert two._due < SYSTEM.now() + 1
    tell(two)
    assert two._due > SYSTEM.now() + 3


def test_a_tick_before_its_time_does_nothing(new_pod: NewPod) -> None:
    """It neither looks nor asks the store."""
    one = new_pod("one", every=0.01)
    tell(one)
    watcher: Any = one._watcher
    before, asked = watcher.samples, one._request
    SYSTEM.sleep(0.1)
    assert (watcher.samples, one._request) == (before, asked)


def test_what_is_seldom_is_told_at_once_and_what_is_not_seldom_is_told_together(
    new_pod: NewPod,
) -> None:
    """A breaker's change is seen elsewhere in no time; a thousand are one piece of news."""
    one, two = new_pod("one"), new_pod("two")
    read(one)
    tell(two)  # it knows that somebody looks
    watcher: Any = two._watcher
    watcher.view = view("two", at=7.0)
    before, began = watcher.samples, SYSTEM.now()
    for _ in range(1000):
        emit(BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None)
    eventually(lambda: read(one)[0]["at"] == 7.0)
    assert SYSTEM.now() - began < 1.0
    assert watcher.samples - before <= 2


def test_a_watcher_whose_view_is_new_is_not_asked_to_look_again(new_pod: NewPod) -> None:
    """A recent view for a local viewer is published without taking another sample."""
    one = new_pod("one")
    watcher: Any = one._watcher
    before = watcher.samples
    watcher.view = view("one", at=5.0)
    tell(one)
    assert watcher.samples == before
    tell(one)
    assert watcher.samples == before + 1


def test_who_closes_need_not_wait_for_what_was_to_be_told(new_pod: NewPod) -> None:
    """Closing does not wait for a view that was scheduled."""
    one, two = new_pod("one"), new_pod("two")
    emit(BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None)
    eventually(lambda: two._timer is not None)
    began = SYSTEM.now()
    two.close()
    eventually(lambda: names(one) == [])
    assert SYSTEM.now() - began < 1.0


class Labours(Shows):
    """A watcher that takes long to look, and notes which thread does it."""

    def sample(self) -> Any:
        over = thread_time() + 0.004
        while thread_time() < over:
            pass
        self.thread = threading.current_thread()
        return super().sample()


def test_a_view_that_takes_long_is_not_made_in_the_thread_of_the_store(
    new_store: Callable[..., RedisStore],
) -> None:
    """Breakers are flushed there and do not wait for it; what is made quickly is made there."""
    watcher = Labours("one")
    one = StorePods(new_store(), watcher, every=NEVER)
    eventually(lambda: one._published)
    seen = set()
    for _ in range(3):
        tell(one)
        seen.add(watcher.thread.name)
    assert all(name.startswith("asyncio_") for name in seen)  # of the loop's executor
    one._cost = 0.0
    tell(one)
    assert watcher.thread is one._store._background.thread


def test_a_watcher_that_fails_is_tried_again_when_it_is_time(
    new_store: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is logged once, and nothing else stops."""
    watcher: Any = Shows("one")
    watcher.view = None
    watcher.sample = lambda: 1 / 0
    one = StorePods(new_store(), watcher, every=0.01)
    eventually(lambda: "ZeroDivisionError" in caplog.text)
    SYSTEM.sleep(0.1)
    assert caplog.text.count("a background job of the store failed") == 1
    with pytest.raises(ZeroDivisionError):
        tell(one)


def test_a_view_that_takes_long_is_told_seldom(new_pod: NewPod) -> None:
    """The store's thread has more to do: a fiftieth of its time is enough for this."""
    one, two = new_pod("one"), new_pod("two")
    two._every, two._has_viewers, two._cost = 1.0, True, 0.1
    tell(two)
    assert read(one)[0]["every"] == 5.0


# Processes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_is_another_pod(new_pod: NewPod) -> None:
    """The child publishes its own view as soon as something happens; the parent's stays."""
    one, two = new_pod("one"), new_pod("two")
    child = os.fork()
    if not child:
        try:
            one.close()
            watcher: Any = two._watcher
            watcher.view = view("child")
            emit(
                BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None
            )
            eventually(lambda: two._published and two._request is not None and two._request.done())
        finally:
            os._exit(0)  # never go on as a second pytest
    os.waitpid(child, 0)
    assert names(one) == ["child", "two"]


def test_three_processes_of_which_one_is_killed_and_one_leaves(
    new_store: Callable[..., RedisStore], redis_url: str
) -> None:
    """All are seen immediately; the killed one is shown as gone, the other disappears."""
    store = new_store()
    one = StorePods(store, Shows("one"), every=0.2)
    pods = {name: Process(name, redis_url, store._core.prefix) for name in ("a", "b", "c")}
    try:
        eventually(lambda: names(one) == ["a", "b", "c"], 20.0)
        eventually(lambda: all(view["every"] < 1 for view in read(one)))
        began = SYSTEM.now()
        pods["b"].input.write(b"isolate\n")
        pods["b"].input.flush()
        eventually(lambda: [v["guards"][0]["breaker"] for v in read(one)][1] == "isolated")
        assert SYSTEM.now() - began < 2.0
        pods["a"].kill()
        assert pods["c"].end() == 0
        assert "c" not in [name.strip("()") for name in names(one)]
        eventually(lambda: names(one) == ["(a)", "b"])
    finally:
        for pod in pods.values():
            pod.kill()


# Arguments


def test_what_is_passed_is_looked_at(store: RedisStore) -> None:
    """What is no store, no watcher or no time is refused at once."""
    wrong: Any = object()
    with pytest.raises(TypeError, match="pass the RedisStore that the pods share"):
        StorePods(wrong, Shows())
    with pytest.raises(TypeError, match="pass the Watcher of this pod"):
        StorePods(store, wrong)
    with pytest.raises(ValueError, match="every=0"):
        StorePods(store, Shows(), every=0)
    store.close()
    closed = StorePods(store, Shows())
    with pytest.raises(StoreUnavailable):
        read(closed)
    closed.close()
