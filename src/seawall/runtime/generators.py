"""Guarded generators: the stack covers the first item, the gates stay until the end.

Timeout and Retry apply up to the first item: after that, an item has already been handed out. Gates
are held until the generator ends or is closed, and left once. A consumer that closes it early is a
success, like one that reads to the end. Context variables are set for each step and reset after it,
since the caller's own code runs between two steps.
"""

from __future__ import annotations

from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from sys import get_asyncgen_hooks, set_asyncgen_hooks
from typing import Any

from seawall.context import attempt_var, reset
from seawall.runtime.call import Call, substitute_var
from seawall.runtime.interpreter import release, run_async, run_sync
from seawall.runtime.layers import Host, Layer


class _Started:
    """A source that has delivered its first item and is being iterated."""

    def __init__(self, source: Any, item: Any, *, ended: bool = False) -> None:
        self.source = source
        self.item = item  # the latest item; the generator's return value once it has ended
        self.ended = ended
        self._attempt = attempt_var.get()
        self._cause = substitute_var.get()

    @contextmanager
    def context(self) -> Iterator[None]:
        """Set the context variables that the source saw at its first item, for one more step."""
        attempt = attempt_var.set(self._attempt)
        cause = substitute_var.set(self._cause)
        try:
            yield
        finally:
            reset(substitute_var, cause)
            reset(attempt_var, attempt)

    def step(self, how: Callable[[Any], Any], argument: Any) -> None:
        try:
            with self.context():
                self.item = how(argument)
        except StopIteration as stop:
            self.ended = True
            self.item = stop.value

    async def astep(self, how: Callable[[Any], Any], argument: Any) -> None:
        try:
            with self.context():
                self.item = await how(argument)
        except StopAsyncIteration:
            self.ended = True


Pick = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Host, Sequence[Layer]]]
"""Returns the guard of a call with these arguments, and its layers."""


def _call(
    pick: Pick,
    first: Callable[..., Any],
    adapt: Callable[[Any], Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    host, layers = pick(args, kwargs)
    call = Call(host, layers, first, args, kwargs, host.clock.now())
    call.streaming = True
    call.adapt = adapt
    return call


def guard_generator(
    pick: Pick, function: Callable[..., Generator[Any, Any, Any]]
) -> Callable[..., Generator[Any, Any, Any]]:
    """Return `function` with the layers around it that `pick` returns for its arguments."""

    def first(*args: Any, **kwargs: Any) -> _Started:
        return _first_of(function(*args, **kwargs))

    def guarded(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = _call(pick, first, _first_of, args, kwargs)
        error: BaseException | None = None
        enough = False
        try:
            flow = run_sync(call)
            while not flow.ended:
                try:
                    sent = yield flow.item
                except GeneratorExit:
                    with flow.context():
                        flow.source.close()
                    enough = True
                    raise
                except BaseException as thrown:  # noqa: BLE001 - the source decides what it means
                    flow.step(flow.source.throw, thrown)
                else:
                    flow.step(flow.source.send, sent)
        except BaseException as raised:
            error = None if enough else raised
            raise
        else:
            return flow.item
        finally:
            release(call, error)
            del error

    return guarded


def _first_of(items: Any) -> _Started:
    """Read the first item of a generator, or of any iterable that a fallback returns."""
    source = items if hasattr(items, "send") else _from_iterable(items)
    try:
        return _Started(source, next(source))
    except StopIteration as stop:
        return _Started(source, stop.value, ended=True)


def _from_iterable(items: Iterable[Any]) -> Generator[Any, Any, None]:
    yield from items  # which also closes them, if the reader stops early


def guard_async_generator(
    pick: Pick, function: Callable[..., AsyncGenerator[Any, Any]]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Return `function` with the layers around it that `pick` returns for its arguments."""

    async def first(*args: Any, **kwargs: Any) -> _Started:
        return await _afirst_of(function(*args, **kwargs))

    async def guarded(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = _call(pick, first, _afirst_of, args, kwargs)
        error: BaseException | None = None
        enough = False
        try:
            flow = await run_async(call)
            while not flow.ended:
                try:
                    sent = yield flow.item
                except GeneratorExit:
                    with flow.context():
                        await flow.source.aclose()
                    enough = True
                    raise
                except BaseException as thrown:  # noqa: BLE001 - the source decides what it means
                    await flow.astep(flow.source.athrow, thrown)
                else:
                    await flow.astep(flow.source.asend, sent)
        except BaseException as raised:
            error = None if enough else raised
            raise
        finally:
            release(call, error)
            del error

    return guarded


async def _afirst_of(items: Any) -> _Started:
    """Read the first item of an async generator, or of any iterable that a fallback returns."""
    source = items if hasattr(items, "asend") else _from_any_iterable(items)
    try:
        return _Started(source, await first_step(source))
    except StopAsyncIteration:
        return _Started(source, None, ended=True)


def first_step(source: AsyncGenerator[Any, Any]) -> Awaitable[Any]:
    """Start an async generator that another one closes; return an awaitable of its first item.

    An event loop that ends closes all async generators that it has seen start, concurrently: this
    one and its owner, which also closes it and would find it "already running". So it is started
    without the loop's hook. Its owner, which the loop knows, closes it.
    """
    seen = get_asyncgen_hooks().firstiter
    set_asyncgen_hooks(firstiter=None)
    try:
        return source.__anext__()
    finally:
        set_asyncgen_hooks(firstiter=seen)


async def _from_any_iterable(items: Any) -> AsyncGenerator[Any, Any]:
    if hasattr(items, "__aiter__"):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item
