from __future__ import annotations

import asyncio
import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import subscribe
from seawall.clock import VirtualClock
from seawall.events import LoopBlocked
from seawall.load import LoopWatchdog
from seawall.load.watchdog import NOT_SEEN, PAUSED
from seawall.testing import run_virtual
from tests.support import falsified, let_pass

ROOT = Path(__file__).resolve().parents[1]
WAIT = 150


@pytest.fixture
def reports():
    """Return the list of all `LoopBlocked` events of the test."""
    events: list[LoopBlocked] = []
    unsubscribe = subscribe(events.append, LoopBlocked)
    yield events
    unsubscribe()


def _threads(name):
    return [thread for thread in threading.enumerate() if thread.name.endswith(name)]


def _until_gone(name):
    for thread in _threads(name):
        thread.join(WAIT)


# --- On virtual time: what is reported, and when ---


def test_a_block_is_reported_with_its_stack_and_again_when_it_is_over(
    reports, caplog: pytest.LogCaptureFixture
):
    """Once while it lasts, once at its end with the whole time; in events, logs and counts."""

    async def main():
        clock = asyncio.get_running_loop().clock
        async with LoopWatchdog(1.0, name="api") as dog:
            await let_pass(0.5)

            def blocks():
                clock.advance(3.25)
                assert dog.check() == [3.0]
                assert dog.check() == []
                assert dog.snapshot()["blocked"] == 1
                clock.advance(2.0)

            blocks()
            await let_pass(10.0)
            assert repr(dog) == "<LoopWatchdog 'api': 1 loops, 1 blocks>"
            return dog.snapshot()

    with caplog.at_level(logging.WARNING, "seawall"):
        snapshot = run_virtual(main())
    assert snapshot == {
        "threshold": 1.0,
        "loops": 1,
        "blocked": 0,
        "lag": 0.0,
        "blocks": 1,
        "blocked_seconds": 5.0,
        "longest": 5.0,
    }
    first, second = reports
    assert (first.guard, first.seconds, second.seconds) == ("api", 3.0, 5.0)
    assert first.stack == second.stack
    assert "in blocks\n    assert dog.check() == [3.0]" in first.stack
    assert first.stack.lstrip().startswith(f'File "{__file__}"')  # nothing of asyncio's own
    assert "asyncio" not in first.stack
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        "event loop 'api' has been blocked for 3.000 s, at",
        "event loop 'api' was blocked for 5.000 s, by",
    ]


def test_a_block_that_nobody_saw_is_reported_when_it_is_over(reports):
    """The loop itself notices that it came round too late."""

    async def main():
        async with LoopWatchdog(1.0):
            await let_pass(0.5)
            asyncio.get_running_loop().clock.advance(2.25)
            await let_pass(1.0)

    run_virtual(main())
    assert [(event.seconds, event.stack) for event in reports] == [(2.0, NOT_SEEN)]


def _check_blocks(program: list[tuple[float, float]]) -> None:
    """Alternate between an idle and a blocked loop, and compare reports with reality."""
    told: list[LoopBlocked] = []
    unsubscribe = subscribe(told.append, LoopBlocked)

    async def main() -> float:
        clock = asyncio.get_running_loop().clock
        async with LoopWatchdog(1.0) as dog:
            for rest, block in program:
                await let_pass(rest)
                clock.advance(block)
                await let_pass(0.5)
            return dog.snapshot()["blocks"]

    try:
        blocks = run_virtual(main())
    finally:
        unsubscribe()
    lengths = [block for _, block in program]
    surely = sum(block >= 1.25 for block in lengths)
    perhaps = sum(block >= 1.0 for block in lengths)
    assert surely <= len(told) <= perhaps
    assert blocks == len(told)
    assert all(event.seconds <= max(lengths) for event in told)


BLOCKS = st.lists(
    st.tuples(st.integers(0, 32).map(lambda n: n / 16), st.integers(0, 48).map(lambda n: n / 16)),
    min_size=1,
    max_size=6,
)


@given(BLOCKS)
def test_every_long_block_is_reported_and_no_short_one(program):
    """From a quarter above the threshold always, below the threshold never, and once each."""
    _check_blocks(program)


@pytest.mark.parametrize(
    "missing", ["the sign of life is expected at once", "a sign of life is rarely given"]
)
def test_without_its_measure_the_watchdog_would_be_wrong(
    missing: str, monkeypatch: pytest.MonkeyPatch
):
    """Count from the last sign of life, or give signs too rarely, and the property is falsified."""
    if missing.startswith("the sign"):
        really = LoopWatchdog._beat

        def hasty(dog: LoopWatchdog, pulse: Any) -> None:
            pulse.due -= dog._period
            really(dog, pulse)

        monkeypatch.setattr(LoopWatchdog, "_beat", hasty)
    else:
        monkeypatch.setattr("seawall.load.watchdog.CHECKS", 1)
    assert falsified(_check_blocks, BLOCKS)


# --- Who was paused himself accuses nobody ---


def _check_pause(case: tuple[int, bool]) -> list[LoopBlocked]:
    """Stop loop and watchdog for the same time, and let either come back first."""
    quarters, watchdog_first = case
    told: list[LoopBlocked] = []
    unsubscribe = subscribe(told.append, LoopBlocked)

    async def main() -> None:
        clock = asyncio.get_running_loop().clock
        async with LoopWatchdog(1.0) as dog:
            dog._checked_at = clock.now()  # as if there were a thread
            for _ in range(4):
                await let_pass(0.25)
                dog._check_all()
            clock.advance(quarters / 4)
            if watchdog_first:
                dog._check_all()
            await let_pass(0.25)
            dog._check_all()

    try:
        run_virtual(main())
    finally:
        unsubscribe()
    assert all(event.stack == PAUSED for event in told)
    return told


PAUSES = st.tuples(st.integers(6, 40), st.booleans())


@given(PAUSES)
def test_a_paused_watchdog_accuses_no_stack(case):
    """A pause of the whole process is reported as such, without a line of code."""
    assert len(_check_pause(case)) == 1


def test_without_the_look_at_itself_a_paused_watchdog_would_accuse(
    monkeypatch: pytest.MonkeyPatch,
):
    """Believe never to have been paused, and the property is falsified."""
    monkeypatch.setattr(LoopWatchdog, "_was_paused", lambda *_: False)
    assert falsified(lambda case: _check_pause(case) and None, PAUSES)


def test_a_loop_that_came_round_while_it_was_looked_at_is_not_accused(reports):
    """A stack that was taken too late is thrown away."""

    async def main():
        clock = asyncio.get_running_loop().clock
        async with LoopWatchdog(1.0) as dog:
            await let_pass(0.5)
            clock.advance(2.0)
            (pulse,) = dog._pulses.values()

            def came_round(thread):
                dog._beat(pulse)
                return sys._current_frames()[thread]

            assert dog.check(came_round) == []

    run_virtual(main())
    assert [event.stack for event in reports] == [NOT_SEEN]


def test_a_thread_that_is_gone_has_no_stack(reports):
    """Where no frame can be had, the report says so."""

    async def main():
        async with LoopWatchdog(1.0) as dog:
            asyncio.get_running_loop().clock.advance(2.0)
            dog.check(lambda _: None)

    run_virtual(main())
    assert [event.stack for event in reports] == [NOT_SEEN]


# --- Real threads ---


def test_a_real_block_is_reported_while_it_lasts(reports):
    """The loop is released only after the watchdog has reported where it blocks."""
    told = threading.Event()
    unsubscribe = subscribe(lambda _: told.set(), LoopBlocked)

    def blocks():
        assert told.wait(WAIT)

    async def main():
        async with LoopWatchdog(0.01, name="real") as dog:
            blocks()
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            while len(reports) < 2:
                await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            return dog.snapshot()

    snapshot = asyncio.run(main())
    unsubscribe()
    assert snapshot["blocks"] >= 1
    stack = reports[0].stack
    assert "in blocks\n    assert told.wait(WAIT)\n" in stack
    assert "base_events.py" not in stack
    assert reports[0].seconds >= 0.01
    _until_gone("real")


def test_one_watchdog_watches_several_loops(reports):
    """Of several threads' loops only the blocked one is reported."""
    told = threading.Event()
    unsubscribe = subscribe(lambda _: told.set(), LoopBlocked)
    dog = LoopWatchdog(0.05, name="several")
    watching = threading.Barrier(2)

    async def blocked():
        async with dog:
            watching.wait(WAIT)
            assert told.wait(WAIT)

    async def free():
        async with dog:
            watching.wait(WAIT)
            await asyncio.get_running_loop().run_in_executor(None, told.wait, WAIT)

    threads = [threading.Thread(target=asyncio.run, args=(main(),)) for main in (blocked, free)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    unsubscribe()
    assert any("in blocked" in event.stack for event in reports)
    assert dog.snapshot()["loops"] == 0
    _until_gone("several")


def test_a_loop_that_was_closed_meanwhile_is_forgotten():
    """Without `stop()` too: the thread ends, and nothing keeps loop or watchdog alive."""
    loop = asyncio.new_event_loop()
    dog = LoopWatchdog(0.01, name="closed")
    loop.call_soon(dog.start)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    _until_gone("closed")
    assert dog.snapshot()["loops"] == 0
    gone = weakref.ref(loop), weakref.ref(dog)
    del loop, dog
    gc.collect()
    assert [thing() for thing in gone] == [None, None]


def test_the_context_of_who_starts_it_is_not_kept():
    """A watchdog that is started by a request keeps nothing of that request alive."""

    class Request:
        pass

    variable: ContextVar[Request] = ContextVar("variable")

    async def handle(dog):
        variable.set(Request())
        dog.start()
        return weakref.ref(variable.get())

    async def main():
        dog = LoopWatchdog(1.0)
        request = await asyncio.create_task(handle(dog))
        await let_pass(3.0)
        gc.collect()
        assert request() is None
        dog.stop()

    run_virtual(main())


def test_a_loop_at_rest_is_not_blocked(reports):
    """Between two runs of a loop nothing is reported, however long that takes."""
    clock = VirtualClock()
    dog = LoopWatchdog(1.0, clock=clock)
    loop = asyncio.new_event_loop()

    async def start():
        dog.start()

    loop.run_until_complete(start())
    clock.advance(100.0)
    assert dog.check() == []
    loop.close()
    assert dog.check() == []
    assert dog.snapshot()["loops"] == 0
    assert reports == []


def test_a_loop_is_watched_once():
    """A second `start()` in one loop raises; after `stop()` it may be started again."""

    async def main():
        dog = LoopWatchdog(1.0)
        dog.start()
        with pytest.raises(RuntimeError, match="watches this loop already"):
            dog.start()
        dog.stop()
        dog.stop()
        dog.start()
        await let_pass(5.0)
        assert dog.snapshot()["loops"] == 1
        dog.stop()
        await let_pass(5.0)

    run_virtual(main())
    with pytest.raises(RuntimeError, match="no running event loop"):
        LoopWatchdog().start()


FORKED = """
import asyncio, os, warnings
warnings.simplefilter("ignore")  # newer versions warn of any fork beside threads
from seawall.load import LoopWatchdog
dog = LoopWatchdog(60.0)

def fork():
    child = os.fork()
    if not child:
        os._exit(int(dog.snapshot()["loops"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

async def main():
    async with dog:
        return fork()

print(asyncio.run(main()))
"""


def test_a_forked_child_watches_nothing():
    """The thread is not there, and the loop is the parent's."""
    ran = subprocess.run(  # noqa: S603 - our own text
        [sys.executable, "-c", FORKED],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 0}, "threshold=0: write finite seconds"),
        ({"threshold": "1"}, "threshold='1': write seconds"),
        ({"name": ""}, "name='': write a name, such as 'api'"),
        ({"name": 3}, "name=3: write a name, such as 'api'"),
        ({"clock": 1}, "clock=1: pass a clock"),
    ],
)
def test_bad_arguments_are_refused_with_advice(arguments, message):
    """A mistake raises at once, and says what to write instead."""
    with pytest.raises((TypeError, ValueError), match=message):
        LoopWatchdog(**arguments)
