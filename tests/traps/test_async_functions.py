"""Traps around async functions in hands that expect plain ones, and the other way round."""

from __future__ import annotations

import functools
from unittest.mock import AsyncMock

import pytest

from seawall import Breaker, Cache, Guard, Retry, ThreadBulkhead, Timeout
from seawall.testing import run_virtual, virtual_time


async def broken(*_args: object) -> None:
    raise ConnectionError


class Client:
    async def method(self) -> None:
        raise ConnectionError

    async def __call__(self) -> None:
        raise ConnectionError


ASYNC = {
    "function": broken,
    "partial": functools.partial(broken, 1),
    "bound method": Client().method,
    "callable object": Client(),
    "mock": AsyncMock(side_effect=ConnectionError),
}


@pytest.mark.parametrize("how", ASYNC)
def test_failures_of_every_kind_of_async_function_are_seen(how: str):
    """Trap: the decorator calls an async function, gets a coroutine, and counts a success."""

    async def main() -> None:
        breaker = Breaker(consecutive=1)
        guarded = Guard(f"async-{how}", breaker)(ASYNC[how])
        with pytest.raises(ConnectionError):
            await guarded()
        assert breaker.state == "open"

    run_virtual(main())


@pytest.mark.parametrize("policy", [Breaker, lambda: Retry(on=OSError), lambda: Cache(5.0)])
def test_a_policy_alone_sees_the_failures_of_an_async_function(policy):
    """Trap: a policy used as a decorator by itself treats an async function as a plain one."""

    async def main() -> None:
        guarded = policy()(broken)
        with pytest.raises(ConnectionError):
            await guarded()

    run_virtual(main())


@pytest.mark.parametrize("how", ["call", "attempt"])
def test_a_plain_call_of_an_async_function_is_refused(how: str):
    """Trap: `guard.call` of an async function hands out a coroutine that no policy watches."""
    with virtual_time():
        guard = Guard(f"async {how}", Breaker(consecutive=1))
        call = guard.call if how == "call" else lambda f: guard.attempt(f).unwrap()
        with pytest.raises(TypeError, match="acall"):
            call(broken)
        assert guard.snapshot()["succeeded"] == 0


def test_a_plain_function_that_returns_a_coroutine_is_no_success():
    """Trap: a plain function hands its coroutine through, and its failure is never seen."""
    with virtual_time():
        guard = Guard("returns-coroutine", Breaker(consecutive=1))

        @guard
        def disguised():
            return broken()

        with pytest.raises(TypeError, match="async"):
            disguised().close()
        assert guard.snapshot()["succeeded"] == 0


@pytest.mark.parametrize("policy", [lambda: ThreadBulkhead(1), lambda: Timeout(1, sync="thread")])
def test_an_async_function_is_never_handed_to_a_thread_unawaited(policy):
    """Trap: a thread calls the async function, and the caller gets a bare coroutine."""

    async def main() -> None:
        guard = Guard("thread-async", policy())
        guard.close()
        with pytest.raises((TypeError, ConnectionError)):  # refusing it is fine too
            await guard(broken)()
        assert guard.snapshot()["succeeded"] == 0

    run_virtual(main())
