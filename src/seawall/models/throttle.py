"""Adaptive throttling at the client: do not send what the server will most likely refuse.

Of `requests` made lately `accepts` were accepted; the next one is rejected here, unsent, with
probability `max(0, (requests - k * accepts) / (requests + 1))`. What is rejected here is a request
too, and was not accepted. So in the long run about `k` times as much is sent as gets accepted.
"""

from __future__ import annotations

from typing import NamedTuple

from seawall.models.windows import Bucket, TimeWindow

Ticket = Bucket
"""Where a request was counted, and so where its end counts: both leave the window together."""


def reject_share(requests: int, accepts: int, k: float) -> float:
    """Return the probability with which the next request is to be rejected."""
    return max(0.0, (requests - k * accepts) / (requests + 1))


class Recent(NamedTuple):
    """What the window holds."""

    requests: int
    accepts: int


class ThrottleModel(TimeWindow):
    """The requests of the last `window`, in ten buckets, and how many of them were refused.

    A request counts as accepted until it is known not to be: a slow server is no refusing one.
    While `calm`, accepts keep up with requests: until the running bucket ends nothing is rejected,
    and a caller may count itself there. (With `k` of 1 or more, what is accepted on top cannot
    change that; all else ends the calm.) One writer at a time, apart from that.
    """

    __slots__ = ("_k", "_sent_at", "_sent_before", "calm", "probe_every")

    def __init__(self, window: float, k: float, probe_every: float | None) -> None:
        """Begin with an empty window; `k` is the least that is asked with.

        One request goes through in any `probe_every`, if that is not None.
        """
        super().__init__(window)
        self._k = k
        self.calm = True
        self.probe_every = probe_every
        self._sent_at = self._sent_before = float("-inf")

    def recent(self, now: float) -> Recent:
        """Return what the window holds at `now`."""
        requests, refused, _ = self.totals(now)
        accepts = requests - refused
        self.calm = requests <= self._k * accepts
        return Recent(requests, accepts)

    def may_reject(self, now: float) -> bool:
        """Tell whether a request may be rejected; not so if none was sent for `probe_every`."""
        return self.probe_every is None or 0 <= now - self._sent_at < self.probe_every

    def count(self, now: float, *, sent: bool = True) -> Ticket:
        """Count a request; the answer is for `refused` or `give_back`, should it come to that."""
        if sent:
            self._sent_before, self._sent_at = self._sent_at, now
        if now >= self.bucket.end:
            self._turn(now)
        bucket = self.bucket
        bucket.calls += 1
        return bucket

    def refused(self, ticket: Ticket) -> None:
        """Note that the server refused that request, or that it was rejected here."""
        ticket.failures += 1
        self.calm = False

    def give_back(self, ticket: Ticket) -> None:
        """Forget that request: nobody knows what the server would have said.

        Nor is it the one that went through: should none have been sent lately, the next one is.
        """
        ticket.calls -= 1
        self._sent_at = self._sent_before
        self.calm = False

    def update(self, window: float | None, k: float, probe_every: float | None) -> None:
        """Go on by other settings; with another window, begin anew."""
        if window is not None:
            super().__init__(window)
        self._k = k
        self.probe_every = probe_every
        self.calm = False
