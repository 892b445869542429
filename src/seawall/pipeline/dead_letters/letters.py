"""Dead letters: items that were set aside, kept until they are replayed or dropped.

    letters = DatabaseDeadLetters(database, "orders")
    pipeline = Pipeline("orders", dead_letters=letters)
    page = await letters.abrowse(search="timeout")
    await letters.aretry(page.items[0].id)

A letter is dead; `retry` marks it, and it waits for a pipeline of that name, in any process; that
claims it and sends it through the stage where it failed. In the sink, the letter is deleted. If it
fails again it is dead again, with its new cause, and its attempts are added up.

Promises:
- A letter that was added is there until it has ended in a sink, was dropped by a stage, or by an
  operator. The same item is one letter, however often it is added.
- A process that dies with a claimed letter loses nothing: after the lease another one claims it. A
  letter with which `MOST_CLAIMS` processes have died is dead again.
- A value that cannot be stored holds nothing up: its text is kept, and it cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain, count
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

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
    WorkList,
    WorkPage,
    page_of,
    page_request,
)
from seawall.models.queue.jobs import BROWSED
from seawall.pipeline.item import DeadLetter
from seawall.pipeline.source import checked_name
from seawall.runtime.mutex import Mutex

MOST_DEAD_LETTERS: Final = 1000
MOST_CLAIMS: Final = 3
"""Maximum number of processes that die while they replay a letter; then it is dead again."""
CLAIM_AT_ONCE: Final = 50
LONGEST_ID: Final = 400
LONGEST_REPR: Final = 65_536
"""Characters that are kept of a value that cannot be stored."""
LOST: Final = f"{MOST_CLAIMS} processes died, or were cut off, while they replayed it"
STATES: Final = ("dead", "waiting", "claimed")


class DeadLettersFull(Exception):
    """There is no room for another dead letter: the pipeline waits until there is."""


class ReplayClaim(NamedTuple):
    """A letter that is replayed, and by which claim."""

    letter: DeadLetter
    epoch: int
    """The claim counts as long as no later one is made."""


@runtime_checkable
class DeadLetters(WorkList, Protocol):
    """Where the letters of one pipeline are kept, looked through, and claimed for replay."""

    lease: float
    """Seconds for which a claim holds, unless it is renewed."""
    poll: float | None
    """Seconds between two looks for letters to replay; None if `wakeups` ring for each."""
    wakeups: Wakeups

    async def aadd(self, letter: DeadLetter, claim: ReplayClaim | None = None) -> None:
        """Keep a letter; with `claim` it was replayed, and is dead again."""

    async def aclaim(self, most: int) -> list[ReplayClaim]:
        """Claim letters that wait to be replayed."""

    async def arenew(self, claims: Sequence[ReplayClaim]) -> list[ReplayClaim]:
        """Hold claims for another lease; return those that still count."""

    async def asettle(self, claims: Sequence[ReplayClaim]) -> None:
        """Delete letters whose items have ended well."""

    async def arelease(self, claims: Sequence[ReplayClaim]) -> None:
        """Let letters wait again: their items were not finished."""


def checked_letter_id(id_: Any) -> str:
    """Return `id_` if it can be the id of a letter, or raise."""
    if not isinstance(id_, str) or not id_:
        raise TypeError(f"id={id_!r}: write the id of a letter, such as 'orders:17'")
    return id_


def acts_on(state: str, *, can_replay: bool) -> tuple[str, ...]:
    """Return what an operator may do with a letter in that state."""
    if state == "claimed":
        return ()
    return ("retry", "drop") if state == "dead" and can_replay else ("drop",)


def repr_of(value: Any) -> str:
    """Return the `repr` of a value, cut, whatever its type does."""
    try:
        return repr(value)[:LONGEST_REPR]
    except Exception:  # noqa: BLE001 - of the user's type
        return f"<{type(value).__name__}>"


def stored_id(id_: str) -> str:
    """Return the id of a letter; of one that is too long, or unprintable, a shorter one."""
    if len(id_) <= LONGEST_ID and id_.isprintable():
        return id_
    digest = blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    kept = "".join(one if one.isprintable() else "?" for one in id_[: LONGEST_ID - 40])
    return f"{kept}~{digest}"


def whole_micros(seconds: float) -> int:
    """Return an instant as the databases keep it."""
    return round(seconds * 1e6)


class _StoredLetter:
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
        self._kept: dict[str, _StoredLetter] = {}
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
                self._kept[letter.id] = _StoredLetter(letter, now)
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

    def _item(self, kept: _StoredLetter, cut: int) -> WorkItem:
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
