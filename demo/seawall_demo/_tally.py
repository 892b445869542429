"""Results of the users' requests: counted as they end, for the last seconds and for each phase.

A request belongs to the phase in which it began. An error is a status from 500 up, no answer in
time, or no connection. Two results are counted separately: an answer with reduced content
(degraded), and a user over his own limit (limited). The latter is quick and does not count towards
the latency of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import ceil
from typing import Any, Final, NamedTuple

GOOD: Final = "good"
DEGRADED: Final = "degraded"
LIMITED: Final = "limited"
ERROR: Final = "error"
OUTCOMES: Final = (GOOD, DEGRADED, LIMITED, ERROR)

_TOO_MANY: Final = 429
_SERVER_ERROR: Final = 500


class RequestResult(NamedTuple):
    """One finished request."""

    at: float
    phase: str | None
    side: str
    premium: bool
    outcome: str
    seconds: float


def outcome_of(status: int, body: bytes) -> str:
    """Return the outcome for an answer."""
    if status == _TOO_MANY:
        return LIMITED
    if status >= _SERVER_ERROR or not 200 <= status < 300:  # noqa: PLR2004 - success in HTTP
        return ERROR
    return DEGRADED if b'"degraded":true' in body else GOOD


def quantile(ordered: list[float], share: float) -> float | None:
    """Return that quantile of sorted values; None if there are none."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


def summary(seen: Iterable[RequestResult]) -> dict[str, Any]:
    """Return counts, shares and quantiles, ready for JSON."""
    counts = dict.fromkeys(OUTCOMES, 0)
    tiers = {True: [0, 0], False: [0, 0]}
    took: list[float] = []
    for one in seen:
        counts[one.outcome] += 1
        served = tiers[one.premium]
        served[1] += 1
        served[0] += one.outcome in (GOOD, DEGRADED)
        if one.outcome != LIMITED:
            took.append(one.seconds)
    took.sort()
    total = sum(counts.values())
    return {
        "requests": total,
        **{outcome: count / total if total else 0.0 for outcome, count in counts.items()},
        "p50": quantile(took, 0.5),
        "p99": quantile(took, 0.99),
        "premium": tiers[True][0] / tiers[True][1] if tiers[True][1] else None,
        "free": tiers[False][0] / tiers[False][1] if tiers[False][1] else None,
    }


class Tally:
    """Keeps finished requests: of the last `window` seconds, and of all named phases."""

    def __init__(self, sides: Iterable[str], *, window: float = 5.0) -> None:
        """Start empty."""
        self.sides = tuple(sides)
        self.window = window
        self._last: deque[RequestResult] = deque()
        self._phases: dict[str, list[RequestResult]] = {}

    def add(self, seen: RequestResult) -> None:
        """Count one request."""
        self._last.append(seen)
        if seen.phase is not None:
            self._phases.setdefault(seen.phase, []).append(seen)

    def recent(self, now: float) -> dict[str, dict[str, Any]]:
        """Return the summary of the last seconds for each side, with requests per second."""
        while self._last and self._last[0].at <= now - self.window:
            self._last.popleft()
        shown = {}
        for side in self.sides:
            side_results = summary(one for one in self._last if one.side == side)
            side_results["rate"] = side_results["requests"] / self.window
            side_results["good_rate"] = side_results["rate"] * side_results[GOOD]
            shown[side] = side_results
        return shown

    def phases(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the summary of these phases together, for each side."""
        chosen = [one for name in names for one in self._phases.get(name, ())]
        return {side: summary(one for one in chosen if one.side == side) for side in self.sides}
