"""Traps around one exception object that is raised again and again."""

from __future__ import annotations

import asyncio
import traceback

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    DeadlineExceeded,
    Fallback,
    Guard,
    Rejected,
    Retry,
    ThreadBulkhead,
    Timeout,
    deadline,
)
from seawall.backoff import constant
from seawall.testing import ScriptedService, fail, run_virtual, virtual_time

BROKEN = ConnectionError("the same object each time")


def broken(*_args: object) -> None:
    raise BROKEN


async def abroken(*_args: object) -> None:
    raise BROKEN


def size(error: BaseException) -> tuple[int, int]:
    """Return the length of the traceback and the number of notes."""
    frames = len(list(traceback.walk_tb(error.__traceback__)))
    return frames, len(getattr(error, "__notes__", ()))


STACKS = {
    "retry": lambda: [Retry(on=ConnectionError, attempts=3, backoff=constant(0.1))],
    "breaker": lambda: [Breaker(consecutive=1000)],
    "bulkhead": lambda: [Bulkhead(2)],
    "timeout": lambda: [Timeout(5.0, sync="cooperative")],
    "fallback": lambda: [Fallback(lambda: int("none"))],
    "cache": lambda: [Cache(5.0)],
    "all": lambda: [
        Fallback(lambda: int("none")),
        Cache(5.0),
        Timeout(50.0, sync="cooperative"),
        Retry(on=ConnectionError, attempts=3, backoff=constant(0.1)),
        Breaker(consecutive=1000),
        Bulkhead(2),
        Timeout(5.0, sync="cooperative"),
    ],
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_users_own_singleton_does_not_grow(stack: str, kind: str):
    """Trap: an exception that the user raises again and again grows by our frames and notes."""
    sizes = []

    async def main() -> None:
        guard = Guard(f"singleton-{stack}-{kind}", *STACKS[stack]())
        for _ in range(20):
            BROKEN.__traceback__ = None
            try:
                if kind == "sync":
                    guard.call(broken)
                else:
                    await guard.acall(abroken)
            except ConnectionError as error:
                sizes.append(size(error))

    run_virtual(main())
    assert len(sizes) == 20
    assert sizes[-1] == sizes[2]
    assert BROKEN.__context__ is None or BROKEN.__context__.__context__ is not BROKEN


def test_the_traceback_of_one_retried_object_grows_no_more_than_the_attempts():
    """Trap: each attempt adds more frames to the traceback of one object than the last one did."""
    with virtual_time():
        guard = Guard("growth", Retry(on=ConnectionError, attempts=40, backoff=constant(0.1)))
        BROKEN.__traceback__ = None
        BROKEN.__notes__ = []
        with pytest.raises(ConnectionError) as caught:
            guard.call(broken)
    frames, notes = size(caught.value)
    assert notes <= 8
    # What the interpreter itself adds for the function's frame and its caller, in each attempt.
    assert frames <= 4 * 40 + 10


def refusals(kind: str) -> list[Rejected]:
    """Return what fifty refused calls raise."""
    caught: list[Rejected] = []

    def reject(guard: Guard) -> None:
        for _ in range(50):
            with pytest.raises(Rejected) as refused:
                guard.call(lambda: None)
            caught.append(refused.value)

    with virtual_time():
        if kind == "open":
            breaker = Breaker()
            guard = Guard("refuse-open", breaker)
            breaker.isolate()
            reject(guard)
        elif kind == "full":
            guard = Guard("refuse-full", Bulkhead(1))
            with guard.hold():
                reject(guard)
        elif kind == "late":
            guard = Guard("refuse-late", Bulkhead(1))
            with deadline(0.0):
                reject(guard)
        else:
            guard = Guard("refuse-threads", ThreadBulkhead(1, max_queue=0))
            assert guard.policies[0].pool.submit is not None
            guard.policies[0].pool._shared.taken = 1
            reject(guard)
    return caught


@pytest.mark.parametrize("kind", ["open", "full", "late", "threads"])
def test_every_refusal_is_a_new_object(kind: str):
    """Trap: one refusal object is raised for all calls, and its traceback grows without end."""
    caught = refusals(kind)
    assert len({id(error) for error in caught}) == 50
    assert len({size(error) for error in caught}) == 1
    assert all(error.guard == f"refuse-{kind}" for error in caught)


def test_followers_of_one_flight_do_not_grow_the_leaders_error():
    """Trap: all callers of a single flight raise one object, each adding frames to the last."""
    sizes: list[tuple[int, int]] = []

    async def main() -> None:
        guard = Guard("followers", Fallback(lambda: int("none")), Cache(5.0))
        service = ScriptedService(fail(ConnectionError("once")))

        async def caller() -> None:
            try:
                await guard.acall(service.acall)
            except ConnectionError as error:
                sizes.append(size(error))

        await asyncio.gather(*(caller() for _ in range(50)))
        assert service.calls == 1

    run_virtual(main())
    assert len(sizes) == 50
    assert max(sizes[1:]) == min(sizes[1:])


def test_an_expired_deadline_is_a_new_error_while_waiting():
    """Trap: the refusal of a waiter whose deadline passes is shared with the next waiter."""

    async def main() -> None:
        guard = Guard("waiters", Bulkhead(1, max_wait=60.0, max_waiting=5))
        errors = []

        async def caller() -> None:
            with deadline(1.0), pytest.raises(DeadlineExceeded) as late:
                await guard.acall(abroken)
            errors.append(late.value)

        async with guard.hold():
            await asyncio.gather(*(caller() for _ in range(5)))
        assert len({id(error) for error in errors}) == 5

    run_virtual(main())
