"""A share of the slots for each class of calls, so that one class cannot take them all.

A class may always use what is reserved for it, and beyond that what is reserved for nobody. What
is reserved and idle stays free: it could not be had back at once. So, as long as the limit has not
just been lowered, two things hold at any time:

    in flight, all classes together <= limit
    a class that has less in flight than is reserved for it is admitted at once

And no class is shut out: with nothing in flight, each that has a share is admitted.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import floor
from typing import Final

from seawall import _checks as check

OTHERS: Final = "(others)"
"""The class of calls that belong to none: nothing is reserved for them."""

ROUNDING: Final = 1e-9
"""Shares such as 0.1 are not exact, nor is their sum."""


class Partitions:
    """Who has how many slots of `limit`. Locking is the caller's."""

    __slots__ = ("_spoken_for", "in_flight", "limit", "reserved", "shares", "total")

    def __init__(self, shares: Mapping[str, float], limit: int) -> None:
        """Reserve for each class its share of `limit`."""
        self.shares = check_shares(shares)
        self.in_flight: dict[str, int] = dict.fromkeys((*self.shares, OTHERS), 0)
        self.total = 0
        """How many slots are out."""
        self.resize(limit)

    def resize(self, limit: int) -> None:
        """Reserve shares of `limit` from now on. Who has more keeps it until it comes back."""
        self.limit = limit
        self.reserved = reserve(self.shares, limit)
        # What is reserved, and what is out beyond that: no more than the limit, for long.
        self._spoken_for = sum(
            max(number, self.reserved[name]) for name, number in self.in_flight.items()
        )

    def name(self, wanted: Hashable) -> str:
        """Return the class called `wanted`: that of all others if there is none of this name."""
        return wanted if isinstance(wanted, str) and wanted in self.shares else OTHERS

    def admits(self, name: str) -> bool:
        """Tell whether a call of that class may have a slot now."""
        if self.in_flight[name] < self.reserved[name]:
            return self.total < self.limit
        return self._spoken_for < self.limit

    def take(self, name: str) -> None:
        """Note that a call of that class has a slot."""
        number = self.in_flight[name]
        self.in_flight[name] = number + 1
        self.total += 1
        if number >= self.reserved[name]:
            self._spoken_for += 1

    def give_back(self, name: str) -> None:
        """Note that it has it no more."""
        number = self.in_flight[name]
        if not number:
            return  # a call that a fork took along
        self.in_flight[name] = number - 1
        self.total -= 1
        if number > self.reserved[name]:
            self._spoken_for -= 1

    def forget_in_flight(self) -> None:
        """Count nothing as in flight any more: those who would have given it back are gone."""
        self.in_flight = dict.fromkeys(self.in_flight, 0)
        self.total = 0
        self.resize(self.limit)


def reserve(shares: Mapping[str, float], limit: int) -> dict[str, int]:
    """Return how many slots of `limit` each class has for itself: in all, never more than that.

    At least one each, and one for all if the shares leave something; if they do not, all of it:
    what rounding leaves goes to who lost most by it. While the limit is too low for one each,
    nothing is reserved: some class would be shut out.
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
    """Return shares of one, by name, or raise."""
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
