"""Dead letters in PostgreSQL or SQLite: they outlive the process, and any process replays them."""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from seawall import _checks as check
from seawall import registry
from seawall._failures import described, split_report
from seawall.durable.database.connections import NamedQuery
from seawall.durable.database.database import Database
from seawall.durable.database.json_values import json_text
from seawall.durable.database.statements import containing
from seawall.durable.database.twins import transaction_twins, twins
from seawall.jobs.wakeups import READY, Wakeups
from seawall.jobs.work_list import BEYOND, OPENED, WorkItem, WorkPage, page_of, page_request
from seawall.models.queue.jobs import BROWSED
from seawall.pipeline.dead_letters.letters import (
    LOST,
    MOST_CLAIMS,
    STATES,
    ReplayClaim,
    acts_on,
    checked_letter_id,
    repr_of,
    stored_id,
    whole_micros,
)
from seawall.pipeline.item import DeadLetter, ItemDegradation
from seawall.pipeline.source import checked_name
from seawall.runtime.driver import Steps

_log = logging.getLogger("seawall")


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
        self.name = checked_name(name, "name of the pipeline")
        self.lease = check.seconds("lease", lease)
        self.poll: float | None = check.seconds("poll", poll)
        self.wakeups = Wakeups()
        self._encode = json_text if encode is None else check.plain_function("encode", encode)
        self._decode = json.loads if decode is None else check.plain_function("decode", decode)
        registry.enter(self, "dead_letters", name, ask="acounts", local=False)

    def __repr__(self) -> str:
        return f"<DatabaseDeadLetters of {self.name!r} in {self.database!r}>"

    # For operators

    def _browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> Steps[WorkPage]:
        """Return a page of the letters that are dead, waiting or claimed, the latest first.

        Up to 100. `search` is looked for in id, stage, cause and value, whatever the case of
        letters. `after` is `next` of the page before. One call looks at a bounded number of
        letters: a page may have fewer than `limit`, and still a `next`. Without `payloads`, values
        are neither read nor searched.
        """
        asked = page_request(self.WORK_STATES, state, search, after, limit, payloads)
        arguments = {
            "pipeline": self.name,
            "state": state,
            "pattern": containing(asked.search),
            "cut": asked.cut,
            "number": asked.number if asked.id else BEYOND,
            "id": asked.id,
            "most": BROWSED,
        }
        rows = yield NamedQuery("dead_letters.browse", arguments).alone
        return page_of(rows, asked.limit, self._item)

    browse, abrowse = twins(_browse)

    def _inspect(self, id: str, *, payload: bool = True) -> Steps[WorkItem | None]:  # noqa: A002
        """Return a letter with up to 64 Ki characters of its value; None if there is none."""
        cut = OPENED if check.flag("payload", payload) else 0
        rows = yield NamedQuery("dead_letters.inspect", {**self._named(id), "cut": cut}).alone
        return self._item(rows[0]) if rows else None

    inspect, ainspect = twins(_inspect)

    def _retry(self, id: str) -> Steps[bool]:  # noqa: A002
        """Have a dead letter replayed by a running pipeline; False if there is none.

        Also False if its value could not be stored: such a letter has no "retry" among its `acts`.
        """
        done = bool((yield NamedQuery("dead_letters.retry", self._named(id)).alone))
        if done:
            self.wakeups.ring(READY)
        return done

    retry, aretry = twins(_retry)

    def _drop(self, id: str) -> Steps[bool]:  # noqa: A002
        """Delete a letter that is not being replayed; False if there is none."""
        return bool((yield NamedQuery("dead_letters.drop", self._named(id)).alone))

    drop, adrop = twins(_drop)

    def _counts(self) -> Steps[dict[str, tuple[int, float]]]:
        """Return how many letters are in each state, and since when the first; reads the table."""
        rows = yield NamedQuery("dead_letters.counts", {"pipeline": self.name})
        found = {state: (count, max(0, now - since) / 1e6) for state, count, since, now in rows}
        counts = {state: found.get(state, (0, 0.0)) for state in STATES}
        registry.answered(self, counts)
        return counts

    counts, acounts = transaction_twins(_counts)

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
            "lesser": json.dumps(letter.degradations),
            "error": f"{letter.cause}\n{letter.traceback}" if letter.traceback else letter.cause,
            "attempts": letter.attempts,
            "failed_at": whole_micros(letter.at),
            "epoch": 0 if claim is None else claim.epoch,
        }
        await self.database.arun(partial(_doing, [NamedQuery("dead_letters.add", arguments)]))

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

    def _named(self, id_: str) -> dict[str, Any]:
        return {"pipeline": self.name, "id": stored_id(checked_letter_id(id_))}

    def _claiming(self, most: int) -> Steps[list[ReplayClaim]]:
        lease = whole_micros(self.lease)
        claims = []
        found = yield NamedQuery("dead_letters.due", {"pipeline": self.name, "most": most})
        # In the order of their ids, as every other process does it: no two wait for each other.
        for (id_,) in sorted(found):
            given = {"pipeline": self.name, "id": id_}
            rows = yield NamedQuery("dead_letters.take", {**given, "lease": lease})
            for claimed, epoch, *row in rows:
                if claimed > MOST_CLAIMS:
                    why = LOST
                else:
                    try:
                        claims.append(ReplayClaim(self._read(id_, row), epoch))
                        continue
                    except Exception as error:  # noqa: BLE001 - of the user's function, or garbled
                        why = f"its value cannot be read: {described(error)}"
                yield NamedQuery("dead_letters.refuse", {**given, "epoch": epoch, "error": why})
        return claims

    def _renewing(self, claims: Sequence[ReplayClaim]) -> Steps[list[ReplayClaim]]:
        held = []
        for claim in sorted(claims, key=lambda one: one.letter.id):
            (ask,) = self._each("renew", [claim])
            ask.arguments["lease"] = whole_micros(self.lease)
            if (yield ask):
                held.append(claim)
        return held

    def _each(self, which: str, claims: Iterable[ReplayClaim]) -> list[NamedQuery]:
        return [
            NamedQuery(
                f"dead_letters.{which}",
                {"pipeline": self.name, "id": claim.letter.id, "epoch": claim.epoch},
            )
            for claim in sorted(claims, key=lambda one: one.letter.id)
        ]

    # Values

    def _written(self, letter: DeadLetter) -> tuple[str, str]:
        """Return the form in which a value is stored, and its text."""
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
            return "repr", _storable(repr_of(value))
        return "json", text

    def _read(self, id_: str, row: Sequence[Any]) -> DeadLetter:
        stage, form, text, degradations, error, attempts, failed_at = row
        if form == "json":
            value = self._decode(text)
        else:
            value = text.encode() if form == "utf-8" else b64decode(text)
        why = tuple(ItemDegradation(*one) for one in json.loads(degradations))
        cause, trace = split_report(error)
        return DeadLetter(id_, value, stage, cause, attempts, failed_at / 1e6, why, trace)

    def _item(self, row: tuple[Any, ...]) -> WorkItem:
        changed, id_, state, stage, form, attempts, error, created, size, value, _, now = row
        cause, trace = split_report(error)
        return WorkItem(
            id_,
            state,
            stage,
            self.name,
            None,
            attempts,
            max(0, now - created) / 1e6,
            (now - changed) / 1e6,
            cause,
            size,
            (value or "").encode("utf-8", "replace"),
            acts_on(state, can_replay=form != "repr"),
            trace,
        )


def _doing(asked: Iterable[NamedQuery]) -> Steps[None]:
    for one in asked:  # noqa: UP028 - `yield` is sent the rows, which a list cannot take
        yield one


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
