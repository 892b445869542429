"""Looking after an outbox: what went wrong, what may go, how it stands."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from seawall import _checks as check
from seawall.durable._connections import Ask
from seawall.durable._outbox_events import Blocked, Dead, event_of, new_id, text
from seawall.durable._outbox_steps import Settled, Taken, adding, fetching, settling
from seawall.durable.database import Database
from seawall.runtime.stepping import Steps

MOST_LISTED: Final = 1_000
CLEAN_AT_ONCE: Final = 1_000
"""Rows that one transaction deletes."""
KEEP_DEAD: Final = 30 * 86_400.0


class Care:
    """What somebody asks of an outbox who looks after it."""

    database: Database
    name: str

    # What went wrong

    def dead(self, most: int = 100) -> list[Dead]:
        """Return events that were put aside, the oldest first."""
        return self.database.run(lambda: self._dead(most))

    async def adead(self, most: int = 100) -> list[Dead]:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._dead(most))

    def _dead(self, most: int) -> Steps[list[Dead]]:
        bound = check.count("most", most, maximum=MOST_LISTED)
        rows = yield Ask("outbox.dead", {"outbox": self.name, "most": bound})
        return [Dead(event_of(row[:8]), row[8], row[9] or "", row[10] / 1e6) for row in rows]

    def blocked(self, most: int = 100) -> list[Blocked]:
        """Return the aggregates that wait for `unblock`."""
        return self.database.run(lambda: self._blocked(most))

    async def ablocked(self, most: int = 100) -> list[Blocked]:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._blocked(most))

    def _blocked(self, most: int) -> Steps[list[Blocked]]:
        bound = check.count("most", most, maximum=MOST_LISTED)
        rows = yield Ask("outbox.blocked", {"outbox": self.name, "most": bound})
        return [
            Blocked(aggregate, aggregate_id, attempts, error or "")
            for aggregate, aggregate_id, attempts, error in rows
        ]

    def retry(self, event_id: str) -> bool:
        """Put a dead event back, behind its aggregate's others, with its id; False if unknown."""
        return self.database.run(lambda: self._retry(event_id))

    async def aretry(self, event_id: str) -> bool:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._retry(event_id))

    def _retry(self, event_id: str) -> Steps[bool]:
        given = {"outbox": self.name, "id": text("event_id", event_id)}
        rows = yield Ask("outbox.exhume", given)
        if not rows:
            return False
        names = ("aggregate", "aggregate_id", "type", "payload", "headers")
        arguments = {**given, **dict(zip(names, rows[0], strict=True))}
        arguments["payload"] = bytes(arguments["payload"])
        yield from adding(self.database.dialect, arguments)
        return True

    def drop(self, event_id: str) -> bool:
        """Delete a dead event for good; False if there is none of that id."""
        return self.database.run(lambda: self._drop(event_id))

    async def adrop(self, event_id: str) -> bool:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._drop(event_id))

    def _drop(self, event_id: str) -> Steps[bool]:
        given = {"outbox": self.name, "id": text("event_id", event_id)}
        return bool((yield Ask("outbox.exhume", given)))

    def unblock(self, aggregate: str, aggregate_id: str, *, skip: bool = False) -> bool:
        """Let a blocked aggregate go on; with `skip` without the event that blocks it.

        That event is then dead: see `dead()` and `retry()`. False, if it is not blocked.
        """
        return self.database.run(lambda: self._unblock(aggregate, aggregate_id, skip=skip))

    async def aunblock(self, aggregate: str, aggregate_id: str, *, skip: bool = False) -> bool:
        """Do the same, awaiting."""
        return await self.database.arun(lambda: self._unblock(aggregate, aggregate_id, skip=skip))

    def _unblock(self, aggregate: str, aggregate_id: str, *, skip: bool) -> Steps[bool]:
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

    def clean(self, *, keep: float = 0.0, keep_dead: float = KEEP_DEAD) -> int:
        """Delete delivered events older than `keep` seconds, dead ones older than `keep_dead`."""
        return self._batches(self._to_clean(keep, keep_dead))

    async def aclean(self, *, keep: float = 0.0, keep_dead: float = KEEP_DEAD) -> int:
        """Do the same, awaiting."""
        return await self._abatches(self._to_clean(keep, keep_dead))

    async def aclean_some(self, *, keep: float) -> bool:
        """Do a batch of it; tell whether there may be more: for who has other things to do."""
        asks = self._to_clean(keep, KEEP_DEAD)
        deleted = [await self.database.arun(partial(_counted, asked)) for asked in asks]
        return max(deleted) >= CLEAN_AT_ONCE

    def forget(self, *, idle: float) -> int:
        """Delete the counters of aggregates that had no event for `idle` seconds.

        Only where no event of theirs is left. Their numbers begin at 1 again; ids do not repeat.
        Write more seconds than any transaction that adds events is open.
        """
        return self._batches(self._to_forget(idle))

    async def aforget(self, *, idle: float) -> int:
        """Do the same, awaiting."""
        return await self._abatches(self._to_forget(idle))

    def _to_clean(self, keep: float, keep_dead: float) -> list[Ask]:
        ages = (
            (False, check.seconds("keep", keep, zero=True)),
            (True, check.seconds("keep_dead", keep_dead, zero=True)),
        )
        bound = {"outbox": self.name, "most": CLEAN_AT_ONCE}
        return [
            Ask("outbox.clean", {**bound, "dead": dead, "age": round(age * 1e6)})
            for dead, age in ages
        ]

    def _to_forget(self, idle: float) -> list[Ask]:
        age = round(check.seconds("idle", idle) * 1e6)
        return [Ask("outbox.forget", {"outbox": self.name, "most": CLEAN_AT_ONCE, "age": age})]

    def _batches(self, asks: list[Ask]) -> int:
        total = 0
        for asked in asks:
            deleted = CLEAN_AT_ONCE
            while deleted >= CLEAN_AT_ONCE:
                deleted = self.database.run(partial(_counted, asked))
                total += deleted
        return total

    async def _abatches(self, asks: list[Ask]) -> int:
        total = 0
        for asked in asks:
            deleted = CLEAN_AT_ONCE
            while deleted >= CLEAN_AT_ONCE:
                deleted = await self.database.arun(partial(_counted, asked))
                total += deleted
        return total

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
        return {"pending": pending, "oldest_age": age, "dead": dead, "blocked": blocked}


def _counted(asked: Ask) -> Steps[int]:
    rows = yield asked
    return len(rows)
