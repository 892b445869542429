"""The events of failure detection: changes of members, and pauses of this process itself.

They are published and subscribed to like all others, see `seawall.runtime.events`.
"""

from __future__ import annotations

from seawall.runtime.events import Event


class MemberChanged(Event):
    """A member of a group went from one state to another; `guard` is the group's name.

    The states are unknown, alive, suspected, confirmed and left. From suspected to alive the
    suspicion was wrong, and is cleared.
    """

    __slots__ = ("after", "before", "by", "duration", "level", "member", "reason")
    name = "member_changed"
    is_change = True

    def __init__(
        self,
        guard: str,
        *,
        member: str,
        before: str,
        after: str,
        reason: str,
        level: float,
        duration: float,
        by: str = "",
    ) -> None:
        """Describe the change of `member`.

        `level` is how strongly it was suspected when it changed, as its detector measures that: for
        a change to alive or left, just before it. `duration` is how many seconds the state before
        lasted. `by` is the member that reported the change, empty for this process itself.
        """
        super().__init__(guard)
        self.member = member
        self.before = before
        self.after = after
        self.reason = reason
        self.level = level
        self.duration = duration
        self.by = by


class OwnPause(Event):
    """The process itself was paused for a while, and suspects no member because of it.

    `guard` is the group's name.
    """

    __slots__ = ("seconds",)
    name = "own_pause"
    is_change = True

    def __init__(self, guard: str, *, seconds: float) -> None:
        """Hold the length of the pause."""
        super().__init__(guard)
        self.seconds = seconds
