from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Fallback,
    Guard,
    RateLimit,
    RateLimited,
    Retry,
    Shed,
    ThreadBulkhead,
    Throttle,
    TimedOut,
    Timeout,
    current_deadline,
    static,
)
from seawall.clients.llm import Model, Models
from seawall.context import current_attempt
from seawall.limits import aimd
from seawall.policies.fallback import fallback_reason
from seawall.runtime import generators
from seawall.shedding import by_latency
from seawall.testing import ScriptedService, hang, run_virtual, slow, virtual_time


def _retry(**settings):
    return Retry(on=ConnectionError, backoff=0.0, **settings)


@pytest.fixture
def bulkhead():
    """Return a bulkhead that shows how many slots a generator holds."""
    return Bulkhead(2)


@pytest.fixture
def guard(bulkhead):
    """Return a guard that retries and holds a slot."""
    return Guard("vendor", _retry(), bulkhead)


# --- Plain generators ---


def test_items_and_return_value_come_through(guard, bulkhead):
    """All items, in order, and the generator's return value; then the slot is free."""

    @guard
    def items():
        yield 1
        yield 2
        return "end"

    def collect():
        got = []
        got.append((yield from items()))
        yield got

    assert list(collect()) == [1, 2, ["end"]]
    assert bulkhead.in_flight == 0


def test_an_empty_generator_ends_at_once(guard, bulkhead):
    """A generator without items gives its return value and holds nothing."""

    @guard
    def items():
        return "end"
        yield

    with pytest.raises(StopIteration) as stop:
        next(items())
    assert stop.value.value == "end"
    assert bulkhead.in_flight == 0


def test_nothing_is_entered_before_the_first_step(guard, bulkhead):
    """Making the generator takes no slot; the first next() does."""

    @guard
    def items():
        yield 1

    stream = items()
    assert bulkhead.in_flight == 0
    next(stream)
    assert bulkhead.in_flight == 1
    stream.close()
    stream.close()
    assert bulkhead.in_flight == 0


def test_sent_values_arrive(guard):
    """What is sent goes to the function's own yield."""

    @guard
    def echo():
        got = None
        while got != "stop":
            got = yield got

    stream = echo()
    assert next(stream) is None
    assert stream.send("a") == "a"
    assert stream.send("b") == "b"
    with pytest.raises(StopIteration):
        stream.send("stop")


def test_thrown_errors_arrive(guard, bulkhead):
    """What is thrown in may be handled by the function; what is not comes out and frees."""

    @guard
    def items():
        try:
            yield 1
        except KeyError:
            yield "handled"
        yield 3

    stream = items()
    next(stream)
    assert stream.throw(KeyError()) == "handled"
    assert bulkhead.in_flight == 1
    with pytest.raises(ValueError, match="mine"):
        stream.throw(ValueError("mine"))
    assert bulkhead.in_flight == 0


def test_closing_early_closes_the_source(guard, bulkhead):
    """close() runs the function's own finally, then gives the slot back."""
    seen = []

    @guard
    def items():
        try:
            yield 1
        finally:
            seen.append(bulkhead.in_flight)

    stream = items()
    next(stream)
    stream.close()
    assert seen == [1]
    assert bulkhead.in_flight == 0


def test_a_dropped_generator_gives_its_slot_back(guard, bulkhead):
    """A generator nobody refers to any more holds nothing."""

    @guard
    def items():
        yield 1

    stream = items()
    next(stream)
    del stream
    gc.collect()
    assert bulkhead.in_flight == 0


def test_slots_are_given_back_once(guard, bulkhead):
    """However it ends, a slot is given back exactly once: never more free than there are."""

    @guard
    def items():
        yield 1
        yield 2

    for end in ("exhaust", "close", "throw"):
        stream = items()
        next(stream)
        assert bulkhead.in_flight == 1
        if end == "exhaust":
            list(stream)
        elif end == "close":
            stream.close()
        else:
            with pytest.raises(KeyError):
                stream.throw(KeyError())
        stream.close()
        assert bulkhead.in_flight == 0


def test_retried_only_before_the_first_item():
    """An error before the first item is retried; one after it is raised as it is."""
    starts = []
    guard = Guard("vendor", _retry())

    @guard
    def items():
        starts.append(current_attempt())
        if len(starts) < 3:
            raise ConnectionError("early")
        yield "first"
        raise ConnectionError("late")

    stream = items()
    assert next(stream) == "first"
    assert starts == [1, 2, 3]
    with pytest.raises(ConnectionError, match="late"):
        next(stream)
    assert len(starts) == 3


def test_a_retried_generator_holds_one_slot(bulkhead):
    """Attempts that failed before the first item hold nothing."""
    guard = Guard("vendor", _retry(), bulkhead)
    starts = []

    @guard
    def items():
        starts.append(bulkhead.in_flight)
        if len(starts) < 3:
            raise ConnectionError
        yield 1

    stream = items()
    next(stream)
    assert starts == [1, 1, 1]
    assert bulkhead.in_flight == 1
    stream.close()
    assert bulkhead.in_flight == 0


def test_the_breaker_counts_a_stream_that_breaks():
    """A stream that fails after its first item is one failure for the breaker."""
    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)

    @guard
    def items():
        yield 1
        raise ConnectionError

    with pytest.raises(ConnectionError):
        list(items())
    assert breaker.state == "open"


@pytest.mark.parametrize("pause", [0.0, 2.0])
def test_the_breaker_opens_for_streams_that_fail_at_their_opening_and_again_later(pause):
    """Also where the failed opening was counted before the retry: a long pause shows it."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=3)
        retry = Retry(on=ConnectionError, attempts=2, backoff=[pause], budget=None)
        guard = Guard("vendor", retry, breaker, clock=clock)
        starts = []

        @guard
        def items():
            starts.append(1)
            if len(starts) % 2:
                raise ConnectionError
            yield 1
            raise ConnectionError

        for _ in range(3):
            with pytest.raises(ConnectionError):
                list(items())
        assert breaker.state == "open"


def test_closing_early_is_no_verdict():
    """A consumer that has seen enough says nothing about the dependency."""
    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)

    @guard
    def items():
        yield 1
        yield 2

    stream = items()
    next(stream)
    stream.close()
    assert breaker.state == "closed"


def test_context_variables_are_set_for_each_step_only():
    """The attempt's number is seen inside each step, and never by the consumer."""
    guard = Guard("vendor", _retry())
    inside = []

    @guard
    def items():
        inside.append(current_attempt())
        if len(inside) == 1:
            raise ConnectionError
        yield 1
        inside.append(current_attempt())
        yield 2
        inside.append(current_attempt())

    outside = [current_attempt() for _ in items()]
    assert inside == [1, 2, 2, 2]
    assert outside == [1, 1]


def test_the_attempts_number_is_seen_when_closed():
    """A step's context also holds while the function cleans up after close()."""
    guard = Guard("vendor", _retry())
    seen = []

    @guard
    def items():
        seen.append(current_attempt())
        if len(seen) == 1:
            raise ConnectionError
        try:
            yield 1
        finally:
            seen.append(current_attempt())

    stream = items()
    next(stream)
    stream.close()
    assert seen == [1, 2, 2]


def test_a_cooperative_timeout_ends_at_the_first_item():
    """The deadline holds for the first item; neither consumer nor later steps see it."""
    with virtual_time() as clock:
        guard = Guard("vendor", Timeout(2.0, sync="cooperative"))
        inside = []

        @guard
        def items():
            inside.append(current_deadline().remaining())
            yield 1
            inside.append(current_deadline())
            yield 2

        outside = []
        for _ in items():
            outside.append(current_deadline())
            clock.advance(5.0)
    assert inside == [2.0, None]
    assert outside == [None, None]


def test_a_fallback_gives_its_own_items(bulkhead):
    """A level that returns an iterable, or is a generator itself, answers with its items."""

    def broken():
        raise ConnectionError
        yield

    def level():
        yield "a"
        return "end"

    guard = Guard("first", Fallback(level), bulkhead)
    with contextlib.closing(guard(broken)()) as stream:
        assert next(stream) == "a"
        with pytest.raises(StopIteration) as stop:
            next(stream)
    assert stop.value.value == "end"
    assert list(Guard("second", Fallback(static([1, 2])))(broken)()) == [1, 2]
    assert bulkhead.in_flight == 0


def test_closing_early_closes_what_a_fallback_returned(tmp_path):
    """A file, for example, whose items are its lines."""

    def broken():
        raise ConnectionError
        yield

    path = tmp_path / "kept.txt"
    path.write_text("a\nb\n")
    with path.open() as file:
        stream = Guard("vendor", Fallback(lambda: file))(broken)()
        assert next(stream) == "a\n"
        stream.close()
        assert file.closed


def test_a_generator_level_is_told_its_reason():
    """fallback_reason() is the error that made the fallback necessary, in each of its steps."""
    seen = []

    def broken():
        raise ConnectionError
        yield

    def level():
        seen.append(fallback_reason())
        yield 1
        seen.append(fallback_reason())

    for _ in Guard("vendor", Fallback(level))(broken)():
        assert fallback_reason() is None
    assert [type(reason) for reason in seen] == [ConnectionError, ConnectionError]


def test_a_generator_level_that_fails_at_once_passes_on():
    """A level that raises before its first item has not answered: the next one does."""

    def broken():
        raise ConnectionError
        yield

    def level():
        raise LookupError
        yield

    guard = Guard("vendor", Fallback(level, static(["b"])))
    assert list(guard(broken)()) == ["b"]


def test_a_fallback_does_not_answer_after_the_first_item():
    """An error after the first item is raised: part of the real answer was given already."""
    guard = Guard("vendor", Fallback(static(["later"])))

    @guard
    def items():
        yield 1
        raise ConnectionError

    stream = items()
    assert next(stream) == 1
    with pytest.raises(ConnectionError):
        next(stream)


@pytest.mark.parametrize(
    "policy", [lambda: Timeout(1.0, sync="thread"), lambda: Cache(60), lambda: ThreadBulkhead(1)]
)
def test_policies_that_cannot_guard_a_generator_say_so(policy):
    """A policy that runs the call elsewhere or keeps its answer refuses at decoration."""
    guard = Guard("vendor", policy())

    def items():
        yield

    with pytest.raises(TypeError, match="generator"):
        guard(items)


# --- Async generators ---


def test_async_items_come_through_and_free_the_slot():
    """All items, in order; the slot is held between them and free at the end."""

    async def main():
        bulkhead = Bulkhead(1)
        guard = Guard("vendor", _retry(), bulkhead)

        @guard
        async def items():
            yield 1
            yield 2

        seen = [(item, bulkhead.in_flight) async for item in items()]
        return seen, bulkhead.in_flight

    assert run_virtual(main()) == ([(1, 1), (2, 1)], 0)


def test_async_send_and_throw_arrive():
    """Asend and athrow go to the function; what it does not handle comes out and frees."""

    async def main():
        bulkhead = Bulkhead(1)
        guard = Guard("vendor", bulkhead)

        @guard
        async def echo():
            got = None
            while True:
                try:
                    got = yield got
                except KeyError:
                    got = "handled"

        stream = echo()
        seen = [await anext(stream), await stream.asend("a"), await stream.athrow(KeyError())]
        with pytest.raises(ValueError, match="mine"):
            await stream.athrow(ValueError("mine"))
        return seen, bulkhead.in_flight

    assert run_virtual(main()) == ([None, "a", "handled"], 0)


def test_async_closing_early_closes_the_source():
    """aclose() runs the function's own finally, awaits in it included, then frees once."""

    async def main():
        bulkhead = Bulkhead(1)
        guard = Guard("vendor", bulkhead)
        seen = []

        @guard
        async def items():
            try:
                yield 1
            finally:
                await ScriptedService(slow(1.0)).acall()
                seen.append(bulkhead.in_flight)

        stream = items()
        await anext(stream)
        await stream.aclose()
        await stream.aclose()
        return seen, bulkhead.in_flight

    assert run_virtual(main()) == ([1], 0)


def test_async_retried_only_before_the_first_item():
    """An error before the first item is retried; one after it is raised as it is."""

    async def main():
        starts = []
        guard = Guard("vendor", _retry())

        @guard
        async def items():
            starts.append(current_attempt())
            if len(starts) < 3:
                raise ConnectionError
            yield "first"
            raise ConnectionError("late")

        stream = items()
        assert await anext(stream) == "first"
        with pytest.raises(ConnectionError, match="late"):
            await anext(stream)
        return starts

    assert run_virtual(main()) == [1, 2, 3]


def test_async_timeout_ends_at_the_first_item():
    """The first item must come in time; later ones may take theirs."""

    async def main():
        guard = Guard("vendor", Bulkhead(1), Timeout(2.0))

        @guard
        async def items(first, second):
            await ScriptedService(slow(first)).acall()
            yield 1
            await ScriptedService(slow(second)).acall()
            yield 2

        with pytest.raises(TimedOut):
            await anext(items(3.0, 0.0))
        assert guard.policies[0].in_flight == 0
        return [item async for item in items(1.0, 50.0)]

    assert run_virtual(main()) == [1, 2]


def test_a_cancelled_consumer_frees_the_slot():
    """Cancellation while waiting for an item reaches the function, and frees the slot."""

    async def main():
        bulkhead = Bulkhead(1)
        breaker = Breaker(consecutive=1)
        guard = Guard("vendor", breaker, bulkhead)

        @guard
        async def items():
            yield 1
            await ScriptedService(hang()).acall()

        async def consume():
            async for _ in items():
                pass

        task = asyncio.ensure_future(consume())
        await asyncio.wait([task], timeout=1.0)
        assert bulkhead.in_flight == 1
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), bulkhead.in_flight, breaker.state

    assert run_virtual(main()) == (True, 0, "closed")


def test_an_async_generator_that_is_garbage_frees_its_slot():
    """The loop closes an async generator nobody refers to: then its slot is free."""

    async def main():
        bulkhead = Bulkhead(1)
        guard = Guard("vendor", bulkhead)
        closed = asyncio.Event()

        @guard
        async def items():
            try:
                yield 1
            finally:
                closed.set()

        stream = items()
        await anext(stream)
        del stream
        gc.collect()
        await closed.wait()
        await ScriptedService(slow(1.0)).acall()
        return bulkhead.in_flight

    assert run_virtual(main()) == 0


def test_async_context_variables_are_set_for_each_step_only():
    """The attempt's number is seen inside each step, and never by the consumer."""

    async def main():
        guard = Guard("vendor", _retry())
        inside = []

        @guard
        async def items():
            inside.append(current_attempt())
            if len(inside) == 1:
                raise ConnectionError
            yield 1
            inside.append(current_attempt())
            yield 2

        outside = [current_attempt() async for _ in items()]
        return inside, outside

    assert run_virtual(main()) == ([1, 2, 2], [1, 1])


async def _broken():
    raise ConnectionError
    yield


def test_an_async_fallback_gives_its_own_items():
    """A level may be an async generator, a generator, a coroutine of a list, or a list."""

    async def async_items():
        yield "a"

    def items():
        yield "b"

    async def a_list():
        return ["c"]

    async def main():
        levels = (async_items, items, a_list, static(["d"]))
        guards = [Guard(f"vendor {number}", Fallback(level)) for number, level in enumerate(levels)]
        return [[item async for item in guard(_broken)()] for guard in guards]

    assert run_virtual(main()) == [["a"], ["b"], ["c"], ["d"]]


def test_closing_early_closes_an_async_fallback():
    """aclose() reaches the level that answers, before it returns."""

    async def main():
        seen = []

        async def level():
            try:
                yield 1
            finally:
                seen.append("closed")

        stream = Guard("vendor", Fallback(level))(_broken)()
        await anext(stream)
        await stream.aclose()
        return list(seen)

    assert run_virtual(main()) == ["closed"]


def test_an_async_fallback_is_sent_what_the_consumer_sends():
    """Asend and athrow reach the level that answers, as they do in a plain generator."""

    async def main():
        async def level():
            got = None
            while True:
                try:
                    got = yield got
                except KeyError:
                    got = "handled"

        stream = Guard("vendor", Fallback(level))(_broken)()
        seen = [await anext(stream), await stream.asend("a"), await stream.athrow(KeyError())]
        await stream.aclose()
        return seen

    assert run_virtual(main()) == [None, "a", "handled"]


# --- Gates against scarcity ---


def _scarce():
    limit = AdaptiveLimit(aimd(slow_after=9.0, initial=2), window=0.1)
    shares = AdaptiveLimit(partitions={"live": 0.5}, partition=lambda: "live")
    rate = RateLimit("10/week", cost=3, settle=len)
    throttle = Throttle(on=[ConnectionError, lambda _error, value: value is None])
    return [Shed(by_latency(9.0)), rate, limit, shares, throttle]


def _taken(guard):
    _, rate, limit, shares, _ = (bound.snapshot(0.0) for bound in guard.bounds)
    return limit["in_flight"], shares["in_flight"], 10 - rate["limits"]["10/week"]["left"]


@pytest.mark.parametrize("end", ["exhausted", "closed", "failed", "dropped"])
def test_scarce_slots_are_held_to_the_end_of_a_stream(end):
    """From the first item to the end, however it comes; the estimated cost stays, once."""
    with virtual_time():
        guard = Guard("scarce", *_scarce())

        @guard
        def items():
            yield 1
            yield 2
            if end == "failed":
                raise ConnectionError

        stream = items()
        assert _taken(guard) == (0, 0, 0)
        next(stream)
        assert _taken(guard) == (1, 1, 3)
        if end == "closed":
            stream.close()
        elif end == "dropped":
            del stream
            gc.collect()
        else:
            with pytest.raises(ConnectionError) if end == "failed" else contextlib.nullcontext():
                list(stream)
        assert _taken(guard) == (0, 0, 3)
        requests, accepts = guard.policies[-1]._model.recent(0.0)
        # What yielded an item was accepted, unless it failed after all.
        assert (requests, accepts) == (1, 0 if end == "failed" else 1)


@pytest.mark.parametrize("end", ["exhausted", "closed", "failed"])
def test_scarce_slots_are_held_to_the_end_of_an_async_stream(end):
    """The same for async generators."""

    async def main():
        guard = Guard("scarce", *_scarce())

        @guard
        async def items():
            yield 1
            yield 2
            if end == "failed":
                raise ConnectionError

        stream = items()
        await anext(stream)
        assert _taken(guard) == (1, 1, 3)
        if end == "closed":
            await stream.aclose()
        else:
            with pytest.raises(ConnectionError) if end == "failed" else contextlib.nullcontext():
                assert [item async for item in stream] == [2]
        assert _taken(guard) == (0, 0, 3)

    run_virtual(main())


def test_a_stream_takes_its_turn_before_the_first_item():
    """A rate is waited for, or refused, by the first step, not when the stream is made."""
    with virtual_time() as clock:
        patient = Guard("patient", RateLimit("1/10s", max_wait=20.0))
        strict = Guard("strict", RateLimit("1/10s"))

        def items():
            yield clock.now()

        assert [next(patient(items)()) for _ in range(3)] == [0.0, 10.0, 20.0]
        streams = [strict(items)() for _ in range(2)]
        next(streams[0])
        with pytest.raises(RateLimited):
            next(streams[1])


# --- Open when the event loop ends ---


async def slowly(closed):
    """Give items without end; closing takes a while."""
    try:
        while True:
            yield 1
    finally:
        await asyncio.sleep(0)  # noqa: TID251 - no time passes
        closed.append("closed")


def _guarded(how, closed):
    """Return an async generator with guards around it, in one way or another."""
    guards = [Guard(f"vendor {number}", Bulkhead(9)) for number in range(3)]
    if how == "one guard":
        return guards, guards[0](slowly)(closed)
    if how == "three guards":
        return guards, guards[0](guards[1](guards[2](slowly)))(closed)
    if how == "a fallback":
        guards.append(Guard("vendor 3", Fallback(lambda: slowly(closed), on=ConnectionError)))

        @guards[3]
        async def failing():
            raise ConnectionError
            yield

        return guards, failing()
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["one guard", "three guards", "a fallback"])
@pytest.mark.parametrize("seen", [False, True])
def test_one_that_is_open_when_the_loop_ends_is_closed_once(how, seen, caplog, monkeypatch):
    """The loop closes what it has seen begin, all at once; if it saw the source, it would clash."""
    if seen:
        monkeypatch.setattr(generators, "first_step", anext)
    closed, left = [], []

    async def main():
        guards, items = _guarded(how, closed)
        left.append(items)
        assert await anext(items) == 1
        return guards

    for guard in asyncio.run(main()):
        guard.close()
    assert closed == ["closed"]
    assert ("already running" in caplog.text) is seen


def test_models_that_stream_when_the_loop_ends_are_closed_once(caplog):
    """The chain of models closes the stream of the one that answers."""
    closed, left = [], []

    async def main():
        models = Models(Model("first", lambda: slowly(closed)))
        items = models.astream()
        left.append(items)
        assert await anext(items) == 1

    asyncio.run(main())
    assert closed == ["closed"]
    assert caplog.text == ""


def test_a_source_that_is_forgotten_is_closed_by_its_loop():
    """Nobody holds the guarded generator any more: the loop closes it, and that the source."""
    closed = []

    async def main():
        guards, items = _guarded("one guard", closed)
        await anext(items)
        del items
        gc.collect()
        for _ in range(10):
            await asyncio.sleep(0)  # noqa: TID251 - no time passes
        assert closed == ["closed"]
        return guards

    for guard in asyncio.run(main()):
        guard.close()
