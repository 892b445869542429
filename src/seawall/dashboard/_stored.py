"""What only a database or a store knows, asked for while somebody looks: queues, outboxes, jobs.

Promises: a round of questions each `EVERY` seconds, in a task of its own and never two at once;
none where there is nothing to ask for. What fails is told by `snapshot()`, and delays no sample.
A reader of a single state waits for a round, `WITHIN` seconds at most (`answered`).
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Final

from seawall import registry
from seawall.telemetry import arefresh

EVERY: Final = 5.0
"""Seconds between two rounds: what waits there changes slowly, and each question costs a query."""

WITHIN: Final = 2.0
"""Seconds for each question."""


class Stored:
    """Asks in the event loop in which it is called."""

    def __init__(self, context: Context) -> None:
        """Ask in a copy of `context`, whoever wants to know: no request's deadline is in it."""
        self.answered_at: float | None = None
        """When the last round ended, by the clock of the event loop; None if none did."""
        self._context = context
        self._due = float("-inf")
        self._asking: asyncio.Task[int] | None = None

    def __repr__(self) -> str:
        asking = self._asking is not None and not self._asking.done()
        return f"<Stored: {'asking' if asking else 'quiet'}>"

    def ask(self) -> None:
        """Begin a round if it is time for one; nothing is waited for."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due or (self._asking is not None and not self._asking.done()):
            return
        # A sample is never exactly on time: one that comes a little early is the one that is meant.
        self._due = loop.time() + 0.95 * EVERY
        if any(entry.ask is not None for _, entry in registry.entered()):
            asked = arefresh(timeout=WITHIN)
            self._asking = loop.create_task(asked, context=self._context.copy())
            self._asking.add_done_callback(self._ended)

    async def answered(self) -> None:
        """Begin a round if it is time for one, and wait for the one under way, but not for long."""
        self.ask()
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WITHIN)

    def _ended(self, asked: asyncio.Task[int]) -> None:
        self.answered_at = asked.get_loop().time()
        if not asked.cancelled():
            asked.exception()  # what a thing failed with is known of that thing

    async def end(self) -> None:
        """Ask no more; what is being asked is cut off."""
        self._due = float("inf")
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])
