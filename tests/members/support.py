"""A group that tests move by hand, with all that actions see of `Heartbeats` and `Cluster`."""

from __future__ import annotations

from dataclasses import replace

from seawall.members import MemberState, MemberView
from seawall.members.group import Group


class Watchers:
    """A real `Group`, and members whose states are set."""

    def __init__(self, *names: str, kind: str = "heartbeats") -> None:
        self.group = Group("pods")
        self.name = "pods"
        self.subscribe = self.group.subscribe
        self.kind = kind
        self.health_score: int | None = None
        self.views = {name: MemberView(name, MemberState.ALIVE, 0.0) for name in names}
        self.now = 0.0

    @property
    def members(self) -> dict[str, MemberView]:
        return dict(self.views)

    def snapshot(self) -> dict[str, object]:
        return {"kind": self.kind, "health_score": self.health_score}

    def move(self, name: str, after: MemberState, **fields: object) -> None:
        """Let a member have another state, and publish that."""
        self.now += 1.0
        before = self.views.get(name, MemberView(name, MemberState.UNKNOWN, self.now))
        self.views[name] = replace(before, state=after, since=self.now, **fields)
        self.publish(name, before.state, after)

    def forget(self, name: str) -> None:
        """Know nothing of a member any more."""
        before = self.views.pop(name)
        self.publish(name, before.state, MemberState.LEFT)

    def publish(self, name: str, before: MemberState, after: MemberState) -> None:
        self.group.publish(
            member=name, before=before, after=after, reason="by hand", level=1.0, duration=1.0
        )


class Candidate:
    """What a `Leader` shows of itself."""

    is_leader = True
    times = 0

    def step_down(self) -> None:
        self.times += 1
        self.is_leader = False
