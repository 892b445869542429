"""Events of a service and its parts: edge, hosts, members, leases, pools, workers, event loops."""

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


@dataclass(slots=True, kw_only=True, eq=False)
class MemberChanged(Event):
    """A member of a group went from one state to another; `guard` is the group's name.

    The states are unknown, alive, suspected, confirmed and left. From suspected to alive the
    suspicion was wrong, and is cleared.
    """

    name = "member_changed"
    is_change = True

    member: str
    before: str
    after: str
    reason: str
    level: float
    """How strongly it was suspected when it changed, as its detector measures that: for a change to
    alive or left, just before it."""
    duration: float
    """How many seconds the state before lasted."""
    by: str = ""
    """The member that reported the change; empty for this process itself."""


@dataclass(slots=True, kw_only=True, eq=False)
class OwnPause(Event):
    """The process itself was paused for a while, and suspects no member because of it.

    `guard` is the group's name.
    """

    name = "own_pause"
    is_change = True

    seconds: float
    """Length of the pause."""


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseChanged(Event):
    """A lease was acquired, released or lost; `guard` is its name."""

    name = "lease_changed"
    is_change = True

    token: int
    """The fencing token."""
    held: bool
    """Whether the lease is held now."""
    cause: str


@dataclass(slots=True, kw_only=True, eq=False)
class LevelChanged(Event):
    """A service went from one level of service to another."""

    name = "level_changed"
    is_change = True

    before: str
    after: str
    cause: str


@dataclass(slots=True, kw_only=True, eq=False)
class ResourceLeaked(Event):
    """A resource has been out of its pool for longer than borrowers are expected to need."""

    name = "resource_leaked"
    is_change = True

    borrowed_at: str
    """The line of code that borrowed it."""
    seconds: float
    """How long it has been out."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerReplaced(Event):
    """A worker process died and another took its place."""

    name = "worker_replaced"
    is_change = True

    item: str
    """What it was working on."""
    exit_code: int | None


@dataclass(slots=True, kw_only=True, eq=False)
class LoopBlocked(Event):
    """An event loop has not completed an iteration for `seconds`; `stack` is what it is doing.

    It comes when the block is noticed, and once more when it is `over`.
    """

    name = "loop_blocked"

    seconds: float
    stack: str
    over: bool
