"""Serializer: one caller at a time for each key, in order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from threading import get_ident
from types import AsyncGeneratorType, GeneratorType
from typing import Any, Final, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import give_up_at
from seawall.errors import DeadlineExceeded, Overloaded, Rejected
from seawall.events import CallRejected, SettingsChanged
from seawall.events.bus import emit
from seawall.models.contention import drop, stripe_of
from seawall.resources.contention.optimistic import is_async, left
from seawall.runtime.driver import current_task, wait_async, wait_sync
from seawall.runtime.functions import kind_of
from seawall.runtime.layers import Wait
from seawall.runtime.mutex import Mutex

R = TypeVar("R")


class Serializer:
    """Admits one caller at a time for each key, in order of arrival; threads and tasks of any loop.

    A key takes memory only while a caller holds it or waits for it.
    """

    def __init__(
        self,
        *,
        max_waiting: int = 100,
        max_wait: float = inf,
        max_keys: int = 10_000,
        stripes: int | None = None,
        name: str = "serializer",
        clock: Clock | None = None,
    ) -> None:
        """Let up to `max_waiting` callers wait for each key, up to `max_wait` seconds each.

        Further callers are refused, and so are those of a new key while `max_keys` others are in
        use. With `stripes`, that number of queues is shared by all keys: two keys of one stripe
        wait for each other.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Serializer(name={name!r}): write a name, such as 'accounts'")
        self.name = name
        self._set(max_waiting=max_waiting, max_wait=max_wait, max_keys=max_keys)
        self._stripes = None if stripes is None else check.count("stripes", stripes)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._lanes: dict[Hashable, _Lane] = {}
        self._rejected = 0
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "serializer", name)

    def __repr__(self) -> str:
        striped = "" if self._stripes is None else f", stripes={self._stripes}"
        limits = f"max_waiting={self.max_waiting}, max_keys={self.max_keys}"
        return f"Serializer({limits}{striped}, name={self.name!r})"

    def hold(self, key: Hashable) -> _Hold:
        """Return a context manager, sync or async, that admits one caller at a time for `key`.

        Raises `Overloaded` if too many callers wait, or the wait took too long.
        """
        if self._stripes is not None:
            key = stripe_of(key, self._stripes)
        # Raise for an unhashable key now, not under the lock.
        hash(key)
        return _Hold(self, key)

    def run(self, key: Hashable, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `function(*args, **kwargs)` when its turn comes."""
        check.function("function", function)
        if is_async(function):
            raise TypeError(f"{function!r} is async: write `await serializer.arun(...)`")
        _refuse_generator(function)
        with self.hold(key):
            result = function(*args, **kwargs)
        if hasattr(result, "__await__"):
            drop(result)
            raise TypeError(
                f"{function!r} returned an awaitable: write `await serializer.arun(...)`"
            )
        return _in_turn(result)

    async def arun(
        self, key: Hashable, function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
    ) -> R:
        """Call and await `function(*args, **kwargs)` when its turn comes."""
        check.function("function", function)
        _refuse_generator(function)
        async with self.hold(key):
            result = function(*args, **kwargs)
            if not hasattr(result, "__await__"):
                raise TypeError(
                    f"{function!r} is not async: write `async with serializer.hold(key)`"
                )
            return _in_turn(await result)

    def update(
        self,
        *,
        max_waiting: int | None = None,
        max_wait: float | None = None,
        max_keys: int | None = None,
    ) -> None:
        """Change settings at run time; current holders and waiters are not affected."""
        given = {"max_waiting": max_waiting, "max_wait": max_wait, "max_keys": max_keys}
        changes: dict[str, Any] = {name: new for name, new in given.items() if new is not None}
        if not changes:
            raise TypeError(f"Serializer.update(): it takes {', '.join(given)}")
        today = {setting: getattr(self, setting) for setting in given}
        self._set(**{**today, **changes})
        emit(SettingsChanged, self.name, policy="serializer", changes=changes)

    def _set(self, *, max_waiting: int, max_wait: float, max_keys: int) -> None:
        """Apply these settings; invalid ones raise and change nothing."""
        check.count("max_waiting", max_waiting, minimum=0)
        check.count("max_keys", max_keys)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        self.max_waiting, self.max_keys = max_waiting, max_keys

    def snapshot(self) -> dict[str, Any]:
        """Return the numbers of held keys, waiters and refusals."""
        with self._mutex:
            lines = [len(lane) for lane in self._lanes.values()]
        return {
            "name": self.name,
            "in_flight": len(lines),
            "waiting": sum(lines),
            "longest_line": max(lines, default=0),
            "rejected": self._rejected,
            "max_keys": self.max_keys,
            "max_waiting": self.max_waiting,
        }

    def _enter(self, key: Hashable, holder: object, fresh: _Lane) -> None:
        """Take a free key with the lane `fresh`, refuse, or raise `Wait`."""
        if left() <= 0:
            raise self._too_late("before its turn came")
        with self._mutex:
            why = self._obstacle(key)
            lane = self._lanes.get(key)
            if why is None and lane is None:
                fresh.holder = holder
                self._lanes[key] = fresh
                return
        if why is not None:
            raise self._overloaded(why)
        turn = _Turn(self, key)
        if turn.until is None and lane is not None and lane.holder == holder is not None:
            raise RuntimeError(
                f"serializer {self.name!r}: who holds the key would wait here for itself, for ever:"
                " take it once, outside (with stripes, two keys can be one queue)"
            )
        raise Wait(turn)

    def _obstacle(self, key: Hashable) -> str | None:
        """Return why `key` can be neither taken nor waited for, or None. Call under the lock."""
        lane = self._lanes.get(key)
        if lane is None:
            full = len(self._lanes) >= self.max_keys
            return f"{len(self._lanes)} keys are in use" if full else None
        full = len(lane) >= self.max_waiting or not self.max_wait
        return f"the key is in use, and {len(lane)} wait for it" if full else None

    def _leave(self, key: Hashable, lane: _Lane, hold: _Hold | None = None) -> None:
        """Hand the key to the next waiter, or forget it; `hold` has ended. Call under the lock."""
        # Nothing is called before a key without waiters is free, so no signal can intervene.
        if hold is not None:
            hold._lane = None
        if key not in self._lanes or self._lanes[key] is not lane:
            return  # after a fork, the child's table is empty: the key has no waiters here
        if lane:
            lane.holder = None
            while lane:
                if lane.popitem(last=False)[0].grant():
                    return
        del self._lanes[key]

    def _overloaded(self, why: str) -> Rejected:
        return self._refused(Overloaded(f"serializer {self.name!r}: {why}"))

    def _too_late(self, when: str) -> Rejected:
        return self._refused(
            DeadlineExceeded(f"serializer {self.name!r}: the deadline passed {when}")
        )

    def _refused(self, error: Rejected) -> Rejected:
        """Count a refusal, emit its event, and return its error. Call without the lock."""
        with self._mutex:
            self._rejected += 1
        emit(CallRejected, self.name, policy="serializer", reason=error.reason, enforced=True)
        error.guard = self.name
        error.policy = "serializer"
        return error

    def _after_fork(self) -> None:
        """Start empty in a child process: the holders of keys are in the parent."""
        self._mutex = Mutex()
        self._lanes = {}


class _Lane(OrderedDict["_Turn", None]):
    """Waiters for a held key, in order of arrival."""

    holder: object  # the thread or task that holds the key; None while it is handed on


class _Hold:
    """Context manager of `serializer.hold(key)`, sync or async; usable once."""

    __slots__ = ("_key", "_lane", "_serializer", "_used")

    def __init__(self, serializer: Serializer, key: Hashable) -> None:
        self._serializer = serializer
        self._key = key
        self._used = False
        self._lane: _Lane | None = None  # the lane of the held key, until it is released

    def _enter(self, holder: object) -> None:
        if self._used:
            raise RuntimeError("this hold(...) was used already: write hold(key) for each block")
        self._used = True
        # Set before the key is taken, because a signal may interrupt at any moment.
        self._lane = fresh = _Lane()
        try:
            self._serializer._enter(self._key, holder, fresh)
        except Wait:
            self._lane = None
            raise

    def _leave(self) -> None:
        if self._lane is not None:
            self._serializer._leave(self._key, self._lane, self)

    def __del__(self) -> None:
        if getattr(self, "_lane", None) is not None:  # a signal handler raised
            self._serializer._mutex.do(self._leave)

    def __enter__(self) -> None:
        holder = get_ident()
        try:
            self._enter(holder)
        except Wait as wait:
            waiter = wait.waiter
        else:
            return
        self._lane = lane = wait_sync(waiter, self._serializer._clock)
        lane.holder = holder

    def __exit__(self, *_exc: object) -> None:
        # The garbage collector may end this block, with its coroutine, while the lock is held.
        self._serializer._mutex.do(self._leave)

    async def __aenter__(self) -> None:
        holder = current_task()
        try:
            self._enter(holder)
        except Wait as wait:
            waiter = wait.waiter
        else:
            return
        self._lane = lane = await wait_async(waiter, self._serializer._clock)
        lane.holder = holder

    async def __aexit__(self, *_exc: object) -> None:
        self.__exit__()


class _Turn:
    """A waiter for a key. Its state changes only under the serializer's lock."""

    def __init__(self, serializer: Serializer, key: Hashable) -> None:
        self._serializer = serializer
        self._key = key
        self._state = "waiting"
        self._lane = _Lane()
        self._why: str | None = None
        self.until, self._late = give_up_at(serializer._clock.now(), serializer.max_wait)

    def publish(self, wake: Callable[[], bool]) -> None:
        self._wake = wake
        serializer = self._serializer
        with serializer._mutex:
            self._why = serializer._obstacle(self._key)
            if self._why is not None:
                wake()
            elif self._key in serializer._lanes:
                self._lane = serializer._lanes[self._key]
                self._lane[self] = None
            else:  # the key became free in the meantime
                self._lane = serializer._lanes[self._key] = _Lane()
                self._lane.holder = None
                self.grant()

    def grant(self) -> bool:
        there = self._wake()
        self._state = "granted" if there else "gone"
        return there

    def claim(self) -> _Lane:
        serializer = self._serializer
        with serializer._mutex:
            self._lane.pop(self, None)
            if self._state == "granted":
                return self._lane
        if self._late and self._why is None:
            raise serializer._too_late("while waiting for the key")
        raise serializer._overloaded(self._why or f"waited {serializer.max_wait:g} s for the key")

    def abandon(self) -> None:
        self._serializer._mutex.do(self._withdraw)

    def _withdraw(self) -> None:
        self._lane.pop(self, None)
        if self._state == "granted":
            self._serializer._leave(self._key, self._lane)


def _refuse_generator(function: Callable[..., Any]) -> None:
    if callable(function) and not isinstance(function, type) and "generator" in kind_of(function):
        raise TypeError(f"{function!r} is a generator, {_LATER}")


def _in_turn(result: R) -> R:
    """Return `result`, unless it is a generator, which has yet to run."""
    if isinstance(result, (GeneratorType, AsyncGeneratorType)):
        raise TypeError(f"{result!r} was returned, {_LATER}")
    return result


_LATER: Final = (
    "which runs when it is iterated over, after its turn: write `with serializer.hold(key):`"
    " around the loop"
)
