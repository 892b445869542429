"""One job that a worker is executing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from seawall.jobs._records import Claim

if TYPE_CHECKING:
    import asyncio


class Run:
    """A job that a worker is executing."""

    def __init__(self, claim: Claim, *, wanted: bool = True) -> None:
        """Start; a job that is not wanted is only given back."""
        self.claim = claim
        self.task: asyncio.Task[None] | None = None
        self.wanted: Literal["nothing", "to stop", "to return"] = (
            "nothing" if wanted else "to return"
        )
        self.shed = False
        """Whether the job waited too long and must not be started."""
        self.begun = False
        """Whether the handler was called, which makes this an attempt."""
        self.returned = False
        """Whether the handler has ended, by return or exception."""
        self.state = ""
        """The job's state after its outcome was reported to the queue."""
        self.settling = not wanted
        """Whether the work has ended, and only the report to the queue remains."""

    @property
    def lost(self) -> bool:
        """Whether the claim is no longer this worker's."""
        return self.wanted == "to stop"

    def lose(self) -> None:
        """Stop the job, because another worker owns it now."""
        already, self.wanted = self.wanted, "to stop"
        if already == "nothing":
            self._cancel()

    def give_back(self) -> None:
        """Stop the job and give it back."""
        if self.wanted == "nothing":
            self.wanted = "to return"
            self._cancel()

    def _cancel(self) -> None:
        # Do not cancel the report of finished work: it has its own time limit.
        if self.task is not None and not self.settling:
            self.task.cancel()
