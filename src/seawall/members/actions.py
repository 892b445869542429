"""Ready-made actions on members that are suspected, confirmed as failed, or gone.

A detector only reports the state of the members. An action follows a group and reacts:
`eject_suspected` stops sending requests to a host, `split_limit` divides a rate limit among the
live pods, `hand_over` lets another process lead, and `MembersPresent` is a health check.

Promises:
- An action affects at most a share of the members at a time, and never all of them: a detector that
  is wrong about all members must not take all of them out. Members that the bound holds back are
  counted, and logged once.
- Actions do not make anything safe: leadership is only as safe as its lease, whether or not the
  leader steps down.
- An action is undone when the member is cleared, and when the action is closed. A forgotten member
  is released at the next change of the group, whatever that change is.
- Actions follow the state of the group, not the order of its events: an action that missed a change
  is correct again after the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clients.upstreams import Upstreams
from seawall.clock import current_clock
from seawall.members.group import MemberView
from seawall.models.detection.gossip import MemberState
from seawall.models.outliers import ActionBound
from seawall.policies.rate_limit import RateLimit
from seawall.runtime.mutex import Mutex
from seawall.web.health import CheckFinding, Degraded, Healthy

if TYPE_CHECKING:
    from seawall.events import MemberChanged
    from seawall.members.leader import Leader

__all__ = ["Action", "MembersPresent", "eject_suspected", "hand_over", "split_limit"]

SHARE: Final = 1 / 3
"""Default for the maximum share of a group that is acted on."""
UNWELL: Final = 4
"""Health score (0 to 8) from which this process itself is considered the failing one."""
_WORST_FIRST: Final = (MemberState.CONFIRMED, MemberState.LEFT, MemberState.SUSPECTED)
_MISSED: Final = (MemberState.CONFIRMED, MemberState.SUSPECTED)


class Watched(Protocol):
    """A watched group: `Heartbeats` or `Cluster`."""

    @property
    def name(self) -> str:
        """The name of the group."""

    @property
    def members(self) -> Mapping[str, MemberView]:
        """The known members by name."""

    def subscribe(self, subscriber: Callable[[MemberChanged], object], /) -> Callable[[], None]:
        """Call `subscriber` for each change; return a function that unsubscribes it."""

    def snapshot(self) -> dict[str, Any]:
        """Return plain data; its "kind" is "cluster" if this process is itself a member."""


class ActionLimit(Protocol):
    """Limit on how much an action may do."""

    @property
    def held_back(self) -> Sized:
        """The members that would be acted on without the bound."""

    @property
    def text(self) -> str:
        """The setting that limits the action, for messages."""

    def snapshot(self) -> dict[str, object]:
        """Return what is done and what is held back."""


Apply = Callable[[list[MemberView] | None], None]


class Action:
    """A reaction to the state of a group's members that lasts until `close()`."""

    def __init__(self, members: Watched, kind: str, bound: ActionLimit, apply: Apply) -> None:
        """Call `apply(views)` now and at each change, and `apply(None)` to undo everything."""
        self._group = members.name
        self._members = members
        self._kind = kind
        self._bound = bound
        self._apply = apply
        self._mutex = Mutex()
        self._is_closed = self._has_logged = False
        survives_fork(self)
        self._end = members.subscribe(self._follow)
        try:
            self._follow()
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else repr(self._bound)
        return f"<{self._kind} of {self._group!r}: {state}>"

    def snapshot(self) -> dict[str, Any]:
        """Return the members that it acts on now, and those that the bound holds back."""
        return {"action": self._kind, "group": self._group, **self._bound.snapshot()}

    def close(self) -> None:
        """Stop following the group and undo the action. Idempotent."""
        self._end()
        with self._mutex:
            if not self._is_closed:
                self._is_closed = True
                self._apply(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _follow(self, _change: MemberChanged | None = None) -> None:
        """Act on the current state of the group; changes may arrive in any order."""
        with self._mutex:
            if self._is_closed:
                return
            self._apply(list(self._members.members.values()))
            held = self._bound.held_back
            if not held or self._has_logged:
                return
            self._has_logged = True
        logging.getLogger("seawall").warning(
            "%s of the group %r: %d more would be acted on, but %s allows no more. Either much has"
            " failed at once, or this process or its network has. This is logged once; the"
            " snapshot counts further times",
            self._kind,
            self._group,
            len(held),
            self._bound.text,
        )

    def _after_fork(self) -> None:
        self._mutex = Mutex()


def eject_suspected(
    members: Watched,
    upstreams: Upstreams,
    *,
    most: float = SHARE,
    host: Callable[[MemberView], str] | None = None,
) -> Action:
    """Send no requests to hosts whose member is suspected, confirmed or has left.

    At most the share `most` of the hosts, rounded down, is ejected; together with other ejections,
    at most `max_ejected` of the upstreams. A host returns when its member is alive again or
    forgotten.

    `host(member)` returns the host of a member as `upstreams` spells it. Without it, the member's
    name, address or metadata is used, whichever is one of the hosts.
    """
    _check_members("eject_suspected", members)
    if not isinstance(upstreams, Upstreams):
        raise TypeError(f"eject_suspected(members, {upstreams!r}): pass an Upstreams")
    host_of = None if host is None else check.plain_function("host", host)
    bound = ActionBound(most)
    cause = f"suspected in the group {members.name!r}"
    has_warned = False

    def apply(views: list[MemberView] | None) -> None:
        nonlocal has_warned
        known = upstreams.hosts
        hosts = {view.name: _host(view, known, host_of) for view in views or ()}
        ill = [view for view in views or () if view.state in _WORST_FIRST]
        if ill and not has_warned and not any(found in known for found in hosts.values()):
            has_warned = True
            logging.getLogger("seawall").warning(
                "eject_suspected: no member of %r is one of the hosts of %r, so none is ejected:"
                " write host=lambda member: ..., which returns the host of a member",
                members.name,
                upstreams.name,
            )
        ill.sort(key=lambda view: (_WORST_FIRST.index(view.state), view.since))
        upstreams.set_aside([hosts[view.name] for view in ill], cause=cause, bound=bound)

    return Action(members, "eject_suspected", bound, apply)


def split_limit(
    members: Watched, limit: RateLimit, *, expected_pods: int = 1, most: float = SHARE
) -> Action:
    """Limit this process to its share of `limit`: one part for each live member.

    For pods that have no store to share the limit in. Members count until they are confirmed or
    have left, and this process counts as one. At most the share `most` of the known members is
    taken for dead, and there are never fewer than `expected_pods` parts. So even if a partition
    lets each side believe that it is alone, all pods together admit at most `1 / (1 - most)` times
    the limit, as long as each of them knows all others. After `close()`, no member is taken for
    dead.
    """
    _check_members("split_limit", members)
    if not isinstance(limit, RateLimit):
        raise TypeError(f"split_limit(members, {limit!r}): pass a RateLimit")
    check.count("expected_pods", expected_pods)
    bound = ActionBound(most)
    others_only = members.snapshot()["kind"] != "cluster"
    known = 1

    def apply(views: list[MemberView] | None) -> None:
        nonlocal known
        dead: list[MemberView] = []
        if views is not None:
            there = [view for view in views if view.state is not MemberState.LEFT]
            known = max(1, len(there) + others_only)
            dead = [view for view in there if view.state is MemberState.CONFIRMED]
            dead.sort(key=lambda view: view.since)
        gone = bound.choose([view.name for view in dead], known)
        limit.divide(max(expected_pods, known - len(gone)))

    return Action(members, "split_limit", bound, apply)


def hand_over(
    members: Watched, leader: Leader, *, missing: float = 0.5, every: float = 60.0
) -> Action:
    """Let another process lead as soon as this one seems to be cut off or too slow.

    That is when more than the share `missing` of at least two other members is suspected or
    confirmed, or when its own health score in the cluster is bad. Then it steps down: once until it
    is well again, and at most once in `every` seconds. It competes again after a while, in case no
    other process can lead. Only the lease decides which process leads; this action just hands it
    over sooner.
    """
    _check_members("hand_over", members)
    if isinstance(leader, type) or not callable(getattr(leader, "step_down", None)):
        raise TypeError(f"hand_over(members, {leader!r}): pass a Leader")
    check.ratio("missing", missing)
    pace = _Pace(check.seconds("every", every))
    counts_itself = members.snapshot()["kind"] == "cluster"

    def apply(views: list[MemberView] | None) -> None:
        if views is None:
            return  # there is nothing to undo
        there = [view for view in views if view.state is not MemberState.LEFT]
        gone = sum(view.state in _MISSED for view in there)
        others = len(there) - counts_itself
        is_cut_off = others > 1 and gone > missing * others
        is_unwell = is_cut_off or (members.snapshot()["health_score"] or 0) >= UNWELL
        if pace.began(is_unwell=is_unwell) and leader.is_leader and pace.allows():
            leader.step_down()

    return Action(members, "hand_over", pace, apply)


class _Pace:
    """Bound on step-downs: once in each bad period, and once in `every` seconds."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._clock = current_clock()
        self._is_unwell = False
        self._next_at = -inf
        self._times = self._times_held_back = 0
        self.held_back: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self._times} times, {self.text}"

    @property
    def text(self) -> str:
        return f"every={self._every:g}"

    def snapshot(self) -> dict[str, object]:
        return {
            "every": self._every,
            "times": self._times,
            "times_held_back": self._times_held_back,
        }

    def began(self, *, is_unwell: bool) -> bool:
        """Record the state; return whether a bad period starts now."""
        was_unwell, self._is_unwell = self._is_unwell, is_unwell
        self.held_back = ()
        return is_unwell and not was_unwell

    def allows(self) -> bool:
        """Return whether to step down now, and count it."""
        now = self._clock.now()
        if now < self._next_at:
            self.held_back = ("the leader",)
            self._times_held_back += 1
            return False
        self._times += 1
        self._next_at = now + self._every
        return True


class MembersPresent:
    """A health check: degraded while too many members are suspected or confirmed.

    It is never unhealthy. A pod that cannot reach the others may be the one that is cut off, but if
    all pods took themselves out of service for that, none would be left.
    """

    measurement: ClassVar[str] = "missing"

    def __init__(self, members: Watched, *, degraded: float = SHARE) -> None:
        """Set the share of missing members from which the check is degraded."""
        _check_members("MembersPresent", members)
        self._members = members
        self._degraded = check.ratio("degraded", degraded)

    def __repr__(self) -> str:
        return f"MembersPresent({self._members.name!r}, degraded={self._degraded:g})"

    async def __call__(self) -> CheckFinding:
        """Count the missing members; async, so that it runs in the loop, as it does not block."""
        views = self._members.members.values()
        known = [view for view in views if view.state is not MemberState.LEFT]
        missing = sum(view.state in _MISSED for view in known)
        if missing and missing >= self._degraded * len(known):
            text = f"{missing} of {len(known)} members are suspected or confirmed as failed"
            return Degraded(text, value=missing)
        return Healthy(value=missing)


def _host(view: MemberView, hosts: list[str], host_of: Callable[[MemberView], str] | None) -> str:
    """Return the host of a member; its name if it matches none of `hosts`."""
    if host_of is not None:
        return host_of(view)
    texts = (view.name, view.address, view.metadata.decode("utf-8", "replace"))
    return next((text for text in texts if text in hosts), view.name)


def _check_members(what: str, members: object) -> None:
    if isinstance(members, type) or not callable(getattr(members, "subscribe", None)):
        raise TypeError(f"{what}({members!r}): pass a Heartbeats or a Cluster first")
