"""Serializer: one at a time for each key, in order, whatever happens to those who wait."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Generator
from math import inf
from pathlib import Path
from types import coroutine
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import DeadlineExceeded, Overloaded, deadline, snapshot, subscribe
from seawall.events import CallRejected, SettingsChanged
from seawall.resources import Serializer, Stripes
from seawall.resources.contention.serializer import _Lane, _Turn
from seawall.testing import run_virtual, virtual_time
from tests.support import SEEDS, examples, falsified, let_pass, quarters, settled

SOURCE = Path(__file__).resolve().parent.parent / "src"
QUARTERS = quarters(8)


def _task(awaitable: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(awaitable)


def test_one_at_a_time_for_each_key_in_order() -> None:
    """Calls of one key follow each other; other keys are not held up."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        serializer = Serializer()
        ended: list[tuple[str, int, float]] = []

        async def work(key: str, number: int) -> None:
            await let_pass(1.0)
            ended.append((key, number, loop.time()))

        tasks = []
        for number in range(3):
            tasks += [_task(serializer.arun(key, work, key, number)) for key in ("a", "b")]
            await let_pass(0.125)
        shown = serializer.snapshot()
        assert (shown["in_flight"], shown["waiting"], shown["longest_line"]) == (2, 4, 2)
        await asyncio.gather(*tasks)
        assert [(n, at) for key, n, at in ended if key == "a"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
        assert [(n, at) for key, n, at in ended if key == "b"] == [(0, 1.0), (1, 2.0), (2, 3.0)]
        assert serializer._lanes == {}

    run_virtual(main())


def test_the_waiting_line_is_bounded() -> None:
    """Beyond it is `Overloaded`, at once."""

    async def main() -> None:
        serializer = Serializer(max_waiting=2, name="accounts")
        async with serializer.hold("a"):
            waiting = [_task(serializer.arun("a", let_pass, 0.0)) for _ in range(2)]
            await let_pass(1.0)
            with pytest.raises(Overloaded, match="'accounts': the key is in use, and 2 wait"):
                await serializer.arun("a", let_pass, 0.0)
            await serializer.arun("b", let_pass, 0.0)
        await asyncio.gather(*waiting)
        assert serializer.snapshot()["rejected"] == 1

    run_virtual(main())


def test_keys_in_use_are_bounded_and_idle_ones_take_no_memory() -> None:
    """A flood of keys is refused, and forgotten."""
    serializer = Serializer(max_keys=2)
    refused = pytest.raises(Overloaded, match="2 keys are in use")
    with serializer.hold(1), serializer.hold(2), refused:
        serializer.run(3, print)
    for key in range(1000):
        serializer.run(key, len, "")
    assert serializer.snapshot()["in_flight"] == 0
    assert serializer._lanes == {}


def test_waiting_for_a_turn_ends_in_time() -> None:
    """By `max_wait`, or by the deadline, with the error of each."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        serializer = Serializer(max_wait=2.0)
        async with serializer.hold("a"):
            with pytest.raises(Overloaded, match="waited 2 s"):
                await serializer.arun("a", let_pass, 0.0)
            with deadline(1.0), pytest.raises(DeadlineExceeded, match="while waiting"):
                await serializer.arun("a", let_pass, 0.0)
            assert loop.time() == 3.0
            serializer.update(max_wait=0)
            with pytest.raises(Overloaded):
                await serializer.arun("a", let_pass, 0.0)
            assert (loop.time(), serializer.snapshot()["waiting"]) == (3.0, 0)
        with deadline(0.0), pytest.raises(DeadlineExceeded, match="before its turn"):
            await serializer.arun("a", let_pass, 0.0)
        assert serializer._lanes == {}

    run_virtual(main())


def test_threads_wait_for_their_turn_too() -> None:
    """On their clock."""
    with virtual_time() as clock:
        serializer = Serializer(max_wait=1.5)
        with serializer.hold("a"), pytest.raises(Overloaded):
            serializer.run("a", print)
        assert (clock.now(), serializer._lanes) == (1.5, {})


def test_whatever_the_work_raises_the_next_one_has_its_turn() -> None:
    """The key is handed on, and the error passes through."""
    serializer = Serializer()
    for error in (KeyError, KeyboardInterrupt, GeneratorExit):

        def work(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error):
            serializer.run("a", work)
        assert serializer.run("a", len, "abc") == 3


def test_a_block_is_used_once() -> None:
    """To use it again would hold nothing."""
    serializer = Serializer()
    held = serializer.hold("a")
    with held:
        pass
    with pytest.raises(RuntimeError, match="for each block"), held:
        pass


def test_async_work_in_a_sync_turn_is_refused() -> None:
    """It would run after its turn."""
    with pytest.raises(TypeError, match="arun"):
        Serializer().run("a", let_pass, 0.0)
    with pytest.raises(TypeError, match="unhashable"):
        Serializer().hold([])  # type: ignore[arg-type]


def test_settings_of_a_serializer_are_checked() -> None:
    """Bad ones raise, and change nothing."""
    serializer = Serializer(max_keys=5, stripes=4)
    for bad in ({"max_waiting": -1}, {"max_wait": -1}, {"max_keys": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Serializer(**bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=next(iter(bad))):
            serializer.update(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stripes"):
        Serializer(stripes=0)
    shown = "Serializer(max_waiting=100, max_keys=5, stripes=4, name='serializer')"
    assert repr(serializer) == shown


class Visit(NamedTuple):
    """One who wants a key: when, for how long, and when it is cancelled (as in other tests)."""

    at: float
    key: int
    duration: float
    cancel: tuple[float, int] | None
    within: float | None


class Day(NamedTuple):
    """Who comes to one serializer."""

    max_waiting: int
    max_keys: int
    max_wait: float
    visits: list[Visit]
    seed: int


DAYS = st.builds(
    Day,
    max_waiting=st.integers(0, 4),
    max_keys=st.integers(1, 3),
    max_wait=st.sampled_from([0.0, 1.0, float("inf")]),
    visits=st.lists(
        st.builds(
            Visit,
            at=QUARTERS,
            key=st.integers(0, 2),
            duration=QUARTERS,
            cancel=st.none() | st.tuples(QUARTERS, st.integers(0, 3)),
            within=st.none() | QUARTERS,
        ),
        min_size=1,
        max_size=12,
    ),
    seed=SEEDS,
)


@coroutine
def _turn() -> Generator[None, None, None]:
    yield


class Visitors:
    """Carries out the visits of a day, and counts from outside who is in."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self.serializer = Serializer(
            max_waiting=day.max_waiting, max_keys=day.max_keys, max_wait=day.max_wait
        )
        self.inside: list[int] = []
        self.came: list[tuple[int, int]] = []
        self.served: list[tuple[int, int]] = []
        self.broken: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, number: int, script: Visit) -> None:
        task = _task(self.visit(number, script))
        self.tasks.append(task)
        if script.cancel is not None:
            after, turns = script.cancel
            asyncio.get_running_loop().call_later(after, self.cancel, task, turns)

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
        else:
            task.cancel()

    async def visit(self, number: int, script: Visit) -> None:
        self.came.append((script.key, number))
        with deadline(99.0 if script.within is None else script.within):
            try:
                async with self.serializer.hold(script.key):
                    self.served.append((script.key, number))
                    await self.work(script)
            except (Overloaded, DeadlineExceeded):
                pass

    async def work(self, script: Visit) -> None:
        self.inside.append(script.key)
        try:
            if self.inside.count(script.key) > 1 or len(self.inside) > self.day.max_keys:
                self.broken.append(f"{self.inside} inside")
            await _turn()
            await let_pass(script.duration)
        finally:
            self.inside.remove(script.key)

    def look(self) -> None:
        shown = self.serializer.snapshot()
        if shown["in_flight"] != len(self.inside):
            self.broken.append(f"{self.inside} inside, but {shown}")
        if shown["longest_line"] > self.day.max_waiting:
            self.broken.append(f"too many wait: {shown}")

    def account(self) -> None:
        assert not self.broken
        assert all(task.done() for task in self.tasks)
        assert all(task.cancelled() or task.exception() is None for task in self.tasks)
        assert self.serializer._lanes == {}
        for key in range(3):
            served = [visit for visit in self.served if visit[0] == key]
            assert served == [visit for visit in self.came if visit in served]


def _check_turns(day: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        visitors = Visitors(day)
        for number, script in enumerate(day.visits):
            loop.call_later(script.at, visitors.begin, number, script)
        for n in range(120):
            loop.call_later(n / 4 + 0.125, visitors.look)
        await let_pass(60.0)
        visitors.account()

    run_virtual(main(), seed=day.seed)


@given(DAYS)
@examples(300)
def test_turns_are_exclusive_in_order_bounded_and_never_lost(day: Day) -> None:
    """One at a time for each key, in order of coming; at the end nothing is left behind."""
    _check_turns(day)


def _nothing(*_: Any) -> None:
    pass


def _enter_anyway(serializer: Serializer, key: Any, _holder: Any) -> Any:
    return serializer._lanes.setdefault(key, _Lane())


def _last_first(serializer: Serializer, key: Any, lane: Any, hold: Any = None) -> None:
    if hold is not None:
        hold._lane = None
    lane.holder = None
    while lane:
        if lane.popitem()[0].grant():
            return
    serializer._lanes.pop(key, None)


ABLATIONS: dict[str, tuple[type, str, Any]] = {
    "a cancelled waiter stays": (_Turn, "abandon", _nothing),
    "nobody waits": (Serializer, "_enter", _enter_anyway),
    "the newest is served first": (Serializer, "_leave", _last_first),
    "leaving hands nothing on": (Serializer, "_leave", _nothing),
    "nobody is refused": (Serializer, "_obstacle", _nothing),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_the_serializer_fails(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    monkeypatch.setattr(*ABLATIONS[missing])
    assert falsified(_check_turns, DAYS)


def test_threads_and_tasks_take_turns_together() -> None:
    """A plain counter, changed by all of them, loses nothing."""
    serializer = Serializer(max_waiting=1000)
    total = {"a": 0, "b": 0}
    callers, calls = 3, 40

    def add(key: str) -> None:
        before = total[key]
        for _ in range(5):
            threading.Event().is_set()  # lets other threads in
        total[key] = before + 1

    async def add_async(key: str) -> None:
        before = total[key]
        await _turn()
        total[key] = before + 1

    def thread() -> None:
        for n in range(calls):
            serializer.run("ab"[n % 2], add, "ab"[n % 2])

    def loop() -> None:
        async def main() -> None:
            keys = ["ab"[n % 2] for n in range(calls)]
            await asyncio.gather(*(serializer.arun(key, add_async, key) for key in keys))

        asyncio.run(main())

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [threading.Thread(target=w) for w in (thread, loop) for _ in range(callers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(50)
    finally:
        sys.setswitchinterval(before)
    assert total == {"a": callers * calls, "b": callers * calls}
    assert serializer._lanes == {}


def test_a_waiter_of_a_closed_loop_swallows_no_turn() -> None:
    """The key goes to nobody; and when the dead task is thrown away, nobody else's turn ends."""
    serializer = Serializer()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    waiting = serializer.arun("a", let_pass, 0.0)
    with serializer.hold("a"):
        task = loop.create_task(waiting)
        for _ in range(3):
            loop.call_soon(loop.stop)
            loop.run_forever()
        loop.close()
        assert serializer.snapshot()["waiting"] == 1
    with serializer.hold("a"):
        waiting.close()
        assert serializer.snapshot()["in_flight"] == 1
    assert serializer._lanes == {}
    assert task is not None


def test_a_block_that_is_collected_in_the_middle_of_a_change_hands_its_key_on() -> None:
    """The collector runs where it likes; leaving waits until the change is done."""

    async def main() -> None:
        serializer = Serializer()
        holding = serializer.arun("a", let_pass, 9.0)
        holding.send(None)
        with serializer._mutex:
            holding.close()
            assert serializer._lanes != {}
        settled(serializer._mutex)
        assert serializer._lanes == {}

    run_virtual(main())


def test_a_turn_that_becomes_free_while_somebody_joins_is_not_overlooked() -> None:
    """Who joins the line looks again, under the lock."""

    async def main() -> None:
        serializer = Serializer(max_wait=9.0)
        publish = _Turn.publish
        first = serializer.hold("a")
        await first.__aenter__()

        def late(turn: _Turn, wake: Any) -> None:
            first.__exit__()
            publish(turn, wake)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Turn, "publish", late)
            await serializer.arun("a", let_pass, 0.0)
        assert (asyncio.get_running_loop().time(), serializer._lanes) == (0.0, {})

    run_virtual(main())


def test_turns_in_a_child_process_are_its_own() -> None:
    """Keys that the parent's threads hold are free there."""
    script = """
import os
from seawall.resources import Serializer

serializer = Serializer(max_wait=0)
with serializer.hold("a"):
    serializer._mutex.acquire()
    child = os.fork()
    if child:
        serializer._mutex.release()
        assert os.waitpid(child, 0)[1] == 0
    else:
        with serializer.hold("a"):
            pass
        held = serializer.hold("a")
        held.__enter__()
if child:
    print("well")
else:
    os._exit(0 if serializer.snapshot()["in_flight"] == 1 else 1)
"""
    ran = subprocess.run(  # noqa: S603 - our own script
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (ran.returncode, ran.stdout) == (0, "well\n"), ran.stderr


def test_a_striped_serializer_has_a_queue_for_each_stripe() -> None:
    """Keys of one stripe wait for each other, those of another do not."""
    serializer = Serializer(max_wait=0, stripes=2)
    indices = {Stripes(2, object).index(key): key for key in "abcdefgh"}
    one, other = indices[0], indices[1]
    same = next(key for key in "hgfedcba" if Stripes(2, object).index(key) == 0 and key != one)
    with serializer.hold(one):
        with serializer.hold(other):
            pass
        with pytest.raises(Overloaded):
            serializer.run(same, print)


# Work that would run after its turn


def _lazily() -> Any:
    yield 1


async def _lazily_later() -> Any:
    yield 1


async def _later() -> int:
    return 1


@pytest.mark.parametrize("function", [_lazily, _lazily_later, lambda: _lazily()])  # noqa: PLW0108
def test_a_generator_cannot_take_a_turn(function: Any) -> None:
    """It runs when it is iterated over, and that is after its turn."""
    serializer = Serializer()
    with pytest.raises(TypeError, match=r"write `with serializer.hold\(key\):` around the loop"):
        serializer.run("a", function)
    assert serializer._lanes == {}


def test_an_awaitable_cannot_leave_its_turn() -> None:
    """A lambda around an async function is found out when it is called."""
    serializer = Serializer()
    with pytest.raises(TypeError, match=r"write `await serializer.arun\(...\)`"):
        serializer.run("a", lambda: _later())  # noqa: PLW0108 - what users write
    assert serializer._lanes == {}


def test_what_an_async_turn_runs_is_awaited_in_it() -> None:
    """A function that returns an awaitable will do; a plain one, or a generator, is refused."""

    async def main() -> None:
        serializer = Serializer()
        assert await serializer.arun("a", lambda: _later()) == 1  # noqa: PLW0108
        with pytest.raises(TypeError, match="is not async: write `async with"):
            await serializer.arun("a", lambda: 1)  # type: ignore[arg-type,return-value]
        with pytest.raises(TypeError, match="around the loop"):
            await serializer.arun("a", _lazily_later)
        assert serializer._lanes == {}

    run_virtual(main())


# A key inside itself


def test_who_holds_a_key_does_not_wait_for_itself() -> None:
    """Where the wait would have no end, it is an error; others still wait."""

    async def main() -> None:
        serializer = Serializer()
        async with serializer.hold("a"):
            other = _task(serializer.arun("a", let_pass, 0.0))
            with pytest.raises(RuntimeError, match="would wait here for itself, for ever"):
                await serializer.arun("a", let_pass, 0.0)
            async with serializer.hold("b"):
                pass
        async with serializer.hold("a"):  # behind the other, who was granted it, and has not come
            pass
        await other
        assert serializer._lanes == {}

    run_virtual(main())
    serializer = Serializer(stripes=1)
    with (
        serializer.hold("a"),
        pytest.raises(RuntimeError, match="two keys can be one queue"),
        serializer.hold("b"),
    ):
        pass
    assert serializer._lanes == {}


# What is told


def test_refusals_and_changes_of_a_serializer_are_told() -> None:
    """Each refusal is an event, is counted, and names the serializer; so does a change."""
    heard: list[Any] = []
    stop = subscribe(heard.append, CallRejected, SettingsChanged)

    async def main() -> None:
        serializer = Serializer(max_wait=1.0, name="accounts")
        async with serializer.hold("a"):
            for seconds in (9.0, 0.5, 0.0):
                with deadline(seconds), pytest.raises((Overloaded, DeadlineExceeded)) as refused:
                    await serializer.arun("a", let_pass, 0.0)
                assert (refused.value.guard, refused.value.policy) == ("accounts", "serializer")
        shown = serializer.snapshot()
        assert (shown["name"], shown["rejected"]) == ("accounts", 3)
        serializer.update(max_wait=2, max_keys=5)
        assert (serializer.max_wait, serializer.max_keys, serializer.max_waiting) == (2.0, 5, 100)

    try:
        run_virtual(main())
    finally:
        stop()
    assert [event.fields() for event in heard] == [
        *(
            {
                "guard": "accounts",
                "policy": "serializer",
                "reason": reason,
                "enforced": True,
                "key": None,
                "message": "",
            }
            for reason in ("overloaded", "deadline_exceeded", "deadline_exceeded")
        ),
        {
            "guard": "accounts",
            "policy": "serializer",
            "changes": {"max_wait": 2, "max_keys": 5},
        },
    ]


def test_a_serializer_has_a_name_and_something_to_change() -> None:
    """Both messages say what to write."""
    for name in ("", 3, None):
        with pytest.raises(TypeError, match="write a name, such as 'accounts'"):
            Serializer(name=name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Serializer.update\(\): it takes max_waiting, max_wait"):
        Serializer().update()


def test_changed_settings_make_no_second_serializer() -> None:
    """A listener of the change sees one object of that kind, and invalid values change nothing."""
    serializer = Serializer(name="accounts")
    seen: list[list[str]] = []
    end = subscribe(lambda _event: seen.append(names()), SettingsChanged)

    def names() -> list[str]:
        return [shown["name"] for shown in snapshot().get("serializer", ())]

    gc.collect()  # what other tests have made
    before = names()
    try:
        serializer.update(max_waiting=1)
    finally:
        end()
    assert seen == [before]
    with pytest.raises(TypeError):
        serializer.update(max_wait=2.0, max_keys="many")  # type: ignore[arg-type]
    assert serializer.max_wait == inf
