"""The events of a service's edges: clients, probes, hosts and limits.

They are published and subscribed to like all others, see `seawall.runtime.events`.
"""

from __future__ import annotations

from seawall.runtime.events import Event


class SoftLimitExceeded(Event):
    """A request exceeded a limit that only alerts; `guard` is the edge's name."""

    __slots__ = ("limit",)
    name = "soft_limit_exceeded"

    def __init__(self, guard: str, *, limit: str) -> None:
        """Hold the limit's name."""
        super().__init__(guard)
        self.limit = limit


class OverloadChanged(Event):
    """The event loop of an edge became overloaded, or recovered; `guard` is the edge's name.

    Requests are shed during overload. The end is noticed with the next request.
    """

    __slots__ = ("load", "overloaded")
    name = "overload_changed"
    is_change = True

    def __init__(self, guard: str, *, overloaded: bool, load: float) -> None:
        """Hold whether it is overloaded now, and its load: above 1, demand exceeds capacity."""
        super().__init__(guard)
        self.overloaded = overloaded
        self.load = load


class HealthChanged(Event):
    """A health check, or the service as a whole, became better or worse; `guard` is its name."""

    __slots__ = ("after", "before", "check", "output")
    name = "health_changed"
    is_change = True

    def __init__(self, guard: str, *, check: str, before: str, after: str, output: str) -> None:
        """Hold which check, its state before and after, and its output."""
        super().__init__(guard)
        self.check = check
        self.before = before
        self.after = after
        self.output = output


class LifecycleChanged(Event):
    """A service went from one phase of its lifecycle to the next; `guard` is its name."""

    __slots__ = ("after", "before", "in_flight")
    name = "lifecycle_changed"
    is_change = True

    def __init__(self, guard: str, *, before: str, after: str, in_flight: int) -> None:
        """Hold the phases, and the number of requests in flight at that moment."""
        super().__init__(guard)
        self.before = before
        self.after = after
        self.in_flight = in_flight


class HostEjected(Event):
    """A host gets no requests for a while: it performed too badly, or is suspected."""

    __slots__ = ("cause", "host", "seconds")
    name = "host_ejected"
    is_change = True

    def __init__(self, guard: str, *, host: str, cause: str, seconds: float) -> None:
        """Hold which host, why, and for how long; 0 seconds means until the cause is over."""
        super().__init__(guard)
        self.host = host
        self.cause = cause
        self.seconds = seconds


class HostRestored(Event):
    """A host that had been ejected gets requests again."""

    __slots__ = ("cause", "host")
    name = "host_restored"
    is_change = True

    def __init__(self, guard: str, *, host: str, cause: str) -> None:
        """Hold which host, and why."""
        super().__init__(guard)
        self.host = host
        self.cause = cause
