"""Channels and queues of jobs as sources.

A sink needs nothing of its own: `.sink(channel.aput)` waits while the channel is full, and so does
`.sink(queue.apush)` while the queue is, since a refusal is no failure.

Promises:
- Items that are given back to a channel are in front of all others again, at once.
- A job is done when its item has ended. One that is given back can be claimed at once, and this
  was no attempt. Its lease is prolonged while it is at work.
- A job whose lease was lost is not begun in another stage.
- A finished job keeps its lease until its end could be reported to the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Any, Final, Generic, TypeVar

from seawall import _checks as check
from seawall._failures import described
from seawall.errors import ChannelClosed, JobLost, TimedOut
from seawall.jobs import Claim, JobQueue
from seawall.pipeline.source import checked_name
from seawall.resources.channel import Channel
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async

T = TypeVar("T")

RENEWALS: Final = 3
"""How often a lease is prolonged in its length."""

_log = logging.getLogger("seawall")


class ChannelSource(Generic[T]):
    """The items of a `Channel`; it is over when the channel is closed and empty."""

    def __init__(self, channel: Channel[T], *, name: str | None = None) -> None:
        """Take from `channel`; other consumers may do so, too."""
        if not isinstance(channel, Channel):
            raise TypeError(f"ChannelSource({channel!r}): pass a Channel")
        self.channel = channel
        self.name = channel.name if name is None else checked_name(name)
        self._numbers = count(1)
        self._taken: dict[int, T] = {}
        """What is on its way, by number."""
        self._requested = 0
        """Items that were asked for and have not come, where the channel wants to be asked."""

    async def pull(self, most: int) -> Sequence[tuple[T, int]]:
        """Wait for an item, and take what else is there."""
        channel = self.channel
        if channel.demand and most > self._requested:
            channel.request(most - self._requested)
            self._requested = most
        items: list[T] = []
        try:
            items.append(await channel.aget())
            while len(items) < most and channel.depth:
                items.append(channel.get(timeout=0))
        except (ChannelClosed, TimedOut):
            pass  # it is over, or another consumer was faster
        self._requested = max(0, self._requested - len(items))
        pulled = list(zip(items, self._numbers, strict=False))
        self._taken.update((number, item) for item, number in pulled)
        return pulled

    async def acknowledge(self, handles: Sequence[int]) -> None:
        """Forget them."""
        for number in handles:
            self._taken.pop(number, None)

    async def give_back(self, handles: Sequence[int]) -> None:
        """Put them in front of what is in the channel, in their order."""
        self.channel.give_back(self._taken.pop(number) for number in sorted(handles))

    async def close(self) -> None:
        """Do nothing: the channel may have other consumers."""

    def snapshot(self) -> dict[str, Any]:
        """Return how full the channel is."""
        return {
            "kind": "channel",
            "depth": self.channel.depth,
            "capacity": self.channel.capacity,
            "closed": self.channel.closed,
        }


@dataclass(eq=False, slots=True)
class ClaimedJob:
    """A job that this process has claimed; its text is the job's id."""

    claim: Claim

    def __str__(self) -> str:
        return self.claim.id


class QueueSource:
    """The payloads of the jobs of a `PriorityQueue`, or of a `LocalQueue`; it is never over."""

    keeps_ids = True
    """The id of a job is its own for ever."""

    def __init__(self, queue: JobQueue, *, lease: float = 30.0, name: str | None = None) -> None:
        """Claim jobs for `lease` seconds, again and again until they are done.

        If this process dies, others can claim its jobs when their leases are over; that has cost
        each of them an attempt.
        """
        if not isinstance(queue, JobQueue):
            raise TypeError(
                f"QueueSource({queue!r}): pass a queue, such as PriorityQueue(store, 'orders')"
            )
        self.queue = queue
        self.name = queue.name if name is None else checked_name(name)
        self._lease = check.seconds("lease", lease)
        self._held: dict[ClaimedJob, None] = {}
        """Jobs whose leases are prolonged."""
        self._renewing: asyncio.Task[None] | None = None

    async def pull(self, most: int) -> Sequence[tuple[Any, ClaimedJob]]:
        """Wait for a job, and claim what else is there."""
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name=f"leases of {self.name}")
        claims = await self.queue.aclaim(most, lease=self._lease, wait=inf)
        jobs = [ClaimedJob(claim) for claim in claims]
        self._held.update(dict.fromkeys(jobs))
        return [(job.claim.payload, job) for job in jobs]

    async def acknowledge(self, handles: Sequence[ClaimedJob]) -> None:
        """Acknowledge these jobs in the queue."""
        await _all([self._finish(job) for job in handles if job in self._held])

    async def give_back(self, handles: Sequence[ClaimedJob]) -> None:
        """Let others claim them at once."""
        for job in handles:
            self._held.pop(job, None)
        await _all([self._release(job) for job in handles])

    def holds(self, handle: ClaimedJob) -> bool:
        """Return whether its lease is not over: else another worker may have the job."""
        return handle in self._held and self.queue.clock.now() < handle.claim.until

    async def close(self) -> None:
        """Prolong no more leases."""
        renewing, self._renewing = self._renewing, None
        if renewing is not None:
            await end([renewing])

    def snapshot(self) -> dict[str, Any]:
        """Return how many jobs wait, and how many are claimed here."""
        return {"kind": "queue", "waiting": self.queue.waiting, "claimed": len(self._held)}

    async def _finish(self, job: ClaimedJob) -> None:
        try:
            await self.queue.aack(job.claim)
        except JobLost as lost:
            if lost.state != "done":  # else an earlier answer of the store was lost
                self._warn("job %s is done, but its lease was over: it is %s", job, lost)
        self._held.pop(job, None)

    async def _release(self, job: ClaimedJob) -> None:
        try:
            await self.queue.anack(job.claim, counted=False)
        except JobLost:
            pass  # it is back already

    async def _renew(self) -> None:
        """Prolong leases, as long as there are any."""
        while True:
            await sleep_async(self._lease / RENEWALS)
            try:
                await _all([self._prolong(job) for job in self._held])
            except Exception as error:  # noqa: BLE001 - logged; the next time is soon
                _log.warning(
                    "source %r: leases cannot be prolonged: %s",
                    self.name,
                    described(error),
                    extra={"seawall_source": self.name},
                )

    async def _prolong(self, job: ClaimedJob) -> None:
        if job.claim.until - self.queue.clock.now() > self._lease * (1 - 1 / RENEWALS):
            return
        try:
            await self.queue.aheartbeat(job.claim)
        except JobLost as lost:
            self._held.pop(job, None)
            self._warn("the lease of job %s was over while it was at work: it is %s", job, lost)

    def _warn(self, text: str, job: ClaimedJob, lost: JobLost) -> None:
        fields = {"seawall_source": self.name, "seawall_item": f"{self.name}:{job}"}
        _log.warning(f"source %r: {text}", self.name, job, lost.state, extra=fields)


async def _all(tasks: list[Any]) -> None:
    """Await all of them at once, whatever one raises; then raise the first error."""
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
