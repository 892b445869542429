"""Shed: rules inside a guard, in both kinds of calls, and what changes at run time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from typing import Any

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
    RateLimit,
    Retry,
    Shed,
    ThreadBulkhead,
    Timeout,
    criticality,
    deadline,
    subscribe,
)
from seawall.context import tier
from seawall.events import CallRejected
from seawall.resources import Channel, IoPool, Pool
from seawall.runtime.policy import bindings_of
from seawall.runtime.stats import Stats
from seawall.shedding import (
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    by_queue,
    by_tier,
)
from seawall.testing import ScriptedService, answer, run_virtual, slow, virtual_time
from tests.support import SEEDS, falsified, let_pass, new_guard


class Load:
    """A load signal that stands where it is put."""

    def __init__(self, level: float = 0.0) -> None:
        self.level = level
        self.read = 0

    def __call__(self) -> float:
        self.read += 1
        return self.level


def _admits(guard: Guard, *args: Any) -> bool:
    return guard.attempt(lambda *_: "served", *args).ok


def _gate(guard: Guard) -> dict[str, Any]:
    shown: dict[str, Any] = guard.snapshot()["policies"][0]
    return shown


# Refusals


def test_a_call_that_is_shed_is_never_begun() -> None:
    """It raises Overloaded, which names guard, policy and rule; a new one each time."""
    load = Load(0.85)
    guard = new_guard(Shed(by_criticality(0.5), load=load))
    service = ScriptedService(answer("served"))
    errors = []
    for _ in range(2):
        with pytest.raises(Overloaded) as caught:
            guard.call(service.call)
        errors.append(caught.value)
    assert service.calls == 0
    assert errors[0] is not errors[1]
    assert (errors[0].guard, errors[0].policy) == (guard.name, "shed")
    assert errors[0].reason == "shed_by_criticality"
    assert str(errors[0]) == f"guard {guard.name!r}: shed by criticality"
    assert Overloaded.reason == "overloaded"
    load.level = 0.5
    assert guard.call(service.call) == "served"
    assert guard.snapshot()["rejected"] == 2


def test_async_calls_are_shed_by_the_same_rule() -> None:
    """One gate for both kinds of calls, and for a block that is held."""

    async def main() -> None:
        guard = new_guard(Shed(by_criticality(), load=Load(2.0)))
        with pytest.raises(Overloaded):
            await guard.acall(let_pass, 1.0)
        with pytest.raises(Overloaded):
            async with guard.hold():
                pass
        with pytest.raises(Overloaded), guard.hold():
            pass
        assert asyncio.get_running_loop().time() == 0.0

    run_virtual(main())


def test_the_most_critical_go_last() -> None:
    """At a load between the bars, only the classes above are admitted."""
    load = Load()
    guard = new_guard(Shed(by_criticality(), load=load))
    admitted = {}
    for load.level in (0.8, 0.83, 0.87, 0.92, 0.97):
        admitted[load.level] = []
        for rank in Criticality:
            with criticality(rank):
                admitted[load.level] += [int(rank)] * _admits(guard)
    assert list(admitted.values()) == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3], [3]]


def test_critical_plus_is_served_while_a_batch_takes_all_the_rest() -> None:
    """At a load of 1, from a thread of low priority, the most critical are still let in."""
    guard = new_guard(Shed(by_criticality(), load=Load(1.0)))
    lowest = new_guard(Shed(by_criticality(keep=None), load=Load(1.0)))
    with criticality(Criticality.CRITICAL_PLUS):
        assert _admits(guard)
        assert not _admits(lowest)
    assert not _admits(guard)


def test_a_load_that_no_rule_reads_is_refused() -> None:
    """A fraction without `start` goes by no load: whoever gives one expects something else."""
    with pytest.raises(TypeError, match=r"by_fraction\(0.1, start=0.8\)"):
        Shed(by_fraction(0.5), load=Load())
    guard = new_guard(Shed(by_fraction(1.0, start=0.8), load=(load := Load(0.8))))
    assert _admits(guard)
    load.level = 0.9
    assert not _admits(guard)


def test_a_refusal_computes_no_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expensive to know is read now and then: a thousand refusals read it a few times."""
    reads = []
    quantile = Stats.quantile

    def counted(stats: Stats, p: float, now: float) -> float | None:
        reads.append(now)
        return quantile(stats, p, now)

    monkeypatch.setattr(Stats, "quantile", counted)
    with virtual_time() as clock:
        bulkhead = Bulkhead(1)
        full = new_guard(bulkhead)
        late = new_guard(Shed(by_deadline(reserve=5.0)))
        with full.hold(), deadline(1.0):
            for _ in range(1000):
                assert not _admits(full)
                assert not _admits(late)
                clock.advance(0.001 / 2)
    assert 1 <= len(reads) <= 8


# Rules that read the context, the arguments, or the guard


def test_tiers_come_from_the_context() -> None:
    """`with tier("free")` is all it takes."""
    guard = new_guard(Shed(by_tier(), load=Load(0.8)))
    with tier("free"):
        assert not _admits(guard)
    assert _admits(guard)
    with tier("premium"):
        assert _admits(guard)


def test_costs_and_keys_come_from_the_arguments() -> None:
    """Functions of the call's own arguments, positional and by keyword."""
    guard = new_guard(
        Shed(
            by_cost(lambda rows, **_: rows, most=1000, start=0.5),
            by_chance(0.5, key=lambda _rows, user="": user),
            load=(load := Load(0.8)),
        )
    )
    for number in range(300):  # until the classes are known
        guard.attempt(lambda *_, **__: None, 1, user=f"learn-{number}")

    @guard
    def query(rows: int, *, user: str = "") -> tuple[int, str]:
        return rows, user

    with pytest.raises(Overloaded) as caught:
        query(900, user="ann")
    assert caught.value.reason == "shed_by_cost"
    answers = {user: guard.attempt(query.__wrapped__, 1, user=user).ok for user in "abcdefghij"}
    assert len(set(answers.values())) == 2
    assert answers == {user: guard.attempt(query.__wrapped__, 1, user=user).ok for user in answers}
    load.level = 0.5
    assert query(10**9) == (10**9, "")


def test_chance_is_the_guards_own() -> None:
    """The same `rng` sheds the same calls."""

    def run(seed: int) -> list[bool]:
        guard = new_guard(Shed(by_fraction(0.5)), rng=Random(seed))
        return [_admits(guard) for _ in range(100)]

    assert run(1) == run(1) != run(2)


def test_a_share_learns_which_classes_there_are() -> None:
    """The first 16 calls are taken for a mix of all four classes; from then on the mix is known."""
    with virtual_time() as clock:
        guard = new_guard(Shed(by_fraction(0.5)), rng=Random(1))
        admitted = []
        for _ in range(116):
            admitted.append(_admits(guard))
            clock.advance(0.01)
        assert all(admitted[:16])
        assert 35 <= sum(admitted[16:]) <= 65


def test_a_long_queue_sheds_newcomers() -> None:
    """`of=` a bulkhead: its queue's length, before it is full."""

    async def main() -> None:
        bulkhead = Bulkhead(1, max_wait=9.0, max_waiting=10)
        guard = new_guard(Shed(by_queue(2, of=bulkhead)), bulkhead)
        results = await asyncio.gather(*(guard.aattempt(let_pass, 1.0) for _ in range(5)))
        assert [result.reason for result in results] == [None] * 3 + ["shed_by_queue"] * 2

    run_virtual(main())


def test_response_time_over_the_sla_sheds_until_it_is_better() -> None:
    """Waiting further in counts, which the time of the attempts alone would not show."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        shed = Shed(by_latency(0.5))
        guard = new_guard(shed, Bulkhead(1, max_wait=30.0, max_waiting=100), rng=Random(5))

        async def come(calls: int, every: float) -> float:
            tasks = []
            for _ in range(calls):
                tasks.append(loop.create_task(guard.aattempt(let_pass, 0.1)))
                await let_pass(every)
            results = await asyncio.gather(*tasks)
            return sum(result.reason == "shed_by_latency" for result in results) / calls

        assert await come(50, 0.2) == 0
        assert await come(400, 0.05) > 0.3
        await let_pass(10.0)
        await come(100, 0.2)
        assert await come(50, 0.2) == 0
        assert guard.snapshot()["p95"] < 0.2

    run_virtual(main())


def test_calls_that_end_badly_count_where_they_took_too_long() -> None:
    """A quick error says nothing of latency; a call that gave up after long does."""
    with virtual_time() as clock:

        def run(seconds: float, error: type[BaseException]) -> bool:
            guard = new_guard(Shed(by_latency(0.5)), rng=Random(1))

            def function() -> None:
                clock.advance(seconds)
                raise error

            for _ in range(100):
                guard.attempt(function)
            return bool(_gate(guard)["rejected"])

        assert not run(0.1, KeyError)
        assert run(1.0, KeyError)


@pytest.mark.parametrize("mode", ["off", "shadow"])
def test_response_times_that_nobody_asks_for_are_not_kept(mode: Any) -> None:
    """Off it notes none; where another rule decides before, at most a few thousand."""
    shed = Shed(by_fraction(1.0), by_latency(0.5), mode=mode)
    guard = new_guard(shed)
    for _ in range(10_000):
        guard.call(int)
    (gate,) = bindings_of(shed)
    assert len(gate._times.samples) <= (0 if mode == "off" else 4096)  # type: ignore[attr-defined]


def test_what_cannot_be_done_in_time_is_refused() -> None:
    """DeadlineExceeded, not Overloaded: there is no point in trying again."""
    with virtual_time() as clock:
        guard = new_guard(Shed(by_deadline(reserve=0.1)))
        service = ScriptedService(slow(2.0, "served"), clock=clock)
        assert guard.call(service.call) == "served"
        clock.advance(1.0)
        with deadline(1.5), pytest.raises(DeadlineExceeded, match="too little time") as caught:
            guard.call(service.call)
        assert (caught.value.policy, caught.value.reason) == ("shed", "deadline_exceeded")
        with deadline(2.5):
            assert guard.call(service.call) == "served"
        assert guard.call(service.call) == "served"


# Composition


def test_any_rule_of_several_sheds() -> None:
    """Rules of one Shed and of several add up; the first that sheds names the reason."""
    load, other = Load(0.0), Load(0.0)
    guard = new_guard(
        Shed(by_criticality(), by_tier(), load=load), Shed(by_criticality(0.1), load=other)
    )
    assert _admits(guard)
    reasons = []
    for load.level, other.level in ((0.91, 0.0), (0.85, 0.0), (0.0, 0.6)):
        with tier("free"):
            reasons.append(guard.attempt(lambda: None).reason)
    assert reasons == ["shed_by_criticality", "shed_by_tier", "shed_by_criticality"]
    assert _gate(guard)["shed_by"] == {"criticality": 1, "tier": 1}


def test_a_call_refused_further_in_is_no_load_of_the_shedder() -> None:
    """What the shedder admitted and a bulkhead refused is the bulkhead's refusal."""
    bulkhead = Bulkhead(1)
    guard = new_guard(Shed(by_latency(1.0)), bulkhead)
    other = new_guard(bulkhead)
    with other.hold(), pytest.raises(BulkheadFull):
        guard.call(lambda: None)
    assert _gate(guard)["rejected"] == 0


def test_a_shed_call_is_not_retried() -> None:
    """A retry around it would only add load."""
    guard = new_guard(Retry(on=ConnectionError), Shed(by_criticality(), load=Load(2.0)))
    with virtual_time():
        assert guard.attempt(lambda: None).reason == "shed_by_criticality"
    assert guard.snapshot()["policies"][1]["rejected"] == 1


def test_alone_it_is_a_decorator() -> None:
    """As any policy is."""
    load = Load()

    @Shed(by_criticality(), load=load)
    def function(number: int) -> int:
        return number

    assert function(3) == 3
    load.level = 1.0
    with pytest.raises(Overloaded):
        function(3)


CALLS = st.lists(
    st.tuples(
        st.floats(0.0, 1.3),
        st.sampled_from(Criticality),
        st.sampled_from(Criticality),
        st.integers(1, 100),
        st.integers(1, 100),
    ),
    min_size=1,
    max_size=40,
)
STACKS: list[Callable[[Load], Shed]] = [
    lambda load: Shed(by_criticality(0.4), load=load),
    lambda load: Shed(by_chance(0.4), by_criticality(0.6), load=load),
    lambda load: Shed(by_cost(lambda cost: cost, most=100, start=0.4), by_chance(0.5), load=load),
    lambda load: Shed(by_fraction(0.5), by_criticality(), load=load),
]
STREAMS = st.tuples(st.integers(0, len(STACKS) - 1), CALLS, SEEDS)


def _check_stream(case: Any) -> None:
    stack, calls, seed = case
    load = Load()
    with virtual_time() as clock:
        guard = new_guard(STACKS[stack](load), rng=Random(seed))
        for load.level, one, other, cost, other_cost in calls:
            lower, higher = sorted((one, other))
            admitted = {}
            for rank, price in ((lower, cost), (higher, other_cost)):
                with criticality(rank):
                    admitted[rank] = _admits(guard, price)
            assert lower == higher or admitted[higher] or not admitted[lower]
            clock.advance(1.0)


@given(STREAMS)
def test_through_a_guard_no_lower_class_is_admitted_while_a_higher_one_is_shed(case: Any) -> None:
    """Also by several rules together, after any history."""
    _check_stream(case)


def test_without_classes_a_lower_one_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the criticality of every call for the same, and the property is falsified."""
    monkeypatch.setattr("seawall.policies.shed.current_criticality", lambda: Criticality.CRITICAL)
    assert falsified(_check_stream, STREAMS)


# Modes, telemetry, settings


def test_in_shadow_it_only_counts_and_off_it_does_not_even_look() -> None:
    """A shadow tells what would be shed; off, the rules and the signal are left alone."""
    load = Load(2.0)
    shed = Shed(by_criticality(), load=load, mode="shadow")
    guard = new_guard(shed)
    events: list[Any] = []
    unsubscribe = subscribe(events.append, CallRejected)
    assert _admits(guard)
    assert (_gate(guard)["rejected"], _gate(guard)["would_reject"]) == (0, 1)
    shed.update(mode="enforce")
    assert not _admits(guard)
    shed.update(mode="off")
    read = load.read
    assert _admits(guard)
    assert load.read == read
    unsubscribe()
    assert [(event.reason, event.enforced) for event in events] == [
        ("shed_by_criticality", False),
        ("shed_by_criticality", True),
    ]


def test_the_snapshot_tells_load_and_what_each_rule_shed() -> None:
    """Readable at any time, without a call."""
    guard = new_guard(Shed(by_tier(), by_fraction(0.0), load=Load(0.25)))
    assert _gate(guard) == {
        "policy": "shed",
        "mode": "enforce",
        "rejected": 0,
        "would_reject": 0,
        "load": 0.25,
        "shed_by": {"tier": 0, "fraction": 0},
        "shed_classes": {},
    }
    assert _gate(new_guard(Shed(by_fraction(0.1))))["load"] is None


def test_a_signal_that_fails_sheds_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It protects the service; it must not take it down."""

    def broken() -> float:
        raise OSError("no such file")

    guard = new_guard(Shed(by_criticality(), load=broken))
    with caplog.at_level(logging.ERROR, "seawall"):
        assert _admits(guard)
    assert "a load signal failed" in caplog.text


def test_settings_change_at_run_time() -> None:
    """Other bars and another signal; what was counted stays."""
    shed = Shed(by_criticality(), load=Load(0.95))
    guard = new_guard(shed)
    assert not _admits(guard)
    shed.update(rules=[by_criticality(0.99)])
    assert _admits(guard)
    shed.update(load=Load(2.0))
    assert not _admits(guard)
    assert _gate(guard)["shed_by"] == {"criticality": 2}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rules": [by_tier()]}, ValueError, "write the same rules with other settings"),
        ({"rules": []}, TypeError, "give it a rule"),
        ({"load": None}, TypeError, "it needs a load"),
        ({"mode": "on"}, ValueError, "write one of 'enforce'"),
        ({"limit": 3}, TypeError, "it takes rules, load, mode"),
    ],
)
def test_bad_changes_change_nothing(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    """They raise, and all is as it was."""
    shed = Shed(by_criticality(), load=Load(0.95))
    before = shed.rules, shed.load, shed.mode
    with pytest.raises(error, match=message):
        shed.update(**change)
    assert (shed.rules, shed.load, shed.mode) == before


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Shed, TypeError, "give it a rule, such as Shed"),
        (lambda: Shed(0.5), TypeError, "write a rule, such as by_criticality"),
        (lambda: Shed(by_criticality), TypeError, "write a rule, such as by_criticality"),
        (lambda: Shed(by_chance()), TypeError, "it needs a load; write load="),
        (lambda: Shed(by_criticality(), load=0.5), TypeError, "load=0.5: pass a function"),
        (lambda: Shed(by_fraction(0.1), mode="on"), ValueError, "mode='on': write one of"),
    ],
)
def test_bad_settings_are_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """At once, and the message says what to write."""
    with pytest.raises(error, match=message):
        make()


def test_it_can_be_read() -> None:
    """The repr tells the rules."""
    shed = Shed(by_criticality(0.5), by_deadline(), load=Load())
    assert repr(shed) == "Shed(by_criticality(start=0.5), by_deadline(reserve=0, quantile=0.5))"


@pytest.mark.parametrize("junk", [None, "much", float("nan"), float("inf")])
def test_a_signal_that_returns_junk_sheds_nobody(junk: Any, caplog: pytest.LogCaptureFixture):
    """What is no finite number counts as no load, and is logged once, not for each call."""
    guard = new_guard(Shed(by_criticality(), by_queue(1, of=lambda: junk), load=lambda: junk))
    for _ in range(3):
        assert guard.call(lambda: "served") == "served"
    assert guard.snapshot()["policies"][0]["load"] == 0.0
    assert len(caplog.records) == 2


def test_a_queue_is_that_of_whatever_has_one():
    """The queues of policies, pools, executors and channels are told by themselves."""
    channel: Channel[int] = Channel(5)
    channel.put(1)
    sources = [Bulkhead(1), RateLimit("1/s"), ThreadBulkhead(1), IoPool("io", workers=1)]
    sources.append(Pool(object, name="pool", max_size=1))
    for of in sources:
        assert new_guard(Shed(by_queue(1, of=of))).call(lambda: "served") == "served"
    with pytest.raises(Overloaded):
        new_guard(Shed(by_queue(1, of=channel))).call(lambda: None)
    for wrong in (Timeout(1.0), new_guard(Timeout(1.0)), 5):
        with pytest.raises(TypeError, match="pass what has a queue"):
            by_queue(1, of=wrong)


def test_two_rules_of_a_kind_are_counted_together():
    """A snapshot tells what was shed by each kind of rule."""
    guard = new_guard(Shed(by_fraction(0.5, key=len), by_fraction(1.0)))
    guard.attempt(lambda text: text, "a")
    assert guard.snapshot()["policies"][0]["shed_by"] == {"fraction": 1}
