"""Guarded generators: the stack stands around the first item, the gates stay until the end.

Timeout and Retry reach as far as the first item: after it something was given away already. Gates
are held until the generator ends or is closed, and left once. Context variables are set for each
step and taken back after it, since between two steps the caller's own code runs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any

from seawall.context import attempt_var
from seawall.runtime.call import Call
from seawall.runtime.interpreter import release
from seawall.runtime.layers import Host, Layer
from seawall.runtime.runners import run_async, run_sync


class _Started:
    """A source that was asked for its first item, and is asked for more."""

    __slots__ = ("ended", "item", "source")

    def __init__(self, source: Any, item: Any, *, ended: bool = False) -> None:
        self.source = source
        self.item = item
        """The latest item; the generator's return value once it has ended."""
        self.ended = ended

    def step(self, how: Callable[[Any], Any], argument: Any, attempt: int) -> None:
        """Go on to the next item, by `send` or `throw`."""
        token = attempt_var.set(attempt)
        try:
            self.item = how(argument)
        except StopIteration as stop:
            self.ended = True
            self.item = stop.value
        finally:
            attempt_var.reset(token)

    async def astep(self, how: Callable[[Any], Any], argument: Any, attempt: int) -> None:
        """Go on to the next item, by `asend` or `athrow`."""
        token = attempt_var.set(attempt)
        try:
            self.item = await how(argument)
        except StopAsyncIteration:
            self.ended = True
        finally:
            attempt_var.reset(token)


def _call(
    host: Host,
    layers: Sequence[Layer],
    first: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    call = Call(host, layers, first, args, kwargs, host.clock.now())
    call.streaming = True
    return call


def guard_generator(
    host: Host, layers: Sequence[Layer], function: Callable[..., Generator[Any, Any, Any]]
) -> Callable[..., Generator[Any, Any, Any]]:
    """Return `function` with `layers` around it."""

    def first(*args: Any, **kwargs: Any) -> _Started:
        return _first_of(function(*args, **kwargs))

    def guarded(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = _call(host, layers, first, args, kwargs)
        error: BaseException | None = None
        try:
            flow = run_sync(call)
            if not isinstance(flow, _Started):
                return (yield from flow)  # a fallback's own items
            while not flow.ended:
                try:
                    sent = yield flow.item
                except GeneratorExit:
                    flow.source.close()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - the source decides what it means
                    flow.step(flow.source.throw, thrown, call.attempts)
                else:
                    flow.step(flow.source.send, sent, call.attempts)
        except BaseException as raised:
            error = raised
            raise
        else:
            return flow.item
        finally:
            release(call, error)
            del error

    return guarded


def _first_of(source: Generator[Any, Any, Any]) -> _Started:
    try:
        return _Started(source, next(source))
    except StopIteration as stop:
        return _Started(source, stop.value, ended=True)


def guard_async_generator(
    host: Host, layers: Sequence[Layer], function: Callable[..., AsyncGenerator[Any, Any]]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Return `function` with `layers` around it."""

    async def first(*args: Any, **kwargs: Any) -> _Started:
        return await _afirst_of(function(*args, **kwargs))

    async def guarded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = _call(host, layers, first, args, kwargs)
        error: BaseException | None = None
        try:
            flow = await run_async(call)
            if not isinstance(flow, _Started):
                flow = await _afirst_of(_items(flow))  # a fallback's own items
            while not flow.ended:
                try:
                    sent = yield flow.item
                except GeneratorExit:
                    await flow.source.aclose()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - the source decides what it means
                    await flow.astep(flow.source.athrow, thrown, call.attempts)
                else:
                    await flow.astep(flow.source.asend, sent, call.attempts)
        except BaseException as raised:
            error = raised
            raise
        finally:
            release(call, error)
            del error

    return guarded


async def _afirst_of(source: AsyncGenerator[Any, Any]) -> _Started:
    try:
        return _Started(source, await anext(source))
    except StopAsyncIteration:
        return _Started(source, None, ended=True)


async def _items(source: Any) -> AsyncGenerator[Any, Any]:
    if hasattr(source, "__aiter__"):
        async for item in source:
            yield item
    else:
        for item in source:
            yield item
