"""Trap: the user's own functions inside a policy raise, and what was entered is never left."""

from __future__ import annotations

import pytest

from seawall import Breaker, Bulkhead, Cache, CircuitOpen, Guard, Retry
from seawall.testing import ScriptedService, answer, fail, run_virtual, virtual_time


class Armed:
    """A function of the user's that works until it is armed, as when a setting goes bad later."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.armed = False

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        if self.armed:
            raise ZeroDivisionError
        return self.value


POLICIES = {
    "retry on error": lambda bad: Retry(on=bad, backoff=0.1),
    "retry on value": lambda bad: Retry(on=lambda error, _value: error is None and bad()),
    "retry_after": lambda bad: Retry(on=KeyError, retry_after=bad),
    "backoff": lambda bad: Retry(on=KeyError, backoff=bad),
    "is_failure": lambda bad: Breaker(is_failure=bad),
    "break_for": lambda bad: Breaker(consecutive=1, break_for=bad),
    "breaker key": lambda bad: Breaker(key=bad),
    "cache key": lambda bad: Cache(5.0, key=bad),
}


@pytest.mark.parametrize("where", POLICIES)
@pytest.mark.parametrize("step", [fail(KeyError), answer("fine")])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_users_function_that_raises_leaks_nothing(where: str, step, kind: str):
    """A callback that raises may fail its call, but every slot around it is given back."""

    async def main() -> None:
        bulkhead, inside = Bulkhead(3), Bulkhead(3)
        bad = Armed(value=0.5)
        guard = Guard(f"user code {where} {kind}", bulkhead, POLICIES[where](bad), inside)
        guard.close()
        bad.armed = True
        service = ScriptedService(step)
        for _ in range(2):
            try:
                if kind == "sync":
                    guard.call(service.call)
                else:
                    await guard.acall(service.acall)
            except (KeyError, ZeroDivisionError, CircuitOpen):
                pass
        assert (bulkhead.in_flight, inside.in_flight) == (0, 0)

    run_virtual(main())


@pytest.mark.parametrize("where", ["retry on error", "retry_after", "break_for"])
def test_a_users_function_that_raises_leaks_nothing_from_a_generator(where: str):
    """The same for a guarded generator that fails before its first item."""
    with virtual_time():
        bulkhead = Bulkhead(3)
        bad = Armed(value=0.5)
        guard = Guard(f"user code generator {where}", bulkhead, POLICIES[where](bad))
        bad.armed = True

        @guard
        def items():
            yield {}["missing"]

        with pytest.raises((KeyError, ZeroDivisionError)):
            list(items())
        assert bulkhead.in_flight == 0
