"""One guard in many threads, loops and processes at once."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import seawall
from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    Guard,
    Rejected,
    Retry,
    RetryBudget,
    Timeout,
)
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.policies.breaker import n_of_m
from seawall.policies.retry import InFlightRatio, RequestRatio
from seawall.policies.timeout.async_flow import AsyncTimeout
from seawall.testing import virtual_time

PATIENCE = 20.0


class Gauge:
    """Counts who is inside, and the most that were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.inside = self.most = self.total = 0

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            self.total += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1


def together(*works: Callable[[], Any]) -> None:
    """Run each in a thread, all from one moment on; raise what one of them raises."""
    barrier = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def run(work: Callable[[], Any]) -> None:
        try:
            barrier.wait(PATIENCE)
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if errors:
        raise errors[0]


@pytest.fixture(autouse=True)
def switching():
    """Let threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("order", ["fifo", "lifo", "criticality"])
@pytest.mark.parametrize("max_wait", [0.0, 10.0])
def test_threads_and_loops_share_the_slots_of_one_guard(  # noqa: C901 - both kinds of caller
    order, max_wait: float
):
    """Never more than the limit are inside, none waits for ever, and every call is counted."""
    bulkhead = Bulkhead(3, max_wait=max_wait, max_waiting=100, order=order)
    guard = Guard(f"mixed {order} {max_wait}", bulkhead)
    gauge = Gauge()
    lock = threading.Lock()
    done = refused = 0

    def note(*, ok: bool) -> None:
        nonlocal done, refused
        with lock:
            done += ok
            refused += not ok

    def plain() -> None:
        with gauge:
            sum(range(50))

    async def coroutine() -> None:
        with gauge:
            bell = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(bell.set_result, None)
            await bell

    def thread() -> None:
        for _ in range(150):
            try:
                guard.call(plain)
                note(ok=True)
            except BulkheadFull:
                note(ok=False)

    async def task() -> None:
        for _ in range(40):
            try:
                await guard.acall(coroutine)
                note(ok=True)
            except BulkheadFull:
                note(ok=False)

    async def tasks() -> None:
        await asyncio.gather(*(task() for _ in range(5)))

    def loop() -> None:
        asyncio.run(tasks())

    together(thread, loop, thread, loop, thread)
    assert gauge.most <= 3
    assert (bulkhead.in_flight, bulkhead.waiting, gauge.inside) == (0, 0, 0)
    assert done + refused == 3 * 150 + 2 * 5 * 40
    assert done == gauge.total == guard.snapshot()["succeeded"]
    assert refused == guard.snapshot()["rejected"]
    if max_wait:
        assert refused == 0


def test_cancelled_tasks_and_threads_share_slots_without_losing_any():
    """Tasks that are cancelled while threads hand them slots lose none."""
    bulkhead = Bulkhead(2, max_wait=10.0, max_waiting=100)
    guard = Guard("mixed cancel", bulkhead)

    async def coroutine() -> None:
        pass

    async def impatient() -> None:
        loop = asyncio.get_running_loop()
        for number in range(150):
            tasks = [asyncio.ensure_future(guard.acall(coroutine)) for _ in range(4)]
            bell = loop.create_future()
            loop.call_soon(bell.set_result, None)
            await bell
            for task in tasks[number % 3 :]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def thread() -> None:
        for _ in range(300):
            guard.call(lambda: sum(range(50)))

    together(thread, lambda: asyncio.run(impatient()), thread)
    assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)


def test_a_limit_changed_under_way_is_kept():
    """While the limit goes up and down, the slots add up in the end."""
    bulkhead = Bulkhead(2, max_wait=10.0, max_waiting=100)
    guard = Guard("changing", bulkhead)
    gauge = Gauge()

    def plain() -> None:
        with gauge:
            sum(range(50))

    def thread() -> None:
        for _ in range(200):
            guard.call(plain)

    def change() -> None:
        for number in range(100):
            bulkhead.update(limit=1 + number % 4)
        bulkhead.update(limit=2)

    together(thread, thread, thread, change, thread, thread)
    assert gauge.most <= 4
    assert (bulkhead.in_flight, bulkhead.waiting, len(bulkhead.slots.free)) == (0, 0, 2)


@pytest.mark.parametrize("probes", [1, 3])
def test_probes_of_threads_never_exceed_those_configured(probes: int):
    """Whatever number of threads comes as the break is over, only the probes get through."""
    for _ in range(10):
        with virtual_time() as clock:
            breaker = Breaker(consecutive=1, break_for=5.0, probes=n_of_m(probes, probes))
            guard = Guard("probing", breaker)
            guard.close()
            with pytest.raises(ZeroDivisionError):
                guard.call(lambda: 1 / 0)
            clock.advance(5.0)
            gauge = Gauge()
            all_tried = threading.Semaphore(0)
            refused = []

            def probe(gauge: Gauge = gauge, all_tried: Any = all_tried) -> None:
                with gauge:
                    assert all_tried.acquire(timeout=PATIENCE)

            def thread(guard: Guard = guard, refused: list = refused) -> None:
                try:
                    guard.call(probe)
                except CircuitOpen as error:
                    refused.append(error)
                    if len(refused) == 12 - probes:
                        for _ in range(probes):
                            all_tried.release()  # noqa: B023

            together(*[thread] * 12)
            assert gauge.most <= gauge.total == probes
            assert len(refused) == 12 - probes
            assert breaker.state == "closed"


def test_a_breaker_under_threads_misses_no_failure():
    """Failures told by several threads at once are all counted, and successes too."""
    breaker = Breaker(failure_ratio=1.0, window_calls=10_000, min_calls=10_000)
    guard = Guard("counting", breaker)

    def fails() -> None:
        raise KeyError

    def thread(function: Callable[[], Any]) -> Callable[[], None]:
        def work() -> None:
            for _ in range(400):
                try:
                    guard.call(function)
                except KeyError:
                    pass

        return work

    together(thread(fails), thread(int), thread(fails), thread(int))
    shown = guard.snapshot()
    assert (shown["succeeded"], shown["failed"]) == (800, 800)
    assert (shown["policies"][0]["calls"], shown["policies"][0]["failures"]) == (1600, 800)


@pytest.mark.parametrize(
    "rule", [RequestRatio(0.1, window=1000.0, floor=0.0), InFlightRatio(0.0, floor=2)]
)
def test_a_budget_shared_by_threads_keeps_its_bound(rule):
    """Retries of all threads together stay within the budget that they share."""
    with virtual_time():
        budget = RetryBudget(rule)
        gauge = Gauge()

        def thread(number: int) -> Callable[[], None]:
            policy = Retry(on=KeyError, attempts=4, backoff=constant(0.001), budget=budget)
            guard = Guard(f"budget {number}", policy)

            def fails() -> None:
                tried.append(1)
                if len(tried) > 1:
                    with gauge:
                        sum(range(50))
                raise KeyError

            tried: list[int] = []

            def work() -> None:
                for _ in range(50):
                    tried.clear()
                    with pytest.raises(KeyError):
                        guard.call(fails)

            return work

        together(*(thread(number) for number in range(6)))
    state = budget.snapshot()
    if isinstance(rule, RequestRatio):
        assert gauge.total == state["retries"] <= 0.1 * 300
    else:
        assert (state["active"], state["retries"]) == (0, 0)
        assert gauge.most <= 2
        assert gauge.total > 0


def test_single_flight_holds_across_threads_and_loops():
    """Threads and tasks that want the same answer make one call between them."""
    calls = []
    guard = Guard("flight", Cache(60.0, key=lambda: "key"))

    def fetch() -> str:
        calls.append(1)
        threading.Event().wait(0.02)
        return "answer"

    async def afetch() -> str:
        return fetch()

    async def tasks() -> None:
        assert await asyncio.gather(*(guard.acall(afetch) for _ in range(5))) == ["answer"] * 5

    def thread() -> None:
        assert guard.call(fetch) == "answer"

    together(thread, lambda: asyncio.run(tasks()), thread, lambda: asyncio.run(tasks()))
    assert len(calls) == 1


def test_a_waiter_of_a_closed_loop_takes_no_slot():
    """A slot granted to a task whose loop was closed goes to the next, and nobody is hurt."""
    bulkhead = Bulkhead(1, max_wait=60.0)
    guard = Guard("closed loop", bulkhead)

    async def coroutine() -> None:
        pass

    async def turn() -> None:
        bell = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(bell.set_result, None)
        await bell

    loop = asyncio.new_event_loop()
    with guard.hold():
        task = loop.create_task(guard.acall(coroutine))
        loop.run_until_complete(turn())
        assert bulkhead.waiting == 1
        loop.close()
    assert bulkhead.in_flight == 0
    guard.call(lambda: None)
    task._log_destroy_pending = False
    del task
    gc.collect()
    assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)


def test_many_short_lived_loops_leave_nothing_behind():
    """Hundreds of loops come and go: at most the last of them is remembered."""
    guard = Guard("loops", Timeout(5.0), Bulkhead(1, max_wait=4.0, max_waiting=8), Timeout(2.0))
    loops: list[weakref.ref[Any]] = []

    async def coroutine() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))

    async def main() -> None:
        await guard.acall(coroutine)

    for _ in range(60):
        asyncio.run(main())
    together(*[lambda: asyncio.run(main())] * 8)
    gc.collect()
    layers = [bound.layer("async") for bound in guard.bounds]
    lanes = [layer._lanes for layer in layers if isinstance(layer, AsyncTimeout)]
    assert len(lanes) == 2
    assert all(len(known) <= 9 for known in lanes)
    assert sum(ref() is not None for ref in loops) <= 9
    asyncio.run(main())
    assert all(len(known) == 1 for known in lanes)


def test_a_step_of_the_wall_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """An hour forwards or backwards on the wall neither shortens nor lengthens the break."""
    breaker = Breaker(consecutive=1, break_for=15.0)
    guard = Guard("wall", breaker, Bulkhead(1))
    with pytest.raises(ZeroDivisionError):
        guard.call(lambda: 1 / 0)
    wall = time.time()  # noqa: TID251 - the wall clock is what this is about
    for step in (3600.0, -3600.0, 0.0):
        monkeypatch.setattr(time, "time", lambda step=step: wall + step)
        with pytest.raises(CircuitOpen) as refused:
            guard.call(lambda: "through")
        assert refused.value.retry_after is not None
        assert 10.0 < refused.value.retry_after <= 15.0


def test_the_wall_clock_is_never_asked(monkeypatch: pytest.MonkeyPatch):
    """No guard looks at the wall, so no step of it can matter."""
    monkeypatch.setattr(time, "time", lambda: pytest.fail("asked for the time of day"))
    clock = VirtualClock()
    stack = [Cache(5.0), Retry(on=KeyError, backoff=constant(0.1)), Breaker(), Bulkhead(1)]
    guard = Guard("unasked", *stack, clock=clock)
    with pytest.raises(KeyError):
        guard.call(lambda: {}["missing"])
    assert guard.snapshot()["failed"] == 3


UNTIDY = """
import faulthandler, gc
from seawall import *
from seawall.clock import *
from seawall.limits import *
from seawall.load import *
from seawall.resources import *
from seawall.shedding import *
faulthandler.dump_traceback_later(3.0, exit=True)   # stuck

class Untidy:
    def __init__(self, mutex): self.mutex = mutex
    def __enter__(self): self.mutex.__enter__(); gc.collect()
    def __exit__(self, *error): self.mutex.__exit__(*error)
    def do(self, work): self.mutex.do(lambda: (gc.collect(), work()))

bulkhead, breaker, cache = Bulkhead(1, max_wait=0.05), Breaker(), Cache(60.0, key=lambda: "key")
gc.disable()

def garbage(thing):
    cycle = [thing]
    cycle.append(cycle)
    return cycle
"""

MOMENTS = {
    "bulkhead": """
    guard = Guard("g", bulkhead)
    @guard
    def items(): yield 1
    dying = garbage(items())
    next(dying[0])
    del dying
    push = bulkhead.slots.queue.push
    bulkhead.slots.queue.push = lambda *args, **options: (gc.collect(), push(*args, **options))[1]
    assert guard.call(int) == 0
    assert bulkhead.in_flight == 0
    """,
    "breaker": """
    guard = Guard("g", breaker)
    @guard
    def items(): yield 1
    dying = garbage(items())
    next(dying[0])
    del dying
    breaker._mutex = Untidy(breaker._mutex)
    try: guard.call({}.pop, "missing")
    except KeyError: pass
    """,
    "cache": """
    import asyncio
    guard = Guard("g", cache)
    async def never(): await asyncio.get_running_loop().create_future()
    loop = asyncio.new_event_loop()
    dying = garbage(guard.acall(never))
    loop.call_soon(dying[0].send, None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    del dying
    loop._ready.clear()
    cache._answers._mutex = Untidy(cache._answers._mutex)
    cache.clear()
    assert guard.call(int) == 0
    """,
}


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    source = Path(seawall.__file__).parent.parent
    return subprocess.run(  # noqa: S603 - this very interpreter and a script of this file
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("moment", MOMENTS)
def test_garbage_collected_at_a_bad_moment_locks_nobody_out(moment: str):
    """The collector may close a guarded call in the very thread that holds its policy's lock."""
    finished = run_script(UNTIDY + textwrap.dedent(MOMENTS[moment]))
    assert finished.returncode == 0, finished.stderr


FORK = """
import os, sys, threading, time, asyncio, warnings
warnings.simplefilter("ignore")
from seawall import *
from seawall.clock import *
from seawall.limits import *
from seawall.load import *
from seawall.resources import *
from seawall.shedding import *

def in_child(check):
    pid = os.fork()
    if pid == 0:
        threading.Timer(40.0, lambda: os._exit(3)).start()   # stuck
        try:
            check()
        except BaseException as error:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def work(): return "answer"
async def awork(): return "answer"
stack = [Retry(on=KeyError, budget=RetryBudget()), Breaker(), Bulkhead(2, max_wait=1.0)]
guard = Guard("forked", *stack)
threaded = Guard("threaded", Timeout(5.0, sync="thread", max_threads=2))
pooled = Guard("pooled", ThreadBulkhead(2))
timed = Guard("timed", Timeout(5.0), Bulkhead(1))
cached = Guard("cached", Cache(60.0))
"""

CASES = {
    "after use": """
guard.call(work), threaded.call(work), pooled.call(work), cached.call(work)
asyncio.run(timed.acall(awork))
def check():
    assert guard.call(work) == threaded.call(work) == pooled.call(work) == "answer"
    assert cached.call(work) == asyncio.run(timed.acall(awork)) == "answer"
    assert get_guard("forked") is guard and len(guards()) == 5
    assert guard.snapshot()["succeeded"] == 2
sys.exit(in_child(check))
""",
    "hung threads stay behind": """
release = threading.Event()
def hang(): release.wait(20)
limit = Timeout(0.02, sync="thread", max_threads=1)
short = Guard("short", limit)
try: short.call(hang)
except TimeoutError: pass  # on a busy machine the thread may not have begun
def check():
    limit.update(seconds=30.0)  # on a busy machine a thread may begin late
    assert short.call(work) == "answer"
    assert short.snapshot()["policies"][0]["abandoned"] == 0
code = in_child(check)
release.set()
sys.exit(code)
""",
    "slots of threads that are gone": """
release, inside = threading.Event(), threading.Event()
single = Guard("single", Bulkhead(1))
def hold():
    inside.set()
    release.wait(20)
thread = threading.Thread(target=single.call, args=(hold,))
thread.start()
inside.wait()
def check():
    assert single.call(work) == "answer"
code = in_child(check)
release.set()
thread.join()
sys.exit(code)
""",
    "flights of threads that are gone": """
release, inside = threading.Event(), threading.Event()
flight = Guard("flight", Cache(60.0, key=lambda: "key"))
def fetch():
    inside.set()
    release.wait(20)
thread = threading.Thread(target=flight.call, args=(fetch,))
thread.start()
inside.wait()
def check():
    assert flight.call(work) == "answer"
code = in_child(check)
release.set()
thread.join()
sys.exit(code)
""",
    "locks held by threads that are gone": """
breaker, bulkhead = guard.policies[1], guard.policies[2]
from seawall import registry
mutexes = [breaker._mutex, bulkhead.slots.mutex, guard.policies[0].budget._mutex,
           cached.policies[0]._answers._mutex]
locks = [*mutexes, guard.stats._lock, registry._lock]
ready, release = threading.Event(), threading.Event()
def hold():
    for lock in locks: lock.acquire()
    ready.set()
    release.wait(20)
    for lock in locks: lock.release()
thread = threading.Thread(target=hold)
thread.start()
ready.wait()
def fail(): raise KeyError
def check():
    try: guard.call(fail)
    except KeyError: pass
    assert cached.call(work) == "answer"
    guard.snapshot(), guards()
code = in_child(check)
release.set()
thread.join()
sys.exit(code)
""",
}

SCARCE = """
from seawall.load import signals
rate = RateLimit("1000/s", key=lambda: "key", max_wait=5.0)
slow = RateLimit("1/day", max_wait=float("inf"))
limit = AdaptiveLimit(aimd(slow_after=9.0, initial=1), max_wait=1.0)
shares = AdaptiveLimit(aimd(slow_after=9.0, initial=2), partitions={"live": 0.5}, max_wait=1.0)
shed = Shed(by_criticality(), load=signals.latched(signals.highest(lambda: 0.5)))
throttle, chaos = Throttle(), Chaos(0.0, error=OSError, enabled=True)
hedge = Hedge(5.0, sync="thread", workers=2)
guarded = Guard("scarce", shed, rate, limit, shares, throttle, chaos)
hedged = Guard("hedged", hedge)
waiting = Guard("waiting", slow)
pool = Pool(lambda: [os.getpid()], close=list.clear, name="pool", max_size=1)
channel, serializer = Channel(2), Serializer(max_wait=1.0)
load, clock = [0.9], VirtualClock()
signal = signals.Signal("load", lambda: load[0], every=0.0)
levels = ServiceLevels("service_levels", load=signal, clock=clock)
cpu, io = CpuPool("cpu", workers=1, kind="thread"), IoPool("io", workers=1)
watchdog = LoopWatchdog(1.0)

def use():
    assert guarded.call(work) == hedged.call(work) == "answer"
    assert asyncio.run(guarded.acall(awork)) == "answer"
    assert rate.peek().left > 0 and rate.reserve() is not None
    with pool.borrow() as resource: assert resource == [os.getpid()]
    assert channel.put("item") and channel.get(0) == "item"
    assert serializer.run("key", work) == "answer"
    assert cpu.run(work) == io.run(work) == "answer"
    before, load[0] = levels.level, load[0] + 1
    clock.advance(10.0)
    assert signal() == load[0] and levels.level > before
    async def watch():
        async with watchdog: return await awork()
    assert asyncio.run(watch()) == "answer"
    for thing in (guarded, hedged, waiting, pool, channel, serializer, levels, cpu, io, watchdog):
        thing.snapshot()
    rate.update(max_wait=4.0), limit.update(maximum=50), throttle.update(k=3.0)
    hedge.update(cap=0.1), pool.update(max_size=2), channel.update(capacity=3)

def idle():
    assert (limit.in_flight, shares.in_flight, limit.waiting, shares.waiting) == (0, 0, 0, 0)
    assert (rate.waiting, slow.waiting, pool.in_use, channel.depth) == (0, 0, 0, 0)
    assert cpu.snapshot()["in_flight"] == io.snapshot()["in_flight"] == hedge.pool.in_use == 0
    assert pool.snapshot()["in_flight"] == serializer.snapshot()["in_flight"] == 0
"""

SCARCE_CASES = {
    "after use": """
use()
def check(): idle(); use(); idle(); assert pool.close(0.0)
sys.exit(in_child(check))
""",
    "before use": """
def check(): use(); idle()
sys.exit(in_child(check))
""",
    "locks held by threads that are gone": """
use()
import gc
from seawall.runtime.mutex import Mutex
kinds = (type(threading.Lock()), type(threading.RLock()))
ours = [thing for thing in gc.get_objects() if type(thing).__module__.startswith("seawall")]
ours.remove(clock)  # for tests, in one process
locks, seen = [], set()
for thing in ours:
    names = [name for kind in type(thing).__mro__ for name in vars(kind).get("__slots__", ())]
    values = [getattr(thing, name, None) for name in names]
    for value in (*values, *getattr(thing, "__dict__", {}).values()):
        if isinstance(value, kinds) and id(value) not in seen:
            seen.add(id(value))
            locks.append(value)
assert len(locks) > 15, len(locks)
ready, release = threading.Event(), threading.Event()
def hold():
    for lock in locks: lock.acquire(timeout=0.2)
    ready.set()
    release.wait(20)
thread = threading.Thread(target=hold, daemon=True)
thread.start()
ready.wait()
def check(): idle(); use(); idle(); assert pool.close(0.0)
sys.exit(in_child(check))
""",
    "all is taken by threads that are gone": """
channel.put("first"), channel.put("second")
release, inside = threading.Event(), threading.Semaphore(0)
def busy():
    inside.release()
    release.wait(20)
def borrow():
    with pool.borrow(): busy()
waiting.call(work)
held = [lambda: limit(busy)(), lambda: shares(busy)(), lambda: serializer.run("key", busy),
        lambda: cpu.run(busy), lambda: io.run(busy), lambda: hedged.call(busy), borrow]
threads = [threading.Thread(target=work_, daemon=True) for work_ in held]
for thread in threads: thread.start()
for thread in threads: inside.acquire()
queued = [lambda: waiting.call(work), lambda: channel.put("third"), lambda: hedged.call(busy)]
queue = [threading.Thread(target=work_, daemon=True) for work_ in queued]
for thread in queue: thread.start()
while not (slow.waiting and channel.snapshot()["waiting_putters"] and hedge.pool.in_use == 2): pass
def check(): idle(); use(); idle(); assert pool.close(0.0)
os._exit(in_child(check))
""",
}


@pytest.mark.parametrize("case", CASES)
def test_a_child_process_starts_clean(case: str):
    """After a fork, guards work in the child, whatever the parent's threads were doing."""
    finished = run_script(FORK + textwrap.dedent(CASES[case]))
    assert finished.returncode == 0, finished.stderr or "the child is stuck"


@pytest.mark.parametrize("case", SCARCE_CASES)
def test_what_is_scarce_is_there_in_a_child_process(case: str):
    """The same for limits, pools, channels and executors: nothing is missing, and all work."""
    finished = run_script(FORK + SCARCE + textwrap.dedent(SCARCE_CASES[case]))
    assert finished.returncode == 0, finished.stderr or "the child is stuck"


FORGETFUL = """
from seawall import _forks
class Forgetful(set):
    def add(self, thing):
        if not any(kind.__name__ == "KIND" for kind in type(thing).__mro__): set.add(self, thing)
_forks._forkable = Forgetful()
"""
TAKEN, LOCKED = "all is taken by threads that are gone", "locks held by threads that are gone"


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("Meters", TAKEN),
        ("Slots", TAKEN),
        ("AdaptiveLimit", TAKEN),
        ("WorkerPool", TAKEN),
        ("Stock", TAKEN),
        ("Channel", TAKEN),
        ("Serializer", TAKEN),
        ("Signal", LOCKED),
        ("ServiceLevels", LOCKED),
        ("Throttle", LOCKED),
    ],
)
def test_each_has_to_be_put_right_in_a_child_process(kind: str, case: str):
    """If one kind of them is forgotten after the fork, the child misses something or is stuck."""
    hasty = FORK.replace("Timer(40.0", "Timer(2.0")
    assert hasty != FORK
    finished = run_script(
        hasty + FORGETFUL.replace("KIND", kind) + SCARCE + textwrap.dedent(SCARCE_CASES[case])
    )
    assert finished.returncode != 0


def test_refusals_in_threads_are_rejections():
    """Every refusal, in whatever thread, is a Rejected that names its guard."""
    guard = Guard("named", Bulkhead(1))
    with guard.hold():

        def thread() -> None:
            with pytest.raises(Rejected) as refused:
                guard.call(lambda: None)
            assert refused.value.guard == "named"

        together(thread, thread)
