"""Optimistic updates: read, change, and write back only if no other caller wrote in between."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.context import seconds_left
from seawall.models.backoff import Backoff, as_backoff
from seawall.models.contention import QUICK, Lost, OptimisticUpdate, drop, optimistic_steps
from seawall.runtime.driver import Steps, adrive, drive, sleep_async, wait_sync
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from random import Random

T = TypeVar("T")
V = TypeVar("V")
Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]


def update_optimistically(
    read: Callable[[], tuple[T, V]],
    change: Callable[[T], T],
    write: Callable[[T, V], int],
    *,
    on: Errors = (),
    attempts: int = 10,
    backoff: Backoff | float = QUICK,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> T:
    """Change a value that others change too, without a lock; return the value written.

    `read()` returns the value and its version. `change(value)` returns the new value, or raises to
    refuse, and that passes through. `write(new, version)` writes if the version is still the same,
    and returns whether it did (or how many rows it changed). If it did not, or if reading or
    writing raised one of `on`, everything is repeated after a jittered pause: at most `attempts`
    times, and not beyond the deadline. Then `Contended` is raised.
    """
    for function in (read, write):
        if is_async(function):
            raise TypeError(f"{function!r} is async: write `{_INSTEAD}`")
    lost, clock, steps = _begin(read, change, write, on, attempts, backoff, clock=clock, rng=rng)

    def carry_out(step: float | Callable[[], Any]) -> Any:
        try:
            result = wait_sync(step, clock) if isinstance(step, float) else step()
        except lost as error:
            return Lost(error)
        if hasattr(result, "__await__"):
            drop(result)
            raise TypeError(f"read or write returned an awaitable: write `{_INSTEAD}`")
        return result

    written: T = drive(steps, carry_out)
    return written


async def aupdate_optimistically(
    read: Callable[[], Awaitable[tuple[T, V]] | tuple[T, V]],
    change: Callable[[T], T],
    write: Callable[[T, V], Awaitable[int] | int],
    *,
    on: Errors = (),
    attempts: int = 10,
    backoff: Backoff | float = QUICK,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> T:
    """Async twin of `update_optimistically`; `read` and `write` may be async."""
    lost, clock, steps = _begin(read, change, write, on, attempts, backoff, clock=clock, rng=rng)

    async def carry_out(step: float | Callable[[], Any]) -> Any:
        try:
            result = sleep_async(step) if isinstance(step, float) else step()
            return await result if hasattr(result, "__await__") else result
        except lost as error:
            return Lost(error)

    written: T = await adrive(steps, carry_out)
    return written


_INSTEAD: Final = "await aupdate_optimistically(...)"


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether `function` is an `async def`."""
    return callable(function) and not isinstance(function, type) and kind_of(function) == "async"


def _begin(
    read: Callable[[], Any],
    change: Callable[[Any], Any],
    write: Callable[[Any, Any], Any],
    on: Errors,
    attempts: int,
    backoff: Backoff | float,
    *,
    clock: Clock | None,
    rng: Random | None,
) -> tuple[tuple[type[Exception], ...], Clock, Steps[Any]]:
    """Check the arguments; return the errors that mean a conflict, the clock, and the steps."""
    check.plain_function("change", change, "what takes time is for read()")
    update = OptimisticUpdate(
        check.function("read", read),
        change,
        check.function("write", write),
        check.count("attempts", attempts),
        as_backoff(backoff),
    )
    clock = current_clock() if clock is None else check_clock(clock)
    rng = new_random("update") if rng is None else check.chance("rng", rng)
    return check.error_types("on", on), clock, optimistic_steps(update, rng.random, clock.now, left)


def left() -> float:
    """Return the number of seconds until the deadline."""
    seconds = seconds_left()
    return inf if seconds is None else seconds
