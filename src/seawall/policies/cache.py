"""Cache policy: answer from memory while fresh, and with stale answers when the call fails.

Promises:
- Concurrent calls for one key make one call (single flight), across threads and loops.
- If that one is cancelled, or failed because its deadline was nearer, another takes its place, once
  for each caller.
- Only real answers are kept, never those of a fallback.
- The map is bounded and evicts the least recently used entry.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from math import inf
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clock import Clock, current_clock
from seawall.context import (
    LEAST_RESERVE,
    attempt_var,
    deadline_passed,
    reserve_of,
    reset,
    retried_above,
    seconds_left,
)
from seawall.errors import CacheMiss, DeadlineExceeded
from seawall.runtime.call import Trace, current_trace, substitute_var, trace_var
from seawall.runtime.degradation import STALE, Degradation
from seawall.runtime.driver import CallbackWaiter, Steps, adrive, drive, wait_async, wait_sync
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Driver, Host, Kind, Waiter
from seawall.runtime.mutex import LOCK_FREE, Mutex
from seawall.runtime.policy import Bound, Policy

AGAIN: Final = object()
"""Result for a follower whose leader was cancelled, or had less time than it: look again."""


class Cache(Policy):
    """Keep answers for `ttl` seconds."""

    kind: ClassVar[str] = "cache"

    def __init__(
        self,
        ttl: float,
        *,
        stale_if_error: float = 0.0,
        key: Callable[..., Hashable] | None = None,
        max_entries: int = 1024,
    ) -> None:
        """Answer from memory for `ttl` seconds, and for `stale_if_error` more when the call fails.

        `key` maps the call's arguments to a cache key. By default the key is the arguments
        themselves, and then the cache serves one function only.
        """
        super().__init__()
        self.ttl = check.seconds("ttl", ttl)
        self.stale_if_error = check.seconds("stale_if_error", stale_if_error, zero=True)
        self.max_entries = check.count("max_entries", max_entries)
        self.key = None if key is None else check.plain_function("key", key)
        self._function: object = None
        self._answers = Answers(self)
        self._clock: Clock | None = None

    def __repr__(self) -> str:
        return f"Cache({self.ttl:g}, stale_if_error={self.stale_if_error:g})"

    def __len__(self) -> int:
        return len(self._answers.entries)

    def stale(self, *args: Any, **kwargs: Any) -> Any:
        """Return the answer for these arguments, fresh or stale: a level for `Fallback`.

        Raises `CacheMiss` if there is none, or it is too old even for a failure.
        """
        entry = self._answers.entries.get(self._key_of(args, kwargs))
        now = (self._clock or current_clock()).now()
        if entry is None or now >= entry.stale_until:
            raise CacheMiss("nothing kept for these arguments")
        cause = substitute_var.get()
        if cause is not None:
            cause.age = now - entry.since
        return entry.value

    def clear(self) -> None:
        """Discard all answers. Running calls continue, and their answers are not kept."""
        self._answers.clear()

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self.key is not None:
            key = self.key(*args, **kwargs)
        else:
            key = (args, tuple(sorted(kwargs.items())))
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(
                f"Cache: {error}; give Cache(..., key=...), a function of the call's arguments"
                " that returns something hashable"
            ) from None
        return key

    def _serve(self, function: object) -> None:
        """Refuse a second function whose answers could be confused with the first's."""
        if self.key is None and self._function not in (None, function):
            raise TypeError(
                f"this Cache keeps the answers of {self._function!r} already: make another Cache"
                " for another function, or give key=..., which tells their answers apart"
            )
        self._function = function

    def _bind(self, host: Host) -> _CacheBound:
        self._clock = host.clock
        return _CacheBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        settings = ("ttl", "stale_if_error", "max_entries")
        fresh = Cache._changed(changes, **{name: getattr(self, name) for name in settings})
        for name in settings:
            setattr(self, name, getattr(fresh, name))


class _CacheBound(Driver, Bound):
    """The cache inside one guard: runs the inner layers only when there is no answer in memory."""

    policy: Cache

    def __init__(self, policy: Cache, host: Host) -> None:
        super().__init__(policy, host)
        self.hits = 0
        self.misses = 0
        self.shared = 0

    def snapshot(self, now: float) -> dict[str, Any]:
        return {
            "entries": len(self.policy),
            "hits": self.hits,
            "misses": self.misses,
            "shared": self.shared,
        }

    def wrap(
        self, host: Host, inner: Callable[..., Any], kind: Kind, function: object
    ) -> Callable[..., Any]:
        self.policy._serve(function)
        clock = self.host.clock

        def cached(*args: Any, **kwargs: Any) -> Any:
            found = self._look(self.policy._key_of(args, kwargs))
            if isinstance(found, CacheEntry):
                return found.value

            def answer(request: Waiter | None) -> Any:
                return inner(*args, **kwargs) if request is None else wait_sync(request, clock)

            return drive(found, answer)

        async def acached(*args: Any, **kwargs: Any) -> Any:
            found = self._look(self.policy._key_of(args, kwargs))
            if isinstance(found, CacheEntry):
                return found.value

            async def answer(request: Waiter | None) -> Any:
                if request is None:
                    return await inner(*args, **kwargs)
                return await wait_async(request, clock)

            return await adrive(found, answer)

        return acached if kind == "async" else cached

    def _look(self, key: Hashable) -> CacheEntry | Steps[Any]:
        """Return a fresh entry, or the steps to the answer."""
        found = self.policy._answers.find(key, self.host)
        if isinstance(found, CacheEntry):
            self.hits += 1
            return found
        return self._fetching(key, found)

    def _fetching(self, key: Hashable, found: CacheEntry | Lead | Flight) -> Steps[Any]:
        """Run the inner layers (None), or wait for another call that does, the leader."""
        outlasted = False  # whether it looks again because it has more time than its leader had
        while True:
            if isinstance(found, CacheEntry):
                self.hits += 1
                return found.value
            try:
                if isinstance(found, Lead):
                    self.misses += 1
                    with found:
                        found.flight.value = yield None
                    return found.flight.value
                self.shared += 1
                left = seconds_left()
                until = inf if left is None else self.host.clock.now() + left
                yield self.policy._answers.landing(found, until)
                if found.wakers is not None:
                    raise self._too_late()
                if not outlasted and found.short_of_time and until > found.until + LEAST_RESERVE:
                    outlasted = True
                elif found.error is not None:
                    # Always start from the leader's traceback, so that it does not grow each time.
                    raise found.error.with_traceback(found.traceback)
                elif found.value is not AGAIN:
                    if found.degradation is not None:
                        _served_less(self.host, found.degradation)
                    return found.value
            finally:
                del found  # Break a reference cycle: it refers to the error.
            found = self.policy._answers.find(key, self.host)

    def _too_late(self) -> DeadlineExceeded:
        name = self.host.name
        count_refusal(self.host, "cache", DeadlineExceeded.reason)
        message = f"guard {name!r}: the deadline passed while another call fetched it"
        return DeadlineExceeded(message, guard=name, policy="cache")


class CacheEntry(NamedTuple):
    """A real answer, when it was received, and how long it may be used."""

    value: Any
    since: float
    fresh_until: float
    stale_until: float


class Answers:
    """A bounded map of answers, with at most one running call for each key."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._mutex = Mutex()
        self.entries: OrderedDict[Hashable, CacheEntry] = OrderedDict()
        self._flights: dict[Hashable, Flight] = {}
        survives_fork(self)

    def entry(self, value: Any, now: float) -> CacheEntry:
        """Return a new entry, fresh from now on."""
        fresh_until = now + self._cache.ttl
        return CacheEntry(value, now, fresh_until, fresh_until + self._cache.stale_if_error)

    def clear(self) -> None:
        """Discard all answers. Running calls continue, and their answers are not kept."""
        with self._mutex:
            self.entries.clear()
            self._flights.clear()

    def find(self, key: Hashable, host: Host) -> CacheEntry | Lead | Flight:
        """Return a fresh entry, a lead to fetch it, or the flight of another call to wait for."""
        now = host.clock.now()
        if LOCK_FREE:
            entry = self.entries.get(key)
            if entry is not None and now < entry.fresh_until:
                try:
                    self.entries.move_to_end(key)
                except KeyError:
                    pass  # just evicted by another thread
                return entry
        with self._mutex:
            entry = self.entries.get(key)
            if entry is not None:
                self.entries.move_to_end(key)
                if now < entry.fresh_until:
                    return entry
            flight = self._flights.get(key)
            if flight is not None:
                return flight
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
                self.entries[key] = entry
                self.entries.move_to_end(key)
                while len(self.entries) > self._cache.max_entries:
                    self.entries.popitem(last=False)
        wakers, flight.wakers = flight.wakers, None
        for wake in wakers or ():
            wake()

    def _after_fork(self) -> None:
        """Reset in a child process: flights of threads that no longer exist never end."""
        self._mutex = Mutex()
        self._flights.clear()

    def landing(self, flight: Flight, until: float) -> CallbackWaiter:
        """Return a waiter for the end of `flight`, at most until `until`."""

        def join(wake: Callable[[], bool]) -> None:
            with self._mutex:
                if flight.wakers is not None:
                    flight.wakers.append(wake)
                    return
            wake()

        def forget(wake: Callable[[], bool]) -> None:
            if flight.wakers is not None and wake in flight.wakers:
                flight.wakers.remove(wake)

        def leave(wake: Callable[[], bool]) -> None:
            self._mutex.do(lambda: forget(wake))

        return CallbackWaiter(join, leave=leave, until=until)


class Flight:
    """One call that several callers may wait for, and its result."""

    def __init__(self, stale: CacheEntry | None) -> None:
        self.stale = stale
        self.wakers: list[Callable[[], bool]] | None = []
        self.value: Any = AGAIN
        self.error: Exception | None = None
        self.traceback: TracebackType | None = None
        self.degradation: Degradation | None = None
        self.until = inf  # the deadline of the call, on the guard's clock
        self.short_of_time = False
        """Whether that deadline may be the cause of the failure, although it has not passed."""


class Lead:
    """The call that fetches an answer: a context manager around the real call.

    An error that a stale answer can replace is suppressed, with that answer in the flight.
    """

    def __init__(self, answers: Answers, key: Hashable, flight: Flight, host: Host) -> None:
        self._answers = answers
        self._key = key
        self._host = host
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
                flight.value = flight.stale.value
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
        if until == inf:
            return False
        if isinstance(error, DeadlineExceeded):
            return error.policy != "timeout"
        if isinstance(error, TimeoutError) and until - now <= reserve_of(until - self._began):
            return True
        return self._trace.short_of_time

    def _pass_trace_on(self) -> None:
        outside = current_trace(self._host.name)
        if outside is not None:
            outside.attempts += self._trace.attempts
            outside.degradation = self._trace.degradation


def _served_less(host: Host, degradation: Degradation) -> None:
    trace = current_trace(host.name)
    if trace is not None:
        trace.degradation = degradation
    host.stats.degraded += 1
    if degradation.age is not None:
        host.stats.stale += 1
    degradation.report(host.name)
