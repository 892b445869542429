"""Reads one source as long as there is room, and reports to it how its items ended.

Promises: an end is reported only after it has happened. A source that takes ends slowly, or not at
all, delays no other source.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from seawall._failures import described
from seawall.events import SourceChanged
from seawall.events.bus import emit
from seawall.pipeline.counts import StageCounts, Throughput
from seawall.pipeline.failures import BLOCKED
from seawall.pipeline.item import Item
from seawall.pipeline.nodes import Node
from seawall.pipeline.source import FaultyItem, wait_within
from seawall.pipeline.stage_queue import StageQueue
from seawall.runtime.abandon import end, is_cancelled
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from seawall.pipeline.run import PipelineRun
    from seawall.pipeline.source import Source

READ_AT_ONCE: Final = 100
"""Maximum number of items that one `pull` asks for."""
MOST_UNREPORTED: Final = 1000
"""Ends that a source has not taken; with more of them it is not read."""
READABLE_AFTER: Final = 30.0
"""Seconds after which a source that waits for items, instead of failing, can be read again."""
ACK_WITHIN: Final = 5.0
"""Seconds for reporting the last ends to a source after a stop, and for closing it."""
REPORT_AGAIN: Final = 0.2
"""Seconds after which ends that a source did not take are reported to it again."""

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

_value_of: Final = itemgetter(0)

_log = logging.getLogger("seawall")


class SourceReader:
    """See the module's docstring."""

    def __init__(self, run: PipelineRun, source: Source[Any], first: Node) -> None:
        self.source = source
        self.acknowledged: list[Any] = []
        """Handles of items that have ended, and are not reported yet."""
        self.returned: list[Any] = []
        self.has_ends = False
        """Whether `ended` is set; cheaper to read than the event."""
        self.ended = asyncio.Event()
        self.read = 0
        self._reported = asyncio.Event()
        self._unanswered = 0
        """Ends that are being reported to the source, which has not taken them yet."""
        self._error = ""
        """Why the source cannot be read, or does not take ends, if it is so."""
        self._errors = 0
        self._failing_since = 0.0
        self._last_at: float | None = None
        """When the last item was read."""
        self._rate = Throughput(run.now())
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
        self._log_fields = {"seawall_pipeline": run.name, "seawall_source": source.name}

    @property
    def unreported(self) -> int:
        """Number of ends that the source has not taken yet."""
        return len(self.acknowledged) + len(self.returned) + self._unanswered

    def start(self) -> asyncio.Task[None]:
        """Begin to report, and to read; return the task that reads."""
        self._reporting = asyncio.create_task(self._report())
        self._reading = asyncio.create_task(self._read())
        return self._reading

    def halt(self) -> None:
        """Read no more; what was read goes on."""
        self._is_halted = True
        if self._is_interruptible and self._reading is not None:
            self._reading.cancel()

    # Reading

    async def _read(self) -> None:
        run, source, first, now = self._run, self.source, self._first, self._run.now
        queue = first if isinstance(first, StageQueue) else None
        while not self._is_halted:
            room = READ_AT_ONCE if queue is None else queue.free
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
            if FaultyItem in map(type, map(_value_of, pulled)):
                items = await self._set_aside(items)
            if queue is not None and len(items) <= queue.room:
                queue.take_many(items)
                await sleep_async(0)
                continue
            for item in items:
                pending = first.take(item)
                if pending is not None:
                    self._waits = True
                    await pending
                    self._waits = False
            if queue is None:
                await sleep_async(0)

    async def _set_aside(self, items: list[Item]) -> list[Item]:
        """Make dead letters of faulty items; return the others."""
        sound, counts = [], StageCounts()
        for item in items:
            if isinstance(item.value, FaultyItem):
                item.value, error, item.attempts = item.value
                await self._run.bury(item, self.source.name, counts, error)
            else:
                sound.append(item)
        return sound

    async def _pull(self, most: int) -> Sequence[tuple[Any, Any]]:
        """Pull from the source, again and again with growing pauses while it cannot be read."""
        pauses = BLOCKED.delays(self._run.random)
        recovery = None
        while True:
            if self._error:
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
                if recovery is not None:
                    recovery.cancel()
            if self._is_halted:
                return ()  # the error is what the source has made of its cancellation
            await sleep_async(next(pauses))

    def _fail(self, error: Exception) -> None:
        """Note that the source cannot be read; raise `error` if that cannot change."""
        if isinstance(error, FOR_GOOD) or not getattr(self.source, "repeatable", True):
            raise error
        self._errors += 1
        cause = described(error)
        if not self._error:
            self._failing_since = self._run.now()
            self._emit_change("ok", "failing", cause, 0.0)
        self._error = cause

    def _recover(self) -> None:
        if self._error:
            self._error = ""
            self._emit_change("failing", "ok", "", self._run.now() - self._failing_since)

    def _emit_change(self, before: str, after: str, cause: str, duration: float) -> None:
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
            await self._report_by(source.acknowledge, acknowledged)
            self._unanswered = len(returned)
            await self._report_by(source.give_back, returned)
            self._unanswered = 0
            self._reported.set()
            if is_over:
                return

    async def _report_by(
        self, method: Callable[[Sequence[Any]], Awaitable[None]], handles: list[Any]
    ) -> None:
        """Report these ends by a method of the source until it has taken them, or never will."""
        if not handles:
            return
        pauses = BLOCKED.delays(self._run.random)
        is_failing = False
        while True:
            try:
                await method(handles)
            except FOR_GOOD as error:
                self._errors += 1
                text = f"will not take the ends of {len(handles)} items; it may hand them out again"
                self._log_error(text, error)
                return
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                self._errors += 1
                if not is_failing:
                    why = described(error)
                    self._log_error(
                        f"does not take the ends of items; they are reported again: {why}"
                    )
                is_failing = True
                await self._pause(next(pauses))
            else:
                if is_failing:
                    self._log_error("takes ends again")
                return

    async def _pause(self, seconds: float) -> None:
        """Wait before reporting to a source again; not for long when the run is over."""
        if self._over.is_set():
            await sleep_async(min(seconds, REPORT_AGAIN))
        else:
            await wait_within(self._over, seconds)

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
            ends = f"the ends of {self.unreported} items"
            self._log_error(f"has not taken {ends}; it may hand them out again")
        closing = asyncio.ensure_future(self.source.close())
        try:
            done, _ = await asyncio.wait([closing], timeout=ACK_WITHIN)
            for task in done:
                task.result()
            if not done:
                self._log_error("does not close")
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():
                raise
            self._log_error("cannot be closed", error)
        finally:
            await end([closing], 0.0)

    def _log_error(self, text: str, error: BaseException | None = None) -> None:
        names, fields = (self._run.name, self.source.name), self._log_fields
        _log.error("pipeline %r: source %r %s", *names, text, exc_info=error, extra=fields)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what was read, and what is known of the source; from any thread."""
        last_at, unreported, error = self._last_at, self.unreported, self._error
        facts = source_snapshot(self.source)
        if not error and unreported >= MOST_UNREPORTED:
            error = f"it has not taken the ends of {unreported} items, and is not read until then"
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
    try:
        facts = dict(getattr(source, "snapshot", dict)())
    except Exception as error:  # noqa: BLE001 - of the source: show the rest
        facts = {"snapshot_error": described(error)}
    return {
        **facts,
        "name": source.name,
        "read": 0,
        "rate": 0.0,
        "waits": False,
        "last_at": None,
        "unreported": 0,
        "errors": 0,
        "error": str(facts.get("error", "")),
    }
