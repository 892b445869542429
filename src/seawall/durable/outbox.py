"""Events that are committed with the rows they tell of, and delivered afterwards.

Promises: an event is added in the user's own transaction: committed with it, or never there. In an
aggregate (an order, an account) events have numbers without gaps, in the order of their commits:
the row that counts them is locked from `add` to the end of the transaction, so that another
transaction waits that adds to the same aggregate, and no other. Each event has an id that stays the
same however often it is delivered. Delivering is the work of a `Dispatcher`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol
from uuid import UUID
from weakref import WeakSet

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock, check_clock, current_clock
from seawall.durable._connections import (
    Ask,
    AskText,
    Connection,
    arequire_transaction,
    require_transaction,
)
from seawall.durable._outbox_care import Care
from seawall.durable._outbox_cte import Members, members
from seawall.durable._outbox_events import (
    BlockedAggregate,
    DeadEvent,
    FromRow,
    NewEvent,
    OutboxEvent,
    headers_text,
    new_id,
    payload_bytes,
    refuse_column,
    text,
)
from seawall.durable._outbox_steps import adding
from seawall.durable._sql import Dialect
from seawall.durable.database import Database
from seawall.runtime.mutex import Mutex, survives_fork
from seawall.runtime.stepping import Steps

__all__ = ["BlockedAggregate", "DeadEvent", "FromRow", "NewEvent", "Outbox", "OutboxEvent"]

DEBOUNCE: Final = 0.05
"""Seconds between two notifications of one process: each is a lock that commits wait for."""


class _Wakes(Protocol):
    def wake(self) -> None: ...


TOGETHER: Final = "the event is committed with the rows it tells of"


class Outbox(Care):
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
        registry.enter(self, "outbox", self.name, ask="asurvey", local=False)

    def _begin_afresh(self) -> None:
        self._mutex = Mutex()
        self._announced = float("-inf")
        self._dispatchers: WeakSet[_Wakes] | None = None

    def _after_fork(self) -> None:
        self._begin_afresh()

    def __repr__(self) -> str:
        return f"<Outbox {self.name!r} in {self.database!r}>"

    @property
    def channel(self) -> str:
        """What PostgreSQL's NOTIFY is sent on."""
        return self.database.names.channel(f"outbox.{self.name}")

    # Adding, in the user's transaction

    def add(
        self,
        conn: Any,
        aggregate: str,
        aggregate_id: str | int | UUID,
        event_type: str,
        payload: Any,
        *,
        headers: Mapping[str, str] | None = None,
        notify: bool = False,
    ) -> Any:
        """Add an event in the transaction that `conn` is in; return its id.

        A connection that is awaited returns something to await; `aadd` is the same with a type.
        With `notify`, dispatchers that listen are told when it commits (by this process at most
        every 50 ms: notifications make commits wait for each other).
        """
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        asked = self._joined(conn)
        notes = check.flag("notify", notify)
        return _carry_out(asked, self._adding(asked.dialect, event, notify=notes))

    async def aadd(
        self,
        conn: Any,
        aggregate: str,
        aggregate_id: str | int | UUID,
        event_type: str,
        payload: Any,
        *,
        headers: Mapping[str, str] | None = None,
        notify: bool = False,
    ) -> str:
        """Do the same on a connection that is awaited."""
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        asked = self._joined(conn, awaited=True)
        notes = check.flag("notify", notify)
        added: str = await _acarry_out(asked, self._adding(asked.dialect, event, notify=notes))
        return added

    def add_all(self, conn: Any, events: Iterable[NewEvent], *, notify: bool = False) -> Any:
        """Add several events, in one statement on PostgreSQL; return their ids, or an awaitable."""
        asked = self._joined(conn)
        notes = check.flag("notify", notify)
        return _carry_out(asked, self._adding_all(asked.dialect, _listed(events), notify=notes))

    async def aadd_all(
        self, conn: Any, events: Iterable[NewEvent], *, notify: bool = False
    ) -> list[str]:
        """Do the same on a connection that is awaited."""
        asked = self._joined(conn, awaited=True)
        notes = check.flag("notify", notify)
        steps = self._adding_all(asked.dialect, _listed(events), notify=notes)
        added: list[str] = await _acarry_out(asked, steps)
        return added

    def _joined(self, raw: Any, *, awaited: bool = False) -> Connection:
        """Return a connection of the user's own, which has to be in a transaction."""
        asked = self.database.connection(raw)
        if awaited and not asked.kind.is_async:
            raise TypeError(f"{asked!r} is not awaited: write the name without the a")
        require_transaction(asked, TOGETHER)
        return asked

    def _adding(
        self, dialect: Dialect, event: NewEvent, *, notify: bool, id_: str | None = None
    ) -> Steps[str]:
        arguments = self._arguments(event)
        arguments["id"] = id_ or arguments["id"]
        yield from adding(dialect, arguments)
        if notify:
            yield from self._notifying(dialect)
        number: str = arguments["id"]
        return number

    def _adding_all(
        self, dialect: Dialect, events: list[NewEvent], *, notify: bool, trail: str | None = None
    ) -> Steps[list[str]]:
        """Add events; with a `trail` their ids begin with it."""
        if not events:
            return []
        if dialect == "postgres":
            for event in events:
                for name, value in (("aggregate_id", event[1]), ("payload", event[3])):
                    if isinstance(value, FromRow):
                        refuse_column(name, value)
            told = self.rows_cte(events)
            if trail is not None:
                told.follow(trail)
            yield AskText(f"WITH {told.text}\nSELECT 1", told.arguments)
            ids = told.ids
        else:
            ids = []
            for index, event in enumerate(events):
                id_ = None if trail is None else f"{trail}-{index}"
                number = yield from self._adding(dialect, event, notify=False, id_=id_)
                ids.append(number)
        if notify:
            yield from self._notifying(dialect)
        return ids

    def _notifying(self, dialect: Dialect) -> Steps[None]:
        if dialect == "postgres" and self._may_announce():
            yield Ask("outbox.notify", {"channel": self.channel})

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
        return members(self.name, _listed(events), source, self.max_payload)

    # Telling dispatchers

    def announce(self) -> None:
        """Tell dispatchers that something was committed; other processes at most every 50 ms."""
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
        if self._dispatchers is None:  # most services have theirs in another process
            return
        with self._mutex:
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.wake()

    def _has_dispatcher(self, dispatcher: _Wakes) -> None:
        """Have `wake` wake this one, for as long as it lives."""
        with self._mutex:
            known = self._dispatchers = (
                WeakSet() if self._dispatchers is None else self._dispatchers
            )
            known.add(dispatcher)

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


def _carry_out(asked: Connection, steps: Steps[Any]) -> Any:
    return _acarry_out(asked, steps) if asked.kind.is_async else asked.run(steps)


async def _acarry_out(asked: Connection, steps: Steps[Any]) -> Any:
    await arequire_transaction(asked, TOGETHER)
    return await asked.arun(steps)


def _listed(events: Iterable[NewEvent]) -> list[NewEvent]:
    found = list(check.listed("events", events, "NewEvent('order', '7', 'paid', {})"))
    for event in found:
        if not isinstance(event, NewEvent):
            raise TypeError(f"{event!r}: pass NewEvent(aggregate, aggregate_id, type, payload)")
    return found
