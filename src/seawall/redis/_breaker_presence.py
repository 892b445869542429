"""The store's background work for the breakers of one policy."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from weakref import WeakMethod, ref

from seawall.errors import StoreUnavailable

if TYPE_CHECKING:
    from seawall.redis._breaker import Share
    from seawall.runtime.background import Handle

FLUSH: Final = 0.1
"""Maximum seconds between two reports of counts."""


class Presence:
    """A share's background job and listeners: registered once, and only while the share lives.

    No lock is held meanwhile: the garbage collector may run at any moment and need a lock that a
    waiting thread holds. Of several concurrent first calls one registers, the others continue.
    """

    def __init__(self, share: Share) -> None:
        """Start unregistered; the store may not be reachable yet."""
        self._share = ref(share)
        self._store = share.store
        self._idle = [True]
        self._registered = False
        self._job: Handle | None = None
        self._announced: list[Handle] = []

    def begin(self) -> None:
        """Start the background work, once; in a child process once more."""
        if not self._idle:
            return
        try:
            self._idle.pop()  # atomic: only one of two threads gets it
        except IndexError:
            return
        begun = False
        try:
            self._store.start()
            if not self._registered:
                self._register()
                self._registered = True
            begun = True
        except StoreUnavailable:
            pass  # closed: callers that ask it will notice
        finally:
            if not begun:
                self._idle.append(True)

    def soon(self) -> None:
        """Request a run of the job now."""
        if self._job is not None:
            self._job.soon()

    def announce_anew(self) -> None:
        """Announce other settings to the other pods, if any were announced."""
        if self._announced:
            self._announced.pop().stop()
            self._announce()

    def after_fork(self) -> None:
        """Allow `begin` again: the background thread is gone, but its jobs are still registered."""
        self._idle = [True]

    def _register(self) -> None:
        weak = self._share
        share = weak()
        if share is None:
            return

        async def run() -> None:
            share = weak()
            if share is None:
                stop()
            else:
                await share.run(get_running_loop().time())

        self._announce()
        announced = self._announced
        channel = self._store.channel("breaker", share.name)
        self._job = self._store.every(FLUSH, run)
        stops = (
            self._job.stop,
            lambda: announced.pop().stop(),
            self._store.listen(channel, _weakly(share.pushed)),
            self._store.watch(_weakly(share.watched)),
        )
        self._store.at_close(share.end)

        def stop() -> None:
            for each in stops:
                each()

    def _announce(self) -> None:
        share = self._share()
        if share is not None:
            own = share.fingerprint()
            differs = _weakly(share.differs)
            name = share.name
            told = self._store.announce("breaker", name, own, lambda other: differs(own, other))
            self._announced.append(told)


def _weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Return a function that calls `method` for as long as its object lives."""
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        method = weak()
        if method is not None:
            method(*args)

    return call
