"""State of one peer: from unknown to alive, suspected, confirmed or left, and back.

Promises:
- A change always leads to a different state; from suspected to alive, confirmed or left.
- A probed peer is suspected only if it was asked since it was last heard.
- The time until a peer is first heard is not learned as an interval of its heartbeats.
"""

from __future__ import annotations

from typing import NamedTuple

from seawall.models.detection.detectors import Detector, DetectorSettings
from seawall.models.detection.gossip import MemberState

UNKNOWN, ALIVE, SUSPECTED, CONFIRMED, LEFT = MemberState


class PeerChange(NamedTuple):
    """A transition of one peer, to be published."""

    member: str
    before: MemberState
    after: MemberState
    reason: str
    level: float
    duration: float
    silence: float


class Peer:
    """State of one peer. Methods take the time and return the change they made, if any."""

    def __init__(self, name: str, settings: DetectorSettings, now: float) -> None:
        self.name = name
        self.settings = settings
        self.state = UNKNOWN
        self.since = now
        self.heartbeat_at = now  # when it was last heard, or if never, when watching began
        self.reason = "watched"
        self.is_probed = False  # whether it answers probes, and sends no heartbeats by itself
        self.probe_sent_at: float | None = None  # when the first probe since then was sent
        self.failure = ""  # why the last probe failed, if it did
        self.confirm_from = now
        self.detector: Detector
        self.begin(now)

    def begin(self, now: float) -> None:
        """Measure silence from now on, as if it had just been heard: before, it could not be."""
        self.detector = self.settings.start()
        self.detector.heartbeat(now)
        self.heartbeat_at = self.confirm_from = now
        self.probe_sent_at = None

    def sent(self, now: float) -> None:
        """Record that a probe was sent."""
        self.detector.sent(now)
        if self.probe_sent_at is None:
            self.probe_sent_at = now

    def heartbeat(self, now: float) -> PeerChange | None:
        """Record a sign of life."""
        level, silence = self.detector.level(now), now - self.heartbeat_at
        if self.state is UNKNOWN:
            # The time since watching began is not an interval between heartbeats: do not learn it.
            self.detector = self.settings.start()
            if self.probe_sent_at is not None:
                self.detector.sent(self.probe_sent_at)
        self.detector.heartbeat(now)
        self.heartbeat_at = max(now, self.heartbeat_at)
        self.probe_sent_at = None
        self.failure = ""
        if self.state is ALIVE:
            return None
        reason = "heard for the first time" if self.state is UNKNOWN else "heard again"
        return self._change(ALIVE, reason, level, now, silence)

    def evaluate(self, now: float, confirm_after: float) -> PeerChange | None:
        """Evaluate its silence."""
        level, silence = self.detector.level(now), now - self.heartbeat_at
        if self.state is SUSPECTED:
            if now - self.confirm_from < confirm_after:
                return None
            reason = f"suspected for {confirm_after:g} s"
            return self._change(CONFIRMED, self._with_failure(reason), level, now, silence)
        if self.state not in (UNKNOWN, ALIVE) or level < self.detector.threshold:
            return None
        if self.is_probed and self.probe_sent_at is None:
            return None  # no probe was sent, so its silence means nothing
        self.confirm_from = now
        never = "never heard" if self.state is UNKNOWN else "silent"
        reason = self._with_failure(f"{never} for {max(0.0, silence):.3g} s")
        return self._change(SUSPECTED, reason, level, now, silence)

    def leave(self, reason: str, now: float) -> PeerChange | None:
        """Record that it is no longer a member."""
        if self.state is LEFT:
            return None
        level, silence = self.detector.level(now), now - self.heartbeat_at
        return self._change(LEFT, reason, level, now, silence)

    def rejoin(self, now: float) -> PeerChange | None:
        """Watch it again, if it had left."""
        if self.state is not LEFT:
            return None
        change = self._change(UNKNOWN, "watched again", 0.0, now, 0.0)
        self.begin(now)
        return change

    def _with_failure(self, reason: str) -> str:
        return f"{reason}: {self.failure}" if self.failure else reason

    def _change(
        self, after: MemberState, reason: str, level: float, now: float, silence: float
    ) -> PeerChange:
        duration = max(0.0, now - self.since)
        made = PeerChange(self.name, self.state, after, reason, level, duration, max(0.0, silence))
        self.state, self.since, self.reason = after, now, reason
        return made
