from __future__ import annotations

import asyncio
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall import (
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    Criticality,
    DeadlineExceeded,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    RateLimited,
    Retry,
    RetryBudget,
    TimedOut,
    Timeout,
    criticality,
    deadline,
    transient,
)
from seawall.clients import grpc as guarded_grpc
from seawall.clients.grpc import (
    GuardedInterceptor,
    Rpc,
    aio_interceptors,
    calls,
    errors,
    held_calls,
    retry_on,
)
from seawall.clients.http import terms
from seawall.context import idempotency_key, tenant
from seawall.errors import SeawallError
from seawall.wire.grpc import NEVER, pushback_of, read_pushback, write_pushback
from tests.clients.grpc.support import (
    KINDS,
    aconnected,
    arun,
    aserving,
    connected,
    dialled,
    full,
    metadata_of,
    one_loop,
    serving,
)
from tests.support import falsified, let_pass, new_guard, receiving

pytestmark = pytest.mark.alone

Code = grpc.StatusCode
UU, US, SU, SS = KINDS


@pytest.fixture(autouse=True, scope="module")
def _one_loop() -> Iterator[None]:
    """Run all async tests of this file in one loop."""
    with one_loop():
        yield


class Script:
    """A service whose methods fail as scripted, in order, and succeed afterwards."""

    def __init__(self, *codes: Code, pushback: str | None = None) -> None:
        self.codes = list(codes)
        self.pushback = pushback
        self.seen: list[dict[str, str]] = []
        self.left: list[float] = []

    def _next(self, context: Any) -> None:
        self.seen.append(metadata_of(context))
        self.left.append(context.time_remaining())
        code = self.codes.pop(0) if self.codes else None
        if code is not None:
            if self.pushback is not None:
                context.set_trailing_metadata((("grpc-retry-pushback-ms", self.pushback),))
            context.abort(code, "as told")

    def unary(self, request: bytes, context: Any) -> bytes:
        self._next(context)
        return request

    def items(self, request: bytes, context: Any) -> Iterator[bytes]:
        self._next(context)
        yield request
        yield request

    def joined(self, requests: Iterator[bytes], context: Any) -> bytes:
        # To the end: an aio client that still writes when the server has ended sees INTERNAL.
        joined = b"".join(requests)
        self._next(context)
        return joined

    def echo(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if any(self.codes):
            list(requests)
        self._next(context)
        yield from requests

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {UU: self.unary, US: self.items, SU: self.joined, SS: self.echo}


def retrying(*others: Any, on: Any = transient, **options: Any) -> Guard:
    return new_guard(Retry(on=on, attempts=3, backoff=0.001, **options), *others)


def call(channel: Any, kind: str, **options: Any) -> Any:
    """Make a call of that kind to its end, with requests that can be sent again."""
    request = [b"x", b"x"] if kind.startswith("stream") else b"x"
    result = getattr(channel, kind)(full(kind))(request, **options)
    return list(result) if kind.endswith("stream") else result


async def acall(channel: Any, kind: str, **options: Any) -> Any:
    request = [b"x", b"x"] if kind.startswith("stream") else b"x"
    result = getattr(channel, kind)(full(kind))(request, **options)
    return [item async for item in result] if kind.endswith("stream") else await result


WANTED = {UU: b"x", US: [b"x", b"x"], SU: b"xx", SS: [b"x", b"x"]}


class Sync:
    """Runs one scenario with sync channels."""

    name = "sync"

    def run(self, script: Script, guard: Guard, *kinds: str, **options: Any) -> list[Any]:
        """Make calls through the guard; return the responses, or errors where they raised."""
        timeouts = options.pop("timeout", None)
        ended: list[Any] = []
        interceptor = GuardedInterceptor(guard, **options)
        with serving(script.functions) as target, connected(target, interceptor) as channel:
            for kind in kinds:
                try:
                    ended.append(call(channel, kind, timeout=timeouts))
                except Exception as error:  # noqa: BLE001 - it is what the test looks at
                    ended.append(error)
        return ended


class Aio(Sync):
    """Runs the same scenario with aio channels."""

    name = "aio"

    def run(self, script: Script, guard: Guard, *kinds: str, **options: Any) -> list[Any]:
        timeouts = options.pop("timeout", None)

        async def main(target: str) -> list[Any]:
            ended: list[Any] = []
            async with aconnected(target, aio_interceptors(guard, **options)) as channel:
                for kind in kinds:
                    try:
                        ended.append(await acall(channel, kind, timeout=timeouts))
                    except Exception as error:  # noqa: BLE001 - it is what the test looks at
                        ended.append(error)
            return ended

        with serving(script.functions) as target:
            return arun(main(target))


@pytest.fixture(params=[Sync(), Aio()], ids=lambda edge: edge.name)
def edge(request: pytest.FixtureRequest) -> Sync:
    """Return each of the two kinds of channels in turn."""
    edge: Sync = request.param
    return edge


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_found_nobody_is_made_again(edge: Sync, kind: str) -> None:
    """UNAVAILABLE is retried for an idempotent method of every kind, before its first item."""
    script = Script(Code.UNAVAILABLE, Code.UNAVAILABLE)
    guard = retrying(Bulkhead(1))
    assert edge.run(script, guard, kind, idempotent={full(kind)}) == [WANTED[kind]]
    assert [seen["seawall-attempt"] for seen in script.seen] == ["1", "2", "3"]
    assert guard.snapshot()["retries"] == 2
    assert guard.snapshot()["policies"][1]["in_flight"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_methods_are_called_once_unless_told(edge: Sync, kind: str) -> None:
    """Without a word about a method its failure is the caller's to deal with."""
    script = Script(Code.UNAVAILABLE)
    (error,) = edge.run(script, retrying(), kind)
    assert error.code() is Code.UNAVAILABLE
    assert error.details() == "as told"
    assert len(script.seen) == 1


def _called_once(codes: list[Code]) -> None:
    script = Script(*codes)
    Sync().run(script, retrying(), UU)
    assert len(script.seen) == 1


@settings(max_examples=10)
@given(st.lists(st.sampled_from([Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED]), max_size=3))
def test_no_failure_makes_it_twice(codes: list[Code]) -> None:
    """No failure repeats a method that was not declared idempotent."""
    _called_once(codes)


def test_that_needs_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard for calls that may not be repeated they would be."""
    monkeypatch.setattr(terms, "MarkedGuard", lambda guard, **_marks: guard)
    cases = st.lists(st.just(Code.UNAVAILABLE), min_size=1, max_size=2)
    assert falsified(_called_once, cases)


def test_a_key_makes_it_repeatable(edge: Sync) -> None:
    """An idempotency key of the context is sent, the same each time, and allows retries."""
    script = Script(Code.UNAVAILABLE)
    with idempotency_key("order 7"):
        (said,) = edge.run(script, retrying(), UU)
    assert said == b"x"
    first, second = script.seen
    assert first["idempotency-key"] == second["idempotency-key"]


def test_a_request_that_is_a_retry_is_not_retried(edge: Sync) -> None:
    """Calls for a request that came as a second attempt are made once, and say so."""
    script = Script(Code.UNAVAILABLE)
    with receiving(2), idempotency_key("a key does not help here"):
        (error,) = edge.run(script, retrying(), UU, idempotent=True)
    assert error.code() is Code.UNAVAILABLE
    assert [seen["seawall-attempt"] for seen in script.seen] == ["2"]
    assert "idempotency-key" in script.seen[0]


def test_retries_at_the_edge_only(edge: Sync) -> None:
    """With retry_at="edge" a request that came with any attempt is not retried."""
    script = Script(Code.UNAVAILABLE)
    with receiving(1):
        edge.run(script, retrying(), UU, idempotent=True, retry_at="edge")
    assert len(script.seen) == 1


def test_a_one_shot_stream_is_sent_once() -> None:
    """Requests from an iterator cannot be sent again, so that call is not retried."""
    script = Script(Code.UNAVAILABLE)
    interceptor = GuardedInterceptor(retrying(), idempotent=True)
    with serving(script.functions) as target, connected(target, interceptor) as channel:
        with pytest.raises(grpc.RpcError):
            channel.stream_unary(full(SU))(iter([b"x"]))
        assert channel.stream_unary(full(SU))(iter([b"x"])) == b"x"
        assert list(channel.stream_stream(full(SS))(iter([b"y"]))) == [b"y"]
    assert len(script.seen) == 3


def test_what_the_server_is_told(edge: Sync) -> None:
    """Criticality goes as baggage, beside what the caller put there; the tenant only if named."""
    script = Script()
    with criticality(Criticality.SHEDDABLE), tenant("acme"):
        edge.run(script, new_guard(Bulkhead(9)), UU)
        edge.run(script, new_guard(Bulkhead(9)), UU, propagate={"tenant"})
        edge.run(script, new_guard(Bulkhead(9)), UU, propagate=False)
    told = [seen.get("baggage") for seen in script.seen]
    assert told == ["seawall.criticality=sheddable", "seawall.tenant=acme", None]
    assert "seawall-attempt" not in script.seen[2]


def test_the_nearest_deadline_is_sent(edge: Sync) -> None:
    """Of the call's timeout, the context's deadline and the guard's timeouts the least counts."""
    script = Script()
    guard = new_guard(Timeout(500.0, sync="cooperative"))
    edge.run(script, guard, UU)
    edge.run(script, guard, UU, timeout=300.0)
    with deadline(200.0):
        edge.run(script, guard, UU, timeout=300.0)
        edge.run(script, guard, US, SS, timeout=300.0)
    for left, wanted in zip(script.left, [500, 300, 200, 200, 200], strict=True):
        # gRPC rounds up, by a hundredth.
        assert wanted - 20 < left <= wanted * 1.01


def test_a_timeout_is_no_deadline_of_a_stream(edge: Sync) -> None:
    """A guard's timeout reaches to the first item: the stream itself may take longer."""
    script = Script()
    guard = new_guard(Timeout(5.0, sync="cooperative"))
    edge.run(script, guard, US, SS, idempotent=True)
    assert min(script.left) > 1000.0


def _never_grows(seconds: float) -> None:
    script = Script()
    Sync().run(script, new_guard(Bulkhead(9)), UU, timeout=seconds)
    (told,) = script.seen
    said = [float(told.get("x-server-timeout", "inf")), script.left[0]]
    assert min(said) <= seconds


# Of these gRPC rounds up to the next second: far more than a call takes on its way.
SECONDS = st.floats(101.0, 999.0)


@settings(max_examples=10)
@given(SECONDS)
def test_time_never_grows_on_its_way(seconds: float) -> None:
    """What the server can know of the time left is never more than the client had."""
    _never_grows(seconds)


def test_grpc_alone_lets_it_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is rounded up by gRPC: without the headers the server would have more time."""
    monkeypatch.setattr(calls, "headers_for", lambda *_arguments: {})
    # By most of a second: a whole number of them may arrive as it was, or not.
    assert falsified(_never_grows, st.integers(101, 998).map(lambda seconds: seconds + 0.3))


def test_expired_work_is_not_sent(edge: Sync) -> None:
    """A call whose time is over is refused here, as an error of both kinds."""
    script = Script()
    (error,) = edge.run(script, new_guard(Bulkhead(9)), UU, timeout=0.0)
    assert isinstance(error, DeadlineExceeded)
    assert isinstance(error, grpc.RpcError)
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert not script.seen


def test_out_of_time_is_a_timeout_of_both_kinds(edge: Sync) -> None:
    """A call that runs out of its guard's time raises TimedOut, which gRPC's users know too."""
    over = threading.Event()

    def wait(request: bytes, _context: Any) -> bytes:
        over.wait(5.0)
        return request

    script = Script()
    script.unary = wait  # type: ignore[method-assign]
    guard = new_guard(Bulkhead(1), Timeout(0.05, sync="cooperative"))
    try:
        if edge.name == "sync":
            with dialled(script.functions, GuardedInterceptor(guard)) as channel:
                with pytest.raises(TimedOut) as caught:
                    channel.unary_unary(full(UU))(b"x")
                over.set()
        else:

            async def main(target: str) -> pytest.ExceptionInfo[TimedOut]:
                async with aconnected(target, aio_interceptors(guard)) as channel:
                    with pytest.raises(TimedOut) as caught:
                        await channel.unary_unary(full(UU))(b"x")
                return caught

            with serving(script.functions) as target:
                caught = arun(main(target))
                over.set()
    finally:
        over.set()
    error: Any = caught.value
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert isinstance(error, TimeoutError)
    assert isinstance(error, grpc.RpcError)
    assert guard.snapshot()["policies"][0]["in_flight"] == 0


def test_attempts_that_ran_out_of_time_are_retried(edge: Sync) -> None:
    """DEADLINE_EXCEEDED of one attempt is worth another while the call has time."""
    script = Script(Code.DEADLINE_EXCEEDED)
    assert edge.run(script, retrying(), UU, idempotent=True) == [b"x"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", [0, 1, 2])
def test_refusals_are_errors_of_both_kinds(edge: Sync, kind: str, case: int) -> None:
    """What a gate refuses is Seawall's error and gRPC's, with a code and details."""
    make, kind_of_error, code = [
        (Breaker, CircuitOpen, Code.UNAVAILABLE),
        (lambda: RateLimit("1/h"), RateLimited, Code.RESOURCE_EXHAUSTED),
        (lambda: Bulkhead(1), BulkheadFull, Code.RESOURCE_EXHAUSTED),
    ][case]
    policy: Any = make()
    guard = new_guard(policy)
    with ExitStack() as stack:
        if isinstance(policy, Breaker):
            policy.isolate()
        else:
            stack.enter_context(guard.hold())
        script = Script()
        (error,) = edge.run(script, guard, kind, idempotent=True)
    assert isinstance(error, kind_of_error)
    assert isinstance(error, grpc.RpcError)
    assert (error.code(), error.details()) == (code, str(error))
    assert guard.name in str(error)
    assert not script.seen


def test_an_answer_is_no_failure(edge: Sync) -> None:
    """NOT_FOUND is an answer: the breaker stays closed, and the caller gets the error itself."""
    breaker = Breaker(failure_ratio=0.1, min_calls=2)
    guard = retrying(breaker)
    script = Script(*[Code.NOT_FOUND] * 12)
    errors = edge.run(script, guard, *KINDS * 3, idempotent=True)
    assert {error.code() for error in errors} == {Code.NOT_FOUND}
    assert not any(isinstance(error, SeawallError) for error in errors)
    state = guard.snapshot()["policies"][1]
    assert (state["state"], state["failures"]) == ("closed", 0)


def test_codes_to_retry_can_be_named(edge: Sync) -> None:
    """retry_on(...) retries other codes, also those that are answers."""
    script = Script(Code.ABORTED)
    guard = retrying(on=retry_on(Code.ABORTED))
    assert edge.run(script, guard, UU, idempotent=True) == [b"x"]
    script = Script(Code.UNAVAILABLE)
    (error,) = edge.run(script, guard, UU, idempotent=True)
    assert error.code() is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("code", "pushback", "calls"),
    [
        (Code.UNAVAILABLE, "1", 2),
        (Code.UNAVAILABLE, "-1", 1),
        (Code.UNAVAILABLE, "soon", 1),
        (Code.RESOURCE_EXHAUSTED, "1", 2),
        (Code.RESOURCE_EXHAUSTED, None, 1),
        (Code.RESOURCE_EXHAUSTED, "-1", 1),
        (Code.DEADLINE_EXCEEDED, "1", 2),
        (Code.DEADLINE_EXCEEDED, "-1", 1),
    ],
)
def test_pushback_is_obeyed(edge: Sync, code: Code, pushback: str | None, calls: int) -> None:
    """A number allows and delays a retry, anything else forbids it."""
    script = Script(code, pushback=pushback)
    edge.run(script, retrying(), UU, idempotent=True)
    assert len(script.seen) == calls


def test_pushback_is_obeyed_only_if_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading it, a server that said no would be asked again."""
    monkeypatch.setattr(errors, "pushback_of", lambda _metadata: None)
    script = Script(Code.UNAVAILABLE, pushback="-1")
    Sync().run(script, retrying(), UU, idempotent=True)
    assert len(script.seen) == 2


@pytest.mark.parametrize("settings", [{}, {"max_retry_after": 100_000.0}], ids=["bound", "time"])
def test_pushback_that_cannot_be_held_ends_the_retries(settings: dict[str, float]) -> None:
    """A day of pushback is more than max_retry_after, or than the deadline: nothing is asked."""
    script = Script(Code.UNAVAILABLE, pushback="86400000")
    (error,) = Sync().run(script, retrying(**settings), UU, idempotent=True, timeout=1.0)
    assert (error.code(), len(script.seen)) == (Code.UNAVAILABLE, 1)


@given(st.text() | st.binary() | st.integers().map(str) | st.integers(0, 10**12).map(str))
def test_pushback_never_raises(value: str | bytes) -> None:
    """Whatever comes, it is seconds within bounds or a no; a plain number is taken at its word."""
    seconds = read_pushback(value)
    assert seconds == NEVER or 0 <= seconds <= 10**7
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        assert seconds == int(value) / 1000
    assert pushback_of([("grpc-retry-pushback-ms", value)] * 2) == seconds
    assert pushback_of([("other", value)]) is None


@given(st.floats())
def test_pushback_is_never_less_than_meant(seconds: float) -> None:
    """A written pushback is read back as at least as long, or as never."""
    read = read_pushback(write_pushback(seconds))
    assert read == NEVER or seconds <= read <= seconds + 0.002


def test_fallbacks_answer_without_a_server(edge: Sync) -> None:
    """A fallback's response, or its items, take the place of the call's."""
    for kind in KINDS:
        stand_in: Any = [b"a", b"b"] if kind.endswith("stream") else b"stand-in"
        breaker = Breaker()
        guard = new_guard(Fallback(lambda _rpc, stand_in=stand_in: stand_in), breaker)
        breaker.isolate()
        assert edge.run(Script(), guard, kind, idempotent=True) == [stand_in]


def test_keys_see_the_call(edge: Sync) -> None:
    """A gate's key function is given the call: its method, its request, its metadata."""
    seen: list[Rpc] = []

    def method(rpc: Rpc) -> str:
        seen.append(rpc)
        return rpc.method

    guard = new_guard(RateLimit("1/h", key=method))
    ended = edge.run(Script(), guard, UU, US, UU)
    assert ended[:2] == [b"x", [b"x", b"x"]]
    assert isinstance(ended[2], RateLimited)
    assert [rpc.method for rpc in seen] == [full(UU), full(US), full(UU)]
    assert seen[0].request == b"x"
    assert repr(seen[0]) == "<Rpc /test.S/unary_unary>"


def test_hedged_calls_run_twice() -> None:
    """A hedge sends an idempotent call a second time, and cancels the slower one."""
    release = threading.Event()
    calls = []

    def slow_once(request: bytes, context: Any) -> bytes:
        calls.append(context)
        if len(calls) == 1:
            release.wait(5.0)
        return request

    guard = new_guard(Bulkhead(5), Hedge(0.02, cap=1.0))

    async def main(target: str) -> None:
        async with aconnected(target, aio_interceptors(guard, idempotent=True)) as channel:
            assert await channel.unary_unary(full(UU))(b"x") == b"x"

    with serving({UU: slow_once}) as target:
        try:
            arun(main(target))
        finally:
            release.set()
    assert len(calls) == 2
    assert guard.snapshot()["policies"][0]["in_flight"] == 0


def test_what_may_not_be_repeated_is_not_hedged() -> None:
    """A hedge does not repeat a method that was not declared idempotent."""
    calls = []

    def slow(request: bytes, context: Any) -> bytes:
        calls.append(context)
        threading.Event().wait(0.05)
        return request

    guard = new_guard(Hedge(0.01, cap=1.0))

    async def main(target: str) -> None:
        async with aconnected(target, aio_interceptors(guard)) as channel:
            assert await channel.unary_unary(full(UU))(b"x") == b"x"

    with serving({UU: slow}) as target:
        arun(main(target))
    assert len(calls) == 1


def test_futures_hold_the_gates_until_they_are_over() -> None:
    """`future()` returns at once; its slot is free when it is over, and it is not retried."""
    release = threading.Event()

    def wait(request: bytes, _context: Any) -> bytes:
        release.wait(5.0)
        return request

    guard = retrying(Bulkhead(2))
    with dialled({UU: wait}, GuardedInterceptor(guard, idempotent=True)) as channel:
        method = channel.unary_unary(full(UU))
        first, second = method.future(b"1"), method.future(b"2")
        third = method.future(b"3")
        assert not first.done()
        assert isinstance(third.exception(), BulkheadFull)
        second.cancel()
        release.set()
        assert first.result() == b"1"
        _settle(guard, 1)
    snapshot = guard.snapshot()
    assert (snapshot["succeeded"], snapshot["cancelled"], snapshot["rejected"]) == (1, 1, 1)


def _settle(guard: Guard, gate: int = 0) -> None:
    """Wait until gRPC's own thread has reported the end of all RPCs."""
    over = threading.Event()
    for _ in range(200):
        if not guard.snapshot()["policies"][gate]["in_flight"]:
            return
        over.wait(0.01)
    pytest.fail("a slot is still held")


def test_a_stream_that_nobody_reads_is_let_go() -> None:
    """A stream that was dropped is cancelled by gRPC, and its slot is free again."""
    guard = new_guard(Bulkhead(1))
    ended = threading.Event()

    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(ended.set)
        while not ended.is_set():
            yield request

    with dialled({US: endless}, GuardedInterceptor(guard)) as channel:
        stream = channel.unary_stream(full(US))(b"x")
        assert next(stream) == b"x"
        with pytest.raises(BulkheadFull):
            next(channel.unary_stream(full(US))(b"x"))
        del stream
        gc.collect()
        _settle(guard)
    assert guard.snapshot()["cancelled"] == 1


def test_streams_stay_calls() -> None:
    """A guarded stream has its code, metadata and cancel() after the first item, too."""
    script = Script()
    guard = retrying(Bulkhead(1))
    with dialled(script.functions, GuardedInterceptor(guard, idempotent=True)) as channel:
        stream = channel.unary_stream(full(US))(b"x")
        assert guard.snapshot()["policies"][1]["in_flight"] == 1
        assert list(stream) == [b"x", b"x"]
        assert stream.code() is Code.OK
        assert list(stream) == []
        _settle(guard, 1)


def test_reader_and_writer_calls_work() -> None:
    """The aio calls that are written to and read from step by step go through the gates."""
    script = Script()
    guard = new_guard(Bulkhead(1))

    async def main(target: str) -> None:
        async with aconnected(target, aio_interceptors(guard)) as channel:
            chat = channel.stream_stream(full(SS))()
            for message in (b"1", b"2"):
                await chat.write(message)
                assert await chat.read() == message
            await chat.done_writing()
            assert await chat.read() is grpc.aio.EOF
            assert await chat.code() is Code.OK
            collected = channel.stream_unary(full(SU))()
            await collected.write(b"1")
            await collected.write(b"2")
            await collected.done_writing()
            assert await collected == b"12"
            assert guard.snapshot()["policies"][0]["in_flight"] == 0

    with serving(script.functions) as target:
        arun(main(target))


def _hanging(reached: asyncio.Event) -> dict[str, Callable[..., Any]]:
    """Return aio methods that hang, streams after their first item; `reached` is set then."""

    async def unary(_request: Any, _context: Any) -> bytes:
        reached.set()
        await asyncio.Event().wait()
        return b""

    async def items(_request: Any, _context: Any) -> Any:
        yield b"1"
        reached.set()
        await asyncio.Event().wait()

    return {UU: unary, US: items, SU: unary, SS: items}


async def _cancelled_anywhere(plan: list[tuple[int, int]]) -> int:
    """Cancel calls after each number of loop turns; return how many slots stay taken."""
    guard = new_guard(Bulkhead(3, max_wait=5.0, max_waiting=8))
    reached = asyncio.Event()
    interceptors = aio_interceptors(guard, idempotent=True)
    async with aserving(_hanging(reached)) as target, aconnected(target, interceptors) as channel:
        calls = [(asyncio.create_task(acall(channel, KINDS[k])), turns) for k, turns in plan]
        for task, turns in calls:
            for _ in range(turns):
                await let_pass(0.0)
            if turns > 20 and task is calls[0][0]:
                await reached.wait()
            task.cancel()
        ended = await asyncio.gather(*(task for task, _ in calls), return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        for _ in range(100):
            if not guard.snapshot()["policies"][0]["in_flight"]:
                break
            await let_pass(0.001)
    taken: int = guard.snapshot()["policies"][0]["in_flight"]
    return taken


def _nothing_leaks(plan: list[tuple[int, int]]) -> None:
    assert arun(_cancelled_anywhere(plan)) == 0


PLANS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=8)


@settings(max_examples=15)
@given(PLANS)
def test_cancelled_anywhere_nothing_leaks(plan: list[tuple[int, int]]) -> None:
    """Wherever a call of any kind is cancelled, its slot is given back once."""
    _nothing_leaks(plan)


async def _cancelled_in_mid_stream() -> int:
    """Cancel a stream after its first item; return how many slots were not given back then."""
    guard = new_guard(Bulkhead(1))
    interceptors = aio_interceptors(guard)
    functions = _hanging(asyncio.Event())
    async with aserving(functions) as target, aconnected(target, interceptors) as channel:
        stream = channel.unary_stream(full(US))(b"x")
        assert await stream.read() == b"1"
        stream.cancel()
        assert await stream.code() is Code.CANCELLED
        seen = guard.snapshot()["policies"][0]
        kept: int = seen["in_flight"] + seen["recovered"]
    return kept


def test_a_stream_that_is_cancelled_gives_its_slot_back() -> None:
    """The gates are left when gRPC reports the end, even if no caller reads on."""
    assert arun(_cancelled_in_mid_stream()) == 0


def test_it_would_keep_it_if_nobody_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the gates did not hear that an RPC is over, slots would be lost."""
    monkeypatch.setattr(held_calls, "aleave_at_end", lambda _call, _leave: True)
    assert arun(_cancelled_in_mid_stream()) == 1


def test_errors_survive_pickling() -> None:
    """An error of both kinds can be sent to another process, and is one there."""
    refused = CircuitOpen("open", retry_after=2.0, guard="g", policy="breaker")
    error: Any = errors.as_rpc_error(refused)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert repr(copy) == repr(error) == "CircuitOpen('open', code=UNAVAILABLE)"
    assert (copy.retry_after, copy.guard, copy.code()) == (2.0, "g", Code.UNAVAILABLE)
    assert type(copy) is type(error)


def test_other_interceptors_can_ask_a_refusal() -> None:
    """A refusal is also the call, as gRPC's own errors are: interceptors further out use that."""
    breaker = Breaker()
    guard = new_guard(breaker)
    breaker.isolate()
    asked: list[Any] = []

    class Outer(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
            outcome = continuation(details, request)
            asked.append((outcome.code(), outcome.done(), outcome.cancelled()))
            return outcome

    with (
        dialled(Script().functions, Outer(), GuardedInterceptor(guard)) as channel,
        pytest.raises(CircuitOpen),
    ):
        channel.unary_unary(full(UU))(b"x")
    assert asked == [(Code.UNAVAILABLE, True, False)]


def test_budgets_bound_retries(edge: Sync) -> None:
    """A retry budget counts RPCs as it does any other call."""
    script = Script(*[Code.UNAVAILABLE] * 60)
    guard = retrying(budget=RetryBudget())
    edge.run(script, guard, *[UU] * 20, idempotent=True)
    assert len(script.seen) < 40


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"idempotent": "/a/b"}, "write True, a set of full names"),
        ({"idempotent": {"Get"}}, "no full name"),
        ({"retry_at": "home"}, "everywhere"),
        ({"propagate": {"everything"}}, "propagate"),
    ],
)
def test_bad_settings_are_told(options: dict[str, Any], message: str) -> None:
    """A setting that means nothing raises at once, and says what to write."""
    for make in (GuardedInterceptor, aio_interceptors):
        with pytest.raises((TypeError, ValueError), match=message):
            make(new_guard(Bulkhead(9)), **options)


def test_bad_guards_are_told() -> None:
    """What is no guard, or has a timeout that cannot act, raises at construction."""
    with pytest.raises(TypeError, match="Guard"):
        GuardedInterceptor("orders")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sync='cooperative'"):
        GuardedInterceptor(new_guard(Timeout(1.0)))
    with pytest.raises(TypeError, match="status codes"):
        retry_on(14)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="went well"):
        retry_on(Code.OK)
    with pytest.raises(ValueError, match="called off"):
        retry_on(Code.CANCELLED)
    for make in (GuardedInterceptor, aio_interceptors):
        with pytest.raises(TypeError, match="put the Cache around the function"):
            make(new_guard(Cache(ttl=60.0, key=lambda rpc: rpc.method)))


def test_reprs_name_the_guard() -> None:
    """Interceptors and predicates say whose they are."""
    guard = new_guard(Bulkhead(9))
    assert repr(GuardedInterceptor(guard)) == f"<GuardedInterceptor {guard.name!r}>"
    assert guard.name in repr(aio_interceptors(guard)[0])
    assert retry_on(Code.ABORTED).__name__ == "retry_on(ABORTED)"


def test_the_public_names_are_all_there() -> None:
    """Everything that the module promises exists."""
    assert all(hasattr(guarded_grpc, name) for name in guarded_grpc.__all__)
