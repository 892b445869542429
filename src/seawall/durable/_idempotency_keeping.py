"""A lease that is renewed in the background, for as long as its owner works.

In an event loop each has a timer. Those who block share one thread, which is there while there is
something to keep (and for a third of a lease after that): a call costs an entry in a table.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Condition, Thread

from seawall._failures import described
from seawall.clock import SYSTEM
from seawall.context import deadline_var, reset
from seawall.durable._uncut import Renewal
from seawall.models.idempotency import KeyClaim
from seawall.runtime.mutex import survives_fork


@contextmanager
def regardless() -> Iterator[None]:
    """Do something also when the deadline is over: that is for the work, not for its record."""
    token = deadline_var.set(None)
    try:
        yield
    finally:
        reset(deadline_var, token)


@asynccontextmanager
async def akeeping(renew: Callable[[], Awaitable[bool]], lease: float) -> AsyncIterator[None]:
    """Call `renew` each third of a lease, until it says no or the block is left."""
    renewal = Renewal(lease, renew)
    try:
        yield
    finally:
        # Waited for, so that no renewal is under way when the claim is completed.
        await renewal.stop()


class Keeper:
    """Does the same for those who block."""

    def __init__(
        self, lease: float, renew: Callable[[KeyClaim], bool], lost: Callable[[], None]
    ) -> None:
        """Call `renew(claim)` each third of a lease; if that says no, `lost()`, and no more."""
        self._every = lease / 3
        self._renew = renew
        self._lost = lost
        self._after_fork()
        survives_fork(self)

    def _after_fork(self) -> None:
        self._changed = Condition()
        # All are kept for equally long, so the first in here is the first that is due.
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
            except Exception as error:  # noqa: BLE001 - of any driver's; told
                # A database that is away may be back next time: the lease is three times that.
                log = logging.getLogger("seawall")
                log.error("a lease could not be renewed: %s", described(error))  # noqa: TRY400 - see there
            with self._changed:
                # Who is done meanwhile has completed it: then a "no" means nothing.
                if self._kept.pop(token, None) is None:
                    continue
                if good:
                    self._kept[token] = (SYSTEM.now() + self._every, claim)
            if not good:
                self._lost()

    def _next(self) -> tuple[object, KeyClaim] | None:
        """Wait until one is due; None, and the end of the thread, if there is none."""
        with self._changed:
            while self._kept:
                token, (at, claim) = next(iter(self._kept.items()))
                rest = at - SYSTEM.now()
                if rest <= 0:
                    return token, claim
                self._changed.wait(rest)
            self._thread = None
            return None
