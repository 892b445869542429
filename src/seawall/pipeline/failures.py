"""What a stage does with an item that its function has refused, or that has failed for good."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from seawall._failures import described
from seawall.errors import CircuitOpen, DeadlineExceeded, Rejected
from seawall.models.backoff import full_jitter
from seawall.pipeline.counts import StageCounts
from seawall.pipeline.invocation import LOST, is_lost
from seawall.pipeline.item import CURRENT, DROP, Ending, Item, ItemDegradation
from seawall.pipeline.stage import Degrade, NotBefore, Stage
from seawall.runtime.functions import kind_of

if TYPE_CHECKING:
    from seawall.pipeline.nodes import Node
    from seawall.pipeline.run import PipelineRun

REFUSED: Final = full_jitter(0.05, cap=5.0)
"""Pauses of a stage whose dependency refuses without saying for how long."""
BLOCKED: Final = full_jitter(0.5, cap=60.0)
"""Pauses between the attempts at an item that blocks its key, or that cannot be set aside."""
LONGEST_PAUSE: Final = 60.0
"""Seconds after which a refused item is tried again, whatever the refusal says."""


class FailureHandler:
    """Carries out what `on_failure=` of a stage says."""

    def __init__(
        self, run: PipelineRun, stage: Stage, counts: StageCounts, following: Node
    ) -> None:
        self._run = run
        self._stage = stage
        self._counts = counts
        self._following = following

    async def give_up(self, item: Item, error: Exception) -> None:
        """Do with a failed item what `on_failure` says; give a lost one back."""
        if error is LOST or is_lost(item):
            self._run.end(item, Ending.RETURNED)
            return
        self._counts.add_failure(error)
        action = self._stage.on_failure
        if isinstance(action, Degrade):
            await self._degrade(item, error, action)
        elif action == "drop":
            self._counts.dropped += 1
            self._run.end(item, Ending.DROPPED, error)
        elif action == "stop":
            self._run.stop_because(item, error)
            await asyncio.Event().wait()  # until it is cancelled: nothing more is begun here
        else:
            await self._run.bury(item, self._stage.name, self._counts, error)

    def pause_after(self, error: Exception, pauses: Iterator[float]) -> float | None:
        """Return for how many seconds an item waits that was refused, None if it has failed."""
        asked: float | None
        if isinstance(self._stage.on_failure, Degrade):
            return None
        if isinstance(error, NotBefore):
            asked = error.seconds
        elif isinstance(error, Rejected) and not isinstance(error, DeadlineExceeded):
            asked = None if error.retry_after is None else min(error.retry_after, LONGEST_PAUSE)
        else:
            return None
        self._counts.refused += 1
        pause = next(pauses)
        return pause if asked is None else max(asked, 0.001) + pause / 10

    def drop(self, item: Item) -> None:
        """End an item that the stage does not want."""
        self._counts.dropped += 1
        self._run.end(item, Ending.DROPPED)

    async def _degrade(self, item: Item, error: Exception, action: Degrade) -> None:
        stage = self._stage
        CURRENT.set(item)
        try:
            value = action.function(item.value, error)
            if kind_of(action.function) == "async":
                value = await value
        except (Exception, asyncio.CancelledError) as second:  # noqa: BLE001 - of the user's function
            failure = self._run.failure_of(second)
            await self._run.bury(item, stage.name, self._counts, failure)
            return
        if self._run.is_closing:
            raise asyncio.CancelledError  # the function has swallowed it
        if not stage.is_sink:
            if value is DROP:
                self.drop(item)
                return
            item.value = value
        self._counts.degraded += 1
        item.degradations = (*item.degradations, ItemDegradation(stage.name, described(error)))
        pending = self._following.take(item)
        if pending is not None:
            await pending


def reason_to_wait(error: Exception) -> str:
    """Describe why an item waits, without seconds that grow old meanwhile."""
    if not isinstance(error, CircuitOpen):
        return described(error)
    last = f"; the last failure: {error.failure}" if error.failure else ""
    return f"CircuitOpen: guard {error.guard!r}: the circuit is open{last}"
