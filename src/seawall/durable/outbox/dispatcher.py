"""Delivers the events of an outbox at least once, in order within each aggregate.

Promises:

- A committed event is delivered; one that was rolled back never is.
- Within an aggregate, an event is passed to the sink only after all events before it were delivered
  (or skipped, with `poison="skip"`).
- A failing event holds up only its own aggregate. A hanging one fails after `timeout`, even if the
  sink ignores its cancellation; until then its dispatcher claims nothing new.
- `run` returns within `stop(grace)`, or three seconds later if the database does not answer.
- Any number of dispatchers share the work. Each aggregate is claimed for a lease, which is renewed
  during delivery. A dispatcher that died is replaced when the lease expires; one that comes back
  late cannot write anything.
- A late commit is not missed, because there is no cursor: every stored event is pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from secrets import token_hex
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import new_random
from seawall.durable.database.notifications import NotificationListener
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.outbox.delivery import DeliveryProgress, Sink, SinkDelivery, outcome_of
from seawall.durable.outbox.events import error_text
from seawall.durable.outbox.operations import (
    AggregateOutcome,
    ClaimedAggregate,
    claim_aggregates,
    renew_leases,
    store_outcomes,
    stored_earlier,
)
from seawall.durable.outbox.outbox import Outbox
from seawall.events import EventDied, OutboxBlocked
from seawall.events.bus import emit
from seawall.events.log import FailureLog
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.models.outbox import MOST_ATTEMPTS, OutboxSettings, Poison, next_pause
from seawall.runtime.abandon import end
from seawall.runtime.driver import Steps, sleep_async
from seawall.runtime.stop_signals import run_until_signal

SHORTEST_PAUSE: Final = 0.05
"""Seconds between two polls while events keep coming."""
LARGEST_BATCH: Final = 16 * 2**20
"""Maximum bytes of payload that are fetched at once."""
SHORTEST_LEASE: Final = 1.0
"""Minimum lease in seconds: a shorter one may expire before its first event reaches the sink."""
SURVEY_EVERY: Final = 15.0
LONGEST_PAUSE: Final = 300.0
"""Maximum seconds of pause after a refusal."""
REPORT_TIME: Final = 2.0
"""Seconds after the grace period for storing outcomes; after that, the leases expire."""
OUTAGE: Final = full_jitter(0.1, cap=5.0)
"""Backoff between attempts to reach the database."""


class RoundResult(NamedTuple):
    """The result of a round, and whether there may be more to do at once."""

    delivered: int
    has_more: bool


@dataclass(slots=True)
class HeldAggregates:
    """The numbers of the aggregates that are still claimed, and until when that is certain."""

    held: set[int]
    until: float


class Dispatcher:
    """Passes the events of `outbox` to `sink`, a function of an event or of a list of events."""

    def __init__(
        self,
        outbox: Outbox,
        sink: Sink,
        *,
        batched: bool | None = None,
        batch: int = 1000,
        concurrency: int = 16,
        lease: float = 30.0,
        timeout: float | None = 30.0,
        attempts: int = 10,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None = None,
        poison: Poison = "block",
        poll: float = 1.0,
        keep: float = 0.0,
        listen: Callable[[], Awaitable[Any]] | None = None,
        rng: Random | None = None,
    ) -> None:
        """Deliver up to `batch` events in a round, of up to `concurrency` aggregates at once.

        With `batched`, the sink receives a list, and returns None or the ids that failed. A call of
        the sink that takes longer than `timeout` seconds has failed (None: no limit). An event has
        up to `attempts` attempts, with pauses of `backoff` (default: full jitter from 1 s up to 5
        minutes). Then its aggregate waits for `Outbox.unblock` (`poison="block"`), or continues
        without it (`"skip"`). The dispatcher polls at least every `poll` seconds. Delivered events
        are kept for `keep` seconds. `listen` opens a dedicated connection for NOTIFY.
        """
        if not isinstance(outbox, Outbox):
            raise TypeError(f"Dispatcher({outbox!r}, ...): pass an Outbox")
        if batched is None:
            batched = bool(getattr(sink, "batched", False))
        self.outbox = outbox
        self.batch = check.count("batch", batch, maximum=10_000)
        self.lease = check.seconds("lease", lease)
        if self.lease < SHORTEST_LEASE:
            raise ValueError(f"lease={lease!r}: write at least {SHORTEST_LEASE:g} second")
        self.poll = max(SHORTEST_PAUSE, check.seconds("poll", poll))
        self.keep = check.seconds("keep", keep, zero=True)
        self._settings = OutboxSettings(
            check.count("attempts", attempts, maximum=MOST_ATTEMPTS),
            full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff),
            check.choice("poison", poison, ("block", "skip")),
        )
        self._delivery = SinkDelivery(
            sink, name=outbox.name, batched=batched, concurrency=concurrency, timeout=timeout
        )
        self._listening = (
            None if listen is None else NotificationListener(outbox.channel, listen, self.wake)
        )
        self._rng = new_random(outbox.name) if rng is None else check.chance("rng", rng)
        self._own_rng = rng is None
        self._clock = outbox.clock
        self._round = self._after = 0
        self._resume_at = self._surveyed_at = float("-inf")
        self._stopped = self._cleaning = False
        self._survey: dict[str, Any] = {}
        self._failures = FailureLog("outbox", outbox.name, self._clock)
        self._outage = OutageLog(f"outbox {outbox.name!r}", self._clock)
        words = ("rounds", "delivered", "failed", "dead", "blocked", "refused", "refused_late")
        self._counts = dict.fromkeys((*words, "lost", "errors"), 0)
        self._reset_identity()
        survives_fork(self)
        registry.enter(self, "dispatcher", outbox.name)

    def _reset_identity(self) -> None:
        self._token = token_hex(8)
        self._timers: list[asyncio.TimerHandle] = []
        self._reset_run()

    def _reset_run(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._interrupted = self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._overdue: asyncio.Future[None] | None = None
        self._delivering: asyncio.Task[None] | None = None

    def _after_fork(self) -> None:
        """Take a new identity in a child process: the parent continues under the old one."""
        self._reset_identity()
        self._delivery.after_fork()
        if self._own_rng:
            self._rng = new_random(self.outbox.name)

    def __repr__(self) -> str:
        return f"<Dispatcher of {self.outbox!r}: {self._counts['delivered']} delivered>"

    def snapshot(self) -> dict[str, Any]:
        """Return the dispatcher's counts, and the last survey of the outbox."""
        return {
            "outbox": self.outbox.name,
            "running": self._loop is not None,
            "paused": self._clock.now() < self._resume_at,
            "listening": self._listening is not None and self._listening.is_listening,
            **self._counts,
            "abandoned": self._delivery.abandoned,
            "survey": dict(self._survey),
        }

    # Running

    async def run(self) -> None:
        """Deliver until `stop` is called or the task is cancelled; then release the claims."""
        await self._run_alone(self._forever)

    async def run_once(self) -> int:
        """Deliver one batch; return the number of events, 0 if there was nothing to do."""
        return int((await self._run_alone(self._one_round)).delivered)

    async def drain(self) -> int:
        """Deliver until nothing is due; return the number of events."""
        total = 0
        while (ended := await self._run_alone(self._one_round)).has_more:
            total += ended.delivered
        return total + int(ended.delivered)

    def run_sync(self, drain: float = 10.0) -> None:
        """Deliver in this thread until `stop` is called; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop the dispatcher too: the first signal by
        `stop(drain)`, a second one by `stop(0)`. A signal for which the program has its own handler
        is left alone.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Start nothing new; give running deliveries `grace` seconds. Callable from any thread.

        `run` returns when all is done, at most three seconds after the grace period. A call of the
        sink that still runs then is abandoned: its aggregate pauses for a lease.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._stopped = True
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, so the dispatcher has stopped
                loop.call_soon_threadsafe(self._halt, seconds)

    def wake(self) -> None:
        """Look at once instead of after the pause. Callable from any thread."""
        self._woken = True
        loop, news = self._loop, self._news
        if loop is not None and news is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(news.set)

    def _halt(self, grace: float) -> None:
        if self._news is None or self._loop is None:
            return
        self._news.set()
        self._timers.append(self._loop.call_later(grace, self._interrupt_delivery))
        self._timers.append(self._loop.call_later(grace + REPORT_TIME, self._give_up))

    def _interrupt_delivery(self) -> None:
        self._interrupted = True
        if self._delivering is not None:
            self._delivering.cancel()

    def _give_up(self) -> None:
        if self._overdue is not None and not self._overdue.done():
            self._overdue.set_result(None)

    async def _run_alone(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run `work` in its own task: claims are released even if this one is cancelled."""
        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another Dispatcher")
        self._loop = loop = asyncio.get_running_loop()
        self._news, self._overdue = asyncio.Event(), loop.create_future()
        self.outbox._register(self)
        task = loop.create_task(work())
        try:
            await asyncio.wait([task, self._overdue], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            stopped, self._stopped = self._stopped, True
            self._news.set()
            self._interrupt_delivery()
            try:
                await asyncio.wait([task], timeout=REPORT_TIME)
            finally:
                self._stopped = stopped
            raise
        finally:
            try:
                if not await end([task]):
                    log = logging.getLogger("seawall")
                    log.warning("%r: the database does not answer; the leases run out", self)
            finally:
                self._reset_run()
        ended = task.done() and not task.cancelled()
        return task.result() if ended else RoundResult(0, has_more=False)

    async def _forever(self) -> None:
        pause = SHORTEST_PAUSE
        delays = OUTAGE.delays(self._rng.random)
        listening = [] if self._listening is None else [self._listening.start(self._rng)]
        try:
            while not self._stopped:
                self._woken = False
                try:
                    ended = await self._one_round()
                    await self._survey_and_clean()
                except Exception as error:  # noqa: BLE001 - from any driver; logged and retried
                    self._counts["errors"] += 1
                    self._outage.failed(None, "the database", error)
                    await self._pause(next(delays))
                    continue
                self._outage.succeeded(None)
                delays = OUTAGE.delays(self._rng.random)
                if ended.has_more or self._cleaning:
                    pause = SHORTEST_PAUSE
                    continue
                if self._clock.now() < self._resume_at:
                    await self._wait_out_refusal()
                elif not self._woken:
                    await self._pause(pause)
                pause = next_pause(
                    pause, found=self._woken, shortest=SHORTEST_PAUSE, longest=self.poll
                )
        finally:
            await end(listening)

    async def _wait_out_refusal(self) -> None:
        """Pause for as long as a refusal asked: news does not end the pause, `stop` does."""
        while not self._stopped and (left := self._resume_at - self._clock.now()) > 0:
            self._woken = False
            await self._pause(left)

    async def _pause(self, seconds: float) -> None:
        news = self._news
        if self._stopped or news is None:
            return
        if not self._woken:
            news.clear()
        try:
            async with asyncio.timeout(seconds):
                await news.wait()
        except TimeoutError:
            pass

    async def _survey_and_clean(self) -> None:
        now = self._clock.now()
        if now - self._surveyed_at >= SURVEY_EVERY:
            self._surveyed_at = now
            self._survey = await self.outbox.asurvey()
            self._cleaning = True
        # one batch between two rounds, so that deliveries do not wait for all of it
        if self._cleaning:
            self._cleaning = await self.outbox._aclean_some(keep=self.keep)

    # One round: claim, deliver, store the outcome

    async def _one_round(self) -> RoundResult:
        outbox, database = self.outbox, self.outbox.database
        self._round += 1
        self._counts["rounds"] += 1
        owner = f"{self._token}.{self._round}"
        far, ends = False, 0
        while True:
            began = self._after
            asked_at = self._clock.now()
            claim = partial(
                claim_aggregates,
                database.dialect,
                outbox.name,
                after=began,
                far=far,
                batch=self.batch,
                largest=LARGEST_BATCH,
                owner=owner,
                lease=round(self.lease * 1e6),
            )
            claimed = await database.arun(claim)
            self._after = claimed.after
            if claimed.aggregates or self._stopped:
                break
            # Behind the end, start over; at the second end, everything has been looked at.
            ends += claimed.ended + (claimed.ended and began == 0)
            if ends > 1:
                break
            far = not claimed.ended  # the nearest cannot be claimed: look further
        if not claimed.aggregates:
            return RoundResult(0, has_more=False)
        progress = [DeliveryProgress(one) for one in claimed.aggregates]
        holding = HeldAggregates({one.lane for one in claimed.aggregates}, asked_at + self.lease)
        try:
            await self._deliver(progress, owner, holding)
        finally:
            await self._settle(progress, owner, holding)
        # After failures other events may be deliverable at once; after a refusal, pause.
        refused = [one.aggregate.lane for one in progress if one.refused is not None]
        if refused:
            self._after = max(refused)  # others first: the refusal may concern this one alone
        delivered = sum(one.delivered for one in progress)
        return RoundResult(delivered, has_more=not refused and not self._stopped)

    async def _deliver(
        self, progress: list[DeliveryProgress], owner: str, holding: HeldAggregates
    ) -> None:
        aggregates = [one.aggregate for one in progress]

        def may_continue(lane: int) -> bool:
            return not self._stopped and lane in holding.held and self._clock.now() < holding.until

        self._delivering = asyncio.ensure_future(self._delivery.deliver(progress, may_continue))
        renewing_task = asyncio.ensure_future(self._renew(holding, aggregates, owner))
        if self._interrupted:
            self._delivering.cancel()
        try:
            await asyncio.wait([self._delivering])
            if not self._delivering.cancelled():
                self._delivering.result()
        finally:
            try:
                await end([self._delivering, renewing_task])
            finally:
                self._delivering = None

    async def _renew(
        self, holding: HeldAggregates, aggregates: list[ClaimedAggregate], owner: str
    ) -> None:
        """Renew the leases while the sink is working; note which were lost."""
        database, lease = self.outbox.database, round(self.lease * 1e6)
        while True:
            await sleep_async(self.lease / 3)
            asked_at = self._clock.now()
            try:
                held = await database.arun(
                    lambda: renew_leases(database.dialect, owner, aggregates, lease)
                )
            except Exception:  # noqa: BLE001 - the lease may still be long enough
                self._counts["errors"] += 1
                continue
            self._counts["lost"] += len(holding.held - held)
            holding.held &= held
            holding.until = asked_at + self.lease

    async def _settle(
        self, progress: list[DeliveryProgress], owner: str, holding: HeldAggregates
    ) -> None:
        counts = self._counts
        pause = round(self.lease * 1e6)
        settled = [
            outcome_of(one, self._settings, self._rng.random, pause=pause) for one in progress
        ]
        until, delays = self._clock.now() + self.lease, OUTAGE.delays(self._rng.random)
        unsure = False
        while True:
            held = self._clock.now() < holding.until
            writing = partial(self._store_steps, owner, settled, unsure=unsure, held=held)
            unsure = True
            try:
                late, ours = await self.outbox.database.arun(writing)
                break
            except Exception:
                # What is not stored will be delivered again, after the leases of its aggregates.
                if self._stopped or self._clock.now() >= until:
                    raise
                counts["errors"] += 1
                await self._pause(next(delays))
        counts["delivered"] += sum(one.delivered for one in progress)
        counts["refused_late"] += late
        counts["failed"] += sum(one.error is not None for one in progress)
        counts["blocked"] += sum(one.action == "block" for one in settled)
        counts["dead"] += sum(one.action == "skip" for one in settled)
        refusals = [one.refused for one in progress if one.refused is not None]
        if refusals:
            counts["refused"] += len(refusals)
            waits = [refusal.retry_after or SHORTEST_PAUSE for refusal in refusals]
            floor = min(max(waits), LONGEST_PAUSE)
            self._resume_at = self._clock.now() + above_floor(floor, self._rng.random)
        for one in settled:
            if one.has_failed and one.aggregate.lane in ours:
                self._report_failure(one)

    def _store_steps(
        self, owner: str, settled: list[AggregateOutcome], *, unsure: bool, held: bool
    ) -> Steps[tuple[int, set[int]]]:
        """Write the outcomes; return how many were refused, and the failed ones that are stored.

        Refused are aggregates that were taken over. If it is `unsure` whether an earlier attempt
        was committed, look; while the leases are `held`, no other dispatcher can have written.
        """
        dialect, outbox = self.outbox.database.dialect, self.outbox.name
        written = yield from store_outcomes(dialect, outbox, owner, settled, keep=self.keep > 0)
        ours = written.failed
        if not unsure:
            return written.late, ours
        missing = [one for one in settled if one.aggregate.lane not in ours]
        before = yield from stored_earlier(outbox, missing, held=held)
        return written.late - len(before), ours | before

    def _report_failure(self, one: AggregateOutcome) -> None:
        """Report a stored failure to subscribers and to the log."""
        event = one.aggregate.events[one.delivered]
        whose = {"aggregate": event.aggregate, "aggregate_id": event.aggregate_id}
        what = f"event {event.id} of {event.aggregate!r} {event.aggregate_id!r}"
        delay, dead = one.delay / 1e6, one.action != "again"
        self._failures.failed(what, event.id, one.attempts, one.error, delay=delay, dead=dead)
        if dead:
            kind = OutboxBlocked if one.action == "block" else EventDied
            cause, trace = split_report(error_text(one.error))
            said = {"attempts": one.attempts, "cause": cause, "traceback": trace}
            emit(kind, self.outbox.name, event_id=event.id, **whose, **said)
