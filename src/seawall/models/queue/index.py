"""Ids ordered by a number, like a sorted set of the store, and tokens of claims."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, nlargest, nsmallest
from math import inf
from typing import Final

SLACK: Final = 64  # number of stale entries that may stay in the heap before it is rebuilt


class Index:
    """Ids, each with a number. Ids with the same number are ordered by their text."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def set(self, id_: str, number: int) -> None:
        """Set the number of `id_`, replacing any earlier one."""
        self._numbers[id_] = number
        heappush(self._heap, (number, id_))
        if len(self._heap) > 2 * len(self._numbers) + SLACK:
            self._heap = [(number, id_) for id_, number in self._numbers.items()]
            heapify(self._heap)

    def discard(self, id_: str) -> None:
        """Remove `id_` if present. Its entry stays in the heap until it reaches the top."""
        self._numbers.pop(id_, None)

    def first(self) -> tuple[int, str] | None:
        """Return the smallest number and its id, or None."""
        heap = self._heap
        while heap and self._numbers.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None

    def take(self, most: int, last: float = inf) -> list[str]:
        """Remove and return the first ids, at most `most`, whose numbers are not above `last`."""
        taken: list[str] = []
        while len(taken) < most and (first := self.first()) is not None and first[0] <= last:
            del self._numbers[first[1]]
            taken.append(first[1])
        return taken

    def behind(
        self, number: int, id_: str, most: int, *, back: bool = False
    ) -> list[tuple[int, str]]:
        """Return the next numbers and ids behind a place, or before it; all if `id_` is empty."""
        place = (number, id_)
        found = ((at, one) for one, at in self._numbers.items())
        if back:
            return nlargest(most, (one for one in found if not id_ or one < place))
        return nsmallest(most, (one for one in found if not id_ or one > place))


class Tokens:
    """Claims by token, each as id and fence, until they expire."""

    def __init__(self) -> None:
        self._claims: dict[str, list[tuple[str, int]]] = {}
        self._ends = Index()

    def __contains__(self, token: str) -> bool:
        return token in self._claims

    def __len__(self) -> int:
        return len(self._claims)

    def claims(self, token: str) -> list[tuple[str, int]]:
        """Return the claims made with `token`."""
        return self._claims.get(token, [])

    def put(self, token: str, claims: list[tuple[str, int]], until: int) -> None:
        """Store the claims of `token` until `until`."""
        self._claims[token] = claims
        self._ends.set(token, until)

    def discard(self, token: str) -> None:
        """Remove `token` if present."""
        self._claims.pop(token, None)
        self._ends.discard(token)

    def sweep(self, most: int, now: int) -> None:
        """Remove expired tokens, at most `most`."""
        for token in self._ends.take(most, now):
            del self._claims[token]
