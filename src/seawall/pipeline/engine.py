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
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described
from seawall.clock import SystemClock, current_clock, epoch_of
from seawall.events import ItemDied, PipelineEnded, SourceChanged, StageChanged
from seawall.events.bus import emit
from seawall.pipeline.counts import Counts, Rate
from seawall.pipeline.item import DeadLetter, Ended, Ending, Item
from seawall.pipeline.nodes import BLOCKED, Branch, InlineStage, Node, WorkerStage
from seawall.pipeline.source import Faulty
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from random import Random

    from seawall.pipeline.source import Source

READ_AT_ONCE: Final = 100
"""Items that are pulled from a source at once."""
MOST_UNREPORTED: Final = 1000
"""Ends that a source has not taken; with more of them it is not read."""
READABLE_AFTER: Final = 30.0
"""Seconds after which a source that waits for items, instead of failing, can be read again."""
ACK_WITHIN: Final = 5.0
"""Seconds for reporting the last ends to a source after a stop, and for closing it."""
TELL_AGAIN: Final = 0.2
"""Seconds after which a source is told again of ends that it did not take, in that time."""

FOR_GOOD: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    TypeError,
    ValueError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors of a source that stay: a mistake in the code or in its settings, not an outage."""

CANCEL_WITHIN: Final = 5.0
"""Seconds that functions have to end after they were cancelled; then they are abandoned."""

_SINK: Final = Ending.SINK
_RETURNED: Final = Ending.RETURNED

_log = logging.getLogger("seawall")


class Reader:
    """Reads one source as long as there is room, and reports to it how its items ended.

    A source that is slow to take the ends, or does not take them, holds up no other one.
    """

    def __init__(self, run: Run, source: Source[Any], first: Node) -> None:
        """Begin with nothing to report."""
        self.source = source
        self.acknowledged: list[Any] = []
        """Handles of items that have ended, and are not reported yet."""
        self.returned: list[Any] = []
        self.has_ends = False
        """Whether `ended` is set; cheaper to ask than the event."""
        self.ended = asyncio.Event()
        self.read = 0
        self._reported = asyncio.Event()
        self._unanswered = 0
        """Ends that the source is told of right now, and has not taken yet."""
        self._error = ""
        """Why the source cannot be read, or does not take ends, if it is so."""
        self._errors = 0
        self._failing_since = 0.0
        self._last_at: float | None = None
        """When the last item was read."""
        self._rate = Rate(run.now())
        self._waits = False
        """Whether it holds items for which there is no room."""
        self._run = run
        self._first = first
        self._is_interruptible = False
        """Whether it waits, and holds no item that is not accounted for."""
        self._is_halted = False
        self._over = asyncio.Event()
        """Set when the last ends are to be reported."""
        self._reading: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None

    @property
    def _fields(self) -> dict[str, str]:
        """The fields of a line in the log."""
        return {"seawall_pipeline": self._run.name, "seawall_source": self.source.name}

    @property
    def unreported(self) -> int:
        """How many items have ended without the source knowing of it."""
        return len(self.acknowledged) + len(self.returned) + self._unanswered

    def start(self) -> asyncio.Task[None]:
        """Begin to report, and to read; return the task that reads."""
        self._reporting = asyncio.create_task(self._report())
        self._reading = asyncio.create_task(self._read())
        return self._reading

    def finish(self) -> None:
        """Hear that all sources are over; of interest to whoever reads dead letters."""

    def halt(self) -> None:
        """Read no more; what was read goes on."""
        self._is_halted = True
        if self._is_interruptible and self._reading is not None:
            self._reading.cancel()

    # Reading

    async def _read(self) -> None:
        run, source, first, now = self._run, self.source, self._first, self._run.now
        queue = first if isinstance(first, WorkerStage) else None
        while not self._is_halted:
            room = READ_AT_ONCE if queue is None else queue.stage.capacity - queue.held
            self._is_interruptible = True
            while self.unreported >= MOST_UNREPORTED:
                self._reported.clear()
                await self._reported.wait()
            pulled = await self._pull(max(1, min(room, READ_AT_ONCE)))
            self._is_interruptible = False
            if not pulled:
                return
            at = now()
            items = [Item(value, source, handle, at) for value, handle in pulled]
            run.begin(items, self)
            self.read += len(items)
            self._last_at = at
            if Faulty in map(type, (value for value, _ in pulled)):
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

    async def _pull(self, most: int) -> Sequence[tuple[Any, Any]]:
        """Pull from the source, again and again with growing pauses while it cannot be read."""
        try:
            return await self.source.pull(most)
        except Exception as error:  # noqa: BLE001 - of the source; logged, and counted
            self._fail(error)
        pauses = BLOCKED.delays(self._run.random)
        while True:
            if self._is_halted:
                return ()  # the error is what the source has made of its cancellation
            await sleep_async(next(pauses))
            # An idle source may wait for its next item for hours: it can be read all the same.
            recovery = self._run.loop.call_later(READABLE_AFTER, self._recover)
            try:
                pulled = await self.source.pull(most)
            except Exception as error:  # noqa: BLE001 - of the source; logged, and counted
                if not self._error:
                    pauses = BLOCKED.delays(self._run.random)
                self._fail(error)
            else:
                self._recover()
                return pulled
            finally:
                recovery.cancel()

    def _fail(self, error: Exception) -> None:
        """Note that the source cannot be read; raise `error` if that is for good."""
        if isinstance(error, FOR_GOOD) or not getattr(self.source, "repeatable", True):
            raise error
        self._errors += 1
        cause = described(error)
        if not self._error:
            self._failing_since = self._run.now()
            self._tell_change("ok", "failing", cause, 0.0)
        self._error = cause

    def _recover(self) -> None:
        if self._error:
            self._error = ""
            self._tell_change("failing", "ok", "", self._run.now() - self._failing_since)

    def _tell_change(self, before: str, after: str, cause: str, duration: float) -> None:
        change = {"before": before, "after": after, "cause": cause, "duration": duration}
        emit(SourceChanged, self._run.name, source=self.source.name, **change)

    # Reporting

    async def _report(self) -> None:
        """Report ends to the source, many at once; return after the last one."""
        source = self.source
        while True:
            await self.ended.wait()
            self.ended.clear()
            self.has_ends = False
            is_over = self._over.is_set()
            acknowledged, self.acknowledged = self.acknowledged, []
            returned, self.returned = self.returned, []
            self._unanswered = len(acknowledged) + len(returned)
            await self._tell(source.acknowledge, acknowledged)
            self._unanswered = len(returned)
            await self._tell(source.give_back, returned)
            self._unanswered = 0
            self._reported.set()
            if is_over:
                return

    async def _tell(
        self, tell: Callable[[Sequence[Any]], Awaitable[None]], handles: list[Any]
    ) -> None:
        """Tell the source of these ends until it has taken them, or will never do so."""
        if not handles:
            return
        pauses = BLOCKED.delays(self._run.random)
        is_failing = False
        while True:
            try:
                await tell(handles)
            except FOR_GOOD:
                self._errors += 1
                _log.exception(
                    "pipeline %r: source %r will not take the ends of %d items; it may hand them"
                    " out again",
                    self._run.name,
                    self.source.name,
                    len(handles),
                    extra=self._fields,
                )
                return
            except (Exception, asyncio.CancelledError) as error:
                if _is_cancelled():
                    raise
                self._errors += 1
                if not is_failing:
                    _log.error(
                        "pipeline %r: source %r does not take the ends of items, and is told again:"
                        " %s",
                        self._run.name,
                        self.source.name,
                        described(error),
                        extra=self._fields,
                    )
                is_failing = True
                await self._pause(next(pauses))
            else:
                if is_failing:
                    _log.error(
                        "pipeline %r: source %r takes ends again",
                        self._run.name,
                        self.source.name,
                        extra=self._fields,
                    )
                return

    async def _pause(self, seconds: float) -> None:
        """Wait before a source is told again; not for long when the run is over."""
        if self._over.is_set():
            await sleep_async(min(seconds, TELL_AGAIN))
            return
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        """Report the last ends and close the source, both in time."""
        self._over.set()
        self.ended.set()
        if self._reporting is not None:
            try:
                await asyncio.wait([self._reporting], timeout=ACK_WITHIN)
            finally:
                await end([self._reporting], 0.0)
        if self.unreported:
            _log.error(
                "pipeline %r: source %r has not taken the ends of %d items; it may hand them out"
                " again",
                self._run.name,
                self.source.name,
                self.unreported,
                extra=self._fields,
            )
        closing = asyncio.ensure_future(self.source.close())
        try:
            done, _ = await asyncio.wait([closing], timeout=ACK_WITHIN)
            for task in done:
                task.result()
            if not done:
                _log.error("source %r does not close", self.source.name, extra=self._fields)
        except (Exception, asyncio.CancelledError):
            if _is_cancelled():
                raise
            _log.exception("source %r cannot be closed", self.source.name, extra=self._fields)
        finally:
            await end([closing], 0.0)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what was read, and what is known of the source; from any thread."""
        last_at, unreported, error = self._last_at, self.unreported, self._error
        if not error and unreported >= MOST_UNREPORTED:
            error = (
                f"it has not taken the ends of {unreported} items, and is read no more until then"
            )
        facts = source_snapshot(self.source)
        return {
            **facts,
            "read": self.read,
            "rate": self._rate.look(now, self.read),
            "waits": self._waits,
            "last_at": None if last_at is None else max(0.0, now - last_at),
            "unreported": unreported,
            "errors": self._errors,
            "error": error or facts["error"],
        }


def source_snapshot(source: Source[Any]) -> dict[str, Any]:
    """Return what a source says of itself, as one from which nothing was read."""
    facts: dict[str, Any] = {}
    look = getattr(source, "snapshot", None)
    if look is not None:
        try:
            facts = dict(look())
        except Exception as error:  # noqa: BLE001 - of the source: the rest is to be seen
            facts = {"snapshot_error": described(error)}
    unread = {"read": 0, "rate": 0.0, "waits": False, "last_at": None}
    own = {"error": str(facts.get("error", ""))}
    return {**facts, "name": source.name, **unread, "unreported": 0, "errors": 0, **own}


class Run:
    """One run of a pipeline."""

    def __init__(
        self,
        name: str,
        *,
        dead_letters: Callable[[DeadLetter], Awaitable[None]],
        rng: Random,
        on_end: Callable[[Item, Ended], None] | None = None,
        letter_id: Callable[[str], str] = str,
    ) -> None:
        """Begin without items; `nodes` and `readers` are set when the graph is built.

        `letter_id(id)` returns the id of a dead letter for an item whose source may use its id
        again.
        """
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time
        if type(self.loop).time is asyncio.BaseEventLoop.time:
            self.now = SystemClock.now  # the same, without a frame for each item
        self.random = rng.random
        self.nodes: list[WorkerStage | InlineStage | Branch] = []
        self.readers: list[Reader] = []
        self.replay: Reader | None = None
        """Reads dead letters that are replayed."""
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
        self.name = name
        self._dead_letters = dead_letters
        self._on_end = on_end
        self._letter_id = letter_id
        self._emptied = asyncio.Event()
        """Set when no item is in flight."""
        self._halt = asyncio.Event()
        self._end_at: float | None = None

    # Items

    def begin(self, items: list[Item], reader: Reader) -> None:
        """Account for items from the moment they were read."""
        self.read += len(items)
        self.live.update(dict.fromkeys(items, reader))

    def end(self, item: Item, ending: Ending, error: Exception | None = None) -> None:
        """Take an item out of the pipeline; its source will hear of it."""
        live = self.live
        reader = live.pop(item)
        self.ends[ending] += 1
        if ending is _RETURNED:
            reader.returned.append(item.handle)
        else:
            reader.acknowledged.append(item.handle)
            if item.lesser and ending is _SINK:
                self.degraded += 1
        if not reader.has_ends:
            reader.has_ends = True
            reader.ended.set()
        if not live:
            self._emptied.set()
        if self._on_end is not None:
            cause = "" if error is None else described(error)
            ended = Ended(item.value, ending, item.stage, cause, item.attempts, item.lesser)
            self._on_end(item, ended)

    @cached_property
    def may_lose_items(self) -> bool:
        """Whether a source may lose items to another process while they are here."""
        return any(hasattr(reader.source, "holds") for reader in self.readers)

    def failure_of(self, error: Exception | asyncio.CancelledError) -> Exception:
        """Return why a function has failed; raise CancelledError if its worker is to end."""
        if self.is_closing or _is_cancelled():
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
        keeps_id = getattr(item.source, "keeps_ids", False)
        id_ = item.id if keeps_id else self._letter_id(item.id)
        letter = DeadLetter(id_, item.value, stage, cause, item.attempts, at, item.lesser)
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
                    self._tell_of(stage, "flows", "blocked", item, why, 0.0)
                counts.waits_for = why
                await sleep_async(next(pauses))
        if counts.waits_for:
            counts.waits_for = ""
            blocked_for = self.now() - counts.blocked_at
            self._tell_of(stage, "blocked", "flows", item, "", blocked_for)
        counts.dead_letters += 1
        emit(ItemDied, self.name, item=id_, stage=stage, attempts=item.attempts, cause=cause)
        self.end(item, Ending.DEAD_LETTER, error)

    def _tell_of(
        self, stage: str, before: str, after: str, item: Item, cause: str, duration: float
    ) -> None:
        change = {"before": before, "after": after, "cause": cause, "duration": duration}
        emit(StageChanged, self.name, stage=stage, item=item.id, **change)

    def tell_end(self, result: str, cause: str = "") -> None:
        """Tell subscribers and the log how the run ended."""
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
        """Read no more, and finish until `end_at`; in this loop."""
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
            asyncio.create_task(node.work(state), name=f"{self.name}: {node.stage.name}")
            for node in self.nodes
            if isinstance(node, WorkerStage)
            for state in node.workers
        ]
        reading = [reader.start() for reader in self._all_readers]
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
                await asyncio.gather(*(reader.close() for reader in self._all_readers))
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
            if self.replay is not None and len(reading) == 1:
                self.replay.finish()  # its task is the one that is left
            done = await self._wait([*reading, *workers], halting)
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
    def _all_readers(self) -> list[Reader]:
        return self.readers if self.replay is None else [*self.readers, self.replay]

    @property
    def _is_late(self) -> bool:
        return self._end_at is not None and self.now() >= self._end_at

    def snapshot(self) -> dict[str, Any]:
        """Return the counts, the oldest item, the sources, and what each stage is doing.

        From any thread.
        """
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


def _is_cancelled() -> bool:
    """Return whether this task is to end; else a CancelledError comes from something it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled(what: str) -> RuntimeError:
    return RuntimeError(f"{what} was cancelled by something that it awaited, not by the pipeline")
