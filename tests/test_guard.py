from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import subprocess
import sys
import textwrap
import threading
from random import Random
from weakref import WeakSet

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    Fallback,
    Guard,
    RateLimit,
    Retry,
    ThreadBulkhead,
    TimedOut,
    Timeout,
    get_guard,
    static,
    subscribe,
)
from seawall.clock import SystemClock, VirtualClock
from seawall.context import current_attempt, idempotency_key
from seawall.errors import ReportedFailure
from seawall.events import BreakerChanged
from seawall.policies.breaker import single_probe
from seawall.registry import release
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, virtual_time


def _retry(**settings):
    return Retry(on=ConnectionError, backoff=0.0, **settings)


def _run(script):
    """Run a program in a process of its own and return what it printed."""
    done = subprocess.run(  # noqa: S603 - this project's own code
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return done.stdout.strip()


# --- The decorator ---


def test_a_plain_function_is_guarded():
    """A decorated `def` is retried, and gets its arguments each time."""
    seen = []
    guard = Guard("vendor", _retry())

    @guard
    def add(a, b=2):
        seen.append((a, b))
        if len(seen) < 3:
            raise ConnectionError
        return a + b

    assert add(1, b=5) == 6
    assert seen == [(1, 5)] * 3


def test_an_async_function_is_guarded():
    """A decorated `async def` is retried, and gets its arguments each time."""
    seen = []
    guard = Guard("vendor", _retry())

    @guard
    async def add(a, b=2):
        seen.append((a, b))
        if len(seen) < 3:
            raise ConnectionError
        return a + b

    assert run_virtual(add(1, b=5)) == 6
    assert seen == [(1, 5)] * 3


def test_methods_are_guarded():
    """Methods, class methods and static methods are guarded below their own decorator."""
    guard = Guard("vendor", _retry())

    class Client:
        base = 10

        @guard
        def plain(self, x):
            return self.base + x

        @guard
        async def later(self, x):
            return self.base + x

        @classmethod
        @guard
        def of_class(cls, x):
            return cls.base + x

        @staticmethod
        @guard
        def static(x):
            return x

        @guard
        def items(self):
            yield self.base

        @guard
        async def later_items(self):
            yield self.base

    client = Client()

    async def main():
        return await client.later(2), [item async for item in client.later_items()]

    assert client.plain(1) == 11
    assert Client.of_class(3) == 13
    assert client.static(4) == 4
    assert list(client.items()) == [10]
    assert run_virtual(main()) == (12, [10])


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod])
def test_the_wrong_order_of_decorators_says_the_right_one(wrapper):
    """A guard above @staticmethod or @classmethod raises and tells where it belongs."""
    guard = Guard("vendor", _retry())
    with pytest.raises(TypeError, match=f"below @{wrapper.__name__}"):
        guard(wrapper(lambda: None))


@pytest.mark.parametrize("thing", [int, 5, "text"])
def test_what_cannot_be_guarded_is_refused(thing):
    """A class or a value instead of a function raises at decoration."""
    guard = Guard("vendor", _retry())
    with pytest.raises(TypeError, match=r"guard a function|guard the function"):
        guard(thing)


def test_the_empty_call_says_how_to_decorate():
    """`@guard()` raises and shows both spellings."""
    guard = Guard("vendor", _retry())
    with pytest.raises(TypeError, match="write @guard"):
        guard()


class _Async:
    async def __call__(self, x):
        return x


class _Plain:
    def __call__(self, x):
        return x


async def _double(x, times=2):
    return x * times


def test_partials_and_callables_are_guarded_as_what_they_are():
    """A partial and a callable object are sync or async as what they call is."""
    guard = Guard("vendor", _retry())

    async def main():
        return [
            await guard(functools.partial(_double, times=3))(2),
            await guard(functools.partial(functools.partial(_double), 5))(),
            await guard(_Async())(7),
            await guard(functools.partial(_Async()))(8),
            await guard(_Async().__call__)(9),
        ]

    assert run_virtual(main()) == [6, 10, 7, 8, 9]
    assert guard(_Plain())(5) == 5
    assert guard(functools.partial(max, 3))(5) == 5
    assert guard(len)("abc") == 3


@pytest.mark.parametrize("kind", ["def", "async def", "generator", "async generator"])
def test_the_decorated_function_looks_like_itself(kind):
    """Name, docstring, signature and kind are those of the function."""
    guard = Guard("vendor", _retry())

    def plain(a: int, *, b: str = "x") -> str:
        """Say something."""
        return b * a

    async def coroutine(a: int, *, b: str = "x") -> str:
        """Say something."""
        return b * a

    def generator(a: int, *, b: str = "x"):
        """Say something."""
        yield b * a

    async def async_generator(a: int, *, b: str = "x"):
        """Say something."""
        yield b * a

    function = {
        "def": plain,
        "async def": coroutine,
        "generator": generator,
        "async generator": async_generator,
    }[kind]
    guarded = guard(function)
    assert inspect.signature(guarded) == inspect.signature(function)
    assert guarded.__name__ == function.__name__
    assert guarded.__qualname__ == function.__qualname__
    assert guarded.__doc__ == "Say something."
    assert guarded.__wrapped__ is function
    for ask in (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    ):
        assert ask(guarded) == ask(function)


def test_a_guard_may_guard_a_function_that_another_guards():
    """Guards nest around one function, as decorators do."""
    outer, inner = Guard("outer", _retry()), Guard("inner", Bulkhead(1))
    service = ScriptedService(fail(ConnectionError), answer("hello"))

    @outer
    @inner
    def call():
        return service.call()

    assert call() == "hello"
    assert outer.snapshot()["retries"] == 1
    assert inner.snapshot()["failed"] == 1


# --- call, acall, attempt, aattempt ---


def test_call_and_acall_pass_arguments_of_any_name():
    """The function's own keyword arguments never meet those of `call` and `acall`."""
    guard = Guard("vendor", _retry())

    def plain(*args, **kwargs):
        return args, kwargs

    async def coroutine(*args, **kwargs):
        return args, kwargs

    expected = ((1,), {"function": 2, "self": 3, "now": 4})
    assert guard.call(plain, 1, function=2, self=3, now=4) == expected
    assert run_virtual(guard.acall(coroutine, 1, function=2, self=3, now=4)) == expected
    assert guard.attempt(plain, 1, function=2, self=3, now=4).value == expected
    assert run_virtual(guard.aattempt(coroutine, 1, function=2, self=3, now=4)).value == expected


def test_call_refuses_an_async_function():
    """`call` with an `async def` would guard nothing: it raises and names `acall`."""
    guard = Guard("vendor", _retry())
    with pytest.raises(TypeError, match="acall"):
        guard.call(_double, 1).close()


def test_attempt_refuses_an_async_function():
    """`attempt` with an `async def` would guard nothing: it raises and names `aattempt`."""
    guard = Guard("vendor", _retry())
    with pytest.raises(TypeError, match=r"aattempt|acall"):
        guard.attempt(_double, 1).unwrap().close()


@pytest.mark.parametrize("way", ["call", "attempt"])
def test_a_forgotten_await_is_told_at_once_and_is_no_failure(way):
    """Whatever the stack is: the advice is the right one, and the breaker has seen nothing."""

    async def hello():
        return 1

    for policies in ([Breaker(consecutive=1)], [Timeout(1.0), Breaker(consecutive=1)]):
        guard = Guard("vendor", *policies)
        for _ in range(2):
            with pytest.raises(TypeError, match=r"hello is async: write `await guard.acall"):
                getattr(guard, way)(hello)
        assert guard.snapshot()["failed"] == 0
        guard.close()


def test_a_lambda_that_hands_out_a_coroutine_is_told_past_every_policy():
    """The program is wrong, not the dependency: no fallback hides it, no breaker counts it."""

    async def hello():
        return 1

    breaker = Breaker(consecutive=1)
    guard = Guard(
        "vendor", Fallback(static("try later")), Retry(on=Exception, backoff=0.0), breaker
    )
    for _ in range(2):
        with pytest.raises(TypeError, match="returned a coroutine to a sync call"):
            guard.call(lambda: hello())  # noqa: PLW0108 - as somebody writes who forgets acall
    assert breaker.state == "closed"
    assert guard.snapshot()["failed"] == 0


@pytest.mark.parametrize("way", ["acall", "aattempt"])
def test_a_plain_function_that_is_awaited_is_done_once(way):
    """What it returned is its answer; it was done, so it is no failure, and is not repeated."""
    sent = []

    def send(what):
        sent.append(what)
        return "sent"

    async def hello():
        return "hello"

    async def main():
        breaker = Breaker(consecutive=1)
        guard = Guard(
            "vendor", Fallback(static("try later")), Retry(on=Exception, backoff=0.0), breaker
        )
        for function, args, value in (
            (send, ("mail",), "sent"),
            (functools.partial(send, "mail"), (), "sent"),
            (lambda: hello(), (), "hello"),  # noqa: PLW0108 - a plain function, all the same
            (functools.partial(hello), (), "hello"),
            (hello, (), "hello"),
        ):
            found = await getattr(guard, way)(function, *args)
            assert (found if way == "acall" else found.value) == value
        assert sent == ["mail", "mail"]
        assert breaker.state == "closed"

    run_virtual(main())


@pytest.mark.parametrize("way", ["attempt", "aattempt"])
def test_an_attempt_that_failed_leaves_no_cycle(way):
    """Its error dies with the result, not with the next collection."""
    live = WeakSet()

    class Failed(Exception):
        def __init__(self):
            live.add(self)

    def fail_now():
        raise Failed

    async def fail_later():
        fail_now()

    async def main():
        guard = Guard("vendor", Bulkhead(3))
        for _ in range(3):
            if way == "attempt":
                guard.attempt(fail_now)
            else:
                await guard.aattempt(fail_later)

    gc.collect()
    gc.disable()
    try:
        run_virtual(main())
        assert not live
    finally:
        gc.enable()


def test_call_refuses_a_generator_function():
    """`call` with a generator function would guard nothing: it raises and says to decorate."""
    guard = Guard("vendor", _retry())

    def items():
        yield 1

    with pytest.raises(TypeError, match=r"decorat|@"):
        guard.call(items)


def test_the_result_of_a_success():
    """A real answer has level 0, no reason, one attempt and the time it took."""
    with virtual_time() as clock:
        guard = Guard("vendor", _retry())

        def work():
            clock.advance(1.5)
            return "hello"

        result = guard.attempt(work)
    assert (result.value, result.error, result.level, result.reason) == ("hello", None, 0, None)
    assert (result.attempts, result.elapsed, result.ok, result.degraded) == (1, 1.5, True, False)
    assert result.unwrap() == "hello"
    assert repr(result) == "<Result value='hello', attempts=1, elapsed=1.500>"


def test_the_result_of_a_failure():
    """An error is in the result with its reason, and unwrap() raises it itself."""
    error = ConnectionError("gone")
    result = Guard("vendor", _retry(attempts=3)).attempt(ScriptedService(fail(error)).call)
    assert (result.value, result.error, result.level) == (None, error, 0)
    assert (result.reason, result.attempts) == ("ConnectionError", 3)
    assert (result.ok, result.degraded) == (False, False)
    with pytest.raises(ConnectionError) as raised:
        result.unwrap()
    assert raised.value is error
    assert "error=ConnectionError('gone')" in repr(result)


def test_the_result_of_a_refusal():
    """A refused call has a stable word as its reason, and no attempt."""
    breaker = Breaker()
    guard = Guard("vendor", breaker)
    breaker.isolate()
    result = guard.attempt(lambda: 1)
    assert isinstance(result.error, CircuitOpen)
    assert (result.reason, result.attempts, result.level) == ("circuit_open", 0, 0)


def test_the_result_of_a_fallback():
    """A degraded answer tells its level, why, and how many attempts came before it."""
    levels = Fallback(ScriptedService(fail(LookupError)).call, static("later"))
    guard = Guard("vendor", levels, _retry(attempts=2))
    result = guard.attempt(ScriptedService(fail(ConnectionError)).call)
    assert (result.value, result.level, result.reason) == ("later", 2, "ConnectionError")
    assert (result.attempts, result.ok, result.degraded) == (2, True, True)
    assert "level=2" in repr(result)


def test_aattempt_tells_the_same():
    """The async form returns the same result for the same story."""

    async def main():
        guard = Guard("vendor", Fallback(static("later")), _retry(attempts=2), Timeout(2.0))
        return await guard.aattempt(ScriptedService(hang()).acall)

    result = run_virtual(main())
    assert (result.value, result.level, result.reason) == ("later", 1, "timed_out")
    assert (result.attempts, result.elapsed) == (1, 2.0)


def test_attempts_are_counted_through_the_recommended_stack():
    """With a cache between Fallback and Retry, Result.attempts is still the function's starts."""
    guard = Guard("vendor", Fallback(static("later")), Cache(60), _retry(attempts=3))
    service = ScriptedService(fail(ConnectionError))
    assert guard.attempt(service.call).attempts == service.calls == 3


def test_an_answer_from_memory_took_no_attempt():
    """Result.attempts is how often the function was started: 0 for a fresh cached answer."""
    guard = Guard("vendor", Cache(60))
    service = ScriptedService(answer("hello"))
    call = service.call
    guard.attempt(call)
    assert guard.attempt(call).attempts == 0
    assert service.calls == 1


def test_an_earlier_degraded_attempt_leaves_no_mark():
    """A real answer after a degraded one that was not good enough has level 0, and is kept."""
    cache = Cache(60)
    guard = Guard(
        "vendor",
        Retry(on=lambda _error, value: value == "degraded", backoff=0.0),
        cache,
        Fallback(static("degraded"), on=ConnectionError),
    )
    result = guard.attempt(ScriptedService(fail(ConnectionError), answer("real")).call)
    assert (result.value, result.level, result.reason) == ("real", 0, None)
    assert len(cache) == 1


def test_a_call_of_the_same_guard_further_in_has_its_own_result():
    """What a nested call of the same guard went through is not told of the outer one."""
    guard = Guard("vendor", Fallback(static("later")), _retry(attempts=3))
    inner = guard(ScriptedService(fail(ConnectionError)).call)

    def outer():
        return f"outer of {inner()}"

    result = guard.attempt(outer)
    assert (result.value, result.attempts, result.level) == ("outer of later", 1, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_exits_are_raised_by_attempt(error):
    """KeyboardInterrupt and SystemExit are never turned into a result, a retry or a fallback."""
    guard = Guard("vendor", Fallback(static("later")), Retry(on=Exception, backoff=0.0))
    calls = []

    def work():
        calls.append(1)
        raise error

    with pytest.raises(error):
        guard.attempt(work)
    assert calls == [1]


def test_cancellation_is_raised_by_aattempt():
    """A cancelled task stays cancelled: no result, no fallback."""

    async def main():
        guard = Guard("vendor", Fallback(static("later")), Bulkhead(1))
        task = asyncio.ensure_future(guard.aattempt(ScriptedService(hang()).acall))
        await asyncio.wait([task], timeout=1.0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled(), guard.policies[1].in_flight

    assert run_virtual(main()) == (True, 0)


def test_acall_runs_a_plain_function_in_a_thread_bulkhead():
    """With a ThreadBulkhead, acall takes a plain function and runs it off the loop."""

    async def main():
        guard = Guard("vendor", ThreadBulkhead(1))
        return await guard.acall(threading.get_ident)

    assert run_virtual(main()) != threading.get_ident()


def test_a_thread_bulkhead_refuses_an_async_function():
    """An `async def` in a worker thread would never run: decorating it raises."""
    guard = Guard("vendor", ThreadBulkhead(1))
    with pytest.raises(TypeError, match="plain"):
        guard(_double)


# --- Counting ---


@pytest.mark.parametrize(
    "policy",
    [
        lambda: Bulkhead(1),
        lambda: Cache(60),
        lambda: ThreadBulkhead(1),
        lambda: Timeout(5.0, sync="thread"),
        lambda: Timeout(5.0, sync="cooperative"),
    ],
    ids=["bulkhead", "cache", "thread bulkhead", "thread timeout", "cooperative timeout"],
)
def test_each_call_is_counted_once(policy):
    """One success and one failure are one each in the snapshot, whatever runs the call."""
    guard = Guard("vendor", policy(), Breaker())

    def work(error):
        if error:
            raise ConnectionError
        return 1

    guard.call(work, error=False)
    guard.attempt(work, error=True)
    snapshot = guard.snapshot()
    assert (snapshot["succeeded"], snapshot["failed"]) == (1, 1)
    assert snapshot["error_rate"] == 0.5


def test_the_snapshot_can_be_written_as_json():
    """The snapshot names the guard and each policy in order, and is plain data."""
    guard = Guard(
        "vendor",
        Fallback(static("later")),
        Cache(60, key=lambda: "key"),
        _retry(),
        Breaker(key=lambda: ("a", 1)),
        Bulkhead(2),
        Timeout(2.0, sync="cooperative"),
    )
    assert guard.call(lambda: 1) == 1
    snapshot = json.loads(json.dumps(guard.snapshot()))
    assert snapshot["name"] == "vendor"
    assert [part["policy"] for part in snapshot["policies"]] == [
        "fallback",
        "cache",
        "retry",
        "breaker",
        "bulkhead",
        "timeout",
    ]
    assert snapshot["policies"][4]["limit"] == 2


def test_latency_is_in_the_snapshot():
    """p50 is close to what the calls took."""
    with virtual_time() as clock:
        guard = Guard("vendor", Bulkhead(1))
        assert guard.snapshot()["p50"] is None
        for _ in range(10):
            guard.call(clock.sleep, 2.0)
        assert guard.snapshot()["p50"] == pytest.approx(2.0, rel=0.1)


def test_the_repr_shows_name_and_stack():
    """The repr reads as the stack does, outermost first."""
    guard = Guard("vendor", _retry(), Timeout(2.0))
    assert repr(guard) == "<Guard 'vendor': Retry > Timeout>"


# --- hold ---


def test_hold_enters_the_gates_only():
    """A block under hold() takes a slot, and neither retries nor falls back."""
    bulkhead = Bulkhead(1)
    guard = Guard("vendor", Fallback(static("later")), _retry(), bulkhead)
    with guard.hold():
        assert bulkhead.in_flight == 1
        with pytest.raises(BulkheadFull), guard.hold():
            pytest.fail("the only slot was taken")
    assert bulkhead.in_flight == 0
    with pytest.raises(ConnectionError), guard.hold():
        raise ConnectionError
    assert bulkhead.in_flight == 0


def test_async_hold_waits_for_its_slot():
    """`async with` waits for a slot on the loop, and gives it back."""

    async def main():
        bulkhead = Bulkhead(1, max_wait=5.0)
        guard = Guard("vendor", bulkhead)
        order = []

        async def block(name):
            async with guard.hold():
                order.append(f"{name} in")
                await ScriptedService(answer()).acall()
                order.append(f"{name} out")

        await asyncio.gather(block("a"), block("b"))
        return order, bulkhead.in_flight

    assert run_virtual(main()) == (["a in", "a out", "b in", "b out"], 0)


def test_a_cancelled_hold_gives_its_slot_back():
    """Cancellation inside the block, or while waiting for it, leaves nothing taken."""

    async def main():
        bulkhead = Bulkhead(1, max_wait=5.0)
        guard = Guard("vendor", bulkhead)

        async def block():
            async with guard.hold():
                await ScriptedService(hang()).acall()

        tasks = [asyncio.ensure_future(block()) for _ in range(2)]
        await asyncio.wait(tasks, timeout=1.0)
        for task in reversed(tasks):
            task.cancel()
        await asyncio.wait(tasks)
        return bulkhead.in_flight, bulkhead.waiting

    assert run_virtual(main()) == (0, 0)


def test_the_breaker_sees_what_happens_in_the_block():
    """A failed block is one failure for the breaker, and one that ends well a success."""
    breaker = Breaker(consecutive=2)
    guard = Guard("vendor", breaker)
    for _ in range(2):
        with pytest.raises(ConnectionError), guard.hold():
            raise ConnectionError
    assert breaker.state == "open"
    with pytest.raises(CircuitOpen), guard.hold():
        pytest.fail("the circuit was open")


def test_a_held_block_is_counted_once():
    """A block that fails is one failure and no success; one that ends well is the reverse."""
    guard = Guard("vendor", Bulkhead(1))
    with pytest.raises(ConnectionError), guard.hold():
        raise ConnectionError
    snapshot = guard.snapshot()
    assert (snapshot["succeeded"], snapshot["failed"]) == (0, 1)
    with guard.hold():
        pass
    assert guard.snapshot()["succeeded"] == 1


def test_a_block_that_says_it_failed_is_a_failure_for_the_breaker():
    """What raises nothing, such as a status 503, counts as failed: an error, or a text for one."""
    errors = []
    breaker = Breaker(consecutive=2, is_failure=lambda error, _value: errors.append(error) or error)
    guard = Guard("vendor", breaker)
    with guard.hold() as call:
        call.failed("status 503")
    refused = ConnectionError()
    with guard.hold() as call:
        call.failed(refused)
    assert breaker.state == "open"
    snapshot = guard.snapshot()
    assert (snapshot["succeeded"], snapshot["failed"]) == (0, 2)
    assert isinstance(errors[0], ReportedFailure)
    assert str(errors[0]) == "status 503"
    assert errors[1] is refused


def test_an_async_block_can_say_how_it_went():
    """The handle is the same under `async with`."""

    async def main():
        breaker = Breaker(consecutive=1)
        guard = Guard("vendor", breaker)
        async with guard.hold() as call:
            call.ignore()
        before = breaker.state
        async with guard.hold() as call:
            call.failed("status 503")
        return before, breaker.state

    assert run_virtual(main()) == ("closed", "open")


def _say_and_raise(guard, say, error):
    with guard.hold() as call:
        say(call)
        raise error


def test_a_block_that_is_ignored_gives_no_verdict():
    """It neither fails nor succeeds, whether it raises or not, and a probe's permit goes back."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=1, break_for=5.0, probes=single_probe())
        bulkhead = Bulkhead(1)
        guard = Guard("vendor", breaker, bulkhead)
        with pytest.raises(ValueError, match="not found"):
            _say_and_raise(guard, lambda call: call.ignore(), ValueError("not found"))
        assert breaker.state == "closed"
        with pytest.raises(ConnectionError), guard.hold():
            raise ConnectionError
        clock.advance(5.0)
        with guard.hold() as call:
            call.ignore()
        assert breaker.state == "half_open"
        with guard.hold():
            pass
        assert breaker.state == "closed"
        snapshot = guard.snapshot()
        assert (snapshot["succeeded"], snapshot["failed"], snapshot["cancelled"]) == (1, 1, 2)
        assert bulkhead.in_flight == 0


def test_the_last_word_of_a_block_counts():
    """A block may change its mind; what it said stands, whatever it raises."""
    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)
    with guard.hold() as call:
        call.failed("status 503")
        call.ignore()
    assert breaker.state == "closed"
    with pytest.raises(KeyboardInterrupt):
        _say_and_raise(guard, lambda call: call.failed("status 503"), KeyboardInterrupt())
    assert breaker.state == "open"


def test_a_block_says_how_it_went_while_it_runs():
    """A verdict outside of the block would be lost, so it raises; so does one that is no error."""
    hold = Guard("vendor", Bulkhead(1)).hold()
    with pytest.raises(RuntimeError, match="inside of it"):
        hold.ignore()
    with hold as call, pytest.raises(TypeError, match="pass an exception, or a text"):
        call.failed(503)
    with pytest.raises(RuntimeError, match="inside of it"):
        call.failed("status 503")


def test_a_hold_does_not_keep_the_error_that_it_was_told_alive():
    """The error leads to the frame that has the handle: no cycle is left when the block ends."""

    class Lost(Exception):
        pass

    def block(guard):
        with guard.hold() as call:
            try:
                ScriptedService(fail(Lost)).call()
            except Lost as error:
                alive.add(error)
                call.failed(error)

    alive = WeakSet()
    gc.disable()
    try:
        block(Guard("vendor", Breaker()))
        assert not alive
    finally:
        gc.enable()


def test_a_held_block_takes_the_time_of_the_block():
    """The latency of a held block is how long it lasted, not how long entering took."""
    with virtual_time() as clock:
        guard = Guard("vendor", Bulkhead(1))
        with guard.hold():
            clock.advance(2.0)
        assert guard.snapshot()["p50"] == pytest.approx(2.0, rel=0.1)


def test_a_keyed_breaker_cannot_be_held_without_a_key():
    """hold() has no arguments to take a key from: it says so, or takes them itself."""
    guard = Guard("vendor", Breaker(key=lambda user: user))
    with pytest.raises(TypeError, match="hold"), guard.hold():
        pytest.fail("no key was known")


# --- Names ---


def test_a_live_name_is_unique():
    """A second guard of a live name raises, and names the ways out."""
    first = Guard("vendor", Timeout(2.0))
    with pytest.raises(ValueError, match="alive already") as raised:
        Guard("vendor", Timeout(2.0))
    said = str(raised.value)
    assert "(a notebook, a reload), write replace=True, which closes that one" in said
    assert "write get_guard('vendor', lambda: Guard('vendor', ...)), which makes it once" in said
    assert said.endswith("choose another name, or close() that one")
    assert get_guard("vendor") is first


def test_close_frees_the_name():
    """After close() the name is free, and what was decorated goes on working."""
    first = Guard("vendor", _retry())
    guarded = first(lambda: "hello")
    first.close()
    second = Guard("vendor", _retry())
    first.close()
    assert get_guard("vendor") is second
    assert guarded() == "hello"


def test_garbage_frees_the_name_of_a_part():
    """A guard that is part of something else, which nothing refers to, does not keep its name."""
    gc.disable()
    try:
        release(Guard("vendor", _retry(), Breaker(), Bulkhead(1)))
        Guard("vendor", _retry())
    finally:
        gc.enable()


def test_a_refused_guard_leaves_no_trace_in_its_policies():
    """A guard refused for its name is not among those that its policies report to."""
    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="alive already"):
            Guard("vendor", breaker)
        events = []
        unsubscribe = subscribe(events.append, BreakerChanged)
        guard.attempt(ScriptedService(fail(ConnectionError)).call)
        unsubscribe()
    finally:
        gc.enable()
    assert len(events) == 1


def test_a_finaliser_may_close_a_guard_while_another_is_registered():
    """Garbage that closes its guard when it dies does not block the registry."""
    script = """
        import gc
        from seawall import Guard, Timeout

        class Client:
            def __init__(self):
                self.guard = Guard("mine", Timeout(1.0))
                self.cycle = self

            def __del__(self):
                self.guard.close()

        gc.disable()
        kept = Guard("vendor", Timeout(1.0))
        Client()
        try:
            Guard("vendor", Timeout(1.0))      # looks for garbage that holds the name
        except ValueError:
            print("refused")
    """
    assert _run(script) == "refused"


# --- Idempotent marks ---


def test_calls_that_are_not_idempotent_are_not_retried():
    """Marked on the guard, only calls with an idempotency key are retried."""
    guard = Guard("vendor", _retry(attempts=2), idempotent=False)
    service = ScriptedService(fail(ConnectionError))
    guard.attempt(service.call)
    assert service.calls == 1
    with idempotency_key("order-1"):
        guard.attempt(service.call)
    assert service.calls == 3


@pytest.mark.parametrize("default", [False, True])
def test_a_mark_is_for_one_function_alone(default):
    """`@guard(idempotent=...)` changes that function's retries, and nothing else's."""
    guard = Guard("vendor", _retry(attempts=2), Breaker(consecutive=100), idempotent=default)
    safe, unsafe = ScriptedService(fail(ConnectionError)), ScriptedService(fail(ConnectionError))
    plain = ScriptedService(fail(ConnectionError))
    for mark, service in ((True, safe), (False, unsafe)):
        with pytest.raises(ConnectionError):
            guard(idempotent=mark)(service.call)()
    with pytest.raises(ConnectionError):
        guard(plain.call)()
    assert (safe.calls, unsafe.calls, plain.calls) == (2, 1, 1 + default)
    assert guard.snapshot()["failed"] == 4 + default
    assert get_guard("vendor") is guard


def test_a_marked_function_shares_all_state():
    """A marked function goes through the same breaker and the same slots."""
    breaker, bulkhead = Breaker(consecutive=1), Bulkhead(1)
    guard = Guard("vendor", breaker, bulkhead)

    @guard(idempotent=False)
    async def marked():
        assert bulkhead.in_flight == 1
        raise ConnectionError

    with pytest.raises(ConnectionError):
        run_virtual(marked())
    assert breaker.state == "open"
    with pytest.raises(CircuitOpen):
        guard.call(lambda: 1)


# --- standard ---


def test_standard_builds_the_recommended_stack():
    """A few numbers make the recommended order."""
    guard = Guard.standard(
        "vendor",
        on=(ConnectionError, TimeoutError),
        timeout=2.0,
        limit=5,
        max_wait=0.5,
        fallback=static("later"),
    )
    assert repr(guard) == (
        "<Guard 'vendor': Fallback > Timeout > Retry > Breaker > Bulkhead > Timeout>"
    )
    total, attempt = (p for p in guard.policies if isinstance(p, Timeout))
    assert attempt.longest == 2.0
    assert total.longest == pytest.approx(3 * 2.0 + 0.5 + 0.1 + 0.2)
    assert "take care" not in guard.explain()


def test_standard_with_one_attempt_has_no_retry():
    """Where nothing is retried there is no Retry, and a total timeout only if it is asked for."""
    guard = Guard.standard("vendor", on=ConnectionError, timeout=2.0, attempts=1)
    assert repr(guard) == "<Guard 'vendor': Breaker > Timeout>"
    guard.close()
    guard = Guard.standard("vendor", on=ConnectionError, timeout=2.0, attempts=1, total_timeout=3.0)
    assert repr(guard) == "<Guard 'vendor': Timeout > Breaker > Timeout>"


def test_standard_takes_a_breaker_and_asks_how_to_time_plain_functions():
    """The breaker can be one's own; a plain function needs `sync`, as with Timeout itself."""
    breaker = Breaker(consecutive=1)
    guard = Guard.standard("vendor", on=ConnectionError, timeout=2.0, breaker=breaker)
    assert breaker in guard.policies
    with pytest.raises(TypeError, match="sync='cooperative'"):
        guard(len)


def test_standard_takes_several_fallbacks():
    """A list of levels is tried in order."""
    first = ScriptedService(fail(LookupError))
    guard = Guard.standard(
        "vendor",
        on=ConnectionError,
        timeout=2.0,
        backoff=0.0,
        fallback=[first.call, static("b")],
        sync="cooperative",
    )
    assert guard.attempt(ScriptedService(fail(ConnectionError)).call).level == 2


@pytest.mark.parametrize("sync", ["cooperative", "thread"])
def test_standard_serves_plain_functions_too(sync):
    """The recommended stack works for a plain function at once."""
    guard = Guard.standard("vendor", on=ConnectionError, timeout=20.0, backoff=0.0, sync=sync)
    service = ScriptedService(fail(ConnectionError), answer("hello"))
    assert guard.call(service.call) == "hello"
    assert run_virtual(guard.acall(service.acall)) == "hello"


def test_standard_hands_over_clock_and_chance():
    """Clock, chance and the idempotent mark reach the guard."""
    clock, rng = SystemClock(), Random(1)
    guard = Guard.standard(
        "vendor", on=ConnectionError, timeout=2.0, clock=clock, rng=rng, idempotent=False
    )
    assert guard.clock is clock
    assert guard.rng is rng
    assert not guard.idempotent


# --- Threads and loops at once ---


def test_one_guard_serves_threads_and_loops_at_once():
    """Threads and two event loops share the slots of one guard, and wake each other."""
    bulkhead = Bulkhead(1, max_wait=30.0, max_waiting=100)
    guard = Guard("vendor", _retry(), bulkhead)
    running, overlaps, done = [], [], []

    def work():
        running.append(1)
        overlaps.append(len(running))
        running.pop()
        done.append(1)

    async def work_async():
        running.append(1)
        overlaps.append(len(running))
        await ScriptedService(answer()).acall()
        running.pop()
        done.append(1)

    def in_thread():
        for _ in range(20):
            guard.call(work)

    async def in_loop():
        await asyncio.gather(*(guard.acall(work_async) for _ in range(20)))

    starts = [in_thread, in_thread, lambda: asyncio.run(in_loop()), lambda: asyncio.run(in_loop())]
    threads = [threading.Thread(target=start) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 80
    assert max(overlaps) == 1
    assert (bulkhead.in_flight, bulkhead.waiting) == (0, 0)
    assert guard.snapshot()["succeeded"] == 80


# --- Policies alone, and shared ---


def test_a_policy_alone_is_a_decorator():
    """Any policy decorates a function by itself, under no registered name."""
    service = ScriptedService(fail(ConnectionError), answer("hello"))

    @_retry()
    def plain():
        return service.call()

    @Timeout(1.0)
    async def slow_one():
        await ScriptedService(hang()).acall()

    @Bulkhead(1)
    def items():
        yield from "ab"

    assert plain() == "hello"
    assert list(items()) == ["a", "b"]
    with pytest.raises(TimedOut, match="slow_one"):
        run_virtual(slow_one())
    with pytest.raises(KeyError):
        get_guard(plain.__qualname__)


def test_a_policy_alone_needs_no_other_import():
    """A program that imports a policy and nothing else may decorate with it."""
    script = """
        from seawall import Retry

        @Retry(on=ConnectionError)
        def call():
            return "hello"

        print(call())
    """
    assert _run(script) == "hello"


def test_the_attempt_number_is_seen_inside():
    """current_attempt() counts inside the function, and is 1 again outside."""
    seen = []

    @_retry()
    def plain():
        seen.append(current_attempt())
        raise ConnectionError

    with pytest.raises(ConnectionError):
        plain()
    assert seen == [1, 2, 3]
    assert current_attempt() == 1


def test_a_shared_policy_shares_state_not_statistics():
    """One breaker in two guards opens for both; each guard counts its own refusals."""
    breaker = Breaker(consecutive=1)
    first, second = Guard("first", breaker), Guard("second", breaker)
    first.attempt(ScriptedService(fail(ConnectionError)).call)
    for _ in range(2):
        assert second.attempt(lambda: 1).reason == "circuit_open"
    one, two = first.snapshot(), second.snapshot()
    assert (one["policies"][0]["rejected"], two["policies"][0]["rejected"]) == (0, 2)
    assert (one["failed"], two["failed"]) == (1, 0)
    assert one["policies"][0]["state"] == two["policies"][0]["state"] == "open"
    with pytest.raises(CircuitOpen, match="second") as refused:
        second.call(lambda: 1)
    assert (refused.value.guard, refused.value.policy) == ("second", "breaker")


def test_a_shared_bulkhead_shares_its_slots():
    """Two guards with one bulkhead take slots from the same few."""
    bulkhead = Bulkhead(1)
    first, second = Guard("first", bulkhead), Guard("second", bulkhead)
    with first.hold():
        assert second.attempt(lambda: 1).reason == "bulkhead_full"
    assert second.attempt(lambda: 1).ok


class _CountingClock(VirtualClock):
    reads = 0

    def now(self) -> float:
        self.reads += 1
        return super().now()


def test_a_policy_alone_measures_only_what_it_needs():
    """In a guard with a name each call is timed; a rate limit alone reads the clock once."""
    for needed, policy in ((1, RateLimit("1000/s")), (2, Bulkhead(1))):
        clock = _CountingClock()
        with virtual_time(clock):
            alone, named = policy(lambda: None), Guard("named", policy)(lambda: None)
        clock.reads = 0
        alone()
        assert clock.reads == needed
        named()
        assert clock.reads == needed + 2
        get_guard("named").close()
