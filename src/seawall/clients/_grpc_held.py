"""RPCs whose gates stay entered until gRPC says that they are over: streams, and futures.

Two ways lead there. A call whose request can be sent again goes through the whole guard as far as
its first item; the gates are held from there on. Any other enters the gates alone and is begun at
once: nothing waits for an answer that may depend on what the caller is about to send.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import grpc

from seawall.clients._grpc_calls import Rpc, Terms, verdict
from seawall.clients._grpc_errors import failure, is_failure
from seawall.clients._grpc_replies import Finished
from seawall.context import deadline_var
from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.runners import run_async, run_sync

Release = Callable[[BaseException | None], None]


class Started:
    """A stream that was asked for its first item."""

    __slots__ = ("call", "ended", "error", "item", "items")

    def __init__(self, call: Any, items: Any) -> None:
        """Hold the items of `call`; for a substitute there is none."""
        self.call = call
        self.items = items
        self.item: Any = None
        self.ended = False
        self.error: Exception | None = None
        """An answer that is none of the items: NOT_FOUND and the like."""


def begin(terms: Terms, rpc: Rpc, *, timed: bool) -> Any:
    """Enter the gates and begin the call; they are left when it is over.

    `timed`: the guard's timeouts bound the whole call, as its deadline.
    """
    hold = terms.guard.hold(rpc)
    hold.__enter__()
    try:
        seconds = terms.left_until(deadline_var.get(), timed=timed)
        call = rpc.send(terms.details(rpc, seconds), rpc.message())
    except BaseException as error:
        hold.__exit__(type(error), error, None)
        raise
    when_over(call, lambda error: hold.__exit__(None, error, None))
    return call


async def abegin(terms: Terms, rpc: Rpc, *, timed: bool) -> Any:
    """Do as `begin`, in a task."""
    hold = terms.guard.hold(rpc)
    await hold.__aenter__()
    try:
        seconds = terms.left_until(deadline_var.get(), timed=timed)
        call = await rpc.send(terms.details(rpc, seconds), rpc.message())
    except BaseException as error:
        hold.__exit__(type(error), error, None)
        raise
    awhen_over(call, lambda error: hold.__exit__(None, error, None))
    return call


def first_item(terms: Terms, rpc: Rpc) -> Started:
    """Go through the guard as far as the first item; the gates are left when the call is over."""
    # Read outside of the guard: its timeouts reach to the first item, and do not end the stream.
    until = deadline_var.get()

    def first(rpc: Rpc) -> Started:
        call = rpc.send(terms.details(rpc, terms.left_until(until)), rpc.message())
        started = Started(call, call)
        try:
            started.item = next(call)
        except StopIteration:
            started.ended = True
        except Exception as error:  # noqa: BLE001 - raised or kept, by what it is
            _look_at(started, error, terms.guard.name)
        return started

    call = _streaming(terms, rpc, first)
    call.adapt = _substitute
    started: Started = run_sync(call)
    if started.call is None:
        release(call, None)
    else:
        when_over(started.call, lambda error: release(call, error))
    return started


async def afirst_item(terms: Terms, rpc: Rpc) -> Started:
    """Do as `first_item`, in a task."""
    until = deadline_var.get()

    async def first(rpc: Rpc) -> Started:
        call = await rpc.send(terms.details(rpc, terms.left_until(until)), rpc.message())
        started = Started(call, aiter(call))
        try:
            started.item = await anext(started.items)
        except StopAsyncIteration:
            started.ended = True
        except Exception as error:  # noqa: BLE001 - raised or kept, by what it is
            _look_at(started, error, terms.guard.name)
        return started

    call = _streaming(terms, rpc, first)
    call.adapt = _asubstitute
    started: Started = await run_async(call)
    if started.call is None:
        release(call, None)
    else:
        awhen_over(started.call, lambda error: release(call, error))
    return started


def _streaming(terms: Terms, rpc: Rpc, first: Callable[..., Any]) -> Call:
    host = terms.host(rpc)
    call = Call(host, host._stream_layers(terms.kind), first, (rpc,), {}, host.clock.now())
    call.streaming = True
    return call


def _look_at(started: Started, error: Exception, guard: str) -> None:
    if is_failure(error):
        seen = failure(error, guard)
        if seen is error:
            raise error
        raise seen from error
    started.error = error
    started.ended = True


def _substitute(items: Iterable[Any]) -> Started:
    started = Started(None, iter(items))
    try:
        started.item = next(started.items)
    except StopIteration:
        started.ended = True
    return started


async def _asubstitute(items: Any) -> Started:
    started = Started(None, aiter(items) if hasattr(items, "__aiter__") else _each(items))
    try:
        started.item = await anext(started.items)
    except StopAsyncIteration:
        started.ended = True
    return started


async def _each(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def when_over(call: Any, left: Release) -> None:
    """Tell `left` how `call` went, once, when it is over."""
    # Not the call itself: then it would never be collected, and what nobody reads never cancelled.
    watched = ref(call)

    def over() -> None:
        known = watched()
        left(verdict(None if known is None else known.code()))

    if not call.add_callback(over):
        over()


def awhen_over(call: Any, left: Release) -> None:
    """Tell `left` how `call` went, once, when it is over."""
    call.add_done_callback(lambda over: left(verdict(_code_of(over))))


def _code_of(call: Any) -> grpc.StatusCode | None:
    """Return the status of a call that is over: what would be awaited for is there."""
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


class Items:
    """A sync stream that goes on after its first item; in all else the call itself."""

    def __init__(self, started: Started) -> None:
        """Give out the first item, and then the others."""
        self._started = started
        self._call = started.call if started.call is not None else Finished(None)
        self._taken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        started = self._started
        if started.error is not None:
            raise started.error
        if started.ended:
            raise StopIteration
        if not self._taken:
            self._taken = True
            item, started.item = started.item, None
            return item
        return next(started.items)

    next = __next__


async def aitems(started: Started) -> AsyncIterator[Any]:
    """Give out the first item, and then the others."""
    if started.error is not None:
        raise started.error
    if not started.ended:
        item, started.item = started.item, None
        yield item
        async for item in started.items:
            yield item
