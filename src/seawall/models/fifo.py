"""Order of a stream: messages numbered from 1, each delivered once; and checkpoints.

    message                                    result
    the expected number                        delivered, with those that wait behind it
    a later one, within the window             buffered
    a later one, beyond the window             refused: its sender has to send it again
    an earlier one, or one that is buffered    dropped: a duplicate
    one of an older epoch                      dropped: its sender has started again since

A sender that lost count starts a new epoch at 1, and the buffered messages of the previous epoch
are dropped. A gap is the expected number while later ones are buffered; it is as old as the first
of these. The receiver waits for it, or skips it once it is too old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Mapping
from typing import Literal, NamedTuple

Verdict = Literal["delivered", "buffered", "duplicate", "beyond", "stale"]


class Position(NamedTuple):
    """Position of a receiver in the messages of one sender."""

    epoch: int
    expected: int


def judge(
    position: Position, held: Container[int], window: int, epoch: int, sequence: int
) -> tuple[Position, Verdict]:
    """Return the position that applies to a message, and the verdict. `held` are its epoch's."""
    if epoch < position.epoch:
        return position, "stale"
    if epoch > position.epoch:
        position, held = Position(epoch, 1), ()
    if sequence < position.expected or sequence in held:
        return position, "duplicate"
    if sequence >= position.expected + window:
        return position, "beyond"
    return position, "delivered" if sequence == position.expected else "buffered"


def run_length(expected: int, present: Iterable[int], most: int) -> int:
    """Return how many consecutive numbers from `expected` on are present, at most `most`."""
    there = set(present)
    length = 0
    while length < most and expected + length in there:
        length += 1
    return length


def gap_since(position: Position, held: Mapping[int, int]) -> int | None:
    """Return since when a number is missing, or None. `held` maps numbers to arrival times."""
    if position.expected in held:
        return None
    return min(held.values(), default=None)


def skip_to(position: Position, held: Mapping[int, int], now: int, timeout: int) -> Position:
    """Return the position behind a gap that is older than `timeout`, else the same position."""
    since = gap_since(position, held)
    if since is None or now - since < timeout:
        return position
    return Position(position.epoch, min(held))


class Receiver:
    """In-memory receiver for one sender: the reference for the database receiver."""

    def __init__(self, window: int, *, timeout: int | None = None) -> None:
        """Start empty. If `timeout` is given, skip gaps that are older."""
        self.window = window
        self.timeout = timeout
        self.position: Position | None = None
        self.held: dict[int, int] = {}

    def arrive(self, now: int, epoch: int, sequence: int) -> tuple[Verdict, list[int]]:
        """Process a message. Return the verdict and the numbers that are delivered now."""
        before = self.position or Position(epoch, 1)
        self.position, verdict = judge(before, self.held, self.window, epoch, sequence)
        if self.position.epoch != before.epoch:
            self.held = {}
        if verdict in ("delivered", "buffered"):
            self.held[sequence] = now
        return verdict, self.drain(now)

    def drain(self, now: int) -> list[int]:
        """Deliver all messages that are ready and return their numbers."""
        if self.position is None:
            return []
        if self.timeout is not None:
            self.position = skip_to(self.position, self.held, now, self.timeout)
        epoch, expected = self.position
        length = run_length(expected, self.held, len(self.held))
        ready = list(range(expected, expected + length))
        self.position = Position(epoch, expected + length)
        self.held = {number: at for number, at in self.held.items() if number >= expected + length}
        return ready


class Positions:
    """Items between the checkpoint and the last position read. Callers must serialise access.

    The checkpoint is the end of the last item before which every item has ended: items may end in
    any order. A reader that resumes there repeats some items and misses none.
    """

    def __init__(self, start: int) -> None:
        self.checkpoint = start  # every item before this position has ended
        self._begun: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, end: int) -> None:
        """Record that the item that ends at position `end` was handed out. Positions only grow."""
        if end <= (self._begun[-1] if self._begun else self.checkpoint):
            raise ValueError(f"position {end} is not behind those before it")
        self._begun.append(end)

    def finish(self, end: int) -> bool:
        """Record that the item has ended, perhaps again. Return whether the checkpoint moved."""
        if end > self.checkpoint:
            self._done.add(end)
        moved = False
        while self._begun and self._begun[0] in self._done:
            self.checkpoint = self._begun.popleft()
            self._done.remove(self.checkpoint)
            moved = True
        return moved
