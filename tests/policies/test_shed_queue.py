"""Bulkhead(shed=...): who has to leave a queue that does not drain, and what is not lost by it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    Criticality,
    DeadlineExceeded,
    Guard,
    Overloaded,
    criticality,
    deadline,
    subscribe,
)
from seawall.events import CallRejected
from seawall.models.shedding.codel import QueueShed
from seawall.runtime.slots import Slots
from seawall.shedding import adaptive_lifo, codel
from seawall.testing import run_virtual, virtual_time
from tests.support import SEEDS, examples, falsified, let_pass, new_guard, quarters

EAGER = adaptive_lifo(0.25, patience=0.25, scale=0)
"""Whoever waits for more than a quarter of a second has to go, and the newest is served first."""


class OldestFirst:
    """A queue from which whoever waits for more than a quarter has to go; the order stays."""

    def start(self, _service_time: Any) -> OldestFirst:
        return self

    def newest_first(self, _now: float) -> bool:
        return False

    def refuses(self, _waiting: int, _sojourn: float, _now: float) -> bool:
        return False

    def sheds(self, sojourn: float, _now: float) -> bool:
        return sojourn > 0.25

    def serves(self, _now: float) -> None:
        pass

    def emptied(self, _now: float) -> None:
        pass


async def _queue_up(
    bulkhead: Bulkhead, ranks: list[Criticality], every: float
) -> tuple[list[int], dict[int, str | None]]:
    """Let one call of each rank come after another while the slot is taken; then free it."""
    loop = asyncio.get_running_loop()
    guard = new_guard(bulkhead)
    served: list[int] = []
    refused: dict[int, str | None] = {}

    async def one(number: int) -> None:
        async def function() -> None:
            served.append(number)
            await let_pass(0.01)

        with criticality(ranks[number]):
            result = await guard.aattempt(function)
        if not result.ok:
            refused[number] = result.reason

    async with guard.hold():
        tasks = []
        for number in range(len(ranks)):
            tasks.append(loop.create_task(one(number)))
            await let_pass(every)
    await asyncio.wait(tasks)
    assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
    return served, refused


def test_who_waited_for_too_long_is_shed_when_a_slot_is_free() -> None:
    """The older ones are refused with Overloaded; the others are served."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=9, shed=OldestFirst())
        served, refused = await _queue_up(bulkhead, [Criticality.CRITICAL] * 5, 0.125)
        assert refused == dict.fromkeys([0, 1, 2], "shed_by_queue_time")
        assert served == [3, 4]

    run_virtual(main())


def test_a_standing_queue_serves_the_newest_first() -> None:
    """Whose caller most probably still waits."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=9, shed=EAGER)
        served, refused = await _queue_up(bulkhead, [Criticality.CRITICAL] * 5, 0.125)
        assert (served, sorted(refused)) == ([4, 3], [0, 1, 2])

    run_virtual(main())


def test_the_last_one_is_never_shed() -> None:
    """However long it waited: nobody would be served sooner for it."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=9.0, shed=OldestFirst())
        assert await _queue_up(bulkhead, [Criticality.CRITICAL], 5.0) == ([0], {})

    run_virtual(main())


def test_a_newcomer_to_a_bad_queue_is_refused_at_once_and_those_who_wait_are_served() -> None:
    """Controlled delay refuses the newest, who have not waited."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        shed = codel(0.25, interval=1.0, scale=0)
        guard = new_guard(Bulkhead(1, max_wait=9.0, max_waiting=99, shed=shed))
        waited: dict[str | None, list[float]] = {}

        async def one() -> None:
            came = loop.time()
            began: list[float] = []

            async def work() -> None:
                began.append(loop.time())
                await let_pass(0.125)

            result = await guard.aattempt(work)
            waited.setdefault(result.reason, []).append((began or [loop.time()])[0] - came)

        tasks = []
        for _ in range(200):
            tasks.append(loop.create_task(one()))
            await let_pass(0.0625)
        await asyncio.wait(tasks)
        assert set(waited) == {None, "shed_by_queue_time"}
        assert set(waited["shed_by_queue_time"]) == {0.0}
        assert max(waited[None][30:]) <= 0.5

    run_virtual(main())


def test_in_a_bad_queue_a_newcomer_takes_the_place_of_the_least_critical() -> None:
    """By criticality the newest of the lowest class goes for it; of its own class, it itself."""

    async def main() -> None:
        bulkhead = Bulkhead(
            1,
            max_wait=99.0,
            max_waiting=9,
            order="criticality",
            shed=codel(0.1, scale=0, interval=1),
        )
        guard = new_guard(bulkhead)

        def come(rank: Criticality) -> asyncio.Task[Any]:
            with criticality(rank):
                return asyncio.create_task(guard.aattempt(let_pass, 0.0))

        async with guard.hold():
            waiting = []
            for _ in range(3):
                waiting.append(come(Criticality.SHEDDABLE))
                await let_pass(0.2)
            await let_pass(2.0)
            high = come(Criticality.CRITICAL)
            await let_pass(0.0)
            late = await come(Criticality.SHEDDABLE)
            assert [task.done() for task in (*waiting, high)] == [False, False, True, False]
        results = [await task for task in (*waiting, high)]
        reasons = [None, None, "shed_by_queue_time", None]
        assert [result.reason for result in results] == reasons
        assert late.reason == "shed_by_queue_time"

    run_virtual(main())


def test_of_several_classes_only_the_lowest_is_turned_round() -> None:
    """The others are served in the order in which they came: they do not stand."""

    async def main() -> None:
        low, high = Criticality.SHEDDABLE, Criticality.CRITICAL
        shed = adaptive_lifo(0.5, patience=0.5, scale=0)
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=9, order="criticality", shed=shed)
        served, refused = await _queue_up(bulkhead, [low, low, high, low, high, low], 0.125)
        assert served == [2, 4, 5, 3]
        assert sorted(refused) == [0, 1]

    run_virtual(main())


def test_the_target_follows_the_guard() -> None:
    """Where calls take a second, half a second in the queue is no reason to go."""

    async def main() -> None:
        async def shed_of(seconds: float, scale: float = 2.0) -> int:
            shed = adaptive_lifo(scale=scale)
            guard = new_guard(Bulkhead(1, max_wait=99.0, max_waiting=99, shed=shed))
            for _ in range(5):
                await guard.acall(let_pass, seconds)
            calls = [guard.aattempt(let_pass, seconds) for _ in range(10)]
            return sum(not result.ok for result in await asyncio.gather(*calls))

        assert await shed_of(0.001) == 0
        assert await shed_of(0.2) == pytest.approx(await shed_of(1.0), abs=1)
        assert await shed_of(1.0, scale=0.0) > await shed_of(1.0)

    run_virtual(main())


def test_the_first_calls_are_no_measure() -> None:
    """The first to end are the shortest: nobody is shed until each slot has served three."""

    async def main() -> None:
        guard = new_guard(Bulkhead(4, max_wait=99.0, max_waiting=99, shed=adaptive_lifo()))
        quick = [guard.aattempt(let_pass, 0.001) for _ in range(3)]
        calls = [*quick, *(guard.aattempt(let_pass, 1.0) for _ in range(8))]
        assert all(result.ok for result in await asyncio.gather(*calls))

    run_virtual(main())


def test_taken_as_a_measure_the_first_calls_shed_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measure by whatever has ended, and a few quick calls make all others too late."""
    monkeypatch.setattr("seawall.policies.bulkhead.KNOWN_AFTER", 0)
    with pytest.raises(AssertionError):
        test_the_first_calls_are_no_measure()


def test_a_refusal_tells_why_and_when_to_come_again() -> None:
    """Overloaded names guard and policy; `retry_after` is what a typical call takes."""

    async def main() -> None:
        events: list[Any] = []
        unsubscribe = subscribe(events.append, CallRejected)
        guard = new_guard(Bulkhead(1, max_wait=9.0, max_waiting=9, shed=EAGER))
        await guard.acall(let_pass, 1.0)
        calls = [guard.acall(let_pass, 1.0) for _ in range(3)]
        *_, error = sorted(await asyncio.gather(*calls, return_exceptions=True), key=bool)
        unsubscribe()
        assert isinstance(error, Overloaded)
        assert (error.guard, error.policy) == (guard.name, "bulkhead")
        assert error.retry_after == pytest.approx(1.0, rel=0.1)
        assert "a queue that does not drain" in str(error)
        assert [event.reason for event in events] == ["shed_by_queue_time"]
        assert guard.snapshot()["policies"][0]["rejected"] == 1

    run_virtual(main())


@pytest.mark.parametrize("how", ["cancelled", "late", "served"])
def test_a_queue_that_was_empty_in_between_begins_anew(how: str) -> None:
    """However it was emptied: what was before is no standing queue."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        shed = adaptive_lifo(0.25, patience=1.0, scale=0)
        bulkhead = Bulkhead(1, max_wait=1.5 if how == "late" else 9.0, max_waiting=9, shed=shed)
        guard = new_guard(bulkhead)
        busy = loop.create_task(guard.acall(let_pass, 2.0 if how != "late" else 4.0))
        await let_pass(0.0)
        before = [loop.create_task(guard.aattempt(let_pass, 0.0)) for _ in range(3)]
        await let_pass(0.5)
        if how == "cancelled":
            for task in before:
                task.cancel()
        await asyncio.wait([*before, busy] if how == "served" else before)
        assert bulkhead.waiting == 0
        if how == "served":
            busy = loop.create_task(guard.acall(let_pass, 0.75))
            await let_pass(0.0)
        else:
            await let_pass(3.25 - loop.time() if how == "late" else 1.25 - loop.time())
        after = [loop.create_task(guard.aattempt(let_pass, 0.0)) for _ in range(2)]
        assert all([(await task).ok for task in after])
        await busy

    run_virtual(main())


# Nothing is lost


class Visit(NamedTuple):
    """A call: when it comes, how long it takes, how much it matters, and how it is disturbed."""

    at: float
    duration: float
    rank: Criticality
    cancel: float | None
    within: float | None


class Day(NamedTuple):
    """Calls of one bulkhead whose queue sheds."""

    limit: int
    order: str
    shed: QueueShed
    visits: list[Visit]
    updates: list[tuple[float, dict[str, Any]]]
    seed: int


SHEDS: list[QueueShed] = [
    EAGER,
    OldestFirst(),
    codel(0.25, interval=0.5, scale=0),
    codel(0.001, interval=0.25, scale=1),
    adaptive_lifo(0.25, patience=1.0, scale=0.5),
]
CHANGES = st.fixed_dictionaries(
    {}, optional={"limit": st.integers(1, 4), "shed": st.none() | st.sampled_from(SHEDS)}
).filter(bool)
QUARTERS = quarters(8)
DAYS = st.builds(
    Day,
    limit=st.integers(1, 3),
    order=st.sampled_from(["fifo", "lifo", "criticality"]),
    shed=st.sampled_from(SHEDS),
    visits=st.lists(
        st.builds(
            Visit,
            at=QUARTERS,
            duration=QUARTERS,
            rank=st.sampled_from(Criticality),
            cancel=st.none() | QUARTERS,
            within=st.none() | QUARTERS,
        ),
        min_size=2,
        max_size=16,
    ),
    updates=st.lists(st.tuples(QUARTERS, CHANGES), max_size=2),
    seed=SEEDS,
)


async def _visit(guard: Guard, script: Visit) -> None:
    within = 99.0 if script.within is None else script.within
    with criticality(script.rank), deadline(within):
        try:
            await guard.acall(let_pass, script.duration)
        except (Overloaded, BulkheadFull, DeadlineExceeded):
            pass


def _check_day(day: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        bulkhead = Bulkhead(
            day.limit, max_wait=float("inf"), max_waiting=8, order=day.order, shed=day.shed
        )
        guard = new_guard(bulkhead)
        tasks: list[asyncio.Task[None]] = []
        lost: list[float] = []

        def begin(script: Visit) -> None:
            task = loop.create_task(_visit(guard, script))
            tasks.append(task)
            if script.cancel is not None:
                loop.call_later(script.cancel, task.cancel)

        def look() -> None:
            if bulkhead.waiting and bulkhead.in_flight < bulkhead.limit:
                lost.append(loop.time())

        for script in day.visits:
            loop.call_later(script.at, begin, script)
        for at, changes in day.updates:
            loop.call_later(at, lambda changes=changes: bulkhead.update(**changes))
        for number in range(60):
            loop.call_later(number / 4 + 0.125, look)
        await let_pass(60.0)
        assert not lost
        assert all(task.done() for task in tasks)
        assert all(task.cancelled() or task.exception() is None for task in tasks)
        assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
        assert len(bulkhead.slots.free) == bulkhead.limit

    run_virtual(main(), seed=day.seed)


@given(DAYS)
@examples(200)
def test_shedding_loses_no_slot_and_no_wake_up(day: Day) -> None:
    """Nobody waits beside a free slot; at the end all slots are free and all calls are over."""
    _check_day(day)


def _forget_to_tell(slots: Slots) -> Any:
    while len(slots.queue) > 1 and slots.discipline is not None:
        now = slots.queue.oldest()[0].clock.now()
        if not slots.discipline.sheds(slots._longest_wait(now), now):
            break
        slots.queue.pop_lowest()
    return slots.queue.pop()


def _stop_after_shedding(slots: Slots) -> Any:
    now = slots.queue.oldest()[0].clock.now()
    if len(slots.queue) > 1 and slots.discipline and slots.discipline.sheds(9.0, now):
        slots.queue.pop_lowest().turn_away("shed")
        return None
    return slots.queue.pop()


@pytest.mark.parametrize("broken", [_forget_to_tell, _stop_after_shedding])
def test_without_its_care_shedding_loses_somebody(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shed and tell nobody, or shed instead of serving: the property is falsified."""
    monkeypatch.setattr(Slots, "_next", broken)
    assert falsified(_check_day, DAYS)


class Room(NamedTuple):
    """Calls that come one after another, and the slots freed in between."""

    shed: QueueShed
    ranks: list[Criticality]
    seed: int


ROOMS = st.builds(
    Room,
    shed=st.sampled_from(SHEDS[:3]),
    ranks=st.lists(st.sampled_from(Criticality), min_size=2, max_size=12),
    seed=SEEDS,
)


def _check_room(case: Room) -> None:
    """Watch each decision: nobody is shed while somebody less critical stays or is served."""
    broken: list[str] = []
    serve = Slots.serve

    def watched(slots: Slots) -> None:
        before = [waiter for lane in slots.queue._lanes.values() for waiter in lane]
        serve(slots)
        shed = [waiter.rank for waiter in before if waiter.state == "shed"]
        kept = [waiter.rank for waiter in before if waiter.state != "shed"]
        if shed and kept and max(shed) > min(kept):
            broken.append(f"shed {shed}, kept {kept}")

    async def main() -> None:
        bulkhead = Bulkhead(2, max_wait=99.0, max_waiting=9, order="criticality", shed=case.shed)
        guard = new_guard(bulkhead)
        tasks = []
        for rank in case.ranks:
            with criticality(rank):
                tasks.append(asyncio.create_task(guard.aattempt(let_pass, 1.0)))
            await let_pass(0.125)
        await asyncio.wait(tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slots, "serve", watched)
        run_virtual(main(), seed=case.seed)
    assert not broken


@given(ROOMS)
def test_nobody_is_shed_while_a_less_critical_one_waits_or_is_served(case: Room) -> None:
    """At one instant no lower class is kept while a higher one is shed."""
    _check_room(case)


def test_shedding_who_waited_longest_sheds_higher_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the longest waiting whatever it matters, and the property is falsified."""

    def longest_waiting(slots: Slots) -> Any:
        while len(slots.queue) > 1 and slots.discipline is not None:
            oldest = min(slots.queue.oldest(), key=lambda waiter: waiter.since)
            now = oldest.clock.now()
            if not slots.discipline.sheds(now - oldest.since, now):
                break
            slots.queue.remove(oldest)
            oldest.turn_away("shed")
        return slots.queue.pop()

    monkeypatch.setattr(Slots, "_next", longest_waiting)
    assert falsified(_check_room, ROOMS)


# Settings


def test_threads_are_shed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue for threads and tasks: whoever is shed wakes up and is told."""
    joined = threading.Semaphore(0)
    join = Slots.join

    def tell(slots: Slots, waiter: Any) -> None:
        join(slots, waiter)
        joined.release()

    monkeypatch.setattr(Slots, "join", tell)
    with virtual_time() as clock:
        bulkhead = Bulkhead(1, max_wait=float("inf"), max_waiting=9, shed=OldestFirst())
        guard = new_guard(bulkhead)
        results: list[str | None] = []

        def call() -> None:
            results.append(guard.attempt(lambda: None).reason)

        threads = [threading.Thread(target=call) for _ in range(3)]
        with guard.hold():
            for thread in threads:
                thread.start()
                assert joined.acquire(timeout=30)
            clock.advance(1.0)
        for thread in threads:
            thread.join(30)
        assert sorted(results, key=bool) == [None, "shed_by_queue_time", "shed_by_queue_time"]


def test_two_bulkheads_with_the_same_settings_share_nothing() -> None:
    """Settings are settings; the state is the queue's."""
    shed = codel()
    one, other = Bulkhead(1, max_wait=1.0, shed=shed), Bulkhead(1, max_wait=1.0, shed=shed)
    assert one.slots.discipline is not other.slots.discipline


def test_shedding_can_be_switched_at_run_time() -> None:
    """On, to other settings, and off."""
    bulkhead = Bulkhead(1, max_wait=1.0)
    assert bulkhead.slots.discipline is None
    bulkhead.update(shed=codel())
    state = bulkhead.slots.discipline
    assert state is not None
    bulkhead.update(limit=2)
    assert bulkhead.slots.discipline is state
    assert repr(bulkhead) == (
        "Bulkhead(2, max_wait=1, order='fifo', shed=codel(0.005, interval=0.1, scale=2))"
    )
    with pytest.raises(ValueError, match="only who waits can be shed"):
        bulkhead.update(max_wait=0)
    bulkhead.update(shed=None)
    assert (bulkhead.shed, bulkhead.slots.discipline) == (None, None)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Bulkhead(1, shed=codel()), ValueError, "write max_wait=... too"),
        (lambda: Bulkhead(1, max_wait=1, shed=codel), TypeError, "write codel"),
        (lambda: Bulkhead(1, max_wait=1, shed="codel"), TypeError, "write codel"),
    ],
)
def test_bad_settings_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """At once, and the message says what to write."""
    with pytest.raises(error, match=message):
        make()
