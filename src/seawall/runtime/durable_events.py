"""The events of what is kept in a database.

They are told and subscribed to as all others, see `seawall.runtime.events`. A job or a call that
was given up is a `JobDied`, as that of any queue.
"""

from __future__ import annotations

from seawall.runtime.events import Event


class FifoGap(Event):
    """A message is missing for too long; `guard` is the receiver's name."""

    __slots__ = ("age", "epoch", "expected", "sender", "skipped_to")
    name = "fifo_gap"

    def __init__(
        self,
        guard: str,
        *,
        sender: str,
        epoch: int,
        expected: int,
        age: float,
        skipped_to: int | None,
    ) -> None:
        """Tell which is missing, for how long, and where it goes on; None while it waits."""
        super().__init__(guard)
        self.sender = sender
        self.epoch = epoch
        self.expected = expected
        self.age = age
        self.skipped_to = skipped_to
