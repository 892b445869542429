"""Which processes live: the pods that share a store, and the heartbeats of a group of members.

Promises:
- `LivePods.count` is never less than the number of live pods, once they have heard of each other.
- A pod that is killed is gone after three beats, one that closes its store immediately.
- A pod that was silent for too long while others were not is a new one.
- While the store is away, the last known number stays.
- A child process is another pod.
- The server's clock dates all heartbeats, so pods may disagree about time. What is kept is bounded,
  and expires.

The rules for pods are in `models.rate.split`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from seawall._forks import survives_fork
from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.models.rate.rates import EXACT
from seawall.models.rate.split import BEAT, LIFE, VALID, SplitMembers
from seawall.redis.connections import valid_reply
from seawall.redis.health import Watchers
from seawall.runtime.mutex import Mutex
from seawall.runtime.store import MEMORY, MemberBeat, Sighting

if TYPE_CHECKING:
    from seawall.redis.store import StoreCore
    from seawall.runtime.background import Handle

OTHERS_REMEMBERED: Final = 86_400_000_000
"""Microseconds for which it is remembered that there were other pods: a day."""

BEAT_TIMEOUT: Final = 0.4
"""Seconds a beat waits for an answer: no caller waits for it, so it may take most of a beat."""


class LivePods:
    """Number of processes that share this store now."""

    def __init__(self, store: StoreCore, expected: int) -> None:
        """Start to count when `start` is called; assume `expected` pods, or more."""
        self._store = store
        self._expected = expected
        self._keys = [store.key("pods", "all"), store.key("pods", "all", "runs")]
        self.members = SplitMembers()
        """What is known of the pods: how many there are, and since when."""
        self._valid_until = 0.0
        self._mutex = Mutex()
        self.watchers = Watchers("pods")
        """Called without arguments in the background thread, at every change of the known facts."""
        self._handle: Handle | None = None
        self._shown = self._facts
        survives_fork(self)

    def __repr__(self) -> str:
        return f"<LivePods: {self.count}{'' if self.known else ', not known yet'}>"

    @property
    def count(self) -> int:
        """Number of live pods, including this one; 1 while nothing is known."""
        return self.members.count

    @property
    def without_store(self) -> int:
        """Number of pods among which a limit is divided while the store is away.

        The last known number, or the expected one if that is larger: pods that have started since
        then, or have never reached the store, use the expected one.
        """
        return max(self._expected, self.members.count)

    @property
    def known(self) -> bool:
        """Whether the store has answered how many there are."""
        return self.members.known

    @property
    def settled(self) -> bool:
        """Whether the other pods must have heard of this one by now."""
        return self.members.settled

    @property
    def current(self) -> bool:
        """Whether the knowledge is so new that no pod can have forgotten this one meanwhile."""
        return SYSTEM.now() < self._valid_until

    @property
    def _facts(self) -> tuple[int, bool, bool]:
        return self.members.count, self.members.known, self.members.settled

    def start(self) -> None:
        """Start beating, if not started; from any thread, and cheap after the first time."""
        if self._handle is None:
            with self._mutex:
                first = self._handle is None
                self._handle = self._handle or self._store.every(BEAT / 1e6, self.beat)
            if first:
                self._store.at_close(self.leave)
        try:
            self._store.start()
        except StoreUnavailable:
            pass  # it was closed: the last known number stays

    async def beat(self) -> None:
        """Report that this pod lives, and learn how many do."""
        pod, began = self._store.pod, SYSTEM.now()
        reply = await self._call("beat")
        if pod == self._store.pod:
            now, live, quiet, forgotten = _read_pods(reply)
            silent = not self.current
            # With a clock that was set back, the store cannot know which pods were silent for long.
            forgotten = forgotten or (silent and now < self.members.latest)
            self.members.record(now, live, quiet, forgotten=forgotten)
            self._valid_until = began + VALID / 1e6
            self._changed(news=silent)

    async def leave(self) -> None:
        """Report that this pod ends."""
        if self.members.known:
            await self._call("leave")

    async def _call(self, what: str) -> Any:
        args: list[str | int] = [what, self._store.pod, LIFE, OTHERS_REMEMBERED, VALID]
        return await self._store.acall("pods", self._keys, args, BEAT_TIMEOUT)

    def _changed(self, *, news: bool = False) -> None:
        before, self._shown = self._shown, self._facts
        if news or self._shown != before:
            self.watchers.notify()

    def _after_fork(self) -> None:
        """Become another, unknown pod; assume no fewer pods than the parent knew."""
        self._mutex = Mutex()
        self.watchers.after_fork()
        self._expected = self.without_store
        self.members = SplitMembers()
        self._valid_until = 0.0
        self._changed()


@valid_reply()
def _read_pods(reply: Any) -> tuple[float, int, float | None, bool]:
    now, live, quiet, forgotten = (int(part) for part in reply)
    if not (0 <= now < EXACT and 1 <= live < EXACT and -1 <= quiet < EXACT):
        raise ValueError(reply)
    return float(now), live, None if quiet < 0 else float(quiet), forgotten > 0


class SharedHeartbeats:
    """The heartbeats of one group."""

    def __init__(self, store: StoreCore, group: str) -> None:
        self._store = store
        self._keys = [store.key("members", group), store.key("members", group, "left")]

    async def beat(self, member: str, most: int, patience: float) -> Sighting:
        """Write a heartbeat of `member`, and return those of at most `most` members."""
        return _read_beats(await self._call("beat", member, most, patience))

    async def leave(self, member: str, patience: float) -> None:
        """Record that `member` leaves."""
        await self._call("leave", member, 1, patience)

    async def _call(self, what: str, member: str, most: int, patience: float) -> Any:
        args: list[str | int] = [what, member, round(MEMORY * 1e6), most]
        return await self._store.acall("beats", self._keys, args, patience)


@valid_reply()
def _read_beats(reply: Any) -> Sighting:
    now, flat, left = int(reply[0]), reply[1], reply[2]
    names, stamps = flat[::2], [float(stamp) for stamp in flat[1::2]]
    if not all(0 <= stamp < EXACT for stamp in (now, *stamps)):
        raise ValueError(reply)
    beats = [
        MemberBeat(name.decode("utf-8", "replace"), stamp, max(0.0, (now - stamp) / 1e6))
        for name, stamp in zip(names, stamps, strict=True)
    ]
    return Sighting(beats, [name.decode("utf-8", "replace") for name in left])
