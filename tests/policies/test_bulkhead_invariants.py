"""What Bulkhead always keeps to, under random programs and orders; and that safeguards matter."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator
from types import coroutine
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    Criticality,
    DeadlineExceeded,
    Retry,
    TimedOut,
    Timeout,
    criticality,
    deadline,
)
from seawall.clock import VirtualClock
from seawall.models.waiting import WaitQueue
from seawall.policies.bulkhead import _BulkheadGate
from seawall.runtime.call import Abandoned
from seawall.runtime.slots import Slots, SlotWaiter
from seawall.testing import run_virtual
from tests.support import SEEDS, examples, falsified, let_pass, new_guard, quarters

QUARTERS = quarters(8)


@coroutine
def _turn() -> Generator[None, None, None]:
    """Let the loop have one turn, at the same instant."""
    yield


class Visit(NamedTuple):
    """One call: when it comes, how long it takes, who it is, and how it is disturbed.

    It is cancelled at an instant, and so many turns of the loop after that: so the cancellation
    meets every point at which a call can wait.
    """

    at: float
    duration: float
    rank: Criticality
    cancel: tuple[float, int] | None
    within: float | None
    how: str


class Day(NamedTuple):
    """Calls of two guards with one bulkhead, and changes of its settings meanwhile."""

    limit: int
    max_wait: float
    max_waiting: int
    order: str
    visits: list[Visit]
    updates: list[tuple[float, dict[str, Any]]]
    seed: int


VISITS = st.builds(
    Visit,
    at=QUARTERS,
    duration=QUARTERS,
    rank=st.sampled_from(Criticality),
    cancel=st.none() | st.tuples(QUARTERS, st.integers(0, 3)),
    within=st.none() | QUARTERS,
    how=st.sampled_from(["call", "hold", "timeout"]),
)
CHANGES = st.fixed_dictionaries(
    {},
    optional={"limit": st.integers(1, 4), "max_wait": QUARTERS, "max_waiting": st.integers(1, 4)},
).filter(bool)
DAYS = st.builds(
    Day,
    limit=st.integers(1, 3),
    max_wait=st.sampled_from([0.0, 0.5, 2.0, float("inf")]),
    max_waiting=st.integers(1, 6),
    order=st.sampled_from(["fifo", "lifo", "criticality"]),
    visits=st.lists(VISITS, min_size=1, max_size=12),
    updates=st.lists(st.tuples(QUARTERS, CHANGES), max_size=2),
    seed=SEEDS,
)


class Watch:
    """Counts from outside who is in, and looks at the bulkhead between the instants."""

    def __init__(self, bulkhead: Bulkhead) -> None:
        self.bulkhead = bulkhead
        self.inside = 0
        self.broken: list[str] = []
        self.allowed = bulkhead.limit

    def enter(self) -> None:
        self.inside += 1
        # A lowered limit holds for those who come later; who is in may stay.
        if self.inside > self.allowed:
            self.broken.append(f"{self.inside} in, {self.allowed} allowed")

    def leave(self) -> None:
        self.inside -= 1
        self.allowed = max(self.bulkhead.limit, self.allowed - 1)

    def update(self, changes: dict[str, Any]) -> None:
        self.bulkhead.update(**changes)
        # Who has been granted a slot and has not begun yet counts as one who is in.
        self.allowed = max(self.bulkhead.limit, self.bulkhead.in_flight)

    def look(self) -> None:
        bulkhead = self.bulkhead
        if bulkhead.in_flight != self.inside:
            self.broken.append(f"{self.inside} in, {bulkhead.in_flight} slots taken")
        self.allowed = max(bulkhead.limit, self.inside)
        if bulkhead.waiting and self.inside < bulkhead.limit:
            self.broken.append(f"a lost wake-up: {bulkhead.waiting} wait beside a free slot")


class Visitors:
    """Carries out the calls of a day."""

    def __init__(self, watch: Watch) -> None:
        bulkhead = watch.bulkhead
        self.watch = watch
        self.guards = [new_guard(bulkhead), new_guard(bulkhead)]
        self.timed = new_guard(Timeout(1.0), bulkhead)
        self.tasks: list[asyncio.Task[None]] = []

    def begin(self, number: int, script: Visit) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.visit(number, script))
        self.tasks.append(task)
        if script.cancel is not None:
            after, turns = script.cancel
            loop.call_later(after, self.cancel, task, turns)

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
        else:
            task.cancel()

    async def visit(self, number: int, script: Visit) -> None:
        guard = self.timed if script.how == "timeout" else self.guards[number % 2]
        with criticality(script.rank), deadline(99.0 if script.within is None else script.within):
            try:
                if script.how == "hold":
                    async with guard.hold():
                        await self.work(script.duration)
                else:
                    await guard.acall(self.work, script.duration)
            except (BulkheadFull, DeadlineExceeded, TimedOut):
                pass

    async def work(self, duration: float) -> None:
        self.watch.enter()
        try:
            await let_pass(duration)
        finally:
            self.watch.leave()


def _check_day(case: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(
            case.limit, max_wait=case.max_wait, max_waiting=case.max_waiting, order=case.order
        )
        watch = Watch(bulkhead)
        visitors = Visitors(watch)
        for number, script in enumerate(case.visits):
            loop.call_later(script.at, visitors.begin, number, script)
        for at, changes in case.updates:
            loop.call_later(at, watch.update, changes)
        for n in range(60):
            loop.call_later(n / 4 + 0.125, watch.look)
        await let_pass(60.0)
        assert not watch.broken
        assert all(task.done() for task in visitors.tasks)
        assert all(task.cancelled() or task.exception() is None for task in visitors.tasks)
        assert (watch.inside, bulkhead.in_flight, bulkhead.waiting) == (0, 0, 0)
        assert len(bulkhead.slots.free) == bulkhead.limit
        assert not bulkhead.slots.attention

    run_virtual(main(), seed=case.seed)


@given(DAYS)
@examples(300)
def test_never_more_than_the_limit_and_nothing_is_lost(case: Day) -> None:
    """In flight <= limit; nobody waits beside a free slot; at the end all slots are free."""
    _check_day(case)


def _do_nothing(*_: Any) -> None:
    pass


def _push_without_bound(queue: WaitQueue[Any], item: Any, rank: int = 0, kind: Any = None) -> None:
    lane = (rank if queue.order == "criticality" else 0, kind)
    queue._arrivals += 1
    queue._lanes.setdefault(lane, OrderedDict())[item] = queue._arrivals


def _grow_only(bulkhead: Bulkhead, changes: dict[str, Any]) -> None:
    """Change the limit and forget to withdraw slots."""
    with bulkhead.slots.mutex:
        more = changes.get("limit", bulkhead.limit) - bulkhead.limit
        bulkhead.slots.limit += more
        bulkhead.slots.free.extend(bulkhead.slots._new() for _ in range(more))
        bulkhead.slots.serve()


ABLATIONS: dict[str, tuple[type, str, Any]] = {
    "a cancelled waiter stays": (SlotWaiter, "abandon", _do_nothing),
    "leaving gives nothing back": (_BulkheadGate, "leave", _do_nothing),
    "everybody is admitted": (_BulkheadGate, "enter", _do_nothing),
    "a slot given back wakes nobody": (Slots, "serve", _do_nothing),
    "slots are not withdrawn": (Bulkhead, "_update", _grow_only),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_the_bulkhead_leaks_or_overflows(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    monkeypatch.setattr(*ABLATIONS[missing])
    assert falsified(_check_day, DAYS)


# Order and bounds of the waiting room


class Room(NamedTuple):
    """Waiters that come one after another while the only slot is taken."""

    order: str
    max_waiting: int
    ranks: list[Criticality]
    seed: int


ROOMS = st.builds(
    Room,
    order=st.sampled_from(["fifo", "lifo", "criticality"]),
    max_waiting=st.integers(1, 5),
    ranks=st.lists(st.sampled_from(Criticality), min_size=1, max_size=8),
    seed=SEEDS,
)


def _expected(room: Room) -> tuple[list[int], list[int]]:
    """Return who is turned away and who is served, each in order, by the words of the docs."""
    inside: list[int] = []
    turned_away: list[int] = []
    ranks = room.ranks
    for number in range(len(ranks)):
        inside.append(number)
        if len(inside) > room.max_waiting:
            if room.order == "fifo":
                victim = number
            elif room.order == "lifo":
                victim = inside[0]
            else:
                victim = min(inside, key=lambda n: (ranks[n], -n))
            inside.remove(victim)
            turned_away.append(victim)
    if room.order == "criticality":
        inside.sort(key=lambda n: (-ranks[n], n))
    return turned_away, inside[::-1] if room.order == "lifo" else inside


def _check_room(case: Room) -> None:
    served: list[int] = []
    refused: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=60.0, max_waiting=case.max_waiting, order=case.order)
        guard = new_guard(bulkhead)

        async def function(number: int) -> None:
            served.append(number)
            await let_pass(1.0)

        async def one(number: int) -> None:
            with criticality(case.ranks[number]):
                try:
                    await guard.acall(function, number)
                except BulkheadFull:
                    refused.append(number)

        tasks = []
        async with guard.hold():
            for number in range(len(case.ranks)):
                tasks.append(loop.create_task(one(number)))
                await let_pass(1.0)
                assert bulkhead.waiting <= case.max_waiting
        await asyncio.wait(tasks)

    run_virtual(main(), seed=case.seed)
    assert (refused, served) == _expected(case)


@given(ROOMS)
def test_the_waiting_room_is_bounded_and_keeps_its_order(case: Room) -> None:
    """Who is displaced and who is served next follows the order that was asked for."""
    _check_room(case)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (WaitQueue, "push", _push_without_bound),
        (SlotWaiter, "turn_away", _do_nothing),
    ],
)
def test_without_its_bound_the_waiting_room_overflows(
    owner: type, name: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let everybody wait, or tell nobody that he was displaced, and the property is falsified."""
    monkeypatch.setattr(owner, name, broken)
    assert falsified(_check_room, ROOMS)


# A slot that is freed while a waiter is about to join


def _wait_beside_a_free_slot() -> float:
    """Return how long a call waits whose slot is freed between its look and its joining."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(1, max_wait=7.0)
        guard = new_guard(bulkhead)
        gate = guard.bounds[0]
        ticket = gate.enter(0.0)
        join = Slots.join

        def late_join(slots: Slots, waiter: Any) -> None:
            gate.leave(ticket, None, None, 0.0)  # so another thread would, at this very moment
            join(slots, waiter)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slots, "join", late_join)
            await guard.aattempt(let_pass, 0.0)
        return loop.time()

    return run_virtual(main())


def test_a_slot_freed_just_before_a_waiter_joins_is_not_overlooked() -> None:
    """Who joins looks at the free slots again, after it has made itself known."""
    assert _wait_beside_a_free_slot() == 0.0


def test_without_the_second_look_the_wake_up_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join without looking again, and the call waits in vain beside a free slot."""

    def join(slots: Slots, waiter: Any) -> None:
        with slots.mutex:
            slots.attention = True
            slots.queue.push(waiter, waiter.rank)

    monkeypatch.setattr(Slots, "join", join)
    assert _wait_beside_a_free_slot() == 7.0


# Work that runs on in a thread


class ImpatientClock(VirtualClock):
    """Virtual time in which every wait for a thread expires, once the thread has begun."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        assert self.begun.acquire(timeout=30)
        assert seconds is not None
        self.advance(seconds)
        return lock.acquire(blocking=False)


def _slots_taken_while_work_runs_on(
    policies: Callable[[Bulkhead], list[Any]], threads: int
) -> list[int]:
    """Return the slots taken while so many abandoned threads run, and each time one has ended."""
    clock = ImpatientClock()
    bulkhead = Bulkhead(1)
    guard = new_guard(*policies(bulkhead), clock=clock)
    gates: list[threading.Event] = []

    def function() -> None:
        go = threading.Event()
        gates.append(go)
        clock.begun.release()
        assert go.wait(30)

    ended = threading.Semaphore(0)
    stopped = Abandoned.stopped

    def stop(work: Abandoned) -> None:
        stopped(work)
        ended.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Abandoned, "stopped", stop)
        with pytest.raises(TimedOut):
            guard.call(function)
        taken = [bulkhead.in_flight]
        assert len(gates) == threads
        for go in gates:
            go.set()
            assert ended.acquire(timeout=30)
            taken.append(bulkhead.in_flight)
    return taken


STACKS: dict[str, Callable[[Bulkhead], list[Any]]] = {
    "bulkhead outside": lambda b: [b, Timeout(1.0, sync="thread")],
    "retry between": lambda b: [b, Retry(on=KeyError), Timeout(1.0, sync="thread")],
    "retry outside": lambda b: [Retry(on=KeyError), b, Timeout(1.0, sync="thread")],
}


@pytest.mark.parametrize("stack", STACKS)
def test_a_slot_is_held_until_the_work_really_stops(stack: str) -> None:
    """A caller that gave up on a thread does not free the slot that the thread still uses."""
    assert _slots_taken_while_work_runs_on(STACKS[stack], 1) == [1, 0]


def test_a_slot_is_held_until_the_work_of_all_its_attempts_stops() -> None:
    """Three attempts inside one slot leave three threads behind: the last one frees it."""

    def stack(bulkhead: Bulkhead) -> list[Any]:
        retry = Retry(on=TimedOut, attempts=3, backoff=0)
        return [bulkhead, retry, Timeout(1.0, sync="thread")]

    assert _slots_taken_while_work_runs_on(stack, 3) == [1, 1, 1, 0]


def test_without_waiting_for_the_work_the_slot_is_free_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leave when the caller does, and a second call could run beside the abandoned one."""
    monkeypatch.setattr(_BulkheadGate, "until_stopped", False)
    assert _slots_taken_while_work_runs_on(STACKS["bulkhead outside"], 1) == [0, 0]


# Threads and tasks together


def test_threads_and_tasks_of_several_loops_share_the_slots() -> None:
    """The limit holds for all of them together, and each wakes the others."""
    limit, callers, calls = 3, 4, 25
    bulkhead = Bulkhead(limit, max_wait=60.0, max_waiting=1000)
    guard = new_guard(bulkhead)
    counting = threading.Lock()
    inside = most = done = 0

    def step(by: int) -> None:
        nonlocal inside, most, done
        with counting:
            inside += by
            most = max(most, inside)
            done += by < 0

    def function() -> None:
        step(+1)
        step(-1)

    async def afunction() -> None:
        step(+1)
        await _turn()
        step(-1)

    def thread() -> None:
        start.wait(30)
        for _ in range(calls):
            guard.call(function)

    def loop() -> None:
        async def main() -> None:
            await asyncio.gather(*[guard.acall(afunction) for _ in range(calls)])

        start.wait(30)
        asyncio.run(main())

    start = threading.Barrier(2 * callers)
    workers = [threading.Thread(target=kind) for kind in (thread, loop) for _ in range(callers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert done == 2 * callers * calls
    assert most <= limit
    assert (bulkhead.in_flight, bulkhead.waiting, bulkhead.slots.attention) == (0, 0, False)
