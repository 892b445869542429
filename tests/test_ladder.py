"""Ladder: what moves it, who reads it, and what it tells."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    CallRejected,
    Fallback,
    Guard,
    Ladder,
    LevelChanged,
    Overloaded,
    Retry,
    ServiceLevel,
    SettingsChanged,
    Timeout,
    fallback_reason,
    static,
    subscribe,
)
from seawall.ladder import LadderGate
from seawall.models.ladder import Cause, Move
from seawall.runtime.call import Call
from seawall.runtime.runners import run_sync
from seawall.signals import in_flight
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time
from tests.support import new_guard, quarters

FULL, CACHED, PARTIAL, STATIC, MAINTENANCE = ServiceLevel


class Dial:
    """A load that is set by hand."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self) -> float:
        return self.value


def levels(ladder: Ladder, clock: Any, seconds: int) -> list[str]:
    """Read the ladder once a second."""
    seen = []
    for _ in range(seconds):
        seen.append(ladder.level.label)
        clock.advance(1.0)
    return seen


# What moves it


def test_load_moves_it_down_and_up():
    """One level in each `hold` while load is high, one in each `recover_after` of calm."""
    with virtual_time() as clock:
        load = Dial(0.85)
        ladder = Ladder("shop", load=load, hold=2.0, recover_after=3.0)
        assert levels(ladder, clock, 5) == ["cached", "cached", "partial", "partial", "partial"]
        load.value = 0.65  # below the threshold of partial less the gap, not below that of cached
        assert levels(ladder, clock, 8) == ["partial"] * 3 + ["cached"] * 5
        load.value = 0.0
        assert levels(ladder, clock, 5) == ["cached"] * 3 + ["full"] * 2


def test_it_looks_at_most_ten_times_a_second():
    """In between, reading it costs a look at the clock."""
    with virtual_time() as clock:
        looks = []
        ladder = Ladder("shop", load=lambda: looks.append(1) or 0.0)
        for _ in range(100):
            assert ladder.level is FULL
        assert len(looks) == 1
        clock.advance(0.1)
        assert ladder.level is FULL
        assert len(looks) == 2


def test_an_open_circuit_moves_it_at_once():
    """While the breaker of a dependency refuses calls, no more than that level is given."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=10.0)
        vendor = new_guard(breaker)
        for thing in (breaker, vendor):
            ladder = Ladder("shop", depends_on={thing: "partial"}, recover_after=5.0)
            vendor.call(int)
            assert ladder.level is FULL
            vendor.attempt(ScriptedService(fail(OSError)).call)
            clock.advance(0.1)
            assert ladder.level is PARTIAL
            clock.advance(9.9)  # the break is over: somebody has to try
            assert ladder.level is PARTIAL
            clock.advance(5.0)
            assert ladder.level is CACHED
            clock.advance(5.0)
            assert ladder.level is FULL
            breaker.close()


def test_a_function_may_tell_of_trouble():
    """Whatever can be asked; the worst of several demands counts."""
    with virtual_time() as clock:
        down: set[str] = set()

        def redis_down() -> bool:
            return "redis" in down

        def everything_down() -> bool:
            return "everything" in down

        ladder = Ladder(
            "shop",
            depends_on={redis_down: CACHED, everything_down: "maintenance"},
            recover_after=0.0,
        )
        for names, level in [({"redis"}, CACHED), ({"redis", "everything"}, MAINTENANCE)]:
            down |= names
            clock.advance(1.0)
            assert ladder.level is level
        assert ladder.snapshot()["depends_on"] == {
            "redis_down": {"level": "cached", "in_trouble": True},
            "everything_down": {"level": "maintenance", "in_trouble": True},
        }


def test_each_dependency_has_a_name_of_its_own():
    """A breaker is called after its guard; of two with the same name the second has a number."""
    with virtual_time():
        first, second, free = Breaker(), Breaker(), Breaker()
        demands = {first: "cached", second: "static", free: "partial"}
        functions = {(lambda: True): "partial", (lambda: False): "static"}
        ladder = Ladder("shop", depends_on={**demands, **functions})
        guards = Guard("stock", first), Guard("prices", second)
        shown = ladder.snapshot()["depends_on"]
        assert list(shown) == ["stock", "prices", "breaker", "<lambda>", "<lambda> 2"]
        assert shown["<lambda> 2"] == {"level": "static", "in_trouble": False}
        for guard in guards:
            guard.close()
        del guards, guard
        gc.collect()
        assert list(ladder.snapshot()["depends_on"])[:3] == ["breaker", "breaker 2", "breaker 3"]


def test_what_cannot_be_read_moves_nothing(caplog):
    """A load or a dependency that fails is logged, and the level stays readable."""

    def broken() -> float:
        raise ZeroDivisionError

    with virtual_time(), caplog.at_level(logging.ERROR, "seawall"):
        ladder = Ladder("shop", load=broken, depends_on={lambda: 1 / 0: "static"})
        assert ladder.level is FULL
    assert len(caplog.records) == 2


def test_pinned_it_stays_where_it_was_put():
    """Whatever load says; unpinned, it stands where load has put it meanwhile."""
    with virtual_time() as clock:
        load = Dial(0.0)
        ladder = Ladder("shop", load=load)
        ladder.pin("static")
        assert ladder.level is STATIC
        load.value = 0.7
        assert levels(ladder, clock, 3) == ["static"] * 3
        assert ladder.snapshot()["pinned"] is True
        ladder.unpin()
        assert ladder.level is CACHED
        ladder.pin(FULL)
        load.value = 5.0
        assert levels(ladder, clock, 10) == ["full"] * 10
        with pytest.raises(ValueError, match="'full', 'cached'"):
            ladder.pin("off")
        assert ladder.level is FULL


def test_moves_are_told():
    """Each change is an event with its cause; nothing else is."""
    heard: list[LevelChanged] = []
    end = subscribe(heard.append, LevelChanged)
    try:
        with virtual_time() as clock:
            load, down = Dial(0.75), Dial(0.0)
            ladder = Ladder("shop", load=load, depends_on={down: "static"}, recover_after=1.0)
            for change in [
                lambda: None,
                lambda: setattr(down, "value", 1.0),
                lambda: (setattr(down, "value", 0.0), setattr(load, "value", 0.0)),
                lambda: None,
                lambda: ladder.pin("full"),
                ladder.unpin,
                ladder.unpin,
            ]:
                change()
                assert ladder.level in ServiceLevel
                clock.advance(1.0)
    finally:
        end()
    assert [(event.guard, event.before, event.after, event.cause) for event in heard] == [
        ("shop", "full", "cached", "load"),
        ("shop", "cached", "static", "dependency"),
        ("shop", "static", "partial", "recovered"),
        ("shop", "partial", "full", "pin()"),
        ("shop", "full", "cached", "unpin()"),
        ("shop", "cached", "full", "recovered"),
    ]


def test_a_listener_may_read_the_ladder():
    """An event is told outside of the lock."""
    seen = []
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 1.0)
        end = subscribe(lambda _event: seen.append(ladder.level), LevelChanged)
        try:
            assert ladder.level is CACHED
        finally:
            end()
    assert seen == [CACHED]


def test_settings_change_at_run_time():
    """It stays where it is, and moves by the new settings from there."""
    heard = []
    end = subscribe(heard.append, SettingsChanged)
    try:
        with virtual_time() as clock:
            load = Dial(0.5)
            ladder = Ladder("shop", load=load)
            assert levels(ladder, clock, 10)[-1] == "full"
            ladder.update(thresholds={"static": 0.5}, hold=0.0, recover_after=2.0)
            assert levels(ladder, clock, 1) == ["static"]
            load.value = 0.0
            assert levels(ladder, clock, 3) == ["static", "static", "full"]
            with pytest.raises(ValueError, match="hold"):
                ladder.update(gap=0.2, hold=-1.0)
            assert ladder.settings.gap == 0.1
            with pytest.raises(TypeError, match="thresholds, gap, hold, recover_after"):
                ladder.update(load=load)
            with pytest.raises(TypeError, match="name what to change"):
                ladder.update()
    finally:
        end()
    assert [(event.guard, event.policy) for event in heard] == [("shop", "ladder")]


# Who reads it


def test_handlers_ask_what_they_may_do():
    """A level is allowed where the ladder stands, or better."""
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 0.0)
        ladder.pin("partial")
        allowed = [level.label for level in ServiceLevel if ladder.allows(level)]
        assert allowed == ["partial", "static", "maintenance"]
        assert ladder.allows("static")
        assert not ladder.allows("cached")


def shop(ladder: Ladder) -> Guard:
    cache = Cache(60.0, key=lambda *_args: 1)
    return new_guard(
        Fallback(
            ladder.rung("cached", lambda item: f"old {item}"),
            ladder.rung("partial", lambda: "popular"),  # takes no arguments
            ladder.rung("static", static("fixed")),
            static("closed"),
        ),
        ladder.gate(),
        cache,
        Timeout(1.0, sync="cooperative"),
    )


def test_a_stack_answers_by_the_ladder():
    """The gate stops the real call, and the rungs answer from where the ladder stands."""
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 0.0)
        guard = shop(ladder)
        service = ScriptedService(answer("real"))
        answers = []
        for level in ServiceLevel:
            ladder.pin(level)
            answers.append(guard.call(service.call, "book"))
        assert answers == ["real", "old book", "popular", "fixed", "closed"]
        assert service.calls == 1


def test_at_full_service_a_failure_is_answered_by_the_first_rung():
    """Rungs are fallbacks as others: they answer errors too, where the ladder allows them."""
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 0.0)
        result = shop(ladder).attempt(ScriptedService(fail(OSError)).call, "book")
        assert (result.value, result.level, result.reason) == ("old book", 1, "OSError")
        ladder.pin("partial")
        result = shop(ladder).attempt(ScriptedService(answer(1)).call, "book")
        assert (result.value, result.level, result.reason) == ("popular", 2, "overloaded")


def test_rungs_may_be_async_and_methods():
    """Whatever a fallback level may be, and it still knows why it is needed."""

    class Memory:
        async def last(self, item: str) -> str:
            return f"{item}: {type(fallback_reason()).__name__}"

        def nothing(self) -> str:
            return "nothing"

    async def main() -> None:
        ladder = Ladder("shop", load=lambda: 0.0)
        memory = Memory()
        guard = new_guard(
            Fallback(ladder.rung("cached", memory.last), ladder.rung("static", memory.nothing)),
            ladder.gate("full"),
        )
        service = ScriptedService(answer("real"))
        ladder.pin("cached")
        assert await guard.acall(service.acall, "book") == "book: Overloaded"
        ladder.pin("static")
        assert await guard.acall(service.acall, "book") == "nothing"
        ladder.pin("maintenance")
        with pytest.raises(Overloaded):
            await guard.acall(service.acall, "book")

    run_virtual(main())


def test_a_rung_alone_says_why_it_does_not_answer():
    """Outside of a fallback it raises, with the ladder's name and level."""
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 0.0)
        rung = ladder.rung("cached", lambda: "old")
        assert rung() == "old"
        ladder.pin("static")
        with pytest.raises(Overloaded, match="'shop' stands at static, below cached") as caught:
            rung()
        assert (caught.value.guard, caught.value.policy) == ("shop", "ladder")
        assert repr(rung).startswith("<'shop' at cached: <function")


def test_a_refused_call_costs_the_stack_nothing():
    """Not a retry, not a slot, not a failure of the circuit; and it is counted."""
    heard: list[CallRejected] = []
    end = subscribe(heard.append, CallRejected)
    try:
        with virtual_time():
            ladder = Ladder("shop", load=lambda: 0.0)
            breaker, bulkhead = Breaker(consecutive=1), Bulkhead(1)
            gate = ladder.gate()
            guard = new_guard(Retry(on=OSError), gate, breaker, bulkhead)
            ladder.pin("cached")
            with pytest.raises(Overloaded) as caught:
                guard.call(int)
            assert (caught.value.guard, caught.value.policy) == (guard.name, "ladder")
            shown = guard.snapshot()
            assert (shown["rejected"], shown["retries"], shown["failed"]) == (1, 0, 0)
            assert shown["policies"][1] == {
                "policy": "ladder",
                "mode": "enforce",
                "rejected": 1,
                "would_reject": 0,
                "level": "cached",
                "needs": "full",
            }
            assert breaker.state == "closed"
            gate.update(mode="shadow")
            assert guard.call(int) == 0
            gate.update(mode="off")
            assert guard.call(int) == 0
            gate.update(mode="enforce", level="cached")
            assert guard.call(int) == 0
            with pytest.raises(ValueError, match="level"):
                gate.update(level="none", mode="off")
            assert (gate.level, gate.mode) == (CACHED, "enforce")
            with pytest.raises(TypeError, match="level, mode"):
                gate.update(limit=1)
    finally:
        end()
    assert [(event.policy, event.enforced) for event in heard] == [
        ("ladder", True),
        ("ladder", False),
    ]


def test_a_guard_on_another_clock_asks_the_ladder_each_time():
    """Instants of two clocks say nothing of each other."""
    load = Dial(0.0)
    with virtual_time() as clock:
        ladder = Ladder("shop", load=load, hold=0.0)
    with virtual_time():
        guard = new_guard(ladder.gate())
        assert guard.call(int) == 0
        load.value = 1.0
        clock.advance(1.0)
        with pytest.raises(Overloaded):
            guard.call(int)


def test_load_of_its_own_guard_closes_the_circle():
    """A ladder moved by how full a bulkhead is, that relieves that very bulkhead."""

    async def main() -> None:
        bulkhead = Bulkhead(10)
        ladder = Ladder("shop", load=in_flight(bulkhead), hold=1.0, recover_after=2.0)
        guard = new_guard(Fallback(static("old")), ladder.gate(), bulkhead)
        loop = asyncio.get_running_loop()

        async def real() -> str:
            done = loop.create_future()
            loop.call_later(1.0, done.set_result, "real")
            return await done

        async def arrive(at: float) -> str:
            begun = loop.create_future()
            loop.call_at(at, begun.set_result, None)
            await begun
            return await guard.acall(real)

        # 20 a second come for 5 s where 10 at once can be served, then 2 a second.
        rush = [arrive(n / 20) for n in range(100)]
        quiet = [arrive(5 + n / 2) for n in range(40)]
        results = await asyncio.gather(*rush, *quiet)
        assert 0 < results[:100].count("real") < 60
        assert results[-20:] == ["real"] * 20
        assert guard.snapshot()["policies"][2]["rejected"] <= 3

    run_virtual(main())


HISTORIES = st.lists(
    st.tuples(quarters(20), st.sampled_from([0.0, 0.65, 0.75, 0.95, 1.2])), min_size=1, max_size=30
)


@given(HISTORIES)
def test_the_success_path_agrees_with_the_rule(history):
    """Calls are let through and refused alike with and without the generated text."""

    def play(*, fast: bool) -> list[Any]:
        with virtual_time() as clock:
            load = Dial()
            ladder = Ladder("shop", load=load, hold=1.0, recover_after=3.0)
            guard = new_guard(ladder.gate("partial"))

            def function() -> str:
                return "real"

            guarded = guard(function)
            layers = [bound.layer("sync") for bound in guard.bounds]
            seen: list[Any] = []
            for after, value in history:
                clock.advance(after)
                load.value = value
                try:
                    if fast:
                        seen.append(guarded())
                    else:
                        seen.append(run_sync(Call(guard, layers, function, (), {}, clock.now())))
                except Overloaded as error:
                    seen.append(type(error))
                seen.append((ladder.level, guard.snapshot()["policies"]))
            return seen

    assert play(fast=True) == play(fast=False)


# What it survives


def test_threads_read_it_at_once():
    """While one thread looks, others take the level there is; no look is made twice at a time."""
    inside, go_on = threading.Event(), threading.Event()
    looking = 0
    most = 0

    def load() -> float:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        inside.set()
        go_on.wait(10)
        looking -= 1
        return 1.0

    ladder = Ladder("shop", load=load)
    seen: list[ServiceLevel] = []
    thread = threading.Thread(target=lambda: seen.append(ladder.level))
    thread.start()
    assert inside.wait(10)
    assert ladder.level is FULL
    go_on.set()
    thread.join()
    assert (seen, most) == ([CACHED], 1)


def test_a_look_does_not_overwrite_a_pin():
    """Pinned by another thread in the middle of a look, it stays where it was put."""
    ladder = Ladder("shop", load=lambda: 1.0)
    pins = threading.Thread(target=ladder.pin, args=("maintenance",))

    class Meanwhile:
        """A model whose level is read while another thread pins."""

        def update(self, *_state: Any) -> Move:
            return Move(FULL, CACHED, Cause.LOAD)

        @property
        def level(self) -> ServiceLevel:
            pins.start()
            if not ladder._mutex._is_owned():  # else it has to wait for us
                pins.join()
            return CACHED

    ladder._model = Meanwhile()  # type: ignore[assignment]
    assert ladder.level is not FULL
    pins.join()
    assert ladder._standing is MAINTENANCE


def test_it_works_in_a_child_of_a_fork():
    """Where another thread was looking at the fork, the child looks for itself."""
    with virtual_time():
        ladder = Ladder("shop", load=lambda: 1.0)
        ladder._lock.acquire()
        assert ladder.level is FULL
        ladder._after_fork()
        assert ladder.level is CACHED


def test_random_loads_never_break_it(rng: Random):
    """Whatever the load, the level is one of five and moves by one."""
    with virtual_time() as clock:
        ladder = Ladder("shop", load=lambda: rng.uniform(-1, 2), hold=0.0, recover_after=0.0)
        before = ladder.level
        for _ in range(1000):
            clock.advance(rng.uniform(0, 1))
            after = ladder.level
            assert abs(after - before) <= 1
            before = after


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ladder("", load=int), "a name"),
        (lambda: Ladder("shop"), "say what moves it"),
        (lambda: Ladder("shop", depends_on={}), "say what moves it"),
        (lambda: Ladder("shop", depends_on=[Breaker()]), "depends_on="),
        (lambda: Ladder("shop", depends_on={"redis": "cached"}), "pass a breaker"),
        (lambda: Ladder("shop", depends_on={new_guard(Bulkhead(1)): "cached"}), "pass a breaker"),
        (lambda: Ladder("shop", depends_on={Breaker(): "off"}), "'full', 'cached'"),
        (lambda: Ladder("shop", load=0.5), "pass a function"),
        (lambda: Ladder("shop", load=int, thresholds=0.5), "the load for each level"),
        (lambda: Ladder("shop", load=int, gap=1.0), "gap"),
        (lambda: Ladder("shop", load=int, hold=-1), "hold"),
        (lambda: Ladder("shop", load=int, recover_after="1"), "recover_after"),
        (lambda: Ladder("shop", load=int, clock=1), "pass a clock"),
        (lambda: Ladder("shop", load=int).rung("cached", "old"), "pass a function"),
        (lambda: Ladder("shop", load=int).rung("old", int), "'full', 'cached'"),
        (lambda: Ladder("shop", load=int).gate("old"), "'full', 'cached'"),
        (lambda: Ladder("shop", load=int).gate(mode="dry"), "'enforce', 'shadow', 'off'"),
        (lambda: Ladder("shop", load=int).allows("old"), "'full', 'cached'"),
    ],
)
def test_bad_arguments_are_told(make, message):
    """Each message says what to write instead."""
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_it_shows_itself():
    """Snapshot and representation tell where it stands, and why."""
    with virtual_time() as clock:
        breaker = Breaker()
        ladder = Ladder("shop", load=lambda: 0.75, depends_on={breaker: "static"})
        assert ladder.level is CACHED
        clock.advance(3.0)
        assert ladder.snapshot() == {
            "name": "shop",
            "level": "cached",
            "pinned": False,
            "seconds": 3.0,
            "load": {
                "name": "<lambda>",
                "value": 0.75,
                "measured": 0.75,
                "limit": 1.0,
                "failures": 0,
            },
            "depends_on": {"breaker": {"level": "static", "in_trouble": False}},
        }
        assert repr(ladder) == "<Ladder 'shop': cached>"
        assert repr(ladder.gate()) == "Ladder('shop').gate('full')"
        assert isinstance(ladder.gate(), LadderGate)
