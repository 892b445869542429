"""Worker that executes stored calls once their dependency is back.

Promises:

- A call is claimed for a lease, which is renewed while it runs. A worker that has died loses its
  claims, and its late reports are refused.
- A refusal (by an open breaker, for instance) costs a call no attempt, and pauses the worker.
- A failed call is retried after a pause, `attempts` times in all; then it is a dead letter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from itertools import islice
from math import inf
from random import Random
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall import _checks as check
from seawall import registry
from seawall._failures import described, report_of, split_report
from seawall._forks import survives_fork
from seawall.context import idempotency_key, reset, tenant
from seawall.durable.database.connections import Query
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.deferred.calls import DeferredCalls, decoded, redoing
from seawall.durable.idempotency.lease_renewal import uninterrupted
from seawall.errors import Rejected, matches
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.events.log import FailureLog
from seawall.guard import Guard
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.resources.executors.executors import IoPool
from seawall.runtime.driver import Steps, sleep_async
from seawall.runtime.functions import kind_of
from seawall.runtime.plan import Plan
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

LONGEST_ERROR: Final = 500
LONGEST_PAUSE: Final = 60.0
"""Maximum pause in seconds after a refusal, even if the guard asked for a longer one."""
CLEANING: Final = 60.0
"""Seconds between two cleanups."""
CLEANED: Final = 1000
"""Maximum number of calls removed by one cleanup."""
ENDING: Final = 5.0
"""Seconds after the grace period for giving back running calls; after that, leases expire."""
TELLINGS: Final = 5
"""Number of attempts to report the result of a call to the database."""

INSTEAD: Final = frozenset({"cache", "fallback"})
"""Policies that may answer instead of the call: the worker would take that for success."""


class Claim(NamedTuple):
    """A call claimed by this worker."""

    position: int
    id: str
    epoch: int
    attempts: int
    call: str
    key: str | None
    tenant: str | None
    expired: int


class DeferredCallWorker:
    """Executes deferred calls with a function: an async one, or a plain one in threads."""

    def __init__(
        self,
        calls: DeferredCalls,
        function: Callable[..., Any],
        *,
        guard: Guard | None = None,
        concurrency: int = 4,
        attempts: int = 20,
        lease: float = 30.0,
        backoff: Backoff | float | Iterable[float] | Callable[[int], float] | None = None,
        poll: float = 1.0,
        ordered: bool = False,
        give_up_on: type[Exception] | tuple[type[Exception], ...] = (),
        rng: Random | None = None,
    ) -> None:
        """Execute up to `concurrency` calls at once, each under `guard` without its fallbacks.

        A function that is already decorated by a guard needs no `guard`. There are `attempts`
        attempts in all; between them the worker pauses by `backoff` (default: full jitter from 1 s
        up to 5 minutes). An exception of `give_up_on` is final at once. With `ordered`, one call
        runs at a time, the oldest: a failing call blocks all calls behind it. When there is nothing
        to do, the worker looks again every `poll` seconds.
        """
        if not isinstance(calls, DeferredCalls):
            raise TypeError(f"DeferredCallWorker({calls!r}, ...): pass DeferredCalls")
        check.function("function", function)
        if guard is not None and not isinstance(guard, Guard):
            raise TypeError(f"guard={guard!r}: pass a Guard")
        self.calls = calls
        self.concurrency = (
            1
            if check.flag("ordered", ordered)
            else check.count("concurrency", concurrency, maximum=500)
        )
        self.ordered = ordered
        self.attempts = check.count("attempts", attempts)
        self.lease = check.seconds("lease", lease)
        self.poll = check.seconds("poll", poll)
        self._give_up_on = check.error_types("give_up_on", give_up_on)
        self._backoff = full_jitter(1.0, cap=300.0) if backoff is None else as_backoff(backoff)
        self._rng = Random() if rng is None else check.chance("rng", rng)  # noqa: S311 - jitter is no secret
        mark = getattr(function, "__seawall__", None)
        if guard is None and mark is not None:
            guard = mark[0]
        # With its fallbacks, a failure would look like a result, and be stored once more.
        self._function = function if guard is None else guard._plan_for(function)[1]
        self._guard = None if guard is None else WithoutFallbacks(guard)
        kind = kind_of(self._function)
        if kind not in ("sync", "async"):
            raise TypeError(f"{function!r}: pass a function that returns its result whole")
        self._awaited = kind == "async"
        self._owner = token_hex(8)
        self._clock = calls.database.guard.clock
        self._resume_at = self._clean_at = float("-inf")
        self._stopped = False
        self._end_at = inf
        self._failures = FailureLog("deferred calls", calls.name, self._clock)
        self._outage = OutageLog(f"deferred calls {calls.name!r}", self._clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._halt: asyncio.Event | None = None
        self._threads: IoPool | None = None
        words = ("done", "failed", "refused", "dead", "lost", "returned")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "later_worker", calls.name)

    def __repr__(self) -> str:
        return f"<DeferredCallWorker of {self.calls!r}>"

    # Running

    async def run(self) -> None:
        """Execute calls until `stop` is called. If cancelled, give running calls back."""
        import asyncio

        from seawall.runtime.abandon import end

        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another")
        if self._stopped:
            return
        self._loop = asyncio.get_running_loop()
        self._news, self._halt = asyncio.Event(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        # In its own task: `stop` must not wait for a database that does not answer.
        fetching = asyncio.create_task(self._fetch(tasks))
        fetching.add_done_callback(lambda _: self._halted())
        try:
            await self._halt.wait()
            while not (fetching.done() and not tasks):
                if (left := self._end_at - self._clock.now()) <= 0:
                    break
                self._news.clear()
                await self._wait(left)
        finally:
            try:
                for task in (fetching, *tasks):
                    task.cancel()
                await asyncio.wait([fetching, *tasks], timeout=ENDING)
            finally:
                try:
                    # cancel again: tasks that are still reporting a result, too
                    await end([fetching, *tasks])
                finally:
                    self._loop = self._news = self._halt = None
        if fetching.done() and not fetching.cancelled():
            fetching.result()  # raise if it failed rather than stopped

    async def _fetch(self, tasks: set[asyncio.Task[None]]) -> None:
        """Start calls as slots become free, until stopped."""
        import asyncio

        while not self._stopped and self._news is not None:
            self._news.clear()
            await self._clean()
            for claim in await self._claims(self.concurrency - len(tasks)):
                task = asyncio.create_task(self._do(claim))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(lambda _: self._ring())
            pause = self._resume_at - self._clock.now()
            await self._wait(max(self.poll, pause))

    async def run_once(self) -> int:
        """Execute the calls that are due, up to `concurrency`; return how many were started."""
        import asyncio

        claims = await self._claims(self.concurrency)
        await asyncio.gather(*(self._do(claim) for claim in claims))
        return len(claims)

    def run_sync(self, drain: float = 10.0) -> None:
        """Execute calls in this thread until `stop` is called; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop the worker too: the first signal by
        `stop(drain)`, a second one by `stop(0)`. A signal for which the program has its own handler
        is left alone.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Start no more calls; give running ones `grace` seconds, then give the rest back.

        Callable from any thread or signal handler. `run` returns when all is done, at most some
        seconds after the grace period. A call that was given back can be claimed at once, and has
        lost no attempt. A thread cannot be stopped: a call that a plain function is still executing
        becomes free when its lease expires.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._halted)
            except RuntimeError:
                pass  # the loop is closed, so the worker has stopped

    def snapshot(self) -> dict[str, Any]:
        """Return the numbers of calls done, failed, refused, dead, lost and given back."""
        paused = self._clock.now() < self._resume_at
        running = self._loop is not None
        return {"queue": self.calls.name, "running": running, "paused": paused, **self._counts}

    def _ring(self) -> None:
        if self._news is not None:
            self._news.set()

    def _halted(self) -> None:
        self._ring()
        if self._halt is not None:
            self._halt.set()

    async def _wait(self, seconds: float) -> None:
        """Wait until a call ends or the worker is stopped, but at most `seconds`."""
        import asyncio

        assert self._news is not None  # noqa: S101 - made before
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _clean(self) -> None:
        """Remove a batch of finished calls from time to time, so that no cleanup job is needed."""
        if self._clock.now() < self._clean_at:
            return
        try:
            removed = await self.calls.database.arun(lambda: self.calls._cleaning(CLEANED))
            more = removed == CLEANED
        except Exception:  # noqa: BLE001 - the database is unreachable: finished calls stay for now
            more = False
        self._clean_at = self._clock.now() + (self.poll if more else CLEANING)

    async def _claims(self, most: int) -> list[Claim]:
        """Claim calls that are due; none if the database fails: the next round asks again."""
        if most < 1 or self._clock.now() < self._resume_at:
            return []
        lease = int(self.lease * 1_000_000)
        asked = {"queue": self.calls.name, "owner": self._owner, "lease": lease, "most": most}

        def steps() -> Steps[list[Any]]:
            if not self.ordered:
                return list((yield Query("deferred_calls.claim", asked)))
            if self.calls.database.dialect == "postgres":
                yield Query("deferred_calls.one_claims", {"queue": self.calls.name})
            return list((yield Query("deferred_calls.claim_first", asked)))

        try:
            rows = await self.calls.database.arun(steps)
        except Exception as error:  # noqa: BLE001 - from any driver; logged and retried
            self._outage.failed(None, "nothing can be claimed", error)
            return []
        self._outage.well(None)
        return sorted(Claim(*row) for row in rows)

    async def _do(self, claim: Claim) -> None:
        """Execute one call and report its result to the database."""
        import asyncio

        from seawall.runtime.abandon import end

        arguments = decoded(claim.call)
        if claim.expired:
            return await self._bury(claim, "its ttl was over", "expired")
        if claim.attempts > self.attempts:
            return await self._bury(claim, "nobody told how its last attempt went", "lost")
        if arguments is None:
            return await self._bury(claim, "what is stored is no call", "garbled")
        task = asyncio.create_task(self._call(claim, *arguments))
        try:
            kept = await self._keep(claim, task)
        except BaseException:
            if not await end([task]):
                raise  # it is still running: its call becomes free when the lease expires
            if not task.cancelled() and task.exception() is None:
                await self._report(claim, None)
            elif self._awaited:  # a thread cannot be stopped: see `stop`
                self._counts["returned"] += 1
                await self._tell(claim, "again", delay=0, refund=1, error=None)
            raise
        if not kept:
            self._counts["lost"] += 1
            return None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        # the call is done: finish the report even if cancelled
        return await uninterrupted(self._report(claim, error))

    async def _call(self, claim: Claim, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Execute the call in the context in which it was stored."""
        token = redoing.set((*redoing.get(), self.calls.name))
        try:
            with Given(tenant, claim.tenant), Given(idempotency_key, claim.key):
                if self._awaited:
                    await self._under_guard("acall")(*args, **kwargs)
                else:
                    if self._threads is None:  # twice: calls that lost their claim may still run
                        name = f"{self.calls.name}-deferred-calls"
                        self._threads = IoPool(name, workers=2 * self.concurrency)
                    await called_in_thread(self._threads, self._under_guard("call"), args, kwargs)
        finally:
            reset(redoing, token)

    def _under_guard(self, how: str) -> Callable[..., Any]:
        if self._guard is None:
            return self._function
        call = getattr(self._guard, how)
        return lambda *args, **kwargs: call(self._function, *args, **kwargs)

    async def _keep(self, claim: Claim, task: asyncio.Task[None]) -> bool:
        """Renew the claim until `task` ends; if it is lost, cancel the task and return False."""
        import asyncio

        until = self._clock.now() + self.lease
        while True:
            done, _ = await asyncio.wait([task], timeout=self.lease / 3)
            if done:
                return True
            asked = self._clock.now()
            try:
                # Not beyond the end of the claim: another worker may start the call then.
                async with asyncio.timeout(max(until - asked, self.lease / 3)):
                    renewed = await self._change(claim, "renew", lease=int(self.lease * 1_000_000))
            except Exception:  # noqa: BLE001 - database unreachable: the claim is valid to its end
                renewed = self._clock.now() < until
            else:
                until = asked + self.lease
            if not renewed:
                task.cancel()
                await asyncio.wait([task])
                return False

    # Results

    async def _report(self, claim: Claim, error: BaseException | None) -> None:
        if error is None:
            how = "done_without_key" if claim.key is None else "done"
            if await self._tell(claim, how):
                self._counts["done"] += 1
            return None
        if isinstance(error, Rejected):
            asked = error.retry_after
            if asked is None:
                pause = min(self._pause(claim.attempts), LONGEST_PAUSE)
            else:
                pause = above_floor(min(max(asked, 0.0), LONGEST_PAUSE), self._rng.random)
            self._resume_at = self._clock.now() + pause
            self._counts["refused"] += 1
            delay = int(pause * 1_000_000)
            await self._tell(claim, "again", delay=delay, refund=1, error=described(error))
        else:
            words = report_of(error, LONGEST_ERROR)
            final = claim.attempts >= self.attempts or matches(error, self._give_up_on)
            pause = 0.0 if final else self._pause(claim.attempts)
            what = f"call {claim.id}"
            self._failures.failed(what, claim.id, claim.attempts, error, delay=pause, dead=final)
            if final:
                return await self._bury(claim, words)
            self._counts["failed"] += 1
            delay = int(pause * 1_000_000)
            await self._tell(claim, "again", delay=delay, refund=0, error=words)
        return None

    def _pause(self, attempts: int) -> float:
        number = min(attempts, 100) - 1
        return next(islice(self._backoff.delays(self._rng.random), max(0, number), None))

    async def _bury(self, claim: Claim, words: str, cause: str = "") -> None:
        if await self._tell(claim, "dead", error=words):
            self._counts["dead"] += 1
            attempts = min(claim.attempts, self.attempts)
            said, trace = split_report(words)
            fields = {"job": claim.id, "attempts": attempts, "traceback": trace}
            emit(JobDied, self.calls.name, cause=cause or said, **fields)

    async def _tell(self, claim: Claim, what: str, **more: Any) -> bool:
        """Report to the database; if that fails, the call is repeated when the lease expires."""
        for number in range(TELLINGS):
            try:
                told = await self._change(claim, what, **more)
            except Exception as error:  # noqa: BLE001 - from any driver; retried
                if number + 1 < TELLINGS:
                    await sleep_async(0.1 * 2**number)
                    continue
                log = logging.getLogger("seawall")
                log.warning(
                    "%r: call %s: %r was not told: %s", self, claim.id, what, described(error)
                )
                return False
            if not told:
                self._counts["lost"] += 1  # another worker has it: the report was refused
            return told
        return False

    async def _change(self, claim: Claim, what: str, **more: Any) -> bool:
        asked = {"id": claim.id, "owner": self._owner, "epoch": claim.epoch, **more}

        def steps() -> Steps[bool]:
            return bool((yield Query(f"deferred_calls.{what}", asked)))

        return await self.calls.database.arun(steps)


class WithoutFallbacks(Guard):
    """The same guard with the same state, but without policies that hide a failure."""

    def __init__(self, guard: Guard) -> None:
        """Share the state of `guard`."""
        vars(self).update(vars(guard))
        self.bounds = [b for b in guard.bounds if b.policy.kind not in INSTEAD]
        self._plan = Plan(self, self.bounds)
        survives_fork(self)


class Given:
    """A context manager that enters a scope if there is a value for it, and else does nothing."""

    def __init__(self, scope: Callable[[str], Any], value: str | None) -> None:
        """Enter `scope(value)`, unless the value is None."""
        self._scope = None if value is None else scope(value)

    def __enter__(self) -> None:
        if self._scope is not None:
            self._scope.__enter__()

    def __exit__(self, *exc: object) -> None:
        if self._scope is not None:
            self._scope.__exit__(*exc)


async def called_in_thread(
    threads: IoPool, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
) -> None:
    """Call a plain function in a thread; await its result if that is awaitable."""
    from inspect import isawaitable

    (said,) = await threads.arun(lambda: (function(*args, **kwargs),))
    # A plain function may return the awaitable of an async one: the call ends with that.
    if isawaitable(said):
        await said
