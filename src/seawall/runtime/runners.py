"""The two runners: they carry out the interpreter's requests, blocking or awaiting."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident
from types import CoroutineType
from typing import Any, cast

from seawall.clock import Clock
from seawall.runtime.call import Call
from seawall.runtime.functions import WrongCall
from seawall.runtime.interpreter import Request, Run, interpret
from seawall.runtime.layers import Waiter


def run_sync(call: Call, *, waiter: Waiter | None = None, upwards: bool = False) -> Any:
    """Run `call` to its end in this thread; return its value or raise its error."""
    steps = interpret(call, waiter=waiter, upwards=upwards)
    clock = call.host.clock
    request: Request | None = None
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, Run):
                    result = request.function(*call.args, **call.kwargs)
                    if type(result) is CoroutineType:
                        refuse_coroutine(result, request.function, level=request.substitute)
                    if request.substitute and call.adapt is not None:
                        result = call.adapt(result)
                else:
                    result = fulfil_sync(request, clock)
            except BaseException as error:  # noqa: BLE001 - the interpreter decides what it means
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration:
        pass
    del request  # break the cycle: it may refer to the error
    return result_of(call)


async def run_async(call: Call, *, waiter: Waiter | None = None, upwards: bool = False) -> Any:
    """Run `call` to its end in this task; return its value or raise its error."""
    steps = interpret(call, waiter=waiter, upwards=upwards)
    clock = call.host.clock
    request: Request | None = None
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, Run):
                    result = request.function(*call.args, **call.kwargs)
                    if not request.substitute or hasattr(result, "__await__"):
                        result = await result
                    if request.substitute and call.adapt is not None:
                        result = await call.adapt(result)
                else:
                    result = await fulfil_async(request, clock)
            except BaseException as error:  # noqa: BLE001 - the interpreter decides what it means
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration:
        pass
    del request  # break the cycle: it may refer to the error
    return result_of(call)


def result_of(call: Call) -> Any:
    """Return the value of a call that has ended, or raise its error."""
    error = call.error
    if error is None:
        return call.value
    # Break reference cycles of the error, or it would live until the next garbage collection.
    call.error = None
    try:
        if isinstance(error, WrongCall):
            raise TypeError(str(error)) from None
        raise error
    finally:
        del error


def fulfil_sync(request: Waiter | float, clock: Clock) -> Any:
    """Carry out a request other than running the function; return its result."""
    if isinstance(request, float):
        return clock.sleep(request)
    return wait_sync(request, clock)


async def fulfil_async(request: Waiter | float, clock: Clock) -> Any:
    """Async twin of `fulfil_sync`."""
    if isinstance(request, float):
        return await sleep_async(request)
    return await wait_async(request, clock)


def refuse_coroutine(coroutine: Any, function: Any, *, level: bool = False) -> None:
    """Raise: this coroutine of a plain function would run, and fail, where no caller sees it."""
    coroutine.close()
    name = getattr(function, "__qualname__", repr(function))
    if level:
        raise TypeError(f"fallback {name} is async, the call is not: pass a plain function")
    raise WrongCall(
        f"{name} returned a coroutine to a sync call: make it an `async def` itself, or use"
        " `await guard.acall(...)`"
    )


def wait_sync(waiter: Waiter, clock: Clock) -> Any:
    """Block this thread until `waiter` is woken or its time is over; return what it claims."""
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


async def sleep_async(seconds: float) -> None:
    """Suspend this task for `seconds`."""
    from asyncio import sleep

    await sleep(seconds)


async def wait_async(waiter: Waiter, clock: Clock) -> Any:
    """Suspend this task until `waiter` is woken or its time is over; return what it claims."""
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


def held_time() -> AbstractContextManager[None]:
    """On a virtual loop, hold time while a thread works for this task."""
    from asyncio import get_running_loop

    hold = getattr(get_running_loop(), "hold_time", nullcontext)
    return cast("AbstractContextManager[None]", hold())
