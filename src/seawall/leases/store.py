"""What a lease needs of the store that keeps it, as a protocol.

`RedisStore` and `Database` implement it. The rule is `seawall.models.lease.LeaseModel`, once more
in Lua and once more in SQL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.models.lease import Busy, Granted
    from seawall.runtime.asking import Asking
    from seawall.runtime.layers import Kind


class Take(NamedTuple):
    """Take the lease for `ttl` microseconds."""

    holder: str
    attempt: int
    ttl: int


class Renew(NamedTuple):
    """Keep the lease for `ttl` microseconds from now on."""

    token: int
    ttl: int


class Release(NamedTuple):
    """End the lease, if it is still that of `token`."""

    token: int


class Withdraw(NamedTuple):
    """End the lease, if `holder` took it by this attempt or an earlier one."""

    holder: str
    attempt: int


Command = Take | Renew | Release | Withdraw


class Job(Protocol):
    """Something that runs every so often."""

    def soon(self) -> None:
        """Run it at once. From any thread."""

    def stop(self) -> None:
        """Run it no more."""


class Kept(Protocol):
    """A holding that ends when its store is closed."""

    def close(self) -> bool:
        """End it; False if it has ended already."""

    async def release(self) -> None:
        """Let others have it, if the store can be reached."""


class LeaseShare(Protocol):
    """One lease in one store. Every failure of the store is `StoreUnavailable`."""

    @property
    def store_name(self) -> str:
        """The name of the store, for messages."""

    @property
    def timeout(self) -> float:
        """Seconds for which a question waits for its answer."""

    @property
    def closed(self) -> bool:
        """Whether the store was closed: then it never comes back."""

    def longest_poll(self, ttl: float) -> float:
        """Return after how many seconds a waiting caller asks again at the latest."""

    def ask(self, kind: Kind, command: Command, clock: Clock) -> Asking:
        """Return a waiter for the answer to `command`, a `Granted` or a `Busy`.

        A lease that is granted when nobody waits for it any more is given back.
        """

    async def call(self, command: Command, patience: float) -> Granted | Busy:
        """Return the answer to `command`; in the loop in which jobs run."""

    def post(self, command: Command) -> None:
        """Carry `command` out in the background; never blocks, never raises."""

    def start(self) -> None:
        """Get ready for jobs and listeners; raise if the store is closed."""

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> Job:
        """Run `job` every `seconds`."""

    def listen(self, heard: Callable[[], object]) -> Callable[[], None]:
        """Call `heard` when the lease may be free, and when the store is closed; return its end."""

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Call `watcher(up, cause)` when the store goes down and when it comes back."""

    def keep(self, holding: Kept) -> None:
        """End `holding` when the store is closed."""

    def forget(self, holding: Kept) -> None:
        """Undo `keep`."""


class LeaseStore(Protocol):
    """Where leases are kept: a `RedisStore` or a `Database`."""

    def lease(self, name: str) -> LeaseShare:
        """Return the lease called `name`."""


async def close_all(held: set[Kept]) -> None:
    """End all holdings of a store that is closing."""
    from asyncio import gather

    # All holders hear of it before the store is asked for anything: it may be away.
    ended = [holding for holding in list(held) if holding.close()]
    await gather(*(holding.release() for holding in ended))
