"""One holding of a lease: its guaranteed end, its renewal and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from seawall.errors import StoreUnavailable
from seawall.events import LeaseChanged
from seawall.events.bus import emit
from seawall.leases.store import Release, Renew, Withdraw
from seawall.models.lease import Busy, Granted
from seawall.runtime.driver import sleep_async
from seawall.runtime.mutex import Mutex

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.leases.store import Job, LeaseShare

DRIFT: Final = 0.001
"""Assumed clock drift, a fraction of the ttl: the holder stops that much before the store."""

GIVING_BACK: Final = 1.0
"""Timeout in seconds of a release that has no waiter, or that happens while the store closes."""


class Terms(NamedTuple):
    """The fixed settings of a lease."""

    share: LeaseShare
    name: str
    ttl: float
    renew_every: float
    clock: Clock

    @property
    def microseconds(self) -> int:
        """The time to live in microseconds, the unit of the stores."""
        return round(self.ttl * 1e6)

    def give_back(self, token: int) -> None:
        """Release the lease in the background, if `token` still holds it."""
        self.share.post(Release(token))

    def withdraw(self, holder: str, attempt: int) -> None:
        """Release the lease in the background if this attempt got it, unknown to `holder`."""
        self.share.post(Withdraw(holder, attempt))

    def until(self, sent: float) -> float:
        """Return until when the lease is certainly held, if a request sent at `sent` succeeded."""
        return sent + self.ttl * (1 - DRIFT)


class Holding:
    """A lease that is held. `left` counts down, renewals extend it, and it ends exactly once."""

    def __init__(self, terms: Terms, token: int, sent: float, on_lost: Callable[[], None]) -> None:
        """Hold the lease granted to a request sent at `sent`. Renewals begin with `start`."""
        self.token = token
        self._terms = terms
        self._on_lost = on_lost
        self._since = sent
        self._until = terms.until(sent)
        self._due = self._seen_over = self._ended = False
        self._mutex = Mutex()
        self._renewal: Job | None = None
        self._unwatch: Callable[[], None] | None = None

    @property
    def left(self) -> float:
        """Number of seconds for which the lease is certainly still held. Once 0, it stays 0."""
        if self._ended or self._seen_over:
            return 0.0
        left = self._until - self._terms.clock.now()
        if left > 0:
            return left
        self._seen_over = True
        self._hurry()
        return 0.0

    def start(self) -> bool:
        """Start renewing in the background; return False if the store is closed."""
        share = self._terms.share
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
        self._renewal = share.every(self._terms.renew_every, self.renew)
        self._unwatch = share.watch(self._on_health)
        emit(LeaseChanged, self._terms.name, token=self.token, held=True, cause="acquired")
        return True

    async def renew(self) -> None:
        """Renew the lease if that is due; if the store fails, retry until the lease has expired."""
        terms = self._terms
        while not self._ended:
            sent = terms.clock.now()
            if not self._due and sent < self._since + terms.renew_every / 2:
                return  # it has just been taken or renewed
            self._due = False
            if not self.left:
                self._lose("expired")
                return
            patience = min(max(terms.share.timeout, terms.renew_every), self._until - sent)
            try:
                answer = await terms.share.call(Renew(self.token, terms.microseconds), patience)
            except StoreUnavailable:
                rest = self._until - terms.clock.now()
                if rest > 2 * terms.renew_every:
                    return
                await sleep_async(max(0.0, min(rest, terms.renew_every / 4)))
            else:
                self._renewed(sent, answer)
                return
        self._forget()

    def _renewed(self, sent: float, answer: Granted | Busy) -> None:
        with self._mutex:
            # An answer that arrives after the guaranteed end cannot bring the lease back.
            if self.left and isinstance(answer, Granted):
                self._since, self._until = sent, self._terms.until(sent)
                return
        self._lose("expired" if isinstance(answer, Granted) else "taken")

    def _on_health(self, up: bool, _cause: str) -> None:  # noqa: FBT001 - the store calls it
        if up:
            self._hurry()

    def _hurry(self) -> None:
        self._due = True
        if self._renewal is not None:
            self._renewal.soon()

    def let_go(self) -> bool:
        """End the holding at the holder's request; return whether it was held until now."""
        held = self.left > 0
        if not self._end("released" if held else "expired"):
            return False
        if not held:
            self._terms.give_back(self.token)
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
            await self._terms.share.call(Release(self.token), GIVING_BACK)
        except StoreUnavailable:
            pass  # the lease expires after its ttl

    def _lose(self, cause: str) -> bool:
        if not self._end(cause):
            return False
        if cause == "expired":  # expired by our clock: the store may still count it as held
            self._terms.give_back(self.token)
        self._on_lost()
        return True

    def _end(self, cause: str) -> bool:
        """End the holding; return False if it had already ended."""
        with self._mutex:
            ended, self._ended = self._ended, True
        if not ended:
            self._forget()
            emit(LeaseChanged, self._terms.name, token=self.token, held=False, cause=cause)
        return not ended

    def _forget(self) -> None:
        self._terms.share.forget(self)
        if self._renewal is not None:
            self._renewal.stop()
        if self._unwatch is not None:
            self._unwatch()
