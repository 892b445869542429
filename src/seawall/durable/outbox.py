"""Events that are committed with the rows they tell of, and delivered afterwards.

Promises: an event is added in the user's own transaction: committed with it, or never there. In an
aggregate (an order, an account) events have numbers without gaps, in the order of their commits:
the row that counts them is locked from `add` to the end of the transaction, so that another
transaction waits that adds to the same aggregate, and no other. Each event has an id that stays the
same however often it is delivered. Delivering is the work of a `Dispatcher`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, Final, Protocol
from weakref import WeakSet

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable._connections import Ask, AskText, Connection
from seawall.durable._outbox_cte import Members, members
from seawall.durable._outbox_events import (
    Blocked,
    Dead,
    Event,
    FromRow,
    NewEvent,
    event_of,
    headers_text,
    new_id,
    payload_bytes,
    text,
)
from seawall.durable._outbox_steps import Settled, Taken, adding, fetching, settling
from seawall.durable._sql import LONGEST_NAME, Dialect
from seawall.durable.database import Database
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.stepping import Steps

__all__ = ["Blocked", "Dead", "Event", "FromRow", "NewEvent", "Outbox"]

DEBOUNCE: Final = 0.05
"""Seconds between two notifications of one process: each is a lock that commits wait for."""
MOST_LISTED: Final = 1_000
MOST_SEQUENCE: Final = 2**62
CLEAN_AT_ONCE: Final = 1_000
"""Rows that one transaction deletes."""


class _Wakes(Protocol):
    def wake(self) -> None: ...


class Outbox:
    """Events of one kind of receiver; several outboxes may share a database."""

    def __init__(
        self,
        database: Database,
        name: str = "outbox",
        *,
        max_payload: int = 262_144,
        clock: Clock | None = None,
    ) -> None:
        """Keep events under `name` in `database`, each of up to `max_payload` bytes."""
        if not isinstance(database, Database):
            raise TypeError(f"Outbox({database!r}): pass a Database")
        self.database = database
        self.name = text("name", name)
        self.max_payload = check.count("max_payload", max_payload, maximum=2**26)
        self.clock = current_clock() if clock is None else check_clock(clock)
        self._begin_afresh()
        survives_fork(self)

    def _begin_afresh(self) -> None:
        self._mutex = Mutex()
        self._announced = float("-inf")
        self._dispatchers: WeakSet[_Wakes] = WeakSet()

    def _after_fork(self) -> None:
        self._begin_afresh()

    def __repr__(self) -> str:
        return f"<Outbox {self.name!r} in {self.database!r}>"

    @property
    def channel(self) -> str:
        """What PostgreSQL's NOTIFY is sent on."""
        channel = self.database.names.channel(f"outbox.{self.name}")
        if len(channel.encode()) < LONGEST_NAME:
            return channel
        return "seawall." + blake2b(channel.encode(), digest_size=20).hexdigest()

    # Adding, in the user's transaction

    def add(
        self,
        connection: Any,
        aggregate: str,
        aggregate_id: str,
        event_type: str,
        payload: Any,
        *,
        headers: Mapping[str, str] | None = None,
        notify: bool = False,
    ) -> Any:
        """Add an event in the transaction that `connection` is in; return its id.

        A connection that is awaited returns something to await; `aadd` is the same with a type.
        With `notify`, dispatchers that listen are told when it commits (by this process at most
        every 50 ms: notifications make commits wait for each other).
        """
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        asked = self.database.connection(connection)
        notes = check.flag("notify", notify)
        return self._carry_out(asked, self._adding(asked.dialect, event, notify=notes))

    async def aadd(
        self,
        connection: Any,
        aggregate: str,
        aggregate_id: str,
        event_type: str,
        payload: Any,
        *,
        headers: Mapping[str, str] | None = None,
        notify: bool = False,
    ) -> str:
        """Do the same on a connection that is awaited."""
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        asked = self.database.connection(connection)
        notes = check.flag("notify", notify)
        return await asked.arun(self._adding(asked.dialect, event, notify=notes))

    def add_all(self, connection: Any, events: Iterable[NewEvent]) -> Any:
        """Add several events, in one statement on PostgreSQL; return their ids, or an awaitable."""
        asked = self.database.connection(connection)
        return self._carry_out(asked, self._adding_all(asked.dialect, list(events)))

    def _carry_out(self, asked: Connection, steps: Steps[Any]) -> Any:
        return asked.arun(steps) if asked.kind.is_async else asked.run(steps)

    def _adding(self, dialect: Dialect, event: NewEvent, *, notify: bool) -> Steps[str]:
        arguments = self._arguments(event)
        yield from adding(dialect, arguments)
        if notify and dialect == "postgres" and self._may_announce():
            yield Ask("outbox.notify", {"channel": self.channel})
        number: str = arguments["id"]
        return number

    def _adding_all(self, dialect: Dialect, events: list[NewEvent]) -> Steps[list[str]]:
        if not events:
            return []
        if dialect == "postgres":
            told = self.rows_cte(events)
            yield AskText(f"WITH {told.text}\nSELECT 1", told.arguments)
            return told.ids
        ids = []
        for event in events:
            number = yield from self._adding(dialect, event, notify=False)
            ids.append(number)
        return ids

    def _arguments(self, event: NewEvent) -> dict[str, Any]:
        return {
            "outbox": self.name,
            "aggregate": text("aggregate", event.aggregate),
            "aggregate_id": text("aggregate_id", event.aggregate_id),
            "id": new_id(),
            "type": text("event_type", event.type),
            "payload": payload_bytes(event.payload, self.max_payload),
            "headers": headers_text(event.headers),
        }

    def rows_cte(self, events: Iterable[NewEvent], *, source: str | None = None) -> Members:
        """Return the members of a WITH clause that add `events`: (text, arguments).

        For a statement that writes the business row, too (PostgreSQL). The text is as in `sql/`.
        With `source`, the name of the member that returns the business row, events are added if
        there is one, and an event's `aggregate_id` or `payload` may be `FromRow("id")`: a column
        of it.
        """
        return members(self.name, list(events), source, self.max_payload)

    # Telling dispatchers

    def announce(self) -> None:
        """Tell dispatchers that something was committed; more often than every 50 ms, it waits."""
        self.wake()
        if self.database.dialect == "postgres" and self._may_announce():
            self.database.run(self._announcing)

    async def aannounce(self) -> None:
        """Do the same, awaiting."""
        self.wake()
        if self.database.dialect == "postgres" and self._may_announce():
            await self.database.arun(self._announcing)

    def wake(self) -> None:
        """Have the dispatchers of this process look at once."""
        with self._mutex:
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.wake()

    def has_dispatcher(self, dispatcher: _Wakes) -> None:
        """Have `wake` wake this one, for as long as it lives."""
        with self._mutex:
            self._dispatchers.add(dispatcher)

    def _announcing(self) -> Steps[None]:
        yield Ask("outbox.notify", {"channel": self.channel})

    def _may_announce(self) -> bool:
        """Tell whether it is time for another notification, and count it as sent.

        What comes too soon after one is seen by whom that one has woken: they look often then.
        """
        now = self.clock.now()
        with self._mutex:
            if now - self._announced < DEBOUNCE:
                return False
            self._announced = now
            return True

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
            taken = [Taken(number, epoch, attempts, 0, MOST_SEQUENCE)]
            lanes = yield from fetching(dialect, self.name, taken, 0)
            lane = lanes[0]
            action = "skip" if lane.events else "done"
            ended = Settled(lane, 0, action, attempts, 0, error or "")
            yield from settling(dialect, self.name, owner, [ended], keep=False)
        return bool(rows)

    # Keeping it small

    def clean(self, *, keep: float = 0.0, keep_dead: float = 30 * 86_400.0) -> int:
        """Delete delivered events older than `keep` seconds, dead ones older than `keep_dead`."""
        return sum(self._batches(self.database.run, self._clean_arguments(keep, keep_dead)))

    async def aclean(self, *, keep: float = 0.0, keep_dead: float = 30 * 86_400.0) -> int:
        """Do the same, awaiting."""
        return await self._abatches(self._clean_arguments(keep, keep_dead))

    def forget(self, *, idle: float) -> int:
        """Delete the counters of aggregates that had no event for `idle` seconds.

        Only where no event of theirs is left. Their numbers begin at 1 again; ids do not repeat.
        """
        return sum(self._batches(self.database.run, self._forget_arguments(idle)))

    async def aforget(self, *, idle: float) -> int:
        """Do the same, awaiting."""
        return await self._abatches(self._forget_arguments(idle))

    def _clean_arguments(self, keep: float, keep_dead: float) -> list[Ask]:
        ages = (
            (False, check.seconds("keep", keep, zero=True)),
            (True, check.seconds("keep_dead", keep_dead, zero=True)),
        )
        bound = {"outbox": self.name, "most": CLEAN_AT_ONCE}
        return [
            Ask("outbox.clean", {**bound, "dead": dead, "age": round(age * 1e6)})
            for dead, age in ages
        ]

    def _forget_arguments(self, idle: float) -> list[Ask]:
        age = round(check.seconds("idle", idle) * 1e6)
        return [Ask("outbox.forget", {"outbox": self.name, "most": CLEAN_AT_ONCE, "age": age})]

    def _batches(self, run: Any, asks: list[Ask]) -> Iterable[int]:
        for asked in asks:
            while True:
                deleted: int = run(partial(_counted, asked))
                yield deleted
                if deleted < CLEAN_AT_ONCE:
                    break

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
