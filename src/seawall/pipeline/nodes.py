"""The nodes of a run: stages with and without workers, branches, the exit.

A node takes an item and returns what to await before bringing the next one: nothing while there is
room. The caller of `take` does the work of a node, unless it is a stage with workers: these take
items from its queue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from seawall.errors import WorkerDied
from seawall.pipeline.batch_worker import BatchWorker
from seawall.pipeline.counts import StageCounts, idle_snapshot
from seawall.pipeline.failures import REFUSED, FailureHandler, reason_to_wait
from seawall.pipeline.invocation import LOST, Invocation, is_lost
from seawall.pipeline.item import CURRENT, DROP, Item
from seawall.pipeline.stage import Degrade, Stage
from seawall.pipeline.stage_queue import StageQueue
from seawall.pipeline.worker import ItemWorker, StageWorker
from seawall.policies.breaker import Breaker
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from seawall.pipeline.run import PipelineRun

ENDED_AT_ONCE: Final = 100
"""Items that the exit takes in one go."""


class Node(Protocol):
    """Where items go."""

    name: str

    def take(self, item: Item) -> Awaitable[None] | None:
        """Take the item; return what to await before bringing the next one, if anything."""


class Exit:
    """The node behind the sinks: items have ended."""

    name = "end"
    room: Final = ENDED_AT_ONCE

    def __init__(self, run: PipelineRun) -> None:
        self.take = run.end
        self.take_many = run.end_many


class Branch:
    """Sends each item one of two ways."""

    def __init__(
        self, run: PipelineRun, name: str, predicate: Callable[[Any], bool], yes: Node, no: Node
    ) -> None:
        self.name = name
        self.counts = StageCounts(run.now())
        self._run = run
        self._predicate = predicate
        self._yes = yes
        self._no = no

    def take(self, item: Item) -> Awaitable[None] | None:
        """Send the item on; it is a dead letter if the predicate raises."""
        try:
            chosen = self._yes if self._predicate(item.value) else self._no
        except Exception as error:  # noqa: BLE001 - of the user's function
            self.counts.add_failure(error)
            return self._run.bury(item, self.name, self.counts, error)
        self.counts.done += 1
        return chosen.take(item)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return how many items it has judged."""
        return idle_snapshot(self.name, self.counts, now)


class InlineStage:
    """A stage without workers: a plain function that is called on the way."""

    def __init__(self, run: PipelineRun, stage: Stage, following: Node) -> None:
        self.name = stage.name
        self.counts = StageCounts(run.now())
        self._stage = stage
        self._run = run
        self._function = stage.function
        self.is_sink = stage.is_sink
        self.following = following
        self._send_on = following.take
        self._failures = FailureHandler(run, stage, self.counts, following)

    def take(self, item: Item) -> Awaitable[None] | None:
        """Do the item and send it on."""
        if self._run.may_lose_items and is_lost(item):
            return self._failures.give_up(item, LOST)
        if CURRENT.get(None) is not item:
            CURRENT.set(item)
        item.stage = self.name
        item.attempts = 1
        try:
            value = self._function(item.value)
        except Exception as error:  # noqa: BLE001 - of the user's function
            return self._persist(item, error)
        return self._finish(item, value)

    def store(self, item: Item) -> Awaitable[None] | None:
        """Store the current item; the caller ends it, unless it has to await what is returned."""
        item.stage = self.name
        item.attempts = 1
        try:
            self._function(item.value)
        except Exception as error:  # noqa: BLE001 - of the user's function
            return self._persist(item, error)
        self.counts.done += 1
        return None

    def _finish(self, item: Item, value: Any) -> Awaitable[None] | None:
        """Send the item on, unless it is not wanted."""
        self.counts.done += 1
        if not self.is_sink:
            if value is DROP:
                self._failures.drop(item)
                return None
            item.value = value
        return self._send_on(item)

    async def _persist(self, item: Item, error: Exception) -> None:
        """Call the function again while it refuses the item; the caller waits."""
        pauses = REFUSED.delays(self._run.random)
        while (seconds := self._failures.pause_after(error, pauses)) is not None:
            self.counts.waits_for = reason_to_wait(error)
            try:
                await sleep_async(seconds)
            finally:
                self.counts.waits_for = ""
            if is_lost(item):
                break
            item.attempts += 1
            self.counts.retries += 1
            CURRENT.set(item)
            try:
                value = self._function(item.value)
            except Exception as again:  # noqa: BLE001 - of the user's function
                error = again
            else:
                pending = self._finish(item, value)
                if pending is not None:
                    await pending
                return
        await self._failures.give_up(item, error)

    def snapshot(self, now: float) -> dict[str, Any]:
        """Return what it has done."""
        return idle_snapshot(self._stage, self.counts, now)


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
        self.batch_following = following if isinstance(following, StageQueue | Exit) else None
        """The node behind this stage, if it takes several items together."""
        self.sink = (
            following
            if isinstance(following, InlineStage) and following.is_sink and not run.may_lose_items
            else None
        )
        """The sink behind this stage, if a worker can store its items there by itself."""
        behind = following if self.sink is None else self.sink.following
        self.batch_target = behind if isinstance(behind, StageQueue | Exit) else None
        """The node that takes several items together, behind that sink if there is one."""
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
