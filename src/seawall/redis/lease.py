"""A lease in Redis: the script `lease`, the store's background thread, and its pushed messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from seawall._checks import MOST
from seawall.leases.lease import LeaseHolding
from seawall.leases.store import (
    Command,
    PeriodicJob,
    Release,
    Renew,
    Take,
    Withdraw,
    close_all,
)
from seawall.models.lease import Busy, LeaseGranted
from seawall.redis.connections import valid_reply

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.redis.connections import LoopConnection
    from seawall.redis.store import StoreCore
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import StoreQuestion

Arguments = tuple[str | int, ...]

LONGEST_POLL: Final = 30.0
"""Seconds between polls: long, since releases are pushed and the server reports the lease's end."""

GIVING_BACK: Final = 1.0
"""Maximum seconds of a release after the store was closed."""

_held: WeakKeyDictionary[StoreCore, set[LeaseHolding]] = WeakKeyDictionary()


class RedisLease:
    """One lease of a `RedisStore`: a `LeaseShare`, and how its questions become script calls."""

    script: str = "lease"
    most: int = 1
    """Questions in one call: a lease never waits behind another one."""

    def __init__(self, store: StoreCore, name: str) -> None:
        self._store = store
        self._key = store.key("lease", name)
        self._channel = store.channel("lease", name)

    @property
    def store_name(self) -> str:
        """The name of the store."""
        return self._store.name

    @property
    def timeout(self) -> float:
        """Seconds for which a question waits."""
        return self._store.timeout

    @property
    def closed(self) -> bool:
        """Whether the store was closed."""
        return self._store.closed

    def longest_poll(self, ttl: float) -> float:
        """Return after how many seconds to check again, even without a message."""
        return LONGEST_POLL

    # Questions

    def ask(self, kind: Kind, command: Command, clock: Clock) -> StoreQuestion:
        """Return a waiter for the answer to `command`."""
        return self._store.ask(kind, self, command, clock)

    async def call(self, command: Command, patience: float) -> LeaseGranted | Busy:
        """Return the answer to `command`."""
        arguments = self._arguments(command)
        return answer_of(await self._store.acall("lease", [self._key], arguments, patience))

    def post(self, command: Command) -> None:
        """Run `command` in the background."""
        if isinstance(command, Withdraw) and not self._store.up:
            return
        arguments = self._arguments(command)
        connection = self._own_connection() if self._store.closed else None
        if connection is None:
            self._store.post("lease", [self._key], arguments)
        else:
            script = self._store.script("lease")
            connection.spawn(connection.run(script, [self._key], arguments, GIVING_BACK))

    def _own_connection(self) -> LoopConnection | None:
        """Return the connection of the user's running loop, if any: it outlives the thread's."""
        from asyncio import get_running_loop

        try:
            loop = get_running_loop()
        except RuntimeError:
            return None
        return None if loop is self._store._background.loop else self._store._connections.here()

    def _arguments(self, command: Command) -> Arguments:
        match command:
            case Take(holder, attempt, ttl):
                return "take", self._channel, holder, ttl, attempt
            case Renew(token, ttl):
                return "renew", self._channel, token, ttl
            case Release(token):
                return "release", self._channel, token
            case Withdraw(holder, attempt):
                return "withdraw", self._channel, holder, attempt

    def pack(self, items: Sequence[Command]) -> tuple[list[str], Arguments]:
        """Return key and arguments of the script call for the one item."""
        return [self._key], self._arguments(items[0])

    def unpack(self, reply: Any, _items: Any) -> list[LeaseGranted | Busy]:
        """Return the answer."""
        return [answer_of(reply)]

    def unwanted(self, item: Command, answer: LeaseGranted | Busy) -> None:
        """Give back what was taken for a caller that is gone."""
        if isinstance(item, Take) and isinstance(answer, LeaseGranted):
            self.post(Release(answer.token))

    # Jobs, messages, closing

    def start(self) -> None:
        """Start the background thread."""
        self._store.start()

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> PeriodicJob:
        """Run `job` every `seconds` in the background thread."""
        return self._store.every(seconds, job)

    def listen(self, heard: Callable[[], object]) -> Callable[[], None]:
        """Call `heard` when the lease was released."""
        return self._store.listen(self._channel, lambda _message: heard())

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Call `watcher(up, cause)` when the store goes down and when it comes back."""
        return self._store.watch(watcher)

    def keep(self, holding: LeaseHolding) -> None:
        """End `holding` when the store is closed."""
        fresh = set[LeaseHolding]()
        held = _held.setdefault(self._store, fresh)
        if held is fresh:
            self._store.at_close(lambda: close_all(held))
        held.add(holding)

    def forget(self, holding: LeaseHolding) -> None:
        """Undo `keep`."""
        _held.get(self._store, set[LeaseHolding]()).discard(holding)


@valid_reply(" about a lease")
def answer_of(reply: Any) -> LeaseGranted | Busy:
    """Return the parsed reply of the script `lease`; raise `StoreUnavailable` if it is invalid."""
    done, token, left = (int(number) for number in reply)
    if done not in {0, 1} or not all(0 <= number <= MOST for number in (token, left)):
        raise ValueError(reply)
    return LeaseGranted(token) if done else Busy(token, left)
