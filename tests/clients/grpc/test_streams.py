from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.experimental
import pytest

from seawall import (
    Breaker,
    Bulkhead,
    CircuitOpen,
    Guard,
    Hedge,
    Retry,
    TimedOut,
    Timeout,
    transient,
)
from seawall.clients.grpc import GuardedInterceptor, aio_interceptors, held_calls
from tests.clients.grpc.support import (
    KINDS,
    OPTIONS,
    aconnected,
    arun,
    connected,
    dialled,
    full,
    one_loop,
    serving,
)
from tests.support import let_pass, new_guard

pytestmark = pytest.mark.alone

Code = grpc.StatusCode
UU, US, SU, SS = KINDS


@pytest.fixture(autouse=True, scope="module")
def _one_loop() -> Iterator[None]:
    """Run all async tests of this file in one loop."""
    with one_loop():
        yield


def two(request: bytes, _context: Any) -> Iterator[bytes]:
    yield request
    yield request


def in_flight(guard: Guard, gate: int = 0) -> int:
    taken: int = guard.snapshot()["policies"][gate]["in_flight"]
    return taken


class Bare(grpc.UnaryStreamClientInterceptor):
    """Hands out generators instead of calls, as some interceptors do that trace."""

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        yield from continuation(details, request)


class AioBare(grpc.aio.UnaryStreamClientInterceptor):
    """The same for aio: no RPC is there before the generator is read."""

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        async def items() -> Any:
            async for item in await continuation(details, request):
                yield item

        return items()


def _bare_streams_leave_nothing(*, idempotent: bool) -> None:
    guard = new_guard(Bulkhead(1))
    guarded = GuardedInterceptor(guard, idempotent=idempotent)
    with dialled({US: two}, guarded, Bare()) as channel:
        method = channel.unary_stream(full(US))
        assert list(method(b"x")) == [b"x", b"x"]
        for _ in range(2):
            assert next(method(b"x")) == b"x"  # and dropped
            gc.collect()
        assert in_flight(guard) == 0
        assert guard.snapshot()["policies"][0]["recovered"] == 0


async def _aio_bare_streams_leave_nothing(target: str, *, idempotent: bool) -> None:
    guard = new_guard(Bulkhead(1))
    interceptors = [*aio_interceptors(guard, idempotent=idempotent), AioBare()]
    async with aconnected(target, interceptors) as channel:
        for _ in range(3):
            stream = channel.unary_stream(full(US))(b"x")
            assert [item async for item in stream] == [b"x", b"x"]
            assert in_flight(guard) == 0
        stream = channel.unary_stream(full(US))(b"x")
        await stream.wait_for_connection()
        assert in_flight(guard) == 1
        del stream
        for _ in range(3):
            gc.collect()
            await let_pass(0.0)
        assert in_flight(guard) == 0


@pytest.mark.parametrize("idempotent", [False, True])
def test_generators_of_inner_interceptors_keep_no_slot(*, idempotent: bool) -> None:
    """A stream that is no call of gRPC's gives its slot back when it ends or is dropped."""
    _bare_streams_leave_nothing(idempotent=idempotent)
    with serving({US: two}) as target:
        arun(_aio_bare_streams_leave_nothing(target, idempotent=idempotent))


def test_that_needs_somebody_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only gRPC's own callbacks were heard, a generator would keep its slot."""
    monkeypatch.setattr(held_calls.SyncStreamItems, "__del__", lambda _items: None)
    monkeypatch.setattr(
        held_calls.SyncStreamItems, "__next__", lambda items: next(items._started.items)
    )
    with pytest.raises(AssertionError):  # it is recovered, as if a signal had taken its holder
        _bare_streams_leave_nothing(idempotent=False)


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_call_that_cannot_be_watched_keeps_no_slot(*, idempotent: bool) -> None:
    """An error while the end of a call is arranged for is raised, and the gates are left."""

    class Broken:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"x"])

        def add_callback(self, _callback: Any) -> bool:
            raise LookupError("mine")

    class Inner(grpc.UnaryStreamClientInterceptor):
        def intercept_unary_stream(self, *_arguments: Any) -> Any:
            return Broken()

    guard = new_guard(Bulkhead(1))
    guarded = GuardedInterceptor(guard, idempotent=idempotent)
    with dialled({US: two}, guarded, Inner()) as channel, pytest.raises(LookupError):
        next(channel.unary_stream(full(US))(b"x"))
    assert in_flight(guard) == 0


@pytest.mark.parametrize("idempotent", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_dropped_streams_are_let_go(*, idempotent: bool, single: bool) -> None:
    """A stream that is dropped gives its slot back at once, also on single-threaded channels."""
    ended = threading.Event()

    def endless(request: bytes, context: Any) -> Iterator[bytes]:
        context.add_callback(ended.set)
        while context.is_active():
            yield request

    guard = new_guard(Bulkhead(1))
    option = (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, int(single))
    with (
        serving({US: endless}) as target,
        grpc.insecure_channel(target, options=[*OPTIONS, option]) as plain,
    ):
        channel = grpc.intercept_channel(plain, GuardedInterceptor(guard, idempotent=idempotent))
        for item in channel.unary_stream(full(US))(b"x"):
            assert item == b"x"
            break
        assert in_flight(guard) == 0
        assert ended.wait(5.0)


@pytest.mark.parametrize("sync", ["cooperative", "thread"])
def test_a_sync_stream_waits_no_longer_than_the_guard_says(sync: Any) -> None:
    """A guard's timeout bounds each attempt's wait for the first item, and is retried."""

    def silent(_request: bytes, context: Any) -> Iterator[bytes]:
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(5.0)
        yield b""

    guard = new_guard(
        Retry(on=transient, attempts=2, backoff=0.001), Bulkhead(1), Timeout(0.05, sync=sync)
    )
    with (
        dialled({US: silent}, GuardedInterceptor(guard, idempotent=True)) as channel,
        pytest.raises(TimedOut, match="no item within") as raised,
    ):
        next(channel.unary_stream(full(US))(b"x"))
    error: Any = raised.value
    assert error.code() is Code.DEADLINE_EXCEEDED
    assert guard.snapshot()["retries"] == 1
    assert in_flight(guard, 1) == 0


def test_what_cannot_act_on_a_stream_is_left_out() -> None:
    """A hedge is for calls with one response; a stream through the same guard is made once."""
    guard = new_guard(Hedge(0.05), Bulkhead(1))

    async def main(target: str) -> list[bytes]:
        async with aconnected(target, aio_interceptors(guard, idempotent=True)) as channel:
            return [item async for item in channel.unary_stream(full(US))(b"x")]

    with serving({US: two}) as target:
        assert arun(main(target)) == [b"x", b"x"]


def test_metadata_comes_before_items() -> None:
    """An aio stream that is not idempotent starts immediately: its metadata is there."""
    go = threading.Event()

    def subscribe(request: bytes, context: Any) -> Iterator[bytes]:
        context.send_initial_metadata((("subscribed", "1"),))
        go.wait(5.0)
        yield request

    async def main(target: str) -> None:
        guard = new_guard(Bulkhead(1), Timeout(1.0))
        async with aconnected(target, aio_interceptors(guard)) as channel:
            stream = channel.unary_stream(full(US))(b"x")
            assert dict(await stream.initial_metadata()) == {"subscribed": "1"}
            go.set()
            assert [item async for item in stream] == [b"x"]

    with serving({US: subscribe}) as target:
        try:
            arun(main(target))
        finally:
            go.set()


def _called_off(_request: bytes, context: Any) -> bytes:
    context.abort(Code.CANCELLED, "")
    return b""


def _sync_cancelled(guard: Guard) -> Any:
    with dialled({UU: _called_off}, GuardedInterceptor(guard)) as channel:
        channel.unary_unary(full(UU))(b"x")


def _aio_cancelled(guard: Guard) -> Any:
    async def main(target: str) -> None:
        async with aconnected(target, aio_interceptors(guard)) as channel:
            await channel.unary_unary(full(UU))(b"x")

    with serving({UU: _called_off}) as target:
        arun(main(target))


@pytest.mark.parametrize("ask", [_sync_cancelled, _aio_cancelled])
def test_what_was_called_off_says_nothing(ask: Callable[[Guard], Any]) -> None:
    """CANCELLED is no verdict on the server: a breaker that probes learns nothing from it."""
    guard = new_guard(Breaker(), Timeout(5.0, sync="thread"))
    with pytest.raises(grpc.RpcError) as raised:
        ask(guard)
    error: Any = raised.value
    assert error.code() is Code.CANCELLED
    snapshot = guard.snapshot()
    assert (snapshot["succeeded"], snapshot["failed"], snapshot["cancelled"]) == (0, 0, 1)
    assert snapshot["policies"][0]["calls"] == 0


@pytest.mark.parametrize("idempotent", [False, True])
def test_refused_calls_say_why(*, idempotent: bool) -> None:
    """A future or a stream that was refused has the refusal's code, and raises it when read."""
    breaker = Breaker()
    guard = new_guard(breaker)
    breaker.isolate()
    functions = {UU: lambda request, _context: request, US: two}
    with dialled(functions, GuardedInterceptor(guard, idempotent=idempotent)) as channel:
        future = channel.unary_unary(full(UU)).future(b"x")
        stream = channel.unary_stream(full(US))(b"x")
        assert [future.code(), stream.code()] == [Code.UNAVAILABLE] * 2
        with pytest.raises(CircuitOpen):
            future.result()
        with pytest.raises(CircuitOpen):
            list(stream)


def test_two_keys_are_none() -> None:
    """Metadata with two idempotency keys name no effect: the call is not repeated."""
    calls: list[bytes] = []

    def fail(request: bytes, context: Any) -> bytes:
        calls.append(request)
        context.abort(Code.UNAVAILABLE, "")
        return b""

    guard = new_guard(Retry(on=transient, attempts=2, backoff=0.001))
    keys = [("idempotency-key", "a"), ("idempotency-key", "b")]
    with serving({UU: fail}) as target, connected(target, GuardedInterceptor(guard)) as channel:
        for metadata in (keys, keys[:1]):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(full(UU))(b"x", metadata=metadata)
    assert len(calls) == 1 + 2
