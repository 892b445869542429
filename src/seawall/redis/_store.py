"""The store that pods share: Redis or Valkey.

Promises:
- No caller waits longer than `timeout` for it, and none waits at all once it is known to be down.
- It recovers automatically.
- A cancelled caller never disturbs another caller's answer.
- Time is the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

from seawall import _checks as check
from seawall import registry
from seawall.redis._core import StoreCore

if TYPE_CHECKING:
    from seawall.leases.store import LeaseShare
    from seawall.redis._pods import Pods
    from seawall.runtime.breaker_share import BreakerShare
    from seawall.runtime.limit_share import LimitShare
    from seawall.runtime.member_share import BeatShare


class RedisStore(StoreCore):
    """State that pods share, on a Redis or Valkey server, behind Sentinels, or in a cluster."""

    def __init__(
        self,
        target: Any,
        /,
        *,
        name: str = "redis",
        prefix: str = "seawall",
        timeout: float = 0.05,
        expected_pods: int = 1,
    ) -> None:
        """Keep shared state at `target`: a URL, or a client of redis-py.

        Of a client only the settings are used; the store makes its own connections on first use.
        `name` identifies the store in events and messages. Another `prefix` is another store on the
        same server. `timeout` is how many seconds a caller waits for it. `expected_pods`: number of
        pods by which a limit is divided while the store has never been reached, and at least while
        it is away.
        """
        super().__init__(target, name, prefix, timeout)
        self._expected_pods = check.count("expected_pods", expected_pods)
        self._pods: Pods | None = None
        registry.enter(self, "store", name)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "up" if self.up else "down"
        return f"<RedisStore {self.name!r} at {self._clients.describe()}: {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store is not for pickling: make one in each process, from the same URL")

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the store."""
        return {
            "name": self.name,
            "at": self._clients.describe(),
            "up": self.up,
            "pod": self.pod,
            "dropped": self._posts.dropped,
        }

    def close(self) -> None:
        """Flush pending messages, give back leases, and end the background thread.

        A closed store stays closed: its policies continue as if the store were down.
        """
        self._closed = True
        self._background.stop()()

    async def aclose(self) -> None:
        """Async twin of `close`, which also closes this loop's connections."""
        self._closed = True
        ended = self._background.stop()
        await asyncio.get_running_loop().run_in_executor(None, ended)
        await self._links.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    # For policies

    @property
    def pods(self) -> Pods:
        """The live pods that share this store."""
        if self._pods is None:
            from seawall.redis._pods import Pods

            self._pods = Pods(self, self._expected_pods)
        return self._pods

    def limits(self, name: str, rules: Sequence[Any], **how: Any) -> LimitShare:
        """Return the rate limits that are shared under `name`; see `LimitStore`."""
        from seawall.redis._limits import make_share

        return make_share(self, name, rules, **how)

    def breaker(self, name: str, settings: Any, owner: Any, **how: Any) -> BreakerShare:
        """Return the breaker that is shared under `name`; see `BreakerStore`."""
        from seawall.redis._breaker import Share

        return Share(self, name, settings, owner, **how)

    def lease(self, name: str) -> LeaseShare:
        """Return the lease called `name`; see `LeaseStore`."""
        from seawall.redis._lease import RedisLease

        return RedisLease(self, name)

    def heartbeats(self, group: str) -> BeatShare:
        """Return the heartbeats that the members of `group` write; see `BeatStore`."""
        from seawall.redis._heartbeats import SharedHeartbeats

        return SharedHeartbeats(self, group)
