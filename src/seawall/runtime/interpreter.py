"""The rules by which a call goes down through its layers and up again, written once.

`interpret` is a generator that never blocks: it yields what takes time (a `Waiter`, a pause as a
float of seconds, a `RunFunction`) and receives the result or the error. `run_sync` and `run_async`
carry that out. A cancellation is therefore an error thrown in at a `yield`, and is handled here:
every entered layer is left exactly once, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Token
from dataclasses import dataclass
from types import CoroutineType
from typing import Any

from seawall.context import Attempt, attempt_var, deadline_scope, reset
from seawall.errors import DeadlineExceeded, Rejected, TimedOut
from seawall.events import CallRejected
from seawall.events.bus import emit
from seawall.runtime.call import (
    STREAMED,
    Abandoned,
    Call,
    SubstituteCause,
    current_trace,
    further_attempts,
    given_up,
    job_var,
    substitute_var,
    trace_var,
    was_withdrawn,
)
from seawall.runtime.driver import adrive, drive, wait_async, wait_sync
from seawall.runtime.functions import WrongCall
from seawall.runtime.layers import CANCELLED, FAILED, OK, Flow, Host, Next, Wait, Waiter
from seawall.runtime.workers import ThreadJob


@dataclass(slots=True, eq=False)
class RunFunction:
    """A request to the runner: call this function, or an async call's plain substitute."""

    function: Callable[..., Any]
    substitute: bool = False


Request = Waiter | float | RunFunction


def interpret(
    call: Call, *, waiter: Waiter | None = None, upwards: bool = False
) -> Generator[Request, Any, None]:
    """Run `call` to its end; the result is in `call.value` or `call.error`.

    A call that comes from the fast path is already on its way: waiting at a gate (`waiter`), or
    going up (`upwards`) with its value or error.
    """
    todo: Next | None = None
    token: Token[Attempt | None] | None = None
    call.outer_attempt = attempt_var.get()
    try:
        if upwards:
            if call.reached:
                _count(call)
            todo = _up(call)
        while todo is not None or not upwards:
            upwards = True
            try:
                # A block is not inside the gates of its next attempt until that begins.
                if todo is not None and (todo.delay or call.block):
                    _stand_by(call.host)
                    call.foresee_pause(todo.delay)
                    yield todo.delay
                if todo is not None and todo.instead is not None:
                    yield from _instead(call, todo.instead, todo.cause)
                else:
                    if call.attempts:
                        token = _number_attempt(call, token)
                    yield from _down(call, waiter)
            except BaseException as error:  # noqa: BLE001 - handed on upwards, never swallowed
                call.value = None
                call.error = error
            call.forget_waits()
            waiter = None
            todo = _up(call)
    finally:
        if token is not None:
            reset(attempt_var, token)
        if call.attempt is not None and not call.streaming:
            call.attempt.over = True
        call.write_trace()


def _number_attempt(call: Call, token: Token[Attempt | None] | None) -> Token[Attempt | None]:
    """Make the attempt's number visible to code inside; return the token that undoes it."""
    if call.attempt is None:
        call.attempt = Attempt(call.attempts, call.host.name, call.outer_attempt)
    call.attempt.number = call.attempts + 1
    return token or attempt_var.set(call.attempt)


def _instead(
    call: Call, substitute: Callable[..., Any], cause: SubstituteCause | None
) -> Generator[Request, Any, None]:
    """Run a substitute, which can look up why. Guards inside it may retry."""
    repeated = call.is_repeated(len(call.tickets) - 1)
    attempt = attempt_var.set(attempt_var.get() if repeated else call.outer_attempt)
    token = substitute_var.set(cause)
    traced = trace_var.set(None)
    try:
        call.value = yield RunFunction(substitute, substitute=True)
        call.error = None
    except BaseException as error:  # noqa: BLE001 - not raised here: a generator cannot raise StopIteration
        call.value, call.error = None, error
    reset(trace_var, traced)
    reset(substitute_var, token)
    reset(attempt_var, attempt)


def _down(call: Call, waiter: Waiter | None) -> Generator[Request, Any, None]:
    """Enter the remaining layers, then run the function."""
    clock = call.host.clock
    tickets = call.tickets
    call.reached = False
    call.degradation = None
    trace = current_trace(call.host.name)
    if trace is not None:
        trace.degradation = None
    call.own_abandoned = len(call.abandoned)
    call.remember_waits()
    now = clock.now()
    if waiter is None:
        _refuse_start(call)
    while len(tickets) < len(call.layers):
        layer = call.layers[len(tickets)]
        try:
            if waiter is None:
                tickets.append(enter(layer, now, call.args, call.kwargs))
                call.continue_count()
                continue
            tickets.append((yield from _wait(call, waiter)))
        except Wait as wait:
            waiter = wait.waiter
            continue
        waiter = None
        call.continue_count()
        now = clock.now()
        _refuse_unwanted(call.host)
        refuse_expired(call.host, call.age())
    call.begin_attempt(now)
    if call.attempts > 1 and (watch := further_attempts.get()) is not None:
        watch(call.host.name)
    # A call of the same guard inside the user's function is another call, with its own trace.
    token = trace_var.set(None) if trace is not None and call.counts else None
    try:
        call.value = yield RunFunction(call.function)
        call.error = None
    except BaseException as error:  # noqa: BLE001 - not raised here: a generator cannot raise StopIteration
        call.value, call.error = None, error
    if token is not None:
        reset(trace_var, token)
    _count(call)


def _refuse_start(call: Call) -> None:
    """Raise if a call that has not entered any layer is given up or past its deadline."""
    try:
        _refuse_unwanted(call.host)
        refuse_expired(call.host, call.age())
    except Rejected:
        # Outer flows that have nothing to enter must see this refusal too.
        for layer in call.layers[len(call.tickets) :]:
            if layer.enter is not None and not layer.seldom_entered:
                break
            call.tickets.append(None)
        raise


def _wait(call: Call, waiter: Waiter) -> Generator[Request, Any, Any]:
    _stand_by(call.host)
    clock = call.host.clock
    began = clock.now()
    try:
        ticket = yield waiter
    finally:
        waited = clock.now() - began
        call.note_wait(waited)
    call.host.stats.waits.add(waited)
    return ticket


def enter(layer: Any, now: float, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Enter one layer, with the call's arguments if it takes them."""
    if layer.enter is None:
        return None
    return layer.enter(now, *args, **kwargs) if layer.takes_arguments else layer.enter(now)


def _up(call: Call) -> Next | None:
    """Leave layers, innermost first, until a flow wants to go down again or none is left."""
    now = call.host.clock.now()
    while call.tickets:
        layer = call.layers[len(call.tickets) - 1]
        ticket = call.tickets[-1]
        todo = None
        try:
            if isinstance(layer, Flow):
                todo = layer.settle(call, ticket)
            elif call.streaming and call.error is None:
                call.hold_layer(layer, ticket, now)
            else:
                call.leave_attempt(layer, ticket, now)
        except BaseException as error:  # noqa: BLE001 - whatever fails here, the rest is left too
            call.value, call.error = None, error
        if todo is not None:
            return todo
        call.tickets.pop()
        if isinstance(layer, Flow):
            call.crossed_flow(now)
    return None


def release(call: Call, error: BaseException | None) -> None:
    """Leave what a stream held, with `error` if it failed after its first item; then do nothing."""
    held, call.held = call.held, []
    if call.attempt is not None:
        call.attempt.over = True
    call.error = error
    call.value = STREAMED
    call.reached = True
    counted, call.timed = call.timed, True
    if held and (not counted or isinstance(error, Exception)):
        _count(call)
        call.host.stats.succeeded_blocks += call.outcome() is OK
    now = call.host.clock.now()
    for layer, ticket in held:
        call.leave_counted(layer, ticket, now)
    call.error = None


def refuse_expired(host: Host, age: float = 0.0) -> None:
    """Raise if the deadline has passed, for a call that began `age` seconds ago."""
    held = deadline_scope(age)
    if held is None:
        return
    late = held[1].now() - held[0]
    if late >= 0:
        count_refusal(host, "deadline", "deadline_exceeded")
        raise DeadlineExceeded(
            f"guard {host.name!r}: the deadline passed {late:.3f} s before the call began",
            guard=host.name,
            policy="deadline",
        )


def _refuse_unwanted(host: Host) -> None:
    """Raise in a worker thread whose caller gave up, and counted that."""
    job = _own_job(host)
    if job is not None and not job.goes_on():
        raise Rejected(f"guard {host.name!r}: given up before it began", guard=host.name)


def _stand_by(host: Host) -> None:
    """Record in a worker thread that the function is not running now."""
    job = _own_job(host)
    if job is not None:
        job.waits = True


def _own_job(host: Host) -> ThreadJob | None:
    job = job_var.get()
    return job if job is not None and job.guard == host.name else None


def count_refusal(host: Host, policy: str, reason: str) -> None:
    """Count and report that something other than a gate refused a call."""
    host.stats.rejected += 1
    emit(CallRejected, host.name, policy=policy, reason=reason, enforced=True)


def _count(call: Call) -> None:
    """Count how an attempt ended, once for each start of the user's function."""
    error = call.error
    left_running = None if error is None else Abandoned.of(error)
    if left_running is not None:
        call.abandoned.append(left_running)
    refused = isinstance(error, Rejected) and error.guard == call.host.name
    if not call.counts and error is not None and (refused or was_withdrawn(error)):
        # This guard's own inner part, run by a driver, refused the call or never got to it.
        call.reached = False
        call.attempts -= 1
    elif call.counts:
        if not given_up(call.host.name):
            _count_attempt(call)
    elif left_running is not None and not left_running.counted:
        # The function is still running in a place where its end will not be counted.
        left_running.counted = True
        _count_attempt(call)
        trace = current_trace(call.host.name)
        if trace is not None:
            trace.attempts += 1


def _count_attempt(call: Call) -> None:
    stats = call.host.stats
    outcome = call.outcome()
    now = call.host.clock.now()
    if outcome is OK and call.timed:
        stats.samples.append(now - call.attempt_began)
        if now >= stats.due:
            stats.fold_in_call(now)
    elif outcome is FAILED:
        stats.fail(call.error, now)
        if isinstance(call.error, TimedOut) or not isinstance(call.error, Exception):
            stats.cut_off(now - call.attempt_began)
    elif outcome is CANCELLED:
        stats.cancelled += 1


def run_sync(call: Call, *, waiter: Waiter | None = None, upwards: bool = False) -> Any:
    """Run `call` to its end in this thread; return its value or raise its error."""
    clock = call.host.clock

    def carry_out(request: Request) -> Any:
        if not isinstance(request, RunFunction):
            return wait_sync(request, clock)
        result = request.function(*call.args, **call.kwargs)
        if type(result) is CoroutineType:
            refuse_coroutine(result, request.function, level=request.substitute)
        if request.substitute and call.adapt is not None:
            return call.adapt(result)
        return result

    drive(interpret(call, waiter=waiter, upwards=upwards), carry_out)
    return result_of(call)


async def run_async(call: Call, *, waiter: Waiter | None = None, upwards: bool = False) -> Any:
    """Async twin of `run_sync`."""
    clock = call.host.clock

    async def carry_out(request: Request) -> Any:
        if not isinstance(request, RunFunction):
            return await wait_async(request, clock)
        result = request.function(*call.args, **call.kwargs)
        if not request.substitute or hasattr(result, "__await__"):
            result = await result
        if request.substitute and call.adapt is not None:
            return await call.adapt(result)
        return result

    await adrive(interpret(call, waiter=waiter, upwards=upwards), carry_out)
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
