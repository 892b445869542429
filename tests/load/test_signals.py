"""Load signals: what they measure, how long they remember it, and what they survive."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, Guard, ThreadBulkhead, Timeout
from seawall.clock import SystemClock, VirtualClock
from seawall.load.signals import (
    Signal,
    as_signal,
    gc_pauses,
    highest,
    in_flight,
    latched,
    loop_lag,
    occupancy,
    process_cpu,
    process_memory,
    queue_time,
    smoothed,
    thread_queue,
)
from seawall.resources.executors.executors import IoPool
from seawall.resources.pool.pool import Pool
from seawall.runtime import process
from seawall.testing import ScriptedService, run_virtual, slow, virtual_time
from tests.support import let_pass, new_guard

# One signal


def test_what_is_read_is_a_share_of_the_limit():
    """At the limit the signal is 1.0, beyond it more, and never below 0."""
    level = 30.0
    signal = Signal("sessions", lambda: level, limit=40, every=0.0)
    assert signal() == 0.75
    level = 80.0
    assert signal() == 2.0
    level = -1.0
    assert signal() == 0.0


def test_it_is_read_at_most_once_in_a_while():
    """In between, the last value stands."""
    with virtual_time() as clock:
        reads = iter(range(100))
        signal = Signal("reads", lambda: next(reads), every=0.1)
        assert [signal(), signal(), signal()] == [0.0, 0.0, 0.0]
        clock.advance(0.1)
        assert [signal(), signal()] == [1.0, 1.0]


def test_a_reading_that_fails_leaves_the_last_value(caplog):
    """Errors and what is no number are logged once, counted, and do no harm."""
    answers: list[Any] = [0.5, ZeroDivisionError, float("nan"), float("inf"), "much", 0.25]

    def read() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, type):
            raise answer
        return answer

    signal = Signal("shaky", read, every=0.0)
    with caplog.at_level(logging.ERROR, "seawall"):
        assert [signal() for _ in range(6)] == [0.5, 0.5, 0.5, 0.5, 0.5, 0.25]
    assert len(caplog.records) == 1
    assert "signal 'shaky' cannot be read" in caplog.text
    assert signal.failures == 4


def test_cancellation_passes_through_and_leaves_it_usable():
    """What is no Exception is not swallowed, and the next reading works."""
    answers: list[Any] = [KeyboardInterrupt, 0.5]

    def read() -> float:
        answer = answers.pop(0)
        if isinstance(answer, type):
            raise answer
        return answer

    signal = Signal("interrupted", read, every=0.0)
    with pytest.raises(KeyboardInterrupt):
        signal()
    assert signal() == 0.5


def test_nobody_waits_for_a_reader():
    """While one thread reads, others take the last value; so does a reading of itself."""
    inside, go_on = threading.Event(), threading.Event()
    answers = iter([0.25, 0.75])
    seen: list[float] = []

    def read() -> float:
        answer = next(answers)
        if answer == 0.75:
            seen.append(signal())
            inside.set()
            go_on.wait(10)
        return answer

    signal = Signal("slow", read, every=0.0)
    assert signal() == 0.25
    reader = threading.Thread(target=signal)
    reader.start()
    assert inside.wait(10)
    assert signal() == 0.25
    go_on.set()
    reader.join()
    assert seen == [0.25]
    assert signal._value == 0.75


def test_it_works_in_a_child_of_a_fork():
    """Where another thread was reading at the fork, the child reads for itself."""
    signal = Signal("forked", lambda: 0.5, every=0.0)
    signal._lock.acquire()
    assert signal() == 0.0
    signal._after_fork()
    assert signal() == 0.5


def test_it_shows_itself():
    """The snapshot has the measurement, the limit and the value."""
    signal = Signal("sessions", lambda: 30, limit=40)
    assert signal.snapshot() == {
        "name": "sessions",
        "value": 0.75,
        "measured": 30,
        "limit": 40,
        "failures": 0,
    }
    assert repr(signal) == "<Signal 'sessions': 0.75>"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Signal("", int), "a name"),
        (lambda: Signal(7, int), "a name"),
        (lambda: Signal("x", 0.5), "pass a function"),
        (lambda: Signal("x", int, limit=0), "limit=0"),
        (lambda: Signal("x", int, limit=-1), "limit"),
        (lambda: Signal("x", int, every=-1.0), "every"),
        (lambda: Signal("x", int, clock=SystemClock), "pass a clock"),
        (highest, "at least one signal"),
        (lambda: highest(0.5), "pass a function"),
        (lambda: smoothed(int, 0.0), "half_life"),
        (lambda: latched(int, rise=0.5, fall=0.6), "write rise=0.5 or less"),
        (lambda: in_flight(Timeout(1.0)), "pass a Bulkhead, a pool, an executor, or a guard"),
        (lambda: queue_time(ThreadBulkhead(1)), "pass a Bulkhead, a pool, or a guard"),
        (lambda: queue_time(Bulkhead(1), limit=0), "limit"),
        (lambda: thread_queue(Bulkhead(1)), "pass a ThreadBulkhead"),
        (lambda: thread_queue(ThreadBulkhead(1), limit=0), "limit"),
        (lambda: process_cpu(1.5), "limit"),
        (lambda: process_cpu(cores=0), "cores"),
        (lambda: process_cpu(read=1), "pass a function"),
        (lambda: process_memory(0), "limit"),
        (lambda: process_memory(total=0.5), "total"),
        (lambda: gc_pauses(0), "limit"),
        (lambda: loop_lag(-1), "limit"),
    ],
)
def test_bad_arguments_are_told(make, message):
    """Each message names the argument and what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Signals of signals


def test_the_highest_of_several_is_what_matters():
    """Whatever is nearest to its limit, functions included; one that fails does not hide others."""

    def broken() -> float:
        raise ZeroDivisionError

    signal = highest(lambda: 0.25, Signal("half", lambda: 0.5), broken)
    assert signal() == 0.5
    shown = signal.snapshot()
    assert shown["name"] == "highest(<lambda>, half, broken)"
    assert [of["value"] for of in shown["of"]] == [0.25, 0.5, 0.0]


def test_smoothing_takes_the_edge_off():
    """A short spike hardly shows, a lasting change does, by half in each half-life."""
    with virtual_time() as clock:
        level = 0.0
        signal = smoothed(lambda: level, half_life=1.0)
        assert signal() == 0.0
        level = 1.0
        clock.advance(0.1)
        assert signal() < 0.07
        level = 0.0
        clock.advance(0.1)
        signal()
        level = 1.0
        clock.advance(20.0)
        assert signal() == pytest.approx(1.0)
        level = 0.0
        clock.advance(1.0)
        assert signal() == pytest.approx(0.5, abs=1e-6)
        shown = signal.snapshot()
        assert shown["half_life"] == 1.0
        assert shown["of"][0]["value"] == 0.0


@given(st.integers(1, 50))
def test_smoothing_does_not_depend_on_how_often_it_is_read(looks):
    """Readers do not change what they read."""
    with virtual_time() as clock:
        level = 0.0
        signal = smoothed(lambda: level, half_life=2.0)
        signal()
        level = 1.0
        for _ in range(looks):
            clock.advance(10.0 / looks)
            signal()
        assert signal() == pytest.approx(1 - 0.5**5, abs=1e-6)


def test_a_latched_signal_does_not_flicker():
    """Once at `rise` it stays there until it is below `fall`, and for `hold` at least."""
    with virtual_time() as clock:
        values = iter((0.7, 0.9, 0.65, 0.5, 0.5, 0.5, 0.7))
        signal = latched(lambda: next(values), rise=0.8, fall=0.6, hold=5.0)
        seen = []
        for _ in range(7):
            seen.append(signal())
            clock.advance(2.0)
        assert seen == [0.7, 0.9, 0.8, 0.8, 0.5, 0.5, 0.7]
        values = iter((0.7, 0.7))
        shown = signal.snapshot()
        assert (shown["rise"], shown["fall"], shown["hold"]) == (0.8, 0.6, 5.0)


def test_any_function_is_a_signal():
    """What takes a signal takes a function; a Signal is taken as it is."""
    signal = Signal("mine", lambda: 0.5)
    assert as_signal(signal) is signal
    assert as_signal(lambda: 0.25)() == 0.25


# What policies tell


def test_in_flight_is_the_share_of_slots_in_use():
    """Of one bulkhead, or the fullest of a guard; always as of now."""
    with virtual_time():
        wide, narrow = Bulkhead(4), Bulkhead(2)
        guard, other = new_guard(wide, narrow), new_guard(wide)
        one, both = in_flight(wide), in_flight(guard)
        assert (one(), both()) == (0.0, 0.0)
        with guard.hold():
            assert (one(), both()) == (0.25, 0.5)
            with other.hold(), other.hold():
                assert (one(), both()) == (0.75, 0.75)
        assert (one(), both()) == (0.0, 0.0)
        assert both.name == f"in_flight({guard.name})"
        wide.update(limit=1)
        with other.hold():
            assert one() == 1.0


def test_occupancy_counts_who_waits_too():
    """Full slots are not the limit where there is room to wait; without any, they are."""

    async def main() -> None:
        queue, bare = Bulkhead(2, max_wait=10.0, max_waiting=6), Bulkhead(2)
        guard, other = new_guard(queue), new_guard(bare)
        full, alone, both = occupancy(queue), occupancy(bare), occupancy(new_guard(queue, bare))
        assert (full(), alone(), both()) == (0.0, 0.0, 0.0)
        service = ScriptedService(slow(1.0))
        calls = [asyncio.ensure_future(guard.acall(service.acall)) for _ in range(5)]
        with other.hold():
            await let_pass(0.5)
            assert (full(), alone(), both()) == (5 / 8, 0.5, 5 / 8)
            with other.hold():
                assert (alone(), both()) == (1.0, 1.0)
        queue.update(limit=3, max_waiting=7)
        assert full() == 0.5
        await asyncio.gather(*calls)
        assert full() == 0.0
        assert full.name == "occupancy(bulkhead)"

    run_virtual(main())


def test_occupancy_of_pools_and_executors():
    """They too have room to wait."""
    with virtual_time(), Pool(object, name="database", max_size=4, max_waiting=4) as pool:
        taken = occupancy(pool)
        with pool.borrow():
            assert taken() == 1 / 8
    with IoPool("files", workers=2, max_queue=4) as executor:
        taken = occupancy(executor)
        with busy(*[executor.run] * 3):
            _until(lambda: executor.snapshot()["waiting"] == 1)
            assert taken() == 0.5


def test_queue_time_is_that_of_the_longest_waiting():
    """As a share of the limit, on the guard's own clock."""

    async def main() -> None:
        guard = new_guard(Bulkhead(1, max_wait=10.0))
        signals = queue_time(guard, limit=0.5), queue_time(guard.policies[0], limit=2.0)
        service = ScriptedService(slow(3.0))
        calls = [asyncio.ensure_future(guard.acall(service.acall)) for _ in range(2)]
        assert [signal() for signal in signals] == [0.0, 0.0]
        await let_pass(1.0)
        assert [signal() for signal in signals] == [2.0, 0.5]
        await asyncio.gather(*calls)
        await let_pass(1.0)
        assert [signal() for signal in signals] == [0.0, 0.0]

    run_virtual(main())


@contextmanager
def busy(*submits: Any) -> Iterator[None]:
    """Give each of these something to do that lasts as long as the block."""
    go_on = threading.Event()
    threads = [threading.Thread(target=submit, args=(go_on.wait,)) for submit in submits]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        go_on.set()
        for thread in threads:
            thread.join()


def _until(condition: Any) -> None:
    """Let other threads get to where `condition()` holds."""
    bell = threading.Event()
    for _ in range(2000):
        if condition():
            return
        bell.wait(0.005)
    pytest.fail("it never came to that")


def test_thread_queue_is_the_share_of_places_taken():
    """Of a ThreadBulkhead: what waits, of what may; without a queue, threads are the limit."""
    waiting, strict = ThreadBulkhead(1, max_queue=4), ThreadBulkhead(2, max_queue=0)
    guard, other = new_guard(waiting), new_guard(strict)
    signals = [thread_queue(guard), thread_queue(waiting, limit=2), thread_queue(other)]
    threads = in_flight(strict)
    with busy(guard.call, guard.call, other.call):
        _until(lambda: waiting.pool.queued == 1 and strict.pool.in_use == 1)
        assert [signal() for signal in signals] == [0.25, 0.5, 0.5]
        assert threads() == 0.5
    _until(lambda: not waiting.pool.in_use and not strict.pool.in_use)
    assert [signal() for signal in signals] == [0.0, 0.0, 0.0]


def test_pools_and_executors_are_read_too():
    """A signal reads their used slots, their waiters and their clock."""
    with virtual_time() as clock, Pool(object, name="database", max_size=4) as pool:
        in_use, wait = in_flight(pool), queue_time(pool, limit=1.0)
        assert (in_use(), wait()) == (0.0, 0.0)
        with pool.borrow():
            clock.advance(1.0)
            assert (in_use(), wait()) == (0.25, 0.0)
    with IoPool("files", workers=2, max_queue=4) as executor:
        at_work, waiting = in_flight(executor), thread_queue(executor)
        with busy(*[executor.run] * 3):
            _until(lambda: executor.snapshot()["waiting"] == 1)
            assert (at_work(), waiting()) == (1.0, 0.25)


def test_thread_queue_reads_the_standard_library_s_executors():
    """What waits for a thread there, as a share of its threads or of a limit."""
    with ThreadPoolExecutor(2) as pool:
        go_on = threading.Event()
        shares = thread_queue(pool), thread_queue(pool, limit=8)
        for _ in range(6):
            pool.submit(go_on.wait)
        _until(lambda: pool._work_queue.qsize() == 4)
        assert [share() for share in shares] == [2.0, 0.5]
        go_on.set()


def test_a_signal_keeps_no_guard_alive():
    """A closed guard is collected even while a signal refers to it."""
    guard = Guard("watched", Bulkhead(1))
    signal = in_flight(guard)
    known = weakref.ref(guard)
    guard.close()
    del guard
    gc.collect()
    assert known() is None
    assert signal() == 0.0


# What the process tells


def test_cpu_is_a_share_of_the_cores():
    """One second of CPU in one second on two cores is half; at a limit of 0.8 that is 0.625."""
    with virtual_time() as clock:
        used = 10.0
        signal = process_cpu(cores=2, read=lambda: used)
        assert signal() == 0.0
        for growth, expected in [(1.0, 0.625), (2.0, 1.25), (0.0, 0.0)]:
            clock.advance(1.0)
            used += growth
            assert signal() == pytest.approx(expected)
        used = 0.0  # a forked process counts anew
        clock.advance(1.0)
        assert signal() == 0.0


def test_on_virtual_time_the_process_counts_as_idle():
    """The CPU that a simulation takes says nothing of the service that it simulates."""
    with virtual_time() as clock:
        signal = process_cpu()
        assert signal() == 0.0
        sum(range(100_000))
        clock.advance(1.0)
        assert signal() == 0.0


def test_the_real_process_can_be_measured():
    """The machine's own figures are finite, and positive where they must be."""
    assert process.cpu_seconds() > 0
    assert 0 < process.usable_cores() <= (os.cpu_count() or 1)
    assert process.memory_bytes() > 1_000_000
    limit = process.memory_limit()
    assert limit is not None
    assert limit > process.memory_bytes()
    assert process_cpu()() >= 0
    assert 0 < process_memory()() < 1


def test_memory_is_a_share_of_what_there_is():
    """90 % of the limit is 1.0, as what comes after is the end of the process."""
    signal = process_memory(total=1000, read=lambda: 450)
    assert signal() == pytest.approx(0.5)
    assert signal.snapshot()["measured"] == 0.45


def test_memory_of_unknown_size_must_be_told(monkeypatch):
    """Where the system is silent, the message asks for `total`."""
    monkeypatch.setattr(process, "memory_limit", lambda: None)
    with pytest.raises(ValueError, match="write total="):
        process_memory()
    assert process_memory(total=10**12)() > 0


def write(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
QUOTAS = {
    "a quota": ({"0::/a": {"sys/fs/cgroup/a/cpu.max": "5000 10000"}}, 0.5),
    "the outer one is less": (
        {
            "0::/a/b": {
                "sys/fs/cgroup/a/b/cpu.max": "9000 10000",
                "sys/fs/cgroup/a/cpu.max": "2500 10000",
            }
        },
        0.25,
    ),
    "its own root": ({"0::/elsewhere": {"sys/fs/cgroup/cpu.max": "7500 10000"}}, 0.75),
    "none": ({"0::/": {"sys/fs/cgroup/cpu.max": "max 100000"}}, CORES),
    "version 1": (
        {
            "3:cpu,cpuacct:/x": {
                "sys/fs/cgroup/cpu/x/cpu.cfs_quota_us": "5000",
                "sys/fs/cgroup/cpu/x/cpu.cfs_period_us": "10000",
            }
        },
        0.5,
    ),
    "version 1, none": (
        {
            "3:cpu:/": {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            }
        },
        CORES,
    ),
    "another controller": ({"3:cpuset:/": {"sys/fs/cgroup/cpu/cpu.max": "1 1000"}}, CORES),
    "not to be understood": ({"0::/": {"sys/fs/cgroup/cpu.max": "\x00 much"}}, CORES),
    "cut short": ({"0::/": {"sys/fs/cgroup/cpu.max": "5000"}}, CORES),
    "nothing": ({}, CORES),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_cores_are_those_of_the_control_group(tmp_path, case):
    """The tightest quota of the group and those around it counts, in both versions."""
    groups, expected = QUOTAS[case]
    for line, files in groups.items():
        write(tmp_path, {"proc/self/cgroup": f"{line}\n", **files})
    assert process.usable_cores(str(tmp_path)) == expected


@pytest.mark.parametrize(
    ("line", "name", "text", "expected"),
    [
        ("0::/a", "sys/fs/cgroup/a/memory.max", "1048576", 1048576),
        ("0::/", "sys/fs/cgroup/memory.max", "max", None),
        ("4:memory:/x", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2097152", 2097152),
        ("4:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096), None),
        ("4:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes", "\xff", None),
    ],
)
def test_memory_is_that_of_the_control_group(tmp_path, line, name, text, expected):
    """Its limit counts, if it has one; else the machine's memory."""
    root = write(tmp_path, {"proc/self/cgroup": line, name: text})
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert process.memory_limit(root) == (machine if expected is None else expected)


def test_memory_without_proc_is_the_peak(monkeypatch):
    """Where the system does not tell what is in use, the most that ever was must do."""
    monkeypatch.setattr(process, "_read", lambda _folder, _name: "")
    assert process.memory_bytes() > 1_000_000


# The garbage collector


@contextmanager
def collections_take(clock: VirtualClock, seconds: float) -> Iterator[None]:
    """Let each collection, made by hand only, take so long."""

    def pause(phase: str, _info: dict[str, int]) -> None:
        if phase == "stop":  # called before the one who measures, it is part of the pause
            clock.advance(seconds)

    gc.collect()
    gc.disable()
    gc.callbacks.insert(0, pause)
    try:
        yield
    finally:
        gc.callbacks.remove(pause)
        gc.enable()


def test_pauses_are_a_share_of_time():
    """A twentieth of the time in the collector is half of the limit of a tenth."""
    with virtual_time() as clock, collections_take(clock, 0.05):
        signal = gc_pauses()
        assert signal() == 0.0
        clock.advance(1.9)
        gc.collect()
        gc.collect()
        assert signal() == pytest.approx(0.5)
        clock.advance(1.0)
        assert signal() == 0.0
        shown = signal.snapshot()
    assert shown["pauses"] == 2
    assert shown["longest"] == pytest.approx(0.05)


def test_the_collector_is_let_go_with_the_signal():
    """What it calls is gone when the signal is."""
    gc.collect()
    before = len(gc.callbacks)
    signal = gc_pauses()
    assert len(gc.callbacks) == before + 1
    del signal
    assert len(gc.callbacks) == before


def test_a_collector_whose_callbacks_were_emptied_does_no_harm():
    """Who cleared the list has already done what is to be done."""
    kept = list(gc.callbacks)
    signal = gc_pauses()
    gc.callbacks[:] = kept
    del signal
    gc.collect()
    assert gc.callbacks == kept


# The event loop


def block(seconds: float) -> None:
    """Keep the loop busy for so long."""
    asyncio.get_running_loop().clock.advance(seconds)


def test_a_loop_in_time_has_no_lag():
    """Nothing but timers that come when they are due."""

    async def main() -> None:
        signal = loop_lag()
        for _ in range(20):
            assert signal() == 0.0
            await let_pass(0.125)

    run_virtual(main())


def test_a_callback_that_takes_long_is_lag():
    """Seen at once by who reads in the blocked loop, afterwards by others, and then over."""

    async def main() -> None:
        signal = loop_lag(limit=0.1)
        signal.start()
        await let_pass(1.0)
        assert signal() == 0.0
        block(0.3)
        assert 2.4 <= signal() <= 3.0  # late already, though the loop has not come round
        await let_pass(0.01)
        assert 2.4 <= signal() <= 3.0
        await let_pass(0.2)
        assert signal() == 0.0

    run_virtual(main())


def test_a_signal_read_inside_a_loop_starts_by_itself():
    """The first reading says nothing yet, the following do."""

    async def main() -> None:
        signal = loop_lag(limit=0.1)
        assert signal() == 0.0
        await let_pass(0.06)
        block(0.5)
        assert signal() > 4.0

    run_virtual(main())


def test_many_signals_have_one_monitor_in_a_loop():
    """However many signals look at it, a loop has one timer for all."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        before = len(loop._scheduled)
        signals = [loop_lag(limit) for limit in (0.1, 0.2, 0.4)]
        for signal in signals:
            signal.start()
            signal()
        assert len(loop._scheduled) == before + 1
        await let_pass(0.06)
        block(0.4)
        values = [signal() for signal in signals]
        assert values[0] == pytest.approx(2 * values[1]) == pytest.approx(4 * values[2])

    run_virtual(main())


def test_nobody_reads_and_it_ends():
    """Without readers the sampler ends; the next reading starts it again."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        signal = loop_lag()
        signal.start()
        await let_pass(10.0)
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]
        assert signal() == 0.0
        await let_pass(0.06)
        block(0.5)
        assert signal() > 4.0

    run_virtual(main())


def test_a_loop_that_is_stuck_is_still_found_out():
    """Virtual time does not run on for ever for the monitor's sake."""

    async def main() -> None:
        loop_lag().start()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing can wake this loop"):
        run_virtual(main(), patience=0.05)


def test_a_closed_loop_is_let_go():
    """Neither the signal nor its monitor keeps it, and it counts no more."""
    signal = loop_lag()
    loops: list[weakref.ref[Any]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        signal.start()
        await let_pass(0.06)
        block(9.0)
        assert signal() > 1.0

    for _ in range(3):
        run_virtual(main())
    assert len(signal._monitors) <= 3
    gc.collect()
    assert [loop() for loop in loops] == [None] * 3
    assert not [known for known in signal._monitors if known.alive]
    signal._due = float("-inf")
    assert signal() == 0.0


def test_it_keeps_no_context():
    """What the first reader's context held is not kept for as long as the loop runs."""

    class Held:
        pass

    held: ContextVar[Any] = ContextVar("held")

    async def main() -> None:
        signal = loop_lag()

        async def reader() -> weakref.ref[Any]:
            value = Held()
            held.set(value)
            signal.start()
            return weakref.ref(value)

        known = await asyncio.create_task(reader())
        await let_pass(0.01)
        gc.collect()
        assert known() is None
        assert signal() == 0.0

    run_virtual(main())


def test_other_threads_see_the_loops_it_was_started_in():
    """A thread outside of any loop reads the lag of the loop."""

    async def main() -> None:
        signal = loop_lag()
        signal.start()
        await let_pass(0.06)
        block(0.5)
        seen: list[float] = []
        thread = threading.Thread(target=lambda: seen.append(signal()))
        thread.start()
        thread.join()
        assert seen[0] > 4.0

    run_virtual(main())


def test_read_by_other_threads_alone_it_begins_again():
    """A thread that comes back after a long pause sees the loop's lag again."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        signal = loop_lag()
        signal.start()
        await let_pass(10.0)
        assert not [timer for timer in loop._scheduled if not timer.cancelled()]
        seen: list[float] = []

        def read() -> None:
            thread = threading.Thread(target=lambda: seen.append(signal()))
            thread.start()
            thread.join()

        read()
        await let_pass(0.02)
        read()
        await let_pass(0.06)
        block(0.5)
        read()
        assert seen[:2] == [0.0, 0.0]
        assert seen[2] > 4.0

    run_virtual(main())


def test_outside_of_a_loop_there_is_no_lag():
    """Read there, it is 0; started there, it says where to start it."""
    signal = loop_lag()
    assert signal() == 0.0
    with pytest.raises(RuntimeError, match="inside a running event loop"):
        signal.start()
