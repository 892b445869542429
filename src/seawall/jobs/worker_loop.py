"""The loop of every worker: claim work as slots become free, execute it, renew claims, stop.

Promises:

- At most `concurrency` items of work run at once.
- A claim is never cut off in the middle, or its work would be blocked for a whole lease.
- Work whose claim has ended is stopped on time, also while the store hangs.
- Work that this worker interrupts in order to give it back has not failed, whatever it raises then.
- Stopping finishes what it can within the grace period, gives the rest back, and ends in any case.
- While the store is unreachable, the loop keeps trying.

A subclass claims (`_claim`), calls the function (`_call`), reports outcomes (`_succeeded`,
`_failed`, `_return_claim`) and renews (`_renew`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

from seawall import _checks as check
from seawall._failures import described
from seawall.clock import Clock, new_random
from seawall.jobs.records import Claim
from seawall.models.backoff import Backoff, as_backoff, full_jitter
from seawall.resources.executors.executors import IoPool
from seawall.runtime.driver import sleep_async
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

OUTAGE: Final = full_jitter(0.05, cap=2.0)
"""Backoff while the store does not answer."""
PAUSE: Final = 1.0
"""Pause in seconds where nothing says how long to wait, or if the user's backoff fails."""
LOOK: Final = 1.0
"""Seconds between two looks at what changes without notice, such as the end of a thread."""
REPORT_TIME: Final = 2.0
"""Seconds after the grace period for reporting outcomes; then the worker ends in any case."""
LEAVING: Final = 0.1
"""Seconds for cancelled tasks to end; tasks that still run then are abandoned."""
INSTANT: Final = 1e-6
"""Waits shorter than this are skipped."""

Backoffs = Backoff | float | Iterable[float] | Callable[[int], float] | None
"""What a worker takes for its `backoff`."""


class WorkRun:
    """One item of work that a worker is executing."""

    def __init__(self, claim: Claim, *, in_thread: bool = False) -> None:
        """Start; `in_thread` says that a thread executes it, which cannot be stopped."""
        self.claim = claim
        self.in_thread = in_thread
        self.task: asyncio.Task[None] | None = None
        self.stop_reason: Literal["cancelled", "given back", "lost"] | None = None
        """Why this worker has interrupted the work, if it has."""
        self.begun = False
        """Whether the function was called, which makes this an attempt."""
        self.settling = False
        """Whether the work has ended, and only the report remains."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.claim!r}>"

    @property
    def lost(self) -> bool:
        """Whether the claim is no longer this worker's."""
        return self.stop_reason == "lost"

    @property
    def to_return(self) -> bool:
        """Whether the work is to be given back."""
        return self.stop_reason == "given back"

    def lose(self) -> None:
        """Stop the work, because another worker owns it now."""
        before, self.stop_reason = self.stop_reason, "lost"
        if before in (None, "cancelled"):
            self._interrupt()

    def give_back(self) -> None:
        """Stop the work and give it back. A thread runs on: its work is free after the lease."""
        if self.stop_reason in (None, "cancelled"):
            self.stop_reason = "given back"
            self._interrupt()

    def _interrupt(self) -> None:
        # Do not cancel the report of finished work: it has its own time limit.
        if self.task is not None and not self.settling:
            self.task.cancel()


R = TypeVar("R", bound=WorkRun)
T = TypeVar("T")


class WorkerLoop(Generic[R]):
    """Base of the workers of queues, jobs in a database and deferred calls."""

    _once_raises = True
    """Whether a single claim raises if the store does not answer, rather than start nothing."""

    def __init__(
        self, clock: Clock, *, concurrency: int, backoff: Backoffs, rng: Random | None
    ) -> None:
        """Execute up to `concurrency` items at once, with pauses of `backoff` after failures."""
        self.concurrency = check.count("concurrency", concurrency, maximum=500)
        self._backoff = full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff)
        self._rng = new_random("worker") if rng is None else check.chance("rng", rng)
        self._clock = clock
        self._pool: IoPool | None = None
        self._runs: set[R] = set()
        self._counts: dict[str, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._beats: asyncio.Event | None = None
        self._stopping: asyncio.Event | None = None
        self._stopped = False
        self._asked_to_stop = False
        """Whether `stop` was called, rather than a single claim cancelled."""
        self._end_at = self._report_until = inf
        self._resume_at = -inf
        self._renewal: asyncio.Task[bool] | None = None
        """The renewal that is in progress, even if it hangs."""

    # What a subclass does

    async def _claim(self, free: int) -> list[R]:
        """Claim up to `free` items of work; raise if the store does not answer."""
        raise NotImplementedError

    async def _reject(self, run: R) -> str | None:
        """Report work that must not be started, and return its outcome; None if it may start."""
        return None

    async def _call(self, run: R) -> Any:
        """Call the function; set `run.begun` when it starts."""
        raise NotImplementedError

    async def _succeeded(self, run: R, result: Any) -> str:
        """Report the result; return the name of the outcome."""
        raise NotImplementedError

    async def _failed(self, run: R, error: BaseException) -> str:
        """Report why the function failed or was not called; return the outcome."""
        raise NotImplementedError

    async def _return_claim(self, run: R, delay: float) -> str:
        """Report that the work was not attempted and is free after `delay`; return the outcome."""
        raise NotImplementedError

    async def _renew(self, runs: list[R]) -> bool:
        """Renew the claims of running work; return False if the store did not answer."""
        raise NotImplementedError

    def _beat_after(self, *, answered: bool) -> float:
        """Return the seconds until the next renewal; fewer if the last one was not answered."""
        raise NotImplementedError

    async def _pause(self, claimed: int) -> None:
        """Wait for more work, after fewer items were claimed than there are slots."""

    def _unreachable(self, error: Exception) -> None:
        """Note that nothing could be claimed; raise `error` if trying again makes no sense."""

    def _reached(self) -> None:
        """Note that the store answered."""

    def _background(self) -> list[asyncio.Task[Any]]:
        """Start tasks that run beside the loop until it ends."""
        return []

    def _notified(self) -> AbstractContextManager[Any]:
        """Return a block during which news of the store wakes this worker."""
        return nullcontext()

    def _interrupt_claim(self) -> None:
        """End a claim that waits for work, because the worker was stopped."""

    def _lost_threads(self) -> int:
        """Return how many slots are occupied by threads that were given up."""
        return 0

    # Running

    async def run(self) -> None:
        """Execute work until `stop` is called. A stopped worker cannot be restarted.

        If cancelled, it gives running work back and ends.
        """
        if self._loop is None and self._stopped:
            return
        await self._session(once=False)

    def run_sync(self, drain: float = 10.0) -> None:
        """Execute work in this thread until `stop` is called; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop the worker too: the first signal by
        `stop(drain)`, a second one by `stop(0)`. A signal for which the program has its own handler
        is left alone.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Claim no more; give running work `grace` seconds, then give the rest back.

        Callable from any thread or signal handler. `run` returns when all is done, at most three
        seconds after the grace period, whatever functions and the store do. Work that was given
        back can be claimed at once, and has lost no attempt. A function that does not end (a thread
        cannot be stopped, and a coroutine may ignore its cancellation) keeps its work until the
        lease expires. If `stop` is called again, the earlier end counts.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._asked_to_stop = True
        self._stop_at(self._clock.now() + seconds)

    def _stop_at(self, instant: float) -> None:
        self._end_at = min(self._end_at, instant)
        self._stopped = True
        self._call_soon(self._on_stop)

    def _on_stop(self) -> None:
        if self._stopping is not None and self._news is not None:
            self._news.set()
            if not self._stopping.is_set():
                self._stopping.set()
                self._interrupt_claim()

    def _wake(self) -> bool:
        """Look for work at once. Callable from any thread."""
        return self._set(self._news)

    def _set(self, event: asyncio.Event | None) -> bool:
        return event is not None and self._call_soon(event.set)

    def _call_soon(self, callback: Callable[[], None]) -> bool:
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False  # the loop is closed, so the worker has stopped
        return True

    async def _wait_for_news(self, seconds: float, event: asyncio.Event | None = None) -> bool:
        """Wait for news (work ended, there is work, stopped) or `event`; return whether it came."""
        import asyncio

        waited = self._news if event is None else event
        assert waited is not None  # noqa: S101 - set before any task starts
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await waited.wait()
        except TimeoutError:
            pass
        came = waited.is_set()
        waited.clear()
        return came

    async def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, or until stopped."""
        until = self._clock.now() + seconds
        while not self._stopped and (left := until - self._clock.now()) > INSTANT:
            await self._wait_for_news(left)

    async def _session(self, *, once: bool) -> int:
        """Run until stopped, or for one claim; return how many items were started."""
        import asyncio

        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another {type(self).__name__}")
        self._loop = asyncio.get_running_loop()
        self._news, self._beats, self._stopping = (asyncio.Event() for _ in range(3))
        with self._notified():
            fetching = asyncio.create_task(self._fetch(once=once))
            beating = asyncio.create_task(self._beat())
            halting = asyncio.create_task(self._stopping.wait())
            aside = [beating, halting, *([] if once else self._background())]
            try:
                tasks = [fetching, beating, halting]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                while once and self._runs and not self._stopped:
                    await self._wait_for_news(LOOK)
            finally:
                if not self._stopped and (not once or not fetching.done() or self._runs):
                    self._stop_at(self._clock.now())  # cancelled or failed: no grace period
                try:
                    await self._wind_up(fetching, *aside)
                finally:
                    self._loop = self._news = self._beats = self._stopping = None
                    if once and not self._asked_to_stop:  # the next single claim begins anew
                        self._stopped = False
                        self._end_at = self._report_until = inf
                    pool, self._pool = self._pool, None
                    if pool is not None:
                        pool.close(0.0)
        for task in (beating, fetching):
            if task.done() and not task.cancelled():
                task.result()  # raise if it failed rather than stopped
        return fetching.result() if fetching.done() and not fetching.cancelled() else 0

    async def _fetch(self, *, once: bool) -> int:
        """Claim work as slots become free, until stopped; with `once`, a single time."""
        begun = 0
        outages = OUTAGE.delays(self._rng.random)
        while free := await self._room(once=once):
            try:
                runs = await self._claim(free)
            except Exception as error:
                if once and self._once_raises:
                    raise
                self._unreachable(error)
                if once:
                    break
                await self._sleep(next(outages))
                continue
            self._reached()
            outages = OUTAGE.delays(self._rng.random)
            for run in runs:
                self._begin(run)
            begun += len(runs)
            if once:
                break
            if len(runs) < free:
                await self._pause(len(runs))
        return begun

    async def _room(self, *, once: bool) -> int:
        """Wait until work may be claimed; return how much, or 0 once stopped."""
        while not self._stopped:
            free = self.concurrency - len(self._runs) - self._lost_threads()
            pause = self._resume_at - self._clock.now()
            if once:
                return 0 if pause > 0 else max(free, 0)
            if pause > INSTANT:
                await self._sleep(pause)
            elif free > 0:
                return free
            else:
                await self._wait_for_news(LOOK)
        return 0

    def _begin(self, run: R) -> None:
        import asyncio

        if self._stopped:
            run.give_back()
        self._runs.add(run)
        run.task = asyncio.create_task(self._work(run))

    async def _work(self, run: R) -> None:
        outcome = "lost"
        try:
            outcome = await self._execute(run)
        except Exception as error:  # noqa: BLE001 - one item's failure must not affect others
            log = logging.getLogger("seawall")
            log.error("%r: %r: %s", self, run.claim, described(error))  # noqa: TRY400 - see there
        finally:
            self._runs.discard(run)
            self._counts[outcome if outcome in self._counts else "lost"] += 1
            if self._news is not None:
                self._news.set()

    async def _execute(self, run: R) -> str:
        """Execute and report one item; return the name of its outcome."""
        import asyncio

        if run.to_return:
            return await self._give_back(run)
        rejected = await self._reject(run)
        if rejected is not None:
            return rejected
        try:
            result = await self._call(run)
        except asyncio.CancelledError as error:
            self._accept_interruption(run, error)
            return await self._raised(run, error, interrupted=True)
        except Exception as error:  # noqa: BLE001 - an error of the function: reported
            # A coroutine may turn its cancellation into another error; a thread is not interrupted.
            return await self._raised(run, error, interrupted=not run.in_thread)
        run.settling = True
        return "lost" if run.lost else await self._succeeded(run, result)

    async def _raised(self, run: R, error: BaseException, *, interrupted: bool) -> str:
        run.settling = True
        if run.lost:
            return "lost"
        if run.to_return and interrupted:
            return await self._give_back(run)
        return await self._failed(run, error)

    def _accept_interruption(self, run: R, error: BaseException) -> None:
        """Undo this worker's cancellation of `run`; raise `error` if something outside did it."""
        task = run.task
        if task is None or not task.cancelling():
            return  # the function itself raised it
        if run.stop_reason is None:
            raise error  # as when the event loop ends: no time is left
        while task.cancelling():
            task.uncancel()

    async def _give_back(self, run: R, delay: float = 0.0) -> str:
        if run.in_thread and run.begun:
            return "lost"  # its thread is still running: free only when the lease expires
        return await self._return_claim(run, delay)

    async def _until_answered(
        self, run: R, report: Callable[[bool], Awaitable[T]], outage: type[Exception] = Exception
    ) -> T | None:
        """Repeat `report(unsure)` while it raises `outage`; None if the claim has ended before.

        It is `unsure` if an earlier report may have arrived although its answer was lost.
        """
        delays = OUTAGE.delays(self._rng.random)
        unsure = False
        while not run.lost:
            try:
                return await report(unsure)
            except outage as error:
                unsure = True
                left = min(run.claim.until, self._report_until) - self._clock.now()
                if left <= 0:
                    log = logging.getLogger("seawall")
                    text = "%r: %r: its outcome was not stored: %s"
                    log.warning(text, self, run.claim, described(error))
                    break
                await sleep_async(min(next(delays), left))
        return None

    # Renewing

    async def _beat(self) -> None:
        """Renew claims forever; more often while the store is unreachable."""
        answered = True
        while True:
            now = self._clock.now()
            runs = [run for run in self._runs if not (run.lost or run.settling)]
            ends = [run.claim.until - now for run in runs]
            nap = min([self._beat_after(answered=answered), *ends])
            await self._wait_for_news(nap, self._beats)
            answered = await self._renew_in_time([run for run in self._runs if not run.lost])

    async def _renew_in_time(self, runs: list[R]) -> bool:
        """Renew claims, and stop work whose claim has ended; return whether the store answered.

        A renewal that hangs is not waited for, and no other one begins before its end: a blocking
        driver keeps its thread.
        """
        import asyncio

        if not runs:
            return True
        renewal = self._renewal
        if renewal is None or renewal.done():
            renewal = self._renewal = asyncio.create_task(self._renew(runs))
        now = self._clock.now()
        # A third of a lease: there is time for another attempt; less if a claim ends before.
        waits = [run.claim.lease / 3 for run in runs]
        waits += [left for run in runs if (left := run.claim.until - now) > 0]
        await asyncio.wait([renewal], timeout=min(waits))
        answered = False
        if not renewal.done():
            renewal.cancel()
        elif not renewal.cancelled():
            answered = renewal.result()
        if not answered:
            now = self._clock.now()
            for run in runs:
                if not run.settling and run.claim.until <= now:
                    run.lose()
        return answered

    async def _wind_up(self, fetching: asyncio.Task[int], *aside: asyncio.Task[Any]) -> None:
        """Wait out the grace period, then give work back, then end; `aside` runs until then."""
        import asyncio

        from seawall.runtime.abandon import end

        try:
            # `fetching` ends on its own: a question to the store is soon answered or times out.
            left = max(0.0, self._end_at - self._clock.now()) if self._stopped else 0.0
            await asyncio.wait([fetching], timeout=left)
            while self._runs and (left := self._end_at - self._clock.now()) > INSTANT:
                await self._wait_for_news(left)
            self._report_until = self._end_at + REPORT_TIME
            for run in list(self._runs):
                run.give_back()
            # A claim that hangs must not take the time of giving back: both go on at once.
            await asyncio.wait([fetching], timeout=max(0.0, self._report_until - self._clock.now()))
            while self._runs and (left := self._report_until - self._clock.now()) > INSTANT:
                await self._wait_for_news(left)
        finally:
            # Even if cancelled again: no work may run on without a renewed lease.
            for run in list(self._runs):
                run.give_back()
            runs = [run.task for run in self._runs if run.task is not None]
            renewal, self._renewal = self._renewal, None
            renewals = [] if renewal is None else [renewal]  # it may hang, as a claim may
            await end([fetching, *aside, *runs, *renewals], LEAVING)

    # For executing

    async def _in_thread(self, name: str, workers: int, function: Callable[..., Any]) -> Any:
        """Call a plain function in a thread of this worker."""
        if self._pool is None:
            self._pool = IoPool(name, workers=workers, clock=self._clock)
        return await self._pool.arun(function)

    def _pause_after(self, attempt: int, *, floor: float = 0.0, longest: float) -> float:
        """Return the pause after a failed attempt, by the backoff, but at least `floor`."""
        try:
            schedule = self._backoff.delays(self._rng.random)
            # In a schedule that grows without end, the hundredth pause is as good as the last.
            delay = next(islice(schedule, min(max(attempt, 1), 100) - 1, None))
            delay = check.seconds("backoff", max(delay, floor), zero=True)
        except Exception as error:  # noqa: BLE001 - a broken backoff must not lose the work
            log = logging.getLogger("seawall")
            log.warning("%r: backoff failed: %s", self, described(error))
            delay = PAUSE
        return min(delay, longest)
