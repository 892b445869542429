"""Cache policy: answer from memory while fresh, and with stale answers when the call fails.

Promises:
- Concurrent calls for one key make one call (single flight), across threads and loops.
- If that one is cancelled, or failed because its deadline was nearer, another takes its place, once
  for each caller.
- Only real answers are kept, never those of a fallback.
- The map is bounded and evicts the least recently used entry.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from seawall import _checks as check
from seawall.clock import Clock, current_clock
from seawall.errors import CacheMiss
from seawall.policies.cache.answers import AGAIN, Answers, CacheEntry, Follower, Lead
from seawall.runtime.call import need_var
from seawall.runtime.driver import wait_async, wait_sync
from seawall.runtime.layers import Driver, Host, Kind
from seawall.runtime.policy import Bound, Policy


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
        return len(self._answers)

    def stale(self, *args: Any, **kwargs: Any) -> Any:
        """Return the answer for these arguments, fresh or stale: a level for `Fallback`.

        Raises `CacheMiss` if there is none, or it is too old even for a failure.
        """
        entry = self._answers.get(self._key_of(args, kwargs))
        now = (self._clock or current_clock()).now()
        if entry is None or now >= entry.stale_until:
            raise CacheMiss("nothing kept for these arguments")
        need = need_var.get()
        if need is not None:
            need.age = now - entry.since
        return entry.value

    def clear(self) -> None:
        """Discard all answers. Running calls continue, and their answers are not kept."""
        self._answers.clear()

    def _key_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        """Return the cache key of a call."""
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
        """Register `function`.

        Refuse a second one whose answers could be confused with the first's.
        """
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
        self._reject_unknown(changes, ("ttl", "stale_if_error", "max_entries"))
        fresh = Cache(
            changes.get("ttl", self.ttl),
            stale_if_error=changes.get("stale_if_error", self.stale_if_error),
            max_entries=changes.get("max_entries", self.max_entries),
        )
        self.ttl, self.stale_if_error = fresh.ttl, fresh.stale_if_error
        self.max_entries = fresh.max_entries


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
    """Runs the inner layers only when there is no answer in memory."""

    def __init__(self, bound: _CacheBound) -> None:
        self._bound = bound

    def _look(self, key: Hashable) -> CacheEntry | Lead | Follower:
        bound = self._bound
        found = bound.policy._answers.find(key, bound.host)
        if isinstance(found, CacheEntry):
            bound.hits += 1
        elif isinstance(found, Lead):
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
            outlasted = False
            while True:
                found = self._look(key)
                if isinstance(found, CacheEntry):
                    return found.value
                try:
                    if isinstance(found, Lead):
                        with found:
                            return found.keep(inner(*args, **kwargs))
                        return found.answer
                    found.has_outlasted = outlasted
                    answer = wait_sync(found, self._bound.host.clock)
                    if answer is not AGAIN:
                        return answer
                    outlasted = found.has_outlasted
                finally:
                    del found  # Break a reference cycle: it refers to the error.

        return cached

    def _wrap_async(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        async def cached(*args: Any, **kwargs: Any) -> Any:
            key = self._bound.policy._key_of(args, kwargs)
            outlasted = False
            while True:
                found = self._look(key)
                if isinstance(found, CacheEntry):
                    return found.value
                try:
                    if isinstance(found, Lead):
                        with found:
                            return found.keep(await inner(*args, **kwargs))
                        return found.answer
                    found.has_outlasted = outlasted
                    answer = await wait_async(found, self._bound.host.clock)
                    if answer is not AGAIN:
                        return answer
                    outlasted = found.has_outlasted
                finally:
                    del found  # Break a reference cycle: it refers to the error.

        return cached
