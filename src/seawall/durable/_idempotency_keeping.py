"""Renewal of leases in the background, for as long as their owners work.

In an event loop each lease has a timer. Blocking callers share one thread, which exists while there
are leases to renew (and for a third of a lease after that): a call costs one entry in a dict.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Condition, Thread

from seawall._failures import described
from seawall._forks import survives_fork
from seawall.clock import SYSTEM
from seawall.context import deadline_var, reset
from seawall.durable._uncut import Renewal
from seawall.models.idempotency import KeyClaim


@contextmanager
def regardless() -> Iterator[None]:
    """Ignore the deadline inside the block: it limits the work, not the storing of its outcome."""
    token = deadline_var.set(None)
    try:
        yield
    finally:
        reset(deadline_var, token)


@asynccontextmanager
async def akeeping(renew: Callable[[], Awaitable[bool]], lease: float) -> AsyncIterator[None]:
    """Call `renew` every third of a lease, until it returns False or the block ends."""
    renewal = Renewal(lease, renew)
    try:
        yield
    finally:
        # Wait for it, so that no renewal is running when the claim is completed.
        await renewal.stop()


class Keeper:
    """Renews the leases of blocking callers."""

    def __init__(
        self, lease: float, renew: Callable[[KeyClaim], bool], lost: Callable[[], None]
    ) -> None:
        """Call `renew(claim)` every third of a lease; if that returns False, call `lost()`."""
        self._every = lease / 3
        self._renew = renew
        self._lost = lost
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._changed = Condition()
        # All entries have the same interval, so the first entry is the next one due.
        self._kept: dict[object, tuple[float, KeyClaim]] = {}
        self._thread: Thread | None = None

    @contextmanager
    def keeping(self, claim: KeyClaim) -> Iterator[None]:
        """Renew the lease of `claim` while the block runs."""
        token = object()
        with self._changed:
            self._kept[token] = (SYSTEM.now() + self._every, claim)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="idempotency leases", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._kept.pop(token, None)

    def _run(self) -> None:
        while (due := self._next()) is not None:
            token, claim = due
            good = True
            try:
                good = self._renew(claim)
            except Exception as error:  # noqa: BLE001 - from any driver; logged
                # The database may be back next time: a lease lasts three intervals.
                log = logging.getLogger("seawall")
                log.error("a lease could not be renewed: %s", described(error))  # noqa: TRY400 - see there
            with self._changed:
                # If its block has ended meanwhile, the claim was completed, and False means
                # nothing.
                if self._kept.pop(token, None) is None:
                    continue
                if good:
                    self._kept[token] = (SYSTEM.now() + self._every, claim)
            if not good:
                self._lost()

    def _next(self) -> tuple[object, KeyClaim] | None:
        """Wait until an entry is due; return None, which ends the thread, if there are none."""
        with self._changed:
            while self._kept:
                token, (at, claim) = next(iter(self._kept.items()))
                rest = at - SYSTEM.now()
                if rest <= 0:
                    return token, claim
                self._changed.wait(rest)
            self._thread = None
            return None
