"""The pods that share a store: each says every now and then that it lives, and hears how many do.

Promises: `count` is never less than how many live, once they have heard of each other; a pod that
is killed is gone after three beats, one that closes its store at once; one that was silent for too
long while others were not is a new one; while the store is away the last known number stays; a
child process is another pod. The rules are in `models.rate.split`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.models.rate.rates import EXACT
from seawall.models.rate.split import BEAT, LIFE, VALID, Members
from seawall.runtime.mutex import Mutex, survives_fork

if TYPE_CHECKING:
    from seawall.runtime.background import Handle
    from seawall.shared._store import RedisStore

MEMORY: Final = 86_400_000_000
"""For so many microseconds it is remembered that there were others: a day."""

PATIENCE: Final = 0.4
"""Seconds that a beat waits for an answer: nobody waits for it, so it may take most of a beat."""

Watcher = Callable[[], object]


class Pods:
    """How many processes share this store now."""

    def __init__(self, store: RedisStore, expected: int) -> None:
        """Begin to count when `start` is called; take it that there are `expected`, or more."""
        self._store = store
        self._expected = expected
        self._keys = [store.key("pods", "all"), store.key("pods", "all", "runs")]
        self._members = Members()
        self._valid_until = 0.0
        self._mutex = Mutex()
        self._watchers: tuple[Watcher, ...] = ()
        self._handle: Handle | None = None
        self._shown = self._facts
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<Pods: {self.count}{'' if self.known else ', not known yet'}>"

    @property
    def count(self) -> int:
        """How many pods live, this one included; 1 while nothing is known."""
        return self._members.count

    @property
    def without_store(self) -> int:
        """Among how many pods a limit is divided while the store is away.

        The number last heard of, or the expected one if that is larger: pods that have started
        since then, or have never reached the store, go by the expected one.
        """
        return max(self._expected, self._members.count)

    @property
    def known(self) -> bool:
        """Whether the store has told how many there are."""
        return self._members.known

    @property
    def settled(self) -> bool:
        """Whether the other pods must have heard of this one by now."""
        return self._members.settled

    @property
    def current(self) -> bool:
        """Whether what is known is so new that nobody can have forgotten this pod meanwhile."""
        return SYSTEM.now() < self._valid_until

    @property
    def quiet(self) -> float | None:
        """For how many microseconds nobody else had been there when this pod came; None: ever."""
        return self._members.quiet

    @property
    def steady(self) -> float:
        """For how many microseconds nothing had changed, when it was heard last."""
        return self._members.steady

    @property
    def _facts(self) -> tuple[int, bool, bool]:
        return self._members.count, self._members.known, self._members.settled

    def start(self) -> None:
        """Begin to beat, if it has not begun; from any thread, and quick once it has."""
        if self._handle is None:
            with self._mutex:
                first = self._handle is None
                self._handle = self._handle or self._store.every(BEAT / 1e6, self.beat)
            if first:
                self._store.at_close(self.leave)
        try:
            self._store.start()
        except StoreUnavailable:
            pass  # it was closed: what is known stays

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call `watcher()` at every change of what is known, in the background thread."""
        with self._mutex:
            self._watchers = (*self._watchers, watcher)

        def remove() -> None:
            self._watchers = tuple(kept for kept in self._watchers if kept is not watcher)

        return lambda: self._mutex.do(remove)  # the collector may ask for it, at any moment

    async def beat(self) -> None:
        """Say that this pod lives, and hear how many do."""
        pod, began = self._store.pod, SYSTEM.now()
        reply = await self._tell("beat")
        if pod == self._store.pod:
            now, live, quiet, forgotten = _read(reply)
            silent = not self.current
            # By a clock that was set back, the store cannot tell who was silent for long.
            forgotten = forgotten or (silent and now < self._members.latest)
            self._members.hear(now, live, quiet, forgotten=forgotten)
            self._valid_until = began + VALID / 1e6
            self._changed(news=silent)

    async def leave(self) -> None:
        """Say that this pod ends."""
        if self._members.known:
            await self._tell("leave")

    async def _tell(self, what: str) -> Any:
        args: list[str | int] = [what, self._store.pod, LIFE, MEMORY, VALID]
        return await self._store.acall("pods", self._keys, args, PATIENCE)

    def _changed(self, *, news: bool = False) -> None:
        before, self._shown = self._shown, self._facts
        if news or self._shown != before:
            for watcher in self._watchers:
                try:
                    watcher()
                except Exception:
                    logging.getLogger("seawall").exception("a watcher of the pods failed")

    def _after_fork(self) -> None:
        """Be another pod, which nobody has heard of; there are no fewer than the parent knew."""
        self._mutex = Mutex()
        self._expected = self.without_store
        self._members = Members()
        self._valid_until = 0.0
        self._changed()


def _read(reply: Any) -> tuple[float, int, float | None, bool]:
    """Return what the script says, or raise: a store may say anything."""
    try:
        now, live, quiet, forgotten = (int(part) for part in reply)
    except (TypeError, ValueError):
        raise StoreUnavailable("the store's answer makes no sense") from None
    if not (0 <= now < EXACT and 1 <= live < EXACT and -1 <= quiet < EXACT):
        raise StoreUnavailable("the store's answer makes no sense")
    return float(now), live, None if quiet < 0 else float(quiet), forgotten > 0
