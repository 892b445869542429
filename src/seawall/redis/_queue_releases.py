"""Unconfirmed claims, until the store has taken them back.

A claim whose answer is lost, or whose caller is gone, may have been granted, or may still be
granted later. So a release is sent to the store, repeatedly until it has answered. These releases
belong to no queue object: they outlive one that was made for a single request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

from seawall.clock import SYSTEM
from seawall.jobs._driven import Ask
from seawall.redis._store import RedisStore
from seawall.runtime.background import Handle
from seawall.runtime.mutex import survives_fork

EVERY: Final = 0.5
"""Seconds between two attempts, while there is something to release."""
KEPT: Final = 3600.0
"""Seconds for which it is tried, or as long as the lease if that is longer."""
MOST: Final = 1000
"""Maximum number of releases, the first ones: in a long outage, later claims were never sent."""
PATIENCE: Final = 1.0
"""Maximum seconds of one attempt: no caller waits for it."""


class Calls(Protocol):
    """How the operations of one queue become a script call."""

    script: str
    most: int

    def pack(self, items: Sequence[Ask]) -> tuple[Sequence[str], Sequence[Any]]:
        """Return keys and arguments."""

    def unpack(self, reply: Any, items: Sequence[Ask]) -> Sequence[Any]:
        """Read the reply."""


class Releases:
    """The pending releases of one store."""

    def __init__(self) -> None:
        """Start empty."""
        self._waiting: dict[Ask, tuple[Calls, float]] = {}
        # Both are weak references: this is kept for as long as the store lives, and no longer.
        self._store: Callable[[], RedisStore | None] = lambda: None
        self._handle: Callable[[], Handle | None] = lambda: None
        survives_fork(self)

    def begin(self, store: RedisStore) -> None:
        """Send releases to `store` in the background, and before it is closed."""
        me = ref(self)
        self._store = ref(store)
        self._handle = ref(store.every(EVERY, lambda: _flush(me)))
        store.watch(lambda _up, _cause: _soon(me))
        store.at_close(lambda: _flush(me))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, calls: Calls, ask: Ask, lease: int) -> None:
        """Add the release `ask` of a claim. Takes no lock: the garbage collector may call it."""
        if len(self._waiting) < MOST:
            until = SYSTEM.now() + max(KEPT, lease / 1e6)
            self._waiting[ask] = calls, until
            self.soon()

    def soon(self) -> None:
        """Send the releases now."""
        handle = self._handle()
        if handle is not None and self._waiting:
            handle.soon()

    async def flush(self) -> None:
        """Send all releases; those without an answer are sent again next time."""
        store, now = self._store(), SYSTEM.now()
        by_queue: dict[Calls, list[Ask]] = {}
        for ask, (calls, until) in list(self._waiting.items()):
            if until <= now:
                self._waiting.pop(ask, None)
            else:
                by_queue.setdefault(calls, []).append(ask)
        for calls, asks in by_queue.items():
            for start in range(0, len(asks), calls.most):
                some = asks[start : start + calls.most]
                if store is not None:
                    keys, args = calls.pack(some)
                    reply = await store.acall(calls.script, keys, args, PATIENCE)
                for ask in some:
                    self._waiting.pop(ask, None)
                if store is not None:
                    calls.unpack(reply, some)  # reports dead jobs; an invalid reply is logged, once

    def _after_fork(self) -> None:
        """Leave the parent's releases to the parent."""
        self._waiting = {}


async def _flush(me: ref[Releases]) -> None:
    releases = me()
    if releases is not None:
        await releases.flush()


def _soon(me: ref[Releases]) -> None:
    releases = me()
    if releases is not None:
        releases.soon()


_of_stores: WeakKeyDictionary[RedisStore, Releases] = WeakKeyDictionary()


def releases_of(store: RedisStore) -> Releases:
    """Return the pending releases of that store."""
    found = _of_stores.get(store)
    if found is None:
        made = Releases()
        found = _of_stores.setdefault(store, made)  # only one of two threads has made it
        if found is made:
            made.begin(store)
    return found
