"""What to do about members that are suspected, confirmed or gone: ready-made, one line each.

A detector only says how members are. An action follows a group and does something about it:
`eject_suspected` sends a host no requests, `split_limit` divides a rate limit among the live
pods, and `MembersPresent` is a health check.

Promises:
- At most a share of the members is acted on at once, and never all: a detector that is wrong about
  everybody must not take everybody out. What the bound holds back is counted, and logged once.
- What was done is undone when a member is cleared or forgotten, and when the action is closed.
- The state of the group counts, not the order of its messages: an action that missed a change is
  right again with the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self

from seawall import _checks as check
from seawall.clients.upstreams import Upstreams
from seawall.members.group import MemberView
from seawall.models.detection.gossip import MemberState
from seawall.models.outliers import ActionBound
from seawall.policies.rate_limit import RateLimit
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.web.health import Degraded, Finding, Healthy

if TYPE_CHECKING:
    from seawall.runtime.member_events import MemberChanged

__all__ = ["Action", "MembersPresent", "eject_suspected", "split_limit"]

SHARE: Final = 1 / 3
"""The share of a group that is acted on at most, unless another one is given."""

_WORST_FIRST: Final = (MemberState.CONFIRMED, MemberState.LEFT, MemberState.SUSPECTED)


class Watched(Protocol):
    """A group that is watched: `Heartbeats` and `Cluster` are."""

    @property
    def name(self) -> str:
        """The name of the group."""

    @property
    def members(self) -> Mapping[str, MemberView]:
        """What is known of each member."""

    def subscribe(self, subscriber: Callable[[MemberChanged], object], /) -> Callable[[], None]:
        """Call `subscriber` for each change; return a function that ends that."""

    def snapshot(self) -> dict[str, Any]:
        """Return plain data; its "kind" says whether this process is a member: "cluster"."""


Apply = Callable[[list[MemberView] | None], None]


class Action:
    """Something that is done about the members of a group, until `close()`."""

    def __init__(self, members: Watched, kind: str, bound: ActionBound, apply: Apply) -> None:
        """Call `apply(views)` now and at each change, and `apply(None)` to undo it all."""
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
        """Return whom it acts on now, and whom the bound holds back."""
        return {"action": self._kind, "group": self._group, **self._bound.snapshot()}

    def close(self) -> None:
        """Follow the group no more, and undo what was done; again does nothing."""
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
        """Act on the group as it is now: changes of several threads may come in any order."""
        with self._mutex:
            if self._is_closed:
                return
            self._apply(list(self._members.members.values()))
            held = self._bound.held_back
            if not held or self._has_logged:
                return
            self._has_logged = True
        logging.getLogger("seawall").warning(
            "%s of the group %r: %d more would be acted on, but most=%.3g allows no more. Either"
            " much has failed at once, or this process or its network has. This is logged once;"
            " the snapshot counts further times",
            self._kind,
            self._group,
            len(held),
            self._bound.most,
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

    At most the share `most` of the hosts, rounded down, and together with other ejections at most
    the `max_ejected` of the set. They return when the member is alive again or forgotten.
    `host(member)` returns the host of a member, as `upstreams` has it. Without it, that is the
    member's name, address or metadata, whichever is one of the hosts.
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
    """Keep to this process's part of `limit`: one of as many as there are live members.

    For pods that have no store to share the limit in. Members count until they are confirmed or
    have left, and this process counts as one. At most the share `most` of the known members is
    taken for dead, and there are never fewer than `expected_pods`. So even if a partition lets
    each side believe that it is alone, all pods together admit at most `1 / (1 - most)` times the
    limit, as long as each of them knows of all others. Closed, nobody is taken for dead.
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


class MembersPresent:
    """A health check: degraded while too many members are suspected or confirmed.

    It is never unhealthy. A pod that cannot reach the others may be the one that is cut off, but
    if all pods took themselves out of service for that, nobody would be left.
    """

    measurement: ClassVar[str] = "missing"

    def __init__(self, members: Watched, *, degraded: float = SHARE) -> None:
        """Be degraded from this share of the members on."""
        _check_members("MembersPresent", members)
        self._members = members
        self._degraded = check.ratio("degraded", degraded)

    def __repr__(self) -> str:
        return f"MembersPresent({self._members.name!r}, degraded={self._degraded:g})"

    async def __call__(self) -> Finding:
        """Look; in the loop, for it takes no time."""
        views = self._members.members.values()
        known = [view for view in views if view.state is not MemberState.LEFT]
        ill = (MemberState.SUSPECTED, MemberState.CONFIRMED)
        missing = sum(view.state in ill for view in known)
        if missing and missing >= self._degraded * len(known):
            text = f"{missing} of {len(known)} members are suspected or confirmed as failed"
            return Degraded(text, value=missing)
        return Healthy(value=missing)


def _host(view: MemberView, hosts: list[str], host_of: Callable[[MemberView], str] | None) -> str:
    """Return the host of a member; its name if none of `hosts` is."""
    if host_of is not None:
        return host_of(view)
    texts = (view.name, view.address, view.metadata.decode("utf-8", "replace"))
    return next((text for text in texts if text in hosts), view.name)


def _check_members(what: str, members: object) -> None:
    if isinstance(members, type) or not callable(getattr(members, "subscribe", None)):
        raise TypeError(f"{what}({members!r}): pass a Heartbeats or a Cluster first")
