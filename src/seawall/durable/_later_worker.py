"""Does the calls that were stored, once their dependency is back.

Promises: a call is claimed for a lease, which is prolonged while it runs; a worker that is gone
loses its claims, and what it says too late is refused. A refusal (of an open breaker, say) costs a
call no attempt, and pauses the worker. A failure is tried again after a pause, `attempts` times in
all; then the call is a dead letter.
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
from seawall.context import idempotency_key, reset, tenant
from seawall.durable._connections import Ask
from seawall.durable._later_calls import Later, decoded, redoing
from seawall.durable._later_doing import Given, WithoutFallbacks, called_in_thread
from seawall.durable._trouble import Trouble
from seawall.durable._uncut import uncut
from seawall.errors import Rejected, matches
from seawall.executors import IoPool
from seawall.guard import Guard
from seawall.models.backoff import Backoff, above_floor, as_backoff, full_jitter
from seawall.runtime.events import JobDied, emit
from seawall.runtime.functions import kind_of
from seawall.runtime.log import FailureLog
from seawall.runtime.runners import sleep_async
from seawall.runtime.stepping import Steps
from seawall.runtime.stop_signals import run_until_signal

if TYPE_CHECKING:
    import asyncio

LONGEST_ERROR: Final = 500
LONGEST_PAUSE: Final = 60.0
"""Seconds after a refusal; then the guard is asked again, whatever it said."""
CLEANING: Final = 60.0
"""Seconds after which what is over is looked for again."""
CLEANED: Final = 1000
"""So many at once are removed."""
ENDING: Final = 5.0
"""Seconds after the grace for giving back what is at work; then the leases do it."""
TELLINGS: Final = 5
"""How often it is tried to tell the database how a call went."""


class Claim(NamedTuple):
    """A call that this worker may do."""

    position: int
    id: str
    epoch: int
    attempts: int
    call: str
    key: str | None
    tenant: str | None
    expired: int


class LaterWorker:
    """Do the calls of a `Later` by its function: an async one, or a plain one in threads."""

    def __init__(
        self,
        later: Later,
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
        """Do up to `concurrency` calls at once, each under `guard` without its fallbacks.

        A function that a guard has decorated needs no `guard`. Between attempts, `attempts` in all,
        there are pauses of `backoff`: full jitter from 1 s up to 5 minutes, unless given. An error
        of `give_up_on` is final at once. `ordered` does one call at a time, the oldest: what fails
        holds up all behind it. Where nothing is to be done, it looks each `poll` seconds.
        """
        if not isinstance(later, Later):
            raise TypeError(f"LaterWorker({later!r}, ...): pass a Later")
        check.function("function", function)
        if guard is not None and not isinstance(guard, Guard):
            raise TypeError(f"guard={guard!r}: pass a Guard")
        self.later = later
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
        # Under its fallbacks a failure would look like an answer, and be stored once more.
        self._function = function if guard is None else guard._plan_for(function)[1]
        self._guard = None if guard is None else WithoutFallbacks(guard)
        kind = kind_of(self._function)
        if kind not in ("sync", "async"):
            raise TypeError(f"{function!r}: pass a function that returns its result whole")
        self._awaited = kind == "async"
        self._owner = token_hex(8)
        self._clock = later.database.guard.clock
        self._resume_at = self._clean_at = float("-inf")
        self._stopped = False
        self._end_at = inf
        self._failures = FailureLog("later", later.name, self._clock)
        self._outage = Trouble(f"later {later.name!r}", self._clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news: asyncio.Event | None = None
        self._halt: asyncio.Event | None = None
        self._threads: IoPool | None = None
        words = ("done", "failed", "refused", "dead", "lost", "returned")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "later_worker", later.name)

    def __repr__(self) -> str:
        return f"<LaterWorker of {self.later!r}>"

    # Working

    async def run(self) -> None:
        """Do calls until `stop` is called; cancelled, it gives back what it has begun."""
        import asyncio

        from seawall.runtime.abandon import end

        if self._loop is not None:
            raise RuntimeError(f"{self!r} runs already: make another")
        if self._stopped:
            return
        self._loop = asyncio.get_running_loop()
        self._news, self._halt = asyncio.Event(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()
        # In a task of its own: a database may not answer, and `stop` not wait for that.
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
                    await end([fetching, *tasks])  # once more: who still tries to tell, too
                finally:
                    self._loop = self._news = self._halt = None
        if fetching.done() and not fetching.cancelled():
            fetching.result()  # if it broke, that was no stop

    async def _fetch(self, tasks: set[asyncio.Task[None]]) -> None:
        """Begin calls as there is room for them, until stopped."""
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
        """Do what is due now, up to `concurrency` calls; return how many were begun."""
        import asyncio

        claims = await self._claims(self.concurrency)
        await asyncio.gather(*(self._do(claim) for claim in claims))
        return len(claims)

    def run_sync(self, drain: float = 10.0) -> None:
        """Do calls until `stop` is called, in this thread; for programs without an event loop.

        In the main thread, SIGTERM and SIGINT stop it too: the first by `stop(drain)`, a second one
        by `stop(0)`. A signal that the program handles itself is left to it.
        """
        run_until_signal(self.run, self.stop, drain)

    def stop(self, grace: float = 10.0) -> None:
        """Begin no more calls, and give those at work `grace` seconds; the rest is given back.

        From any thread or signal handler; `run` returns when it is done, some seconds after the
        grace at the latest. A call that was given back is free at once, and has lost no attempt. A
        thread cannot be stopped: what a plain function is still at is free when its lease is over.
        """
        seconds = check.seconds("grace", grace, zero=True)
        self._end_at = min(self._end_at, self._clock.now() + seconds)
        self._stopped = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._halted)
            except RuntimeError:
                pass  # the loop is closed: it has stopped

    def snapshot(self) -> dict[str, Any]:
        """Return how many calls were done, failed, refused, given up, lost and given back."""
        paused = self._clock.now() < self._resume_at
        running = self._loop is not None
        return {"queue": self.later.name, "running": running, "paused": paused, **self._counts}

    def _ring(self) -> None:
        if self._news is not None:
            self._news.set()

    def _halted(self) -> None:
        self._ring()
        if self._halt is not None:
            self._halt.set()

    async def _wait(self, seconds: float) -> None:
        """Wait until a call has ended, or the worker is stopped; at most so long."""
        import asyncio

        assert self._news is not None  # noqa: S101 - made before
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _clean(self) -> None:
        """Remove what is over, a batch now and then: so nobody has to think of it."""
        if self._clock.now() < self._clean_at:
            return
        try:
            removed = await self.later.database.arun(lambda: self.later._cleaning(CLEANED))
            more = removed == CLEANED
        except Exception:  # noqa: BLE001 - the database is away: what is over stays for a while
            more = False
        self._clean_at = self._clock.now() + (self.poll if more else CLEANING)

    async def _claims(self, most: int) -> list[Claim]:
        """Claim what is due; nothing where the database does not answer: it is asked again."""
        if most < 1 or self._clock.now() < self._resume_at:
            return []
        lease = int(self.lease * 1_000_000)
        asked = {"queue": self.later.name, "owner": self._owner, "lease": lease, "most": most}

        def steps() -> Steps[list[Any]]:
            if not self.ordered:
                return list((yield Ask("later.claim", asked)))
            if self.later.database.dialect == "postgres":
                yield Ask("later.one_claims", {"queue": self.later.name})
            return list((yield Ask("later.claim_first", asked)))

        try:
            rows = await self.later.database.arun(steps)
        except Exception as error:  # noqa: BLE001 - of any driver's; told, and asked again
            self._outage.failed(None, "nothing can be claimed", error)
            return []
        self._outage.well(None)
        return sorted(Claim(*row) for row in rows)

    async def _do(self, claim: Claim) -> None:
        """Do one call, and tell the database how it went."""
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
                raise  # it goes on: its call is free after the lease
            if not task.cancelled() and task.exception() is None:
                await self._report(claim, None)
            elif self._awaited:  # a thread cannot be stopped: its call is free after the lease
                self._counts["returned"] += 1
                await self._tell(claim, "again", delay=0, refund=1, error=None)
            raise
        if not kept:
            self._counts["lost"] += 1
            return None
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        return await uncut(self._report(claim, error))  # it is done: that is told to the end

    async def _call(self, claim: Claim, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Do it in the context in which it was stored."""
        token = redoing.set((*redoing.get(), self.later.name))
        try:
            with Given(tenant, claim.tenant), Given(idempotency_key, claim.key):
                if self._awaited:
                    await self._under_guard("acall")(*args, **kwargs)
                else:
                    if self._threads is None:  # twice: for those that lost their claims, too
                        name = f"{self.later.name}-later"
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
        """Prolong the claim until `task` is over; False, and it is cancelled, if that is lost."""
        import asyncio

        until = self._clock.now() + self.lease
        while True:
            done, _ = await asyncio.wait([task], timeout=self.lease / 3)
            if done:
                return True
            asked = self._clock.now()
            try:
                # No longer than the claim holds: then somebody else may begin.
                async with asyncio.timeout(max(until - asked, self.lease / 3)):
                    renewed = await self._change(claim, "renew", lease=int(self.lease * 1_000_000))
            except Exception:  # noqa: BLE001 - the database is away: the claim holds until its end
                renewed = self._clock.now() < until
            else:
                until = asked + self.lease
            if not renewed:
                task.cancel()
                await asyncio.wait([task])
                return False

    # How it went

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
            emit(JobDied, self.later.name, cause=cause or said, **fields)

    async def _tell(self, claim: Claim, what: str, **more: Any) -> bool:
        """Tell the database; if it does not hear, the call is done again after the lease."""
        for number in range(TELLINGS):
            try:
                told = await self._change(claim, what, **more)
            except Exception as error:  # noqa: BLE001 - of any driver's; tried again
                if number + 1 < TELLINGS:
                    await sleep_async(0.1 * 2**number)
                    continue
                log = logging.getLogger("seawall")
                log.warning(
                    "%r: call %s: %r was not told: %s", self, claim.id, what, described(error)
                )
                return False
            if not told:
                self._counts["lost"] += 1  # somebody else has it: what we say is refused
            return told
        return False

    async def _change(self, claim: Claim, what: str, **more: Any) -> bool:
        asked = {"id": claim.id, "owner": self._owner, "epoch": claim.epoch, **more}

        def steps() -> Steps[bool]:
            return bool((yield Ask(f"later.{what}", asked)))

        return await self.later.database.arun(steps)
