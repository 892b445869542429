"""Several hosts behind one name: ask the one that will answer soonest, and none that is in trouble.

Promises: of two hosts drawn by chance the dearer one, by load and latency, is not asked; a host
that does worse than it should is left alone for a while, a longer one each time, and one that was
set aside until that is taken back; never more than a share of the hosts is left alone because of
either, and never the last; within one call no host is asked twice while
there is another; what was in flight is counted out exactly once, whatever happens; a cancelled
request is no verdict. The rules are in `seawall.models.balance` and `seawall.models.outliers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, Self

from seawall import _checks as check
from seawall import registry
from seawall.clients.upstreams.checks import Checker, HealthCheck
from seawall.clients.upstreams.host_set import NO_EJECTION, HostSet
from seawall.clients.upstreams.hosts import check_hosts, endpoint_of
from seawall.clients.upstreams.picks import Classifier, Pick, failed_by_itself
from seawall.clients.upstreams.transport import UpstreamTransport
from seawall.clock import Clock, check_clock, current_clock
from seawall.errors import ErrorKinds, error_predicate
from seawall.models.outliers import ActionBound, Outliers
from seawall.policies.breaker import Breaker
from seawall.runtime.mutex import survives_fork

__all__ = ["HealthCheck", "Outliers", "Pick", "UpstreamTransport", "Upstreams"]

HALF_LIFE: Final = 5.0

DEFAULT_OUTLIERS: Final = Outliers()


class Upstreams:
    """Hosts that can answer the same requests, for threads and event loops at once."""

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

        Latency that is not confirmed by answers halves each `half_life` seconds. `outliers` says
        who is ejected (None: nobody), `health` how hosts are asked how they are (None: not).
        `breaker(url)` makes the breaker of one host; or pass a keyed one, whose key is a function
        of the URL. `is_failure(error, response)`, or types of errors, tells what is a host's own
        failure: by default errors, and the statuses 408 and from 500 on but 501 and 505.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"Upstreams({name!r}): the first argument is a name, such as 'vendor'")
        if outliers is not None and not isinstance(outliers, Outliers):
            raise TypeError(f"outliers={outliers!r}: write Outliers(...), or None to eject nobody")
        if health is not None and not isinstance(health, HealthCheck):
            raise TypeError(f"health={health!r}: write HealthCheck('/health/ready'), or None")
        if rng is not None and (isinstance(rng, type) or not hasattr(rng, "random")):
            raise TypeError(f"rng={rng!r}: pass a random.Random, such as random.Random(7)")
        if breaker is not None and not isinstance(breaker, Breaker):
            check.plain_function("breaker", breaker)
        listed = check_hosts(hosts)
        self.name = name
        self._is_failure = (
            failed_by_itself if is_failure is None else error_predicate("is_failure", is_failure)
        )
        self._own_rng = rng is None
        self._set = HostSet(
            name,
            current_clock() if clock is None else check_clock(clock),
            Random() if rng is None else rng,  # noqa: S311 - which host is asked is no secret
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
        """Choose a host for a `with` or `async with` block, which tells how it went.

        Give the same `tried` to all attempts of one call: each host asked is added to it, and
        others are preferred. Raises CircuitOpen if no breaker lets the request through.
        """
        if tried is not None and not isinstance(tried, set):
            raise TypeError(f"tried={tried!r}: write a set, the same for all attempts of a call")
        checker = self._checker
        if checker is not None and checker.wanted:
            checker.begin()
        return Pick(self._set, self._is_failure, tried)

    def transport(self, transport: Any = None) -> UpstreamTransport:
        """Return a transport for clients of httpx or httpx2, plain or async, over `transport`."""
        return UpstreamTransport(self, transport)

    def update(self, *, hosts: Sequence[str]) -> None:
        """Have other hosts from now on. Requests under way go on; who stays keeps its record."""
        listed = check_hosts(hosts)
        if self._urls_only:
            _check_urls(listed)
        self._set.replace(listed)

    def set_aside(self, hosts: Sequence[str], *, cause: str, bound: ActionBound) -> None:
        """Send no requests to `hosts` until the next call with the same `bound`; [] ends it.

        For what is known from elsewhere, such as a failure detector: see `eject_suspected` in
        `seawall.members`. `bound` limits how many are set aside, the first of `hosts` before the
        others, and so does the `max_ejected` of the set's `Outliers`, for all that are out
        together. Hosts that are not of this set are ignored. `cause` is for events.
        """
        if isinstance(hosts, (str, bytes)) or not isinstance(hosts, Sequence):
            raise TypeError(f"hosts={hosts!r}: write a list, such as ['http://10.0.0.1:8080']")
        if not isinstance(cause, str) or not cause:
            raise TypeError(f"cause={cause!r}: write text, such as 'suspected'")
        if not isinstance(bound, ActionBound):
            raise TypeError(f"bound={bound!r}: write ActionBound(1 / 3), the same for each call")
        self._set.set_aside(list(hosts), cause, bound)

    async def acheck(self) -> None:
        """Ask all hosts now how they are, as `health` says; beside the checks of the background."""
        if self._checker is None:
            raise RuntimeError("acheck(): write health=HealthCheck(...) when making the Upstreams")
        await self._checker.ask_all()

    def snapshot(self) -> dict[str, Any]:
        """Return what there is to see: of the set, and of each host by its URL."""
        return self._set.snapshot()

    def close(self) -> None:
        """End the checks of the background. Hosts are chosen as before, as they were last seen."""
        if self._checker is not None:
            self._checker.stop()()

    async def aclose(self) -> None:
        """End the checks of the background, as `close` does, without blocking the event loop."""
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
        """Take only http and https hosts from now on: something sends HTTP to them."""
        _check_urls(self.hosts)
        self._urls_only = True

    def _after_fork(self) -> None:
        """Be usable in a child process, which draws other numbers and has its own checks."""
        self._set.after_fork()
        if self._own_rng:
            self._set.rng.seed()
        if self._checker is not None:
            self._checker.after_fork()


def _check_urls(hosts: list[str]) -> None:
    for host in hosts:
        if endpoint_of(host) is None:
            raise ValueError(f"hosts: {host!r}: write an http or https URL to send HTTP to it")
