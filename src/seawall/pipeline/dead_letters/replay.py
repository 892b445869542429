"""The dead letters of one run: into their store, and out of it when they are replayed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Any

from seawall._failures import described
from seawall.clock import current_clock
from seawall.jobs.wakeups import READY, Wakeup
from seawall.pipeline.counts import StageCounts
from seawall.pipeline.dead_letters.letters import (
    CLAIM_AT_ONCE,
    DeadLetters,
    MemoryDeadLetters,
    ReplayClaim,
)
from seawall.pipeline.failures import BLOCKED
from seawall.pipeline.item import DeadLetter, Item
from seawall.pipeline.nodes import Node
from seawall.pipeline.reader import SourceReader
from seawall.pipeline.run import PipelineRun
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async, wait_async

_log = logging.getLogger("seawall")


def letter_ids(store: Any) -> Callable[[str], str]:
    """Return a function that makes unique ids of letters, for sources that may use an id again."""
    if isinstance(store, MemoryDeadLetters):
        return store._free_id  # noqa: SLF001 - of this module
    run, numbers = token_hex(4), count(1)
    return lambda id_: f"{id_}@{run}-{next(numbers)}"


class ReplayedItem(Item):
    """An item that enters again where it failed; it keeps its id."""

    __slots__ = ()

    @property
    def id(self) -> str:
        """The id of its letter."""
        claim: ReplayClaim = self.handle
        return claim.letter.id


class LetterSource:
    """The letters of one run: dead ones go into the store, replayed ones come out of it."""

    def __init__(self, store: DeadLetters) -> None:
        self.name = "dead letters"
        self.keeps_ids = True
        self.store = store
        self._held: dict[str, ReplayClaim] = {}
        self._claiming: asyncio.Future[list[ReplayClaim]] | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def add(self, letter: DeadLetter) -> None:
        """Keep an item that has failed, for the first time or again."""
        await self.store.aadd(letter, self._held.get(letter.id))
        self._held.pop(letter.id, None)

    async def pull(self, most: int) -> Sequence[tuple[Any, ReplayClaim]]:
        """Claim letters; return none if there are none now."""
        self._claiming = asyncio.ensure_future(self.store.aclaim(most))
        claims = await asyncio.shield(self._claiming)  # `close` gives back what comes too late
        self._claiming = None
        self._held.update((claim.letter.id, claim) for claim in claims)
        if claims and self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        return [(claim.letter.value, claim) for claim in claims]

    async def acknowledge(self, handles: Sequence[ReplayClaim]) -> None:
        """Delete the letters of items that have ended; not of those that are dead again."""
        await self._end(handles, self.store.asettle)

    async def give_back(self, handles: Sequence[ReplayClaim]) -> None:
        """Let the letters wait again."""
        await self._end(handles, self.store.arelease)

    async def _end(
        self,
        claims: Sequence[ReplayClaim],
        report: Callable[[Sequence[ReplayClaim]], Awaitable[None]],
    ) -> None:
        held = [claim for claim in claims if self._held.get(claim.letter.id) is claim]
        if held:
            await report(held)
            for claim in held:
                self._held.pop(claim.letter.id, None)

    async def close(self) -> None:
        """Renew no more, and give back what was claimed too late."""
        if self._renewal is not None:
            await end([self._renewal])
        claiming, self._claiming = self._claiming, None
        if claiming is not None:
            await asyncio.wait([claiming], timeout=1.0)
            if claiming.done() and not claiming.cancelled() and claiming.exception() is None:
                await self.store.arelease(claiming.result())

    async def _renew(self) -> None:
        while True:
            await sleep_async(self.store.lease / 3)
            claims = list(self._held.values())
            if not claims:
                continue
            try:
                held = await self.store.arenew(claims)
            except Exception as error:  # noqa: BLE001 - logged; the next attempt may succeed
                _log.warning(
                    "pipeline %r: the claims of %d replayed letters cannot be renewed: %s",
                    self.store.name,
                    len(claims),
                    described(error),
                    extra={"seawall_pipeline": self.store.name},
                )
                continue
            renewed = {claim.letter.id for claim in held}
            for claim in claims:
                id_ = claim.letter.id
                if id_ not in renewed and self._held.get(id_) is claim:
                    del self._held[id_]
                    _log.warning(
                        "pipeline %r: the claim of letter %s was lost; it may be replayed twice",
                        self.store.name,
                        id_,
                        extra={"seawall_item": id_, "seawall_stage": claim.letter.stage},
                    )


class ReplayReader(SourceReader):
    """Sends letters that are to be replayed through the stages where they failed."""

    def __init__(self, run: PipelineRun, letters: LetterSource, stages: Mapping[str, Node]) -> None:
        super().__init__(run, letters, next(iter(stages.values())))
        self._letters = letters
        self._stages = stages
        self._is_last = False

    def finish(self) -> None:
        """End when no more letters wait: the other sources are over."""
        self._is_last = True
        self._letters.store.wakeups.ring(READY)

    async def _read(self) -> None:
        store, clock = self._letters.store, current_clock()
        pauses = None
        with Wakeup(store.wakeups, READY) as wakeup:
            while not self._is_halted:
                wakeup.reset()
                pause = store.poll
                pulled: Sequence[tuple[Any, ReplayClaim]] = ()
                self._is_interruptible = True
                try:
                    pulled = await self._letters.pull(CLAIM_AT_ONCE)
                except Exception as error:  # noqa: BLE001 - logged; new items go on meanwhile
                    if pauses is None:
                        pauses = BLOCKED.delays(self._run.random)
                        _log.warning(
                            "pipeline %r: letters to replay cannot be read: %s; it tries again",
                            store.name,
                            described(error),
                            extra={"seawall_pipeline": store.name},
                        )
                    pause = next(pauses)
                else:
                    pauses = None
                if not pulled:
                    if self._is_last:
                        return
                    wakeup.until = None if pause is None else clock.now() + pause
                    await wait_async(wakeup, clock)
                self._is_interruptible = False
                await self._replay(pulled)

    async def _replay(self, pulled: Sequence[tuple[Any, ReplayClaim]]) -> None:
        run, now = self._run, self._run.now()
        items: list[Item] = [ReplayedItem(value, self.source, one, now) for value, one in pulled]
        run.begin(items, self)
        self.read += len(items)
        for item in items:
            letter: DeadLetter = item.handle.letter
            item.degradations = letter.degradations
            node = self._stages.get(letter.stage)
            if node is None:
                known = ", ".join(self._stages)
                error = LookupError(f"no stage {letter.stage!r} to replay it at: there are {known}")
                await run.bury(item, letter.stage, StageCounts(), error)
                continue
            pending = node.take(item)
            if pending is not None:
                await pending
