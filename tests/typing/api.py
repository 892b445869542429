"""What a type checker makes of Seawall: checked by mypy, never run.

Each `type: ignore` marks a use that must be an error; mypy complains about one that is not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import Any, assert_type

from seawall import (
    Breaker,
    BreakerChanged,
    Bulkhead,
    Cache,
    Criticality,
    Deadline,
    Event,
    Fallback,
    Guard,
    Result,
    Retry,
    RetryBudget,
    ThreadBulkhead,
    Timeout,
    adaptive,
    adaptive_attempts,
    criticality,
    current_deadline,
    deadline,
    full_jitter,
    get_guard,
    growing,
    guards,
    guards_from_toml,
    n_of_m,
    static,
    subscribe,
)
from seawall.testing import ScriptedService, answer, run_virtual

vendor = Guard(
    "vendor",
    Fallback(static("try later"), on=(ConnectionError, TimeoutError)),
    Retry(on=ConnectionError, attempts=3, backoff=full_jitter(0.1, cap=2.0), budget=RetryBudget()),
    Breaker(failure_ratio=0.5, break_for=growing(5.0), probes=n_of_m(2, 3)),
    Bulkhead(20, max_wait=0.5, order="criticality"),
    Timeout(adaptive(floor=0.1, cap=2.0)),
)


# --- Decorators keep signatures ---


@vendor
def plain(user: str, *, limit: int = 10) -> list[str]:
    """Return names."""
    return [user] * limit


@vendor
async def later(user: str, *, limit: int = 10) -> list[str]:
    """Return names."""
    return [user] * limit


@vendor
def items(user: str) -> Generator[int, str, bytes]:
    """Yield numbers."""
    sent = yield len(user)
    return sent.encode()


@vendor
async def later_items(user: str) -> AsyncGenerator[int, str]:
    """Yield numbers."""
    yield len(user)


@vendor(idempotent=False)
def charge(cents: int) -> bool:
    """Take money."""
    return cents > 0


@Retry(on=ConnectionError)
def alone(x: int) -> int:
    """Return it."""
    return x


class Client:
    """A client whose methods are guarded."""

    @vendor
    def get(self, path: str) -> bytes:
        """Get."""
        return path.encode()

    @vendor
    async def aget(self, path: str) -> bytes:
        """Get."""
        return path.encode()

    @staticmethod
    @vendor
    def parse(text: str) -> int:
        """Parse."""
        return int(text)

    @classmethod
    @vendor
    def make(cls, text: str) -> Client:
        """Make."""
        return cls() if text else Client()


def check_decorated() -> None:
    """Check that guarded functions take and return what they did."""
    assert_type(plain("ann", limit=3), list[str])
    assert_type(items("ann"), Generator[int, str, bytes])
    assert_type(later_items("ann"), AsyncGenerator[int, str])
    assert_type(charge(5), bool)
    assert_type(alone(5), int)
    assert_type(Client().get("/"), bytes)
    assert_type(Client.parse("5"), int)
    assert_type(Client.make("5"), Client)
    plain(5)  # type: ignore[arg-type]
    plain("ann", nonsense=3)  # type: ignore[call-arg]
    charge("5")  # type: ignore[arg-type]
    alone()  # type: ignore[call-arg]
    Client().get(5)  # type: ignore[arg-type]
    vendor(5)  # type: ignore[call-overload]
    vendor()  # type: ignore[call-overload]


async def check_decorated_async() -> None:
    """Check the same for what is awaited."""
    assert_type(await later("ann", limit=3), list[str])
    assert_type(await Client().aget("/"), bytes)
    async for number in later_items("ann"):
        assert_type(number, int)
    await later(5)  # type: ignore[arg-type]
    later("ann").upper()  # type: ignore[attr-defined]


# --- call, acall, attempt, aattempt ---


def _size(text: str, *, twice: bool = False) -> int:
    return len(text) * (1 + twice)


async def _asize(text: str, *, twice: bool = False) -> int:
    return len(text) * (1 + twice)


def check_calls() -> None:
    """Check that values and results have the function's type, and arguments are checked."""
    assert_type(vendor.call(_size, "a", twice=True), int)
    result = vendor.attempt(_size, "a")
    assert_type(result, Result[int])
    assert_type(result.value, int | None)
    assert_type(result.error, Exception | None)
    assert_type(result.unwrap(), int)
    assert_type(result.level, int)
    assert_type(result.reason, str | None)
    vendor.call(_size, 5)  # type: ignore[arg-type]
    vendor.call(_size)  # type: ignore[call-arg]
    vendor.call(_size, "a", thrice=True)  # type: ignore[call-arg]
    vendor.attempt(_size, 5)  # type: ignore[arg-type]


async def check_async_calls() -> None:
    """Check the same for what is awaited."""
    assert_type(await vendor.acall(_asize, "a", twice=True), int)
    result = await vendor.aattempt(_asize, "a")
    assert_type(result, Result[int])
    assert_type(result.unwrap(), int)
    await vendor.acall(_asize, 5)  # type: ignore[call-overload]
    await vendor.aattempt(_asize)  # type: ignore[call-overload]
    assert_type(await vendor.acall(_size, "a"), int)  # in a thread, by a ThreadBulkhead
    async with vendor.hold():
        pass
    async with deadline(2.0) as given:
        assert_type(given, Deadline)


# --- Policies ---


def check_policies() -> None:
    """Check that settings are checked where they are written."""
    Retry()  # type: ignore[call-arg]
    Retry(on="OSError")  # type: ignore[arg-type]
    Retry(on=KeyboardInterrupt)  # type: ignore[arg-type]
    Retry(on=OSError, attempts="3")  # type: ignore[arg-type]
    Retry(on=OSError, budget=0.2)  # type: ignore[arg-type]
    Retry(on=[OSError, _is_retryable], attempts=adaptive_attempts(4))
    Retry(on=_is_retryable, backoff=[0.1, 0.2])
    Retry(on=OSError, backoff=_pause)
    Timeout("2")  # type: ignore[arg-type]
    Timeout(2.0, sync="process")  # type: ignore[arg-type]
    Bulkhead(2.5)  # type: ignore[arg-type]
    Bulkhead(2, order="random")  # type: ignore[arg-type]
    Bulkhead(2, mode="on")  # type: ignore[arg-type]
    ThreadBulkhead("2")  # type: ignore[arg-type]
    Breaker(0.5)  # type: ignore[call-arg]
    Breaker(probes=3)  # type: ignore[arg-type]
    Cache(60, key="user")  # type: ignore[arg-type]
    Fallback("later")  # type: ignore[arg-type]
    Fallback(static(1), on=KeyboardInterrupt)  # type: ignore[arg-type]
    Guard(Timeout(2.0))  # type: ignore[arg-type]
    Guard("other", Timeout)  # type: ignore[arg-type]
    Guard("other", 5)  # type: ignore[arg-type]
    Guard.standard("other", timeout=2.0)  # type: ignore[call-arg]
    assert_type(Guard.standard("other", on=OSError, timeout=2.0), Guard)
    criticality(2)  # type: ignore[arg-type]
    with criticality(Criticality.CRITICAL) as level:
        assert_type(level, Criticality)


def _is_retryable(error: Exception | None, value: Any) -> bool:
    return error is not None or value is None


def _pause(attempt: int) -> float:
    return 0.1 * attempt


# --- The rest ---


def check_the_rest() -> None:
    """Check registry, context, events, settings and helpers for tests."""
    assert_type(guards(), list[Guard])
    assert_type(get_guard("vendor"), Guard)
    assert_type(guards_from_toml(""), dict[str, Guard])
    assert_type(current_deadline(), Deadline | None)
    assert_type(vendor.snapshot(), dict[str, Any])
    assert_type(subscribe(_listen, BreakerChanged), Callable[[], None])
    subscribe(_listen, int)  # type: ignore[type-var,arg-type]
    assert_type(run_virtual(_asize("a")), int)
    run_virtual(_size("a"))  # type: ignore[arg-type]
    ScriptedService(answer(5), 5)  # type: ignore[arg-type]
    with deadline(2.0) as given:
        assert_type(given.split(2), list[Deadline])


def _listen(event: Event) -> None:
    assert_type(event.fields(), dict[str, Any])


def check_iterators(plain_iterator: Iterator[int], async_iterator: AsyncIterator[int]) -> None:
    """Check that what is no function is refused."""
    vendor(plain_iterator)  # type: ignore[call-overload]
    vendor(async_iterator)  # type: ignore[call-overload]
