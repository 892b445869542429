"""Lesser answers name their source and cause, are counted, and can be collected."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from contextvars import copy_context
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Cache,
    Fallback,
    Guard,
    Overloaded,
    ThreadBulkhead,
    Timeout,
    degradations,
    snapshot,
    static,
    subscribe,
)
from seawall.clients.llm import Model, Models
from seawall.errors import CacheMiss
from seawall.events import CallDegraded
from seawall.load import ServiceLevels
from seawall.resources import IoPool, Pool
from seawall.testing import ScriptedService, Step, answer, fail, run_virtual, slow, virtual_time


class Lost(ConnectionError):
    """An error whose instances are known."""

    alive: ClassVar[WeakSet[Lost]] = WeakSet()

    def __init__(self) -> None:
        super().__init__("no route")
        self.alive.add(self)


def down() -> Any:
    """Fail."""
    raise Lost


async def adown() -> Any:
    """Fail, awaited."""
    raise Lost


def popular_items() -> str:
    """Answer for everybody."""
    return "bread"


def less(name: str, *levels: Any) -> Guard:
    """Return a guard that answers with less."""
    return Guard(name, Fallback(*levels or (popular_items,)))


def told(seen: Any) -> list[tuple[str, str, int]]:
    """Return guard, source and level of each."""
    return [(one.guard, one.source, one.level) for one in seen]


# --- Result ---


def test_a_degraded_result_names_source_level_and_cause():
    """The source is the level that answered; the cause is the very error of the real call."""
    guard = less("shop", down, static("later"))
    error = ConnectionError("no route")
    result = guard.attempt(ScriptedService(fail(error)).call)
    assert (result.value, result.source, result.level) == ("later", "static", 2)
    assert result.cause is error
    assert (result.reason, result.age) == ("ConnectionError", None)
    assert "source='static', level=2" in repr(result)


def test_a_real_answer_and_a_failure_have_no_source():
    """Nothing is degraded there, and the error of a failure is `error`."""
    guard = Guard("shop", Fallback(static("later"), on=KeyError))
    for result in (guard.attempt(popular_items), guard.attempt(down)):
        assert (result.source, result.cause, result.level, result.degraded) == (
            None,
            None,
            0,
            False,
        )


def test_an_answer_that_a_retry_made_real_has_no_source():
    """A lesser answer further in that was not the last word is not told."""
    guard = less("outer", static("outer"))
    inner = Guard("inner", Fallback(static("inner")))
    result = guard.attempt(inner(down))
    assert (result.value, result.source) == ("inner", None)


class _Callable:
    def __call__(self) -> str:
        return "less"

    def method(self) -> str:
        return "less"


@pytest.mark.parametrize(
    ("level", "source"),
    [
        (popular_items, "popular_items"),
        (partial(str, "secret"), "str"),
        (_Callable(), "_Callable"),
        (_Callable().method, "_Callable.method"),
        (static("secret"), "static"),
        (lambda: "less", "<lambda>"),
        (Guard.alone(Timeout(1.0, sync="cooperative"), popular_items), "popular_items"),
    ],
)
def test_a_source_is_the_name_of_the_function(level, source):
    """It never shows a value; where a function was made does not matter."""
    assert less("shop", level).attempt(down).source == source


def test_a_stale_answer_tells_its_age_and_is_counted_apart():
    """`degraded` has all lesser answers, `stale` the old ones of a cache."""
    with virtual_time() as clock:
        guard = Guard("shop", Fallback(static(0)), Cache(1.0, stale_if_error=60.0))
        call = ScriptedService(answer("old"), fail(ConnectionError)).call
        guard.call(call)
        clock.advance(5.0)
        result = guard.attempt(call)
        assert (result.value, result.source, result.level) == ("old", "cache: stale", 1)
        assert (result.age, result.reason) == (5.0, "ConnectionError")
        assert isinstance(result.cause, ConnectionError)
        clock.advance(100.0)
        assert guard.attempt(call).source == "static"
    seen = guard.snapshot()
    assert (seen["degraded"], seen["stale"]) == (2, 1)


def test_a_stale_level_of_a_fallback_counts_as_stale():
    """`cache.stale` is the same old answer, also as a rung of a levels."""
    with virtual_time() as clock:
        cache = Cache(1.0, stale_if_error=60.0)
        filled = Guard("filled", cache)
        filled.call(popular_items)
        clock.advance(5.0)
        levels = ServiceLevels("shop", load=lambda: 0.0)
        for level in (cache.stale, levels.at("cached", cache.stale)):
            guard = Guard("asked", Fallback(level, static(0)))
            result = guard.attempt(down)
            assert (result.value, result.source, result.age) == ("bread", "cache: stale", 5.0)
            assert guard.snapshot()["stale"] == 1
            guard.close()


def test_the_age_of_a_level_that_passed_on_is_not_that_of_the_next():
    """Only the level that answers says how old its answer is."""
    with virtual_time() as clock:
        cache = Cache(1.0, stale_if_error=60.0)
        Guard("filled", cache).call(popular_items)
        clock.advance(5.0)

        def fussy() -> str:
            raise CacheMiss(cache.stale())

        result = Guard("asked", Fallback(fussy, static(0))).attempt(down)
    assert (result.source, result.age) == ("static", None)


def test_followers_of_a_flight_hear_where_its_answer_came_from():
    """All who waited for one call learn its source and cause, and are counted."""

    async def main():
        guard = Guard("shop", Cache(1.0, stale_if_error=60.0))
        service = ScriptedService(answer("old"), Step(error=ConnectionError, delay=1.0))
        await guard.acall(service.acall)
        await ScriptedService(slow(5.0)).acall()
        results = await asyncio.gather(*(guard.aattempt(service.acall) for _ in range(3)))
        return [(r.source, r.age, r.reason) for r in results], guard.snapshot()["stale"]

    sources, stale = run_virtual(main())
    assert sources == [("cache: stale", 6.0, "ConnectionError")] * 3
    assert stale == 3


@pytest.mark.parametrize("kind", ["fallback", "cache", "nested", "driven"])
def test_nothing_but_the_result_keeps_the_cause_alive(kind):
    """When the result goes, the error and its frames go with it, without a collection."""
    with virtual_time() as clock:
        policies = {
            "fallback": [Fallback(static(0))],
            "cache": [Cache(1.0, stale_if_error=600.0)],
            "nested": [Cache(1.0), Fallback(static(0))],
            "driven": [Fallback(static(0)), ThreadBulkhead(1)],
        }[kind]
        guard = Guard("shop", *policies)
        steps = iter([int])

        def call() -> Any:
            return next(steps, down)()  # it fails from the second time on

        guard.call(call)
        clock.advance(5.0)
        gc.collect()
        gc.disable()
        try:
            with degradations() as seen:
                result = guard.attempt(call)
                assert [*Lost.alive] == [result.cause]
                del result
                assert guard.call(call) == 0
            assert len(seen) == 2
            assert not Lost.alive
        finally:
            gc.enable()


# --- degradations() ---


def test_degradations_collects_what_is_degraded_inside():
    """Of all guards, nested ones too, in order; and nothing of what is outside of the block."""
    inner, outer = less("inner"), less("outer", static("x"))

    def page() -> Any:
        inner.call(down)
        return down()

    inner.call(down)
    with degradations() as seen:
        assert not seen
        inner.call(popular_items)
        outer.call(page)
    inner.call(down)
    assert told(seen) == [("inner", "popular_items", 1), ("outer", "static", 1)]
    assert (seen[0].reason, seen[0].message, seen.left_out) == ("Lost", "no route", 0)


def test_degradations_reach_child_tasks_and_worker_threads():
    """The context goes along, so what is done for the block elsewhere is seen."""

    async def main():
        guard = less("shop")
        threads = Guard("threads", ThreadBulkhead(2))
        pool = IoPool("io", workers=2)
        with degradations() as seen:
            await asyncio.gather(guard.acall(adown), guard.acall(adown))
            async with asyncio.TaskGroup() as group:
                group.create_task(guard.acall(adown))
            await asyncio.to_thread(guard.call, down)
            await threads.acall(guard.call, down)
            await pool.arun(guard.call, down)
        await pool.aclose()
        return told(seen)

    assert run_virtual(main()) == [("shop", "popular_items", 1)] * 6


def test_degradations_are_nested():
    """An inner block has its own, the outer one has all."""
    guard = less("shop")
    with degradations() as outer:
        guard.call(down)
        with degradations() as inner:
            guard.call(down)
        guard.call(down)
    assert (len(outer), len(inner)) == (3, 1)


def test_a_block_that_has_ended_collects_no_more():
    """A task that was left running keeps the context, not the collection; the outer block does."""

    async def main():
        guard = less("shop")
        go_on = asyncio.Event()

        async def later() -> None:
            await go_on.wait()
            await guard.acall(adown)

        with degradations() as outer:
            with degradations() as inner:
                task = asyncio.create_task(later())
                await ScriptedService(slow(1.0)).acall()
            go_on.set()
            await task
        return len(inner), len(outer)

    assert run_virtual(main()) == (0, 1)


def test_degradations_are_bounded():
    """A block that is degraded without end keeps a hundred, and counts the rest."""
    guard = less("shop")
    with degradations() as seen:
        for _ in range(130):
            guard.call(down)
    assert (len(seen), seen.left_out) == (100, 30)
    assert "30 left out" in repr(seen)


def test_threads_do_not_fill_a_block_beyond_its_bound():
    """The bound is exact, whoever adds."""
    guard = less("shop")
    with degradations() as seen:
        work = lambda: [guard.call(down) for _ in range(50)]  # noqa: E731 - it has one use
        threads = [threading.Thread(target=copy_context().run, args=(work,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(seen), seen.left_out) == (100, 100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_block_goes_on_collecting_in_a_child_process():
    """Also if a thread that is gone there was just adding to it."""
    guard = less("shop")
    adding, done = threading.Event(), threading.Event()
    with degradations() as seen:

        def add() -> None:
            with seen._mutex:
                adding.set()
                assert done.wait(30)

        thread = threading.Thread(target=add)
        thread.start()
        assert adding.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                guard.call(down)
            finally:
                os._exit(len(seen))
        done.set()
        thread.join()
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1


def test_a_block_is_used_once():
    """What was collected is not mixed with another block's."""
    seen = degradations()
    with seen:
        pass
    with pytest.raises(RuntimeError, match="degradations\\(\\) for each block"), seen:
        pytest.fail("it was used already")


def test_subscribers_and_blocks_are_told_the_same():
    """One event each, whether nobody, one or both listen."""
    events: list[Any] = []
    guard = less("shop")
    stop = subscribe(events.append, CallDegraded)
    guard.call(down)
    with degradations() as seen:
        guard.call(down)
    stop()
    assert len(events) == 2
    assert events[1] is seen[0]


def test_substitutes_of_pools_and_models_are_collected():
    """Wherever something less is given, it is told alike."""
    models = Models(Model("large", down), Model("small", popular_items), name="chat")
    pool = Pool(object, name="db", max_size=1, when_exhausted="degrade", degraded=popular_items)
    with degradations() as seen:
        result = models.attempt()
        with pool.borrow(), pool.borrow():
            pass
    assert told(seen) == [("chat", "small", 1), ("db", "popular_items", 1)]
    assert [one.reason for one in seen] == ["Lost", "pool_exhausted"]
    assert (result.source, type(result.cause)) == ("small", Lost)


def test_service_levels_that_say_no_is_collected():
    """A handler that asks and gives less is degraded; one that is allowed is not; nor is a rung."""
    levels = ServiceLevels("shop", load=lambda: 0.0)
    heard: list[Any] = []
    stop = subscribe(heard.append, CallDegraded)
    with degradations() as seen:
        assert levels.allows("full")
        levels.pin("partial")
        assert not levels.allows("full")
        assert levels.allows("partial")
        guard = Guard("page", Fallback(levels.at("cached", down), static(0)), levels.gate("full"))
        guard.call(popular_items)
    stop()
    assert told(seen) == [("shop", "service level: partial", 2), ("page", "static", 2)]
    assert [one.reason for one in seen] == [Overloaded.reason] * 2
    assert told(heard) == [("page", "static", 2)]


@given(st.lists(st.sampled_from(["in", "out", "less", "real"]), max_size=60))
def test_a_block_has_exactly_what_was_degraded_while_it_was_open(steps):
    """However blocks are nested, each collects from its begin to its end."""
    guard = Guard.alone(Fallback(static(0)), lambda fails: down() if fails else 1)
    blocks: list[Any] = []
    expected: list[int] = []
    stack: list[int] = []
    for step in steps:
        if step == "in":
            stack.append(len(blocks))
            blocks.append(degradations())
            blocks[-1].__enter__()
            expected.append(0)
        elif step == "out" and stack:
            blocks[stack.pop()].__exit__(None, None, None)
        elif step in ("less", "real"):
            guard(step == "less")
            for number in stack:
                expected[number] += step == "less"
    while stack:
        blocks[stack.pop()].__exit__(None, None, None)
    assert [len(block) for block in blocks] == expected


def test_stale_answers_are_a_metric():
    """What is read of a guard has degraded and stale apart."""
    from seawall.telemetry.readings import readings_of

    with virtual_time() as clock:
        guard = Guard("shop", Cache(1.0, stale_if_error=60.0))
        call = ScriptedService(answer("old"), fail(ConnectionError)).call
        for seconds in (5.0, 0.0):
            guard.call(call)
            clock.advance(seconds)
        read = {one.metric.name: one.value for one in readings_of(snapshot())}
    assert read["seawall_stale_total"] == read["seawall_degraded_total"] == 1.0
