"""What a guard reports of its attempts to whoever watches them."""

from __future__ import annotations

import pytest

from seawall import Guard, Retry, Timeout
from seawall.runtime.call import further_attempts
from seawall.testing import run_virtual


class Lost(BaseException):
    """Raised in place of an attempt."""


def test_each_attempt_but_the_first_is_reported_before_it_begins() -> None:
    """With the name of the guard."""
    seen: list[str] = []
    guard = Guard("vendor", Retry(on=ConnectionError, attempts=3, backoff=0.1), Timeout(1.0))

    @guard
    async def call(fails: int) -> None:
        seen.append("call")
        if seen.count("call") <= fails:
            raise ConnectionError

    async def main() -> None:
        further_attempts.set(seen.append)
        await call(2)
        assert seen == ["call", "vendor", "call", "vendor", "call"]
        seen.clear()
        await call(0)
        assert seen == ["call"]

    run_virtual(main())


def test_an_error_of_the_watcher_takes_the_place_of_the_attempt() -> None:
    """The call ends with it, and the function is not called again."""
    calls = 0

    def refuse(_guard: str) -> None:
        raise Lost

    async def main() -> None:
        nonlocal calls
        further_attempts.set(refuse)
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=3, backoff=0.1))

        @guard
        async def call() -> None:
            nonlocal calls
            calls += 1
            raise ConnectionError

        with pytest.raises(Lost):
            await call()

    run_virtual(main())
    assert calls == 1
