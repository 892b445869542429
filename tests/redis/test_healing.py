"""A store that is down comes back, whatever goes wrong while it is healed.

Time is virtual, and the connections are scripted: at each await of healing something may go wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seawall import RedisStore
from seawall.errors import StoreUnavailable
from seawall.redis import connections, health
from seawall.redis.health import StoreHealth
from seawall.runtime import background as background_module
from seawall.testing import run_virtual, virtual_time

ROOT: Final = Path(__file__).resolve().parents[2]

SOON: Final = 10.0
"""Virtual seconds after the last fault: attempts are at most one second apart."""

FAULTS: Final = (
    "none",
    "fails again",
    "refused",
    "nonsense",
    "unexpected",
    "cancelled",
    "exits",
    "hangs",
)
"""What happens at an await: during a pause, in a probe, or while a connection is closed.

"fails again": the store fails once more, as a caller sees it; it then goes down if it was up.
"""


class Script:
    """Tells each await, in order, what goes wrong there; afterwards nothing does."""

    def __init__(self, store: RedisStore, faults: Sequence[str]) -> None:
        self._store = store
        self._faults = list(faults)

    def next(self) -> str:
        """Return the next fault; a caller's failure happens here and now."""
        fault = self._faults.pop(0) if self._faults else "none"
        if fault == "fails again":
            self._store._core.health.failed("a caller's call failed", certain=True)
        return fault

    @property
    def over(self) -> bool:
        return not self._faults


class ScriptedLink:
    """A link to a store that answers, but for what the script says."""

    def __init__(self, script: Script) -> None:
        self._script = script

    async def exchange(self, *_call: Any) -> Any:
        await asyncio.sleep(0)  # noqa: TID251 - an await, for the schedule
        fault = self._script.next()
        if fault == "refused":
            raise StoreUnavailable("the store failed: scripted")
        if fault == "hangs":  # the link gives up by itself, as `LoopConnection.exchange` does
            await asyncio.sleep(1.0)  # noqa: TID251 - virtual
            raise StoreUnavailable("the store failed: no answer")
        await _misbehave(fault)
        await asyncio.sleep(0)  # noqa: TID251 - an await, for the schedule
        self._script.next()
        return "nonsense" if fault == "nonsense" else 1

    async def close(self) -> None:
        await asyncio.sleep(0)  # noqa: TID251 - an await, for the schedule
        fault = self._script.next()
        if fault == "hangs":
            await asyncio.get_running_loop().create_future()
        if fault not in {"none", "fails again"}:
            raise RuntimeError("a connection that cannot be closed")


async def _misbehave(fault: str) -> None:
    if fault == "unexpected":
        raise LookupError("nobody thought of this")
    if fault == "exits":
        raise SystemExit(3)
    if fault == "cancelled":  # by somebody else: of a future that this waits for
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future


@contextmanager
def quiet() -> Iterator[None]:
    """Let no traceback of an expected failure be printed."""
    logging.getLogger("seawall").addFilter(_drop)
    try:
        yield
    finally:
        logging.getLogger("seawall").removeFilter(_drop)


def _drop(_record: logging.LogRecord) -> bool:
    return False


def heals(faults: Sequence[str], *, at: str = "") -> bool:
    """Let a store go down, and those faults happen; return whether it is up in the end.

    `at`: "apart" lets making a connection fail a few times as well.
    """

    async def main() -> bool:
        store = RedisStore("redis://127.0.0.1:1", name="scripted")
        script = Script(store, faults)
        raising = itertools.count()

        def apart() -> ScriptedLink:
            if at == "apart" and next(raising) < len(faults):
                raise FileNotFoundError("no such certificate")
            return ScriptedLink(script)

        store._core._connections.apart = apart  # type: ignore[method-assign,assignment]
        loop = asyncio.get_running_loop()
        store._core._background.loop = loop
        store._core._background._begin(list(store._core._background._handles))
        store._core.health.failed("the first failure", certain=True)
        assert not store.up
        for _ in range(1000):
            await asyncio.sleep(0.1)  # noqa: TID251 - virtual
            if store.up and script.over:
                break
        await asyncio.sleep(SOON)  # noqa: TID251 - virtual
        up = store.up
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()
        store._core._background.loop = None
        return up

    with virtual_time() as clock, quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "SYSTEM", clock)
        return run_virtual(main(), clock=clock)


def test_every_schedule_of_three_faults_ends_with_a_store_that_is_up():
    """At each await of healing, each fault: the store is up soon after the last one."""
    stuck = [faults for faults in itertools.product(FAULTS, repeat=3) if not heals(faults)]
    assert stuck == []


@given(st.lists(st.sampled_from(FAULTS), max_size=30))
@example(["none", "none", "fails again"])
@example(["none", "none", "hangs", "refused", "none", "fails again", "hangs"])
def test_a_store_that_is_down_comes_back_after_any_faults(faults: list[str]):
    """However many, in whatever order."""
    assert heals(faults)


def test_a_connection_that_cannot_even_be_made_is_tried_again():
    """A certificate that is missing for a while, say."""
    assert heals(["none"] * 5, at="apart")


FORK: Final = """
import os, sys, threading
from seawall import RedisStore

store = RedisStore("redis://127.0.0.1:1", prefix="fork", timeout=0.5)
store._core.health.failed("a test", certain=True)
assert not store.up
child = os.fork()
if child == 0:
    try:
        from seawall.redis.clients import clients_for

        store._core._connections._clients = clients_for(sys.argv[1])  # the server is back
        store._core.health.failed("a test", certain=True)
        back = threading.Event()
        store._core.watch(lambda up, cause: back.set() if up else None)
        assert store.up or back.wait(20), "the child's store stays down"
        store.close()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not store.up  # still tried, in vain, by the parent's own thread
assert store._core._background.thread.is_alive()
store.close()
print("done")
"""


def test_a_child_process_heals_its_own_store(redis_url: str):
    """A fork while the parent's store is down: the child's goes down and comes back by itself."""
    ran = subprocess.run(  # noqa: S603 - this project's own code
        [sys.executable, "-c", FORK, redis_url],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stdout + ran.stderr


# --- What healing stands on ---


async def _nothing() -> None:
    pass


def test_a_job_survives_whatever_it_raises():
    """Also what is no `Exception`: a cancellation that was meant for another, or an exit."""
    runs: list[str] = []

    async def main() -> None:
        background = background_module.Background(lambda: None, _nothing)
        faults = iter(["unexpected", "cancelled", "exits", "none"])

        async def job() -> None:
            fault = next(faults, "none")
            runs.append(fault)
            await _misbehave(fault)

        handle = background.every(1.0, job)
        handle.begin()
        await asyncio.sleep(5.5)  # noqa: TID251 - virtual
        handle.end()
        await asyncio.sleep(5.0)  # noqa: TID251 - virtual

    with quiet():
        run_virtual(main())
    assert runs[:4] == ["unexpected", "cancelled", "exits", "none"]
    assert len(runs) == 6  # and it ends when it is told to


def test_the_background_thread_survives_an_exit_in_a_callback(store: RedisStore):
    """`SystemExit` ends a loop; the store needs this one."""
    heard = threading.Event()

    def leave() -> None:
        raise SystemExit(3)

    store._core.start()
    with quiet():
        store._core._background.submit(leave)
        store._core._background.submit(heard.set)
        assert heard.wait(10)
    assert store._core.call("probe", [store._core.key("store", "x")], []) == 1


def test_without_a_thread_to_heal_it_a_store_is_not_down(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
):
    """A process with too many threads: callers go on trying, and all is well when it has fewer."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with quiet(), monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        store._core.health.failed("a test", certain=True)
        assert store.up
        with pytest.raises(StoreUnavailable, match="can't start new thread"):
            store._core.call("probe", [store._core.key("store", "x")], [])
    assert store._core.call("probe", [store._core.key("store", "x")], []) == 1


def test_watchers_hear_of_changes_in_the_order_in_which_they_happen():
    """A change during a watcher's call is told after it, to all of them."""
    health = StoreHealth()
    heard: list[tuple[str, bool]] = []

    def first(up: bool, _cause: str) -> None:  # noqa: FBT001 - a watcher's
        heard.append(("first", up))
        if not up:
            health.assume_up("a test")

    health.watchers.add(first)
    health.watchers.add(lambda up, _cause: heard.append(("second", up)))
    health.failed("a test", certain=True)
    assert heard == [("first", False), ("second", False), ("first", True), ("second", True)]


def test_changes_of_two_threads_are_told_in_order():
    """Who is told last of "up" while the store is down would never look again."""
    health = StoreHealth()
    heard: list[bool] = []
    inside, go_on = threading.Event(), threading.Event()

    def slow(up: bool, _cause: str) -> None:  # noqa: FBT001 - a watcher's
        if up and not inside.is_set():
            inside.set()
            assert go_on.wait(10)
        heard.append(up)

    health.watchers.add(slow)
    health.failed("a test", certain=True)
    thread = threading.Thread(target=health.assume_up, args=("a test",))
    thread.start()
    assert inside.wait(10)
    health.failed("another", certain=True)
    go_on.set()
    thread.join()
    assert heard == [False, True, False]


def test_a_watcher_that_an_interrupt_ends_does_not_stop_later_news():
    """A signal handler may raise in the thread that notifies: the next change is still reported."""
    health = StoreHealth()
    heard: list[bool] = []

    def interrupted(up: bool, _cause: str) -> None:  # noqa: FBT001 - a watcher's
        if not up:
            raise KeyboardInterrupt

    health.watchers.add(interrupted)
    health.watchers.add(lambda up, _cause: heard.append(up))
    with pytest.raises(KeyboardInterrupt):
        health.failed("a test", certain=True)
    health.assume_up("a test")
    assert heard == [True]


# --- What is no reason to take a store to be down ---


def test_calls_that_are_late_at_the_same_moment_are_one_failure():
    """A moment of slowness that ten calls meet is no row of failures; three moments are."""
    health = StoreHealth()
    for _ in range(10):
        health.late(0.05, began=100.0)
    health.late(0.05, began=100.02)
    assert health.up
    health.late(0.05, began=100.05)
    assert health.up
    health.late(0.05, began=100.1)
    assert not health.up


class _SlowToConnect:
    """A client whose first answer takes a while; the others are immediate."""

    def __init__(self, seconds: float) -> None:
        self._ready = asyncio.get_running_loop().time() + seconds

    async def evalsha(self, *_call: Any) -> int:
        left = self._ready - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)  # noqa: TID251 - virtual
        return 1

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize(
    ("connecting", "up"), [(0.2, True), (30.0, False)], ids=["slow start", "black hole"]
)
def test_a_slow_start_is_no_failure_of_the_store(connecting: float, *, up: bool):
    """Until a link has its first answer, late calls count only after a quarter of a second."""

    async def main() -> tuple[bool, float]:
        store = RedisStore("redis://127.0.0.1:1", timeout=0.05)
        loop = asyncio.get_running_loop()
        store._core._background.loop = loop
        store._core._clients.make = lambda _timeout: _SlowToConnect(connecting)  # type: ignore[method-assign,assignment,return-value]
        began = loop.time()
        while store.up and loop.time() < began + 2.0:
            asked = loop.time()
            try:
                await store._core.acall("probe", [store._core.key("store", "x")], [])
            except StoreUnavailable:
                assert loop.time() - asked < 0.06  # a caller waits no longer than ever
            await asyncio.sleep(0.01)  # noqa: TID251 - virtual
        ended = store.up, loop.time() - began
        store._core._background.loop = None
        return ended

    with virtual_time() as clock, quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(health, "SYSTEM", clock)
        patch.setattr(connections, "SYSTEM", clock)
        stayed, seconds = run_virtual(main(), clock=clock)
    assert stayed == up
    assert up or seconds < 0.7


class _Unclosable:
    """A client whose connections hang when they are closed."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def aclose(self) -> None:
        await self._inner.aclose()
        await asyncio.get_running_loop().create_future()


def test_a_link_that_hangs_while_it_closes_is_left_to_itself(
    new_store: Callable[..., RedisStore], monkeypatch: pytest.MonkeyPatch
):
    """Closing ends in time, though a connection does not."""
    store = new_store()
    make = store._core._clients.make
    monkeypatch.setattr(store._core._clients, "make", lambda timeout: _Unclosable(make(timeout)))

    async def main() -> None:
        assert await store._core.acall("probe", [store._core.key("store", "x")], []) == 1
        async with asyncio.timeout(30):
            await store._core._connections.close()

    asyncio.run(main())


def test_pushes_go_on_after_a_connection_that_cannot_be_made(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
):
    """One that raises before anything is sent is tried again, as any other."""
    make, fails = store._core._clients.make_listener, [True, True]
    channel, heard = store._core.channel("store", "x"), threading.Event()

    def sometimes(timeout: float, attempt: int = 0) -> Any:
        if fails:
            fails.pop()
            raise FileNotFoundError("no such certificate")
        return make(timeout, attempt)

    monkeypatch.setattr(store._core._clients, "make_listener", sometimes)
    store._core.listen(channel, lambda message: heard.set() if message == b"news" else None)
    store._core.start()
    for _ in range(1000):
        client.publish(channel, b"news")
        if heard.wait(0.02):
            break
    assert heard.is_set()


def test_a_channel_that_could_not_be_subscribed_to_is_tried_again(
    store: RedisStore, client: Any, monkeypatch: pytest.MonkeyPatch
):
    """The listener hears of it by another connection, since this one may know nothing of it."""
    from redis.asyncio.client import PubSub

    from seawall.redis import messages

    monkeypatch.setattr(messages, "SILENCE", 0.2)
    subscribe, ready, heard = PubSub.subscribe, threading.Event(), threading.Event()
    failed: list[object] = []

    async def sometimes(self: PubSub, *channels: Any) -> Any:
        if ready.is_set() and not failed:
            failed.append(channels)
            raise ConnectionError("not now")
        return await subscribe(self, *channels)

    monkeypatch.setattr(PubSub, "subscribe", sometimes)
    store._core.listen(store._core.channel("store", "first"), lambda _message: ready.set())
    store._core.start()
    assert ready.wait(10)
    channel = store._core.channel("store", "second")
    store._core.listen(channel, lambda message: heard.set() if message == b"news" else None)
    for _ in range(1000):
        client.publish(channel, b"news")
        if heard.wait(0.02):
            break
    assert failed
    assert heard.is_set()
