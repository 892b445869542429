"""Several hosts behind one name: choose the fastest, and avoid failing ones.

Promises:

- Of two hosts drawn at random, the one with the lower cost, by load and latency, is used.
- A host that does worse than it should is ejected for a while, longer each time. A host that was
  set aside stays out until that is revoked. Never more than a fraction of the hosts is out because
  of either, and never the last one.
- Within one call, no host is used twice while there is another.
- Each request in flight is counted out exactly once. A cancelled request is neither success nor
  failure.

The rules are in `seawall.models.balance` and `seawall.models.outliers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clients.upstreams.checks import Checker, HealthCheck
from seawall.clients.upstreams.host_set import NO_EJECTION, HostSet
from seawall.clients.upstreams.hosts import check_hosts, endpoint_of
from seawall.clients.upstreams.picks import Classifier, Pick, is_host_failure
from seawall.clients.upstreams.transport import UpstreamTransport
from seawall.clock import Clock, check_clock, current_clock, new_random
from seawall.errors import ErrorKinds, error_predicate
from seawall.models.outliers import ActionBound, Outliers
from seawall.policies.breaker import Breaker

HALF_LIFE: Final = 5.0

DEFAULT_OUTLIERS: Final = Outliers()


class Upstreams:
    """Hosts that can answer the same requests, for threads and event loops alike."""

    def __init__(
        self,
        name: str,
        hosts: Sequence[str],
        *,
        half_life: float = HALF_LIFE,
        outliers: Outliers | None = DEFAULT_OUTLIERS,
        health: HealthCheck | None = None,
        breaker: Breaker | Callable[[str], Breaker] | None = None,
        is_failure: Classifier | ErrorKinds | None = None,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Choose among `hosts`, base URLs such as "http://10.0.0.1:8080"; names are not resolved.

        Latency that no new response confirms halves every `half_life` seconds. `outliers` sets the
        rules of ejection (None: no ejection), `health` the active checks (None: no checks).
        `breaker(url)` creates the breaker of one host; or pass a keyed one, whose key is a function
        of the URL. `is_failure(error, response)`, or exception types, determine what is a host's
        own failure: by default exceptions, status 408, and statuses from 500 on except 501 and 505.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Upstreams({name!r}): the first argument is a name, such as 'vendor'")
        if outliers is not None and not isinstance(outliers, Outliers):
            raise TypeError(f"outliers={outliers!r}: write Outliers(...), or None to eject nobody")
        if health is not None and not isinstance(health, HealthCheck):
            raise TypeError(f"health={health!r}: write HealthCheck('/health/ready'), or None")
        if breaker is not None and not isinstance(breaker, Breaker):
            check.plain_function("breaker", breaker)
        listed = check_hosts(hosts)
        self.name = name
        self._is_failure = (
            is_host_failure if is_failure is None else error_predicate("is_failure", is_failure)
        )
        self._own_rng = rng is None
        self._set = HostSet(
            name,
            current_clock() if clock is None else check_clock(clock),
            new_random(name) if rng is None else check.chance("rng", rng),
            check.seconds("half_life", half_life),
            NO_EJECTION if outliers is None else outliers,
            breaker,
            None if health is None else health.panic,
        )
        self._urls_only = False
        if health is not None and health.probe is None:
            self._urls_only = True
            _check_urls(listed)
        self._set.replace(listed)
        self._checker = None if health is None else Checker(self._set, health)
        survives_fork(self)
        registry.enter(self, "upstreams", name)

    def __repr__(self) -> str:
        hosts = self._set.hosts
        out = sum(host.out for host in hosts)
        return f"<Upstreams {self.name!r}: {len(hosts)} hosts, {out} out of service>"

    @property
    def hosts(self) -> list[str]:
        """The hosts, as they were given."""
        return [host.url for host in self._set.hosts]

    def pick(self, *, tried: set[str] | None = None) -> Pick:
        """Choose a host for a `with` or `async with` block, which reports the outcome.

        Pass the same `tried` to all attempts of one call: each used host is added to it, and others
        are preferred. Raise CircuitOpen if no breaker admits the request.
        """
        if tried is not None and not isinstance(tried, set):
            raise TypeError(f"tried={tried!r}: write a set, the same for all attempts of a call")
        if self._checker is not None:
            self._checker.begin()
        return Pick(self._set, self._is_failure, tried)

    def transport(self, transport: Any = None) -> UpstreamTransport:
        """Return a transport for clients of httpx or httpx2, sync or async, over `transport`."""
        return UpstreamTransport(self, transport)

    def update(self, *, hosts: Sequence[str]) -> None:
        """Replace the hosts. Requests in progress continue; hosts that stay keep their records."""
        listed = check_hosts(hosts)
        if self._urls_only:
            _check_urls(listed)
        self._set.replace(listed)

    def set_aside(self, hosts: Sequence[str], *, cause: str, bound: ActionBound) -> None:
        """Send no requests to `hosts` until the next call with the same `bound`; [] ends it.

        This is for external knowledge, such as that of a failure detector: see `eject_suspected` in
        `seawall.members`. `bound` limits how many are set aside, the first of `hosts` first, and
        the `max_ejected` of the set's `Outliers` limits all hosts that are out together. Hosts that
        are not in this set are ignored. `cause` is for events.
        """
        if isinstance(hosts, (str, bytes)) or not isinstance(hosts, Sequence):
            raise TypeError(f"hosts={hosts!r}: write a list, such as ['http://10.0.0.1:8080']")
        if not isinstance(cause, str) or not cause:
            raise TypeError(f"cause={cause!r}: write text, such as 'suspected'")
        if not isinstance(bound, ActionBound):
            raise TypeError(f"bound={bound!r}: write ActionBound(1 / 3), the same for each call")
        self._set.set_aside(list(hosts), cause, bound)

    async def acheck(self) -> None:
        """Check all hosts now, as `health` says; in addition to the background checks."""
        if self._checker is None:
            raise RuntimeError("acheck(): write health=HealthCheck(...) when making the Upstreams")
        await self._checker.check_all()

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the set, and of each host by its URL."""
        return self._set.snapshot()

    def close(self) -> None:
        """Stop the background checks. Hosts are still chosen, by their last known state."""
        if self._checker is not None:
            self._checker.stop()()

    async def aclose(self) -> None:
        """Async twin of `close`: does not block the event loop."""
        if self._checker is not None:
            import asyncio

            await asyncio.to_thread(self._checker.stop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_raised: object) -> None:
        await self.aclose()

    def _require_urls(self) -> None:
        """Accept only http and https hosts from now on: a transport sends HTTP to them."""
        _check_urls(self.hosts)
        self._urls_only = True

    def _after_fork(self) -> None:
        """Prepare for a child process, which needs other random numbers and its own checks."""
        self._set.after_fork()
        if self._own_rng:
            self._set.rng.seed()
        if self._checker is not None:
            self._checker.after_fork()


def _check_urls(hosts: list[str]) -> None:
    for host in hosts:
        if endpoint_of(host) is None:
            raise ValueError(f"hosts: {host!r}: write an http or https URL to send HTTP to it")
