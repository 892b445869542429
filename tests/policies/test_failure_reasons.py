"""Which error a dependency failed with, as events tell it."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest

from seawall import Breaker, Guard, Retry, Timeout, subscribe
from seawall.events import BreakerChanged, RetryStopped
from seawall.models.breaker.state import BreakerChange, BreakerState, RemoteCause
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, virtual_time

Events = list[BreakerChanged | RetryStopped]


@pytest.fixture
def events() -> Iterator[Events]:
    """Return these events from here on."""
    heard: Events = []
    unsubscribe = subscribe(heard.append, BreakerChanged, RetryStopped)
    yield heard
    unsubscribe()


def _reasons(events: Events) -> list[tuple[str, str]]:
    return [
        (event.after if isinstance(event, BreakerChanged) else event.cause, event.reason)
        for event in events
    ]


def test_what_opens_a_breaker_is_the_last_failure(events: Events):
    """Of several errors, that of the call at whose end it opened is told."""
    vendor = ScriptedService(fail(ConnectionError), fail(KeyError)).call
    guard = Guard("vendor", Breaker(consecutive=2))
    guard.attempt(vendor)
    guard.attempt(vendor)
    assert _reasons(events) == [("open", "KeyError")]


def test_a_probe_that_fails_tells_its_own_error(events: Events):
    """A breaker that opens again tells what the probe met, not what had opened it first."""
    vendor = ScriptedService(fail(ConnectionError), fail(PermissionError)).call
    with virtual_time() as clock:
        guard = Guard("vendor", Breaker(consecutive=1, break_for=5.0))
        guard.attempt(vendor)
        clock.advance(5.0)
        guard.attempt(vendor)
    assert _reasons(events) == [
        ("open", "ConnectionError"),
        ("half_open", ""),
        ("open", "PermissionError"),
    ]


def test_an_error_of_ours_is_told_by_its_own_word(events: Events):
    """A timeout is `timed_out` here as it is everywhere, for breaker and retry."""

    async def main() -> None:
        retry = Retry(on=TimeoutError, attempts=1)
        guard = Guard("vendor", retry, Breaker(consecutive=1), Timeout(2.0))
        await guard.aattempt(ScriptedService(hang()).acall)

    run_virtual(main())
    assert _reasons(events) == [("open", "timed_out"), ("attempts", "timed_out")]


def test_a_value_that_counts_as_a_failure_is_told_as_one(events: Events):
    """Where no error was raised, the reason is `value`, for breaker and retry."""
    bad = ScriptedService(answer("no")).call
    breaker = Breaker(consecutive=1, is_failure=lambda _error, value: value == "no")
    retry = Retry(on=lambda _error, value: value == "no", attempts=1)
    Guard("vendor", retry, breaker).call(bad)
    assert _reasons(events) == [("attempts", "value"), ("open", "value")]


def test_a_key_tells_its_own_error(events: Events):
    """In a keyed breaker the reason is that of the key which opened."""
    guard = Guard("vendor", Breaker(consecutive=2, key=lambda user: user))
    for user, error in (("ann", KeyError), ("bob", OSError), ("ann", KeyError), ("bob", OSError)):
        guard.attempt(ScriptedService(fail(error)).call, user)
    told = [(event.key, event.reason) for event in events if isinstance(event, BreakerChanged)]
    assert told == [("ann", "KeyError"), ("bob", "OSError")]


def test_calls_that_are_only_slow_give_no_reason(events: Events):
    """A breaker that slowness opened names no error: there was none."""
    with virtual_time() as clock:
        breaker = Breaker(slow_after=1.0, slow_ratio=0.5, window=30.0, min_calls=2)
        guard = Guard("vendor", breaker)
        for _ in range(2):
            guard.call(lambda: clock.advance(3.0))
    assert _reasons(events) == [("open", "")]


def test_what_others_have_changed_is_not_put_down_to_a_failure_here(events: Events):
    """A change that is found at the end of a failed call, and came from a store, has no reason."""
    with virtual_time() as clock:
        breaker = Breaker(consecutive=9)
        guard = Guard("vendor", breaker)
        told = BreakerChange(
            BreakerState.CLOSED, BreakerState.OPEN, RemoteCause.STORE, clock.now() - 1.0, 2
        )
        breaker.model.changes.append(told)
        guard.attempt(ScriptedService(fail(ConnectionError)).call)
    assert _reasons(events) == [("open", "")]


def test_the_reason_is_known_to_whichever_thread_publishes_the_change(events: Events):
    """Another thread finds the open breaker before the call that opened it has described why."""

    class SlowToSay(ConnectionError):
        def __str__(self) -> str:
            if breaker.state == "open" and not threads:
                threads.append(Thread(target=guard.attempt, args=(print,)))
                threads[0].start()
                threads[0].join()
            return "refused"

    threads: list[Thread] = []
    breaker = Breaker(consecutive=1)
    guard = Guard("vendor", breaker)
    guard.attempt(ScriptedService(fail(SlowToSay())).call)
    assert threads
    assert _reasons(events) == [("open", "SlowToSay")]
    assert [event.failure for event in events if isinstance(event, BreakerChanged)] == [
        "SlowToSay: refused"
    ]
