"""Dead letters in the memory of this process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
from seawall.clock import current_clock
from seawall.durable.database.json_values import json_text
from seawall.jobs.wakeups import READY, Wakeups
from seawall.jobs.work_list import (
    BEYOND,
    OPENED,
    PageRequest,
    WorkItem,
    WorkPage,
    page_of,
    page_request,
)
from seawall.models.queue.jobs import BROWSED
from seawall.pipeline.dead_letters.letters import (
    MOST_DEAD_LETTERS,
    STATES,
    DeadLettersFull,
    ReplayClaim,
    acts_on,
    checked_letter_id,
    repr_of,
    whole_micros,
)
from seawall.pipeline.item import DeadLetter
from seawall.pipeline.source import checked_name
from seawall.runtime.mutex import Mutex

_log = logging.getLogger("seawall")


class _Kept:
    """A letter in memory."""

    __slots__ = ("added_at", "changed_at", "epoch", "letter", "state")

    def __init__(self, letter: DeadLetter, now: float) -> None:
        self.letter = letter
        self.added_at = self.changed_at = now
        self.state = "dead"
        self.epoch = 0

    def change(self, state: str, now: float) -> None:
        self.state, self.changed_at = state, now

    def counts(self, claim: ReplayClaim | None) -> bool:
        """Return whether `claim` is the one by which the letter is replayed now."""
        return self.state == "claimed" and claim is not None and claim.epoch == self.epoch


class MemoryDeadLetters:
    """Dead letters in the memory of this process; when it is full, the pipeline waits."""

    WORK_STATES: tuple[str, ...] = STATES
    lease = 3600.0
    poll = None

    def __init__(self, name: str, *, most: int = MOST_DEAD_LETTERS) -> None:
        """Keep up to `most` letters of the pipeline called `name`."""
        self.name = checked_name(name, "name of the pipeline")
        self.wakeups = Wakeups()
        self._most = check.count("most", most)
        self._kept: dict[str, _Kept] = {}
        self._clock = current_clock()
        self._mutex = Mutex()
        survives_fork(self)
        registry.enter(self, "dead_letters", name)

    def __repr__(self) -> str:
        return f"<MemoryDeadLetters of {self.name!r}: {len(self._kept)} of {self._most}>"

    def _after_fork(self) -> None:
        self._mutex = Mutex()

    @property
    def letters(self) -> list[DeadLetter]:
        """All of them, the oldest first."""
        with self._mutex:
            return [kept.letter for kept in self._kept.values()]

    def _free_id(self, id_: str) -> str:
        """Return `id_`, or, if a letter has it, one like it that no letter has."""
        names = chain([id_], (f"{id_}~{number}" for number in count(2)))
        return next(name for name in names if name not in self._kept)

    @property
    def _is_full(self) -> bool:
        # Letters that are replayed do not count: a stage whose workers wait for room for others
        # could not take them, and so make it.
        if len(self._kept) < self._most:
            return False
        return sum(kept.state != "claimed" for kept in self._kept.values()) >= self._most

    # For operators

    def browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of the letters of a state, the latest first; see `DatabaseDeadLetters`."""
        asked = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        with self._mutex:
            kept = [(whole_micros(one.changed_at), key, one) for key, one in self._kept.items()]
        place = (asked.number, asked.id) if asked.id else (BEYOND, "")
        found = [row for row in kept if row[2].state == state and row[:2] < place]
        found.sort(key=lambda row: row[:2], reverse=True)
        rows = [(*row, _is_found(row[2].letter, asked), None) for row in found[:BROWSED]]
        return page_of(rows, asked.limit, lambda row: self._item(row[2], asked.cut))

    async def abrowse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Async twin of `browse`."""
        return self.browse(state, search=search, after=after, limit=limit, payloads=payloads)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002 - it is one
        """Return a letter with the beginning of its value; None if there is none."""
        kept = self._kept.get(checked_letter_id(id))
        cut = OPENED if check.flag("payload", payload) else 0
        return None if kept is None else self._item(kept, cut)

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Async twin of `inspect`."""
        return self.inspect(id, payload=payload)

    def retry(self, id: str) -> bool:  # noqa: A002
        """Have a dead letter replayed, by the pipeline while it runs; False if there is none."""
        with self._mutex:
            kept = self._kept.get(checked_letter_id(id))
            if kept is None or kept.state != "dead":
                return False
            kept.change("waiting", self._clock.now())
        self.wakeups.ring(READY)
        return True

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Async twin of `retry`."""
        return self.retry(id)

    def drop(self, id: str) -> bool:  # noqa: A002
        """Delete a letter that is not being replayed; False if there is none."""
        with self._mutex:
            kept = self._kept.get(checked_letter_id(id))
            if kept is None or kept.state == "claimed":
                return False
            del self._kept[id]
        return True

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Async twin of `drop`."""
        return self.drop(id)

    def snapshot(self) -> dict[str, Any]:
        """Return how many letters there are in each state."""
        with self._mutex:
            states = [kept.state for kept in self._kept.values()]
        return {state: states.count(state) for state in STATES}

    # For the pipeline

    async def aadd(self, letter: DeadLetter, claim: ReplayClaim | None = None) -> None:
        """Keep a letter; the same item is one, and its attempts are added up."""
        now = self._clock.now()
        with self._mutex:
            kept = self._kept.get(letter.id)
            if kept is None:
                if self._is_full:
                    raise DeadLettersFull(
                        f"{self._most} dead letters in memory: retry or drop some, or pass"
                        " dead_letters=DatabaseDeadLetters(...)"
                    )
                self._kept[letter.id] = _Kept(letter, now)
                return
            if letter.at != kept.letter.at:
                letter = letter._replace(attempts=letter.attempts + kept.letter.attempts)
            kept.letter = letter
            kept.change("dead" if kept.counts(claim) else kept.state, now)

    async def aclaim(self, most: int) -> list[ReplayClaim]:
        """Claim letters that wait to be replayed."""
        claims: list[ReplayClaim] = []
        with self._mutex:
            for kept in self._kept.values():
                if kept.state == "waiting" and len(claims) < most:
                    kept.epoch += 1
                    kept.change("claimed", self._clock.now())
                    claims.append(ReplayClaim(kept.letter, kept.epoch))
        return claims

    async def arenew(self, claims: Sequence[ReplayClaim]) -> list[ReplayClaim]:
        """Return all: a claim holds until its run has ended."""
        return list(claims)

    async def asettle(self, claims: Sequence[ReplayClaim]) -> None:
        """Delete letters whose items have ended well."""
        with self._mutex:
            for claim in claims:
                kept = self._kept.get(claim.letter.id)
                if kept is not None and kept.counts(claim):
                    del self._kept[claim.letter.id]

    async def arelease(self, claims: Sequence[ReplayClaim]) -> None:
        """Let letters wait again: their items were not finished."""
        with self._mutex:
            for claim in claims:
                kept = self._kept.get(claim.letter.id)
                if kept is not None and kept.counts(claim):
                    kept.change("waiting", self._clock.now())

    def _item(self, kept: _Kept, cut: int) -> WorkItem:
        letter, now = kept.letter, self._clock.now()
        value = _shown_value(letter.value).encode("utf-8", "replace")
        return WorkItem(
            letter.id,
            kept.state,
            letter.stage,
            self.name,
            None,
            letter.attempts,
            now - kept.added_at,
            now - kept.changed_at,
            letter.cause,
            len(value),
            value[:cut],
            acts_on(kept.state, can_replay=True),
            letter.traceback,
        )


def _is_found(letter: DeadLetter, asked: PageRequest) -> bool:
    text = f"{letter.id} {letter.stage} {letter.cause}"
    if asked.cut:
        text = f"{text} {_shown_value(letter.value)}"
    return asked.search.lower() in text.lower()


def _shown_value(value: Any) -> str:
    try:
        return json_text(value)
    except TypeError:
        return repr_of(value)
