"""Pending reports of a pod about one breaker; they are repeated until the store confirms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from seawall.models.breaker.report import Entry

LOST: Final = "lost"
"""The result of a probe that was requested but got no answer."""

MOST_SETTLED: Final = 1000
"""Maximum pending probe results for a store that does not take them; it has moved on by then."""

MOST_LOST: Final = 256
"""With this many pending results, no lost probe is added: the earliest were lost first."""


class Order(NamedTuple):
    """A manual command; the id identifies it in the store."""

    command: str
    id: str


class Sent(NamedTuple):
    """What was sent with one message."""

    entries: Sequence[Entry] = ()
    settled: Sequence[str] = ()
    order: Order | None = None
    news: bool = False


class Untold:
    """Probe results, a manual command, a wish to trip, a vote: every report other than counts."""

    __slots__ = ("_settled", "_voted_at", "news", "order", "trip", "vote")

    def __init__(self) -> None:
        """Start empty."""
        self.order: Order | None = None
        self.trip = False
        self.vote = False
        self.news = False
        """Whether the vote must be sent, or sent again."""
        self._voted_at = float("-inf")
        self._settled: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._settled or self.order or self.trip or self.news)

    def settle(self, id_: str, verdict: str) -> None:
        """Record how a probe ended; the first result wins."""
        if len(self._settled) < (MOST_LOST if verdict == LOST else MOST_SETTLED):
            self._settled.setdefault(id_, verdict)

    def cast(self, bad: bool, now: float, renew_after: float) -> bool:  # noqa: FBT001 - a vote
        """Vote, withdraw the vote, or renew it after a while; return whether it changed."""
        changed = bad is not self.vote
        self.vote = bad
        if changed or (bad and not 0 <= now - self._voted_at < renew_after):
            self.news = True
        return changed

    def withdraw(self) -> bool:
        """Withdraw wishes to trip; return whether there were any."""
        wanted = self.trip or self.vote
        self.news = self.news or self.vote  # the store may have heard of it
        self.trip = self.vote = False
        return wanted

    def drop(self) -> None:
        """Forget reports about a state that is over; probe results and commands are kept."""
        self.trip = self.vote = self.news = False

    def pack(self, message: dict[str, Any], entries: Sequence[Entry], now: float) -> Sent:
        """Add all pending reports to a message; call `heard` or `unheard` with the result."""
        message["settled"] = list(self._settled.items())
        message["trip"] = self.trip
        if self.order is not None:
            message["command"], message["order"] = self.order
        news, self.news = self.news, False
        if news:
            message["vote"] = self.vote
            self._voted_at = now
        return Sent(entries, tuple(self._settled), self.order, news)

    def heard(self, sent: Sent) -> bool:
        """Record that the store confirmed; return whether that includes the pending command."""
        for id_ in sent.settled:
            self._settled.pop(id_, None)
        obeyed = sent.order is not None and sent.order == self.order
        if obeyed:
            self.order = None
        return obeyed

    def unheard(self, sent: Sent) -> None:
        """Record that there was no answer: idempotent parts are sent again."""
        self.news = self.news or sent.news
