"""Looking after an outbox: what went wrong, what may go, how it stands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final
from uuid import UUID

from seawall import _checks as check
from seawall import registry
from seawall._failures import split_report
from seawall.durable._cleaning import Cleaning
from seawall.durable._connections import Ask
from seawall.durable._outbox_events import BlockedAggregate, DeadEvent, event_of, new_id, text
from seawall.durable._outbox_steps import Settled, Taken, adding, fetching, settling
from seawall.durable._sql import containing
from seawall.durable.database import Database, Operation
from seawall.jobs import WorkItem, WorkPage
from seawall.jobs._work_list import BEYOND, OPENED, Asked, asked_page, page_of
from seawall.models.queue.jobs import BROWSED
from seawall.runtime.stepping import Steps

MOST_LISTED: Final = 1_000
CLEAN_AT_ONCE: Final = 1_000
"""Rows that one transaction deletes, unless told otherwise."""
KEEP_DEAD: Final = 30 * 86_400.0


class Care:
    """What somebody asks of an outbox who looks after it."""

    WORK_STATES = ("dead", "blocked", "waiting")
    """The states by which `browse` lists events."""

    database: Database
    name: str

    # What an operator looks through

    def browse(
        self,
        state: str = "dead",
        *,
        search: str = "",
        after: str | None = None,
        limit: int = 50,
        payloads: bool = True,
    ) -> WorkPage:
        """Return a page of the events that are dead, blocked or waiting, up to 100.

        Of dead ones the latest are first; of an aggregate that is blocked there is the event that
        blocks it. `search` is looked for in id, type, aggregate and error, whatever the case of
        letters. `after` is `next` of the page before. One call looks at a bounded number of events:
        a page may have fewer than `limit`, and still a `next`. Without `payloads`, these are not
        read.
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
        """Return a page of events, as `browse` does."""
        asked = self._browsing(state, search, after, limit, payloads=payloads)
        return await self.database.arun(asked)

    def _browsing(
        self, state: str, search: str, after: str | None, limit: int, *, payloads: bool
    ) -> Operation[WorkPage]:
        asked = asked_page(self.WORK_STATES, state, search, after, limit, payloads)
        if state == "waiting" and asked.id and not asked.id.isdecimal():
            raise ValueError(f"after={after!r:.50}: write None, or `next` of the page before")
        return lambda: self._page(asked)

    def _page(self, asked: Asked) -> Steps[WorkPage]:
        number, id_ = asked.number, asked.id
        if not id_:
            number, id_ = (BEYOND if asked.state == "dead" else -BEYOND), ""
        arguments: dict[str, Any] = {
            "outbox": self.name,
            "pattern": containing(asked.search),
            "cut": asked.cut,
            "number": number,
            "most": BROWSED,
        }
        if asked.state == "dead":
            arguments["id"] = id_
        elif asked.state == "waiting":
            arguments["id"] = int(id_ or 0)
        rows = yield Ask(f"outbox.browse_{asked.state}", arguments)
        item = _waiting_item if asked.state == "waiting" else _item
        return page_of(rows, asked.limit, item)

    def inspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return an event with up to 64 KiB of its payload; None if there is none."""
        return self.database.run(lambda: self._inspecting(id, payload=payload))

    async def ainspect(self, id: str, *, payload: bool = True) -> WorkItem | None:  # noqa: A002
        """Return an event, as `inspect` does."""
        return await self.database.arun(lambda: self._inspecting(id, payload=payload))

    def _inspecting(self, id_: str, *, payload: bool) -> Steps[WorkItem | None]:
        cut = OPENED if check.flag("payload", payload) else 0
        asked = {"outbox": self.name, "id": text("id", id_), "cut": cut}
        rows = yield Ask("outbox.inspect", asked)
        return _item(rows[0]) if rows else None

    # What went wrong

    def dead(self, limit: int = 100) -> list[DeadEvent]:
        """Return events that were put aside, the oldest first."""
        return self.database.run(lambda: self._dead(limit))

    async def adead(self, limit: int = 100) -> list[DeadEvent]:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._dead(limit))

    def _dead(self, limit: int) -> Steps[list[DeadEvent]]:
        bound = check.count("limit", limit, maximum=MOST_LISTED)
        rows = yield Ask("outbox.dead", {"outbox": self.name, "most": bound})
        letters = []
        for row in rows:
            error, trace = split_report(row[9] or "")
            letters.append(DeadEvent(event_of(row[:8]), row[8], error, row[10] / 1e6, trace))
        return letters

    def blocked(self, limit: int = 100) -> list[BlockedAggregate]:
        """Return the aggregates that wait for `unblock`."""
        return self.database.run(lambda: self._blocked(limit))

    async def ablocked(self, limit: int = 100) -> list[BlockedAggregate]:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._blocked(limit))

    def _blocked(self, limit: int) -> Steps[list[BlockedAggregate]]:
        bound = check.count("limit", limit, maximum=MOST_LISTED)
        rows = yield Ask("outbox.blocked", {"outbox": self.name, "most": bound})
        return [
            BlockedAggregate(aggregate, aggregate_id, attempts, *split_report(error or ""))
            for aggregate, aggregate_id, attempts, error in rows
        ]

    def retry(self, id: str) -> bool:  # noqa: A002
        """Try an event again that is dead or blocks its aggregate; False if it is neither.

        A dead one is put back behind its aggregate's others, with its id.
        """
        return self.database.run(lambda: self._retry(id))

    async def aretry(self, id: str) -> bool:  # noqa: A002
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._retry(id))

    def _retry(self, id_: str) -> Steps[bool]:
        given = {"outbox": self.name, "id": text("id", id_)}
        rows = yield Ask("outbox.exhume", given)
        if not rows:
            blocked = yield from self._blocked_by(id_)
            return blocked is not None and (yield from self._unblock(*blocked, skip=False))
        names = ("aggregate", "aggregate_id", "type", "payload", "headers")
        arguments = {**given, **dict(zip(names, rows[0], strict=True))}
        arguments["payload"] = bytes(arguments["payload"])
        yield from adding(self.database.dialect, arguments)
        return True

    def drop(self, id: str) -> bool:  # noqa: A002
        """Delete an event for good that is dead or blocks its aggregate; False if it is neither."""
        return self.database.run(lambda: self._drop(id))

    async def adrop(self, id: str) -> bool:  # noqa: A002
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._drop(id))

    def _drop(self, id_: str) -> Steps[bool]:
        given = {"outbox": self.name, "id": text("id", id_)}
        if (yield Ask("outbox.exhume", given)):
            return True
        blocked = yield from self._blocked_by(id_)
        if blocked is None or not (yield from self._unblock(*blocked, skip=True)):
            return False
        return bool((yield Ask("outbox.exhume", given)))

    def _blocked_by(self, id_: str) -> Steps[tuple[str, str] | None]:
        """Return the aggregate that an event blocks."""
        rows = yield Ask("outbox.inspect", {"outbox": self.name, "id": id_, "cut": 0})
        return rows[0][4:6] if rows and rows[0][2] == "blocked" else None

    def unblock(
        self, aggregate: str, aggregate_id: str | int | UUID, *, skip: bool = False
    ) -> bool:
        """Let a blocked aggregate go on; with `skip` without the event that blocks it.

        That event is then dead: see `dead()` and `retry()`. False, if it is not blocked.
        """
        return self.database.run(lambda: self._unblock(aggregate, aggregate_id, skip=skip))

    async def aunblock(
        self, aggregate: str, aggregate_id: str | int | UUID, *, skip: bool = False
    ) -> bool:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._unblock(aggregate, aggregate_id, skip=skip))

    def _unblock(
        self, aggregate: str, aggregate_id: str | int | UUID, *, skip: bool
    ) -> Steps[bool]:
        where = {
            "outbox": self.name,
            "aggregate": text("aggregate", aggregate),
            "aggregate_id": text("aggregate_id", aggregate_id),
        }
        if not check.flag("skip", skip):
            return bool((yield Ask("outbox.unblock", where)))
        owner, dialect = new_id(), self.database.dialect
        rows = yield Ask("outbox.hold_blocked", {**where, "owner": owner})
        for number, epoch, attempts, error in rows:
            head = yield Ask("outbox.head", {"outbox": self.name, "lane": number})
            taken = [Taken(number, epoch, attempts, head[0][0] or 0)]
            (lane,) = yield from fetching(dialect, self.name, taken, 1, 1, 0)
            action = "skip" if lane.events else "done"
            ended = Settled(lane, 0, action, attempts, 0, error or "")
            yield from settling(dialect, self.name, owner, [ended], keep=False)
        return bool(rows)

    # Keeping it small

    def cleanup(
        self,
        *,
        keep: float = 0.0,
        keep_dead: float = KEEP_DEAD,
        batch: int = CLEAN_AT_ONCE,
        within: float = 10.0,
    ) -> int:
        """Delete delivered events older than `keep` seconds, dead ones older than `keep_dead`.

        Batch by batch; returns how many. It ends after about `within` seconds, done or not.
        """
        return Cleaning(batch, within, *self._to_clean(keep, keep_dead)).run(self.database)

    async def acleanup(
        self,
        *,
        keep: float = 0.0,
        keep_dead: float = KEEP_DEAD,
        batch: int = CLEAN_AT_ONCE,
        within: float = 10.0,
    ) -> int:
        """Do the same, awaiting."""
        return await Cleaning(batch, within, *self._to_clean(keep, keep_dead)).arun(self.database)

    async def _aclean_some(self, *, keep: float) -> bool:
        """Do a batch of it; tell whether there may be more: for who has other things to do."""
        removals = self._to_clean(keep, KEEP_DEAD)
        deleted = [await self.database.arun(partial(one, CLEAN_AT_ONCE)) for one in removals]
        return max(deleted) >= CLEAN_AT_ONCE

    def forget(self, *, idle: float, batch: int = CLEAN_AT_ONCE, within: float = 10.0) -> int:
        """Delete the counters of aggregates that had no event for `idle` seconds.

        Only where no event of theirs is left. Their numbers begin at 1 again; ids do not repeat.
        Write more seconds than any transaction that adds events is open. Batch by batch, for about
        `within` seconds, as `cleanup` does.
        """
        return Cleaning(batch, within, self._to_forget(idle)).run(self.database)

    async def aforget(
        self, *, idle: float, batch: int = CLEAN_AT_ONCE, within: float = 10.0
    ) -> int:
        """Do the same, awaiting."""
        return await Cleaning(batch, within, self._to_forget(idle)).arun(self.database)

    def _to_clean(self, keep: float, keep_dead: float) -> list[Callable[[int], Steps[int]]]:
        ages = (
            (False, check.seconds("keep", keep, zero=True)),
            (True, check.seconds("keep_dead", keep_dead, zero=True)),
        )
        return [
            partial(self._removing, "clean", {"dead": dead, "age": round(age * 1e6)})
            for dead, age in ages
        ]

    def _to_forget(self, idle: float) -> Callable[[int], Steps[int]]:
        age = round(check.seconds("idle", idle) * 1e6)
        return partial(self._removing, "forget", {"age": age})

    def _removing(self, what: str, asked: dict[str, Any], batch: int) -> Steps[int]:
        rows = yield Ask(f"outbox.{what}", {**asked, "outbox": self.name, "most": batch})
        return len(rows)

    # How it stands

    def survey(self) -> dict[str, Any]:
        """Return how many events are pending and dead, and how long the oldest has waited.

        Counted up to 100 000; the oldest is that of those counted.
        """
        return self.database.run(self._survey)

    async def asurvey(self) -> dict[str, Any]:
        """Do the same, awaiting."""
        return await self.database.arun(self._survey)

    def _survey(self) -> Steps[dict[str, Any]]:
        rows = yield Ask("outbox.survey", {"outbox": self.name})
        pending, oldest, dead, blocked = rows[0]
        age = 0.0 if oldest is None else max(0, oldest) / 1e6
        found = {"pending": pending, "oldest_age": age, "dead": dead, "blocked": blocked}
        registry.answered(self, found)
        return found


def _waiting_item(row: tuple[Any, ...]) -> WorkItem:
    return _item(row[1:])  # two columns for its place, and the id


def _item(row: tuple[Any, ...]) -> WorkItem:
    _, id_, state, kind, aggregate, aggregate_id, attempts, error, created, ended = row[:10]
    size, payload, _, now = row[10:]
    error, trace = split_report(error or "")
    return WorkItem(
        id_,
        state,
        kind,
        f"{aggregate} {aggregate_id}",
        None,
        attempts,
        max(0, now - created) / 1e6,
        (now - (created if ended is None else ended)) / 1e6,
        error,
        size,
        bytes(payload),
        () if state == "waiting" else ("retry", "drop"),
        trace,
    )
