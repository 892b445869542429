"""Queries of databases and stores while there are viewers: queues, outboxes, jobs.

Promises:
- There is one round of queries each `EVERY` seconds, in its own task and never two at a time; none
  if there is nothing to query.
- Failures are reported by `snapshot()`, and delay no sample.
- A reader of a single state waits for a round, at most `WITHIN` seconds (`answered`).
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Final

from seawall import registry
from seawall.telemetry import arefresh

EVERY: Final = 5.0
"""Seconds between two rounds: stored counts change slowly, and each costs a query."""

WITHIN: Final = 2.0
"""Timeout in seconds of each query."""


class Stored:
    """Runs the queries in the event loop in which it is called."""

    def __init__(self, context: Context) -> None:
        """Query in a copy of `context`, without the deadline of the current request."""
        self.answered_at: float | None = None
        """When the last round ended, by the clock of the event loop; None if none did."""
        self._context = context
        self._due = float("-inf")
        self._asking: asyncio.Task[int] | None = None

    def __repr__(self) -> str:
        asking = self._asking is not None and not self._asking.done()
        return f"<Stored: {'asking' if asking else 'quiet'}>"

    def ask(self) -> None:
        """Start a round if one is due, without waiting."""
        loop = asyncio.get_running_loop()
        if loop.time() < self._due or (self._asking is not None and not self._asking.done()):
            return
        # A sample is never exactly on time: one that is slightly early counts as on time.
        self._due = loop.time() + 0.95 * EVERY
        if any(entry.ask is not None for _, entry in registry.entered()):
            asked = arefresh(timeout=WITHIN)
            self._asking = loop.create_task(asked, context=self._context.copy())
            self._asking.add_done_callback(self._ended)

    async def answered(self) -> None:
        """Start a round if one is due, and wait briefly for the current one."""
        self.ask()
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=WITHIN)

    def _ended(self, asked: asyncio.Task[int]) -> None:
        self.answered_at = asked.get_loop().time()
        if not asked.cancelled():
            asked.exception()  # each object keeps its own failure

    async def end(self) -> None:
        """Stop querying; cancel the current round."""
        self._due = float("inf")
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
            await asyncio.wait([asking])
