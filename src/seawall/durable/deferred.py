"""Deferred calls: store a call that cannot be done now, and do it when its dependency is back.

`DeferredCalls` is a level of a `Fallback`: it stores the arguments and answers with a
`DeferredCall`. A `DeferredCallWorker` executes the calls, through the same guard without its
fallbacks.

Promises:

- A call that was answered with `DeferredCall` is on disk. It is done at least once, or becomes a
  dead letter, which is reported.
- A call repeated with its idempotency key is stored once, and done with that same key.
- About `max_waiting` calls wait at most, and none for longer than `ttl`.
- A call is claimed for a lease, which is renewed while it runs. A worker that has died loses its
  claims, and its late reports are refused.
- A refusal (by an open breaker, for instance) costs a call no attempt, and pauses the worker.
- A failed call is retried after a pause, `attempts` times in all; then it is a dead letter.
"""

from __future__ import annotations

import asyncio
import json
from asyncio import get_running_loop
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from hashlib import blake2b
from inspect import isawaitable
from random import Random
from secrets import token_hex
from typing import Any, Final, Literal, NamedTuple
from uuid import uuid4

from seawall import _checks as check
from seawall import registry
from seawall._failures import described, report_of, split_report
from seawall._forks import survives_fork
from seawall.context import current_idempotency_key, current_tenant, idempotency_key, reset, tenant
from seawall.durable.database.cleanup import clean_forever, cleaning_steps
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database, checked_database
from seawall.durable.database.outage_log import OutageLog
from seawall.durable.database.statements import stored_name
from seawall.durable.database.twins import transaction_twins, twins
from seawall.errors import DeferredCallsFull, Rejected, matches
from seawall.events import JobDied
from seawall.events.bus import emit
from seawall.events.log import FailureLog
from seawall.guard import Guard
from seawall.jobs import Claim, DeadJob
from seawall.jobs.worker_loop import Backoffs, WorkerLoop, WorkRun
from seawall.models.backoff import above_floor
from seawall.runtime.driver import Steps
from seawall.runtime.functions import kind_of
from seawall.runtime.plan import Plan

WAITING, DONE, DEAD = 0, 1, 2
STATES: Final = ("waiting", "done", "dead")
LONGEST_KEY: Final = 1024

LONGEST_ERROR: Final = 500
LONGEST_PAUSE: Final = 60.0
"""Maximum pause in seconds after a refusal, even if the guard asked for a longer one."""
LONGEST_BACKOFF: Final = 86_400.0
CLEAN_EVERY: Final = 60.0
"""Seconds between two cleanups."""
SUBSTITUTES: Final = frozenset({"cache", "fallback"})
"""Policies that may answer instead of the call: the worker would take that for success."""

executing_queues: Final[ContextVar[tuple[str, ...]]] = ContextVar(
    "seawall_executing_queues", default=()
)
"""The queues whose calls this context is executing: a failed one is not stored a second time."""


class DeferredCall(NamedTuple):
    """The answer to a call that will be done later. As a placeholder, it is `degraded`."""

    id: str
    queue: str
    state: Literal["waiting", "done", "dead"] = "waiting"
    """Current state of the call: for a repeated key it may be done or dead already."""
    again: bool = False
    """Whether a call with the same key had been stored before."""

    @property
    def degraded(self) -> bool:
        """Always True."""
        return True


class DeferredCalls:
    """A queue of stored calls of one function; a level for `Fallback`."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        ttl: float = 86_400.0,
        delay: float = 1.0,
        max_waiting: int = 10_000,
        max_size: int = 64 * 1024,
        keep_dead: float = 30 * 86_400.0,
        key: Callable[..., str | None] | None = None,
    ) -> None:
        """Store calls under `name`; each is done within `ttl` seconds or given up.

        The first attempt is `delay` seconds after the call was stored. Beyond `max_waiting` waiting
        calls, more are refused (`DeferredCallsFull`); concurrent callers may exceed that limit
        slightly. The arguments must be JSON of at most `max_size` bytes. Dead letters are kept for
        `keep_dead` seconds after the ttl. `key(*args, **kwargs)` returns the idempotency key of the
        call. Without it, the context's idempotency key together with the arguments is used, because
        a request may make several calls under one key.
        """
        self.database = checked_database("DeferredCalls", database)
        self.name = stored_name("name", name)
        self.ttl = check.seconds("ttl", ttl)
        self.delay = check.seconds("delay", delay, zero=True)
        self.max_waiting = check.count("max_waiting", max_waiting, maximum=1_000_000)
        self.max_size = check.count("max_size", max_size)
        self.keep_dead = check.seconds("keep_dead", keep_dead, zero=True)
        self._key = None if key is None else check.plain_function("key", key)
        self._totals = dict.fromkeys(("stored", "again", "refused"), 0)
        registry.enter(self, "deferred_calls", self.name, ask="acounts")

    def __repr__(self) -> str:
        return f"DeferredCalls({self.name!r})"

    # Storing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Store a call: immediately, or as an awaitable if an event loop is running."""
        try:
            get_running_loop()
        except RuntimeError:
            return self.store(*args, **kwargs)
        return self.astore(*args, **kwargs)

    def _store(self, *args: Any, **kwargs: Any) -> Steps[DeferredCall]:
        """Store a call with these arguments."""
        storing = self._prepared(args, kwargs)
        stored: DeferredCall = yield lambda: self._storing(storing)
        self._totals["again" if stored.again else "stored"] += 1
        return stored

    store, astore = twins(_store)

    def _prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self.name in executing_queues.get():
            raise RuntimeError(f"{self!r}: this is a stored call, which is not stored again")
        try:
            call = json.dumps([args, kwargs], allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self!r}: only a call whose arguments are JSON can be stored: {error}"
            ) from None
        if len(call) > self.max_size:
            raise ValueError(f"{self!r}: the arguments take more than {self.max_size} bytes")
        key = current_idempotency_key() if self._key is None else self._key(*args, **kwargs)
        if key is not None and (not isinstance(key, str) or not 0 < len(key) <= LONGEST_KEY):
            raise ValueError(f"key: write 1 to {LONGEST_KEY} characters, not {str(key)[:50]!r}")
        if key is not None and not key.isprintable():
            raise ValueError(f"key: write printable characters, not {key[:50]!r}")
        tenant, named_by = current_tenant(), call if self._key is None else None
        return {
            "queue": self.name,
            "id": uuid4().hex,
            "key_hash": None if key is None else _digest(tenant, key, named_by),
            "call": call,
            "key": key,
            "tenant": tenant,
            "delay": _us(self.delay),
            "ttl": _us(self.ttl),
            "most": self.max_waiting,
        }

    def _storing(self, storing: dict[str, Any]) -> Steps[DeferredCall]:
        for _ in range(2):
            rows = yield NamedQuery("deferred_calls.store", storing)
            if rows:
                return DeferredCall(storing["id"], self.name)
            if storing["key_hash"] is None:
                break
            arguments = {"queue": self.name, "key_hash": storing["key_hash"]}
            rows = yield NamedQuery("deferred_calls.of_key", arguments)
            if not rows:
                continue
            found, state, expired = rows[0]
            if state != DONE or not expired:
                word: Any = STATES[state]
                return DeferredCall(found, self.name, word, again=True)
            yield NamedQuery("deferred_calls.drop_done", {"id": found})
        self._totals["refused"] += 1
        raise DeferredCallsFull(f"{self!r}: {self.max_waiting} calls are waiting", policy=self.name)

    # Executing

    async def run(self, function: Callable[..., Any], **options: Any) -> None:
        """Execute stored calls with `function` until cancelled, by a `DeferredCallWorker`."""
        await DeferredCallWorker(self, function, **options).run()

    # Dead letters, counts and cleanup

    def _dead(self, limit: int = 100) -> Steps[list[DeadJob]]:
        """Return the dead letters in the order in which they were stored."""
        most = check.count("limit", limit, maximum=10_000)
        rows = yield NamedQuery("deferred_calls.dead_letters", {"queue": self.name, "most": most})
        letters = []
        for found, attempts, call, error in rows:
            arguments = decoded(call)
            payload = None if arguments is None else list(arguments)
            letters.append(DeadJob(found, payload, attempts, *split_report(error or "")))
        return letters

    dead, adead = transaction_twins(_dead)

    def _retry(self, dead: str) -> Steps[bool]:
        """Queue a dead letter again as if it were stored now; return False if it does not exist."""
        arguments = {"queue": self.name, "id": stored_name("id", dead), "ttl": _us(self.ttl)}
        return bool((yield NamedQuery("deferred_calls.revive", arguments)))

    retry, aretry = transaction_twins(_retry)

    def _discard(self, stored: str) -> Steps[bool]:
        """Remove a waiting or dead call; return False if it does not exist or is running."""
        arguments = {"queue": self.name, "id": stored_name("id", stored)}
        return bool((yield NamedQuery("deferred_calls.discard", arguments)))

    discard, adiscard = transaction_twins(_discard)

    def _counts(self) -> Steps[dict[str, Any]]:
        """Return the numbers of waiting, done and dead calls, and the age of the oldest waiting."""
        rows = yield NamedQuery("deferred_calls.counts", {"queue": self.name})
        found = {state: (number, age) for state, number, age in rows}
        counts: dict[str, Any] = {
            word: found.get(state, (0, 0))[0] for state, word in enumerate(STATES)
        }
        counts["oldest"] = max(0, found.get(WAITING, (0, 0))[1]) / 1_000_000
        registry.answered(self, counts)
        return counts

    counts, acounts = transaction_twins(_counts)

    def _cleanup(self, *, batch: int = 1000, within: float = 10.0) -> Steps[int]:
        """Remove finished calls past their retention, in batches; return how many were removed.

        It ends after about `within` seconds, finished or not: call it periodically.
        """
        finished = {"queue": self.name, "keep_dead": _us(self.keep_dead)}
        return cleaning_steps(batch, within, NamedQuery("deferred_calls.cleanup", finished))

    cleanup, acleanup = twins(_cleanup)

    def snapshot(self) -> dict[str, Any]:
        """Return how many calls this process stored, found stored and refused. See `acounts`."""
        return {"queue": self.name, "max_waiting": self.max_waiting, **self._totals}


def decoded(call: Any) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of a stored call; None if the record is not a valid call."""
    try:
        args, kwargs = json.loads(call)
    except (TypeError, ValueError, RecursionError):
        return None
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        return None
    return args, kwargs


def _digest(tenant: str | None, key: str, call: str | None) -> bytes:
    """Return the lookup key of a call: different for each tenant, key and set of arguments."""
    arguments = None if call is None else json.loads(call)
    whole = json.dumps([tenant, key, arguments], sort_keys=True)
    return blake2b(whole.encode(), digest_size=32).digest()


def _us(seconds: float) -> int:
    return int(seconds * 1_000_000)


class WithoutFallbacks(Guard):
    """The same guard with the same state, but without policies that hide a failure."""

    def __init__(self, guard: Guard) -> None:
        """Share the state of `guard`."""
        vars(self).update(vars(guard))
        self.bounds = [b for b in guard.bounds if b.policy.kind not in SUBSTITUTES]
        self._plan = Plan(self, self.bounds)
        survives_fork(self)


class DeferredCallWorker(WorkerLoop[WorkRun]):
    """Executes deferred calls with a function: an async one, or a plain one in threads."""

    _once_raises = False

    def __init__(
        self,
        calls: DeferredCalls,
        function: Callable[..., Any],
        *,
        guard: Guard | None = None,
        concurrency: int = 4,
        attempts: int = 20,
        lease: float = 30.0,
        backoff: Backoffs = None,
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
        clock = calls.database.guard.clock
        super().__init__(clock, concurrency=concurrency, backoff=backoff, rng=rng)
        self.calls = calls
        self.ordered = check.flag("ordered", ordered)
        if ordered:
            self.concurrency = 1
        self.attempts = check.count("attempts", attempts)
        self.lease = check.seconds("lease", lease)
        self.poll = check.seconds("poll", poll)
        self._give_up_on = check.error_types("give_up_on", give_up_on)
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
        self._failures = FailureLog("deferred calls", calls.name, self._clock)
        self._outage = OutageLog(f"deferred calls {calls.name!r}", self._clock)
        words = ("done", "failed", "refused", "dead", "lost", "returned")
        self._counts = dict.fromkeys(words, 0)
        registry.enter(self, "deferred_call_worker", calls.name)

    def __repr__(self) -> str:
        return f"<DeferredCallWorker of {self.calls!r}>"

    async def run_once(self) -> int:
        """Execute the calls that are due, up to `concurrency`; return how many were started."""
        return await self._session(once=True)

    def snapshot(self) -> dict[str, Any]:
        """Return the numbers of calls done, failed, refused, dead, lost and given back."""
        paused = self._clock.now() < self._resume_at
        running = self._loop is not None
        return {"queue": self.calls.name, "running": running, "paused": paused, **self._counts}

    # Claiming and renewing

    async def _claim(self, free: int) -> list[WorkRun]:
        lease, now = int(self.lease * 1_000_000), self._clock.now()
        arguments = {"queue": self.calls.name, "owner": self._owner, "lease": lease, "most": free}

        def steps() -> Steps[list[Any]]:
            if not self.ordered:
                return list((yield NamedQuery("deferred_calls.claim", arguments)))
            if self.calls.database.dialect == "postgres":
                yield NamedQuery("deferred_calls.one_claims", {"queue": self.calls.name})
            return list((yield NamedQuery("deferred_calls.claim_first", arguments)))

        rows = await self.calls.database.arun(steps)
        runs = []
        for _position, id_, epoch, attempts, call, key, owner, expired in sorted(rows):
            left = 0.0 if expired else float("inf")
            claim = Claim(id_, decoded(call), attempts, epoch, now + self.lease, self.lease)
            claim.key, claim.tenant, claim.time_left = key, owner, left
            runs.append(WorkRun(claim, in_thread=not self._awaited))
        return runs

    async def _pause(self, claimed: int) -> None:
        await self._wait_for_news(self.poll)

    def _unreachable(self, error: Exception) -> None:
        self._outage.failed(None, "nothing can be claimed", error)

    def _reached(self) -> None:
        self._outage.succeeded(None)

    def _background(self) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(clean_forever([self.calls], CLEAN_EVERY))]

    def _beat_after(self, *, answered: bool) -> float:
        return self.lease / (3 if answered else 12)

    async def _renew(self, runs: list[WorkRun]) -> bool:
        running = [run for run in runs if not run.settling]
        return all(await asyncio.gather(*(self._extend(run) for run in running)))

    async def _extend(self, run: WorkRun) -> bool:
        """Renew one claim; return False if the database did not answer."""
        claim, now = run.claim, self._clock.now()
        try:
            held = await self._change(claim, "renew", lease=int(self.lease * 1_000_000))
        except Exception:  # noqa: BLE001 - database unreachable: the claim is valid to its end
            return False
        if held:
            claim.until = now + self.lease
        elif not run.settling:
            run.lose()
        return True

    # Executing

    async def _reject(self, run: WorkRun) -> str | None:
        """Give up a call that must not be attempted again."""
        claim = run.claim
        if claim.time_left <= 0:
            return await self._bury(run, "its ttl was over", "expired")
        if claim.attempt > self.attempts:
            return await self._bury(run, "nobody reported how its last attempt went", "lost")
        if claim.payload is None:
            return await self._bury(run, "what is stored is no call", "garbled")
        return None

    async def _call(self, run: WorkRun) -> None:
        """Execute the call in the context in which it was stored."""
        args, kwargs = run.claim.payload
        run.begun = True
        token = executing_queues.set((*executing_queues.get(), self.calls.name))
        try:
            owner, key = run.claim.tenant, run.claim.key
            with (
                nullcontext() if owner is None else tenant(owner),
                nullcontext() if key is None else idempotency_key(key),
            ):
                if self._awaited:
                    await self._under_guard("acall")(*args, **kwargs)
                    return
                function = self._under_guard("call")
                # Twice as many threads: calls that lost their claim may still run.
                name, size = f"{self.calls.name}-deferred-calls", 2 * self.concurrency
                (result,) = await self._in_thread(name, size, lambda: (function(*args, **kwargs),))
                # A plain function may return the awaitable of an async one: the call ends with it.
                if isawaitable(result):
                    await result
        finally:
            reset(executing_queues, token)

    def _under_guard(self, how: str) -> Callable[..., Any]:
        if self._guard is None:
            return self._function
        call = getattr(self._guard, how)
        return lambda *args, **kwargs: call(self._function, *args, **kwargs)

    # Reporting

    async def _return_claim(self, run: WorkRun, delay: float) -> str:
        stored = await self._report(run, "again", delay=_us(delay), refund=1, error=None)
        return "returned" if stored else "lost"

    async def _succeeded(self, run: WorkRun, result: Any) -> str:
        query = "done_without_key" if run.claim.key is None else "done"
        return "done" if await self._report(run, query) else "lost"

    async def _failed(self, run: WorkRun, error: BaseException) -> str:
        claim = run.claim
        if isinstance(error, Rejected):
            least = error.retry_after
            if least is None:
                pause = self._pause_after(claim.attempt, longest=LONGEST_PAUSE)
            else:
                pause = above_floor(min(max(least, 0.0), LONGEST_PAUSE), self._rng.random)
            self._resume_at = self._clock.now() + pause
            text, refund, outcome = described(error), 1, "refused"
        else:
            text, refund, outcome = report_of(error, LONGEST_ERROR), 0, "failed"
            final = claim.attempt >= self.attempts or matches(error, self._give_up_on)
            pause = 0.0 if final else self._pause_after(claim.attempt, longest=LONGEST_BACKOFF)
            what = f"call {claim.id}"
            self._failures.failed(what, claim.id, claim.attempt, error, delay=pause, dead=final)
            if final:
                return await self._bury(run, text)
        stored = await self._report(run, "again", delay=_us(pause), refund=refund, error=text)
        return outcome if stored else "lost"

    async def _bury(self, run: WorkRun, text: str, cause: str = "") -> str:
        if not await self._report(run, "dead", error=text):
            return "lost"
        line, trace = split_report(text)
        claim, attempts = run.claim, min(run.claim.attempt, self.attempts)
        fields = {"job": claim.id, "attempts": attempts, "traceback": trace}
        emit(JobDied, self.calls.name, cause=cause or line, **fields)
        return "dead"

    async def _report(self, run: WorkRun, query: str, **more: Any) -> bool:
        """Report to the database; if that fails, the call is repeated when the lease expires."""
        answer = await self._until_answered(
            run, lambda _unsure: self._change(run.claim, query, **more)
        )
        return bool(answer)

    async def _change(self, claim: Claim, query: str, **more: Any) -> bool:
        arguments = {"id": claim.id, "owner": self._owner, "epoch": claim.fence, **more}
        change = NamedQuery(f"deferred_calls.{query}", arguments)
        return bool(await self.calls.database.arun(change.alone))
