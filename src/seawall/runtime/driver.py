"""The one driver of operations that are written once and run by blocking or by awaiting.

An operation is a generator of steps: it yields a request for whatever takes time, and is sent the
answer. If answering raises (a cancellation too), the exception is thrown into the operation at its
`yield`, where it may be handled. Its owner decides what a request is and how it is answered; most
requests are a `Waiter`, which `wait_sync` and `wait_async` answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from math import inf
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from seawall.clock import Clock
from seawall.runtime.layers import Waiter

if TYPE_CHECKING:
    from asyncio import Task

T = TypeVar("T")

Steps = Generator[Any, Any, T]  # an operation that returns a T


def drive(steps: Steps[T], answer: Callable[[Any], Any]) -> T:
    """Run `steps` to their end in this thread; `answer(request)` returns each answer."""
    send: Callable[[Any], Any] = steps.send
    given = request = None
    try:
        while True:
            try:
                while True:
                    request = send(given)
                    send, given = steps.send, answer(request)
            except BaseException as error:
                # Otherwise `answer` raised, or a signal handler between two steps.
                if steps.gi_frame is None:  # type: ignore[attr-defined]
                    if type(error) is StopIteration:
                        value: T = error.value
                        return value
                    # A generator turns one that it does not handle into a RuntimeError.
                    if isinstance(given, StopIteration) and error.__cause__ is given:
                        raise given from None
                    raise
                send, given = steps.throw, error
    finally:
        # The traceback of an error may keep this frame alive, which must not keep the error alive,
        # nor what the operation holds if a signal handler raised in the lines above.
        given = request = None
        steps.close()


async def adrive(steps: Steps[T], answer: Callable[[Any], Awaitable[Any]]) -> T:
    """Async twin of `drive`; `answer(request)` is awaited."""
    send: Callable[[Any], Any] = steps.send
    given = request = None
    try:
        while True:
            try:
                while True:
                    request = send(given)
                    send, given = steps.send, await answer(request)
            except BaseException as error:
                if steps.gi_frame is None:  # type: ignore[attr-defined]
                    if type(error) is StopIteration:
                        value: T = error.value
                        return value
                    raise
                send, given = steps.throw, error
    finally:
        given = request = None  # as above
        steps.close()


def wait_sync(waiter: Waiter | float, clock: Clock) -> Any:
    """Block this thread until `waiter` is woken or late, and claim; a float is a pause."""
    if isinstance(waiter, float):
        return clock.sleep(waiter)
    bell = Lock()
    bell.acquire()

    def wake() -> bool:
        # Otherwise a signal interrupted the first wake-up, and this is a second one.
        if bell.locked():
            bell.release()
        return True

    try:
        waiter.publish(wake)
        clock.wait(bell, None if waiter.until is None else waiter.until - clock.now())
    except BaseException:
        waiter.abandon()
        raise
    return waiter.claim()


async def wait_async(waiter: Waiter | float, clock: Clock) -> Any:
    """Async twin of `wait_sync`."""
    if isinstance(waiter, float):
        return await sleep_async(waiter)
    from asyncio import get_running_loop

    loop = get_running_loop()
    bell = loop.create_future()
    here = get_ident()

    def ring() -> None:
        if not bell.done():
            bell.set_result(None)

    def wake() -> bool:
        try:
            if get_ident() == here:
                ring()
            else:
                loop.call_soon_threadsafe(ring)
        except RuntimeError:
            return False  # the loop is closed: no task will claim what is granted
        return True

    timer = None
    try:
        waiter.publish(wake)
        if waiter.until is not None:
            timer = loop.call_later(max(0.0, waiter.until - clock.now()), ring)
        await bell
    except BaseException:
        waiter.abandon()
        raise
    finally:
        if timer is not None:
            timer.cancel()
    return waiter.claim()


class CallbackWaiter:
    """Waits until the `wake` that it passes to `join` is called, or until `until`."""

    def __init__(
        self,
        join: Callable[[Callable[[], bool]], object],
        *,
        leave: Callable[[Callable[[], bool]], object] = lambda _wake: None,
        result: Callable[[], Any] = lambda: None,
        until: float = inf,
    ) -> None:
        """Claim `result()`; `leave(wake)` is called when nothing waits any more."""
        self.until = None if until == inf else until
        self._join = join
        self._leave = leave
        self._result = result
        self._wake: Callable[[], bool] | None = None

    def publish(self, wake: Callable[[], bool]) -> None:
        """Pass `wake` on."""
        self._wake = wake
        self._join(wake)

    def claim(self) -> Any:
        """Return the result, whether woken or late."""
        self.abandon()
        return self._result()

    def abandon(self) -> None:
        """Stop waiting."""
        if self._wake is not None:
            self._leave(self._wake)


async def sleep_async(seconds: float) -> None:
    """Suspend this task for `seconds`."""
    from asyncio import sleep

    await sleep(seconds)


_find_task: Callable[[], Task[Any] | None] | None = None


def current_task() -> Task[Any] | None:
    """Return the task that runs in this thread, if any; load asyncio on first use."""
    global _find_task  # noqa: PLW0603 - an import at each call costs more than the rest
    if _find_task is None:
        from seawall._expiry import current_task as find

        _find_task = find
    return _find_task()


def held_time() -> AbstractContextManager[None]:
    """On a virtual loop, hold time while a thread works for this task."""
    from asyncio import get_running_loop

    hold = getattr(get_running_loop(), "hold_time", nullcontext)
    return cast("AbstractContextManager[None]", hold())
