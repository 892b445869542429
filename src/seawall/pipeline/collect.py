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
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Generic, Literal, TypeVar

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.clock import current_clock
from seawall.errors import Rejected, SeawallError
from seawall.events import CollectionChanged, SourceChanged
from seawall.events.bus import emit
from seawall.pipeline.source import IterableSource, checked_name
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async
from seawall.runtime.functions import kind_of

T = TypeVar("T")

MOST_SOURCES: Final = 1000

WhenTooFew = Literal["skip", "pass", "stop"]


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
            checked_name(one, "Collect: source", "S1")
            if kind_of(read) != "async":
                raise TypeError(f"Collect: {one!r}: pass an async function, not {read!r}")
        self.name = checked_name(name, example="sensors")
        self.minimum = check.count("minimum", minimum, minimum=0)
        if self.minimum > len(sources):
            raise ValueError(f"minimum={minimum}: there are only {len(sources)} sources")
        self.within = check.seconds("within", within)
        self.keep_last = check.seconds("keep_last", keep_last, zero=True, infinite=True)
        self._sources = dict(sources)
        self.clock = current_clock()
        began = self.clock.now()
        self._last: dict[str, tuple[T, float]] = {}
        self._answered_at = dict.fromkeys(sources, began)
        self._causes: dict[str, str] = {}
        self._late: dict[str, asyncio.Task[T]] = {}
        """Reads that were cancelled, and may not have ended yet."""
        self._collections = self._degraded = self._too_few = 0
        self._is_short = False
        """Whether the last collection had too few values."""
        registry.enter(self, "collect", name)

    async def collect(self) -> Collection[T]:
        """Read all sources; raise `TooFewSources` if less than `minimum` have a value.

        A source whose last read goes on, although it was cancelled, is not read again before that
        one has ended.
        """
        tasks = {
            name: asyncio.create_task(_awaited(read), name=f"{self.name}: {name}")
            for name, read in self._sources.items()
            if not self._still_runs(name)
        }
        for task in tasks.values():
            task.add_done_callback(_retrieve)
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=self.within)
        finally:
            late = {name: task for name, task in tasks.items() if not task.done()}
            self._late.update(late)
            await end(late.values(), 0.0)
        now = self.clock.now()
        readings = {name: self._reading(name, tasks.get(name), now) for name in self._sources}
        batch = Collection(readings, now)
        self._collections += 1
        self._degraded += batch.degraded
        missing = ", ".join(sorted(batch.missing))
        is_short = len(batch.values) < self.minimum
        if is_short != self._is_short:
            self._is_short = is_short
            before, after = ("enough", "too_few") if is_short else ("too_few", "enough")
            numbers = {"values": len(batch.values), "minimum": self.minimum, "missing": missing}
            emit(CollectionChanged, self.name, before=before, after=after, **numbers)
        if is_short:
            self._too_few += 1
            raise TooFewSources(
                f"{len(batch.values)} of {len(readings)} sources have a value, {self.minimum} are"
                f" needed; missing: {missing}",
                batch,
            )
        return batch

    def every(self, seconds: float, *, too_few: WhenTooFew = "skip") -> CollectSource[T]:
        """Return a source of collections, one every `seconds`, for `Pipeline.read`.

        One with less than `minimum` values is left out ("skip"), is an item all the same ("pass"),
        or ends the source with `TooFewSources` ("stop"). The log says when it begins to have too
        few, and when it has enough again.
        """
        if too_few not in ("skip", "pass", "stop"):
            raise ValueError(f"too_few={too_few!r}: write 'skip', 'pass' or 'stop'")
        return CollectSource(self, check.seconds("seconds", seconds), too_few)

    def _reading(self, name: str, task: asyncio.Task[T] | None, now: float) -> Reading[T]:
        if task is None:
            cause = f"a read that was cancelled after {self.within:g} s has not ended"
        elif not task.done() or task.cancelled():
            cause = f"no answer within {self.within:g} s"
        else:
            failure = task.exception()
            if failure is None:
                self._last[name] = (task.result(), now)
                self._note(name, now, "")
                return Reading(ReadingState.OK, task.result())
            cause = described(failure)
            if isinstance(failure, Rejected):
                cause = self._causes.get(name) or cause  # why it failed, not that it is not asked
        self._note(name, now, cause)
        since = now - self._answered_at[name]
        if self._is_kept(name, now):
            value, read_at = self._last[name]
            return Reading(ReadingState.STALE, value, now - read_at, cause, since)
        return Reading(ReadingState.UNAVAILABLE, None, 0.0, cause, since)

    def _still_runs(self, name: str) -> bool:
        """Return whether a read that was cancelled has not ended, in this event loop."""
        task, loop = self._late.get(name), asyncio.get_running_loop()
        return task is not None and not task.done() and task.get_loop() is loop

    def _is_kept(self, name: str, now: float) -> bool:
        """Return whether the last value of a source may stand in."""
        return name in self._last and now - self._last[name][1] <= self.keep_last

    def _note(self, name: str, now: float, cause: str) -> None:
        """Keep the state of a source, and report when it fails and when it comes back."""
        was_missing = bool(self._causes.get(name))
        if bool(cause) != was_missing:
            before, after = ("missing", "ok") if was_missing else ("ok", "missing")
            gone = now - self._answered_at[name]
            change = {"before": before, "after": after, "cause": cause, "duration": gone}
            emit(SourceChanged, self.name, source=name, **change)
        self._causes[name] = cause
        if not cause:
            self._answered_at[name] = now

    def snapshot(self) -> dict[str, Any]:
        """Return the counts, and which sources are missing, why, and since when."""
        now = self.clock.now()
        return {
            "sources": len(self._sources),
            "names": list(self._sources),
            "minimum": self.minimum,
            "collections": self._collections,
            "degraded": self._degraded,
            "too_few": self._too_few,
            "is_short": self._is_short,
            "missing": [
                {
                    "source": name,
                    "state": "stale" if self._is_kept(name, now) else "unavailable",
                    "since": now - self._answered_at[name],
                    "cause": cause,
                }
                for name, cause in sorted(self._causes.items())
                if cause
            ],
        }


class CollectSource(IterableSource[Collection[T]]):
    """The collections of a `Collect`, one after the other; see `Collect.every`."""

    def __init__(self, collect: Collect[T], seconds: float, too_few: WhenTooFew) -> None:
        super().__init__(self._collected(), name=collect.name)
        self._collect = collect
        self._seconds = seconds
        self._too_few = too_few

    def __aiter__(self) -> AsyncIterator[Collection[T]]:
        """Return the collections without a pipeline."""
        return self._collected()

    async def close(self) -> None:
        """Collect no more; another run begins anew."""
        await super().close()
        self._begin(self._collected())

    def snapshot(self) -> dict[str, Any]:
        """Return what `Collect.snapshot` does, with its kind."""
        return {"kind": "collect", **self._collect.snapshot()}

    async def _collected(self) -> AsyncIterator[Collection[T]]:
        collect, clock = self._collect, self._collect.clock
        at = clock.now()
        while True:
            batch: Collection[T] | None
            try:
                batch = await collect.collect()
            except TooFewSources as error:
                if self._too_few == "stop":
                    raise
                batch = error.collection if self._too_few == "pass" else None
            if batch is not None:
                yield batch
            at = max(at + self._seconds, clock.now())
            await sleep_async(at - clock.now())


async def _awaited(read: Callable[[], Awaitable[T]]) -> T:
    return await read()


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at an error that may never be looked at, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
