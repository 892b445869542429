"""What the store's background does for the breakers of one policy."""

from __future__ import annotations

from asyncio import get_running_loop
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from weakref import WeakMethod, ref

from seawall.errors import StoreUnavailable

if TYPE_CHECKING:
    from seawall.runtime.background import Handle
    from seawall.shared._breaker import Share

FLUSH: Final = 0.1
"""Seconds between two reports of what was counted, at the most."""


class Presence:
    """A share's job and its ears: registered once, and for as long as somebody holds on to it.

    No lock is held meanwhile: the garbage collector may come at any moment, and want one of those
    that somebody holds who waits here. Of several first calls one registers, the others go on.
    """

    def __init__(self, share: Share) -> None:
        """Begin with nothing; the store may not be there yet."""
        self._share = ref(share)
        self._store = share.store
        self._idle = [True]
        self._registered = False
        self._job: Handle | None = None
        self._announced: list[Handle] = []

    def begin(self) -> None:
        """See to it that the background does its part; in a child process once more."""
        if not self._idle:
            return
        try:
            self._idle.pop()  # atomic: of two threads, one gets it
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
            pass  # closed: whoever asks it hears that
        finally:
            if not begun:
                self._idle.append(True)

    def soon(self) -> None:
        """Ask for a run of the job at once."""
        if self._job is not None:
            self._job.soon()

    def announce_anew(self) -> None:
        """Tell other pods of other settings, if they were told of any."""
        if self._announced:
            self._announced.pop().stop()
            self._announce()

    def after_fork(self) -> None:
        """Begin once more: the background has not come along, but knows its jobs."""
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
    """Return what calls `method` for as long as its object lives."""
    weak = WeakMethod(method)

    def call(*args: object) -> None:
        method = weak()
        if method is not None:
            method(*args)

    return call
