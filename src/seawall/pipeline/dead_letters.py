"""Dead letters: items that were set aside, kept until somebody replays or drops them.

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

import asyncio
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import count
from secrets import token_hex
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from seawall import _checks as check
from seawall import registry
from seawall._failures import described
from seawall.clock import current_clock
from seawall.durable._connections import Ask
from seawall.durable._json import json_text
from seawall.durable._sql import containing
from seawall.durable.database import Database, Operation
from seawall.jobs._bells import READY, Bell, Bells
from seawall.jobs._work_list import (
    BEYOND,
    OPENED,
    Asked,
    WorkItem,
    WorkList,
    WorkPage,
    asked_page,
    page_of,
)
from seawall.models.queue.jobs import BROWSED
from seawall.pipeline.counts import Counts
from seawall.pipeline.engine import Reader, Run
from seawall.pipeline.item import DeadLetter, Item, Lesser
from seawall.pipeline.nodes import BLOCKED, Node
from seawall.runtime.abandon import end
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.runners import sleep_async, wait_async
from seawall.runtime.stepping import Steps

MOST_DEAD_LETTERS: Final = 1000
MOST_CLAIMS: Final = 3
"""How many processes may die with a letter that they replay; then it is dead again."""
CLAIM_AT_ONCE: Final = 50
LONGEST_ID: Final = 400
LONGEST_REPR: Final = 65_536
"""Characters that are kept of a value that cannot be stored."""
LOST: Final = f"{MOST_CLAIMS} processes died, or were cut off, while they replayed it"
STATES: Final = ("dead", "waiting", "claimed")

_log = logging.getLogger("seawall")


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
    """Seconds between two looks for letters to replay; None if `bells` ring for each."""
    bells: Bells

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


# In memory


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


class MemoryDeadLetters:
    """Dead letters in the memory of this process; when it is full, the pipeline waits."""

    WORK_STATES: tuple[str, ...] = STATES
    lease = 3600.0
    poll = None

    def __init__(self, name: str, *, most: int = MOST_DEAD_LETTERS) -> None:
        """Keep up to `most` letters of the pipeline called `name`."""
        self.name = _pipeline_name(name)
        self.bells = Bells()
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
        names = (id_, *(f"{id_}~{number}" for number in range(2, len(self._kept) + 3)))
        return next(name for name in names if name not in self._kept)

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
        asked = asked_page(self.WORK_STATES, state, search, after, limit, payloads)
        with self._mutex:
            kept = [(_micro(one.changed_at), key, one) for key, one in self._kept.items()]
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
        """Return a page of letters, as `browse` does."""
        return self.browse(state, search=search, after=after, limit=limit, payloads=payloads)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002 - it is one
        """Return a letter with the beginning of its value; None if there is none."""
        kept = self._kept.get(_letter_id(id))
        cut = OPENED if check.flag("payload", payload) else 0
        return None if kept is None else self._item(kept, cut)

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a letter, as `inspect` does."""
        return self.inspect(id, payload=payload)

    def retry(self, id: str) -> bool:  # noqa: A002
        """Have a dead letter replayed, by the pipeline while it runs; False if there is none."""
        with self._mutex:
            kept = self._kept.get(_letter_id(id))
            if kept is None or kept.state != "dead":
                return False
            kept.change("waiting", self._clock.now())
        self.bells.ring(READY)
        return True

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Have a dead letter replayed, as `retry` does."""
        return self.retry(id)

    def drop(self, id: str) -> bool:  # noqa: A002
        """Delete a letter that is not being replayed; False if there is none."""
        with self._mutex:
            kept = self._kept.get(_letter_id(id))
            if kept is None or kept.state == "claimed":
                return False
            del self._kept[id]
        return True

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Delete a letter, as `drop` does."""
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
                if len(self._kept) >= self._most:
                    raise DeadLettersFull(
                        f"{self._most} dead letters in memory: retry or drop some, or pass"
                        " dead_letters=DatabaseDeadLetters(...)"
                    )
                self._kept[letter.id] = _Kept(letter, now)
                return
            if letter.at != kept.letter.at:
                letter = letter._replace(attempts=letter.attempts + kept.letter.attempts)
            kept.letter = letter
            state = "dead" if _holds(kept, claim) else kept.state
            kept.change(state, now)

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
                if _holds(self._kept.get(claim.letter.id), claim):
                    del self._kept[claim.letter.id]

    async def arelease(self, claims: Sequence[ReplayClaim]) -> None:
        """Let letters wait again: their items were not finished."""
        with self._mutex:
            for claim in claims:
                kept = self._kept.get(claim.letter.id)
                if kept is not None and _holds(kept, claim):
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
            _acts(kept.state, can_replay=True),
        )


def _holds(kept: _Kept | None, claim: ReplayClaim | None) -> bool:
    return (
        kept is not None
        and claim is not None
        and (kept.state, kept.epoch) == ("claimed", claim.epoch)
    )


def _is_found(letter: DeadLetter, asked: Asked) -> bool:
    text = f"{letter.id} {letter.stage} {letter.cause}"
    if asked.cut:
        text = f"{text} {_shown_value(letter.value)}"
    return asked.search.lower() in text.lower()


def _shown_value(value: Any) -> str:
    try:
        return json_text(value)
    except TypeError:
        return _repr(value)


# In a database


class DatabaseDeadLetters:
    """The dead letters of one pipeline in a database, for all processes that run it."""

    WORK_STATES: tuple[str, ...] = STATES
    """The states by which `browse` lists letters."""

    def __init__(
        self,
        database: Database,
        name: str,
        *,
        lease: float = 30.0,
        poll: float = 1.0,
        encode: Callable[[Any], str] | None = None,
        decode: Callable[[str], Any] | None = None,
    ) -> None:
        """Keep the letters of the pipeline called `name`; `migrate(database)` makes the table.

        Each running pipeline looks every `poll` seconds for letters to replay, and holds those that
        it claims for `lease` seconds, which it renews. Values are written as JSON. What JSON does
        not give back as it was, such as an object of yours, cannot be replayed, unless you pass
        `encode(value)`, which returns text, and `decode(text)`. Bytes are kept as they are.
        """
        if not isinstance(database, Database):
            raise TypeError(f"DatabaseDeadLetters({database!r}): pass a Database")
        if (encode is None) != (decode is None):
            raise TypeError("encode, decode: pass both, or neither")
        self.database = database
        self.name = _pipeline_name(name)
        self.lease = check.seconds("lease", lease)
        self.poll: float | None = check.seconds("poll", poll)
        self.bells = Bells()
        self._encode = json_text if encode is None else check.plain_function("encode", encode)
        self._decode = json.loads if decode is None else check.plain_function("decode", decode)
        registry.enter(self, "dead_letters", name, ask="acounts", local=False)

    def __repr__(self) -> str:
        return f"<DatabaseDeadLetters of {self.name!r} in {self.database!r}>"

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
        """Return a page of the letters that are dead, waiting or claimed, the latest first.

        Up to 100. `search` is looked for in id, stage, cause and value, whatever the case of
        letters. `after` is `next` of the page before. One call looks at a bounded number of
        letters: a page may have fewer than `limit`, and still a `next`. Without `payloads`, values
        are neither read nor searched.
        """
        return self.database.run(self._browsing(state, search, after, limit, payloads=payloads))

    async def abrowse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of letters, as `browse` does."""
        asked = self._browsing(state, search, after, limit, payloads=payloads)
        return await self.database.arun(asked)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002 - it is one
        """Return a letter with up to 64 Ki characters of its value; None if there is none."""
        return self.database.run(self._inspecting(id, payload=payload))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return a letter, as `inspect` does."""
        return await self.database.arun(self._inspecting(id, payload=payload))

    def retry(self, id: str) -> bool:  # noqa: A002
        """Have a dead letter replayed by a running pipeline; False if there is none.

        Also False if its value could not be stored: such a letter has no "retry" among its `acts`.
        """
        return self._retried(self.database.run(self._changing("retry", id)))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Have a dead letter replayed, as `retry` does."""
        return self._retried(await self.database.arun(self._changing("retry", id)))

    def drop(self, id: str) -> bool:  # noqa: A002
        """Delete a letter that is not being replayed; False if there is none."""
        return self.database.run(self._changing("drop", id))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Delete a letter, as `drop` does."""
        return await self.database.arun(self._changing("drop", id))

    def counts(self) -> dict[str, tuple[int, float]]:
        """Return how many letters are in each state, and since when the first; reads the table."""
        return self._counted(self.database.run(self._counting))

    async def acounts(self) -> dict[str, tuple[int, float]]:
        """Count the letters, as `counts` does."""
        return self._counted(await self.database.arun(self._counting))

    # For the pipeline

    async def aadd(self, letter: DeadLetter, claim: ReplayClaim | None = None) -> None:
        """Keep a letter; the same item is one, and its attempts are added up."""
        form, text = self._written(letter)
        arguments = {
            "pipeline": self.name,
            "id": stored_id(letter.id),
            "stage": letter.stage,
            "format": form,
            "value": text,
            "lesser": json.dumps(letter.lesser),
            "error": letter.cause,
            "attempts": letter.attempts,
            "failed_at": _micro(letter.at),
            "epoch": 0 if claim is None else claim.epoch,
        }
        await self.database.arun(partial(_doing, [Ask("dead_letters.add", arguments)]))

    async def aclaim(self, most: int) -> list[ReplayClaim]:
        """Claim letters that wait to be replayed, and those whose lease is over."""
        return await self.database.arun(partial(self._claiming, most))

    async def arenew(self, claims: Sequence[ReplayClaim]) -> list[ReplayClaim]:
        """Hold claims for another lease; return those that still count."""
        return await self.database.arun(partial(self._renewing, claims))

    async def asettle(self, claims: Sequence[ReplayClaim]) -> None:
        """Delete letters whose items have ended well."""
        await self.database.arun(partial(_doing, self._each("settle", claims)))

    async def arelease(self, claims: Sequence[ReplayClaim]) -> None:
        """Let letters wait again: their items were not finished."""
        await self.database.arun(partial(_doing, self._each("release", claims)))

    # How it is done

    def _browsing(
        self, state: str, search: str, after: str | None, limit: int, *, payloads: bool
    ) -> Operation[WorkPage]:
        asked = asked_page(self.WORK_STATES, state, search, after, limit, payloads)
        arguments = {
            "pipeline": self.name,
            "state": state,
            "pattern": containing(asked.search),
            "cut": asked.cut,
            "number": asked.number if asked.id else BEYOND,
            "id": asked.id,
            "most": BROWSED,
        }

        def steps() -> Steps[WorkPage]:
            rows = yield Ask("dead_letters.browse", arguments)
            return page_of(rows, asked.limit, self._item)

        return steps

    def _inspecting(self, id_: str, *, payload: bool) -> Operation[WorkItem | None]:
        cut = OPENED if check.flag("payload", payload) else 0
        arguments = {**self._named(id_), "cut": cut}

        def steps() -> Steps[WorkItem | None]:
            rows = yield Ask("dead_letters.inspect", arguments)
            return self._item(rows[0]) if rows else None

        return steps

    def _changing(self, which: str, id_: str) -> Operation[bool]:
        asked = Ask(f"dead_letters.{which}", self._named(id_))

        def steps() -> Steps[bool]:
            return bool((yield asked))

        return steps

    def _named(self, id_: str) -> dict[str, Any]:
        return {"pipeline": self.name, "id": stored_id(_letter_id(id_))}

    def _retried(self, done: bool) -> bool:  # noqa: FBT001 - what the database said
        if done:
            self.bells.ring(READY)
        return done

    def _counting(self) -> Steps[dict[str, tuple[int, float]]]:
        rows = yield Ask("dead_letters.counts", {"pipeline": self.name})
        found = {state: (count, max(0, now - since) / 1e6) for state, count, since, now in rows}
        return {state: found.get(state, (0, 0.0)) for state in STATES}

    def _counted(self, counts: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
        registry.answered(self, counts)
        return counts

    def _claiming(self, most: int) -> Steps[list[ReplayClaim]]:
        lease = _micro(self.lease)
        claims = []
        found = yield Ask("dead_letters.due", {"pipeline": self.name, "most": most})
        # In the order of their ids, as every other process does it: no two wait for each other.
        for (id_,) in sorted(found):
            given = {"pipeline": self.name, "id": id_}
            rows = yield Ask("dead_letters.take", {**given, "lease": lease})
            for claimed, epoch, *row in rows:
                if claimed > MOST_CLAIMS:
                    why = LOST
                else:
                    try:
                        claims.append(ReplayClaim(self._read(id_, row), epoch))
                        continue
                    except Exception as error:  # noqa: BLE001 - of the user's function, or garbled
                        why = f"its value cannot be read: {described(error)}"
                yield Ask("dead_letters.refuse", {**given, "epoch": epoch, "error": why})
        return claims

    def _renewing(self, claims: Sequence[ReplayClaim]) -> Steps[list[ReplayClaim]]:
        held = []
        for claim in sorted(claims, key=lambda one: one.letter.id):
            (ask,) = self._each("renew", [claim])
            ask.arguments["lease"] = _micro(self.lease)
            if (yield ask):
                held.append(claim)
        return held

    def _each(self, which: str, claims: Iterable[ReplayClaim]) -> list[Ask]:
        return [
            Ask(
                f"dead_letters.{which}",
                {"pipeline": self.name, "id": claim.letter.id, "epoch": claim.epoch},
            )
            for claim in sorted(claims, key=lambda one: one.letter.id)
        ]

    # Values

    def _written(self, letter: DeadLetter) -> tuple[str, str]:
        """Return how a value is stored, and as which text."""
        value = letter.value
        try:
            if type(value) is bytes:
                return _bytes_text(value)
            text = self._encode(value)
            _check_text(text, self._decode(text), value)
        except Exception as error:  # noqa: BLE001 - of the user's functions and types
            _log.warning(
                "pipeline %r: dead letter %s cannot be replayed, since its value cannot be stored:"
                " %s; pass encode= and decode=",
                self.name,
                letter.id,
                described(error),
                extra={"seawall_item": letter.id, "seawall_stage": letter.stage},
            )
            return "repr", _storable(_repr(value))
        return "json", text

    def _read(self, id_: str, row: Sequence[Any]) -> DeadLetter:
        stage, form, text, lesser, error, attempts, failed_at = row
        if form == "json":
            value = self._decode(text)
        else:
            value = text.encode() if form == "utf-8" else b64decode(text)
        why = tuple(Lesser(*one) for one in json.loads(lesser))
        return DeadLetter(id_, value, stage, error, attempts, failed_at / 1e6, why)

    def _item(self, row: tuple[Any, ...]) -> WorkItem:
        changed, id_, state, stage, form, attempts, error, created, size, value, _, now = row
        return WorkItem(
            id_,
            state,
            stage,
            self.name,
            None,
            attempts,
            max(0, now - created) / 1e6,
            (now - changed) / 1e6,
            error,
            size,
            (value or "").encode("utf-8", "replace"),
            _acts(state, can_replay=form != "repr"),
        )


def _letter_id(id_: Any) -> str:
    if not isinstance(id_, str) or not id_:
        raise TypeError(f"id={id_!r}: write the id of a letter, such as 'orders:17'")
    return id_


def _doing(asked: Iterable[Ask]) -> Steps[None]:
    for one in asked:  # noqa: UP028 - `yield` is sent the rows, which a list cannot take
        yield one


def _acts(state: str, *, can_replay: bool) -> tuple[str, ...]:
    if state == "claimed":
        return ()
    return ("retry", "drop") if state == "dead" and can_replay else ("drop",)


def letter_ids(store: Any) -> Callable[[str], str]:
    """Return what makes ids of letters for items whose ids their source may use again.

    Two such items never share a letter, of whatever run or process they are.
    """
    if isinstance(store, MemoryDeadLetters):
        return store._free_id  # noqa: SLF001 - of this module
    run, numbers = token_hex(4), count(1)
    return lambda id_: f"{id_}@{run}-{next(numbers)}"


def stored_id(id_: str) -> str:
    """Return the id of a letter; of one that is too long, or unprintable, a shorter one."""
    if len(id_) <= LONGEST_ID and id_.isprintable():
        return id_
    digest = blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    kept = "".join(one if one.isprintable() else "?" for one in id_[: LONGEST_ID - 40])
    return f"{kept}~{digest}"


def _check_text(text: str, read: Any, value: Any) -> None:
    """Raise if a database cannot hold the text, or if reading it gives another value."""
    text.encode()
    if "\0" in text:
        raise ValueError("the text has NUL characters")
    if not bool(read == value):
        raise TypeError(f"{type(value).__name__} comes back as something else")


def _bytes_text(value: bytes) -> tuple[str, str]:
    try:
        text = value.decode()
    except ValueError:
        text = "\0"
    return ("base64", b64encode(value).decode()) if "\0" in text else ("utf-8", text)


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _repr(value: Any) -> str:
    try:
        return repr(value)[:LONGEST_REPR]
    except Exception:  # noqa: BLE001 - of the user's type
        return f"<{type(value).__name__}>"


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _pipeline_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r}: write the name of the pipeline, such as 'orders'")
    return name


# Replaying


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
        """Begin without claims."""
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
        ended = self._held_of(handles)
        if ended:
            await self.store.asettle(ended)
            self._forget(ended)

    async def give_back(self, handles: Sequence[ReplayClaim]) -> None:
        """Let the letters wait again."""
        left = self._held_of(handles)
        if left:
            await self.store.arelease(left)
            self._forget(left)

    async def close(self) -> None:
        """Renew no more, and give back what was claimed too late."""
        if self._renewal is not None:
            await end([self._renewal])
        claiming, self._claiming = self._claiming, None
        if claiming is not None:
            await asyncio.wait([claiming], timeout=1.0)
            if claiming.done() and not claiming.cancelled() and claiming.exception() is None:
                await self.store.arelease(claiming.result())

    def _held_of(self, claims: Iterable[ReplayClaim]) -> list[ReplayClaim]:
        return [claim for claim in claims if self._held.get(claim.letter.id) is claim]

    def _forget(self, claims: Iterable[ReplayClaim]) -> None:
        for claim in claims:
            self._held.pop(claim.letter.id, None)

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
            for lost in claims:
                if lost.letter.id not in renewed and self._held_of([lost]):
                    self._forget([lost])
                    _log.warning(
                        "pipeline %r: the claim of letter %s was lost; it may be replayed twice",
                        self.store.name,
                        lost.letter.id,
                        extra={"seawall_item": lost.letter.id, "seawall_stage": lost.letter.stage},
                    )


class ReplayReader(Reader):
    """Sends letters that are to be replayed through the stages where they failed."""

    def __init__(self, run: Run, letters: LetterSource, stages: Mapping[str, Node]) -> None:
        """Read `letters` of a run whose stages are known by name."""
        super().__init__(run, letters, next(iter(stages.values())))
        self._letters = letters
        self._stages = stages
        self._is_last = False

    def finish(self) -> None:
        """End when no more letters wait: the other sources are over."""
        self._is_last = True
        self._letters.store.bells.ring(READY)

    async def _read(self) -> None:
        store, clock = self._letters.store, current_clock()
        pauses = None
        with Bell(store.bells, READY) as bell:
            while not self._is_halted:
                bell.reset()
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
                    bell.until = None if pause is None else clock.now() + pause
                    await wait_async(bell, clock)
                self._is_interruptible = False
                await self._replay(pulled)

    async def _replay(self, pulled: Sequence[tuple[Any, ReplayClaim]]) -> None:
        run = self._run
        now = run.now()
        items: list[Item] = [
            ReplayedItem(value, self.source, claim, now) for value, claim in pulled
        ]
        run.begin(items, self)
        self.read += len(items)
        for item in items:
            letter: DeadLetter = item.handle.letter
            item.lesser = letter.lesser
            node = self._stages.get(letter.stage)
            if node is None:
                known = ", ".join(self._stages)
                error = LookupError(f"no stage {letter.stage!r} to replay it at: there are {known}")
                await run.bury(item, letter.stage, Counts(), error)
                continue
            pending = node.take(item, now)
            if pending is not None:
                await pending
