"""One job at work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from seawall.jobs._records import Claim

if TYPE_CHECKING:
    import asyncio


class Run:
    """A job at work."""

    def __init__(self, claim: Claim, *, wanted: bool = True) -> None:
        """Begin; what is not wanted is only given back."""
        self.claim = claim
        self.task: asyncio.Task[None] | None = None
        self.wanted: Literal["nothing", "to stop", "to return"] = (
            "nothing" if wanted else "to return"
        )
        self.shed = False
        """Whether the job waited for too long to be begun."""
        self.begun = False
        """Whether the handler was called: from then on it was an attempt."""
        self.returned = False
        """Whether it has come back, however."""
        self.state = ""
        """The job's state after its end was reported to the queue."""
        self.settling = not wanted
        """Whether the work is over, and only the queue is still to be told."""

    @property
    def lost(self) -> bool:
        """Whether the job is not this worker's any more."""
        return self.wanted == "to stop"

    def lose(self) -> None:
        """Stop: the job is somebody else's."""
        already, self.wanted = self.wanted, "to stop"
        if already == "nothing":
            self._cancel()

    def give_back(self) -> None:
        """Stop, and give the job back."""
        if self.wanted == "nothing":
            self.wanted = "to return"
            self._cancel()

    def _cancel(self) -> None:
        # What is done is done: telling the queue takes as long as there is time for it.
        if self.task is not None and not self.settling:
            self.task.cancel()
