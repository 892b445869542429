"""Active health checks of hosts, in the background, so that no request has to find out.

One daemon thread for a set, with its own event loop: it serves sync and async code alike, does not
end with the loop of the first caller, and checks all hosts concurrently. It starts with the first
request, so that a process may fork before, and again in a child.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from weakref import finalize, ref

from seawall import _checks as check
from seawall.clients.upstreams.hosts import Endpoint, UpstreamHost
from seawall.clock import VirtualClock
from seawall.errors import StoreUnavailable
from seawall.runtime.background import Background
from seawall.runtime.driver import sleep_async
from seawall.runtime.http_status import http_status

if TYPE_CHECKING:
    from ssl import SSLContext

    from seawall.clients.upstreams.host_set import HostSet

Probe = Callable[[str], Awaitable[bool]]
"""`await probe(url)` returns whether the host is healthy."""

AT_ONCE: Final = 64
"""Maximum number of concurrent checks."""

JITTER: Final = 0.2
"""Fraction by which pauses vary, so that the checks of all pods do not stay synchronized."""

LINGER: Final = 0.1
"""Seconds for a host to close the connection first, so that it does not see a reset."""


class HealthCheck:
    """Settings of active health checks: `HealthCheck("/health/ready")`."""

    __slots__ = ("every", "failures", "panic", "path", "probe", "ssl", "successes", "timeout")

    def __init__(
        self,
        path: str = "/health/ready",
        *,
        every: float = 5.0,
        timeout: float = 1.0,
        failures: int = 2,
        successes: int = 2,
        panic: float = 0.5,
        probe: Probe | None = None,
        ssl: SSLContext | None = None,
    ) -> None:
        """GET `path` once in `every` seconds; 200 to 399 within `timeout` is a pass.

        A host goes out of service after this number of consecutive `failures`, and returns after
        this number of consecutive `successes`. If more than the ratio `panic` of hosts is out (and
        more than one), all are used: the hosts are not the cause. `probe`, an async function of the
        host's URL that returns True or False, replaces the request, for hosts that do not speak
        HTTP; it runs in the thread of the checks. `ssl` is for https hosts whose certificates the
        system does not trust.
        """
        if not isinstance(path, str) or not path.startswith("/") or not _is_plain(path):
            raise ValueError(f"path={path!r}: write a path, such as '/health/ready'")
        self.path = path
        self.every = check.seconds("every", every)
        self.timeout = check.seconds("timeout", timeout)
        self.failures = check.count("failures", failures)
        self.successes = check.count("successes", successes)
        self.panic = check.ratio("panic", panic, zero=True)
        self.probe = None if probe is None else check.function("probe", probe)
        if ssl is not None and not hasattr(ssl, "wrap_bio"):
            raise TypeError(f"ssl={ssl!r}: pass an SSLContext, of ssl.create_default_context(...)")
        self.ssl = ssl

    def __repr__(self) -> str:
        return f"HealthCheck({self.path!r}, every={self.every:g}, timeout={self.timeout:g})"


def _is_plain(path: str) -> bool:
    return path.isascii() and path.isprintable() and " " not in path


class Checker:
    """The checks of one set, in a background thread; neither keeps the set alive."""

    def __init__(self, hosts: HostSet, settings: HealthCheck) -> None:
        self.settings = settings
        self._hosts = ref(hosts)
        self._rng = hosts.rng
        self._virtual = isinstance(hosts.clock, VirtualClock)
        self._ssl = settings.ssl
        self._background = Background(lambda: None, _do_nothing, owner="checks")
        me = ref(self)

        async def check() -> None:
            checker = me()
            if checker is not None:
                await checker._round()

        self._background.every(settings.every * (1 - JITTER), check)
        finalize(self, self._background.stop)

    def begin(self) -> None:
        """Start the thread, unless it runs, was stopped, or time is virtual."""
        if not self._virtual:
            try:
                self._background.start()
            except StoreUnavailable:
                pass  # stopped, or no thread is available: then the next request tries again

    def stop(self) -> Callable[[], None]:
        """Signal the thread to end; return a function that waits until it has ended."""
        return self._background.stop()

    def after_fork(self) -> None:
        """Prepare a restart in a child process, which has no thread, with its next request."""
        self._background.after_fork()

    async def _round(self) -> None:
        await self.check_all()
        await sleep_async(self.settings.every * 2 * JITTER * self._rng.random())

    async def check_all(self) -> None:
        """Check all hosts once, concurrently."""
        hosts = self._hosts()
        if hosts is None:
            return
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(host: UpstreamHost) -> None:
            async with room:
                passed = await self._passes(host)
            hosts.checked(host, passed=passed, settings=self.settings)

        await asyncio.gather(*(ask(host) for host in hosts.hosts))

    async def _passes(self, host: UpstreamHost) -> bool:
        probe, timeout = self.settings.probe, self.settings.timeout
        try:
            if probe is None:
                return host.endpoint is not None and await self._get(host.endpoint)
            async with asyncio.timeout(timeout):
                return bool(await probe(host.url))
        except (OSError, EOFError, ValueError):  # refused, late, broken off, or not HTTP
            return False
        except Exception:
            logging.getLogger("seawall").exception("a health check failed to run")
            return False

    async def _get(self, endpoint: Endpoint) -> bool:
        """GET the path, and return whether the status is good."""
        settings = self.settings
        status = await http_status(
            endpoint.address,
            endpoint.port,
            endpoint.netloc,
            f"{endpoint.prefix}{settings.path}",
            ssl=self._security(endpoint),
            within=settings.timeout,
            linger=LINGER,
        )
        return 200 <= status < 400  # noqa: PLR2004

    def _security(self, endpoint: Endpoint) -> SSLContext | None:
        if endpoint.scheme != "https":
            return None
        if self._ssl is None:
            from ssl import create_default_context

            self._ssl = create_default_context()
        return self._ssl


async def _do_nothing() -> None:
    pass
