"""Real gRPC servers on loopback, whose methods do what a test says, and channels to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from typing import Any

import grpc

SERVICE = "test.S"
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

# No pooled connections between tests, no proxies, none of gRPC's own retries.
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]


_runners: list[asyncio.Runner] = []


@contextmanager
def one_loop() -> Iterator[None]:
    """Keep one event loop for all that `arun` runs: gRPC has one queue of events for all loops.

    What it has to say of a call to a loop that is closed, it says again and again.
    """
    with asyncio.Runner() as runner:
        _runners.append(runner)
        try:
            yield
        finally:
            _runners.pop()


def arun(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` to its end, in the one loop."""
    return _runners[-1].run(main, context=copy_context())


def full(kind: str) -> str:
    """Return the full name of the method of that kind."""
    return f"/{SERVICE}/{kind}"


def handlers(functions: dict[str, Callable[..., Any]]) -> Any:
    """Return a generic handler: one method for each kind, named as the kind."""
    made = {
        kind: getattr(grpc, f"{kind}_rpc_method_handler")(function)
        for kind, function in functions.items()
    }
    return grpc.method_handlers_generic_handler(SERVICE, made)


@contextmanager
def serving(
    functions: dict[str, Callable[..., Any]], *interceptors: Any, threads: int = 8
) -> Iterator[str]:
    """Run a sync server; give its address."""
    with ThreadPoolExecutor(threads) as pool:
        server = grpc.server(pool, interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((handlers(functions),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


@contextmanager
def connected(target: str, *interceptors: Any) -> Iterator[grpc.Channel]:
    """Open a sync channel."""
    with grpc.insecure_channel(target, options=OPTIONS) as channel:
        yield grpc.intercept_channel(channel, *interceptors)


@asynccontextmanager
async def aserving(
    functions: dict[str, Callable[..., Any]], *interceptors: Any
) -> AsyncIterator[str]:
    """Run an aio server; give its address."""
    server = grpc.aio.server(interceptors=interceptors, options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handlers(functions),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def aconnected(target: str, interceptors: Any = ()) -> AsyncIterator[grpc.aio.Channel]:
    """Open an aio channel."""
    async with grpc.aio.insecure_channel(
        target, options=OPTIONS, interceptors=list(interceptors)
    ) as channel:
        yield channel


@contextmanager
def dialled(functions: dict[str, Callable[..., Any]], *interceptors: Any) -> Iterator[grpc.Channel]:
    """Run a sync server, and open a sync channel to it with these interceptors."""
    with serving(functions) as target, connected(target, *interceptors) as channel:
        yield channel


def metadata_of(context: Any) -> dict[str, str]:
    """Return what the caller sent beside its message."""
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
