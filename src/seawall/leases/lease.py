"""A lease: one holder over all pods, for as long as it renews, with a fencing token.

Promises:
- The store (Redis, PostgreSQL or SQLite) gives a lease to one holder at a time.
- Each holder's token is higher than those of all holders before.
- `held` turns false no later than the store may give the lease to another, judged by this machine's
  monotonic clock from before the request was sent. A lost lease stays lost.
- `on_lost` is called once. The store accepts nothing from an earlier holder.

No lease can promise that a process which is stopped just after it looked at `held` does not act
later. So pass the token to the resource that is protected, and let that refuse lower ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import inf
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.context import give_up_at
from seawall.errors import DeadlineExceeded, LeaseLost, StoreUnavailable, TimedOut
from seawall.leases.holding import Holding, Terms
from seawall.leases.store import LeaseStore, Release, Take
from seawall.leases.waiting import Bell, Pause, Question, Steps, arun, run
from seawall.models.backoff import full_jitter
from seawall.models.lease import Busy, Granted
from seawall.runtime.layers import Kind
from seawall.runtime.mutex import Mutex, survives_fork

if TYPE_CHECKING:
    from random import Random

LONGEST_TTL: Final = 30 * 24 * 3600.0
"""Seconds: whoever needs a lease for longer renews it."""

SPREAD: Final = 0.25
"""Seconds after a lease has run out in which those that wait ask, each at a random moment."""

_WOKEN: Final = full_jitter(0.005, cap=SPREAD)
_FAILED: Final = full_jitter(0.1, cap=1.0)


class Lease:
    """`with lease:` or `async with lease:` runs in one pod at a time.

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
        """Compete for the lease `name` with all that have the same store, prefix and name.

        `store` is a `RedisStore`, or a `seawall.durable.Database` whose tables were migrated. A
        holder that is not heard of for `ttl` seconds has lost it. It is renewed in the background
        every `renew_every` seconds (a third of `ttl`). If it is lost while held, `on_lost(lease)`
        is called there: a plain function, and quick. The background is a thread of the store;
        for a database that is awaited it is the event loop in which the lease was taken.
        """
        if isinstance(store, type) or not hasattr(store, "lease"):
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
        self._rng = rng
        self._random = _chance(rng)
        self._share = store.lease(name)
        self._terms = Terms(self._share, name, self.ttl, every, self.clock)
        self._holder = token_hex(8)
        self._attempt = 0
        self._token = 0
        self._mutex = Mutex()
        self._asking = self._unheard = False
        self._holding: Holding | None = None
        survives_fork(self)
        registry.enter(self, "lease", name)

    def __repr__(self) -> str:
        state = f"held, token {self._token}" if self.held else "not held"
        return f"<Lease {self.name!r}: {state}>"

    # What a holder may know

    @property
    def held(self) -> bool:
        """Whether this object holds the lease, for sure."""
        return self.left > 0

    @property
    def left(self) -> float:
        """For how many seconds more it holds the lease for sure, even if no renewal succeeds."""
        holding = self._holding
        return 0.0 if holding is None else holding.left

    @property
    def token(self) -> int:
        """The number of the last holding: higher than those of all holders before; 0: never held.

        Hand it to what the lease protects, which must refuse a token lower than one it has seen.
        """
        return self._token

    @property
    def closed(self) -> bool:
        """Whether its store was closed: then it is never held again."""
        return self._share.closed

    def check(self) -> None:
        """Raise `LeaseLost` unless the lease is held; call it before each effect."""
        if not self.held:
            raise LeaseLost(f"the lease {self.name!r} is not held")

    def snapshot(self) -> dict[str, Any]:
        """Return what there is to see of it."""
        left = self.left
        shown = {"name": self.name, "held": left > 0, "token": self._token, "left": left}
        return {**shown, "ttl": self.ttl, "renew_every": self.renew_every}

    # Taking it

    def acquire(self, timeout: float | None = None) -> int:
        """Wait until the lease is ours and return its token; raise `TimedOut` after `timeout`.

        With 0 it asks once. Waits through an outage of the store too: if that lasts to the end,
        `StoreUnavailable` is raised. A deadline bounds it too; one that has passed is
        `DeadlineExceeded`, and nothing is asked.
        """
        run(self._acquiring("sync", timeout), self.clock)
        return self._token

    async def aacquire(self, timeout: float | None = None) -> int:  # noqa: ASYNC109 - as `acquire`
        """Wait as `acquire` does; the task waits, not the thread."""
        await arun(self._acquiring("async", timeout), self.clock)
        return self._token

    def try_acquire(self) -> bool:
        """Take the lease if it is free, and tell whether it was; raise if the store cannot tell."""
        return run(self._trying("sync"), self.clock)

    async def atry_acquire(self) -> bool:
        """Do the same without blocking the thread."""
        return await arun(self._trying("async"), self.clock)

    # Giving it up

    def release(self) -> bool:
        """Give the lease up; tell whether it was held until now (False: it was lost).

        Nothing is raised if the store is down: then the lease runs out by itself.
        """
        return run(self._releasing("sync"), self.clock)

    async def arelease(self) -> bool:
        """Do the same without blocking the thread."""
        return await arun(self._releasing("async"), self.clock)

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

    # How it is taken and given up: questions and pauses

    def _trying(self, kind: Kind) -> Steps[bool]:
        until = self._bound(self.clock.now(), inf)
        self._occupy()
        try:
            answer = yield from self._ask(kind, until)
        finally:
            self._vacate()
        if isinstance(answer, str):
            raise StoreUnavailable(answer)
        return isinstance(answer, Granted)

    def _acquiring(self, kind: Kind, timeout: float | None) -> Steps[None]:
        wait = inf
        if timeout is not None:
            wait = check.seconds("timeout", timeout, zero=True, infinite=True)
        began = self.clock.now()
        until, _by_deadline = give_up_at(began, wait)
        bound = self._bound(began, wait or inf)  # 0: one question, which takes its time
        woken, failed = _WOKEN.delays(self._random), _FAILED.delays(self._random)
        bell = Bell(self._share)
        known: Busy | str = ""
        self._occupy()
        try:
            while True:
                bell.rung = False
                answer = yield from self._ask(kind, bound)
                if isinstance(answer, Granted):
                    return
                now = self.clock.now()
                if until is not None and now >= until:
                    # A question that was cut short says nothing: what was known before counts.
                    raise self._too_late(known if isinstance(known, Busy) else answer, now - began)
                known = answer
                again = now + self._next_look(answer, failed)
                if (yield from self._rest(self._in_time(again, now, until), bell)):
                    # All who wait were woken: each comes at its own moment.
                    now = self.clock.now()
                    again = now + next(woken)
                    if until is None or again < until:
                        yield Pause(again)
                now = self.clock.now()
                if until is not None and now >= until:
                    raise self._too_late(known, now - began)
        finally:
            self._vacate()
            bell.close()

    def _next_look(self, answer: Busy | str, failed: Iterator[float]) -> float:
        """Return after how many seconds to ask again, if no bell rings."""
        if isinstance(answer, str):
            return next(failed)
        spread = self._random() * min(SPREAD, self.ttl / 10)
        return min(answer.left / 1e6, self._share.longest_poll(self.ttl)) + spread

    def _in_time(self, again: float, now: float, until: float | None) -> float:
        """Return when to ask again: the last time while there is time for an answer."""
        if until is None:
            return again
        last = until - self._share.timeout
        return min(again, last if now < last else until)

    def _rest(self, until: float, bell: Bell) -> Steps[bool]:
        """Pause until then, or until the bell rings (True); raise if the store is closed."""
        bell.listen()
        self._refuse_if_closed()  # from here on, closing it rings the bell
        rung: bool = yield Pause(until, bell)
        self._refuse_if_closed()
        return rung

    def _ask(self, kind: Kind, until: float | None) -> Steps[Granted | Busy | str]:
        """Ask for the lease once, and hold it if it is granted; a failure is returned as text."""
        self._refuse_if_closed()
        self._attempt += 1
        take = Take(self._holder, self._attempt, self._terms.microseconds)
        sent = self.clock.now()
        self._unheard = True
        asking = self._share.ask(kind, take, self.clock)
        answer: Granted | Busy | str = yield Question(asking, until)
        self._unheard = isinstance(answer, str)
        if isinstance(answer, Granted) and not self._hold(answer.token, sent):
            self._terms.give_back(answer.token)
            self._refuse_if_closed()
            return Busy(answer.token, 0)
        return answer

    def _releasing(self, kind: Kind) -> Steps[bool]:
        token = self._let_go()
        if token is None:
            return False
        answer: Granted | Busy | str = ""
        try:
            answer = yield Question(self._share.ask(kind, Release(token), self.clock))
        finally:
            if isinstance(answer, str):
                self._terms.give_back(token)  # it may not have arrived
        return not isinstance(answer, Busy)

    def _bound(self, now: float, wait: float) -> float | None:
        """Return when a wait from `now` ends at the latest; raise if the deadline has passed."""
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

    def _too_late(self, answer: Busy | str, seconds: float) -> Exception:
        if isinstance(answer, str):
            return StoreUnavailable(answer)
        text = f"the lease {self.name!r} was held by others for {seconds:.3g} s"
        return TimedOut(text, guard=self.name, seconds=seconds)

    def _occupy(self) -> None:
        with self._mutex:
            if self._asking or self._holding is not None:
                raise RuntimeError(
                    f"{self!r} is in use: release it first, even if it was lost; threads and tasks"
                    " that compete need a Lease each"
                )
            self._asking = True

    def _vacate(self) -> None:
        """Ask no more; what an attempt got that was never answered is nobody's."""
        if self._unheard:
            self._unheard = False
            self._terms.withdraw(self._holder, self._attempt)
        self._asking = False

    def _hold(self, token: int, sent: float) -> bool:
        """Hold what was granted to a request sent at `sent`; False if that comes too late."""
        holding = Holding(self._terms, token, sent, self._tell_lost)
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

    def _let_go(self) -> int | None:
        """Hold nothing any more; return the token of what was held until now, if anything was."""
        with self._mutex:
            holding, self._holding = self._holding, None
        return holding.token if holding is not None and holding.let_go() else None

    def _tell_lost(self) -> None:
        try:
            if self._on_lost is not None:
                self._on_lost(self)
        except Exception:
            logging.getLogger("seawall").exception("on_lost of lease %r failed", self.name)

    def _after_fork(self) -> None:
        """Hold nothing in a child process: the lease is its parent's, who renews it."""
        self._mutex = Mutex()
        self._holder = token_hex(8)
        self._random = _chance(self._rng)
        holding, self._holding = self._holding, None
        self._asking = self._unheard = False
        if holding is not None:
            holding.abandon()


def _chance(rng: Random | None) -> Callable[[], float]:
    if rng is None:
        from random import Random

        return Random().random  # noqa: S311 - jitter, not a secret
    if isinstance(rng, type) or not hasattr(rng, "random"):
        raise TypeError(f"rng={rng!r}: pass a random.Random, such as random.Random(7)")
    return rng.random
