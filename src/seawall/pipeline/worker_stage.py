"""A stage with workers: the queue in front of them, and what they share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from seawall.errors import WorkerDied
from seawall.pipeline.batch_worker import BatchWorker
from seawall.pipeline.counts import StageCounts, idle_snapshot
from seawall.pipeline.failures import FailureHandler
from seawall.pipeline.inline import Exit, InlineStage, Node
from seawall.pipeline.invocation import Invocation
from seawall.pipeline.item import Item
from seawall.pipeline.stage import Degrade, Stage
from seawall.pipeline.stage_queue import StageQueue
from seawall.pipeline.worker import ItemWorker, StageWorker
from seawall.policies.breaker import Breaker

if TYPE_CHECKING:
    from seawall.pipeline.run import PipelineRun


class WorkerStage:
    """A stage with workers; items come to it through its `queue`."""

    def __init__(self, run: PipelineRun, stage: Stage, following: Node, *, in_memory: bool) -> None:
        self.stage = stage
        self.run = run
        self.following = following
        self.counts = StageCounts(run.now())
        self.queue = StageQueue(run, stage, self.counts)
        self.failures = FailureHandler(run, stage, self.counts, following)
        self.invocation = Invocation(stage, self.counts, in_memory=in_memory)
        self.takes_many = following if isinstance(following, StageQueue | Exit) else None
        """The node behind this stage, if it takes several items together."""
        self.sink = (
            following
            if isinstance(following, InlineStage) and following.is_sink and not run.may_lose_items
            else None
        )
        """The sink behind this stage, if a worker can store its items there by itself."""
        self.no_room = f"no room in {following.name!r}"
        """Why a worker waits that has finished an item."""
        policies = getattr(stage.guard, "policies", ())
        self._breakers = [policy for policy in policies if isinstance(policy, Breaker)]
        batch = stage.batch
        self.workers: list[StageWorker] = [
            ItemWorker(self) if batch is None else BatchWorker(self, batch)
            for _ in range(stage.workers)
        ]

    def pause_after(self, error: Exception, item: Item, pauses: Iterator[float]) -> float | None:
        """Return after how many seconds to call again, None if the item has failed."""
        if isinstance(error, WorkerDied):
            self.counts.deaths += 1
            item.deaths += 1
            return 0.0 if item.deaths < self.stage.most_deaths else None
        seconds = self.failures.pause_after(error, pauses)
        if seconds is not None or isinstance(self.stage.on_failure, Degrade):
            return seconds
        if not any(breaker.state == "open" for breaker in self._breakers):
            return None
        self.counts.refused += 1  # the dependency is down, and not the item bad
        return next(pauses)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what it is doing, and what it has done; from any thread."""
        at_work = [(worker, items) for worker in self.workers if (items := worker.items)]
        seen = idle_snapshot(self.stage, self.counts, now)
        reasons = (worker.waits_for for worker, _ in at_work if worker.waits_for)
        seen["busy"] = len(at_work)
        seen["waiting"] = self.queue.held
        entered = [item.entered_at for item in self.queue.waiting()]
        seen["oldest"] = now - min(entered, default=now)
        seen["at_work"] = [worker.snapshot(items, now) for worker, items in at_work]
        seen["waits_for"] = seen["waits_for"] or next(reasons, "")
        return seen
