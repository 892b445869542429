"""Protocols between a lease and the store that keeps it.

`RedisStore` and `Database` implement them. The rules are those of
`seawall.models.lease.LeaseModel`, with one copy in Lua and one in SQL.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from seawall.clock import Clock
    from seawall.leases.lease import LeaseHolding
    from seawall.models.lease import Busy, LeaseGranted
    from seawall.runtime.layers import Kind
    from seawall.runtime.store import StoreQuestion


class Take(NamedTuple):
    """Command: take the lease for `ttl` microseconds."""

    holder: str
    attempt: int
    ttl: int


class Renew(NamedTuple):
    """Command: extend the lease to `ttl` microseconds from now."""

    token: int
    ttl: int


class Release(NamedTuple):
    """Command: release the lease, if `token` still holds it."""

    token: int


class Withdraw(NamedTuple):
    """Command: release the lease, if `holder` took it by this attempt or an earlier one."""

    holder: str
    attempt: int


Command = Take | Renew | Release | Withdraw


class PeriodicJob(Protocol):
    """A job that runs at intervals."""

    def soon(self) -> None:
        """Run the job at once. Callable from any thread."""

    def stop(self) -> None:
        """Stop running the job."""


class LeaseShare(Protocol):
    """One lease in one store. Every failure of the store is raised as `StoreUnavailable`."""

    @property
    def store_name(self) -> str:
        """The name of the store, for messages."""

    @property
    def timeout(self) -> float:
        """Number of seconds that a question waits for its answer."""

    @property
    def closed(self) -> bool:
        """Whether the store was closed. It never opens again."""

    def longest_poll(self, ttl: float) -> float:
        """Return the maximum number of seconds between two questions of a waiter."""

    def ask(self, kind: Kind, command: Command, clock: Clock) -> StoreQuestion:
        """Return a waiter for the answer to `command`, a `LeaseGranted` or a `Busy`.

        A lease that is granted after the caller has stopped waiting is released again.
        """

    async def call(self, command: Command, patience: float) -> LeaseGranted | Busy:
        """Return the answer to `command`. Call it in the event loop that runs the jobs."""

    def post(self, command: Command) -> None:
        """Execute `command` in the background. Never blocks, never raises."""

    def start(self) -> None:
        """Prepare for jobs and listeners; raise if the store is closed."""

    def every(self, seconds: float, job: Callable[[], Awaitable[None]]) -> PeriodicJob:
        """Run `job` every `seconds`."""

    def listen(self, heard: Callable[[], object]) -> Callable[[], None]:
        """Call `heard` when the lease may be free or the store is closed; return its remover."""

    def watch(self, watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        """Call `watcher(up, cause)` when the store goes down or comes back; return its remover."""

    def keep(self, holding: LeaseHolding) -> None:
        """End `holding` when the store is closed."""

    def forget(self, holding: LeaseHolding) -> None:
        """Undo `keep`."""


class LeaseStore(Protocol):
    """A store of leases: a `RedisStore` or a `Database`."""

    def _lease(self, name: str) -> LeaseShare:
        """Return the lease called `name`."""


async def close_all(held: set[LeaseHolding]) -> None:
    """End all holdings of a store that is closing."""
    from asyncio import gather

    # Notify all holders before the first request to the store, which may be unreachable.
    ended = [holding for holding in list(held) if holding.close()]
    await gather(*(holding.release() for holding in ended))
