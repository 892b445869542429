"""The two runners: they carry out what the interpreter asks for, blocking or awaiting."""

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
    """Carry `call` to its end in this thread; return its value or raise its error."""
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
    del request  # it may lead to the error, and so would keep itself alive
    return result_of(call)


async def run_async(call: Call, *, waiter: Waiter | None = None, upwards: bool = False) -> Any:
    """Carry `call` to its end in this task; return its value or raise its error."""
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
    del request  # it may lead to the error, and so would keep itself alive
    return result_of(call)


def result_of(call: Call) -> Any:
    """Return the value of a call that has ended, or raise its error."""
    error = call.error
    if error is None:
        return call.value
    # Nothing may lead from the error back to itself, or it lives until the next collection.
    call.error = None
    try:
        if isinstance(error, WrongCall):
            raise TypeError(str(error)) from None
        raise error
    finally:
        del error


def fulfil_sync(request: Waiter | float, clock: Clock) -> Any:
    """Do what the interpreter asks for, other than to run the function; return what it is sent."""
    if isinstance(request, float):
        return clock.sleep(request)
    return wait_sync(request, clock)


async def fulfil_async(request: Waiter | float, clock: Clock) -> Any:
    """Do what the interpreter asks for, other than to run the function; return what it is sent."""
    if isinstance(request, float):
        return await sleep_async(request)
    return await wait_async(request, clock)


def refuse_coroutine(coroutine: Any, function: Any, *, level: bool = False) -> None:
    """Raise: what a plain function handed out here would run, and fail, where nobody looks."""
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
        if bell.locked():  # else a signal came as it was rung, and it is rung again
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
            return False  # the loop is closed: nobody will claim what is granted
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
    """On a virtual loop, let no time pass while a thread is at work for this task."""
    from asyncio import get_running_loop

    hold = getattr(get_running_loop(), "hold_time", nullcontext)
    return cast("AbstractContextManager[None]", hold())
