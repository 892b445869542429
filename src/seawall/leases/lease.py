"""A lease: one holder across all pods for as long as it renews, with a fencing token.

Promises:

- The store (Redis, PostgreSQL or SQLite) grants a lease to one holder at a time.
- Each holder's token is higher than the tokens of all earlier holders.
- `held` turns false no later than the store may grant the lease to another holder. This machine's
  monotonic clock decides, counted from before the request was sent. A lost lease stays lost.
- `on_lost` is called once. The store accepts nothing from an earlier holder.

No lease can prevent a process from acting later if it is suspended just after it checked `held`. So
pass the token to the protected resource, and let the resource refuse lower tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import inf
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.context import give_up_at
from seawall.errors import DeadlineExceeded, LeaseLost, StoreUnavailable, TimedOut
from seawall.events import LeaseChanged
from seawall.events.bus import emit
from seawall.leases.store import LeaseStore, Release, Renew, Take, Withdraw
from seawall.models.backoff import full_jitter
from seawall.models.lease import Busy, LeaseGranted
from seawall.runtime.driver import Steps, adrive, drive, sleep_async, wait_async, wait_sync
from seawall.runtime.layers import Kind, Waiter
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from random import Random

    from seawall.leases.store import LeaseShare, PeriodicJob
    from seawall.runtime.store import StoreQuestion

LONGEST_TTL: Final = 30 * 24 * 3600.0
"""Maximum ttl in seconds. To hold a lease for longer, renew it."""
SPREAD: Final = 0.25
"""Seconds after a lease expires over which the waiters spread their requests at random."""
DRIFT: Final = 0.001
"""Assumed clock drift, a fraction of the ttl: the holder stops that much before the store."""
GIVING_BACK: Final = 1.0
"""Timeout in seconds of a release that has no waiter, or that happens while the store closes."""
_AFTER_RELEASE: Final = full_jitter(0.005, cap=SPREAD)
_AFTER_FAILURE: Final = full_jitter(0.1, cap=1.0)


class Lease:
    """A lease: the block of `with lease:` or `async with lease:` runs in one pod at a time.

    One object is one holder: threads or tasks that compete need a `Lease` each.
    """

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        *,
        ttl: float = 10.0,
        renew_every: float | None = None,
        on_lost: Callable[[Lease], object] | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Compete for the lease `name` with all leases of the same store, prefix and name.

        `store` is a `RedisStore`, or a `seawall.durable.Database` whose tables were migrated. A
        holder that has not renewed for `ttl` seconds has lost the lease. The lease is renewed in
        the background every `renew_every` seconds (default: a third of `ttl`). If it is lost while
        held, `on_lost(lease)` is called in the background: it must be a plain function that returns
        quickly. The background is a thread of the store; for an async database it is the event loop
        in which the lease was acquired.
        """
        if isinstance(store, type) or not hasattr(store, "_lease"):
            raise TypeError(f"Lease({store!r}, ...): pass a RedisStore or a Database")
        if not isinstance(name, str) or not name:
            raise TypeError(f"Lease(store, {name!r}): write a name, such as 'nightly-report'")
        self.name = name
        self.ttl = check.seconds("ttl", ttl)
        if self.ttl > LONGEST_TTL:
            raise ValueError(f"ttl={ttl!r}: write at most {LONGEST_TTL:.0f} seconds, 30 days")
        every = self.ttl / 3 if renew_every is None else check.seconds("renew_every", renew_every)
        if every > self.ttl / 2:
            raise ValueError(f"renew_every={every!r}: write at most half of ttl={self.ttl!r}")
        self.renew_every = every
        self._on_lost = None if on_lost is None else check.plain_function("on_lost", on_lost)
        self.clock = current_clock() if clock is None else check_clock(clock)
        self._rng = None if rng is None else check.chance("rng", rng)
        self._reset_random()
        self._share = store._lease(name)  # noqa: SLF001 - hidden from users, not from us
        self._holder = token_hex(8)
        self._attempt = 0
        self._token = 0
        self._mutex = Mutex()
        self._acquiring_now = self._unanswered = False
        self._holding: LeaseHolding | None = None
        survives_fork(self)
        registry.enter(self, "lease", name)

    def __repr__(self) -> str:
        state = f"held, token {self._token}" if self.held else "not held"
        return f"<Lease {self.name!r}: {state}>"

    # State

    @property
    def held(self) -> bool:
        """Whether this object certainly holds the lease."""
        return self.left > 0

    @property
    def left(self) -> float:
        """Number of seconds for which the lease is certainly held, even if no renewal succeeds."""
        holding = self._holding
        return 0.0 if holding is None else holding.left

    @property
    def token(self) -> int:
        """The fencing token of the last holding, higher than all earlier ones; 0 if never held.

        Pass it to the resource that the lease protects. The resource must refuse a token that is
        lower than the highest one it has seen.
        """
        return self._token

    @property
    def closed(self) -> bool:
        """Whether the store was closed. The lease is then never held again."""
        return self._share.closed

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is held. Call it before each side effect."""
        if not self.held:
            raise LeaseLost(f"the lease {self.name!r} is not held")

    def snapshot(self) -> dict[str, Any]:
        """Return the current state for display."""
        left = self.left
        shown = {"name": self.name, "held": left > 0, "token": self._token, "left": left}
        return {**shown, "ttl": self.ttl, "renew_every": self.renew_every}

    # Acquiring

    def acquire(self, timeout: float | None = None) -> int:
        """Wait until the lease is acquired and return its token; raise `TimedOut` after `timeout`.

        A `timeout` of 0 asks the store once. The wait continues through an outage of the store; if
        the outage lasts to the end, `StoreUnavailable` is raised. A deadline bounds the wait too;
        if it has passed already, `DeadlineExceeded` is raised and the store is not asked.
        """
        drive(self._acquiring("sync", timeout), self._wait)
        return self._token

    async def aacquire(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as `acquire`
        """Async twin of `acquire`."""
        await adrive(self._acquiring("async", timeout), self._await)
        return self._token

    def try_acquire(self) -> bool:
        """Take the lease if it is free; return whether it was. Raise if the store fails."""
        return drive(self._trying("sync"), self._wait)

    async def atry_acquire(self) -> bool:
        """Async twin of `try_acquire`."""
        return await adrive(self._trying("async"), self._await)

    # Releasing

    def release(self) -> bool:
        """Release the lease; return whether it was held until now (False: it had been lost).

        If the store is down, nothing is raised: the lease then expires after its ttl.
        """
        return drive(self._releasing("sync"), self._wait)

    async def arelease(self) -> bool:
        """Async twin of `release`."""
        return await adrive(self._releasing("async"), self._await)

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: object, *_exc: object) -> None:
        if not self.release() and kind is None:
            raise self._lost_inside()

    async def __aenter__(self) -> Self:
        await self.aacquire()
        return self

    async def __aexit__(self, kind: object, *_exc: object) -> None:
        if not await self.arelease() and kind is None:
            raise self._lost_inside()

    def _lost_inside(self) -> LeaseLost:
        return LeaseLost(f"the lease {self.name!r} was lost before the block was over")

    # Acquiring and releasing as steps (questions and pauses) for the sync and the async driver

    def _wait(self, step: Waiter | float) -> Any:
        return wait_sync(step, self.clock)

    async def _await(self, step: Waiter | float) -> Any:
        return await wait_async(step, self.clock)

    def _trying(self, kind: Kind) -> Steps[bool]:
        until = self._time_limit(self.clock.now(), inf)
        self._begin_acquiring()
        try:
            answer = yield from self._ask(kind, until)
        finally:
            self._end_acquiring()
        if isinstance(answer, str):
            raise StoreUnavailable(answer)
        return isinstance(answer, LeaseGranted)

    def _acquiring(self, kind: Kind, timeout: float | None) -> Steps[None]:
        wait = inf
        if timeout is not None:
            wait = check.seconds("timeout", timeout, zero=True, infinite=True)
        began = self.clock.now()
        until, _by_deadline = give_up_at(began, wait)
        # timeout 0: a single question, bounded only by the store's own timeout
        bound = self._time_limit(began, wait or inf)
        woken, failed = _AFTER_RELEASE.delays(self._random), _AFTER_FAILURE.delays(self._random)
        bell = ReleaseBell(self._share)
        known: Busy | str = ""
        self._begin_acquiring()
        try:
            while True:
                bell.rung = False
                answer = yield from self._ask(kind, bound)
                if isinstance(answer, LeaseGranted):
                    return
                now = self.clock.now()
                if until is not None and now >= until:
                    # This question was cut short: report the answer before it.
                    raise self._timeout_error(
                        known if isinstance(known, Busy) else answer, now - began
                    )
                known = answer
                again = now + self._next_look(answer, failed)
                if (
                    yield from self._wait_for_release(self._next_question(again, now, until), bell)
                ):
                    # The release woke all waiters: a random delay keeps them from asking at the
                    # same moment.
                    pause = next(woken)
                    if until is None or self.clock.now() + pause < until:
                        yield pause
                now = self.clock.now()
                if until is not None and now >= until:
                    raise self._timeout_error(known, now - began)
        finally:
            self._end_acquiring()
            bell.close()

    def _next_look(self, answer: Busy | str, failed: Iterator[float]) -> float:
        """Return the number of seconds until the next question, unless the bell rings first."""
        if isinstance(answer, str):
            return next(failed)
        spread = self._random() * min(SPREAD, self.ttl / 10)
        return min(answer.left / 1e6, self._share.longest_poll(self.ttl)) + spread

    def _next_question(self, again: float, now: float, until: float | None) -> float:
        """Return when to ask again; the last question must leave time for its answer."""
        if until is None:
            return again
        last = until - self._share.timeout
        return min(again, last if now < last else until)

    def _wait_for_release(self, until: float, bell: ReleaseBell) -> Steps[bool]:
        """Wait until `until` or until the bell rings (True); raise if the store is closed."""
        bell.listen()
        self._refuse_if_closed()  # from here on, closing the store rings the bell
        bell.until = until
        rung: bool = yield bell
        self._refuse_if_closed()
        return rung

    def _ask(self, kind: Kind, until: float | None) -> Steps[LeaseGranted | Busy | str]:
        """Ask for the lease once and hold it if granted; return a failure as its text."""
        self._refuse_if_closed()
        self._attempt += 1
        take = Take(self._holder, self._attempt, round(self.ttl * 1e6))
        sent = self.clock.now()
        self._unanswered = True
        answer = yield from self._answer(self._share.ask(kind, take, self.clock), until)
        self._unanswered = isinstance(answer, str)
        if isinstance(answer, LeaseGranted) and not self._hold(answer.token, sent):
            self._share.post(Release(answer.token))
            self._refuse_if_closed()
            return Busy(answer.token, 0)
        return answer

    def _answer(
        self, question: StoreQuestion, until: float | None = None
    ) -> Steps[LeaseGranted | Busy | str]:
        """Return the store's answer, which must come before `until`; a failure as its text."""
        if until is not None:
            question.until = until if question.until is None else min(question.until, until)
        try:
            answer: LeaseGranted | Busy = yield question
        except StoreUnavailable as error:
            return str(error)
        return answer

    def _releasing(self, kind: Kind) -> Steps[bool]:
        token = self._drop_holding()
        if token is None:
            return False
        answer: LeaseGranted | Busy | str = ""
        try:
            answer = yield from self._answer(self._share.ask(kind, Release(token), self.clock))
        finally:
            if isinstance(answer, str):
                # the release may not have arrived: repeat it in the background
                self._share.post(Release(token))
        return not isinstance(answer, Busy)

    def _time_limit(self, now: float, wait: float) -> float | None:
        """Return when a wait that starts at `now` must end; raise if the deadline has passed."""
        until, by_deadline = give_up_at(now, wait)
        if by_deadline and until is not None and until <= now:
            raise DeadlineExceeded(
                f"the lease {self.name!r}: the deadline passed before it was asked for",
                guard=self.name,
                policy="deadline",
            )
        return until

    def _refuse_if_closed(self) -> None:
        if self._share.closed:
            raise StoreUnavailable(f"the store {self._share.store_name!r} was closed")

    def _timeout_error(self, answer: Busy | str, seconds: float) -> Exception:
        if isinstance(answer, str):
            return StoreUnavailable(answer)
        text = f"the lease {self.name!r} was held by others for {seconds:.3g} s"
        return TimedOut(text, guard=self.name, seconds=seconds)

    def _begin_acquiring(self) -> None:
        with self._mutex:
            if self._acquiring_now or self._holding is not None:
                raise RuntimeError(
                    f"{self!r} is in use: release it first, even if it was lost; threads and tasks"
                    " that compete need a Lease each"
                )
            self._acquiring_now = True

    def _end_acquiring(self) -> None:
        """Stop asking; withdraw an unanswered attempt, because the store may have granted it."""
        if self._unanswered:
            self._unanswered = False
            self._share.post(Withdraw(self._holder, self._attempt))
        self._acquiring_now = False

    def _hold(self, token: int, sent: float) -> bool:
        """Hold the lease granted to a request sent at `sent`; return False if that is too late."""
        holding = LeaseHolding(self, self._share, token, sent, self._call_on_lost)
        if not holding.left:
            return False
        before = self._token
        with self._mutex:
            self._holding, self._token = holding, token
        if holding.start():
            return True
        with self._mutex:
            self._holding, self._token = None, before
        return False

    def _drop_holding(self) -> int | None:
        """Drop the holding; return its token if the lease was held until now."""
        with self._mutex:
            holding, self._holding = self._holding, None
        return holding.token if holding is not None and holding.release_holding() else None

    def _call_on_lost(self) -> None:
        try:
            if self._on_lost is not None:
                self._on_lost(self)
        except Exception:
            logging.getLogger("seawall").exception("on_lost of lease %r failed", self.name)

    def _reset_random(self) -> None:
        self._random = (self._rng or new_random(self.name)).random

    def _after_fork(self) -> None:
        """Hold nothing in a child process: the parent owns the lease and renews it."""
        self._mutex = Mutex()
        self._holder = token_hex(8)
        self._reset_random()
        holding, self._holding = self._holding, None
        self._acquiring_now = self._unanswered = False
        if holding is not None:
            holding.abandon()


class LeaseHolding:
    """A lease that is held. `left` counts down, renewals extend it, and it ends exactly once."""

    def __init__(
        self,
        lease: Lease,
        share: LeaseShare,
        token: int,
        sent: float,
        on_lost: Callable[[], None],
    ) -> None:
        """Hold the lease granted to a request sent at `sent`. Renewals begin with `start`."""
        self.token = token
        self._lease = lease
        self._share = share
        self._on_lost = on_lost
        self._extend(sent)
        self._due = self._expired = self._ended = False
        self._mutex = Mutex()
        self._renewal: PeriodicJob | None = None
        self._unwatch: Callable[[], None] | None = None

    def _extend(self, sent: float) -> None:
        """Hold the lease for a ttl from when the request was sent, less the drift of the clocks."""
        self._since = sent
        self._until = sent + self._lease.ttl * (1 - DRIFT)

    @property
    def left(self) -> float:
        """Number of seconds for which the lease is certainly still held. Once 0, it stays 0."""
        if self._ended or self._expired:
            return 0.0
        left = self._until - self._lease.clock.now()
        if left > 0:
            return left
        self._expired = True
        self._renew_soon()
        return 0.0

    def start(self) -> bool:
        """Start renewing in the background; return False if the store is closed."""
        lease, share = self._lease, self._share
        share.keep(self)
        try:
            share.start()
        except StoreUnavailable:
            pass  # the store is closed: handled below
        if share.closed:
            # The store's `close` may have listed its holdings before this one was added: undo that
            # here.
            self._ended = True
            share.forget(self)
            return False
        self._renewal = share.every(lease.renew_every, self.renew)
        self._unwatch = share.watch(self._on_health)
        emit(LeaseChanged, lease.name, token=self.token, held=True, cause="acquired")
        return True

    async def renew(self) -> None:
        """Renew the lease if that is due; if the store fails, retry until the lease has expired."""
        lease, share = self._lease, self._share
        while not self._ended:
            sent = lease.clock.now()
            if not self._due and sent < self._since + lease.renew_every / 2:
                return  # it has just been taken or renewed
            self._due = False
            if not self.left:
                self._lose("expired")
                return
            patience = min(max(share.timeout, lease.renew_every), self._until - sent)
            try:
                answer = await share.call(Renew(self.token, round(lease.ttl * 1e6)), patience)
            except StoreUnavailable:
                rest = self._until - lease.clock.now()
                if rest > 2 * lease.renew_every:
                    return
                await sleep_async(max(0.0, min(rest, lease.renew_every / 4)))
            else:
                self._renewed(sent, answer)
                return
        self._forget()

    def _renewed(self, sent: float, answer: LeaseGranted | Busy) -> None:
        with self._mutex:
            # An answer that arrives after the guaranteed end cannot bring the lease back.
            if self.left and isinstance(answer, LeaseGranted):
                self._extend(sent)
                return
        self._lose("expired" if isinstance(answer, LeaseGranted) else "taken")

    def _on_health(self, up: bool, _cause: str) -> None:  # noqa: FBT001 - the store calls it
        if up:
            self._renew_soon()

    def _renew_soon(self) -> None:
        self._due = True
        if self._renewal is not None:
            self._renewal.soon()

    def release_holding(self) -> bool:
        """End the holding at the holder's request; return whether it was held until now."""
        held = self.left > 0
        if not self._end("released" if held else "expired"):
            return False
        if not held:
            self._share.post(Release(self.token))
        return held

    def abandon(self) -> None:
        """Mark the holding as ended, without an event: a child process does not own it."""
        self._ended = True

    def close(self) -> bool:
        """End the holding because the store is closed; return False if it had already ended."""
        return self._lose("closed")

    async def release(self) -> None:
        """Release the lease in the store, if the store can be reached."""
        try:
            await self._share.call(Release(self.token), GIVING_BACK)
        except StoreUnavailable:
            pass  # the lease expires after its ttl

    def _lose(self, cause: str) -> bool:
        if not self._end(cause):
            return False
        if cause == "expired":  # expired by our clock: the store may still count it as held
            self._share.post(Release(self.token))
        self._on_lost()
        return True

    def _end(self, cause: str) -> bool:
        """End the holding; return False if it had already ended."""
        with self._mutex:
            ended, self._ended = self._ended, True
        if not ended:
            self._forget()
            emit(LeaseChanged, self._lease.name, token=self.token, held=False, cause=cause)
        return not ended

    def _forget(self) -> None:
        self._share.forget(self)
        if self._renewal is not None:
            self._renewal.stop()
        if self._unwatch is not None:
            self._unwatch()


class ReleaseBell:
    """Waits for the release of the lease; claims whether it rang, rather than `until` came first.

    It also rings when a message about a release may have been lost.
    """

    def __init__(self, share: LeaseShare) -> None:
        self.until: float | None = None
        self.rung = False
        self._share = share
        self._stop: Callable[[], None] | None = None
        self._wakes: list[Callable[[], bool]] = []

    def listen(self) -> None:
        """Start to ring. Further calls do nothing."""
        if self._stop is None:
            self._stop = self._share.listen(self._on_release)
            self._share.start()

    def close(self) -> None:
        """Stop ringing."""
        if self._stop is not None:
            self._stop()

    def publish(self, wake: Callable[[], bool]) -> None:
        """Call `wake` once, at the next ring; immediately if the bell has already rung."""
        self._wakes.append(wake)
        if self.rung:
            self._ring()

    def claim(self) -> bool:
        """Return whether the bell has rung."""
        self.abandon()
        return self.rung

    def abandon(self) -> None:
        """Stop waiting."""
        self._wakes.clear()

    def _on_release(self) -> None:
        self.rung = True
        self._ring()

    def _ring(self) -> None:
        try:
            wake = self._wakes.pop()  # atomic: two rings never call the same `wake`
        except IndexError:
            return
        wake()
