"""Runs a pipeline in one event loop: accounts for every item, reads, drains.

Nothing is read without room for it: a full stage makes the stage before it wait, and in the end the
source.

Promises:
- An item that was read is in exactly one place, and ends exactly once: read = sink + dead letters +
  dropped + returned + in flight, at every instant.
- After `stop`, everything that is not finished in time is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described, traceback_of
from seawall.clock import SystemClock, current_clock, epoch_of
from seawall.events import ItemDied, PipelineEnded, StageChanged
from seawall.events.bus import emit
from seawall.pipeline.counts import StageCounts
from seawall.pipeline.failures import BLOCKED
from seawall.pipeline.invocation import LOST, ItemLost
from seawall.pipeline.item import DeadLetter, Ending, Item, ItemResult
from seawall.pipeline.nodes import Branch, InlineStage, WorkerStage
from seawall.runtime.abandon import end, is_cancelled
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from random import Random

    from seawall.pipeline.dead_letters.replay import ReplayReader
    from seawall.pipeline.reader import SourceReader

CANCEL_WITHIN: Final = 5.0
"""Seconds that functions have to end after they were cancelled; then they are abandoned."""

_SINK: Final = Ending.SINK
_RETURNED: Final = Ending.RETURNED

_log = logging.getLogger("seawall")


class PipelineRun:
    """One run of a pipeline."""

    def __init__(
        self,
        name: str,
        *,
        dead_letters: Callable[[DeadLetter], Awaitable[None]],
        rng: Random,
        may_lose_items: bool = False,
        on_end: Callable[[Item, ItemResult], None] | None = None,
        letter_id: Callable[[str], str] = str,
    ) -> None:
        """Start without items; `nodes` and `readers` are set when the graph is built.

        `letter_id(id)` makes the id of a dead letter where a source may use the id again.
        """
        self.may_lose_items = may_lose_items
        """Whether a source may lose items to another process while they are here."""
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        if type(self.loop).time is asyncio.BaseEventLoop.time:
            self.now = SystemClock.now  # the same, without a frame for each item
        self.random = rng.random
        self.nodes: list[WorkerStage | InlineStage | Branch] = []
        self.readers: list[SourceReader] = []
        self.replay: ReplayReader | None = None
        self.live: dict[Item, SourceReader] = {}
        """All items in flight with where they came from, the oldest first."""
        self.read = 0
        self.ends = dict.fromkeys(Ending, 0)
        self.degraded = 0
        """Degraded items that ended in a sink."""
        self.is_ending = False
        """Whether no more items will be read."""
        self.is_closing = False
        """Whether nothing is begun or sent on any more: what is not finished is given back."""
        self._failure: Exception | None = None
        self.name = name
        self._dead_letters = dead_letters
        self._on_end = on_end
        self._letter_id = letter_id
        self._emptied = asyncio.Event()
        self._halt = asyncio.Event()
        self._end_at: float | None = None

    # Items

    def begin(self, items: list[Item], reader: SourceReader) -> None:
        """Account for items from the moment they were read."""
        self.read += len(items)
        self.live.update(dict.fromkeys(items, reader))

    def end(self, item: Item, ending: Ending = _SINK, error: Exception | None = None) -> None:
        """Take an item out of the pipeline, and have its end reported to its source."""
        live = self.live
        reader = live.pop(item)
        self.ends[ending] += 1
        if ending is _RETURNED:
            reader.returned.append(item.handle)
        else:
            reader.acknowledged.append(item.handle)
            if item.degradations and ending is _SINK:
                self.degraded += 1
        if not reader.has_ends:
            reader.has_ends = True
            reader.ended.set()
        if not live:
            self._emptied.set()
        if self._on_end is not None:
            cause = "" if error is None else described(error)
            ended = ItemResult(
                item.value, ending, item.stage, cause, item.attempts, item.degradations
            )
            self._on_end(item, ended)

    def end_many(self, items: list[Item]) -> None:
        """Take items out of the pipeline that a sink has; `end` does the same for one of them."""
        if self._on_end is not None:
            for item in items:
                self.end(item)
            return
        live = self.live
        self.ends[_SINK] += len(items)
        for item in items:
            live.pop(item).acknowledged.append(item.handle)
            if item.degradations:
                self.degraded += 1
        for reader in self._all_readers:
            if reader.acknowledged and not reader.has_ends:
                reader.has_ends = True
                reader.ended.set()
        if not live:
            self._emptied.set()

    def failure_of(self, error: Exception | asyncio.CancelledError | ItemLost) -> Exception:
        """Return why a function has failed; raise CancelledError if its worker is to end."""
        if self.is_closing or is_cancelled():
            raise asyncio.CancelledError
        if isinstance(error, ItemLost):
            return LOST
        if isinstance(error, Exception):
            return error
        return _cancelled("the function")

    async def bury(self, item: Item, stage: str, counts: StageCounts, error: Exception) -> None:
        """Make an item a dead letter of `stage`, which waits until the letter is stored."""
        item.stage = stage
        clock = current_clock()
        at = clock.now() - epoch_of(clock)
        cause = described(error)
        id_ = item.id if getattr(item.source, "keeps_ids", False) else self._letter_id(item.id)
        letter = DeadLetter(
            id_, item.value, stage, cause, item.attempts, at, item.degradations, traceback_of(error)
        )
        pauses = BLOCKED.delays(self.random)
        while True:
            try:
                await self._dead_letters(letter)
                break
            except (Exception, asyncio.CancelledError) as refusal:  # noqa: BLE001 - of the user's function; logged
                failure = self.failure_of(refusal)
                why = f"a dead letter cannot be stored: {described(failure)}"
                if not counts.waits_for:
                    counts.blocked_at = self.now()
                    self._emit_change(stage, "flows", "blocked", item, why, 0.0)
                counts.waits_for = why
                await sleep_async(next(pauses))
        if counts.waits_for:
            counts.waits_for = ""
            blocked_for = self.now() - counts.blocked_at
            self._emit_change(stage, "blocked", "flows", item, "", blocked_for)
        counts.dead_letters += 1
        emit(ItemDied, self.name, item=id_, stage=stage, attempts=item.attempts, cause=cause)
        self.end(item, Ending.DEAD_LETTER, error)

    def _emit_change(
        self, stage: str, before: str, after: str, item: Item, cause: str, duration: float
    ) -> None:
        change = {"before": before, "after": after, "cause": cause, "duration": duration}
        emit(StageChanged, self.name, stage=stage, item=item.id, **change)

    def emit_end(self, result: str, cause: str = "") -> None:
        """Emit the event of how the run ended."""
        emit(
            PipelineEnded,
            self.name,
            result=result,
            read=self.read,
            stored=self.ends[Ending.SINK],
            dead_letters=self.ends[Ending.DEAD_LETTER],
            dropped=self.ends[Ending.DROPPED],
            returned=self.ends[Ending.RETURNED],
            cause=cause,
        )

    def stop_because(self, item: Item, error: Exception) -> None:
        """Stop the whole pipeline; the item is given back with all others."""
        if self._failure is None:
            self._failure = error
            error.add_note(f"pipeline {self.name!r} stopped: stage {item.stage!r}, item {item.id}")
        self.stop(self.now())

    # Running

    def stop(self, end_at: float) -> None:
        """Stop reading, and finish until `end_at`; in this loop."""
        if self._end_at is None:
            _log.warning(
                "pipeline %r stops, within %.3g s; in flight: %d",
                self.name,
                max(0.0, end_at - self.now()),
                len(self.live),
                extra={"seawall_pipeline": self.name},
            )
        self._end_at = end_at if self._end_at is None else min(self._end_at, end_at)
        self._halt.set()

    async def run(self) -> bool:
        """Run until all sources are over and everything has ended, or until stopped.

        Return whether it was not stopped.
        """
        workers = [
            asyncio.create_task(worker.work(), name=f"{self.name}: {node.stage.name}")
            for node in self.nodes
            if isinstance(node, WorkerStage)
            for worker in node.workers
        ]
        reading = [reader.start() for reader in self._all_readers]
        halting = asyncio.create_task(self._halt.wait())
        tasks: list[asyncio.Task[Any]] = [*reading, *workers, halting]
        try:
            await self._wait_for(set(reading), workers, halting)
            self.is_ending = True
            for node in self.nodes:
                if isinstance(node, WorkerStage):
                    node.queue.wake_all()
            if self.live:
                self._emptied.clear()
                emptied = asyncio.create_task(self._emptied.wait())
                tasks.append(emptied)
                await self._wait_for({emptied}, workers, halting)
        finally:
            self.is_closing = True
            try:
                await end(tasks, CANCEL_WITHIN)
            finally:  # also if it is cancelled a second time
                for task in tasks:
                    if task.done() and not task.cancelled():
                        task.exception()  # the first one is raised already
                for item in list(self.live):
                    self.end(item, Ending.RETURNED)
                await asyncio.gather(*(reader.close() for reader in self._all_readers))
        if self._failure is not None:
            raise self._failure
        return not self._halt.is_set()

    async def _wait_for(
        self,
        awaited: set[asyncio.Task[Any]],
        workers: list[asyncio.Task[None]],
        halting: asyncio.Task[bool],
    ) -> None:
        """Wait for all of `awaited`, or until the time after a stop is over; raise what broke."""
        while awaited and not self._is_late:
            if self.replay is not None and len(awaited) == 1:
                self.replay.finish()  # its task is the one that is left
            left = None if self._end_at is None else max(0.0, self._end_at - self.now())
            tasks = [*awaited, *workers, *([] if halting.done() else [halting])]
            done, _ = await asyncio.wait(tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if halting in done:
                for reader in self._all_readers:
                    reader.halt()
            for task in done - {halting}:
                if not task.cancelled():
                    task.result()
                elif task in workers:
                    raise _cancelled("a worker")
                elif not halting.done():
                    raise _cancelled("a source")
            awaited -= done

    @property
    def _all_readers(self) -> list[SourceReader]:
        return self.readers if self.replay is None else [*self.readers, self.replay]

    @property
    def _is_late(self) -> bool:
        return self._end_at is not None and self.now() >= self._end_at

    def snapshot(self) -> dict[str, Any]:
        """Return the counts, the oldest item, the sources and the stages; from any thread."""
        now = self.now()
        oldest = next(iter(list(self.live)), None)
        # In this order, and without `live`: another thread may look in the middle of a change.
        ends = dict(self.ends)
        read = self.read
        return {
            "read": read,
            "in_flight": read - sum(ends.values()),
            **{str(ending): number for ending, number in ends.items()},
            "degraded": self.degraded,
            "replayed": 0 if self.replay is None else self.replay.read,
            "oldest": None
            if oldest is None
            else {"item": oldest.id, "age": now - oldest.read_at, "stage": oldest.stage},
            "sources": [reader.snapshot(now) for reader in self.readers],
            "stages": [node.snapshot(now) for node in self.nodes],
        }


def _cancelled(what: str) -> RuntimeError:
    return RuntimeError(f"{what} was cancelled by something that it awaited, not by the pipeline")
