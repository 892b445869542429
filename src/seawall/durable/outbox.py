"""Events that are committed together with the rows they describe, and delivered afterwards.

Promises:

- An event is added in the user's own transaction: it is committed with it or never exists.
- Within an aggregate (an order, an account) events have sequence numbers without gaps, in commit
  order. For that, the row of the counter is locked from `add` to the end of the transaction: other
  transactions that add to the same aggregate wait, all others do not.
- Each event has an id, which is the same for every delivery.

A `Dispatcher` delivers the events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol
from uuid import UUID
from weakref import WeakSet

from seawall import _checks as check
from seawall import registry
from seawall._forks import survives_fork
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
from seawall.runtime.mutex import Mutex
from seawall.runtime.stepping import Steps

__all__ = ["BlockedAggregate", "DeadEvent", "FromRow", "NewEvent", "Outbox", "OutboxEvent"]

DEBOUNCE: Final = 0.05
"""Minimum seconds between two notifications of one process: each takes a lock at commit."""


class _Wakes(Protocol):
    def wake(self) -> None: ...


TOGETHER: Final = "the event is committed with the rows it tells of"


class Outbox(Care):
    """The events for one kind of receiver; several outboxes may share a database."""

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
        """The PostgreSQL NOTIFY channel."""
        return self.database.names.channel(f"outbox.{self.name}")

    # Adding events, in the user's transaction

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
        """Add an event in the current transaction of `conn`; return its id.

        For an async connection it returns an awaitable; `aadd` is the same with a precise type.
        With `notify`, listening dispatchers are notified at the commit (at most every 50 ms by this
        process, because notifications serialise commits).
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
        """Async twin of `add`."""
        event = NewEvent(aggregate, aggregate_id, event_type, payload, headers)
        asked = self._joined(conn, awaited=True)
        notes = check.flag("notify", notify)
        added: str = await _acarry_out(asked, self._adding(asked.dialect, event, notify=notes))
        return added

    def add_all(self, conn: Any, events: Iterable[NewEvent], *, notify: bool = False) -> Any:
        """Add several events, on PostgreSQL in one statement; return their ids or an awaitable."""
        asked = self._joined(conn)
        notes = check.flag("notify", notify)
        return _carry_out(asked, self._adding_all(asked.dialect, _listed(events), notify=notes))

    async def aadd_all(
        self, conn: Any, events: Iterable[NewEvent], *, notify: bool = False
    ) -> list[str]:
        """Async twin of `add_all`."""
        asked = self._joined(conn, awaited=True)
        notes = check.flag("notify", notify)
        steps = self._adding_all(asked.dialect, _listed(events), notify=notes)
        added: list[str] = await _acarry_out(asked, steps)
        return added

    def _joined(self, raw: Any, *, awaited: bool = False) -> Connection:
        """Return the user's own connection, which must be in a transaction."""
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
        """Add events; if there is a `trail`, their ids start with it."""
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

        For a statement that also writes the business row (PostgreSQL). The text has the form of
        `sql/`. `source` names the member that returns the business row. Events are then added only
        if there is such a row, and an event's `aggregate_id` or `payload` may be a column of it, as
        `FromRow("id")`.
        """
        return members(self.name, _listed(events), source, self.max_payload)

    # Waking dispatchers

    def announce(self) -> None:
        """Wake dispatchers after a commit; those of other processes at most every 50 ms."""
        self.wake()
        if self.database.dialect == "postgres" and self._may_announce():
            self.database.run(self._announcing)

    async def aannounce(self) -> None:
        """Async twin of `announce`."""
        self.wake()
        if self.database.dialect == "postgres" and self._may_announce():
            await self.database.arun(self._announcing)

    def wake(self) -> None:
        """Wake the dispatchers of this process, so that they look at once."""
        if self._dispatchers is None:  # most services run them in another process
            return
        with self._mutex:
            dispatchers = list(self._dispatchers)
        for dispatcher in dispatchers:
            dispatcher.wake()

    def _has_dispatcher(self, dispatcher: _Wakes) -> None:
        """Register a dispatcher for `wake`, for as long as it lives."""
        with self._mutex:
            known = self._dispatchers = (
                WeakSet() if self._dispatchers is None else self._dispatchers
            )
            known.add(dispatcher)

    def _announcing(self) -> Steps[None]:
        yield Ask("outbox.notify", {"channel": self.channel})

    def _may_announce(self) -> bool:
        """Return whether another notification is allowed now, and count it as sent.

        An event that follows a notification closely is found by the dispatchers that it has woken,
        because they poll often then.
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
