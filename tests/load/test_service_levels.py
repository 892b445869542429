"""ServiceLevels: what changes the level, who reads it, which events it emits."""

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
    Fallback,
    Guard,
    Overloaded,
    Retry,
    Timeout,
    static,
    subscribe,
)
from seawall.events import CallRejected, LevelChanged, SettingsChanged
from seawall.load import ServiceLevel, ServiceLevels
from seawall.load.service_levels import LevelGate
from seawall.load.signals import in_flight
from seawall.models.service_levels import LevelCause, Move
from seawall.policies.fallback import fallback_reason
from seawall.runtime.call import Call
from seawall.runtime.interpreter import run_sync
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time
from tests.support import new_guard, quarters

FULL, CACHED, PARTIAL, STATIC, MAINTENANCE = ServiceLevel


class Dial:
    """A load that is set by hand."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def __call__(self) -> float:
        return self.value


def history(levels: ServiceLevels, clock: Any, seconds: int) -> list[str]:
    """Read the levels once a second."""
    seen = []
    for _ in range(seconds):
        seen.append(levels.level.label)
        clock.advance(1.0)
    return seen


# What moves it


def test_load_moves_it_down_and_up():
    """One level in each `hold` while load is high, one in each `recover_after` of calm."""
    with virtual_time() as clock:
        load = Dial(0.85)
        levels = ServiceLevels("shop", load=load, hold=2.0, recover_after=3.0)
        assert history(levels, clock, 5) == ["cached", "cached", "partial", "partial", "partial"]
        load.value = 0.65  # below the threshold of partial less the gap, not below that of cached
        assert history(levels, clock, 8) == ["partial"] * 3 + ["cached"] * 5
        load.value = 0.0
        assert history(levels, clock, 5) == ["cached"] * 3 + ["full"] * 2


def test_it_looks_at_most_ten_times_a_second():
    """In between, reading it costs a look at the clock."""
    with virtual_time() as clock:
        looks = []
        levels = ServiceLevels("shop", load=lambda: looks.append(1) or 0.0)
        for _ in range(100):
            assert levels.level is FULL
        assert len(looks) == 1
        clock.advance(0.1)
        assert levels.level is FULL
        assert len(looks) == 2


def test_an_open_circuit_moves_it_at_once():
    """While the breaker of a dependency refuses calls, no more than that level is given."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=10.0)
        vendor = new_guard(breaker)
        for thing in (breaker, vendor):
            levels = ServiceLevels("shop", depends_on={thing: "partial"}, recover_after=5.0)
            vendor.call(int)
            assert levels.level is FULL
            vendor.attempt(ScriptedService(fail(OSError)).call)
            clock.advance(0.1)
            assert levels.level is PARTIAL
            clock.advance(9.9)  # the break is over: somebody has to try
            assert levels.level is PARTIAL
            clock.advance(5.0)
            assert levels.level is CACHED
            clock.advance(5.0)
            assert levels.level is FULL
            breaker.close()


def test_a_function_may_tell_of_trouble():
    """Whatever can be asked; the worst of several demands counts."""
    with virtual_time() as clock:
        down: set[str] = set()

        def redis_down() -> bool:
            return "redis" in down

        def everything_down() -> bool:
            return "everything" in down

        levels = ServiceLevels(
            "shop",
            depends_on={redis_down: CACHED, everything_down: "maintenance"},
            recover_after=0.0,
        )
        for names, level in [({"redis"}, CACHED), ({"redis", "everything"}, MAINTENANCE)]:
            down |= names
            clock.advance(1.0)
            assert levels.level is level
        assert levels.snapshot()["depends_on"] == {
            "redis_down": {"level": "cached", "in_trouble": True},
            "everything_down": {"level": "maintenance", "in_trouble": True},
        }


def test_each_dependency_has_a_name_of_its_own():
    """A breaker is called after its guard; of two with the same name the second has a number."""
    with virtual_time():
        first, second, free = Breaker(), Breaker(), Breaker()
        demands = {first: "cached", second: "static", free: "partial"}
        functions = {(lambda: True): "partial", (lambda: False): "static"}
        levels = ServiceLevels("shop", depends_on={**demands, **functions})
        guards = Guard("stock", first), Guard("prices", second)
        shown = levels.snapshot()["depends_on"]
        assert list(shown) == ["stock", "prices", "breaker", "<lambda>", "<lambda> 2"]
        assert shown["<lambda> 2"] == {"level": "static", "in_trouble": False}
        for guard in guards:
            guard.close()
        del guards, guard
        gc.collect()
        assert list(levels.snapshot()["depends_on"])[:3] == ["breaker", "breaker 2", "breaker 3"]


def test_what_cannot_be_read_moves_nothing(caplog):
    """A load or a dependency that fails is logged, and the level stays readable."""

    def broken() -> float:
        raise ZeroDivisionError

    with virtual_time(), caplog.at_level(logging.ERROR, "seawall"):
        levels = ServiceLevels("shop", load=broken, depends_on={lambda: 1 / 0: "static"})
        assert levels.level is FULL
    assert len(caplog.records) == 2


def test_pinned_it_stays_where_it_was_put():
    """Whatever load says; unpinned, it stands where load has put it meanwhile."""
    with virtual_time() as clock:
        load = Dial(0.0)
        levels = ServiceLevels("shop", load=load)
        levels.pin("static")
        assert levels.level is STATIC
        load.value = 0.7
        assert history(levels, clock, 3) == ["static"] * 3
        assert levels.snapshot()["pinned"] is True
        levels.unpin()
        assert levels.level is CACHED
        levels.pin(FULL)
        load.value = 5.0
        assert history(levels, clock, 10) == ["full"] * 10
        with pytest.raises(ValueError, match="'full', 'cached'"):
            levels.pin("off")
        assert levels.level is FULL


def test_moves_are_told():
    """Each change is an event with its cause; nothing else is."""
    heard: list[LevelChanged] = []
    end = subscribe(heard.append, LevelChanged)
    try:
        with virtual_time() as clock:
            load, down = Dial(0.75), Dial(0.0)
            levels = ServiceLevels(
                "shop", load=load, depends_on={down: "static"}, recover_after=1.0
            )
            for change in [
                lambda: None,
                lambda: setattr(down, "value", 1.0),
                lambda: (setattr(down, "value", 0.0), setattr(load, "value", 0.0)),
                lambda: None,
                lambda: levels.pin("full"),
                levels.unpin,
                levels.unpin,
            ]:
                change()
                assert levels.level in ServiceLevel
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


def test_a_listener_may_read_the_levels():
    """Events are emitted outside the lock."""
    seen = []
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 1.0)
        end = subscribe(lambda _event: seen.append(levels.level), LevelChanged)
        try:
            assert levels.level is CACHED
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
            levels = ServiceLevels("shop", load=load)
            assert history(levels, clock, 10)[-1] == "full"
            levels.update(thresholds={"static": 0.5}, hold=0.0, recover_after=2.0)
            assert history(levels, clock, 1) == ["static"]
            load.value = 0.0
            assert history(levels, clock, 3) == ["static", "static", "full"]
            with pytest.raises(ValueError, match="hold"):
                levels.update(gap=0.2, hold=-1.0)
            assert levels.settings.gap == 0.1
            with pytest.raises(TypeError, match="thresholds, gap, hold, recover_after"):
                levels.update(load=load)
            with pytest.raises(TypeError, match="name what to change"):
                levels.update()
    finally:
        end()
    assert [(event.guard, event.policy) for event in heard] == [("shop", "service_levels")]


# Who reads it


def test_handlers_ask_what_they_may_do():
    """A level is allowed where the levels stands, or better."""
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 0.0)
        levels.pin("partial")
        allowed = [level.label for level in ServiceLevel if levels.allows(level)]
        assert allowed == ["partial", "static", "maintenance"]
        assert levels.allows("static")
        assert not levels.allows("cached")


def shop(levels: ServiceLevels) -> Guard:
    cache = Cache(60.0, key=lambda *_args: 1)
    return new_guard(
        Fallback(
            levels.at("cached", lambda item: f"old {item}"),
            levels.at("partial", lambda: "popular"),  # takes no arguments
            levels.at("static", static("fixed")),
            static("closed"),
        ),
        levels.gate(),
        cache,
        Timeout(1.0, sync="cooperative"),
    )


def test_a_stack_answers_by_the_levels():
    """The gate stops the real call, and the rungs answer from where the levels stands."""
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 0.0)
        guard = shop(levels)
        service = ScriptedService(answer("real"))
        answers = []
        for level in ServiceLevel:
            levels.pin(level)
            answers.append(guard.call(service.call, "book"))
        assert answers == ["real", "old book", "popular", "fixed", "closed"]
        assert service.calls == 1


def test_at_full_service_a_failure_is_answered_by_the_first_rung():
    """Rungs are fallbacks as others: they answer errors too, where the levels allows them."""
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 0.0)
        result = shop(levels).attempt(ScriptedService(fail(OSError)).call, "book")
        assert (result.value, result.level, result.reason) == ("old book", 1, "OSError")
        levels.pin("partial")
        result = shop(levels).attempt(ScriptedService(answer(1)).call, "book")
        assert (result.value, result.level, result.reason) == ("popular", 2, "overloaded")


def test_rungs_may_be_async_and_methods():
    """Whatever a fallback level may be, and it still knows why it is needed."""

    class Memory:
        async def last(self, item: str) -> str:
            return f"{item}: {type(fallback_reason()).__name__}"

        def nothing(self) -> str:
            return "nothing"

    async def main() -> None:
        levels = ServiceLevels("shop", load=lambda: 0.0)
        memory = Memory()
        guard = new_guard(
            Fallback(levels.at("cached", memory.last), levels.at("static", memory.nothing)),
            levels.gate("full"),
        )
        service = ScriptedService(answer("real"))
        levels.pin("cached")
        assert await guard.acall(service.acall, "book") == "book: Overloaded"
        levels.pin("static")
        assert await guard.acall(service.acall, "book") == "nothing"
        levels.pin("maintenance")
        with pytest.raises(Overloaded):
            await guard.acall(service.acall, "book")

    run_virtual(main())


def test_a_rung_alone_says_why_it_does_not_answer():
    """Outside of a fallback it raises, with the levels's name and level."""
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 0.0)
        rung = levels.at("cached", lambda: "old")
        assert rung() == "old"
        levels.pin("static")
        with pytest.raises(Overloaded, match="'shop' is static, below cached") as caught:
            rung()
        assert (caught.value.guard, caught.value.policy) == ("shop", "service_levels")


def test_a_refused_call_costs_the_stack_nothing():
    """Not a retry, not a slot, not a failure of the circuit; and it is counted."""
    heard: list[CallRejected] = []
    end = subscribe(heard.append, CallRejected)
    try:
        with virtual_time():
            levels = ServiceLevels("shop", load=lambda: 0.0)
            breaker, bulkhead = Breaker(consecutive=1), Bulkhead(1)
            gate = levels.gate()
            guard = new_guard(Retry(on=OSError), gate, breaker, bulkhead)
            levels.pin("cached")
            with pytest.raises(Overloaded) as caught:
                guard.call(int)
            assert (caught.value.guard, caught.value.policy) == (guard.name, "service_levels")
            shown = guard.snapshot()
            assert (shown["rejected"], shown["retries"], shown["failed"]) == (1, 0, 0)
            assert shown["policies"][1] == {
                "policy": "service_levels",
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
        ("service_levels", True),
        ("service_levels", False),
    ]


def test_a_guard_on_another_clock_asks_the_levels_each_time():
    """Instants of two clocks say nothing of each other."""
    load = Dial(0.0)
    with virtual_time() as clock:
        levels = ServiceLevels("shop", load=load, hold=0.0)
    with virtual_time():
        guard = new_guard(levels.gate())
        assert guard.call(int) == 0
        load.value = 1.0
        clock.advance(1.0)
        with pytest.raises(Overloaded):
            guard.call(int)


def test_load_of_its_own_guard_closes_the_circle():
    """A levels moved by how full a bulkhead is, that relieves that very bulkhead."""

    async def main() -> None:
        bulkhead = Bulkhead(10)
        levels = ServiceLevels("shop", load=in_flight(bulkhead), hold=1.0, recover_after=2.0)
        guard = new_guard(Fallback(static("old")), levels.gate(), bulkhead)
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
            levels = ServiceLevels("shop", load=load, hold=1.0, recover_after=3.0)
            guard = new_guard(levels.gate("partial"))

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
                seen.append((levels.level, guard.snapshot()["policies"]))
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

    levels = ServiceLevels("shop", load=load)
    seen: list[ServiceLevel] = []
    thread = threading.Thread(target=lambda: seen.append(levels.level))
    thread.start()
    assert inside.wait(10)
    assert levels.level is FULL
    go_on.set()
    thread.join()
    assert (seen, most) == ([CACHED], 1)


def test_a_look_does_not_overwrite_a_pin():
    """Pinned by another thread in the middle of a look, it stays where it was put."""
    levels = ServiceLevels("shop", load=lambda: 1.0)
    pins = threading.Thread(target=levels.pin, args=("maintenance",))

    class Meanwhile:
        """A model whose level is read while another thread pins."""

        def update(self, *_state: Any) -> Move:
            return Move(FULL, CACHED, LevelCause.LOAD)

        @property
        def level(self) -> ServiceLevel:
            pins.start()
            if not levels._mutex._is_owned():  # else it has to wait for us
                pins.join()
            return CACHED

    levels._model = Meanwhile()  # type: ignore[assignment]
    assert levels.level is not FULL
    pins.join()
    assert levels._standing is MAINTENANCE


def test_it_works_in_a_child_of_a_fork():
    """Where another thread was looking at the fork, the child looks for itself."""
    with virtual_time():
        levels = ServiceLevels("shop", load=lambda: 1.0)
        levels._lock.acquire()
        assert levels.level is FULL
        levels._after_fork()
        assert levels.level is CACHED


def test_random_loads_never_break_it(rng: Random):
    """Whatever the load, the level is one of five and moves by one."""
    with virtual_time() as clock:
        levels = ServiceLevels("shop", load=lambda: rng.uniform(-1, 2), hold=0.0, recover_after=0.0)
        before = levels.level
        for _ in range(1000):
            clock.advance(rng.uniform(0, 1))
            after = levels.level
            assert abs(after - before) <= 1
            before = after


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ServiceLevels("", load=int), "a name"),
        (lambda: ServiceLevels("shop"), "say what moves it"),
        (lambda: ServiceLevels("shop", depends_on={}), "say what moves it"),
        (lambda: ServiceLevels("shop", depends_on=[Breaker()]), "depends_on="),
        (lambda: ServiceLevels("shop", depends_on={"redis": "cached"}), "pass a breaker"),
        (
            lambda: ServiceLevels("shop", depends_on={new_guard(Bulkhead(1)): "cached"}),
            "pass a breaker",
        ),
        (lambda: ServiceLevels("shop", depends_on={Breaker(): "off"}), "'full', 'cached'"),
        (lambda: ServiceLevels("shop", load=0.5), "pass a function"),
        (lambda: ServiceLevels("shop", load=int, thresholds=0.5), "the load for each level"),
        (lambda: ServiceLevels("shop", load=int, gap=1.0), "gap"),
        (lambda: ServiceLevels("shop", load=int, hold=-1), "hold"),
        (lambda: ServiceLevels("shop", load=int, recover_after="1"), "recover_after"),
        (lambda: ServiceLevels("shop", load=int, clock=1), "pass a clock"),
        (lambda: ServiceLevels("shop", load=int).at("cached", "old"), "pass a function"),
        (lambda: ServiceLevels("shop", load=int).at("old", int), "'full', 'cached'"),
        (lambda: ServiceLevels("shop", load=int).gate("old"), "'full', 'cached'"),
        (lambda: ServiceLevels("shop", load=int).gate(mode="dry"), "'enforce', 'shadow', 'off'"),
        (lambda: ServiceLevels("shop", load=int).allows("old"), "'full', 'cached'"),
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
        levels = ServiceLevels("shop", load=lambda: 0.75, depends_on={breaker: "static"})
        assert levels.level is CACHED
        clock.advance(3.0)
        assert levels.snapshot() == {
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
        assert repr(levels) == "<ServiceLevels 'shop': cached>"
        assert repr(levels.gate()) == "ServiceLevels('shop').gate('full')"
        assert isinstance(levels.gate(), LevelGate)
