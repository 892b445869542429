"""One host of a set: its address, its record, and its breaker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from seawall.errors import Rejected
from seawall.guard import Guard
from seawall.models.balance import Load
from seawall.models.outliers import Checked, HostRecord, Outliers
from seawall.policies.breaker import Breaker
from seawall.runtime.policy import GateBound

if TYPE_CHECKING:
    from random import Random

    from seawall.clock import Clock

PORTS: Final = {"http": 80, "https": 443}
TEXT: Final = re.compile(r"[!-~]{1,2048}")
"""Valid text of a host: visible ASCII, as in every URL."""


class Endpoint(NamedTuple):
    """The parts of a base URL that replace those of a request."""

    scheme: str
    address: str
    """The name or address alone, without brackets."""
    port: int
    netloc: str
    prefix: str
    """The path before that of a request; empty if there is none."""


def endpoint_of(url: str) -> Endpoint | None:
    """Return the parts of an http or https base URL; None if `url` is not one."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        return None
    port = PORTS[parts.scheme] if parts.port is None else parts.port
    return Endpoint(parts.scheme, parts.hostname, port, parts.netloc, parts.path.rstrip("/"))


def check_hosts(hosts: object) -> list[str]:
    """Return the hosts as a list, or raise: at least one, no duplicates, all valid."""
    if isinstance(hosts, (str, bytes)) or not hasattr(hosts, "__iter__"):
        raise TypeError(f"hosts={hosts!r}: write a list, such as ['http://10.0.0.1:8080']")
    listed = list(hosts)
    seen: set[object] = set()
    for host in listed:
        if not isinstance(host, str) or TEXT.fullmatch(host) is None:
            raise TypeError(f"hosts: {host!r}: write a base URL, such as 'http://10.0.0.1:8080'")
        try:
            parts = urlsplit(host)
            usable = parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ValueError(f"hosts: {host!r}: write a base URL, such as 'http://10.0.0.1:8080'")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                f"hosts: a host ends with its path: no user, query or fragment in"
                f" {parts.scheme}://{parts.hostname}"
            )
        endpoint = endpoint_of(host)
        # The netloc may have an explicit :80.
        same = host if endpoint is None else endpoint._replace(netloc="")
        if same in seen:
            raise ValueError(f"hosts: {host!r} is there twice: write each host once")
        seen.add(same)
    if not listed:
        raise ValueError("hosts=[]: give at least one, such as ['http://10.0.0.1:8080']")
    return listed


class UpstreamHost:
    """State of one host; read and changed under the lock of its set."""

    def __init__(
        self, url: str, half_life: float, outliers: Outliers, gate: HostBreaker | None, now: float
    ) -> None:
        self.url = url
        self.endpoint = endpoint_of(url)
        self.load = Load(half_life)
        self.record = HostRecord(outliers, now)
        self.checked = Checked()
        self.set_aside_for = ""
        """Why it is set aside, such as the suspicion of a failure detector. Empty if it is not."""
        self.gate = gate
        self.requests = 0
        self.failures = 0

    @property
    def out(self) -> bool:
        """Whether it is out of service: ejected, failing its checks, or set aside."""
        return self.is_bad or bool(self.set_aside_for)

    @property
    def is_bad(self) -> bool:
        """Whether it has failed by its own record: ejected, or failing its checks."""
        return self.record.until is not None or self.checked.failing

    @property
    def _state(self) -> str:
        if self.checked.failing:
            return "failing checks"
        if self.record.until is not None:
            return "ejected"
        return "suspected" if self.set_aside_for else "serving"

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return the state of the host."""
        until = self.record.until
        return {
            "state": self._state,
            "in_flight": self.load.in_flight,
            "latency": self.load.expected(now) if self.load.measured else None,
            "requests": self.requests,
            "failures": self.failures,
            "ejections": self.record.ejections,
            "ejected_for": None if until is None else max(0.0, until - now),
            "breaker": None if self.gate is None else self.gate.state,
        }

    def __repr__(self) -> str:
        return f"<Host {self.url!r}: {self.load!r}>"


class HostBreaker:
    """The breaker of one host; a keyed breaker gets the host's URL as its key argument."""

    def __init__(self, breaker: Breaker, layers: dict[Any, Any], url: str) -> None:
        self._breaker = breaker
        self.layers = layers
        self.arguments: tuple[str, ...] = () if breaker.key is None else (url,)

    @property
    def state(self) -> str:
        """The name of the breaker's state."""
        if self._breaker.key is None:
            return self._breaker.state
        model = self._breaker.models().get(self._breaker.key(*self.arguments))
        return "closed" if model is None else model.state.value


def breaker_layers(breaker: Breaker, name: str, clock: Clock, rng: Random) -> dict[Any, Any]:
    """Bind `breaker` to a guard called `name`; return its gates for sync and async calls."""
    guard = Guard._unregistered(name, (breaker,), clock=clock, rng=rng)
    bound: Any = guard.bounds[0]
    # Another host is used instead, so this does not count as a refusal of the call.
    bound.refuse = lambda error: _decline(bound, error)
    return {kind: bound.layer(kind) for kind in ("sync", "async")}


def _decline(bound: GateBound, error: Rejected) -> None:
    if bound.policy.mode != "enforce":
        bound.would_refuse += bound.policy.mode == "shadow"
        return
    bound.refused += 1
    try:
        raise error
    finally:
        del error  # Break the cycle between the exception and its frame.
