"""A queue of jobs that all pods share, on Redis or Valkey.

Promises:
- A pushed job ends done, dead, cancelled or expired, whatever crashes meanwhile (as long as the
  store keeps its data).
- A job is tried at most `max_attempts` times.
- Of two claims of a job, only the later can ack it.
- A claim whose holder is gone returns to its old place when its lease is over; one whose answer was
  lost, as soon as the store answers again.
- Nothing starves.
- Time is the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

from seawall import registry
from seawall._checks import MOST
from seawall._failures import split_report
from seawall._forks import survives_fork
from seawall.clock import SYSTEM, Clock, check_clock, current_clock
from seawall.errors import StoreUnavailable
from seawall.events import DeadLetterDropped, JobDied, SettingsDiffer
from seawall.events.bus import emit
from seawall.jobs.queue import JobQueue
from seawall.jobs.records import QueueCall
from seawall.jobs.wakeups import READY
from seawall.models.queue.jobs import (
    PRIORITIES,
    TOTALS,
    Browsed,
    JobGranted,
    Letter,
    QueueCounts,
    Seen,
)
from seawall.redis.messages import weakly, weakly_awaited
from seawall.redis.store import RedisStore, StoreCore, core_of
from seawall.runtime.background import Handle
from seawall.runtime.layers import Kind
from seawall.runtime.mutex import Mutex
from seawall.runtime.store import StoreQuestion

R = TypeVar("R")

RELEASE_EVERY: Final = 0.5
"""Seconds between two attempts, while there is something to release."""
RELEASES_KEPT: Final = 3600.0
"""Seconds for which it is tried, or as long as the lease if that is longer."""
MOST_RELEASES: Final = 1000
"""Maximum number of releases, the first ones: in a long outage, later claims were never sent."""
RELEASE_TIMEOUT: Final = 1.0
"""Maximum seconds of one attempt: no caller waits for it."""


class ClaimReleases:
    """The pending releases of one store."""

    def __init__(self) -> None:
        self._waiting: dict[QueueCall, tuple[_Calls, float]] = {}
        # Both are weak references: this is kept for as long as the store lives, and no longer.
        self._store: Callable[[], StoreCore | None] = lambda: None
        self._handle: Callable[[], Handle | None] = lambda: None
        survives_fork(self)

    def begin(self, store: StoreCore) -> None:
        """Send releases to `store` in the background, and before it is closed."""
        self._store = ref(store)
        self._handle = ref(store.every(RELEASE_EVERY, weakly_awaited(self.flush)))
        store.watch(weakly(self.soon))
        store.at_close(self.flush)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, calls: _Calls, ask: QueueCall, lease: int) -> None:
        """Add the release `ask` of a claim. Takes no lock: the garbage collector may call it."""
        if len(self._waiting) < MOST_RELEASES:
            until = SYSTEM.now() + max(RELEASES_KEPT, lease / 1e6)
            self._waiting[ask] = calls, until
            self.soon()

    def soon(self, *_news: object) -> None:
        """Send the releases now."""
        handle = self._handle()
        if handle is not None and self._waiting:
            handle.soon()

    async def flush(self) -> None:
        """Send all releases; those without an answer are sent again next time."""
        store, now = self._store(), SYSTEM.now()
        by_queue: dict[_Calls, list[QueueCall]] = {}
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
                    reply = await store.acall(calls.script, keys, args, RELEASE_TIMEOUT)
                for ask in some:
                    self._waiting.pop(ask, None)
                if store is not None:
                    calls.unpack(reply, some)  # reports dead jobs; an invalid reply is logged, once

    def _after_fork(self) -> None:
        """Leave the parent's releases to the parent."""
        self._waiting = {}


_of_stores: WeakKeyDictionary[StoreCore, ClaimReleases] = WeakKeyDictionary()


def releases_of(store: StoreCore) -> ClaimReleases:
    """Return the pending releases of that store."""
    found = _of_stores.get(store)
    if found is None:
        made = ClaimReleases()
        found = _of_stores.setdefault(store, made)  # only one of two threads has made it
        if found is made:
            made.begin(store)
    return found


PARTS: Final = (
    "jobs",
    "payloads",
    "results",
    "ready",
    "since",
    "delayed",
    "leases",
    "deadlines",
    "memory",
    "dead",
    "tokens",
    "unheard",
    "dedupe",
    "counts",
)
"""The keys of a queue, in the order that the script expects."""

_ANSWERS: Final = frozenset(
    {"heard", "release", "extend", "ack", "nack", "cancel", "requeue", "drop"}
)
_DIGITS: Final = 17
LOOK_AGAIN: Final = 1.0
"""Seconds for which the last known number of waiting jobs is good enough."""


class PriorityQueue(JobQueue):
    """A queue of jobs with priorities, leases and dead letters, shared by all pods."""

    def __init__(
        self,
        store: RedisStore,
        name: str,
        *,
        head_start: float = 60.0,
        max_attempts: int = 5,
        max_size: int = 100_000,
        max_dead: int = 10_000,
        keep: float = 7 * 86_400.0,
        result_ttl: float = 3600.0,
        dedupe_window: float = 0.0,
        max_payload: int = 262_144,
        clock: Clock | None = None,
    ) -> None:
        """Share the queue called `name` with every pod that uses the same store.

        Each level of priority is worth `head_start` seconds of waiting. A job is tried
        `max_attempts` times, and a push beyond `max_size` unfinished jobs is refused. A job that
        was not started within `keep` seconds expires, and a dead one is forgotten after the same
        time, or when more than `max_dead` have died since. How other jobs ended is kept for
        `result_ttl` seconds, for the last `max_size` jobs (or 1000, if that is more), and a dedupe
        id is answered for `dedupe_window` seconds after the end. Payloads and results have up to
        `max_payload` bytes, as JSON.
        """
        if not isinstance(store, RedisStore):
            raise TypeError(f"PriorityQueue({store!r}, ...): the first argument is a RedisStore")
        super().__init__(
            name,
            head_start=head_start,
            max_attempts=max_attempts,
            max_size=max_size,
            max_dead=max_dead,
            keep=keep,
            result_ttl=result_ttl,
            dedupe_window=dedupe_window,
            max_payload=max_payload,
            clock=current_clock() if clock is None else check_clock(clock),
        )
        self.store = store
        self._core = core_of(store)
        self._calls = _Calls(self)
        # Separate: a full server refuses these but accepts the others.
        self._additions = _Calls(self)
        self._releases = releases_of(self._core)
        self._mutex = Mutex()
        self._announced = False
        self._last_waiting = 0
        self._look_again = -inf
        registry.enter(self, "queue", self.name, ask="asnapshot", local=False)
        self._heard: set[str] = set()
        survives_fork(self)

    def __repr__(self) -> str:
        return f"PriorityQueue({self.store!r}, {self.name!r})"

    def _answering(self, kind: Kind, ask: QueueCall) -> StoreQuestion:
        self._core.start()
        if not self._announced:
            self._announce()
        calls = self._additions if ask.operation == "push" else self._calls
        return self._core.ask(kind, calls, ask, self.clock)

    def _undo(self, ask: QueueCall, lease: int) -> None:
        self._releases.add(self._calls, ask, lease)

    @property
    def waiting(self) -> int:
        """Number of waiting jobs, as of the store's last answer, refreshed once a second.

        The first read starts that: it is 0 until there is an answer.
        """
        now = self.clock.now()
        if now >= self._look_again:
            self._look_again = now + LOOK_AGAIN
            self._ask_for_counts()
        return self._last_waiting

    def _ask_for_counts(self) -> None:
        question = self._answering("sync", QueueCall("counts", ()))

        def take() -> bool:
            try:
                self._last_waiting = sum(question.claim().waiting)
            except StoreUnavailable:
                self._last_waiting = 0  # do not refuse calls because the queue cannot be seen
            return True

        question.publish(take)

    @property
    def _up(self) -> bool:
        return self._core.answers(self._calls.script)

    @property
    def _closed(self) -> bool:
        return self._core.closed

    # News from other pods, for as long as this object lives

    def _announce(self) -> None:
        with self._mutex:
            if self._announced:
                return
            self._announced = True
        own = f"{self.rules!r}, max_payload={self.max_payload}"
        differ = weakly(self._differ)
        announcement = self._core.announce(
            "queue", self.name, own, lambda other: differ(own, other)
        )
        finalize(self, announcement.stop)

    def _differ(self, own: str, other: str) -> None:
        name = self.name
        emit(SettingsDiffer, name, policy="queue", shared_name=name, own=own, other=other)

    def _listen(self, topic: str) -> None:
        """Subscribe, once for all waiters here, to what happens in other pods."""
        self._core.start()
        calls, wakeups = self._calls, self._wakeups
        channel = calls.stirred if topic == READY else calls.ended
        with self._mutex:
            if channel in self._heard:
                return
            self._heard.add(channel)

        def hear(message: bytes) -> None:
            if channel == calls.stirred:
                wakeups.ring(READY)
            elif message:
                wakeups.ring(message.decode("utf-8", "replace"))
            else:
                wakeups.ring_all()

        finalize(self, self._core.listen(channel, hear))

    def _after_fork(self) -> None:
        self._mutex = Mutex()


class _Calls:
    """Batches operations into one script call: all that are requested at one moment."""

    script = "queue"
    most = 32

    def __init__(self, queue: PriorityQueue) -> None:
        store, name = queue._core, queue.name
        self._name = name
        self.stirred = store.channel("queue", name)
        self.ended = f"{self.stirred}:ended"
        rules = queue.rules
        # Longer than any job can live: waiting, then claimed, then dead.
        expiry = (4 * rules.keep + 2 * rules.result_ttl) // 1000 + 1
        self._keys = [store.key("queue", name, part) for part in PARTS]
        self._settings = (*rules, self.stirred, self.ended, expiry)

    def pack(self, items: Sequence[QueueCall]) -> tuple[list[str], list[Any]]:
        args: list[Any] = [*self._settings]
        for operation, given in items:
            values = [value for job in given[0] for value in job] if operation == "push" else given
            args += (operation, len(values), *values)
        return self._keys, args

    def unpack(self, reply: Any, items: Sequence[QueueCall]) -> list[Any]:
        replies, died, dropped = reply
        answers = [_READERS[item.operation](one) for one, item in zip(replies, items, strict=True)]
        for id_, attempts, reason in _rows(died, 3):
            cause, trace = split_report(_str(reason))
            fields = {"job": _str(id_), "attempts": _int(attempts), "cause": cause}
            emit(JobDied, self._name, **fields, traceback=trace)
        for (id_,) in _rows(dropped, 1):
            emit(DeadLetterDropped, self._name, job=_str(id_))
        return answers

    def unwanted(self, item: QueueCall, answer: Any) -> None:
        """Do nothing: the caller releases a claim whose answer it did not get."""


# Replies of the store. An invalid one raises, and so is a failure of the store.


def _read_push(reply: list[bytes]) -> list[str] | None:
    return [_str(id_) for id_ in reply] or None


def _read_claim(reply: list[bytes]) -> tuple[list[JobGranted], int]:
    return _records(JobGranted, _GRANTED, reply[1:]), _int(reply[0])


def _read_answer(reply: list[bytes]) -> tuple[bool, str]:
    done, state = reply
    return _int(done) == 1, _str(state)


def _read_status(reply: list[Any]) -> Seen | None:
    if not reply:
        return None
    state, priority, attempts, age, reason, result = reply
    data = None if result is None else _bytes(result)
    return Seen(_str(state), _int(priority), _int(attempts), _int(age), _str(reason), data)


def _read_dead(reply: list[bytes]) -> list[Letter]:
    return _records(Letter, _LETTER, reply)


def _read_browse(reply: list[bytes]) -> tuple[list[Browsed], tuple[int, str] | None]:
    number, id_, *rows = reply
    return _records(Browsed, _BROWSED, rows), (_int(number), _str(id_)) if number else None


def _read_inspect(reply: list[bytes]) -> Browsed | None:
    return next(iter(_records(Browsed, _BROWSED, reply)), None)


def _read_counts(reply: list[bytes]) -> QueueCounts:
    numbers = [_int(value) for value in reply]
    waiting, rest = numbers[:PRIORITIES], numbers[PRIORITIES:]
    delayed, claimed, dead, oldest, *totals = rest
    if len(totals) != len(TOTALS):
        raise StoreUnavailable("the store's answer makes no sense")
    return QueueCounts(tuple(waiting), delayed, claimed, dead, oldest, tuple(totals))


_READERS: Final = {
    "push": _read_push,
    "claim": _read_claim,
    "status": _read_status,
    "dead": _read_dead,
    "browse": _read_browse,
    "inspect": _read_inspect,
    "counts": _read_counts,
    **dict.fromkeys(_ANSWERS, _read_answer),
}


def _records(
    kind: Callable[..., R], readers: Sequence[Callable[[Any], Any]], values: Any
) -> list[R]:
    """Return the records of `values`, which has one value after another for each of `readers`."""
    rows = _rows(values, len(readers))
    return [kind(*(read(one) for read, one in zip(readers, row, strict=True))) for row in rows]


def _rows(values: Any, width: int) -> list[list[Any]]:
    if not isinstance(values, list) or len(values) % width:
        raise StoreUnavailable("the store's answer makes no sense")
    return [values[start : start + width] for start in range(0, len(values), width)]


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise StoreUnavailable("the store's answer makes no sense")
    return value


def _str(value: Any) -> str:
    return _bytes(value).decode()


def _int(value: Any) -> int:
    if len(_bytes(value)) > _DIGITS or abs(number := int(value)) > MOST:
        raise StoreUnavailable("the store's answer makes no sense")
    return number


_GRANTED: Final = (_str, *[_int] * 6, _bytes)
_LETTER: Final = (_str, *[_int] * 3, _str, _bytes)
_BROWSED: Final = (_int, _str, _str, *[_int] * 4, _str, _int, _bytes)
