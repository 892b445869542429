"""The answers in a cache, and the running calls that will bring more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Final, Protocol

from seawall._forks import survives_fork
from seawall.context import (
    LEAST_RESERVE,
    attempt_var,
    deadline_passed,
    reserve_of,
    reset,
    retried_above,
    seconds_left,
)
from seawall.errors import DeadlineExceeded
from seawall.runtime.call import Trace, current_trace, trace_var
from seawall.runtime.degradation import STALE, Degradation
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Host
from seawall.runtime.mutex import LOCK_FREE, Mutex

AGAIN: Final = object()
"""Result for a follower whose leader was cancelled, or had less time than it: look again."""


class CacheEntry:
    """A real answer, when it was received, and how long it may be used."""

    __slots__ = ("fresh_until", "since", "stale_until", "value")

    def __init__(self, value: Any, since: float, fresh_until: float, stale_until: float) -> None:
        self.value = value
        self.since = since
        self.fresh_until = fresh_until
        self.stale_until = stale_until


class CacheSettings(Protocol):
    """Settings of a cache."""

    ttl: float
    stale_if_error: float
    max_entries: int


class Answers:
    """A bounded map of answers, with at most one running call for each key."""

    def __init__(self, settings: CacheSettings) -> None:
        """Start empty. `settings` may change."""
        self._settings = settings
        self._mutex = Mutex()
        self._entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        self._flights: dict[Hashable, Flight] = {}
        survives_fork(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> CacheEntry | None:
        """Return the entry for `key`, however old."""
        return self._entries.get(key)

    def entry(self, value: Any, now: float) -> CacheEntry:
        """Return a new entry, fresh from now on."""
        fresh_until = now + self._settings.ttl
        return CacheEntry(value, now, fresh_until, fresh_until + self._settings.stale_if_error)

    def clear(self) -> None:
        """Discard all answers. Running calls continue, and their answers are not kept."""
        with self._mutex:
            self._entries.clear()
            self._flights.clear()

    def find(self, key: Hashable, host: Host) -> CacheEntry | Lead | Follower:
        """Return a fresh entry, a lead to fetch it, or a follower to wait for another call."""
        now = host.clock.now()
        if LOCK_FREE:
            entry = self._entries.get(key)
            if entry is not None and now < entry.fresh_until:
                try:
                    self._entries.move_to_end(key)
                except KeyError:
                    pass  # just evicted by another thread
                return entry
        with self._mutex:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                if now < entry.fresh_until:
                    return entry
            flight = self._flights.get(key)
            if flight is not None:
                return Follower(self, flight, host)
            lead = Lead(self, key, Flight(entry), host)
            self._flights[key] = lead.flight
            return lead

    def land(self, key: Hashable, flight: Flight, entry: CacheEntry | None) -> None:
        """End a flight and keep its entry, if it has one."""
        self._mutex.do(lambda: self._landed(key, flight, entry))

    def _landed(self, key: Hashable, flight: Flight, entry: CacheEntry | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
            if entry is not None:
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self._settings.max_entries:
                    self._entries.popitem(last=False)
        wakers, flight.wakers = flight.wakers, None
        for wake in wakers or ():
            wake()

    def _after_fork(self) -> None:
        """Reset in a child process: flights of threads that no longer exist never end."""
        self._mutex = Mutex()
        self._flights.clear()

    def follow(self, flight: Flight, wake: Callable[[], bool]) -> None:
        """Register `wake` for the end of `flight`; call it immediately if it has ended."""
        with self._mutex:
            if flight.wakers is not None:
                flight.wakers.append(wake)
                return
        wake()

    def leave(self, flight: Flight, wake: Callable[[], bool]) -> None:
        """Unregister `wake`."""

        def forget() -> None:
            if flight.wakers is not None and wake in flight.wakers:
                flight.wakers.remove(wake)

        self._mutex.do(forget)


class Flight:
    """One call that several callers may wait for, and its result."""

    __slots__ = (
        "degradation",
        "error",
        "short_of_time",
        "stale",
        "traceback",
        "until",
        "value",
        "wakers",
    )

    def __init__(self, stale: CacheEntry | None) -> None:
        self.stale = stale
        self.wakers: list[Callable[[], bool]] | None = []
        self.value: Any = AGAIN
        self.error: Exception | None = None
        self.traceback: TracebackType | None = None
        self.degradation: Degradation | None = None
        self.until: float | None = None
        """The deadline of the call, on the guard's clock."""
        self.short_of_time = False
        """Whether that deadline may be the cause of the failure, although it has not passed."""


class Lead:
    """The call that fetches an answer: a context manager around the real call.

    An error that a stale answer can replace is suppressed, with that answer in `answer`.
    """

    __slots__ = ("_answers", "_began", "_host", "_key", "_token", "_trace", "answer", "flight")

    def __init__(self, answers: Answers, key: Hashable, flight: Flight, host: Host) -> None:
        self._answers = answers
        self._key = key
        self._host = host
        self.answer: Any = None
        self.flight = flight

    def __del__(self) -> None:
        # A signal handler raised, perhaps before there was a flight: another call has to fetch it.
        flight = getattr(self, "flight", None)
        if flight is not None and flight.wakers is not None:
            self._answers.land(self._key, flight, None)

    def __enter__(self) -> None:
        left = seconds_left()
        if left is not None:
            self._began = self._host.clock.now()
            self.flight.until = self._began + left
        self._trace = Trace(self._host.name)
        self._token = trace_var.set(self._trace)

    def keep(self, value: Any) -> Any:
        """Store the real answer."""
        self.flight.value = value
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        reset(trace_var, self._token)
        self._pass_trace_on()
        flight = self.flight
        now = self._host.clock.now()
        entry = None
        if error is None:
            flight.degradation = self._trace.degradation
            if flight.degradation is None:
                entry = self._answers.entry(flight.value, now)
        elif isinstance(error, Exception):
            flight.error, flight.traceback = error, traceback
            if flight.stale is not None and now < flight.stale.stale_until:
                flight.error = flight.traceback = None
                flight.value = self.answer = flight.stale.value
                flight.degradation = Degradation(STALE, 1, error, now - flight.stale.since)
            elif deadline_passed() or retried_above(attempt_var.get()) is not None:
                # Others may have more time, or may retry: one of them tries again.
                flight.error = flight.traceback = None
            else:
                flight.short_of_time = self._was_short_of_time(error, now)
        self._answers.land(self._key, flight, entry)
        if error is not None and flight.degradation is not None:
            _served_less(self._host, flight.degradation)
        # Break a reference cycle: the error refers to the frames that hold the trace.
        self._trace.degradation = None
        return error is not None and flight.error is None and flight.value is not AGAIN

    def _was_short_of_time(self, error: Exception, now: float) -> bool:
        """Return whether the call might have ended differently with a later deadline.

        That is so if it was refused or not retried because of the deadline, or ran out of the time
        that was left after an inner layer kept back its reserve.
        """
        until = self.flight.until
        if until is None:
            return False
        if isinstance(error, DeadlineExceeded):
            return error.policy != "timeout"
        if isinstance(error, TimeoutError) and until - now <= reserve_of(until - self._began):
            return True
        return self._trace.short_of_time

    def _pass_trace_on(self) -> None:
        """Pass the trace of the inner layers on to the outer one."""
        outside = current_trace(self._host.name)
        if outside is not None:
            outside.attempts += self._trace.attempts
            outside.degradation = self._trace.degradation


class Follower:
    """A call that waits for the answer of another, the leader."""

    __slots__ = ("_answers", "_flight", "_host", "_wake", "has_outlasted", "until")

    def __init__(self, answers: Answers, flight: Flight, host: Host) -> None:
        self._answers = answers
        self._flight = flight
        self._host = host
        left = seconds_left()
        self.until = None if left is None else host.clock.now() + left
        self.has_outlasted = False
        """Whether it looks again because it has more time than its leader had. At most once."""

    def publish(self, wake: Callable[[], bool]) -> None:
        """Wait for the leader's answer."""
        self._wake = wake
        self._answers.follow(self._flight, wake)

    def claim(self) -> Any:
        """Return the leader's answer, or `AGAIN` if it ended without a result."""
        flight = self._flight
        if flight.wakers is not None:
            self.abandon()
            count_refusal(self._host, "cache", DeadlineExceeded.reason)
            raise DeadlineExceeded(
                f"guard {self._host.name!r}: the deadline passed while another call fetched it",
                guard=self._host.name,
                policy="cache",
            )
        if flight.short_of_time and not self.has_outlasted and self._has_more_time():
            self.has_outlasted = True
            return AGAIN
        if flight.error is not None:
            # Always start from the leader's traceback, so that it does not grow with each follower.
            raise flight.error.with_traceback(flight.traceback)
        if flight.degradation is not None:
            _served_less(self._host, flight.degradation)
        return flight.value

    def _has_more_time(self) -> bool:
        leader = self._flight.until
        return self.until is None or (leader is not None and self.until > leader + LEAST_RESERVE)

    def abandon(self) -> None:
        """Stop waiting."""
        self._answers.leave(self._flight, self._wake)


def _served_less(host: Host, degradation: Degradation) -> None:
    """Record and report that a call got a degraded answer."""
    trace = current_trace(host.name)
    if trace is not None:
        trace.degradation = degradation
    host.stats.degraded += 1
    if degradation.age is not None:
        host.stats.stale += 1
    degradation.report(host.name)
