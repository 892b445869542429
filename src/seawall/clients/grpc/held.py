"""RPCs whose gates stay entered until they are over: streams, and futures.

Two ways lead there. A call that may be made again goes through the whole guard as far as its first
item; the gates are held from there on. Any other enters the gates alone and is begun at once:
nothing waits for an answer that may depend on what the caller is about to send.

Gates are left once, by the first to know: gRPC, if the call is one of its own; who reads it to its
end; who lets go of it. An interceptor further in may hand out a mere generator, and of a
single-threaded stream that is dropped gRPC tells nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from threading import Timer
from typing import Any
from weakref import ref

import grpc

from seawall.clients.grpc.calls import Cancelled, Rpc, Terms, verdict, verdict_on
from seawall.clients.grpc.errors import failure, is_failure
from seawall.clients.grpc.replies import AioFinished, Finished
from seawall.context import deadline_scope
from seawall.errors import TimedOut
from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.runners import run_async, run_sync


def once(act: Callable[..., Any]) -> Callable[..., bool]:
    """Return a function that calls `act` the first time, from whatever thread; it tells if so."""
    todo = [act]

    def first(*args: Any) -> bool:
        try:
            taken = todo.pop()
        except IndexError:
            return False
        taken(*args)
        return True

    return first


class Started:
    """A stream that was asked for its first item, or is yet to be asked."""

    __slots__ = ("call", "error", "items", "read")

    def __init__(self, call: Any, items: Any) -> None:
        """Hold the items of `call`; for a substitute there is none."""
        self.call = call
        self.items = items
        self.read: list[Any] = []
        """The first item, until it is given out."""
        self.error: Exception | None = None
        """An answer that is none of the items: NOT_FOUND and the like."""


def begin(terms: Terms, rpc: Rpc, *, timed: bool) -> Any:
    """Enter the gates and begin the call; they are left when it is over.

    `timed`: it is a future; the guard's timeouts bound the whole call, as its deadline.
    """
    hold = terms.guard.hold(rpc)
    hold.__enter__()
    leave = once(lambda error: hold.__exit__(None, error, None))
    try:
        seconds = terms.left_until(deadline_scope(), timed=timed)
        call = rpc.send(terms.details(rpc, seconds), rpc.message())
        heard = when_over(call, leave)
        if not timed:
            return Items(Started(call, iter(call)), leave)
    except BaseException as error:
        leave(error)
        raise
    if not heard:
        leave(None)  # what is no call is a response already
    return call


async def abegin(terms: Terms, rpc: Rpc, *, timed: bool) -> Any:
    """Do as `begin`, in a task."""
    hold = terms.guard.hold(rpc)
    await hold.__aenter__()
    leave = once(lambda error: hold.__exit__(None, error, None))
    try:
        seconds = terms.left_until(deadline_scope(), timed=timed)
        call = await rpc.send(terms.details(rpc, seconds), rpc.message())
        heard = awhen_over(call, leave)
        if not heard and not timed:
            return AioFinished(None, AioItems(Started(None, aiter(call)), leave))
    except BaseException as error:
        leave(error)
        raise
    if not heard:
        leave(None)
    return call  # the very one: gRPC writes to no other


def first_item(terms: Terms, rpc: Rpc) -> Items:
    """Go through the guard as far as the first item; the gates are left when the call is over."""
    # Read outside of the guard: its timeouts reach to the first item, and do not end the stream.
    until = deadline_scope()

    def first(rpc: Rpc) -> Started:
        call = rpc.send(terms.details(rpc, terms.left_until(until)), rpc.message())
        started = Started(call, iter(call))
        try:
            started.read.append(_in_time(started, terms.until_first(until), terms.guard.name))
        except StopIteration:
            pass
        except Exception as error:  # noqa: BLE001 - raised or kept, by what it is
            _look_at(started, error, terms.guard.name)
        return started

    call = _streaming(terms, rpc, first)
    call.adapt = _substitute
    started: Started = run_sync(call)
    call.value = None  # or what gRPC tells when it is over would keep it from being collected
    leave = once(lambda error: release(call, error))
    try:
        if started.call is None:
            leave(None)
        else:
            when_over(started.call, leave)
    except BaseException as error:
        leave(error)
        raise
    return Items(started, leave)


async def afirst_item(terms: Terms, rpc: Rpc) -> Any:
    """Do as `first_item`, in a task."""
    until = deadline_scope()

    async def first(rpc: Rpc) -> Started:
        call = await rpc.send(terms.details(rpc, terms.left_until(until)), rpc.message())
        started = Started(call, aiter(call))
        try:
            started.read.append(await anext(started.items))
        except StopAsyncIteration:
            pass
        except Exception as error:  # noqa: BLE001 - raised or kept, by what it is
            _look_at(started, error, terms.guard.name)
        return started

    call = _streaming(terms, rpc, first)
    call.adapt = _asubstitute
    started: Started = await run_async(call)
    call.value = None
    leave = once(lambda error: release(call, error))
    if started.call is None:
        leave(None)
    elif awhen_over(started.call, leave):
        return AioItems(started, leave)
    # These items belong to no call.
    return AioFinished(None, AioItems(started, leave))


def _streaming(terms: Terms, rpc: Rpc, first: Callable[..., Any]) -> Call:
    host = terms.host(rpc)
    call = Call(host, terms.stream_layers, first, (rpc,), {}, host.clock.now())
    call.streaming = True
    return call


def _in_time(started: Started, seconds: float | None, guard: str) -> Any:
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


def _look_at(started: Started, error: Exception, guard: str) -> None:
    if is_failure(error):
        seen = failure(error, guard)
        if seen is error:
            raise error
        raise seen from error
    started.error = error


def _substitute(items: Iterable[Any]) -> Started:
    started = Started(None, iter(items))
    started.read.extend(_up_to_one(started.items))
    return started


def _up_to_one(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        yield item
        return


async def _asubstitute(items: Any) -> Started:
    started = Started(None, aiter(items) if hasattr(items, "__aiter__") else _each(items))
    try:
        started.read.append(await anext(started.items))
    except StopAsyncIteration:
        pass
    return started


async def _each(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


def when_over(call: Any, leave: Callable[..., bool]) -> bool:
    """Have gRPC tell `leave` how `call` went; return whether it is one that does."""
    if not hasattr(call, "add_callback"):
        return False
    # Not the call itself: then it would never be collected, and what nobody reads never cancelled.
    watched = ref(call)

    def over() -> None:
        known = watched()
        leave(verdict(None if known is None else known.code()))

    if not call.add_callback(over):
        over()
    return True


def awhen_over(call: Any, leave: Callable[..., bool]) -> bool:
    """Have gRPC tell `leave` how `call` went; return whether it is one that does."""
    try:
        call.add_done_callback(lambda over: leave(verdict(_code_of(over))))
    except (AttributeError, NotImplementedError):  # gRPC's own, around what is no call
        return False
    return True


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
    """A sync stream that leaves the gates when it ends or is dropped; in all else the call."""

    def __init__(self, started: Started, leave: Callable[..., bool]) -> None:
        """Give out what was read, and then the rest."""
        self._started = started
        self._leave = leave
        self._call = started.call if started.call is not None else Finished(None)

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
            self._leave(verdict_on(error))
            raise

    next = __next__

    def __del__(self) -> None:
        self._leave(Cancelled())


grpc.Call.register(Items)


class AioItems:
    """The items of an aio stream; it leaves the gates when it ends or is dropped."""

    def __init__(self, started: Started, leave: Callable[..., bool]) -> None:
        """Give out what was read, and then the rest."""
        self._started = started
        self._leave = leave

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
        except BaseException as error:  # a read that is cancelled cancels the RPC
            self._leave(verdict_on(error))
            raise

    def __del__(self) -> None:
        self._leave(Cancelled())
