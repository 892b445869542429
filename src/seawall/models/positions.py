"""Which positions of a stream are done, when items end in any order.

The checkpoint is the end of the last item before which everything has ended: whoever resumes there
repeats some items and misses none.
"""

from __future__ import annotations

from collections import deque


class Positions:
    """The items between the checkpoint and the place that was read last. One caller at a time."""

    __slots__ = ("_begun", "_done", "checkpoint")

    def __init__(self, start: int) -> None:
        """Begin at `start`, where nothing has been read yet."""
        self.checkpoint = start
        """Everything before this position has ended."""
        self._begun: deque[int] = deque()
        self._done: set[int] = set()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, end: int) -> None:
        """Note that the item which ends at position `end` was handed out; positions only grow."""
        if end <= (self._begun[-1] if self._begun else self.checkpoint):
            raise ValueError(f"position {end} is not behind those before it")
        self._begun.append(end)

    def finish(self, end: int) -> bool:
        """Note that this item has ended, once or again; return whether the checkpoint has moved."""
        if end > self.checkpoint:
            self._done.add(end)
        moved = False
        while self._begun and self._begun[0] in self._done:
            self.checkpoint = self._begun.popleft()
            self._done.remove(self.checkpoint)
            moved = True
        return moved
