"""RPCs that hold their gates until they are over: streams and futures.

There are two ways. A call that may be repeated passes through the whole guard up to its first item,
and holds the gates from then on. Any other call enters only the gates and starts immediately: it
must not wait for a response that may depend on what the caller is about to send.

The gates are left once, by the first event that is known: gRPC's callback, if the call is one of
gRPC; the end of reading; or garbage collection. The last two are needed because an inner
interceptor may return a plain generator, and gRPC does not report a dropped single-threaded stream.
"""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from threading import Timer
from typing import Any
from weakref import ref

import grpc

from seawall.clients.grpc.calls import Rpc, RpcCancelled, RpcTerms, verdict, verdict_of_error
from seawall.clients.grpc.completed_calls import AioCompletedCall, CompletedCall
from seawall.clients.grpc.errors import is_failure, raise_failure
from seawall.context import Scope, deadline_scope
from seawall.errors import TimedOut
from seawall.runtime.call import Call
from seawall.runtime.driver import Steps, adrive, drive
from seawall.runtime.interpreter import release, run_async, run_sync


def once(act: Callable[..., Any]) -> Callable[..., bool]:
    """Return a thread-safe function that calls `act` only once, and returns whether it did."""
    todo = [act]

    def first(*args: Any) -> bool:
        try:
            taken = todo.pop()
        except IndexError:
            return False
        taken(*args)
        return True

    return first


class StartedStream:
    """A stream whose first item was requested, or will be."""

    def __init__(self, call: Any, items: Any) -> None:
        self.call = call
        self.items = items
        self.read: list[Any] = []
        """The first item, until it is returned."""
        self.error: Exception | None = None
        """A status without items that is not a failure, such as NOT_FOUND."""


def start_held_call(terms: RpcTerms, rpc: Rpc, *, timed: bool) -> Steps[Any]:
    """Enter the gates and start the call; leave them when it is over.

    `timed`: the call is a future, and the guard's timeouts limit the whole call, as its deadline.
    """
    is_async = terms.kind == "async"
    hold = terms.guard.hold(rpc)
    yield hold.__aenter__ if is_async else hold.__enter__
    leave = once(lambda error: hold.__exit__(None, error, None))
    try:
        seconds = terms.seconds_until(deadline_scope(), timed=timed)
        call = yield partial(rpc.send, terms.details(rpc, seconds), rpc.message())
        watched = aleave_at_end(call, leave) if is_async else leave_at_end(call, leave)
        if not timed and not is_async:
            return SyncStreamItems(StartedStream(call, iter(call)), leave)
        if not timed and not watched:
            return AioCompletedCall(None, AioStreamItems(StartedStream(None, aiter(call)), leave))
    except BaseException as error:
        leave(error)
        raise
    if not watched:
        leave(None)  # if it is not a call, it is a complete response
    return call  # the same object: gRPC writes to no other


def start_repeatable_stream(terms: RpcTerms, rpc: Rpc) -> Steps[Any]:
    """Run the guard up to the first item; the gates are left when the call is over."""
    is_async = terms.kind == "async"
    # Read outside of the guard: its timeouts apply up to the first item, and do not end the stream.
    until = deadline_scope()

    def first(rpc: Rpc) -> StartedStream:
        return drive(_start(terms, rpc, until), operator.call)

    async def afirst(rpc: Rpc) -> StartedStream:
        return await adrive(_start(terms, rpc, until), operator.call)

    host = terms.guard_for(rpc)
    function = afirst if is_async else first
    call = Call(host, terms.stream_layers, function, (rpc,), {}, host.clock.now())
    call.streaming = True
    call.adapt = _asubstitute if is_async else _substitute
    started: StartedStream = yield partial(run_async if is_async else run_sync, call)
    call.value = None  # otherwise gRPC's callback would keep the stream from being collected
    leave = once(lambda error: release(call, error))
    watched = False
    try:
        if started.call is None:
            leave(None)
        else:
            watched = (aleave_at_end if is_async else leave_at_end)(started.call, leave)
    except BaseException as error:
        leave(error)
        raise
    if not is_async:
        return SyncStreamItems(started, leave)
    items = AioStreamItems(started, leave)
    return items if watched else AioCompletedCall(None, items)  # unwatched items belong to no call


def _start(terms: RpcTerms, rpc: Rpc, until: Scope | None) -> Steps[StartedStream]:
    """Start the call, and wait for its first item; `until` is the deadline of the whole stream."""
    call = yield partial(rpc.send, terms.details(rpc, terms.seconds_until(until)), rpc.message())
    name = terms.guard.name
    started = StartedStream(call, aiter(call) if terms.kind == "async" else iter(call))
    try:
        if terms.kind == "async":
            item = yield started.items.__anext__
        else:
            item = yield partial(_in_time, started, terms.seconds_until_first(until), name)
        started.read.append(item)
    except (StopIteration, StopAsyncIteration):
        pass
    except Exception as error:  # noqa: BLE001 - raised or stored, depending on its kind
        _judge(started, error, name)
    return started


def _in_time(started: StartedStream, seconds: float | None, guard: str) -> Any:
    """Return the first item, or cancel the call after `seconds` and raise `TimedOut`."""
    cancel = getattr(started.call, "cancel", None)
    if seconds is None or cancel is None:
        return next(started.items)
    settle = once(lambda act: act())
    timer = Timer(seconds, settle, (cancel,))
    timer.daemon = True
    timer.start()
    try:
        return next(started.items)
    finally:
        if not settle(timer.cancel):
            raise TimedOut(
                f"guard {guard!r}: no item within {seconds:.3f} s", guard=guard, seconds=seconds
            )


def _judge(started: StartedStream, error: Exception, guard: str) -> None:
    """Raise an error that is the server's failure; keep any other for the reader."""
    if is_failure(error):
        raise_failure(error, guard)
    started.error = error


def _substitute(items: Iterable[Any]) -> StartedStream:
    started = StartedStream(None, iter(items))
    started.read.extend(islice(started.items, 1))
    return started


async def _asubstitute(items: Any) -> StartedStream:
    started = StartedStream(None, aiter(items) if hasattr(items, "__aiter__") else _each(items))
    try:
        started.read.append(await anext(started.items))
    except StopAsyncIteration:
        pass
    return started


async def _each(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def leave_at_end(call: Any, leave: Callable[..., bool]) -> bool:
    """Register `leave` for the end of `call`; return whether the call supports that."""
    if not hasattr(call, "add_callback"):
        return False
    # A weak reference: otherwise the call would never be collected, and an unread call never
    # cancelled.
    watched = ref(call)

    def over() -> None:
        known = watched()
        leave(verdict(None if known is None else known.code()))

    if not call.add_callback(over):
        over()
    return True


def aleave_at_end(call: Any, leave: Callable[..., bool]) -> bool:
    """Register `leave` for the end of `call`; return whether the call supports that."""
    try:
        call.add_done_callback(lambda over: leave(verdict(_code_of(over))))
    except (AttributeError, NotImplementedError):  # gRPC's wrapper of a non-call
        return False
    return True


def _code_of(call: Any) -> grpc.StatusCode | None:
    """Return the status of a finished call, without awaiting: it is available."""
    asked = call.code()
    try:
        asked.send(None)
    except StopIteration as known:
        code: grpc.StatusCode = known.value
        return code
    except Exception:  # noqa: BLE001, S110 - it ended without a status
        pass
    finally:
        asked.close()
    return None


class StreamItems:
    """The items of a stream; leaves the gates when it ends or is dropped."""

    def __init__(self, started: StartedStream, leave: Callable[..., bool]) -> None:
        self._started = started
        self._leave = leave

    def __del__(self) -> None:
        self._leave(RpcCancelled())


class SyncStreamItems(StreamItems):
    """A sync stream that leaves the gates when it ends or is dropped; else acts as the call."""

    def __init__(self, started: StartedStream, leave: Callable[..., bool]) -> None:
        super().__init__(started, leave)
        self._call = started.call if started.call is not None else CompletedCall(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        started = self._started
        if started.read:
            return started.read.pop()
        if started.error is not None:
            raise started.error
        try:
            return next(started.items)
        except StopIteration:
            self._leave(None)
            raise
        except Exception as error:
            self._leave(verdict_of_error(error))
            raise

    next = __next__


grpc.Call.register(SyncStreamItems)


class AioStreamItems(StreamItems):
    """The items of an aio stream."""

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        started = self._started
        if started.read:
            return started.read.pop()
        if started.error is not None:
            raise started.error
        try:
            return await anext(started.items)
        except StopAsyncIteration:
            self._leave(None)
            raise
        except BaseException as error:  # cancelling a read cancels the RPC
            self._leave(verdict_of_error(error))
            raise
