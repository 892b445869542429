from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, Guard, TimedOut
from seawall.web.grpc import AioServerInterceptor, ServerInterceptor, interceptors
from seawall.web.grpc import interceptors as served
from seawall.web.trust import Trust
from tests.clients.grpc.support import (
    KINDS,
    aconnected,
    arun,
    aserving,
    connected,
    full,
    one_loop,
    serving,
)
from tests.support import let_pass, new_guard

pytestmark = pytest.mark.alone

UU, US, SU, SS = KINDS


@pytest.fixture(autouse=True, scope="module")
def _one_loop() -> Iterator[None]:
    """Run all async tests of this file in one loop."""
    with one_loop():
        yield


def in_flight(guard: Guard) -> int:
    taken: int = guard.snapshot()["policies"][0]["in_flight"]
    return taken


async def _settled(guard: Guard) -> int:
    """Wait until nothing is in flight any more, for a while; return what is."""
    for _ in range(300):
        if not in_flight(guard):
            break
        await let_pass(0.01)
    return in_flight(guard)


class _Context:
    """As much of a servicer's context as admission asks for; it has no `code()` in aio servers."""

    def __init__(self, metadata: Any = ()) -> None:
        self._metadata = metadata

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> Any:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


async def _after_the_caller_left(guard: Guard) -> tuple[int, Any, Any]:
    """Read an item of a plain generator, let the RPC's task end.

    Return what is in flight then, the generator, and its method.
    """
    handlers: list[Any] = []

    async def behind(_details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(lambda request, _context: iter([request] * 3))

    async def rpc() -> None:
        details: Any = type("Details", (), {"method": full(US)})()
        handlers.append(await AioServerInterceptor(guard).intercept_service(behind, details))
        await asyncio.Event().wait()

    task = asyncio.create_task(rpc())
    await let_pass(0.0)
    items = handlers[0].unary_stream(b"x", _Context())
    assert next(items) == b"x"
    assert in_flight(guard) == 1
    task.cancel()
    await asyncio.wait([task])
    await let_pass(0.0)
    return in_flight(guard), items, handlers[0].unary_stream


def test_plain_generators_in_aio_servers_are_let_go() -> None:
    """When the caller is gone the slot is free, though gRPC's thread never asks for more."""
    guard = new_guard(Bulkhead(1))
    taken, items, method = arun(_after_the_caller_left(guard))
    assert taken == 0
    assert guard.snapshot()["cancelled"] == 1
    # Nobody takes the others; and what nobody waits for does not begin, nor asks its context.
    assert list(items) == []
    assert list(method(b"x", None)) == []


def test_they_would_not_if_nobody_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the end of gRPC's task were not looked at, the slot would stay taken."""
    monkeypatch.setattr(served._Caller, "_over", lambda *_arguments: None)
    taken, items, _method = arun(_after_the_caller_left(new_guard(Bulkhead(1))))
    assert taken == 1
    assert list(items) == [b"x", b"x"]


def test_callers_of_plain_generators_may_go() -> None:
    """The same with a real client that cancels in mid-stream; the handler is closed, too."""
    guard = new_guard(Bulkhead(1))
    gone, closed = threading.Event(), threading.Event()

    def slow(request: bytes, _context: Any) -> Iterator[bytes]:
        try:
            yield request
            gone.wait(5.0)
            while True:
                yield request
        finally:
            closed.set()

    async def main() -> None:
        interceptor = AioServerInterceptor(guard)
        async with aserving({US: slow}, interceptor) as target, aconnected(target) as channel:
            stream = channel.unary_stream(full(US))(b"x")
            try:
                assert await stream.read() == b"x"
                stream.cancel()
                assert await _settled(guard) == 0
            finally:
                gone.set()
            assert await asyncio.to_thread(closed.wait, 5.0)

    arun(main())
    assert guard.snapshot()["cancelled"] == 1


BIG = b"x" * 500_000


async def _endless(_request: bytes, _context: Any) -> Any:
    while True:
        yield BIG


async def _written(_request: bytes, context: Any) -> None:
    while True:
        await context.write(BIG)


@pytest.mark.parametrize("handler", [_endless, _written])
def test_a_client_that_does_not_read_has_no_more_time(handler: Callable[..., Any]) -> None:
    """`stream_timeout` counts the time that is spent on writing, in aio servers."""
    guard = new_guard(Bulkhead(1))

    async def main() -> None:
        interceptor = AioServerInterceptor(guard, stream_timeout=0.2)
        async with aserving({US: handler}, interceptor) as target, aconnected(target) as channel:
            stream = channel.unary_stream(full(US))(b"x")
            assert await stream.read() == BIG
            assert await _settled(guard) == 0
            stream.cancel()

    arun(main())


def test_nor_on_a_sync_server() -> None:
    """`stream_timeout` cancels the stream of a sync server, whoever is waited for."""
    guard = new_guard(Bulkhead(1))

    def endless(_request: bytes, _context: Any) -> Iterator[bytes]:
        while True:
            yield BIG

    def collect(requests: Iterator[bytes], _context: Any) -> bytes:
        return b"".join(requests)

    more = threading.Event()

    def never() -> Iterator[bytes]:
        more.wait(5.0)
        yield b""

    interceptor = ServerInterceptor(guard, stream_timeout=0.2)
    with (
        serving({US: endless, SU: collect}, interceptor) as target,
        connected(target) as channel,
    ):
        stream = channel.unary_stream(full(US))(b"x")
        assert next(stream) == BIG
        assert arun(_settled(guard)) == 0
        stream.cancel()
        with pytest.raises(grpc.RpcError):
            channel.stream_unary(full(SU))(never())
        more.set()
        assert arun(_settled(guard)) == 0


@given(st.lists(st.tuples(st.just("x-user"), st.text() | st.binary())))
def test_whatever_metadata_says(metadata: list[tuple[str, str | bytes]]) -> None:
    """No text in metadata makes admission raise: gRPC hands out whatever was UTF-8."""
    incoming = interceptors._incoming(full(UU), _Context(metadata), Trust())
    values = [value if isinstance(value, bytes) else value.encode() for _, value in metadata]
    assert [value for _, value in incoming.headers] == values


def test_who_is_gone_is_told_nothing() -> None:
    """No status is sent for a call that is over, and a failure to send one stays quiet."""
    aborted = []

    class Context(_Context):
        def __init__(self, *, over: bool) -> None:
            super().__init__()
            self._over = over

        def done(self) -> bool:
            return self._over

        async def abort(self, *arguments: Any) -> None:
            aborted.append(arguments[0])
            raise grpc.aio.InternalError("failed to send")

    arun(served._aabort(Context(over=True), TimedOut("late")))
    assert aborted == []
    arun(served._aabort(Context(over=False), TimedOut("late")))
    assert aborted == [grpc.StatusCode.DEADLINE_EXCEEDED]


@pytest.mark.parametrize("kind", [UU, US])
def test_a_plain_handler_for_somebody_refused_and_gone(kind: str) -> None:
    """If the caller of a refused call is gone before the status is sent, all stays quiet."""

    class Context(_Context):
        def set_trailing_metadata(self, _trailing: Any) -> None:
            pass

        def abort(self, *_arguments: Any) -> None:
            raise grpc.aio.InternalError("failed to send")

    guard = new_guard(Bulkhead(1))
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    handler = make(lambda *_call: pytest.fail("the handler was called"))
    around = served._around_sync(AioServerInterceptor(guard), handler, "/a/B", served._Caller())
    with guard.hold():
        answer = around(b"", Context())
        assert (list(answer) if kind == US else answer) in ([], None)
