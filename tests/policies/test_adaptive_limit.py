"""AdaptiveLimit: what it learns from, who gets in, partitions, and what changes at run time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from seawall import (
    AdaptiveLimit,
    Bulkhead,
    BulkheadFull,
    Criticality,
    DeadlineExceeded,
    Guard,
    Overloaded,
    Retry,
    TimedOut,
    Timeout,
    criticality,
    deadline,
    subscribe,
)
from seawall.context import tier
from seawall.events import CallRejected, SettingsChanged
from seawall.limits import aimd, gradient2, vegas
from seawall.models.concurrency.limit import ConcurrencyLimit
from seawall.shedding import codel
from seawall.testing import ScriptedService, answer, fail, run_virtual, slow, virtual_time
from tests.support import let_pass, new_guard


class Told(ConcurrencyLimit):
    """A limit that stays as it is and writes down what it is told."""

    name = "told"

    def __init__(self, initial: int = 2, minimum: int = 1, maximum: int = 1000) -> None:
        self.told: list[tuple[float, int, bool]] = []
        super().__init__(initial, minimum, maximum)

    def on_sample(self, now: float, rtt: float, in_flight: int, dropped: bool, rng: Any) -> None:  # noqa: FBT001
        assert 0 <= rng() < 1
        self.told.append((rtt, in_flight, dropped))


def _warm(*arguments: Any, **settings: Any) -> AdaptiveLimit:
    """Return a limit that has seen its first few calls already: each window counts."""
    policy = AdaptiveLimit(*arguments, **settings)
    policy.windows.typical = 0.0
    return policy


def _told(policy: AdaptiveLimit) -> list[tuple[float, int, bool]]:
    assert isinstance(policy.model, Told)
    return policy.model.told


async def _all(*calls: Any) -> list[Any]:
    """Run the calls at once, begun in this order; errors are results."""
    return await asyncio.gather(*calls, return_exceptions=True)


# Who gets in


def test_calls_beyond_the_limit_are_refused_at_once() -> None:
    """With `max_wait=0`, the default, nobody waits; the refusal is Overloaded."""

    async def main() -> None:
        policy = AdaptiveLimit(Told())
        guard = new_guard(policy)
        service = ScriptedService(slow(1.0, "served"))
        results = await _all(*[guard.acall(service.acall) for _ in range(4)])
        assert results[:2] == ["served", "served"]
        assert [type(result) for result in results[2:]] == [Overloaded] * 2
        assert service.calls == service.peak == 2
        refusal = results[2]
        assert (refusal.guard, refusal.policy) == (guard.name, "adaptive_limit")
        assert str(refusal).endswith("no free slot of 2: all are in use")
        assert refusal.__context__ is None
        assert refusal.retry_after is None
        assert guard.snapshot()["policies"][0]["rejected"] == 2

    run_virtual(main())


def test_a_refusal_tells_what_calls_take() -> None:
    """`retry_after` is what the calls of the last window took."""
    with virtual_time():
        policy = AdaptiveLimit(Told(1))
        guard = new_guard(policy)
        service = ScriptedService(slow(2.0))
        for _ in range(10):
            guard.call(service.call)
        with guard.hold(), pytest.raises(Overloaded) as caught:
            guard.call(service.call)
        assert caught.value.retry_after == 2.0


def test_who_waits_is_served_in_order_of_criticality() -> None:
    """The default order: who matters most is served first."""

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        guard = new_guard(AdaptiveLimit(Told(1), max_wait=9.0, max_waiting=5))
        order: list[str] = []

        async def one(level: Criticality) -> None:
            with criticality(level):
                await guard.acall(_note, order, level.name)

        async with guard.hold():
            tasks = [loop.create_task(one(level)) for level in Criticality]
            await let_pass(1.0)
        await _all(*tasks)
        return order

    async def _note(order: list[str], name: str) -> None:
        order.append(name)
        await let_pass(1.0)

    names = ["CRITICAL_PLUS", "CRITICAL", "SHEDDABLE_PLUS", "SHEDDABLE"]
    assert run_virtual(main()) == names


def test_the_ways_not_to_get_a_slot() -> None:
    """Too long, no room, and a deadline: each says so."""

    async def main() -> None:
        policy = AdaptiveLimit(Told(1), max_wait=1.5, max_waiting=1)
        guard = new_guard(policy)
        async with guard.hold():
            long = asyncio.create_task(guard.acall(let_pass, 1.0))
            await let_pass(0.5)
            assert (policy.in_flight, policy.waiting) == (1, 1)
            assert guard.snapshot()["policies"][0]["queue_wait"] == 0.5
            with pytest.raises(Overloaded, match="and no room to wait"):
                await guard.acall(let_pass, 1.0)
            with pytest.raises(Overloaded, match=r"waited 1\.5 s"):
                await long
            with deadline(1.0), pytest.raises(DeadlineExceeded):
                await guard.acall(let_pass, 1.0)
        assert (policy.in_flight, policy.waiting) == (0, 0)

    run_virtual(main())


def test_a_plain_call_waits_too() -> None:
    """The sync runner blocks its thread for as long, on its clock."""
    with virtual_time() as clock:
        guard = new_guard(AdaptiveLimit(Told(1), max_wait=1.5))
        with guard.hold():
            with pytest.raises(Overloaded):
                guard.call(lambda: None)
            assert clock.now() == 1.5


def test_in_shadow_it_only_counts() -> None:
    """Calls beyond the limit run, and are no samples."""
    with virtual_time():
        policy = AdaptiveLimit(Told(1), mode="shadow", max_wait=1.0)
        guard = new_guard(policy)
        with guard.hold():
            assert guard.call(lambda: "in") == "in"
            assert policy.in_flight == 1
        shown = guard.snapshot()["policies"][0]
        assert (shown["would_reject"], shown["rejected"], shown["in_flight"]) == (1, 0, 0)
        assert len(policy.windows.samples) == 1


def test_a_queue_that_stands_is_shed_from() -> None:
    """`shed=codel(...)` as for a bulkhead: the calls that matter least go."""

    async def main() -> list[str]:
        guard = new_guard(
            AdaptiveLimit(Told(1), max_wait=60.0, max_waiting=100, shed=codel(0.1, interval=0.5))
        )
        results = await _all(*[guard.acall(let_pass, 0.2) for _ in range(30)])
        return [result.reason for result in results if isinstance(result, Overloaded)]

    assert set(run_virtual(main())) == {"shed_by_queue_time"}


# What it learns from


def _learns(*policies: Any) -> Callable[[Callable[[], Any], int], AdaptiveLimit]:
    """Return what makes calls of a guard, one after another, whatever comes of them."""
    policy = next(policy for policy in policies if isinstance(policy, AdaptiveLimit))
    guard = new_guard(*policies)

    def make(function: Callable[[], Any], times: int) -> AdaptiveLimit:
        for _ in range(times):
            guard.attempt(function)
        return policy

    return make


def test_a_window_tells_the_mean_time_and_the_use() -> None:
    """Ten calls one after another: their mean, and one in flight."""
    with virtual_time() as clock:
        times = iter([1.5, 2.5] * 10)
        make = _learns(_warm(Told()))
        policy = make(lambda: clock.sleep(next(times)), 9)
        assert _told(policy) == []
        make(lambda: clock.sleep(next(times)), 1)
        assert _told(policy) == [(2.0, 1, False)]


def test_if_somebody_was_refused_all_of_the_limit_was_used() -> None:
    """A crowd may be gone by the end of the window."""
    with virtual_time() as clock:
        policy = _warm(Told(5))
        guard = new_guard(policy)
        held = [guard.hold() for _ in range(5)]
        for hold in held:
            hold.__enter__()
        assert guard.attempt(lambda: None).reason == "overloaded"
        clock.sleep(2.0)
        for hold in held:
            hold.__exit__(None, None, None)
        for _ in range(5):
            guard.call(clock.sleep, 2.0)
        assert _told(policy) == [(2.0, 5, False)]
        for _ in range(10):
            guard.call(clock.sleep, 2.0)
        assert _told(policy)[1:] == [(2.0, 1, False)]


def test_time_in_the_queue_does_not_count() -> None:
    """What a call took begins when it has its slot."""

    async def main() -> AdaptiveLimit:
        policy = _warm(Told(1), max_wait=60.0, max_waiting=20)
        guard = new_guard(policy)
        await _all(*[guard.acall(let_pass, 1.0) for _ in range(10)])
        return policy

    assert _told(run_virtual(main())) == [(1.0, 1, False)]


@pytest.mark.parametrize("partitions", [None, {"live": 0.5}])
def test_what_fails_tells_nothing(partitions: dict[str, float] | None) -> None:
    """An error at once is not a fast answer, and a refusal further in was no call at all."""
    with virtual_time() as clock:
        full = Bulkhead(1)
        policy = _warm(Told(), partitions=partitions)
        guard, inner = new_guard(policy, full), new_guard(full)
        for _ in range(20):
            guard.attempt(ScriptedService(fail(ValueError)).call)
        with inner.hold():
            for _ in range(20):
                with pytest.raises(BulkheadFull):
                    guard.call(clock.sleep, 1.0)
        assert policy.windows.samples == policy.windows.drops == []
        assert policy.in_flight == 0
        for _ in range(10):
            guard.call(clock.sleep, 1.0)
        assert _told(policy) == [(1.0, 1, False)]


def test_a_cancelled_call_tells_nothing() -> None:
    """It ran for as long as somebody wanted it."""

    async def main() -> AdaptiveLimit:
        policy = AdaptiveLimit(Told())
        guard = new_guard(policy)
        for _ in range(20):
            task = asyncio.create_task(guard.acall(let_pass, 9.0))
            await let_pass(1.0)
            task.cancel()
            await asyncio.wait([task])
        assert policy.in_flight == 0
        return policy

    policy = run_virtual(main())
    assert policy.windows.samples == policy.windows.drops == []


@pytest.mark.parametrize("order", [1, -1])
def test_calls_that_run_out_of_time_are_dropped(order: int) -> None:
    """Whether the timeout stands inside the limit or around it."""

    async def main() -> AdaptiveLimit:
        policy = _warm(Told())
        guard = new_guard(*[policy, Timeout(2.0)][::order])
        for _ in range(10):
            with pytest.raises(TimedOut):
                await guard.acall(let_pass, 9.0)
        return policy

    assert _told(run_virtual(main())) == [(0.0, 1, True)]


@pytest.mark.parametrize("error", [TimeoutError, TimedOut])
def test_a_client_that_times_out_by_itself_tells_the_same(error: type[Exception]) -> None:
    """Any TimeoutError of the function means that the answer did not come in time."""
    with virtual_time():
        policy = _learns(_warm(Told()))(ScriptedService(fail(error)).call, 10)
        assert _told(policy) == [(0.0, 1, True)]


def test_a_refusal_for_lack_of_time_is_no_drop() -> None:
    """A guard inside refused, and asked nothing of anybody: it is a TimeoutError all the same."""
    with virtual_time():
        policy = _learns(_warm(Told()))(ScriptedService(fail(DeadlineExceeded)).call, 10)
        assert policy.windows.drops == []


def test_is_drop_tells_what_else_is_one() -> None:
    """By the error or by the value, such as a status 503."""
    with virtual_time():

        def is_drop(error: Exception | None, value: object) -> bool:
            return isinstance(error, ConnectionError) or value == 503

        make = _learns(_warm(Told(), is_drop=is_drop))
        make(ScriptedService(fail(ConnectionError)).call, 5)
        make(ScriptedService(fail(ValueError)).call, 5)
        policy = make(ScriptedService(answer(503)).call, 4)
        assert (len(policy.windows.drops), policy.windows.samples) == (9, [])
        make(ScriptedService(answer(200)).call, 1)
        assert _told(policy) == [(0.0, 1, True)]


def test_an_is_drop_that_fails_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the call counts as not dropped."""
    with virtual_time():
        make = _learns(AdaptiveLimit(Told(), is_drop=lambda _e, _v: 1 / 0))
        policy = make(ScriptedService(answer(1)).call, 1)
        assert (len(policy.windows.samples), policy.windows.drops) == (1, [])
        assert "is_drop of guard" in caplog.text


def test_a_block_is_a_call_too() -> None:
    """`hold()` and generators count with the time from their beginning to their end."""
    with virtual_time() as clock:
        policy = _warm(Told(), is_drop=lambda _e, _v: True)
        guard = new_guard(policy)
        for _ in range(10):
            with guard.hold():
                clock.sleep(3.0)
        assert _told(policy) == [(3.0, 1, False)]


def test_a_slot_is_held_until_the_work_really_stops() -> None:
    """A thread whose caller gave up keeps its slot; that it ran out of time counts as a drop."""
    with virtual_time():
        policy = AdaptiveLimit(Told())
        guard = new_guard(policy, Timeout(1.0, sync="thread"))
        go = threading.Event()
        begun = threading.Event()
        done = threading.Event()

        def function() -> None:
            begun.set()
            assert go.wait(30)

        give_back = policy.slots.give_back

        def told(slot: Any) -> None:
            give_back(slot)
            done.set()

        policy.slots.give_back = told  # type: ignore[method-assign]
        with pytest.raises(TimedOut):
            guard.call(function)
        assert begun.wait(30)
        assert policy.in_flight == 1
        go.set()
        assert done.wait(30)
        assert policy.in_flight == 0


def test_a_retry_inside_is_one_call() -> None:
    """The slot is held over all attempts, and so is the time."""
    with virtual_time() as clock:
        policy = AdaptiveLimit(Told())
        guard = new_guard(policy, Retry(on=KeyError, attempts=2, backoff=0))
        guard.call(ScriptedService(fail(KeyError), slow(2.0), clock=clock).call)
        assert policy.windows.samples == [2.0]


def test_the_limit_moves_and_the_slots_with_it() -> None:
    """Whoever waits is let in when the limit grows; when it shrinks nobody is interrupted."""

    async def main() -> None:
        policy = _warm(aimd(slow_after=1.5, initial=2), max_wait=60.0, max_waiting=50)
        guard = new_guard(policy)
        service = ScriptedService(slow(1.0, times=20), slow(2.0))
        await _all(*[guard.acall(service.acall) for _ in range(20)])
        assert policy.limit == 4
        await _all(*[guard.acall(service.acall) for _ in range(40)])
        assert policy.limit == 6  # it had doubled to 8 when calls were seen to take 2 s
        assert policy.in_flight == policy.waiting == 0

    run_virtual(main())


# Partitions


def test_each_class_has_its_share() -> None:
    """Batch jobs cannot take what is reserved for others; the tier of the context is the class."""
    with virtual_time():
        policy = AdaptiveLimit(Told(10), partitions={"live": 0.5, "batch": 0.2})
        guard = new_guard(policy)
        held = []

        def enter(name: str) -> bool:
            hold = guard.hold()
            with tier(name):
                try:
                    hold.__enter__()
                except Overloaded:
                    return False
            held.append(hold)
            return True

        assert [enter("batch") for _ in range(6)] == [True] * 5 + [False]
        assert not enter("unheard of")
        assert [enter("live") for _ in range(6)] == [True] * 5 + [False]
        shown = guard.snapshot()["policies"][0]["partitions"]
        assert shown == {
            "live": {"share": 0.5, "reserved": 5, "in_flight": 5, "rejected": 1},
            "batch": {"share": 0.2, "reserved": 2, "in_flight": 5, "rejected": 1},
            "(others)": {"share": 0.0, "reserved": 0, "in_flight": 0, "rejected": 1},
        }
        for hold in held:
            hold.__exit__(None, None, None)
        assert policy.in_flight == policy.partitions.total == 0


def test_the_class_may_come_from_the_arguments() -> None:
    """`partition` is called with what the function is called with."""

    async def main() -> list[Any]:
        policy = AdaptiveLimit(
            Told(2), partitions={"live": 0.5, "batch": 0.5}, partition=lambda kind, **_: kind
        )
        guard = new_guard(policy)

        @guard
        async def work(kind: str, *, seconds: float) -> str:
            await let_pass(seconds)
            return kind

        calls = [work(kind, seconds=1.0) for kind in ("batch", "batch", "live", "live")]
        return await _all(*calls)

    first, second, third, fourth = run_virtual(main())
    assert (first, third) == ("batch", "live")
    assert str(second).endswith("no free slot of 2: those for 'batch' are in use")
    assert str(fourth).endswith("no free slot of 2: those for 'live' are in use")


def test_a_class_that_waits_does_not_hold_up_another() -> None:
    """Who may have the free slot gets it, though others came earlier and matter more."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        policy = AdaptiveLimit(
            Told(2), max_wait=60.0, max_waiting=9, partitions={"live": 0.5, "batch": 0.5}
        )
        guard = new_guard(policy)

        async def one(name: str, level: Criticality) -> float:
            with tier(name), criticality(level):
                await guard.acall(let_pass, 1.0)
            return loop.time()

        batch = [one("batch", Criticality.CRITICAL_PLUS) for _ in range(3)]
        live = [one("live", Criticality.SHEDDABLE) for _ in range(2)]
        assert await _all(*batch, *live) == [1.0, 2.0, 3.0, 1.0, 2.0]
        assert policy.in_flight == policy.partitions.total == 0

    run_virtual(main())


def test_without_slots_for_a_class_nothing_is_said_of_the_whole() -> None:
    """A class at its share is no sign that the limit is in full use."""
    with virtual_time() as clock:
        policy = _warm(Told(10), partitions={"live": 0.9, "batch": 0.1})
        guard = new_guard(policy)
        with tier("batch"), guard.hold():
            assert guard.attempt(lambda: None).reason == "overloaded"
        with tier("live"):
            for _ in range(9):
                guard.call(clock.sleep, 1.0)
        assert [in_flight for _, in_flight, _ in _told(policy)] == [1]


# Settings


def test_settings_change_at_run_time() -> None:
    """Bounds, waiting and mode; what was learnt is kept."""
    with virtual_time() as clock:
        policy = _warm(partitions={"a": 0.5})
        guard = new_guard(policy)
        changes: list[SettingsChanged] = []
        stop = subscribe(changes.append, SettingsChanged)
        for _ in range(10):
            guard.call(clock.sleep, 1.0)
        policy.update(maximum=8, max_wait=2.0, mode="shadow", window=1.0, partitions={"a": 0.25})
        stop()
        assert (policy.limit, policy.max_wait, policy.mode) == (8, 2.0, "shadow")
        assert policy.windows.shortest == 1.0
        assert policy.partitions.reserved["a"] == 2
        assert policy.model.baseline == 1.0
        policy.update(minimum=30, maximum=30, max_waiting=3)
        assert (policy.limit, policy.slots.queue.limit) == (30, 3)
        assert len(changes) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"minimum": 2000}, "at most the maximum"),
        ({"max_wait": -1}, "max_wait=-1"),
        ({"limit": 5}, "it takes minimum, maximum"),
        ({"partitions": {"b": 0.5}}, "same classes"),
        ({"partitions": None}, "same classes"),
        ({"maximum": 5, "mode": "loud"}, "mode='loud'"),
    ],
)
def test_bad_changes_raise_and_change_nothing(changes: dict[str, Any], message: str) -> None:
    """All or nothing."""
    policy = AdaptiveLimit(partitions={"a": 0.5})
    before = repr(policy), policy.limit, policy.mode
    with pytest.raises((TypeError, ValueError), match=message):
        policy.update(**changes)
    assert (repr(policy), policy.limit, policy.mode) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 20}, r"write vegas\(\), gradient2\(\) or aimd"),
        ({"limit": vegas}, r"write vegas\(\)"),
        ({"window": 0}, "window=0"),
        ({"max_wait": "long"}, "max_wait='long'"),
        ({"max_waiting": 0}, "max_waiting=0"),
        ({"order": "random"}, "order='random'"),
        ({"partitions": {"a": 2}}, "up to 1"),
        ({"partition": len}, "write partitions="),
        ({"partition": "a", "partitions": {"a": 0.5}}, "partition='a'"),
        ({"is_drop": OSError("x")}, "is_drop="),
        ({"shed": codel()}, "write max_wait"),
        ({"mode": "loud"}, "mode='loud'"),
    ],
)
def test_bad_arguments_raise_at_once(arguments: dict[str, Any], message: str) -> None:
    """And the message tells what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        AdaptiveLimit(**arguments)


def test_each_policy_learns_for_itself() -> None:
    """One description in two policies; one policy in two guards shares what it learns."""
    with virtual_time() as clock:
        described = vegas()
        first, second = _warm(described), _warm(described)
        one, two = new_guard(first), new_guard(first)
        for guard in (one, two) * 5:
            guard.call(clock.sleep, 1.0)
        assert first.model.baseline == 1.0
        assert second.model.baseline is described.baseline is None


def test_repr_and_snapshot() -> None:
    """What it is, and what it knows."""
    policy = AdaptiveLimit(gradient2(), partitions={"live": 0.5})
    assert repr(policy) == (
        "AdaptiveLimit(gradient2(initial=20, minimum=20, maximum=200), max_wait=0,"
        " order='criticality', partitions={'live': 0.5})"
    )
    guard = Guard("shown", AdaptiveLimit(), rng=Random(1))
    guard.close()
    assert guard.snapshot()["policies"][0] == {
        "policy": "adaptive_limit",
        "mode": "enforce",
        "rejected": 0,
        "would_reject": 0,
        "algorithm": "vegas",
        "limit": 20,
        "baseline": None,
        "in_flight": 0,
        "waiting": 0,
        "recovered": 0,
        "queue_wait": 0.0,
    }


def test_refusals_are_events() -> None:
    """Each tells the policy and the reason."""
    with virtual_time():
        guard = new_guard(AdaptiveLimit(Told(1)))
        seen: list[CallRejected] = []
        stop = subscribe(seen.append, CallRejected)
        with guard.hold():
            guard.attempt(lambda: None)
        stop()
        assert [(event.policy, event.reason) for event in seen] == [
            ("adaptive_limit", "overloaded")
        ]


def test_a_child_process_has_all_slots() -> None:
    """Slots of threads that did not come along are free there, of every class."""
    policy = AdaptiveLimit(Told(2), partitions={"a": 0.5})
    guard = new_guard(policy)
    with tier("a"), guard.hold():
        policy._after_fork()
        policy.slots._after_fork()
        assert (policy.in_flight, policy.partitions.total) == (0, 0)
    assert (policy.in_flight, policy.partitions.total) == (0, 0)
