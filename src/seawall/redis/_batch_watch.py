"""Timeouts of waiting calls, and background upkeep, for a policy that spends batches.

A call that waits for a grant in an event loop does not watch a clock itself. The store ends a
question that is late; but it may be another loop's question, or one after another. Background jobs
hold their policy weakly, so that an unused one is garbage-collected.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle, get_running_loop, sleep
from collections import deque
from typing import TYPE_CHECKING, Final
from weakref import ref

from seawall.redis._batch_sections import Section

if TYPE_CHECKING:
    from seawall.redis._batch_grants import Buying
    from seawall.redis._batches import LeasedLimits

PATIENCE: Final = 0.005
"""Seconds after which a question that another loop carries is repeated beside it.

A running loop usually has its answer by then. One that is blocked or has ended never has.
"""

SECOND_LOOK: Final = 0.01
"""Seconds between a timer and its action: a loop that was busy first reads what has arrived.

Longer than a store's own second look, which reports the reason; and an answer may lead to another
question.
"""

AT_ONCE: Final = 500
"""Maximum number of purses handled in one section: callers wait meanwhile."""


class Watches:
    """The watches of all loops, each used only in the thread of its loop."""

    def __init__(self) -> None:
        """Start empty."""
        self._all: dict[AbstractEventLoop, Watch] = {}
        self._latest: Watch | None = None

    def here(self, share: LeasedLimits, loop: AbstractEventLoop) -> Watch:
        """Return the watch of `loop`, which is the running loop."""
        watch = self._latest
        if watch is None or watch.loop is not loop:
            with share.mutex:
                self._all = {one: kept for one, kept in self._all.items() if not one.is_closed()}
                watch = self._latest = self._all.setdefault(loop, Watch(loop))
        return watch


class Watch:
    """The waiting calls of one event loop.

    All have the same maximum wait, so the first to come is due first, and one timer is enough.
    """

    __slots__ = ("_timer", "_waiting", "loop")

    def __init__(self, loop: AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[float, Buying]] = deque()
        self._timer: TimerHandle | None = None

    def add(self, buying: Buying, patience: float, share: LeasedLimits) -> None:
        """Let `buying` wait for at most `patience` seconds."""
        waiting = self._waiting
        while waiting and not waiting[0][1].holders:
            waiting.popleft()
        due = self.loop.time() + patience
        waiting.append((due, buying))
        if self._timer is None:
            self._timer = self.loop.call_at(due, self._look_again, share)

    def _look_again(self, share: LeasedLimits) -> None:
        """Let the loop first read what has arrived: it may have been busy."""
        self._timer = self.loop.call_later(SECOND_LOOK, self._give_up, share)

    def _give_up(self, share: LeasedLimits) -> None:
        self._timer = None
        waiting, now, late = self._waiting, self.loop.time(), []
        while waiting:
            due, buying = waiting[0]
            if buying.holders and due > now:
                self._timer = self.loop.call_at(due, self._look_again, share)
                break
            waiting.popleft()
            late.append(buying)
        with Section(share, share.clock.now()) as section, share.mutex, section.inside:
            section.give_up_waiting(late)


async def ask_again(me: ref[LeasedLimits]) -> None:
    """Repeat questions that have no answer after a moment, in the background."""
    share = me()
    if share is None or not share.doubts:
        return
    doubts = len(share.doubts)  # those that come meanwhile trigger another run
    await sleep(PATIENCE)
    for _ in range(doubts):
        with Section(share, share.clock.now()) as section, share.mutex, section.inside:
            section.ask_again(*share.doubts.popleft())


def resize(me: ref[LeasedLimits]) -> None:
    """Adjust batches to the number of pods; give back what then exceeds a batch."""
    share = me()
    if share is None:
        return
    before = share.batches
    share.resize()
    if any(new < old for new, old in zip(share.batches, before, strict=True)):
        with share.mutex:
            holders = [holder for some in share.holders for holder in some.values()]
        for first in range(0, len(holders), AT_ONCE):
            with Section(share, share.clock.now()) as section, share.mutex, section.inside:
                for holder in holders[first : first + AT_ONCE]:
                    section.look(holder)


def moved(me: ref[LeasedLimits]) -> None:
    """Let gates spend directly only while the store is reachable."""
    share = me()
    if share is not None and share.door is not None:
        with Section(share, share.clock.now()) as section, share.mutex, section.inside:
            share.door.up = share.store.up
            holder = share.holders[0].get(None)
            if holder is not None:
                section.look(holder)


async def tend(me: ref[LeasedLimits]) -> None:
    """Give back what has expired."""
    share = me()
    if share is not None:
        share.background = get_running_loop()
        share.tend()
