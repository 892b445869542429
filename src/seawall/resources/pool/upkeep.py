"""Statistics of a pool, and the periodic upkeep of idle, lost and leaked resources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from threading import Lock
from typing import Final

from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.events import ResourceLeaked
from seawall.events.bus import emit
from seawall.models.pooling import PoolSettings, PoolUsage
from seawall.resources.pool.stock import Resource, Stock
from seawall.runtime.slots import AnonymousSlots
from seawall.runtime.stats import cached, take_all

LOOK_EVERY: Final = 0.25  # seconds between two rounds of upkeep


class Upkeep:
    """Counts and samples of one pool, and the periodic check of its resources."""

    def __init__(
        self, name: str, clock: Clock, settings: PoolSettings, slots: AnonymousSlots, stock: Stock
    ) -> None:
        self.name = name
        self.settings = settings
        self.slots = slots
        self.stock = stock
        self._now = clock.now
        now = clock.now()
        self.due = now + LOOK_EVERY  # when the next upkeep is due
        self.counts: Counter[str] = Counter()
        self.uses = PoolUsage(now)
        self.waits = PoolUsage(now)
        self.used: list[float] = []  # durations of borrows that are not yet counted in `uses`
        self.waited: list[float] = []
        self.median = cached(self._median)  # recent median duration of a borrow; None if unknown
        self._refusals_seen = 0
        self._folding = Lock()
        survives_fork(self)

    def look(self, now: float) -> None:
        """Do the periodic upkeep: count, report leaks, and close."""
        self.due = now + LOOK_EVERY
        self.note(now)
        self.stock.forget_closed_loops()
        self.reap(now, in_passing=True)

    def note(self, now: float) -> None:
        """Count the recorded uses, and report leaks."""
        self.fold(now)
        leak_after = self.settings.leak_after
        if leak_after is not None:
            for since, resource in self.stock.borrowed():
                if now - since >= leak_after:
                    self.report(resource)

    def reap(self, now: float, *, in_passing: bool = False) -> int:
        """Close what is too old, lost or surplus; return how many. In passing, one is enough."""
        reaped = 0
        for resource, cause, slot in self._too_many(now):
            slow = self.stock.retire(resource, cause, slot=slot)
            reaped += 1
            if in_passing and slow is None:
                self.due = now
                break
        return reaped

    def _too_many(self, now: float) -> Iterator[tuple[Resource, str, bool]]:
        """Take out the resources to close, each with its cause and whether it has a slot."""
        stock, slots, settings = self.stock, self.slots, self.settings
        for resource, cause in stock.expired(now):
            if cause == "idle" and len(stock.live) <= settings.min_size:
                continue
            if not slots.take():
                break
            if stock.take_out(resource):
                yield resource, cause, True
            else:
                slots.give_back()
        for substitute in [lost for lost in list(stock.lost) if not lost.pooled]:
            try:
                stock.lost.remove(substitute)
            except ValueError:  # another thread was faster
                continue
            self.report(substitute)
            yield substitute, "leaked", False
        while stock.lost and slots.take():
            lost = stock.take_lost()
            if lost is None:
                slots.give_back()
                break
            self.report(lost)
            yield lost, "leaked", True
        while len(stock.live) > settings.max_size and (spare := stock.take_oldest()) is not None:
            yield spare, "surplus", slots.take()

    def report(self, resource: Resource) -> None:
        """Report a leak, once for each borrow."""
        since = resource.since
        if since is None or resource.reported == since:
            return
        resource.reported = since
        self.counts["leaked"] += 1
        place, seconds = resource.place, self._now() - since
        emit(ResourceLeaked, self.name, borrowed_at=place, seconds=seconds)
        import logging

        message = "pool %r: a resource borrowed at %s is out for %.3g s"
        logging.getLogger("seawall").warning(message, self.name, place, seconds)

    def _median(self, now: float) -> float | None:
        self.fold(now)
        return self.uses.latency.quantile(0.5, now)

    def fold(self, now: float) -> None:
        """Move the recorded samples into the statistics, unless another thread is doing so."""
        if self._folding.acquire(blocking=False):
            try:
                refused = self.counts["rejected"] - self._refusals_seen
                self._refusals_seen += refused
                self.uses.add_all(take_all(self.used), now, refused)
                self.waits.add_all(take_all(self.waited), now)
            finally:
                self._folding.release()

    def _after_fork(self) -> None:
        self._folding = Lock()
