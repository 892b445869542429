"""What AdaptiveLimit always keeps to, under random programs and orders; and what it takes."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Criticality,
    DeadlineExceeded,
    Overloaded,
    TimedOut,
    Timeout,
    criticality,
    deadline,
)
from seawall.context import tier
from seawall.limits import vegas
from seawall.models.concurrency.limit import ConcurrencyLimit
from seawall.policies.adaptive_limit import (
    AdaptiveGate,
    PartitionedGate,
    _AdaptiveWaiter,
    _PartitionWaiter,
)
from seawall.runtime.slots import Slots, SlotWaiter
from seawall.testing import run_virtual
from tests.support import SEEDS, examples, falsified, let_pass, new_guard, quarters, settled

QUARTERS = quarters(8)
SHARES = {"live": 0.5, "batch": 0.25}


class Scripted(ConcurrencyLimit):
    """A limit that goes where a script says, window by window."""

    name = "scripted"

    def __init__(self, initial: int, minimum: int = 1, maximum: int = 8) -> None:
        self.script: list[int] = []
        super().__init__(initial, minimum, maximum)

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Any) -> None:  # noqa: FBT001
        if self.script:
            self._move_to(self.script.pop(0))


class Visit(NamedTuple):
    """One call: when it comes, how long it takes, of which class it is, how it is disturbed."""

    at: float
    duration: float
    tier: str
    rank: Criticality
    cancel: tuple[float, int] | None
    within: float | None
    how: str


class Day(NamedTuple):
    """Calls of two guards with one limit, which moves meanwhile."""

    limits: list[int]
    max_wait: float
    order: str
    shared_out: bool
    visits: list[Visit]
    seed: int


VISITS = st.builds(
    Visit,
    at=QUARTERS,
    duration=QUARTERS,
    tier=st.sampled_from([*SHARES, "other"]),
    rank=st.sampled_from(Criticality),
    cancel=st.none() | st.tuples(QUARTERS, st.integers(0, 3)),
    within=st.none() | QUARTERS,
    how=st.sampled_from(["call", "hold", "timeout"]),
)
DAYS = st.builds(
    Day,
    limits=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    max_wait=st.sampled_from([0.0, 0.5, 2.0, float("inf")]),
    order=st.sampled_from(["fifo", "lifo", "criticality"]),
    shared_out=st.booleans(),
    visits=st.lists(VISITS, min_size=1, max_size=14),
    seed=SEEDS,
)


class Visitors:
    """Carries out the calls of a day, and counts from outside who is in."""

    def __init__(self, policy: AdaptiveLimit) -> None:
        self.policy = policy
        self.guards = [new_guard(policy), new_guard(policy)]
        self.timed = new_guard(Timeout(1.0), policy)
        self.tasks: list[asyncio.Task[None]] = []
        self.inside = dict.fromkeys((*SHARES, "other"), 0)
        self.allowed = policy.limit
        self.served: list[float] = []
        self.broken: list[str] = []

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
        within = 99.0 if script.within is None else script.within
        with tier(script.tier), criticality(script.rank), deadline(within):
            try:
                if script.how == "hold":
                    async with guard.hold():
                        await self.work(script)
                else:
                    await guard.acall(self.work, script)
            except (Overloaded, DeadlineExceeded, TimedOut):
                pass

    async def work(self, script: Visit) -> None:
        self.inside[script.tier] += 1
        if self.policy.in_flight > max(self.allowed, self.policy.limit):
            self.broken.append(f"{self.inside} in, {self.allowed} allowed")
        try:
            await let_pass(script.duration)
            self.served.append(script.duration)
        finally:
            self.inside[script.tier] -= 1

    def look(self) -> None:
        """Look at the policy between the instants."""
        policy, total = self.policy, sum(self.inside.values())
        if policy.in_flight != total:
            self.broken.append(f"{total} in, {policy.in_flight} slots taken")
        # Who is in may stay when the limit is lowered; nobody may come until it has room again.
        self.allowed = max(policy.limit, total)
        places = policy.partitions
        if places is None:
            if policy.waiting and total < policy.limit:
                self.broken.append(f"a lost wake-up: {policy.waiting} wait beside a free slot")
            return
        if places.total != total:
            self.broken.append(f"{total} in, {places.total} counted by class")
        for waiter in [*policy.slots.queue.oldest()]:
            if places.admits(waiter.name) and total < policy.limit:  # type: ignore[attr-defined]
                self.broken.append("a lost wake-up: one waits who may have a slot")


def _check_day(case: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        policy = AdaptiveLimit(
            Scripted(case.limits[0]),
            max_wait=case.max_wait,
            max_waiting=6,
            order=case.order,
            partitions=SHARES if case.shared_out else None,
        )
        assert isinstance(policy.model, Scripted)
        policy.model.script = case.limits[1:]
        policy.windows.typical = 0.0  # as if the first calls had been seen
        visitors = Visitors(policy)
        for number, script in enumerate(case.visits):
            loop.call_later(script.at, visitors.begin, number, script)
        for n in range(60):
            loop.call_later(n / 4 + 0.125, visitors.look)
        await let_pass(60.0)
        assert not visitors.broken
        assert all(task.done() for task in visitors.tasks)
        assert all(task.cancelled() or task.exception() is None for task in visitors.tasks)
        assert (policy.in_flight, policy.waiting) == (0, 0)
        assert len(policy.slots.free) == policy.limit == policy.model.limit
        assert not policy.slots.attention
        assert policy.partitions is None or policy.partitions.total == 0
        if len(case.limits) == 1:
            assert sorted(policy.windows.samples) == sorted(visitors.served)

    with pytest.MonkeyPatch.context() as patch:
        # With one limit nothing is to end a window, so that all samples can be seen.
        patch.setattr(
            "seawall.models.concurrency.samples.FEWEST", 3 if len(case.limits) > 1 else 10**9
        )
        patch.setattr("seawall.models.concurrency.samples.ENOUGH", 3)
        patch.setattr("seawall.models.concurrency.samples.SPAN", 0)
        run_virtual(main(), seed=case.seed)


@given(DAYS)
@examples(200)
def test_never_more_than_the_limit_and_nothing_is_lost(case: Day) -> None:
    """In flight <= limit; no lost wake-up; all slots free in the end; samples are true times."""
    _check_day(case)


def _do_nothing(*_: Any) -> None:
    pass


def _grant_uncounted(waiter: SlotWaiter) -> bool:
    return SlotWaiter.grant(waiter)


def _count_the_queue(waiter: SlotWaiter) -> Any:
    ticket = SlotWaiter.claim(waiter)
    return ticket if ticket is None else waiter.since


def _grow_only(slots: Slots, limit: int, _room: int | None) -> None:
    """Change the limit and forget to withdraw slots."""
    slots.free.extend(slots._new() for _ in range(limit - slots.limit))
    slots.limit = limit
    slots.serve()


ABLATIONS: dict[str, tuple[type, str, Any]] = {
    "a cancelled waiter stays": (SlotWaiter, "abandon", _do_nothing),
    "leaving gives nothing back": (AdaptiveGate, "leave", _do_nothing),
    "everybody is admitted": (AdaptiveGate, "enter", lambda _gate, now: now),
    "a slot given back wakes nobody": (Slots, "serve", _do_nothing),
    "slots are not withdrawn": (Slots, "resize", _grow_only),
    "time in the queue counts": (_AdaptiveWaiter, "claim", _count_the_queue),
    "a waiter's class is not counted": (_PartitionWaiter, "grant", _grant_uncounted),
    "a class gives nothing back": (PartitionedGate, "_give_back", _do_nothing),
    "a class that gives up keeps its place": (
        _PartitionWaiter,
        "_give_up",
        SlotWaiter._give_up,
    ),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_it_leaks_overflows_or_learns_nonsense(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    monkeypatch.setattr(*ABLATIONS[missing])
    assert falsified(_check_day, DAYS)


# A class below its share


class Rush(NamedTuple):
    """Calls of one class, as many as like, then one of another."""

    limit: int
    first: str
    number: int
    then: str


RUSHES = st.builds(
    Rush,
    limit=st.integers(2, 12),
    first=st.sampled_from([*SHARES, "other"]),
    number=st.integers(0, 14),
    then=st.sampled_from([*SHARES]),
)


def _check_rush(case: Rush) -> None:
    async def main() -> None:
        policy = AdaptiveLimit(Scripted(case.limit, maximum=12), partitions=SHARES)
        guard = new_guard(policy)

        async def one(name: str) -> Any:
            with tier(name):
                return (await guard.aattempt(let_pass, 1.0)).reason

        rush = [asyncio.create_task(one(case.first)) for _ in range(case.number)]
        await let_pass(0.5)
        assert policy.partitions is not None
        if policy.partitions.in_flight[case.then] < policy.partitions.reserved[case.then]:
            assert await one(case.then) is None
        await asyncio.gather(*rush)

    run_virtual(main())


@given(RUSHES)
def test_a_class_below_its_share_is_admitted_at_once(case: Rush) -> None:
    """Whatever the others do, and with nobody allowed to wait."""
    _check_rush(case)


def test_without_partitions_a_rush_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve who comes first, and the property is falsified."""
    monkeypatch.setattr(PartitionedGate, "enter", _enter_first_come)
    assert falsified(_check_rush, RUSHES)


def _enter_first_come(gate: PartitionedGate, now: float, /) -> object:
    name = gate._partitions.name(None)
    slot = gate.slots.take()
    if slot is not None:
        slot.began, slot.kind = now, name
        gate._partitions.take(name)
        return slot, name
    return gate._enter_full(now, name)


# The collector, and threads


def test_a_dying_call_may_end_a_window_while_the_lock_is_held() -> None:
    """The collector closes a generator inside a locked section: the window ends after it."""
    policy = AdaptiveLimit(Scripted(4))
    guard = new_guard(policy)
    assert isinstance(policy.model, Scripted)
    policy.model.script = [7]
    policy.windows.typical = 1.0
    policy.windows.samples += [1.0] * 9

    @guard
    def numbers() -> Any:
        yield 1
        yield 2

    running = numbers()
    assert next(running) == 1
    assert policy.in_flight == 1
    with policy.slots.mutex:
        del running
        gc.collect()
        assert policy.limit == 4
    settled(policy.slots.mutex)
    assert (policy.limit, policy.in_flight) == (7, 0)


@pytest.mark.parametrize("partitions", [None, SHARES])
def test_threads_share_the_slots_while_the_limit_moves(partitions: Any) -> None:
    """The limit stays in its bounds, and in flight within them."""
    policy = AdaptiveLimit(
        vegas(initial=3, maximum=6),
        window=1e-4,
        max_wait=60.0,
        max_waiting=1000,
        partitions=partitions,
    )
    guard = new_guard(policy)
    counting = threading.Lock()
    inside = most = done = 0
    limits = set()

    def function() -> None:
        nonlocal inside, most, done
        with counting:
            inside += 1
            most = max(most, inside)
            limits.add(policy.limit)
        with counting:
            inside -= 1
            done += 1

    def thread(name: str) -> None:
        start.wait(30)
        with tier(name):
            for _ in range(200):
                guard.call(function)

    start = threading.Barrier(8)
    names = [*SHARES, "other", "live"] * 2
    workers = [threading.Thread(target=thread, args=(name,)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert done == 8 * 200
    assert most <= 6
    assert limits <= set(range(1, 7))
    assert (policy.in_flight, policy.waiting) == (0, 0)
    assert partitions is None or policy.partitions.total == 0
