"""Events of a group of processes: changes of members, pauses of this process, leases."""

from __future__ import annotations

from dataclasses import dataclass

from seawall.events.bus import Event


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
