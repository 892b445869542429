"""Checkpoint of a stream whose items end in any order.

The checkpoint is the end of the last item before which every item has ended. A reader that resumes
there repeats some items and misses none.
"""

from __future__ import annotations

from collections import deque


class Positions:
    """Items between the checkpoint and the last position read. Callers must serialise access."""

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
