"""Runs a pipeline in one event loop: reads, accounts for every item, reports ends, drains.

Nothing is read that has no place: whoever brings an item to a full stage waits, and so does the
source in the end.

Promises:
- An item that was read is in exactly one place, and ends exactly once: read = sink + dead letters +
  dropped + returned + in flight, at every instant.
- The source hears of an end only after it has happened.
- After `stop`, everything that is not finished in time is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described
from seawall.clock import current_clock, epoch_of
from seawall.pipeline.item import DeadLetter, Ended, Ending, Item
from seawall.pipeline.nodes import BLOCKED, Branch, Counts, InlineStage, Node, Rate, WorkerStage
from seawall.pipeline.source import Faulty
from seawall.runtime.abandon import end
from seawall.runtime.runners import sleep_async

if TYPE_CHECKING:
    from random import Random

    from seawall.pipeline.source import Source

READ_AT_ONCE: Final = 100
"""Items that are pulled from a source at once."""
ACK_WITHIN: Final = 5.0
"""Seconds for reporting the last ends to the sources after a stop."""

CANCEL_WITHIN: Final = 5.0
"""Seconds that functions have to end after they were cancelled; then they are abandoned."""

_log = logging.getLogger("seawall")


class Reader:
    """Reads one source as long as there is room, and reports to it how its items ended."""

    def __init__(self, run: Run, source: Source[Any], first: Node) -> None:
        """Begin with nothing to report."""
        self.source = source
        self.acknowledged: list[Any] = []
        """Handles of items that have ended, and are not reported yet."""
        self.returned: list[Any] = []
        self.read = 0
        self.error = ""
        """Why the source cannot be read, if it cannot."""
        self._last_at: float | None = None
        """When the last item was read."""
        self._rate = Rate(run.now())
        self._waits = False
        """Whether it holds items for which there is no room."""
        self._run = run
        self._first = first
        self._is_pulling = False
        self._is_halted = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin to read."""
        self._task = asyncio.create_task(self._read())
        return self._task

    def halt(self) -> None:
        """Read no more; what was read goes on."""
        self._is_halted = True
        if self._is_pulling and self._task is not None:
            self._task.cancel()

    async def _read(self) -> None:
        run, source, first, now = self._run, self.source, self._first, self._run.now
        queue = first if isinstance(first, WorkerStage) else None
        while not self._is_halted:
            room = READ_AT_ONCE if queue is None else queue.stage.capacity - queue.held
            self._is_pulling = True
            pulled = await source.pull(max(1, min(room, READ_AT_ONCE)))
            self._is_pulling = False
            if not pulled:
                return
            at = now()
            items = [Item(value, source, handle, at) for value, handle in pulled]
            run.begin(items, self)
            self.read += len(items)
            self._last_at = at
            if any(type(item.value) is Faulty for item in items):
                items = await self._set_aside(items)
            if queue is not None and queue.take_many(items, at):
                await sleep_async(0)
                continue
            for item in items:
                pending = first.take(item, at)
                if pending is not None:
                    self._waits = True
                    await pending
                    self._waits = False
            if queue is None:
                await sleep_async(0)

    async def _set_aside(self, items: list[Item]) -> list[Item]:
        """Make dead letters of faulty items; return the others."""
        sound, counts = [], Counts()
        for item in items:
            if isinstance(item.value, Faulty):
                item.value, error, item.attempts = item.value
                await self._run.bury(item, self.source.name, counts, error)
            else:
                sound.append(item)
        return sound

    async def report(self) -> None:
        """Tell the source of the ends since the last time."""
        for tell, handles in (
            (self.source.acknowledge, self._taken("acknowledged")),
            (self.source.give_back, self._taken("returned")),
        ):
            if not handles:
                continue
            try:
                await tell(handles)
            except Exception:  # noqa: BLE001 - logged, with its traceback
                _log.exception(
                    "source %r did not take the ends of %d items; it may hand them out again",
                    self.source.name,
                    len(handles),
                )

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what was read, and what is known of the source; from any thread."""
        last_at = self._last_at
        return {
            **source_snapshot(self.source),
            "read": self.read,
            "rate": self._rate.look(now, self.read),
            "waits": self._waits,
            "last_at": None if last_at is None else max(0.0, now - last_at),
            "error": self.error,
        }

    def _taken(self, name: str) -> list[Any]:
        handles: list[Any] = getattr(self, name)
        setattr(self, name, [])
        return handles


def source_snapshot(source: Source[Any]) -> dict[str, Any]:
    """Return what a source says of itself, as one from which nothing was read."""
    facts: dict[str, Any] = {}
    look = getattr(source, "snapshot", None)
    if look is not None:
        try:
            facts = dict(look())
        except Exception as error:  # noqa: BLE001 - of the source: the rest is to be seen
            facts = {"snapshot_error": described(error)}
    unread = {"read": 0, "rate": 0.0, "waits": False, "last_at": None, "error": ""}
    return {**facts, "name": source.name, **unread}


class Run:
    """One run of a pipeline."""

    def __init__(
        self,
        name: str,
        *,
        dead_letters: Callable[[DeadLetter], Awaitable[None]],
        rng: Random,
        on_end: Callable[[Ended], None] | None = None,
    ) -> None:
        """Begin without items; `nodes` and `readers` are set when the graph is built."""
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        self.random = rng.random
        self.nodes: list[WorkerStage | InlineStage | Branch] = []
        self.readers: list[Reader] = []
        self.live: dict[Item, Reader] = {}
        """All items in flight with where they came from, the oldest first."""
        self.read = 0
        self.ends = dict.fromkeys(Ending, 0)
        self.degraded = 0
        """Items that ended in a sink as lesser ones."""
        self.is_ending = False
        """Whether no more items will be read."""
        self.is_closing = False
        """Whether what is not finished is given back: nothing is begun or sent on any more."""
        self._failure: Exception | None = None
        self._name = name
        self._dead_letters = dead_letters
        self._on_end = on_end
        self._ended = asyncio.Event()
        """Set when there are ends to report; `_has_ends` says the same without a call."""
        self._has_ends = False
        self._emptied = asyncio.Event()
        """Set when no item is in flight."""
        self._halt = asyncio.Event()
        self._end_at: float | None = None
        self._is_over = False

    # Items

    def begin(self, items: list[Item], reader: Reader) -> None:
        """Account for items from the moment they were read."""
        self.read += len(items)
        live = self.live
        for item in items:
            live[item] = reader

    def end(self, item: Item, ending: Ending, error: Exception | None = None) -> None:
        """Take an item out of the pipeline; its source will hear of it."""
        live = self.live
        reader = live.pop(item)
        self.ends[ending] += 1
        if ending is Ending.RETURNED:
            reader.returned.append(item.handle)
        else:
            reader.acknowledged.append(item.handle)
            if item.lesser and ending is Ending.SINK:
                self.degraded += 1
        if not self._has_ends:
            self._has_ends = True
            self._ended.set()
        if not live:
            self._emptied.set()
        if self._on_end is not None:
            cause = "" if error is None else described(error)
            self._on_end(Ended(item.value, ending, item.stage, cause, item.attempts, item.lesser))

    @property
    def may_lose_items(self) -> bool:
        """Whether a source may lose items to another process while they are here."""
        return any(hasattr(reader.source, "holds") for reader in self.readers)

    def failure_of(self, error: Exception | asyncio.CancelledError) -> Exception:
        """Return why a function has failed; raise CancelledError if its worker is to end."""
        task = asyncio.current_task()
        if self.is_closing or (task is not None and task.cancelling()):
            raise asyncio.CancelledError
        if isinstance(error, Exception):
            return error
        return _cancelled("the function")

    async def bury(self, item: Item, stage: str, counts: Counts, error: Exception) -> None:
        """Make an item a dead letter of `stage`; it ends when that is stored.

        While it cannot be stored the stage waits, and so does everything before it: nothing is
        lost.
        """
        item.stage = stage
        clock = current_clock()
        at = clock.now() - epoch_of(clock)
        cause = described(error)
        letter = DeadLetter(item.id, item.value, stage, cause, item.attempts, at, item.lesser)
        pauses = BLOCKED.delays(self.random)
        while True:
            try:
                await self._dead_letters(letter)
                break
            except Exception as failure:  # noqa: BLE001 - of the user's function; logged
                counts.waits_for = f"a dead letter cannot be stored: {described(failure)}"
                _log.error(
                    "pipeline %r waits: a dead letter of stage %r cannot be stored: %s",
                    self._name,
                    stage,
                    described(failure),
                )
                await sleep_async(next(pauses))
        counts.waits_for = ""
        counts.dead_letters += 1
        _log.warning(
            "pipeline %r: item %s is a dead letter of stage %r, attempts: %d, cause: %s",
            self._name,
            item.id,
            stage,
            item.attempts,
            cause,
            extra={"seawall_item": item.id, "seawall_stage": stage},
        )
        self.end(item, Ending.DEAD_LETTER, error)

    def stop_because(self, item: Item, error: Exception) -> None:
        """Stop the whole pipeline; the item is given back with all others."""
        if self._failure is None:
            self._failure = error
            error.add_note(f"pipeline {self._name!r} stopped: stage {item.stage!r}, item {item.id}")
        self.stop(self.now())

    # Running

    def stop(self, end_at: float) -> None:
        """Read no more, and finish until `end_at`; in this loop."""
        if self._end_at is None:
            _log.warning(
                "pipeline %r stops, within %.3g s; in flight: %d",
                self._name,
                max(0.0, end_at - self.now()),
                len(self.live),
            )
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)
        self._halt.set()

    async def run(self) -> bool:
        """Run until all sources are over and everything has ended, or until stopped.

        Return whether it was not stopped.
        """
        workers = [
            asyncio.create_task(node.work(state), name=f"{self._name}: {node.stage.name}")
            for node in self.nodes
            if isinstance(node, WorkerStage)
            for state in node.workers
        ]
        reading = [reader.start() for reader in self.readers]
        reporting = asyncio.create_task(self._report())
        halting = asyncio.create_task(self._halt.wait())
        try:
            await self._read_all(set(reading), workers, halting)
            self.is_ending = True
            for node in self.nodes:
                if isinstance(node, WorkerStage):
                    node.wake_all()
            await self._finish(workers, halting)
        finally:
            self.is_closing = True
            tasks = [*reading, *workers, halting]
            try:
                await end(tasks, CANCEL_WITHIN)
            finally:  # also if it is cancelled a second time
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.exception()  # the first one is raised already
                for item in list(self.live):
                    self.end(item, Ending.RETURNED)
                await self._wind_up(reporting)
        if self._failure is not None:
            raise self._failure
        return not self._halt.is_set()

    async def _read_all(
        self,
        reading: set[asyncio.Task[None]],
        workers: list[asyncio.Task[None]],
        halting: asyncio.Task[bool],
    ) -> None:
        """Wait until all sources are over, or until the time after a stop is; raise what broke."""
        while reading and not self._is_late:
            done = await self._wait([*reading, *workers], halting)
            if halting in done:
                for reader in self.readers:
                    reader.halt()
            for task in done - {halting}:
                if not task.cancelled():
                    task.result()
                elif task in workers:
                    raise _cancelled("a worker")
                elif not halting.done():
                    raise _cancelled("a source")
            reading -= done

    async def _finish(self, workers: list[asyncio.Task[None]], halting: asyncio.Task[bool]) -> None:
        """Wait until everything has ended, or until the time for that is over."""
        while self.live and not self._is_late:
            self._emptied.clear()
            emptied = asyncio.ensure_future(self._emptied.wait())
            try:
                done = await self._wait([emptied, *workers], halting)
            finally:
                emptied.cancel()
            for task in done - {emptied, halting}:
                if task.cancelled():
                    raise _cancelled("a worker")
                task.result()

    async def _wait(
        self, tasks: list[asyncio.Task[Any]], halting: asyncio.Task[bool]
    ) -> set[asyncio.Task[Any]]:
        left = None if self._end_at is None else max(0.0, self._end_at - self.now())
        if not halting.done():
            tasks.append(halting)
        done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        return done

    @property
    def _is_late(self) -> bool:
        return self._end_at is not None and self.now() >= self._end_at

    async def _report(self) -> None:
        """Report ends to the sources, many at once; return after the last one."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            self._has_ends = False
            is_over = self._is_over
            for reader in self.readers:
                await reader.report()
            if is_over:
                return

    async def _wind_up(self, reporting: asyncio.Task[None]) -> None:
        """Report the last ends, and close the sources."""
        self._is_over = True
        self._ended.set()
        try:
            await asyncio.wait([reporting], timeout=ACK_WITHIN)
        finally:
            reporting.cancel()
        for reader in self.readers:
            try:
                await reader.source.close()
            except Exception:  # noqa: BLE001 - logged, with its traceback
                _log.exception("source %r cannot be closed", reader.source.name)

    def snapshot(self) -> dict[str, Any]:
        """Return the counts, the oldest item, the sources, and what each stage is doing.

        From any thread.
        """
        now = self.now()
        oldest = next(iter(self.live), None)
        return {
            "read": self.read,
            "in_flight": len(self.live),
            **{str(ending): number for ending, number in self.ends.items()},
            "degraded": self.degraded,
            "oldest": None
            if oldest is None
            else {"item": oldest.id, "age": now - oldest.read_at, "stage": oldest.stage},
            "sources": [reader.snapshot(now) for reader in self.readers],
            "stages": [node.snapshot(now) for node in self.nodes],
        }


def _cancelled(what: str) -> RuntimeError:
    return RuntimeError(f"{what} was cancelled by something that it awaited, not by the pipeline")
