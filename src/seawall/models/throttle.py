"""Adaptive client-side throttling: do not send what the server will most likely refuse.

If the server accepted `accepts` of the recent `requests`, the next one is rejected here, unsent,
with probability `max(0, (requests - k * accepts) / (requests + 1))`. A request rejected here counts
as a request that was not accepted. So in the long run about `k` times as much is sent as gets
accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from seawall.models.windows import TimeWindow, WindowBucket

Ticket = WindowBucket  # in which a request was counted; its end counts there too


def reject_share(requests: int, accepts: int, k: float) -> float:
    """Return the probability with which to reject the next request."""
    return max(0.0, (requests - k * accepts) / (requests + 1))


class ThrottleCounts(NamedTuple):
    """Contents of the window."""

    requests: int
    accepts: int


class ThrottleModel(TimeWindow):
    """The requests of the last `window`, in ten buckets, and how many of them were refused.

    A request counts as accepted until it is known not to be: a slow server is not a refusing one.
    While `calm`, accepts keep up with requests: until the current bucket ends nothing is rejected,
    and a caller may count itself there directly. (With `k` of 1 or more, further accepts cannot
    change that; everything else ends the calm.) Apart from that, callers must serialise writes.
    """

    __slots__ = ("_k", "_sent_at", "_sent_before", "calm", "probe_every")

    def __init__(self, window: float, k: float, probe_every: float | None) -> None:
        """Start empty. `k` is the smallest that callers use; one in `probe_every` is admitted."""
        super().__init__(window)
        self._k = k
        self.calm = True
        self.probe_every = probe_every
        self._sent_at = self._sent_before = float("-inf")

    def recent(self, now: float) -> ThrottleCounts:
        """Return the contents of the window at `now`."""
        requests, refused, _ = self.totals(now)
        accepts = requests - refused
        self.calm = requests <= self._k * accepts
        return ThrottleCounts(requests, accepts)

    def may_reject(self, now: float) -> bool:
        """Return whether a request may be rejected; not if none was sent for `probe_every`."""
        return self.probe_every is None or 0 <= now - self._sent_at < self.probe_every

    def count(self, now: float, *, sent: bool = True) -> Ticket:
        """Count a request. Return its ticket for `refused` or `give_back`."""
        if sent:
            self._sent_before, self._sent_at = self._sent_at, now
        if now >= self.bucket.end:
            self._turn(now)
        bucket = self.bucket
        bucket.calls += 1
        return bucket

    def refused(self, ticket: Ticket) -> None:
        """Record that the server refused that request, or that it was rejected here."""
        ticket.failures += 1
        self.calm = False

    def give_back(self, ticket: Ticket) -> None:
        """Uncount a request: it is unknown what the server would have answered.

        It is not a probe either: if none was sent recently, the next one is.
        """
        ticket.calls -= 1
        self._sent_at = self._sent_before
        self.calm = False

    def update(self, window: float | None, k: float, probe_every: float | None) -> None:
        """Change the settings. A different window starts empty."""
        if window is not None:
            super().__init__(window)
        self._k = k
        self.probe_every = probe_every
        self.calm = False
