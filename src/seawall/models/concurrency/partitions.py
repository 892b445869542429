"""Slots reserved for classes of calls, so that one class cannot take them all.

A class may always use the slots reserved for it, and beyond that the unreserved ones. Reserved idle
slots are not lent: they could not be recovered immediately. So, unless the limit has just been
lowered, two invariants hold at any time:

    in flight, all classes together <= limit
    a class with fewer calls in flight than its reservation is admitted immediately

No class is shut out: with nothing in flight, every class with a share is admitted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import floor
from typing import Final

from seawall import _checks as check

OTHERS: Final = "(others)"  # the class of all other calls. Nothing is reserved for them
ROUNDING: Final = 1e-9  # tolerance: shares such as 0.1 are not exact, nor is their sum


class Partitions:
    """Slots of `limit` by class. The caller is responsible for locking."""

    def __init__(self, shares: Mapping[str, float], limit: int) -> None:
        self.shares = check_shares(shares)
        self.in_flight: dict[str, int] = dict.fromkeys((*self.shares, OTHERS), 0)
        self.total = 0  # number of slots in use
        self.resize(limit)

    def resize(self, limit: int) -> None:
        """Reserve shares of a new `limit`. A class that uses more keeps it until its calls end."""
        self.limit = limit
        self.reserved = reserve(self.shares, limit)
        # Reserved slots plus those in use beyond a reservation; soon at most the limit.
        self._spoken_for = sum(
            max(number, self.reserved[name]) for name, number in self.in_flight.items()
        )

    def name(self, wanted: Hashable) -> str:
        """Return the class named `wanted`, or `OTHERS` if there is none."""
        return wanted if isinstance(wanted, str) and wanted in self.shares else OTHERS

    def admits(self, name: str) -> bool:
        """Return whether a call of the class may take a slot now."""
        if self.in_flight[name] < self.reserved[name]:
            return self.total < self.limit
        return self._spoken_for < self.limit

    def take(self, name: str) -> None:
        """Record that a call of the class has taken a slot."""
        number = self.in_flight[name]
        self.in_flight[name] = number + 1
        self.total += 1
        if number >= self.reserved[name]:
            self._spoken_for += 1

    def give_back(self, name: str) -> None:
        """Record that a call of the class has returned its slot."""
        number = self.in_flight[name]
        if not number:
            return  # the call began before a fork
        self.in_flight[name] = number - 1
        self.total -= 1
        if number > self.reserved[name]:
            self._spoken_for -= 1

    def forget_in_flight(self) -> None:
        """Reset to nothing in flight: the calls that would have returned their slots are gone."""
        self.in_flight = dict.fromkeys(self.in_flight, 0)
        self.total = 0
        self.resize(self.limit)


def reserve(shares: Mapping[str, float], limit: int) -> dict[str, int]:
    """Return how many slots of `limit` are reserved for each class, in total at most `limit`.

    Each class gets at least one. If the shares sum to less than 1, at least one slot stays
    unreserved; otherwise all slots are reserved, and those left over by rounding go to the classes
    that lost most by it. If the limit is too low for one slot each, nothing is reserved: otherwise
    some class would be shut out.
    """
    for_all = int(sum(shares.values()) < 1 - ROUNDING)
    if limit < len(shares) + for_all:
        return dict.fromkeys((*shares, OTHERS), 0)
    reserved = {name: max(1, floor(share * limit)) for name, share in shares.items()}
    while sum(reserved.values()) > limit - for_all:
        richest = max(reserved, key=lambda name: reserved[name])
        reserved[richest] -= 1
    if not for_all:
        lost = {name: share * limit - reserved[name] for name, share in shares.items()}
        left = limit - sum(reserved.values())
        for name in sorted(lost, key=lambda name: -lost[name])[:left]:
            reserved[name] += 1
    reserved[OTHERS] = 0
    return reserved


def check_shares(shares: Mapping[str, float]) -> dict[str, float]:
    """Return a validated copy of the shares by name, or raise."""
    if not isinstance(shares, Mapping) or not shares:
        raise TypeError(
            f"partitions={shares!r}: write the share of each class, such as"
            ' {"live": 0.7, "batch": 0.2}'
        )
    for name, share in shares.items():
        if not isinstance(name, str) or not name or name == OTHERS:
            raise TypeError(f"partitions: {name!r} is no name of a class; write a string")
        check.ratio(f"partitions[{name!r}]", share)
    if sum(shares.values()) > 1 + ROUNDING:
        raise ValueError(f"partitions={dict(shares)!r}: write shares that make up at most 1")
    return dict(shares)
