"""When many want to change the same thing: try and compare, or take turns.

`update_optimistically` reads, changes, and writes back only if nobody else wrote meanwhile, a
bounded number of times. `Serializer` lets one at a time through for each key, in order; with
stripes (`seawall.models.contention`), any number of keys shares a fixed number of queues.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import deadline_var, give_up_at
from seawall.errors import DeadlineExceeded, Overloaded
from seawall.models.backoff import Backoff, as_backoff
from seawall.models.contention import QUICK, Lost, Update, optimistic_steps, stripe_of
from seawall.runtime.functions import kind_of
from seawall.runtime.layers import Wait
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.runners import sleep_async, wait_async, wait_sync

if TYPE_CHECKING:
    from random import Random

R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V")
Errors: TypeAlias = type[Exception] | tuple[type[Exception], ...]


# Try and compare


def update_optimistically(
    read: Callable[[], tuple[T, V]],
    change: Callable[[T], T],
    write: Callable[[T, V], int],
    *,
    on: Errors = (),
    attempts: int = 10,
    backoff: Backoff | float = QUICK,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> T:
    """Change a value that others change too, without a lock; return what was written.

    `read()` gives the value and its version. `change(value)` gives the new value, or raises to
    refuse, and that passes through. `write(new, version)` writes if the version is still that one,
    and tells whether it did (or how many rows it changed). If it did not, or if reading or writing
    raised one of `on`, all is done again after a jittered pause: `attempts` times at most, and not
    beyond the deadline. Then `Contended` is raised.
    """
    _refuse_async(read, "await aupdate_optimistically(...)")
    _refuse_async(write, "await aupdate_optimistically(...)")
    lost = _errors(on)
    clock = current_clock() if clock is None else check_clock(clock)
    steps = optimistic_steps(
        _checked(read, change, write, attempts, backoff), _chance(rng), clock.now, _left
    )
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            written: T = end.value
            return written
        result = None
        try:
            if isinstance(step, float):
                clock.sleep(step)
            else:
                result = step()
        except lost as error:
            result = Lost(error)


async def aupdate_optimistically(
    read: Callable[[], Awaitable[tuple[T, V]] | tuple[T, V]],
    change: Callable[[T], T],
    write: Callable[[T, V], Awaitable[int] | int],
    *,
    on: Errors = (),
    attempts: int = 10,
    backoff: Backoff | float = QUICK,
    clock: Clock | None = None,
    rng: Random | None = None,
) -> T:
    """Do as `update_optimistically` does, with a `read` and a `write` that may be async."""
    lost = _errors(on)
    clock = current_clock() if clock is None else check_clock(clock)
    steps = optimistic_steps(
        _checked(read, change, write, attempts, backoff), _chance(rng), clock.now, _left
    )
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            written: T = end.value
            return written
        try:
            result = sleep_async(step) if isinstance(step, float) else step()
            if hasattr(result, "__await__"):
                result = await result
        except lost as error:
            result = Lost(error)


def _refuse_async(function: Callable[..., Any], instead: str) -> None:
    if callable(function) and not isinstance(function, type) and kind_of(function) == "async":
        raise TypeError(f"{function!r} is async: write `{instead}`")


def _checked(
    read: Callable[[], Any],
    change: Callable[[Any], Any],
    write: Callable[[Any, Any], Any],
    attempts: int,
    backoff: Backoff | float,
) -> Update:
    return Update(
        check.function("read", read),
        check.function("change", change),
        check.function("write", write),
        check.count("attempts", attempts),
        as_backoff(backoff),
    )


def _errors(on: Errors) -> tuple[type[Exception], ...]:
    types = on if isinstance(on, tuple) else (on,)
    for error in types:
        if not (isinstance(error, type) and issubclass(error, Exception)):
            raise TypeError(f"on={error!r}: write a type of error, such as on=IntegrityError")
    return types


def _chance(rng: Random | None) -> Callable[[], float]:
    if rng is not None:
        return rng.random
    from random import Random

    return Random().random  # noqa: S311 - jitter is no secret


def _left() -> float:
    """Return the seconds until the deadline."""
    held = deadline_var.get()
    return inf if held is None else held[0] - held[1].now()


# Take turns


class Serializer:
    """One at a time for each key, in order of arrival; threads and tasks of any loop together.

    A key takes memory only while somebody holds it or waits for it.
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
        """Let up to `max_waiting` wait for each key, up to `max_wait` seconds; refuse the rest.

        More than `max_keys` in use at once are refused as well. With `stripes`, so many queues are
        shared by all keys: two keys of one stripe wait for each other.
        """
        self.name = name
        self.max_waiting = check.count("max_waiting", max_waiting, minimum=0)
        self.max_wait = check.seconds("max_wait", max_wait, zero=True, infinite=True)
        self.max_keys = check.count("max_keys", max_keys)
        self._stripes = None if stripes is None else check.count("stripes", stripes)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._lanes: dict[Hashable, _Lane] = {}
        self._rejected = 0
        self._mutex = Mutex()
        survives_fork(self)

    def __repr__(self) -> str:
        striped = "" if self._stripes is None else f", stripes={self._stripes}"
        return f"Serializer(max_waiting={self.max_waiting}, max_keys={self.max_keys}{striped})"

    def hold(self, key: Hashable) -> _Hold:
        """Return a block, `with` or `async with`, that only one at a time enters for `key`.

        Raises `Overloaded` where too many wait, or the wait took too long.
        """
        if self._stripes is not None:
            key = stripe_of(key, self._stripes)
        # Whether it can be a key at all is found out now, not under the lock.
        hash(key)
        return _Hold(self, key)

    def run(self, key: Hashable, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Call `function(*args, **kwargs)` in its turn."""
        _refuse_async(function, "await serializer.arun(...)")
        with self.hold(key):
            return function(*args, **kwargs)

    async def arun(
        self, key: Hashable, function: Callable[..., Awaitable[R]], *args: Any, **kwargs: Any
    ) -> R:
        """Call and await `function(*args, **kwargs)` in its turn."""
        async with self.hold(key):
            return await function(*args, **kwargs)

    def update(
        self,
        *,
        max_waiting: int | None = None,
        max_wait: float | None = None,
        max_keys: int | None = None,
    ) -> None:
        """Change settings at run time; who holds or waits is not disturbed."""
        fresh = Serializer(
            max_waiting=self.max_waiting if max_waiting is None else max_waiting,
            max_wait=self.max_wait if max_wait is None else max_wait,
            max_keys=self.max_keys if max_keys is None else max_keys,
        )
        self.max_waiting, self.max_wait = fresh.max_waiting, fresh.max_wait
        self.max_keys = fresh.max_keys

    def snapshot(self) -> dict[str, Any]:
        """Return how many hold a key, wait, and were refused."""
        with self._mutex:
            lines = [len(lane) for lane in self._lanes.values()]
        return {
            "in_flight": len(lines),
            "waiting": sum(lines),
            "longest_line": max(lines, default=0),
            "rejected": self._rejected,
            "max_keys": self.max_keys,
            "max_waiting": self.max_waiting,
        }

    def _enter(self, key: Hashable) -> _Lane:
        """Open the key's lane, refuse, or raise `Wait`."""
        if _left() <= 0:
            raise self._too_late("before its turn came")
        with self._mutex:
            why = self._obstacle(key)
            if why is None and key not in self._lanes:
                lane = self._lanes[key] = OrderedDict()
                return lane
        raise Wait(_Turn(self, key)) if why is None else self._overloaded(why)

    def _obstacle(self, key: Hashable) -> str | None:
        """Say why nobody can come, or wait, for `key` now. Under the lock."""
        lane = self._lanes.get(key)
        if lane is None:
            full = len(self._lanes) >= self.max_keys
            return f"{len(self._lanes)} keys are in use" if full else None
        full = len(lane) >= self.max_waiting or not self.max_wait
        return f"the key is in use, and {len(lane)} wait for it" if full else None

    def _leave(self, key: Hashable, lane: _Lane) -> None:
        """Hand the key to who is next, or forget it. Under the lock."""
        if self._lanes.get(key) is not lane:
            return  # a fork took the holder along: here nobody waits for it
        while lane:
            if lane.popitem(last=False)[0].grant():
                return
        del self._lanes[key]

    def _overloaded(self, why: str) -> Overloaded:
        self._rejected += 1
        return Overloaded(f"serializer {self.name!r}: {why}", policy="serializer")

    def _too_late(self, when: str) -> DeadlineExceeded:
        message = f"serializer {self.name!r}: the deadline passed {when}"
        return DeadlineExceeded(message, policy="serializer")

    def _after_fork(self) -> None:
        """Be usable in a child process: who held a key there is not here."""
        self._mutex = Mutex()
        self._lanes = {}


class _Hold:
    """`with serializer.hold(key):` or `async with`; one use each."""

    __slots__ = ("_key", "_lane", "_serializer", "_used")

    _lane: _Lane

    def __init__(self, serializer: Serializer, key: Hashable) -> None:
        self._serializer = serializer
        self._key = key
        self._used = False

    def _enter(self) -> _Lane:
        if self._used:
            raise RuntimeError("this hold(...) was used already: write hold(key) for each block")
        self._used = True
        return self._serializer._enter(self._key)

    def __enter__(self) -> None:
        try:
            self._lane = self._enter()
        except Wait as wait:
            waiter = wait.waiter
        else:
            return
        self._lane = wait_sync(waiter, self._serializer._clock)

    def __exit__(self, *_exc: object) -> None:
        serializer = self._serializer
        # The collector may close a coroutine, and so end this block, while the lock is held.
        serializer._mutex.do(lambda: serializer._leave(self._key, self._lane))

    async def __aenter__(self) -> None:
        try:
            self._lane = self._enter()
        except Wait as wait:
            waiter = wait.waiter
        else:
            return
        self._lane = await wait_async(waiter, self._serializer._clock)

    async def __aexit__(self, *_exc: object) -> None:
        self.__exit__()


class _Turn:
    """Somebody who waits for a key. Its state changes under the serializer's lock only."""

    __slots__ = ("_key", "_lane", "_late", "_serializer", "_state", "_wake", "_why", "until")

    def __init__(self, serializer: Serializer, key: Hashable) -> None:
        self._serializer = serializer
        self._key = key
        self._state = "waiting"
        self._lane: _Lane = OrderedDict()
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
            else:  # it became free meanwhile
                self._lane = serializer._lanes[self._key] = OrderedDict()
                self.grant()

    def grant(self) -> bool:
        """Receive the key; False if nobody is there to use it."""
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


_Lane: TypeAlias = "OrderedDict[_Turn, None]"
"""Who waits for a key that somebody holds, first come first."""
