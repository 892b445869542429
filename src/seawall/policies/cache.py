"""Answer from memory while the answer is fresh, and from older memory when the call fails.

Promises: concurrent calls for one key make one call (single flight), across threads and loops; if
that one is cancelled another takes its place; only real answers are kept, never those of a
fallback; the map is bounded, least recently used first out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, ClassVar, Final

from seawall import _checks as check
from seawall.clock import Clock, current_clock
from seawall.context import deadline_var, reset
from seawall.errors import CacheMiss, DeadlineExceeded, reason_of
from seawall.runtime.call import Trace, current_trace, trace_var
from seawall.runtime.events import FallbackUsed, emit
from seawall.runtime.gil import LOCK_FREE
from seawall.runtime.interpreter import count_refusal
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.policy import Bound, Policy
from seawall.runtime.runners import wait_async, wait_sync

_AGAIN: Final = object()
"""What a follower gets when its leader was cancelled: look again."""


class _Entry:
    """A real answer and how long it may be used."""

    __slots__ = ("fresh_until", "stale_until", "value")

    def __init__(self, value: Any, fresh_until: float, stale_until: float) -> None:
        self.value = value
        self.fresh_until = fresh_until
        self.stale_until = stale_until


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

        `key` maps the call's arguments to what tells answers apart; by default the arguments
        themselves, and then the cache serves one function only.
        """
        super().__init__()
        self.ttl = check.seconds("ttl", ttl)
        self.stale_if_error = check.seconds("stale_if_error", stale_if_error, zero=True)
        self.max_entries = check.count("max_entries", max_entries)
        self.key = None if key is None else check.function("key", key)
        self._function: object = None
        self._mutex = Mutex()
        survives_fork(self)
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._flights: dict[Hashable, _Flight] = {}
        self._clock: Clock | None = None

    def __repr__(self) -> str:
        return f"Cache({self.ttl:g}, stale_if_error={self.stale_if_error:g})"

    def __len__(self) -> int:
        return len(self._entries)

    def stale(self, *args: Any, **kwargs: Any) -> Any:
        """Return what is kept for these arguments, fresh or stale: a level for `Fallback`.

        Raises `CacheMiss` if there is nothing, or it is too old even for a failure.
        """
        entry = self._entries.get(self._key_of(args, kwargs))
        now = (self._clock or current_clock()).now()
        if entry is None or now >= entry.stale_until:
            raise CacheMiss("nothing kept for these arguments")
        return entry.value

    def clear(self) -> None:
        """Forget all answers; calls under way go on, and are not kept."""
        with self._mutex:
            self._entries.clear()
            self._flights.clear()

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return what tells this call's answer from others'."""
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
        """Take on `function`; refuse a second one whose answers could be taken for the first's."""
        if self.key is None and self._function not in (None, function):
            raise TypeError(
                f"this Cache keeps the answers of {self._function!r} already: make another Cache"
                " for another function, or give key=..., which tells their answers apart"
            )
        self._function = function

    def _find(self, key: Hashable, host: Host) -> _Entry | _Lead | _Follower:
        """Return a fresh entry, or the duty to fetch it, or somebody who does to wait for."""
        now = host.clock.now()
        if LOCK_FREE:
            entry = self._entries.get(key)
            if entry is not None and now < entry.fresh_until:
                try:
                    self._entries.move_to_end(key)
                except KeyError:
                    pass  # just evicted, by another thread
                return entry
        with self._mutex:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                if now < entry.fresh_until:
                    return entry
            flight = self._flights.get(key)
            if flight is not None:
                return _Follower(self, flight, host)
            flight = self._flights[key] = _Flight(entry)
            return _Lead(self, key, flight, host)

    def _land(self, key: Hashable, flight: _Flight, entry: _Entry | None) -> None:
        """End a flight; keep its entry if it has one."""
        self._mutex.do(lambda: self._landed(key, flight, entry))

    def _landed(self, key: Hashable, flight: _Flight, entry: _Entry | None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
            if entry is not None:
                self._entries[key] = entry
                self._entries.move_to_end(key)
                while len(self._entries) > self.max_entries:
                    self._entries.popitem(last=False)
        wakers, flight.wakers = flight.wakers, None
        for wake in wakers or ():
            wake()

    def after_fork(self) -> None:
        """Be usable in a child process: flights of threads that are gone never land."""
        self._mutex = Mutex()
        self._flights.clear()

    def _follow(self, flight: _Flight, wake: Callable[[], bool]) -> None:
        """Be woken when `flight` has ended; at once if it has."""
        with self._mutex:
            if flight.wakers is not None:
                flight.wakers.append(wake)
                return
        wake()

    def _leave(self, flight: _Flight, wake: Callable[[], bool]) -> None:
        """Be woken no more."""

        def forget() -> None:
            if flight.wakers is not None and wake in flight.wakers:
                flight.wakers.remove(wake)

        self._mutex.do(forget)

    def _bind(self, host: Host) -> _CacheBound:
        self._clock = host.clock
        return _CacheBound(self, host)

    def _update(self, changes: dict[str, Any]) -> None:
        self._reject_unknown(changes, ("ttl", "stale_if_error", "max_entries"))
        fresh = Cache(
            changes.get("ttl", self.ttl),
            stale_if_error=changes.get("stale_if_error", self.stale_if_error),
            max_entries=changes.get("max_entries", self.max_entries),
        )
        self.ttl, self.stale_if_error = fresh.ttl, fresh.stale_if_error
        self.max_entries = fresh.max_entries


class _Flight:
    """One call that several may wait for, and what came of it."""

    __slots__ = ("error", "level", "reason", "stale", "traceback", "value", "wakers")

    def __init__(self, stale: _Entry | None) -> None:
        self.stale = stale
        self.wakers: list[Callable[[], bool]] | None = []
        self.value: Any = _AGAIN
        self.error: Exception | None = None
        self.traceback: TracebackType | None = None
        self.level = 0
        self.reason: str | None = None


class _Lead:
    """The duty to fetch: a block around the real call.

    After an error that a stale answer can replace it ends quietly, with that in `answer`.
    """

    __slots__ = ("_cache", "_flight", "_host", "_key", "_token", "_trace", "answer")

    def __init__(self, cache: Cache, key: Hashable, flight: _Flight, host: Host) -> None:
        self._cache = cache
        self._key = key
        self._flight = flight
        self._host = host
        self.answer: Any = None

    def __enter__(self) -> None:
        self._trace = Trace(self._host.name)
        self._token = trace_var.set(self._trace)

    def keep(self, value: Any) -> Any:
        """Take the real answer in."""
        self._flight.value = value
        return value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        reset(trace_var, self._token)
        self._tell_outside()
        flight, cache = self._flight, self._cache
        now = self._host.clock.now()
        entry = None
        if error is None:
            flight.level, flight.reason = self._trace.level, self._trace.reason
            if not flight.level:
                fresh_until = now + cache.ttl
                entry = _Entry(flight.value, fresh_until, fresh_until + cache.stale_if_error)
        elif isinstance(error, Exception):
            flight.error, flight.traceback = error, traceback
            if flight.stale is not None and now < flight.stale.stale_until:
                flight.error = flight.traceback = None
                flight.value = self.answer = flight.stale.value
                flight.level, flight.reason = 1, reason_of(error)
                served_less(self._host, flight)
        cache._land(self._key, flight, entry)
        return error is not None and flight.error is None and flight.value is not _AGAIN

    def _tell_outside(self) -> None:
        """Hand on what the inside told, to whoever asked outside."""
        outside = current_trace(self._host.name)
        if outside is not None:
            outside.attempts += self._trace.attempts
            outside.level, outside.reason = self._trace.level, self._trace.reason


class _Follower:
    """Somebody who waits for another's call."""

    __slots__ = ("_cache", "_flight", "_host", "_wake", "until")

    def __init__(self, cache: Cache, flight: _Flight, host: Host) -> None:
        self._cache = cache
        self._flight = flight
        self._host = host
        held = deadline_var.get()
        self.until = None if held is None else host.clock.now() + held[0] - held[1].now()

    def publish(self, wake: Callable[[], bool]) -> None:
        self._wake = wake
        self._cache._follow(self._flight, wake)

    def claim(self) -> Any:
        flight = self._flight
        if flight.wakers is not None:
            self.abandon()
            count_refusal(self._host, "cache", DeadlineExceeded.reason)
            raise DeadlineExceeded(
                f"guard {self._host.name!r}: the deadline passed while another call fetched it",
                guard=self._host.name,
                policy="cache",
            )
        if flight.error is not None:
            # From the leader's traceback each time, so that it does not grow with the followers.
            raise flight.error.with_traceback(flight.traceback)
        if flight.level:
            served_less(self._host, flight)
        return flight.value

    def abandon(self) -> None:
        self._cache._leave(self._flight, self._wake)


def served_less(host: Host, flight: _Flight) -> None:
    """Tell that a call was answered by something less than the real thing."""
    trace = current_trace(host.name)
    if trace is not None:
        trace.level, trace.reason = flight.level, flight.reason
    host.stats.degraded += 1
    emit(FallbackUsed, host.name, level=flight.level, reason=flight.reason)


class _CacheBound(Bound):
    """The cache inside one guard."""

    policy: Cache

    def __init__(self, policy: Cache, host: Host) -> None:
        super().__init__(policy, host)
        self.hits = 0
        self.misses = 0
        self.shared = 0
        self._driver = _CacheDriver(self)

    def layer(self, kind: Kind) -> _CacheDriver:
        return self._driver

    def snapshot(self, now: float) -> dict[str, Any]:
        return {
            "entries": len(self.policy),
            "hits": self.hits,
            "misses": self.misses,
            "shared": self.shared,
        }


class _CacheDriver(Driver):
    """Runs what is inside only when memory has no answer."""

    def __init__(self, bound: _CacheBound) -> None:
        self._bound = bound

    def _look(self, key: Hashable) -> _Entry | _Lead | _Follower:
        bound = self._bound
        found = bound.policy._find(key, bound.host)
        if isinstance(found, _Entry):
            bound.hits += 1
        elif isinstance(found, _Lead):
            bound.misses += 1
        else:
            bound.shared += 1
        return found

    def wrap(self, inner: Callable[..., Any], kind: Kind, function: object) -> Callable[..., Any]:
        """Return a function that answers from memory or runs `inner`."""
        self._bound.policy._serve(function)
        return self._wrap_async(inner) if kind == "async" else self._wrap_sync(inner)

    def _wrap_sync(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def cached(*args: Any, **kwargs: Any) -> Any:
            key = self._bound.policy._key_of(args, kwargs)
            while True:
                found = self._look(key)
                if isinstance(found, _Entry):
                    return found.value
                try:
                    if isinstance(found, _Lead):
                        with found:
                            return found.keep(inner(*args, **kwargs))
                        return found.answer
                    answer = wait_sync(found, self._bound.host.clock)
                    if answer is not _AGAIN:
                        return answer
                finally:
                    del found  # it leads to the error, which would keep itself alive

        return cached

    def _wrap_async(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def cached(*args: Any, **kwargs: Any) -> Any:
            key = self._bound.policy._key_of(args, kwargs)
            while True:
                found = self._look(key)
                if isinstance(found, _Entry):
                    return found.value
                try:
                    if isinstance(found, _Lead):
                        with found:
                            return found.keep(await inner(*args, **kwargs))
                        return found.answer
                    answer = await wait_async(found, self._bound.host.clock)
                    if answer is not _AGAIN:
                        return answer
                finally:
                    del found  # it leads to the error, which would keep itself alive

        return cached
