"""Claims of which nobody has heard, until the store has taken them back.

A claim whose answer is lost, or whose caller is gone, may have been granted, or may be granted only
later. So the store is told, again and again until it has answered, that nobody has that claim. What
has to be told belongs to no queue object: it outlives one that was made for a single request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary, ref

from seawall.clock import SYSTEM
from seawall.jobs._driven import Ask
from seawall.runtime.background import Handle
from seawall.runtime.mutex import survives_fork
from seawall.shared._store import RedisStore

EVERY: Final = 0.5
"""Seconds between two tries, while there is something to tell."""
KEPT: Final = 3600.0
"""Seconds for which it is tried, or as long as the lease if that is longer."""
MOST: Final = 1000
"""So many are kept, the first ones: while a store is away for long, the later were never sent."""
PATIENCE: Final = 1.0
"""Seconds that one try may take: nobody waits for it."""


class Calls(Protocol):
    """How the operations of one queue become a script call."""

    script: str
    most: int

    def pack(self, items: Sequence[Ask]) -> tuple[Sequence[str], Sequence[Any]]:
        """Return keys and arguments."""

    def unpack(self, reply: Any, items: Sequence[Ask]) -> Sequence[Any]:
        """Read the reply."""


class Releases:
    """What one store has to be told."""

    def __init__(self) -> None:
        """Have nothing to tell."""
        self._waiting: dict[Ask, tuple[Calls, float]] = {}
        # By reference only, both: this is kept for as long as the store lives, and no longer.
        self._store: Callable[[], RedisStore | None] = lambda: None
        self._handle: Callable[[], Handle | None] = lambda: None
        survives_fork(self)

    def begin(self, store: RedisStore) -> None:
        """Tell `store` in the background, and before it is closed."""
        me = ref(self)
        self._store = ref(store)
        self._handle = ref(store.every(EVERY, lambda: _flush(me)))
        store.watch(lambda _up, _cause: _soon(me))
        store.at_close(lambda: _flush(me))

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, calls: Calls, ask: Ask, lease: int) -> None:
        """Tell `ask`: that nobody has a claim. Also from the garbage collector: no lock."""
        if len(self._waiting) < MOST:
            until = SYSTEM.now() + max(KEPT, lease / 1e6)
            self._waiting[ask] = calls, until
            self.soon()

    def soon(self) -> None:
        """Tell the store at once."""
        handle = self._handle()
        if handle is not None and self._waiting:
            handle.soon()

    async def flush(self) -> None:
        """Tell the store all; what it does not answer to is told again next time."""
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
                    calls.unpack(reply, some)  # who died is told; nonsense is logged, once

    def _after_fork(self) -> None:
        """Leave to the parent what is the parent's."""
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
    """Return where to say what that store has to be told."""
    found = _of_stores.get(store)
    if found is None:
        made = Releases()
        found = _of_stores.setdefault(store, made)  # of two threads, one has made it
        if found is made:
            made.begin(store)
    return found
