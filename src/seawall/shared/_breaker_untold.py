"""What a pod has yet to tell the store of one breaker; it is told until the store has heard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from seawall.models.breaker.report import Entry

LOST: Final = "lost"
"""How a probe ended that was asked for, and about which no answer came."""

MOST_SETTLED: Final = 1000
"""So many results of probes are kept for a store that does not take them; it has moved on then."""

MOST_LOST: Final = 256
"""Beside so many, no lost probe is kept: whatever was sent first was lost first."""


class Order(NamedTuple):
    """What was done by hand; the id says whether it is the same that the store has heard of."""

    command: str
    id: str


class Sent(NamedTuple):
    """What was told with one message."""

    entries: Sequence[Entry] = ()
    settled: Sequence[str] = ()
    order: Order | None = None
    news: bool = False


class Untold:
    """Results of probes, an order, a wish to trip, a vote: whatever is told besides counts."""

    __slots__ = ("_settled", "_voted_at", "news", "order", "trip", "vote")

    def __init__(self) -> None:
        """Have nothing to tell."""
        self.order: Order | None = None
        self.trip = False
        self.vote = False
        self.news = False
        """Whether the store should hear of the vote, or again."""
        self._voted_at = float("-inf")
        self._settled: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._settled or self.order or self.trip or self.news)

    def settle(self, id_: str, verdict: str) -> None:
        """Tell how a probe ended; the first word holds."""
        if len(self._settled) < (MOST_LOST if verdict == LOST else MOST_SETTLED):
            self._settled.setdefault(id_, verdict)

    def cast(self, bad: bool, now: float, renew_after: float) -> bool:  # noqa: FBT001 - a vote
        """Vote, withdraw the vote, or renew it after a while; True if it is another now."""
        changed = bad is not self.vote
        self.vote = bad
        if changed or (bad and not 0 <= now - self._voted_at < renew_after):
            self.news = True
        return changed

    def withdraw(self) -> bool:
        """Want nothing to trip any more; False if nothing was wanted."""
        wanted = self.trip or self.vote
        self.news = self.news or self.vote  # the store may have heard of it
        self.trip = self.vote = False
        return wanted

    def drop(self) -> None:
        """Forget what was about a state that is over; results and orders are still told."""
        self.trip = self.vote = self.news = False

    def pack(self, message: dict[str, Any], entries: Sequence[Entry], now: float) -> Sent:
        """Put all of it into a message; `heard` or `unheard` says what became of that."""
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
        """Note that the store has heard it; True if it now has heard the order that stands."""
        for id_ in sent.settled:
            self._settled.pop(id_, None)
        obeyed = sent.order is not None and sent.order == self.order
        if obeyed:
            self.order = None
        return obeyed

    def unheard(self, sent: Sent) -> None:
        """Note that there was no answer: what may be told twice is told again."""
        self.news = self.news or sent.news
