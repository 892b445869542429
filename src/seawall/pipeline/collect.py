"""Partial results: many sources read at once, and a batch that says what is missing.

    sensors = Collect({"S1": read_s1, "S2": read_s2, "S3": read_s3}, minimum=2, within=1.0)
    batch = await sensors.collect()
    batch.values        # {"S1": 20.4, "S3": 21.0}
    batch.degraded      # True
    batch.missing       # {"S2": Reading(state="unavailable", cause="TimedOut: ...", since=...)}

Promises:
- A collection takes no longer than `within`, whatever the sources do.
- A source that fails, hangs or is refused by its guard costs the others nothing.
- No value that is not from this collection is passed off as fresh: a last known one is `stale`, and
  has its age.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import SeawallError
from seawall.runtime.abandon import end
from seawall.runtime.functions import kind_of
from seawall.runtime.runners import sleep_async

T = TypeVar("T")

MOST_SOURCES: Final = 1000
LEAVING: Final = 0.1
"""Seconds for reads that were cancelled; what goes on all the same is abandoned."""

_log = logging.getLogger("seawall")


class ReadingState(StrEnum):
    """How one source answered."""

    OK = "ok"
    STALE = "stale"
    """It did not answer; this is what it said before."""
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What one source contributed to a batch."""

    state: ReadingState
    value: T | None = None
    age: float = 0.0
    """Seconds since the value was read."""
    cause: str = ""
    """Why it did not answer, in one line."""
    since: float = 0.0
    """For how many seconds it has not answered."""


@dataclass(frozen=True, slots=True)
class Collection(Generic[T]):
    """One batch of readings, by the names of their sources."""

    readings: Mapping[str, Reading[T]]
    at: float
    """When it was complete, by the clock of the `Collect`."""

    @property
    def values(self) -> dict[str, T]:
        """The values there are, stale ones too."""
        return {
            name: reading.value  # type: ignore[misc]
            for name, reading in self.readings.items()
            if reading.state is not ReadingState.UNAVAILABLE
        }

    @property
    def degraded(self) -> bool:
        """Whether anything is stale or missing."""
        return any(reading.state is not ReadingState.OK for reading in self.readings.values())

    @property
    def missing(self) -> dict[str, Reading[T]]:
        """The sources without any value."""
        return self._in_state(ReadingState.UNAVAILABLE)

    @property
    def stale(self) -> dict[str, Reading[T]]:
        """The sources whose last known value stands in."""
        return self._in_state(ReadingState.STALE)

    @property
    def fresh(self) -> int:
        """How many sources answered."""
        return len(self._in_state(ReadingState.OK))

    def _in_state(self, state: ReadingState) -> dict[str, Reading[T]]:
        return {name: one for name, one in self.readings.items() if one.state is state}


class TooFewSources(SeawallError):
    """Fewer sources answered than a collection needs."""

    reason = "too_few_sources"

    def __init__(self, message: str, collection: Collection[Any]) -> None:
        """Say so, and carry what there is."""
        super().__init__(message)
        self.collection = collection


class Collect(Generic[T]):
    """Reads many sources at once, each behind its own guard."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Awaitable[T]]],
        *,
        minimum: int,
        within: float,
        keep_last: float = 0.0,
        name: str = "sources",
        clock: Clock | None = None,
    ) -> None:
        """Read `sources`, async functions by name; decorate each with its guard.

        A collection needs `minimum` fresh or stale values, and is complete after `within` seconds
        at the latest. With `keep_last`, the last value of a source that does not answer stands in
        for so many seconds.
        """
        if not isinstance(sources, Mapping) or not sources or len(sources) > MOST_SOURCES:
            raise TypeError(
                f"Collect({sources!r:.80}): pass a mapping of names to async functions, at most"
                f" {MOST_SOURCES}"
            )
        for one, read in sources.items():
            if not isinstance(one, str) or not one:
                raise TypeError(f"Collect: {one!r}: write a name, such as 'S1'")
            if kind_of(read) != "async":
                raise TypeError(f"Collect: {one!r}: pass an async function, not {read!r}")
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: write a name, such as 'sensors'")
        self.name = name
        self.minimum = check.count("minimum", minimum, minimum=0)
        if self.minimum > len(sources):
            raise ValueError(f"minimum={minimum}: there are only {len(sources)} sources")
        self.within = check.seconds("within", within)
        self.keep_last = check.seconds("keep_last", keep_last, zero=True, infinite=True)
        self._sources = dict(sources)
        self._clock = current_clock() if clock is None else check_clock(clock)
        began = self._clock.now()
        self._last: dict[str, tuple[T, float]] = {}
        self._answered_at = dict.fromkeys(sources, began)
        self._causes: dict[str, str] = {}
        self._collections = self._degraded = self._too_few = 0
        registry.enter(self, "collect", name)

    async def collect(self) -> Collection[T]:
        """Read all sources; raise `TooFewSources` if less than `minimum` have a value."""
        tasks = {
            name: asyncio.create_task(_awaited(read), name=f"{self.name}: {name}")
            for name, read in self._sources.items()
        }
        try:
            await asyncio.wait(tasks.values(), timeout=self.within)
        finally:
            late = [task for task in tasks.values() if not task.done()]
            await end(late, LEAVING)
        now = self._clock.now()
        batch = Collection({name: self._reading(name, tasks[name], now) for name in tasks}, now)
        self._collections += 1
        self._degraded += batch.degraded
        if len(batch.values) < self.minimum:
            self._too_few += 1
            missing = ", ".join(sorted(batch.missing))
            raise TooFewSources(
                f"{len(batch.values)} of {len(tasks)} sources have a value, {self.minimum} are"
                f" needed; missing: {missing}",
                batch,
            )
        return batch

    async def every(self, seconds: float) -> AsyncIterator[Collection[T]]:
        """Yield a collection every `seconds`; one with too few sources is logged and left out."""
        pause = check.seconds("seconds", seconds)
        at = self._clock.now()
        while True:
            try:
                yield await self.collect()
            except TooFewSources as error:
                _log.error("collect %r: %s", self.name, error)
            at = max(at + pause, self._clock.now())
            await sleep_async(at - self._clock.now())

    def _reading(self, name: str, task: asyncio.Task[T], now: float) -> Reading[T]:
        if task.done() and not task.cancelled() and task.exception() is None:
            self._last[name] = (task.result(), now)
            self._note(name, now, "")
            return Reading(ReadingState.OK, task.result())
        failure = task.exception() if task.done() and not task.cancelled() else None
        cause = f"no answer within {self.within:g} s" if failure is None else described(failure)
        self._note(name, now, cause)
        since = now - self._answered_at[name]
        value, read_at = self._last.get(name, (None, now))
        if value is not None and now - read_at <= self.keep_last:
            return Reading(ReadingState.STALE, value, now - read_at, cause, since)
        return Reading(ReadingState.UNAVAILABLE, None, 0.0, cause, since)

    def _note(self, name: str, now: float, cause: str) -> None:
        """Keep how a source is, and log when it goes and when it comes back."""
        before = self._causes.get(name, "")
        if cause and not before:
            _log.warning("collect %r: source %r is missing: %s", self.name, name, cause)
        elif before and not cause:
            gone = now - self._answered_at[name]
            _log.warning("collect %r: source %r is back after %.3g s", self.name, name, gone)
        self._causes[name] = cause
        if not cause:
            self._answered_at[name] = now

    def snapshot(self) -> dict[str, Any]:
        """Return the counts, and which sources are missing, why, and since when."""
        now = self._clock.now()
        return {
            "sources": len(self._sources),
            "minimum": self.minimum,
            "collections": self._collections,
            "degraded": self._degraded,
            "too_few": self._too_few,
            "missing": [
                {"name": name, "cause": cause, "seconds": now - self._answered_at[name]}
                for name, cause in sorted(self._causes.items())
                if cause
            ],
        }


async def _awaited(read: Callable[[], Awaitable[T]]) -> T:
    return await read()
