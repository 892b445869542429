"""A family: a guard for each key, bounded, and no key pays for another."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
from collections.abc import AsyncIterator, Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    CircuitOpen,
    Family,
    Guard,
    RateLimit,
    Retry,
    RetryBudget,
    TimedOut,
    Timeout,
    family,
    get_guard,
    guards,
    registry,
    snapshot,
)
from seawall.clock import VirtualClock
from seawall.context import current_tenant, tenant
from seawall.dashboard.watcher import Watcher
from seawall.policies.retry import SuccessDeposit
from seawall.telemetry.readings import readings_of
from seawall.testing import ScriptedService, hang, run_virtual
from tests.support import falsified, let_pass


def _fail(*_args: Any) -> None:
    raise ConnectionError


def _breakers(**settings: Any) -> Family:
    return Guard.family(
        registry.free_name("sensor"),
        lambda _key: [Breaker(consecutive=1, break_for=15.0)],
        **settings,
    )


def _break(sensors: Family, *keys: str) -> None:
    for key in keys:
        sensors[key].attempt(_fail)
        assert sensors[key].pressure().breaker_open


# What one key does costs another nothing


def test_dead_keys_spend_no_retry_budget_of_healthy_ones():
    """Two dead hosts spend their own budgets; a healthy host's passing failure is retried."""

    def policies(_key: str) -> list[Any]:
        budget = RetryBudget(SuccessDeposit(4))
        return [Retry(on=ConnectionError, attempts=3, backoff=0, budget=budget)]

    hosts = Guard.family("host", policies)
    one_for_all = Guard("host together", *policies("all"))
    for guard_of in (hosts.__getitem__, lambda _key: one_for_all):
        for _ in range(20):
            guard_of("dead 1").attempt(_fail)
            guard_of("dead 2").attempt(_fail)
        answers = iter([ConnectionError(), "well"])

        def once() -> str:
            answer = next(answers)  # noqa: B023 - called in this round
            if isinstance(answer, Exception):
                raise answer
            return answer

        result = guard_of("healthy").attempt(once)
        assert result.ok == (guard_of == hosts.__getitem__)


def test_each_key_has_slots_of_its_own():
    """A key whose calls hang takes no slot of another."""
    sensors = Guard.family("sensor", lambda _key: [Bulkhead(1)])
    with sensors["stuck"].hold():
        assert not sensors["stuck"].attempt(len, "").ok
        assert sensors["other"].call(len, "") == 0


def test_a_key_has_one_guard_which_is_kept():
    """The same guard each time, though nobody holds it; its breaker keeps its memory."""
    sensors = _breakers()
    first = id(sensors["a"])
    gc.collect()
    assert id(sensors["a"]) == first
    _break(sensors, "a")
    gc.collect()
    with pytest.raises(CircuitOpen, match=r"sensor\[a\]"):
        sensors["a"].call(len, "")
    assert sensors["b"].call(len, "") == 0
    assert "b" in sensors
    assert len(sensors) == 2


def test_members_are_not_registered_one_by_one():
    """The family has the name; its members are found through it alone."""
    sensors = Guard.family("sensor", lambda _key: [Timeout(1.0)])
    assert sensors["a"].name == "sensor[a]"
    assert guards() == []
    assert registry.families() == [sensors]
    with pytest.raises(ValueError, match="alive already"):
        Guard("sensor", Timeout(1.0))
    new = Guard.family("sensor", lambda _key: [Timeout(2.0)], replace=True)
    assert sensors.closed
    assert registry.families() == [new]
    new.close()
    assert registry.families() == []
    assert Guard("sensor", Timeout(1.0)) is get_guard("sensor")


# Bounds


def test_the_longest_unused_key_goes_first():
    """A new key takes the room of one that was not asked for since the last look."""
    sensors = _breakers(max_keys=3)
    for key in ("a", "b", "c", "d"):
        sensors[key].call(len, "")
    kept = set(sensors.guards())
    assert len(kept) == 3
    used = next(key for key in kept if key != "d")
    sensors[used].call(len, "")
    sensors["e"].call(len, "")
    assert {used, "e"} <= set(sensors.guards())
    assert sensors.evicted == 2


def test_healthy_keys_go_before_failing_ones():
    """Of keys that may go, one that fails is kept longer: its breaker may be about to open."""
    sensors = Guard.family("sensor", lambda _key: [Breaker(consecutive=9)], max_keys=2)
    sensors["failing"].attempt(_fail)
    sensors["well"].call(len, "")
    sensors["new"].call(len, "")
    assert set(sensors.guards()) == {"failing", "new"}


@pytest.mark.parametrize("trouble", ["open", "isolated", "in flight", "limited"])
def test_a_key_in_trouble_is_not_forgotten(trouble: str):
    """A flood of keys resets no breaker, no limit, and no count of calls in flight."""
    clock = VirtualClock()
    stack = {"in flight": Bulkhead, "limited": lambda _n: RateLimit("1/min")}
    make = stack.get(trouble, lambda _n: Breaker(consecutive=1, break_for=15.0))
    sensors = Guard.family("sensor", lambda _key: [make(1)], max_keys=2, clock=clock)
    held = sensors["bad"].hold()
    if trouble == "open":
        _break(sensors, "bad")
    elif trouble == "isolated":
        policy = sensors["bad"].policies[0]
        assert isinstance(policy, Breaker)
        policy.isolate()
    else:
        held.__enter__()
        if trouble == "limited":
            held.__exit__(None, None, None)  # what was taken from the limit is not given back
    for number in range(200):
        guard = sensors[f"flood {number}"]
        if trouble != "limited":
            guard.call(len, "")
        clock.advance(0.01)
    assert "bad" in sensors
    assert not sensors["bad"].attempt(len, "").ok
    assert len(sensors) == 2
    if trouble in {"open", "limited"}:
        clock.advance(120)  # the break is over, and the limit is full again
        sensors["one"], sensors["two"], sensors["three"]
        assert "bad" not in sensors


def _flood(sensors: Family) -> None:
    for number in range(50):
        sensors[f"new {number}"].call(len, "")


def _retrying(**settings: Any) -> Family:
    """Return a family whose policies have nothing that could tell a call in flight."""
    return Guard.family("sensor", lambda _key: [Retry(on=KeyError, budget=None)], **settings)


async def _under_way(kind: str, sensors: Family) -> None:
    guard, service = sensors["stuck"], ScriptedService(hang())

    async def stream(key: str) -> AsyncIterator[str]:
        yield key
        await service.acall()

    if kind == "acall":
        await guard.acall(service.acall)
    elif kind == "decorated":
        await sensors(by=lambda: "stuck")(service.acall)()
    elif kind == "stream":
        async for _ in sensors(by="key")(stream)("stuck"):
            pass
    elif kind == "hold":
        async with guard.hold():
            await service.acall()
    else:
        async for attempt in guard.attempts():
            async with attempt:
                await service.acall()


@pytest.mark.parametrize("kind", ["acall", "decorated", "stream", "hold", "attempts"])
def test_a_key_whose_calls_hang_is_not_forgotten(kind: str) -> None:
    """Whatever its policies are: a call that is under way keeps its key."""
    sensors = _retrying(max_keys=3)

    async def main() -> None:
        task = asyncio.ensure_future(_under_way(kind, sensors))
        await let_pass(1.0)
        kept = sensors["stuck"]
        _flood(sensors)
        assert sensors["stuck"] is kept
        task.cancel()
        await asyncio.wait([task])
        _flood(sensors)
        assert "stuck" not in sensors

    run_virtual(main())


def test_a_key_whose_thread_hangs_is_not_forgotten() -> None:
    """A plain call is under way as an awaited one is."""
    sensors = _retrying(max_keys=3)
    begun, over = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert over.wait(60)

    thread = threading.Thread(target=lambda: sensors["stuck"].call(wait))
    thread.start()
    assert begun.wait(60)
    _flood(sensors)
    assert "stuck" in sensors
    over.set()
    thread.join(60)
    _flood(sensors)
    assert "stuck" not in sensors


class _Impatient(VirtualClock):
    """A clock on which a wait for a thread is over as soon as the thread has begun."""

    __slots__ = ("begun",)

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        assert self.begun.wait(60)
        self.advance(seconds or 0.0)
        return False


def test_a_thread_that_was_given_up_keeps_its_key_until_it_ends() -> None:
    """Its caller has its answer, and the work goes on."""
    clock, over = _Impatient(), threading.Event()
    pool = Timeout(1.0, sync="thread", max_threads=1)
    sensors = Guard.family("sensor", lambda _key: [pool], max_keys=1, clock=clock)

    def work() -> None:
        clock.begun.set()
        assert over.wait(60)

    assert isinstance(sensors["stuck"].attempt(work).error, TimedOut)
    calls = sensors._members["stuck"].calls.under_way
    assert sensors["other"].name.endswith("[(others)]")
    over.set()
    for _ in range(6000):
        if not calls:
            break
        threading.Event().wait(0.01)
    assert sensors["other"].name.endswith("[other]")


def test_without_the_count_of_calls_a_key_that_hangs_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: it is the layer around the policies that keeps it."""
    monkeypatch.setattr(family, "_CallsUnderWay", _Uncounted)
    sensors = _retrying(max_keys=1)
    with sensors["stuck"].hold():
        sensors["other"].call(len, "")
        assert "stuck" not in sensors


class _Uncounted(family._CallsUnderWay):
    def enter(self, _now: float) -> None:
        pass


def test_calls_that_end_badly_are_counted_out() -> None:
    """Refused, failed, retried, cancelled by an exit: none of them keeps the key."""
    policies = [Retry(on=KeyError, backoff=0, attempts=2, budget=None), Bulkhead(1)]
    sensors = Guard.family("sensor", lambda _key: policies)
    guard = sensors["a"]
    calls = sensors._members["a"].calls.under_way

    def nested() -> None:
        assert len(calls) == 1
        with pytest.raises(BulkheadFull):
            guard.call(len, "")
        raise KeyError

    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error):
            guard.call(nested if error is KeyError else _exit)
        assert not calls


def _exit() -> None:
    raise KeyboardInterrupt


def test_the_shared_guard_has_policies_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """They are those of `make("(others)")`, not of the key that happened to come first."""

    def make(key: str) -> list[Any]:
        return [Breaker(consecutive=1), Bulkhead(5 if key == "(others)" else 100)]

    sensors = Guard.family("sensor", make, max_keys=1)
    sensors["big"].attempt(_fail)
    bulkhead = sensors["another"].policies[1]
    assert isinstance(bulkhead, Bulkhead)
    assert bulkhead.limit == 5
    assert not any(record.exc_info for record in caplog.records)


def test_a_make_that_knows_no_others_is_said_and_calls_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A flood of keys must not stop calls: then the first key's policies are shared."""
    limits = {"a": 1, "b": 2}
    sensors = Guard.family(
        "sensor", lambda key: [Breaker(consecutive=1), Bulkhead(limits[key])], max_keys=1
    )
    sensors["a"].attempt(_fail)
    bulkhead = sensors["b"].policies[1]
    assert isinstance(bulkhead, Bulkhead)
    assert bulkhead.limit == 2
    assert "make('(others)') failed" in caplog.text


def test_keys_that_find_no_room_share_a_guard(caplog: pytest.LogCaptureFixture):
    """If nobody may go, further keys are still guarded, together; it is said once."""
    sensors = _breakers(max_keys=2)
    _break(sensors, "a", "b")
    assert sensors["c"] is sensors["d"]
    assert sensors["c"].name.endswith("[(others)]")
    assert len(sensors) == 2
    said = [record.getMessage()[-34:] for record in caplog.records if record.name == "seawall"]
    assert said == ["larger max_keys=, or a coarser key"]
    assert sensors.snapshot()["family"]["overflowed"] == 3


KEYS = st.integers(0, 6)
HISTORIES = st.lists(
    st.tuples(st.sampled_from(["call", "fail", "wait"]), KEYS), min_size=1, max_size=60
)


def _keeps_offenders(history: list[tuple[str, int]]) -> None:
    """Drive a family of three keys: it never grows, and never forgets a breaker that is open."""
    clock = VirtualClock()
    sensors = _breakers(max_keys=3, clock=clock)
    open_until: dict[int, float] = {}
    try:
        for what, key in history:
            if what == "wait":
                clock.advance(4.0)
                continue
            known = key in sensors
            guard = sensors[key]
            if clock.now() < open_until.get(key, 0.0):
                assert known, "an open breaker was forgotten"
                assert not guard.attempt(len, "").ok
            elif what == "fail":
                guard.attempt(_fail)
                if key in sensors and guard.pressure().breaker_open:
                    open_until[key] = clock.now() + 15.0
            else:
                guard.attempt(len, "")
            assert len(sensors) <= 3
    finally:
        sensors.close()


@given(HISTORIES)
def test_no_history_forgets_an_offender(history: list[tuple[str, int]]):
    """Whatever is called, fails and waits: the bound holds, and open breakers stay."""
    _keeps_offenders(history)


def test_without_its_rule_a_family_forgets_offenders(monkeypatch: pytest.MonkeyPatch):
    """It is the rule of who may go that keeps them."""
    monkeypatch.setattr(family._Member, "is_evictable", lambda _self, _now: True)
    assert falsified(_keeps_offenders, HISTORIES)


# Functions


def test_a_decorated_function_is_what_it_was():
    """`by` names a parameter or is a function; all four kinds keep their signature."""
    seen: list[str] = []
    sensors = Guard.family("sensor", lambda key: seen.append(key) or [Breaker(consecutive=1)])

    @sensors(by="host")
    def plain(path: str, host: str = "a") -> str:
        """Read."""
        return f"{host}{path}"

    @sensors(by=lambda host, **_: host.upper())
    async def awaited(host: str, *, path: str) -> str:
        return f"{host}{path}"

    @sensors(by="host")
    def listed(*, host: str) -> Iterator[str]:
        back = yield host
        yield f"back {back}"
        return "end"

    @sensors(by="host")
    async def streamed(host: str) -> AsyncIterator[str]:
        yield host
        yield "more"

    async def main() -> None:
        assert await awaited("b", path="/") == "b/"
        assert [item async for item in streamed("d")] == ["d", "more"]

    assert plain("/") == "a/"
    assert plain("/", "b") == "b/"
    assert plain("/", host="b") == "b/"
    run_virtual(main())
    items = listed(host="c")
    assert (next(items), items.send("x")) == ("c", "back x")
    assert seen == ["a", "b", "B", "d", "c"]
    assert str(inspect.signature(plain)) == "(path: 'str', host: 'str' = 'a') -> 'str'"
    assert (plain.__name__, plain.__doc__) == ("plain", "Read.")
    assert inspect.iscoroutinefunction(awaited)
    assert inspect.isgeneratorfunction(listed)
    assert inspect.isasyncgenfunction(streamed)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        plain()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"missing a required .*argument: 'host'"):
        next(listed())  # type: ignore[call-arg]


def test_a_method_is_guarded_by_its_argument():
    """`by` may name any parameter of a method, or read the context where it takes none."""
    sensors = _breakers()

    class Client:
        @sensors(by="host")
        def read(self, host: str) -> str:
            return host

        @sensors(by=current_tenant)
        def ask(self) -> str:
            return "asked"

    assert Client().read("a") == "a"
    with tenant("acme"):
        assert Client().ask() == "asked"
    assert set(sensors.guards()) == {"a", "acme"}


def test_calls_of_a_decorated_function_go_through_the_guard_of_their_key():
    """One key's open breaker refuses its calls alone, in all four kinds."""
    sensors = _breakers()
    _break(sensors, "bad")

    @sensors(by="host")
    def plain(host: str) -> str:
        return host

    @sensors(by="host")
    def listed(host: str) -> Iterator[str]:
        yield host

    with pytest.raises(CircuitOpen):
        plain("bad")
    with pytest.raises(CircuitOpen):
        list(listed("bad"))
    assert plain("good") == "good"
    assert list(listed("good")) == ["good"]


@pytest.mark.parametrize(
    ("by", "error", "advice"),
    [
        ("port", ValueError, r"the function takes \['host', 'rest'\]"),
        ("rest", ValueError, "name one of these"),
        (5, TypeError, "pass a function"),
        (None, TypeError, "pass a function"),
    ],
)
def test_a_key_that_cannot_be_found_is_told_at_decoration(by: Any, error: Any, advice: str):
    """A misspelt parameter is no key."""
    sensors = _breakers()
    with pytest.raises(error, match=advice):

        @sensors(by=by)
        def read(host: str, *rest: str) -> None: ...


def test_what_cannot_be_a_key_is_told():
    """A list is no key."""
    with pytest.raises(TypeError, match="a key is text, a number or a tuple"):
        _breakers()[["a"]]  # type: ignore[index]


# Threads and processes


def test_threads_that_ask_for_a_new_key_get_one_guard():
    """Of threads that ask at once, one makes the guard."""
    made: list[str] = []
    start = threading.Barrier(8)
    got: list[Guard] = []
    sensors = Guard.family("sensor", lambda key: made.append(key) or [Bulkhead(1)])

    def ask() -> None:
        start.wait()
        got.append(sensors["a"])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made == ["a"]
    assert len(set(map(id, got))) == 1


def test_a_child_process_can_use_a_family_whose_lock_was_held():
    """A fork while another thread makes a guard leaves no lock behind."""
    sensors = _breakers()
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with sensors["held"].hold(), sensors._lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if sensors["new"].call(len, "") == 0 else 2
            if sensors._members["held"].calls.under_way:
                code = 3  # a call of a thread that is not in this process
        finally:
            os._exit(code)
    over.set()
    thread.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# What there is to see


def test_counts_never_fall_when_keys_are_forgotten():
    """What evicted members counted stays in the family's counts."""
    sensors = Guard.family("sensor", lambda _key: [Bulkhead(1)], max_keys=2)
    for number in range(10):
        guard = sensors[number]
        guard.call(len, "")
        with guard.hold():
            guard.attempt(len, "")
        sensors[number].attempt(_fail)
    seen = sensors.snapshot()
    assert (seen["succeeded"], seen["failed"], seen["rejected"]) == (20, 10, 10)
    assert seen["policies"][0]["rejected"] == 10
    assert seen["family"]["keys"] == 2
    assert seen["family"]["evicted"] == 8


def test_the_worst_keys_are_named_and_no_others():
    """Broken keys first, then those that fail most, ten at most; all others are in the sums."""
    sensors = _breakers()
    for number in range(40):
        sensors[f"well {number}"].call(len, "")
    _break(sensors, *(f"bad {number}" for number in range(15)))
    seen = snapshot()["guard"]
    assert [one["name"] for one in seen] == [sensors.name]
    (breaker,) = seen[0]["policies"]
    assert breaker["state"] == "open"
    assert breaker["open_keys"] == 15
    assert list(breaker["keys"]) == [f"bad {number}" for number in range(10)]
    assert list(seen[0]["family"]["worst"]) == list(breaker["keys"])
    assert seen[0]["family"]["keys"] == 55


def test_metrics_have_the_family_and_its_worst_keys():
    """Counters are the family's; of single keys there are gauges, of ten at most."""
    sensors = _breakers()
    for number in range(100):
        sensors[f"well {number}"].call(len, "")
    _break(sensors, *(f"bad {number}" for number in range(50)))
    readings = readings_of(snapshot())
    by_guard = {
        dict(zip(one.metric.labels, one.labels, strict=True)).get("guard", "") for one in readings
    } - {""}
    assert by_guard == {sensors.name, *(f"{sensors.name}[bad {n}]" for n in range(10))}
    attempts = {
        one.labels: one.value for one in readings if one.metric.name == "seawall_attempts_total"
    }
    assert attempts[sensors.name, "succeeded"] == 100
    assert attempts[sensors.name, "failed"] == 50
    assert {labels[0] for labels in attempts} == {sensors.name}


def test_the_dashboard_has_one_row_with_the_worst_keys():
    """Not a row for each key; the broken ones are named, and are a trouble."""
    sensors = _breakers()
    for number in range(30):
        sensors[f"well {number}"].call(len, "")
    watcher = Watcher()
    try:
        watcher.sample()
        _break(sensors, "bad 1", "bad 2")
        view = watcher.sample()
    finally:
        watcher.close()
    (row,) = view["guards"]
    assert (row["name"], row["tone"], row["breaker"]) == (sensors.name, "bad", "open")
    facts = dict(row["stack"][0]["facts"])
    assert facts["keys"] == "32"
    assert facts["broken keys"] == "bad 1, bad 2"
    assert row["stack"][0]["acts"] == row["stack"][0]["changes"] == []
    assert any("bad 1" in trouble["what"] for trouble in view["troubles"])


def test_a_family_explains_the_stack_of_its_keys():
    """The stack is known once there is a key."""
    sensors = Guard.family("sensor", lambda _key: [Retry(on=OSError), Bulkhead(1)])
    assert "before the first key" in sensors.explain()
    assert sensors["a"].call(len, "") == 0
    told = sensors.explain()
    assert told.startswith("family 'sensor': 1 of at most 1024 keys")
    assert "Retry without a budget" in told
    assert repr(sensors) == "<Family 'sensor': 1 of 1024 keys>"


def test_a_stack_that_makes_no_sense_is_told_at_the_first_key():
    """What Guard refuses, a family refuses too, and keeps nothing of it."""
    sensors = Guard.family("sensor", lambda _key: [])
    with pytest.raises(ValueError, match="at least one policy"):
        sensors["a"]
    assert len(sensors) == 0


def test_keys_in_use_stay_while_new_ones_come_and_go():
    """A key that is used again and again is not forgotten for those that are used once."""
    clock = VirtualClock()
    family = Guard.family("hot", lambda _key: [Bulkhead(1)], max_keys=100, clock=clock)
    chance = Random(1)
    lost = 0
    for second in range(100):
        keys = [(f"hot{number}", True) for number in range(50)]
        keys += [(f"new{second}-{number}", False) for number in range(20)]
        chance.shuffle(keys)
        for key, hot in keys:
            lost += hot and second > 0 and key not in family
            family[key].call(int)
    assert lost == 0
