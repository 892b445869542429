"""What the vendor's log shows. Nothing here knows how a policy works.

A policy decided on a request after the pod asked its guard and before the request arrived. When in
between, nobody outside can tell; so a request counts as decided in a stretch of time only if
it was both asked for and had arrived in it. A delay between decision and arrival, however long, is
then never taken for a request too many; and the stretches are as long as they are said to be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """One request that reached the vendor. Times are monotonic seconds."""

    arrived: float
    answered: float
    asked: float
    pod: str
    ok: bool


def most_within(entries: Iterable[Entry], seconds: float) -> int:
    """Return the most requests that were decided within any stretch of so many seconds.

    A fullest stretch can be moved until it begins when one of its requests was asked for. So look
    from the latest beginning to the earliest, at the arrivals of what was asked for since.
    """
    most = 0
    arrivals: list[float] = []
    for entry in sorted(entries, key=lambda entry: entry.asked, reverse=True):
        insort(arrivals, entry.arrived)
        most = max(most, bisect_left(arrivals, entry.asked + seconds))
    return most


def most_arrived_within(entries: Iterable[Entry], seconds: float) -> int:
    """Return the most requests that arrived within any stretch, whenever they were decided."""
    return most_within((entry._replace(asked=entry.arrived) for entry in entries), seconds)


def arrived(entries: Iterable[Entry], begin: float, end: float) -> int:
    """Return how many requests arrived from `begin` to `end`."""
    return sum(begin <= entry.arrived < end for entry in entries)


def enough(entries: Iterable[Entry], ratio: float, least: int) -> float:
    """Return when the vendor had given so many answers, and that share of them was bad."""
    bad = 0
    for count, entry in enumerate(sorted(entries, key=lambda entry: entry.answered), 1):
        bad += not entry.ok
        if count >= least and bad >= ratio * count:
            return entry.answered
    raise AssertionError("the vendor has not given enough bad answers")


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 100) // 100) - 1)]
