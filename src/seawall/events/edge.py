"""Events of a service's edges: request limits, health, lifecycle, upstream hosts."""

from __future__ import annotations

from dataclasses import dataclass

from seawall.events.bus import Event


@dataclass(slots=True, kw_only=True, eq=False)
class SoftLimitExceeded(Event):
    """A request exceeded a limit that only alerts; `guard` is the edge's name."""

    name = "soft_limit_exceeded"

    limit: str


@dataclass(slots=True, kw_only=True, eq=False)
class OverloadChanged(Event):
    """The event loop of an edge became overloaded, or recovered; `guard` is the edge's name.

    Requests are shed during overload. The end is noticed with the next request.
    """

    name = "overload_changed"
    is_change = True

    overloaded: bool
    load: float
    """Above 1, demand exceeds capacity."""


@dataclass(slots=True, kw_only=True, eq=False)
class HealthChanged(Event):
    """A health check, or the service as a whole, became better or worse; `guard` is its name."""

    name = "health_changed"
    is_change = True

    check: str
    before: str
    after: str
    output: str


@dataclass(slots=True, kw_only=True, eq=False)
class LifecycleChanged(Event):
    """A service went from one phase of its lifecycle to the next; `guard` is its name."""

    name = "lifecycle_changed"
    is_change = True

    before: str
    after: str
    in_flight: int
    """Number of requests in flight at that moment."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostEjected(Event):
    """A host gets no requests for a while: it performed too badly, or is suspected."""

    name = "host_ejected"
    is_change = True

    host: str
    cause: str
    seconds: float
    """For how long; 0 means until the cause is over."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostRestored(Event):
    """A host that had been ejected gets requests again."""

    name = "host_restored"
    is_change = True

    host: str
    cause: str
